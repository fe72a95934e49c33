"""Plans against exhaustive search, and laws that every answer keeps."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import MOVING_GAIN, plan
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.planning.search.scheduling import DEPTHS, WINDOWS, ScheduleRule
from protrain_plan.simulation.timeline import simulate
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.hardware import Contention, Hardware
from protrain_runtime.contract.records.plan import Budgets, Keep, Persistent, Schedule
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import MB, cpu, decoder, gpu
from tests.support.thinning import thinned

ROOT = Path(__file__).parents[2]
SLOW = Contention(compute=0.9, lane=0.8)


def small(hardware: Hardware, *, blocks: int, tied: bool = False) -> Profile:
    return decoder(
        hardware,
        blocks=blocks,
        block_parameters=40 * MB,
        embedding_parameters=20 * MB,
        kept=200 * MB,
        seconds=0.02,
        tied=tied,
        host_speed=1e9,
    )


def budget(profile: Profile, device: int, below: int = 10**12) -> Budgets:
    context = profile.hardware.device.context_bytes
    return Budgets(device=device + context, host=below, disk=below)


EVERY_RULE = tuple(ScheduleRule(depth, window) for depth in DEPTHS for window in WINDOWS)
CASES = {
    "gpu": small(gpu(), blocks=1),
    "gpu, tied": small(gpu(), blocks=1, tied=True),
    "gpu, contention": small(gpu(contention=SLOW), blocks=1),
    "cpu": small(cpu(), blocks=1),
    "cpu, tied": small(cpu(), blocks=1, tied=True),
}


@pytest.mark.parametrize(("name", "device"), thinned(tuple(CASES), [450 * MB, 700 * MB, 1100 * MB]))
def test_planner_matches_exhaustive_search(name: str, device: int) -> None:
    profile = CASES[name]
    budgets = budget(profile, device)
    problem = Problem.of(profile, budgets, settings=replace(OVERLAPPING, piece_bytes=64 << 20))
    evaluator = Evaluator(problem)
    open_to_units = [
        list(itertools.product(range(len(options.activations)), range(len(options.states))))
        for options in problem.options
    ]
    evaluation = [
        evaluator.evaluate(choice, rules=EVERY_RULE) for choice in itertools.product(*open_to_units)
    ]
    best = min((found.seconds for found in evaluation if found), default=None)
    answer = plan(profile, budgets, settings=replace(OVERLAPPING, piece_bytes=64 << 20))
    if best is None:
        assert isinstance(answer, Infeasible)
        return
    assert isinstance(answer, Solved)
    prediction = answer.plan.prediction
    assert prediction.lower_bound_seconds <= best * (1 + 1e-9)
    assert prediction.step_seconds <= best * 1.005


@pytest.mark.parametrize("name", thinned(tuple(CASES)))
def test_larger_budget_is_never_slower(name: str) -> None:
    """But where everything fits: moving, as with less, would not be worth it."""
    profile = CASES[name]
    before = float("inf")
    for device in range(400, 2400, 250):
        answer = plan(profile, budget(profile, device * MB), effort=Effort(gap_target=0.001))
        if isinstance(answer, Infeasible):
            assert before == float("inf")
            continue
        moved = any(unit.states != Persistent() for unit in answer.plan.units)
        worth = 1.001 if moved else 1 + MOVING_GAIN
        assert answer.plan.prediction.step_seconds <= before * worth
        before = answer.plan.prediction.step_seconds


def test_everything_kept_and_persistent_where_it_fits() -> None:
    profile = small(cpu(), blocks=6)
    answer = plan(profile, budget(profile, 20_000 * MB))
    assert isinstance(answer, Solved)
    assert answer.status == "optimal"
    for unit in answer.plan.units:
        assert unit.activations == Keep()
        assert unit.states == Persistent()
        assert unit.schedule == Schedule()


@pytest.mark.parametrize(("device_speed", "moved"), [(30e9, False), (5e9, True)])
def test_nothing_moves_for_less_than_a_tenth_of_the_step(device_speed: float, moved: bool) -> None:
    """The host would save 3 % of the step that keeps everything, or 14 %."""
    profile = decoder(gpu(), blocks=8, block_parameters=40 * MB, device_speed=device_speed)
    answer = plan(profile, budget(profile, 40_000 * MB))
    assert isinstance(answer, Solved)
    assert any(unit.states != Persistent() for unit in answer.plan.units) is moved
    assert answer.plan.exactness == ("host rounding" if moved else "bitwise")
    assert (answer.gap > 0.01) is not moved  # and told


@pytest.mark.parametrize(
    ("hardware", "device", "below"),
    [(gpu(), 900, 10**12), (gpu(disk_gb=100), 900, 10**9), (cpu(), 500, 10**12)],
    ids=["gpu", "gpu with little host memory", "cpu"],
)
def test_plan_keeps_its_promises(hardware: Hardware, device: int, below: int) -> None:
    profile = small(hardware, blocks=8)
    budgets = Budgets(device=device * MB + hardware.device.context_bytes, host=below, disk=10**12)
    answer = plan(profile, budgets)
    assert isinstance(answer, Solved)
    made = answer.plan
    program = program_of(made, profile)
    peak = made.prediction.peak_bytes
    slots = device_bytes(program)
    assert peak.device == max(slot.total for slot in slots)
    assert peak.device + peak.context <= budgets.device
    for tier in hardware.tiers:
        used = program.tier_bytes(tier.name)
        assert used == getattr(peak, tier.name)
        assert used <= getattr(budgets, tier.name)
    assert made.prediction.step_seconds == simulate(program).step_seconds
    assert answer.gap == made.gap


@pytest.mark.parametrize("name", CASES)
def test_smallest_budget_works_and_one_byte_less_does_not(name: str) -> None:
    profile = CASES[name]
    answer = plan(profile, budget(profile, 10 * MB))
    assert isinstance(answer, Infeasible)
    assert answer.tier == "device"
    smallest = answer.smallest_budget_bytes
    assert answer.shortfall_bytes == smallest - answer.budget_bytes
    assert sum(size for _, size in answer.occupants) == smallest  # the context among them
    enough = Budgets(device=smallest, host=10**12, disk=10**12)
    assert isinstance(plan(profile, enough), Solved)
    less = Budgets(device=smallest - 1, host=10**12, disk=10**12)
    again = plan(profile, less)
    assert isinstance(again, Infeasible)
    assert again.smallest_budget_bytes == smallest


def test_little_host_memory_is_named_and_its_smallest_budget_works() -> None:
    profile = small(gpu(), blocks=6)
    device = 1000 * MB + profile.hardware.device.context_bytes
    answer = plan(profile, Budgets(device=device, host=10 * MB, disk=0))
    assert isinstance(answer, Infeasible)
    assert answer.tier == "host"
    assert answer.shortfall_bytes == answer.smallest_budget_bytes - 10 * MB
    enough = Budgets(device=device, host=answer.smallest_budget_bytes, disk=0)
    assert isinstance(plan(profile, enough), Solved)
    less = Budgets(device=device, host=answer.smallest_budget_bytes - 1, disk=0)
    assert isinstance(plan(profile, less), Infeasible)


def test_written_model_names_what_it_limits(tmp_path: Path) -> None:
    profile = CASES["cpu"]
    problem = Problem.of(
        profile, budget(profile, 700 * MB), settings=replace(OVERLAPPING, piece_bytes=64 << 20)
    )
    Fluid(problem).write_lp(tmp_path / "model.lp")
    text = (tmp_path / "model.lp").read_text()
    for row in ("one_states_1", "arrive_disk_f1", "memory_b2", "budget_disk", "static_end"):
        assert f"\n{row}:" in text


def test_two_processes_make_the_same_plan() -> None:
    code = (
        "from tests.planning.test_planning import *\n"
        "profile = small(gpu(), blocks=6)\n"
        "print(plan(profile, budget(profile, 900 * MB)).plan)\n"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1]
    assert made[0].startswith("Plan(")
