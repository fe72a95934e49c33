"""Bounds on steps and bytes, against simulated plans, every choice and the peak function."""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan.planning.model.counting import Counting
from protrain_plan.planning.model.fluid import Fluid, windows
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.model.solver import LinearProgram, relaxed
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.search import choices
from protrain_plan.planning.search.choices import leanest_plain, min_memory
from protrain_plan.planning.search.evaluation import PACES, Evaluator, step_seconds
from protrain_plan.simulation.timeline import _Simulation
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import Budgets, StepSettings
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import (
    MB,
    cpu,
    decoder,
    gpu,
    plan,
    random_profile,
    solved,
    with_launches,
)
from tests.support.random_problems import (
    PLENTY,
    fixed_seconds,
    random_choice,
    random_problem,
    random_rule,
    schedule,
)
from tests.support.schedule_rules import ScheduleRule
from tests.support.thinning import thinned


@pytest.mark.nightly
@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 10**9), several=st.booleans())
def test_schedule_holds_what_device_bytes_counts(seed: int, *, several: bool) -> None:
    rng = random.Random(seed)
    problem = random_problem(random_profile(rng), PLENTY, rng, several=several)
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
    at_once = schedule(problem, choice, limit=max(least), rule=ScheduleRule(0, 0))
    assert at_once is not None
    assert max(slot.total for slot in device_bytes(problem.program(at_once))) == max(least)


@pytest.mark.nightly(but=("12-False", "18-False", "24-False", "36-False", "11-True", "29-True"))
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
    fractional = relaxed(fluid.pulp)
    counted = LinearProgram(fluid.pulp).solve(integer=True, max_nodes=20)
    assert fractional.status == "optimal"
    assert counted.bound >= fractional.bound * (1 - 1e-6)
    # Where one plan is left, the solver may find none: the planner leaves that answer out, too.
    proven = counted if isfinite(counted.bound) else fractional
    bound = fluid.lower_bound_seconds(proven.bound)
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


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_windows_hold_every_slot_once_in_order(count: int, size: int) -> None:
    found = windows(count, size)
    assert [slot for window in found for slot in window] == list(range(2 * count + 1))
    assert all(len(window) <= size for window in found)
    # What begins and ends something stands alone.
    alone = {0, count - 1, count, 2 * count - 1, 2 * count}
    assert all(len(window) == 1 for window in found if alone & {*window})


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


# --- whole numbers of units per option, and what they prove, against every plan of small problems -

DEVICE = 3_300 * MB


def on_two_tiers(host_bytes: int, *, blocks: int = 12) -> tuple[Profile, Budgets]:
    """Blocks of 2.8 GB of states each, a device for few of them and a host for some."""
    profile = decoder(gpu(disk_gb=1000, host_gb=64), blocks=blocks, kept=100 * MB)
    return profile, Budgets(device=DEVICE, host=host_bytes, disk=10**12)


@cache
def planned() -> Solved:
    """The plan for such a machine with room on the host for eight blocks or so."""
    return solved(plan(*on_two_tiers(24_000 * MB)))


def proved(problem: Problem, *, rounds: int = 60, window: int = 1) -> tuple[float, float]:
    """Bounds over whole numbers of units, before and after all that can be learnt of them."""
    counting = Counting(problem, window=window)
    assert counting.relax().bound
    before, least = counting.bound_seconds, inf
    for _ in range(rounds):
        numbers = counting.promising(1e-6)
        assert numbers is not None
        if least <= counting.bound * (1 + 1e-5):
            break
        least = min(least, counting.learn(numbers))
    return before, counting.bound_seconds


@pytest.mark.nightly("2")
@pytest.mark.parametrize("seed", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1))])
def test_the_bound_over_whole_numbers_is_that_of_the_best_choice(seed: int) -> None:
    rng = random.Random(seed)
    hardware = cpu() if seed % 3 == 2 else gpu(disk_gb=1000)
    profile = decoder(hardware, blocks=2, kept=100 * MB, tied=seed % 2 == 1)
    host = rng.randrange(6_000, 12_000) * MB
    problem = Problem.of(
        profile,
        Budgets(device=rng.randrange(4_000, 7_000) * MB, host=host, disk=10**12),
        settings=StepSettings(overlap_steps=False),
    )
    every = [
        [(a, s) for a in range(len(o.activations)) for s in range(len(o.states))]
        for o in problem.options
    ]
    choices = [choice for choice in product(*every) if problem.fits(choice)]
    chosen = rng.sample(choices, min(len(choices), 10))
    _, bound = proved(problem)
    assert bound <= min(fixed_seconds(problem, choice) for choice in chosen) * (1 + 1e-6)
    fluid = Fluid(problem)
    answer = LinearProgram(fluid.pulp).solve(integer=True, gap=1e-6)
    # Rounds end a little before the bound is what the numbers take.
    assert bound == pytest.approx(answer.bound * fluid.second_unit, rel=1e-3)


