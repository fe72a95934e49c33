"""Plans for accelerators say what the host's kernels round otherwise, and do without if asked."""

from dataclasses import replace
from pathlib import Path

from protrain_plan.planning.model.options import EXACT_UPDATES, Pin
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.presentation.plans import other_results
from protrain_runtime.contract.records import read_plan, write_plan
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Budgets, Plan
from tests.support.planning_cases import cpu, decoder, gpu

AMPLE = 10**12


def planned(hardware: Hardware, *pins: Pin) -> Plan:
    """The plan for little more than the least device memory that host memory makes possible."""
    profile = decoder(hardware, blocks=3)
    ample = Budgets(device=AMPLE, host=AMPLE, disk=AMPLE)
    lean = min_memory(Problem.of(profile, ample, pins=pins))
    assert lean is not None
    room = round(1.1 * lean.bytes) + hardware.device.besides_bytes
    budgets = replace(ample, device=room)
    solved = solve_problem(Problem.of(profile, budgets, pins=pins), budgets)
    assert isinstance(solved, Solved)
    return solved.plan


def test_a_plan_that_updates_on_the_host_says_so_and_its_reader_knows(tmp_path: Path) -> None:
    plan = planned(gpu())
    assert plan.host_updated
    assert (plan.exact, plan.exactness, plan.allowed) == (False, "host rounding", ())
    (line,) = other_results(plan)
    assert line.startswith(f"host rounding: {len(plan.host_updated)} of {len(plan.units)} units")
    promise = plan.prediction
    assert promise.host_update_threads == gpu().device.num_threads - 1
    assert 0 < promise.host_update_seconds < promise.step_seconds
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    # Files of before said that they were exact.
    write_plan(replace(plan, exact=True, exactness="bitwise"), tmp_path / "told.yaml")
    assert read_plan(tmp_path / "told.yaml") == plan


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


def test_what_is_frozen_is_not_updated() -> None:
    plan = planned(gpu())
    name = next(unit.name for unit in plan.host_updated if unit.kind == "block")
    frozen = tuple(f"{unit.name}.weight 2x2 float32 frozen" for unit in plan.units)
    assert replace(plan, tensors=frozen).graded == "bitwise"
    lines = (*frozen, f"{name}.bias 2 float32 trainable")
    assert [unit.name for unit in replace(plan, tensors=lines).host_updated] == [name]
