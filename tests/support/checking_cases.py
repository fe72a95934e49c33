"""Committed plans for the tests of checking: written by hand, so that no search decides them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from protrain_plan.checking.plan_files import search
from protrain_plan.checking.plan_on_machine import predicted
from protrain_plan.checking.reestimate import (
    Broken,
    Estimate,
    Today,
    Unavailable,
    changed_keys,
    missing,
    question_of,
    reestimated,
    said,
)
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.profiling.tally import Tally
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import write_plan, write_profile
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    ALONE,
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Budgets,
    DeviceGroup,
    Placement,
    Plan,
    Prediction,
    Schedule,
    StepSettings,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import MB, cpu, decoder, drafted

AssertGolden = Callable[[str | Path, str], None]
"""The fixture `assert_golden`: a golden file's path, and the text that it should hold."""

PROFILE = decoder(
    replace(cpu(), name="box"),
    blocks=4,
    block_parameters=20 * MB,
    embedding_parameters=10 * MB,
    kept=100 * MB,
)
BUDGETS = Budgets(device=1500 * MB, host=0, disk=10**10)


def offloading(
    profile: Profile = PROFILE, budgets: Budgets = BUDGETS, group: DeviceGroup = ALONE
) -> Plan:
    """All blocks recompute and have their states on disk; what stands around them is kept."""
    problem = Problem.of(profile, budgets, settings=replace(OVERLAPPING, group=group))
    schedule = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
    units = tuple(
        problem.unit_plan(index, RECOMPUTE, Placement(tier="disk"), schedule)
        if unit.kind == "block"
        else problem.unit_plan(index, KEEP, PERSISTENT, Schedule())
        for index, unit in enumerate(profile.units)
    )
    settings = StepSettings(piece_bytes=problem.settings.piece_bytes, group=group)
    draft = drafted(profile, units, budgets, settings).regraded()
    found = predicted(draft, profile)
    return replace(
        draft,
        prediction=Prediction(
            step_seconds=found.step_seconds,
            lower_bound_seconds=found.step_seconds,
            peak_bytes=found.peak_bytes,
        ),
    )


def commit(folder: Path, plan: Plan | None = None, profile: Profile = PROFILE) -> Path:
    """The plan with its profile in a folder; the plan's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(profile, folder / "profile.yaml")
    write_plan(offloading(profile) if plan is None else plan, folder / "plan.yaml")
    return folder / "plan.yaml"


def find_plans(paths: Sequence[Path]) -> list[Path]:
    """The plans, and the records that cannot be read, that a check finds."""
    return [files.path for files in search(paths).files]


def look(profile: Profile) -> Today | Broken | Unavailable:
    """Build the profiled model from its source in this process, which has PyTorch already."""
    if (reason := missing(profile.workload)) is not None:
        return Unavailable(reason=reason)
    try:
        _, config = question_of(profile)
    except ProtrainError as error:
        return Broken(reason=said(error))
    told: list[str] = []
    found = reestimated(profile, config, None, told.append)
    if not told:
        assert isinstance(found, Broken)
        return found

    @cache
    def estimate(hardware: Hardware) -> Estimate:
        again = found if hardware == profile.hardware else None
        made = again or reestimated(profile, config, hardware, lambda _: None)
        assert made is not None
        return replace(made.profile, hardware=hardware) if isinstance(made, Tally) else made

    [fingerprint] = told
    changed = changed_keys(profile.workload.model_config, config)
    return Today(model_fingerprint=fingerprint, changed_keys=changed, profile=estimate)
