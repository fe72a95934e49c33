"""Plans of other bits: with leave where it gains something, and updates that the host rounds."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.planning.model.options import EXACT_UPDATES, Pin, parse_pin
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.improving import TOLERANCE, Effort
from protrain_plan.presentation.plans import other_results
from protrain_runtime.contract.records import read_plan, write_plan
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Budgets, Plan
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import (
    cpu,
    decoder,
    gpu,
    kept_bytes,
    least_bytes,
    random_profile,
    solved,
    with_copies,
)

LEAVE = ("rounding", "int8-activations")
AMPLE = 10**12


def planned_with(profile: Profile, device: int, allow: tuple[str, ...]) -> Solved | Infeasible:
    budgets = Budgets(device=device, host=AMPLE, disk=AMPLE)
    return solve_problem(Problem.of(profile, budgets, allow=allow), effort=Effort())


@pytest.mark.parametrize(
    "seed", [8, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8))]
)
def test_leave_is_taken_where_it_is_faster_or_fits_at_all(seed: int) -> None:
    """Over budgets from less than any exact plan needs to more than all of them need."""
    rng = random.Random(seed)
    profile = with_copies(random_profile(rng, max_blocks=3), rng)
    besides = profile.hardware.device.besides_bytes
    exact_problem, problem = (
        Problem.of(profile, Budgets(device=AMPLE, host=AMPLE, disk=AMPLE), allow=allow)
        for allow in ((), LEAVE)
    )
    least, less, most = (*map(least_bytes, (exact_problem, problem)), kept_bytes(exact_problem))
    sizes = {less, least - 1, least, *(least + (most - least) * part // 3 for part in (1, 2, 3))}
    for size in sorted(size for size in sizes if size >= less):
        with_leave, exact = (planned_with(profile, size + besides, allow) for allow in (LEAVE, ()))
        plan = solved(with_leave).plan
        assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds
        forms = {FORMS[form].opt_in for form in plan.forms} - {""}
        assert set(plan.allowed) == forms and (plan.exactness == "approximate") == bool(forms)
        if isinstance(exact, Infeasible):
            assert size < least
            assert forms
            continue
        slowest = exact.plan.prediction.step_seconds
        assert plan.prediction.step_seconds * (1 + TOLERANCE * bool(forms)) <= slowest


def test_a_pin_by_leave_is_kept_though_it_gains_nothing() -> None:
    profile = with_copies(random_profile(random.Random(1), max_blocks=4), random.Random(1))
    budgets = Budgets(device=AMPLE, host=AMPLE, disk=AMPLE)
    block = next(unit.name for unit in profile.units if unit.forms[1:])
    pins = (parse_pin(f"{block}: keep int8"),)
    problem = Problem.of(profile, budgets, pins=pins, allow=LEAVE)
    assert solved(solve_problem(problem, effort=Effort())).plan.exactness == "approximate"


# --- plans for accelerators say what the host's kernels round otherwise, and do without if asked --


def planned(hardware: Hardware, *pins: Pin) -> Plan:
    """The plan for little more than the least device memory that host memory makes possible."""
    profile = decoder(hardware, blocks=3)
    ample = Budgets(device=AMPLE, host=AMPLE, disk=AMPLE)
    least = least_bytes(Problem.of(profile, ample, pins=pins))
    budgets = replace(ample, device=round(1.1 * least) + hardware.device.besides_bytes)
    return solved(solve_problem(Problem.of(profile, budgets, pins=pins), effort=Effort())).plan


def test_a_plan_that_updates_on_the_host_says_so_and_its_reader_knows(tmp_path: Path) -> None:
    plan = planned(gpu())
    assert plan.host_updated
    assert (plan.exact, plan.exactness, plan.allowed) == (False, "host rounding", ())
    (line,) = other_results(plan)
    units = f"{len(plan.host_updated)} of {len(plan.units)} layers"
    assert line == f"last bits differ: {units} update on CPU (--exact-updates avoids it)"
    promise = plan.prediction
    assert promise.host_update_threads == gpu().device.num_threads - 1
    assert 0 < promise.host_update_seconds < promise.step_seconds
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    # Files of before said that they were exact.
    write_plan(replace(plan, exact=True, exactness="bitwise"), tmp_path / "told.yaml")
    assert read_plan(tmp_path / "told.yaml") == plan


@pytest.mark.nightly
def test_exact_updates_stay_on_the_device_or_stream_to_it() -> None:
    plan = planned(gpu(), EXACT_UPDATES)
    assert not plan.host_updated
    assert (plan.exact, plan.exactness) == (True, "bitwise")
    assert other_results(plan) == []
    assert plan.prediction.host_update_threads == plan.prediction.host_update_seconds == 0


def test_a_cpu_machines_updates_are_its_own() -> None:
    profile, ample = decoder(cpu(), blocks=3), Budgets(device=AMPLE, host=0, disk=AMPLE)
    usual, exact = (Problem.of(profile, ample, pins=pins) for pins in ((), (EXACT_UPDATES,)))
    assert any(o.tier == "disk" for unit in exact.options for o in unit.states)
    assert usual.options == exact.options


@pytest.mark.nightly
def test_what_is_frozen_is_not_updated() -> None:
    plan = planned(gpu())
    name = next(unit.name for unit in plan.host_updated if unit.kind == "block")
    frozen = tuple(f"{unit.name}.weight 2x2 float32 frozen" for unit in plan.units)
    assert replace(plan, tensors=frozen).graded == "bitwise"
    lines = (*frozen, f"{name}.bias 2 float32 trainable")
    assert [unit.name for unit in replace(plan, tensors=lines).host_updated] == [name]
