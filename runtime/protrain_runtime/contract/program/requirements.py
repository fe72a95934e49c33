"""Requirements of placements on the step, for planner, pins, compiler and runtime."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.decisions import states_text
from protrain_runtime.contract.records.plan import (
    OPTIMIZER_IN_BACKWARD,
    Placement,
    Plan,
    StepSettings,
    UnitPlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A condition on the step for one kind of placement.

    of     whether a placement is of that kind
    holds  whether the step allows that placement
    words  the steps that do, to follow "that is for"
    fix    for the author of the plan
    """

    of: Callable[[Placement], bool]
    holds: Callable[[StepSettings], bool]
    words: str
    fix: str


REQUIREMENTS = (
    # Clipping waits for the norm of all gradients; several micro-batches' gradients stay until the
    # last one anyway; ranks sum them.
    Requirement(
        of=lambda states: states == OPTIMIZER_IN_BACKWARD,
        holds=lambda step: step.updates == "in backward" and step.is_single,
        words="updates in backward, with one micro-batch, on one device",
        fix="make it persistent",
    ),
    # Micro-batches follow, or ranks sum their gradients.
    Requirement(
        of=lambda states: states.speculate,
        holds=lambda step: step.updates == "after backward" and step.is_single,
        words="updates after backward (--clip), with one micro-batch, on one device",
        fix="do not speculate",
    ),
    Requirement(
        of=lambda states: states.tier == "device",
        holds=lambda step: step.group.num_devices > 1,
        words="several devices, which share states",
        fix="make it persistent, or plan with --num-devices",
    ),
    Requirement(
        of=lambda states: states.common_copy,
        holds=lambda step: step.group.num_devices > 1,
        words="several devices, of which those of a node fetch from one copy",
        fix="leave the common copy out, or plan with --num-devices",
    ),
    # On several devices a rank's shard of a group is one range of one store.
    Requirement(
        of=lambda states: states.on_disk > 0,
        holds=lambda step: step.group.num_devices == 1,
        words="one device",
        fix="leave out what is on disk",
    ),
)


def unmet(states: Placement, step: StepSettings) -> Requirement | None:
    """The first unmet requirement of a placement; None if it is allowed."""
    found = (one for one in REQUIREMENTS if one.of(states) and not one.holds(step))
    return next(found, None)


def check_step(units: Sequence[UnitPlan], step: StepSettings) -> None:
    """ProtrainError if the step excludes a placement of its units, or overlaps."""
    for states in dict.fromkeys(unit.states for unit in units):
        if missing := unmet(states, step):
            index = [unit.states for unit in units].index(states)
            raise ProtrainError(
                f"{units[index].name} cannot take {states_text(states)!r}: that is for"
                f" {missing.words}",
                key=f"units[{index}].states",
                fix=missing.fix,
            )
    late = [unit.schedule.update_late for unit in units]
    if any(late) and not step.overlap_steps:
        raise ProtrainError(
            f"{units[late.index(True)].name} cannot be updated late: steps do not overlap",
            key=f"units[{late.index(True)}].update_late",
            fix="set it to false, or overlap_steps to true",
        )
    if step.overlap_steps and not step.is_single:
        raise ProtrainError(
            "steps cannot overlap: that is for one micro-batch, on one device",
            key="settings.overlap_steps",
            fix="set it to false",
        )


def refuse_pipeline(plan: Plan) -> None:
    """ProtrainError for a pipeline plan: one process trains all units here."""
    if plan.pipeline is not None:
        raise ProtrainError(
            f"the plan is of a pipeline with {plan.num_stages} stages, and one stage is"
            " trained here",
            key="pipeline",
            fix="plan --stages 1, or hand its cuts to a trainer of pipelines: protrain export",
        )
