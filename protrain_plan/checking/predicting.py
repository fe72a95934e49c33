"""The bytes and seconds of a plan's decisions, for the profile that they were made from or another.

The same functions as the planner's: what a plan records is what they say.
"""

from dataclasses import dataclass, replace
from typing import get_args

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.model.problem import misfit as problem_misfit
from protrain_plan.planning.search.evaluation import step_seconds
from protrain_plan.records.hardware import Hardware, TierName
from protrain_plan.records.plan import Plan, TierBytes
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a step takes: bytes of each tier at its peak, and seconds."""

    peak_bytes: TierBytes
    step_seconds: float

    @property
    def device(self) -> int:
        """All that the process takes of the device, in bytes."""
        return self.peak_bytes.on_device


def predicted(plan: Plan, profile: Profile) -> Predicted:
    """What the plan's decisions take; its units are those of the profile (see `misfit`)."""
    problem = Problem.of_plan(plan, profile)
    return Predicted(
        peak_bytes=peak_bytes(problem.program(plan.units)),
        step_seconds=step_seconds(problem, plan.units)[0],
    )


def on_machine(profile: Profile, machine: Hardware) -> Profile:
    """The profile with another machine's memory and links; seconds of compute stay as they are."""
    return replace(profile, hardware=machine)


def waits_ahead(plan: Plan, profile: Profile) -> list[str]:
    """The moves that wait for ones submitted later, or are waited for before they are submitted.

    None: a programme that waits for earlier moves alone can go on at every moment.
    """
    program = Problem.of_plan(plan, profile).program(plan.units)
    submitted: set[int] = set()
    found: list[int] = []
    for slot in program.slots:
        for waits, then in ((slot.drained, slot.submit), (slot.ready, slot.finish)):
            found += [number for number in waits if number not in submitted]
            for number in then:
                found += [number] * (not submitted.issuperset(program.moves[number].after))
                submitted.add(number)
    return [program.move_name(number) for number in found]


def misfit(plan: Plan, profile: Profile) -> str | None:
    """Why the plan's units are not decisions about the profile's, in words; None where they are."""
    if (found := problem_misfit(plan, profile)) is not None:
        return found.problem
    problem = Problem.of_plan(plan, profile)
    for index, unit in enumerate(plan.units):
        described = problem.unit_plan(index, unit.activations, unit.states, unit.schedule)
        if described != unit:
            return f"{unit.name} is described otherwise in the profile"
    try:
        problem.program(plan.units)
    except ProtrainError as error:
        return error.message
    return None


def tiers_used(plan: Plan) -> tuple[TierName, ...]:
    """The tiers below the device that the plan's decisions name, the nearer first."""
    decisions = [one for unit in plan.units for one in (unit.activations, unit.states)]
    used = {getattr(decision, "tier", None) for decision in decisions}
    return tuple(name for name in get_args(TierName) if name in used)
