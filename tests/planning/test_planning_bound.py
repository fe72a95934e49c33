"""The fluid model's bound against simulated plans, and the schedule against the peak function."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan.planning.model.fluid import Fluid, windows
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.model.solver import solve
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import step_seconds
from protrain_plan.planning.search.scheduling import ScheduleRule
from protrain_plan.simulation.timeline import _Simulation
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import Budgets
from tests.support.planning_cases import MB, decoder, gpu, random_profile, with_launches
from tests.support.random_problems import (
    PLENTY,
    random_choice,
    random_problem,
    random_rule,
    schedule,
)
from tests.support.thinning import thinned


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 10**9), several=st.booleans())
def test_schedule_holds_what_device_bytes_counts(seed: int, *, several: bool) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng)
    problem = random_problem(profile, PLENTY, rng, several=several)
    profile = problem.profile
    choice = random_choice(problem, rng)
    least = problem.static_bytes(choice)
    limit = max(least) + int(rng.random() ** 3 * max(least))
    assert schedule(problem, choice, limit=max(least) - 1, rule=ScheduleRule(0, 0)) is None
    plans = schedule(problem, choice, limit=limit, rule=random_rule(rng))
    assert plans is not None
    program = problem.program(plans)
    slots = device_bytes(program)
    assert max(slot.total for slot in slots) <= limit
    assert all(slot.total >= low for slot, low in zip(slots, least, strict=True))
    for tier in problem.tiers:
        assert problem.tier_use(tier, choice) == program.tier_bytes(tier)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9), several=st.booleans())
def test_static_bytes_are_those_of_leads_and_drains_of_zero(seed: int, *, several: bool) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng)
    problem = random_problem(profile, PLENTY, rng, several=several)
    profile = problem.profile
    choice = random_choice(problem, rng)
    least = problem.static_bytes(choice)
    plans = schedule(problem, choice, limit=max(least), rule=ScheduleRule(0, 0))
    assert plans is not None
    program = problem.program(plans)
    slots = [slot.total for slot in device_bytes(program)]
    assert max(slots) == max(least)


@pytest.mark.parametrize(("seed", "several"), thinned(range(40), [False, True], every=6))
def test_bound_is_below_every_random_plan_within_its_budget(seed: int, *, several: bool) -> None:
    rng = random.Random(seed)
    profile = with_launches(random_profile(rng, max_blocks=rng.choice([3, 7])), rng)
    problem = random_problem(profile, PLENTY, rng, several=several)
    lean = min_memory(problem)
    assert lean
    largest = max(problem.static_bytes(tuple((0, 0) for _ in profile.units)))
    device = lean.bytes + int(rng.random() ** 2 * (largest - lean.bytes))
    problem = replace(problem, device=device)
    fluid = Fluid(problem, window=rng.choice([1, 1, 2, 3, 4]))
    relaxed = solve(fluid.pulp, integer=False)
    counted = solve(fluid.pulp, integer=True, max_nodes=20)
    assert relaxed.status == "optimal"
    assert counted.bound >= relaxed.bound * (1 - 1e-6)
    bound = fluid.lower_bound_seconds(counted.bound)
    evaluation = 0
    for attempt in range(400):
        choice = random_choice(problem, rng) if attempt else lean.choice
        plans = schedule(problem, choice, limit=device, rule=random_rule(rng))
        if plans is None:
            continue
        evaluation += 1
        assert bound <= step_seconds(problem, plans)[0]
        if evaluation == 40:
            break
    assert evaluation


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_windows_hold_every_slot_once_in_order(count: int, size: int) -> None:
    found = windows(count, size)
    assert [slot for window in found for slot in window] == list(range(2 * count + 1))
    assert all(len(window) <= size for window in found)
    # What begins and ends something stands alone.
    alone = {0, count - 1, count, 2 * count - 1, 2 * count}
    assert all(len(window) == 1 for window in found if alone & {*window})


def test_a_window_of_one_slot_changes_nothing_and_larger_ones_promise_no_more() -> None:
    problem = Problem.of(
        decoder(gpu(disk_gb=1000), blocks=16, kept=100 * MB),
        Budgets(device=6_000 * MB, host=30_000 * MB, disk=10**12),
    )
    bounds = [solve(Fluid(problem, window=size).pulp, integer=False).bound for size in (1, 2, 4, 8)]
    assert bounds == sorted(bounds, reverse=True) or bounds[0] >= max(bounds[1:]) * (1 - 1e-7)
    assert bounds[-1] > 0.9 * bounds[0]
    sizes = [len(Fluid(problem, window=size).pulp.variables()) for size in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_simulated_step_of_many_is_the_one_that_repeats(seed: int) -> None:
    """One more step takes as long as the one that is simulated, where steps overlap."""
    rng = random.Random(seed)
    problem = random_problem(random_profile(rng), PLENTY, rng).overlapping(True)
    if not problem.settings.is_single:
        return
    choice = random_choice(problem, rng)
    limit = round(max(problem.static_bytes(choice)) * (1 + rng.random()))
    plans = schedule(problem, choice, limit=limit, rule=random_rule(rng))
    assert plans is not None
    simulation = _Simulation(problem.program(plans))
    seconds, _ = simulation.run()
    simulation._follow()
    simulation._step()
    # Rounding: two steps count as alike where their moves are within a nanosecond of each other.
    assert simulation.now - simulation.began == pytest.approx(seconds, rel=1e-6)
