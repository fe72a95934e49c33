"""The bytes and seconds of a plan's decisions, for the profile that they were made from or another.

The same functions as the planner's: what a plan records is what they say.
"""

from dataclasses import dataclass, replace

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.judging import step_seconds
from protrain_plan.planning.problem import Problem
from protrain_plan.records.hardware import Hardware, TierName
from protrain_plan.records.plan import (
    Budgets,
    Buffer,
    Keep,
    Offload,
    Persistent,
    Plan,
    Recompute,
    Swap,
    SwapInput,
    TierBytes,
    UnitPlan,
)
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.graph import waits_in_a_circle
from protrain_plan.simulation.memory import device_bytes
from protrain_plan.simulation.ranks import Group, group_on
from protrain_plan.simulation.tiers import tier_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a step takes: bytes of each tier at its peak, and seconds."""

    peak_bytes: TierBytes
    step_seconds: float

    @property
    def device(self) -> int:
        """All that the process takes of the device, in bytes."""
        return self.peak_bytes.on_device


def problem_of(plan: Plan, profile: Profile, budgets: Budgets | None = None) -> Problem:
    """The planning problem that the plan answers, within its own budgets or other ones."""
    return Problem.of(
        profile,
        budgets or plan.budgets,
        piece_bytes=plan.piece_bytes,
        updates=plan.updates,
        micro_batches=plan.micro_batches,
        group=Group.of(plan),
    )


def predicted(plan: Plan, profile: Profile) -> Predicted:
    """What the plan's decisions take; its units are those of the profile (see `misfit`)."""
    problem = problem_of(plan, profile)
    profile = problem.profile
    slots = device_bytes(problem.program(plan.units), plan.units, profile)
    there = {tier.name for tier in profile.hardware.tiers}

    def below(tier: TierName) -> int:
        return tier_bytes(tier, plan.units, profile, problem.settings) if tier in there else 0

    return Predicted(
        peak_bytes=TierBytes(
            device=max(slot.total for slot in slots),
            context=profile.hardware.device.context_bytes,
            allocator=profile.hardware.device.allocator_bytes,
            host=below("host"),
            disk=below("disk"),
        ),
        step_seconds=step_seconds(problem, plan.units)[0],
    )


def on_machine(profile: Profile, machine: Hardware) -> Profile:
    """The profile with another machine's memory and links; seconds of compute stay as they are."""
    return replace(profile, hardware=machine)


def circle(plan: Plan, profile: Profile) -> list[str]:
    """The moves and slots of the plan's programme that wait for each other; none: it can run."""
    return waits_in_a_circle(problem_of(plan, profile).program(plan.units))


def not_joined(plan: Plan, hardware: Hardware) -> str | None:
    """Why a machine's devices cannot be the plan's group; None where they can."""
    group = Group.of(plan)
    try:
        group_on(
            hardware,
            group.num_devices,
            num_nodes=group.num_nodes,
            num_replicas=group.num_replicas,
        )
    except ProtrainError as error:
        return error.message
    return None


def misfit(plan: Plan, profile: Profile) -> str | None:
    """Why the plan's units are not decisions about the profile's, in words; None where they are."""
    planned, there = [u.name for u in plan.units], [u.name for u in profile.units]
    if planned != there:
        missing = [name for name in there if name not in planned]
        strange = [name for name in planned if name not in there]
        if missing:
            return f"the plan decides nothing for {missing[0]}"
        return f"{strange[0]} is not in the profile" if strange else "the units' order differs"
    if (reason := not_joined(plan, profile.hardware)) is not None:
        return reason
    try:
        problem = problem_of(plan, profile)
    except ProtrainError as error:
        return error.message
    for index, (unit, options) in enumerate(zip(plan.units, problem.options, strict=True)):
        if all(option.decision != unit.activations for option in options.activations):
            return f"{unit.name} cannot do this with its activations"
        if all(option.decision != unit.states for option in options.states):
            stays = options.unit.stays
            reason = f": they stay on the device ({stays})" if stays else ""
            return f"{unit.name} cannot have its states there{reason}"
        described = problem.unit_plan(index, unit.activations, unit.states, unit.schedule)
        if described != unit:
            return f"{unit.name} is described otherwise in the profile"
    return None


def tiers_used(plan: Plan) -> tuple[TierName, ...]:
    """The tiers below the device that the plan's decisions name, the nearer first."""
    used = {tier for unit in plan.units for tier in _tiers(unit)}
    names: tuple[TierName, ...] = ("host", "disk")
    return tuple(name for name in names if name in used)


def _tiers(unit: UnitPlan) -> list[TierName]:
    tiers: list[TierName] = []
    match unit.activations:
        case Swap(tier=tier) | SwapInput(tier=tier):
            tiers.append(tier)
        case Keep() | Recompute():
            pass
    match unit.states:
        case Persistent():
            pass
        case Offload() | Buffer() as states if states.tier != "device":
            tiers.append(states.tier)
        case _:
            pass
    return tiers
