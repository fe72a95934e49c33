"""Plans that are decided by hand, to be run or simulated: no budget binds them."""

from collections.abc import Sequence
from typing import TypeVar

from protrain_plan.planning.model.problem import Problem
from protrain_plan.simulation.timeline import simulate
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import (
    Activations,
    Budgets,
    Placement,
    Plan,
    Prediction,
    Schedule,
    StepSettings,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.writer import fingerprint

AMPLE = 1 << 40
"""Bytes of a budget that nothing exceeds."""

Decision = TypeVar("Decision")


def decided(
    problem: Problem,
    index: int,
    activations: Sequence[Activations],
    states: Placement,
    schedule: Schedule,
) -> UnitPlan:
    """The first of `activations` that the unit can take, and the placement where it can."""

    def first(wanted: Sequence[Decision], open_to_unit: Sequence[Decision]) -> Decision:
        return next((one for one in wanted if one in open_to_unit), open_to_unit[0])

    options = problem.options[index]
    return problem.unit_plan(
        index,
        first(activations, [option.decision for option in options.activations]),
        first((states,), [option.decision for option in options.states]),
        schedule,
    )


def plan_of_units(problem: Problem, units: Sequence[UnitPlan]) -> Plan:
    """A plan of `problem` with these decisions, and what it is predicted to take."""
    profile = problem.profile
    program = problem.program(units)
    seconds = simulate(program).step_seconds
    peak = max(slot.total for slot in device_bytes(program))
    context = profile.hardware.device.context_bytes
    return Plan(
        workload=profile.workload,
        hardware=profile.hardware.name,
        optimizer=profile.optimizer.name,
        profile_fingerprint=fingerprint(profile),
        model_fingerprint=profile.model_fingerprint,
        exact=True,
        budgets=Budgets(device=AMPLE, host=0, disk=AMPLE),
        prediction=Prediction(
            step_seconds=seconds,
            lower_bound_seconds=seconds,
            peak_bytes=TierBytes(device=peak, context=context, host=0, disk=0),
        ),
        units=tuple(units),
        settings=StepSettings(
            piece_bytes=problem.settings.piece_bytes,
            updates=problem.settings.updates,
            overlap_steps=problem.settings.overlap_steps,
        ),
    )
