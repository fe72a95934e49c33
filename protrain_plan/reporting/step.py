"""A plan with its profile, and the step that the simulator predicts of them."""

from dataclasses import dataclass
from pathlib import Path

from protrain_plan.errors import ProtrainError
from protrain_plan.program import Program
from protrain_plan.records import fingerprint, read_plan, read_profile
from protrain_plan.records.plan import (
    Persistent,
    Plan,
    Swap,
    SwapInput,
    UnitPlan,
)
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.simulation.ranks import Group, group_on, profile_of_rank
from protrain_plan.simulation.report import StepReport, report
from protrain_plan.simulation.sizes import activation_bytes, compile_units
from protrain_plan.simulation.timeline import Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A simulated step; with micro-batches, the last of them and the update after it."""

    plan: Plan
    profile: Profile
    program: Program
    timeline: Timeline
    report: StepReport

    @property
    def unit_names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.plan.units)


def simulated(plan: Plan, profile: Profile) -> Step:
    """The step of a plan whose units are those of the profile; of one of its devices.

    ProtrainError where the profile's machine does not say what joins several.
    """
    group = Group.of(plan)
    profile = profile_of_rank(profile, group)
    program = compile_units(
        plan.units,
        profile,
        piece_bytes=plan.piece_bytes,
        updates=plan.updates,
        micro_batches=plan.micro_batches,
        num_devices=group.num_devices,
        num_replicas=group.num_replicas,
        num_nodes=group.num_nodes,
    )
    return Step(
        plan=plan,
        profile=profile,
        program=program,
        timeline=simulate(program, plan.units, profile),
        report=report(program, plan.units, profile),
    )


def read_step(plan_path: Path, profile_path: Path | None = None) -> Step:
    """The step of the plan in a file; its profile is by default the profile.yaml beside it.

    ProtrainError where either file is no such record, or where they are not of one another.
    """
    plan = read_plan(plan_path)
    if profile_path is None:
        profile_path = plan_path.parent / "profile.yaml"
        if not profile_path.exists():
            raise ProtrainError(
                "the profile that this plan was made from is not beside it as profile.yaml",
                source=str(plan_path),
                fix="name it with --profile",
            )
    profile = read_profile(profile_path)
    if (found := fingerprint(profile)) != plan.profile_fingerprint:
        raise ProtrainError(
            f"not the profile that {plan_path} was made from: this one is {found},"
            f" that one was {plan.profile_fingerprint}",
            source=str(profile_path),
            fix="name the plan's own profile with --profile, or plan again",
        )
    _check_group(plan, profile, str(plan_path))
    _check_units(plan, profile, str(plan_path))
    step = simulated(plan, profile)
    if not step.report.step_seconds:
        raise ProtrainError("a step that takes no time cannot be shown", source=str(plan_path))
    return step


def _check_group(plan: Plan, profile: Profile, source: str) -> None:
    try:
        asked = {"num_nodes": plan.num_nodes, "num_replicas": plan.num_replicas}
        group_on(profile.hardware, plan.num_devices, **asked)
    except ProtrainError as error:
        raise ProtrainError(error.message, source=source, key="num_devices") from None
    for index, unit in enumerate(plan.units):
        states = unit.states
        if plan.num_devices > 1 or isinstance(states, Persistent):
            continue
        if states.tier == "device":
            problem = "states are shared over several devices, and the plan is for one"
            raise ProtrainError(problem, source=source, key=_key(index))


def _check_units(plan: Plan, profile: Profile, source: str) -> None:
    """A plan may be edited by hand: it has to decide on what the profile knows."""
    known = [unit.name for unit in profile.units]
    for index, name in enumerate(known):
        if index >= len(plan.units) or plan.units[index].name != name:
            raise ProtrainError(f"expected the unit {name!r} here", source=source, key=_key(index))
    if len(plan.units) > len(known):
        raise ProtrainError(
            "the profile has no such unit", source=source, key=_key(len(known)), fix="remove it"
        )
    tiers = {tier.name for tier in profile.hardware.tiers}
    for index, (decided, unit) in enumerate(zip(plan.units, profile.units, strict=True)):
        for tier in _tiers(decided) - tiers:
            raise ProtrainError(
                f"{profile.hardware.name} has no {tier} tier", source=source, key=_key(index)
            )
        if not _has_form(decided, unit):
            raise ProtrainError(
                "the profile has no costs of these activations",
                source=source,
                key=f"{_key(index)}.activations",
                fix="decide on " + " or ".join(dict.fromkeys(_known_forms(unit))),
            )


def _key(index: int) -> str:
    return f"units[{index}]"


def _tiers(decided: UnitPlan) -> set[str]:
    tiers: set[str] = set()
    if isinstance(decided.activations, Swap | SwapInput):
        tiers.add(decided.activations.tier)
    if not isinstance(decided.states, Persistent) and decided.states.tier != "device":
        tiers.add(decided.states.tier)
    return tiers


def _has_form(decided: UnitPlan, unit: Unit) -> bool:
    try:
        activation_bytes(decided.activations, unit)
    except KeyError:
        return False
    return True


def _known_forms(unit: Unit) -> list[str]:
    names = {"keep": "keep", "full": "recompute"}
    return [names.get(cost.form, f"recompute {cost.form}") for cost in unit.forms]