@pytest.mark.nightly
def test_whole_numbers_raise_the_bound_and_plans_stay_above_it() -> None:
    before, bound = proved(Problem.of(*on_two_tiers(24_000 * MB)), rounds=8)
    assert before * 1.02 < bound <= planned().plan.prediction.step_seconds


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize(("seed", "several"), thinned(range(60), [False, True], every=6))
def test_no_plan_is_faster_than_the_bound_over_whole_numbers(seed: int, *, several: bool) -> None:
    """Ranks, clipping, micro-batches, both tiers; budgets are those that a random plan takes."""
    rng = random.Random(seed)
    problem = random_problem(random_profile(rng, max_blocks=5), PLENTY, rng, several=several)
    known = random_choice(problem, rng)
    least = max(problem.static_bytes(known))
    limit = least + int(rng.random() ** 3 * least)
    plans = schedule(problem, known, limit=limit, rule=random_rule(rng))
    assert plans is not None
    peak = max(slot.total for slot in device_bytes(problem.program(plans)))
    tiers = {tier: problem.tier_use(tier, known) for tier in problem.tiers}
    problem = replace(problem, device=peak, tiers=tiers)
    _, bound = proved(problem, rounds=4, window=rng.choice([1, 2, 3]))
    assert bound <= step_seconds(problem, plans)[0]
    for _ in range(40):
        choice = random_choice(problem, rng)
        if problem.fits(choice):
            others = schedule(problem, choice, limit=peak, rule=random_rule(rng))
            assert others is not None
            assert bound <= step_seconds(problem, others)[0]


@pytest.mark.nightly
def test_a_host_for_some_chunks_is_filled_with_whole_ones() -> None:
    problem = Problem.of(*on_two_tiers(24_000 * MB))
    below = [one.states for one in planned().plan.units if not one.states.is_persistent]
    on_disk = sum(states.tier == "disk" for states in below)
    largest = max(option.tier_bytes.get("host", 0) for option in problem.options[1].states)
    used = planned().plan.prediction.peak_bytes.host
    assert not on_disk or used + largest > 24_000 * MB
    assert planned().gap <= 0.05


# --- where the solver finds no leanest choice in its nodes, plain policies are known --------------


@pytest.mark.nightly(but=("0", "3", "6"))
@pytest.mark.parametrize("seed", range(8))
def test_plain_policies_meet_the_other_tiers_and_are_no_leaner(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=6)
    room = {tier: rng.randrange(2 * 10**9) for tier in ("host", "disk")}
    problem = Problem.of(profile, Budgets(device=10**12, **room))
    lean, plain = min_memory(problem), leanest_plain(problem, "device")
    assert plain, "everything kept and persistent needs nothing below the device"
    assert lean
    assert lean.proven_bytes <= lean.bytes <= plain.bytes
    assert plain.bytes == max(problem.static_bytes(plain.choice))
    assert plain.proven_bytes == 0
    for tier, limit in problem.tiers.items():
        assert problem.tier_use(tier, plain.choice) <= limit


def test_of_a_tier_plain_policies_meet_the_device_or_there_are_none() -> None:
    profile = random_profile(random.Random(3), max_blocks=6)
    ample = Problem.of(profile, Budgets(device=10**12, host=10**12, disk=10**12))
    found = leanest_plain(ample, "disk")
    assert found
    assert found.bytes == 0, "everything persists"
    assert found.bytes == ample.tier_use("disk", found.choice)
    context = profile.hardware.device.besides_bytes
    none = Problem.of(profile, Budgets(device=context + 1, host=10**12, disk=10**12))
    assert leanest_plain(none, "disk") is None


@pytest.mark.nightly
def test_a_full_tier_is_asked_for_what_staging_takes_of_it() -> None:
    """The first whole numbers of units overstep it; the next ones meet it, under the same bound."""
    profile = decoder(gpu(disk_gb=4000), blocks=12)
    states = sum(unit.state_bytes + unit.gradient_bytes for unit in profile.units)
    room = Budgets(device=10**12, host=int(0.13 * states), disk=4 * 10**12)
    problem = Problem.of(profile, room)
    first = choices._try(problem, "device", 1.0, {}, counted=True, stopped=None)
    assert first.lean is None
    assert first.over["host"] > 0
    found = choices._tries(problem, "device", (1.0, 1.0), counted=True, stopped=None)
    assert found
    assert found.proven_bytes == first.proven < found.bytes
    assert problem.beyond(found.choice).keys() <= {"device"}
    lean = min_memory(problem)
    assert lean
    assert lean.bytes <= found.bytes


@pytest.mark.parametrize("seed", thinned(range(60), every=6))
def test_no_schedule_is_faster_than_the_fluid_of_its_decisions(seed: int) -> None:
    """Mostly of several devices, whose shards, gathers and links have rows of their own."""
    rng = random.Random(seed)
    profile = with_launches(random_profile(rng, max_blocks=rng.choice([2, 4, 7])), rng)
    problem = random_problem(profile, PLENTY, rng, several=rng.random() < 0.85)
    choice = random_choice(problem, rng)
    device = int(max(problem.static_bytes(choice)) * (1 + rng.random() ** 3))
    problem = replace(problem, device=device)
    least_s = fixed_seconds(problem, choice) * (1 - 1e-6)
    for _ in range(12):
        plans = schedule(problem, choice, limit=device, rule=random_rule(rng))
        assert plans is not None
        assert least_s <= step_seconds(problem, plans)[0]
    paced = Evaluator(problem).evaluate(choice, paces=PACES)
    assert paced is not None
    assert least_s <= paced.seconds
