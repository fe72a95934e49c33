"""Whole numbers of units per option, and what they prove, against every plan of small problems."""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf

import pytest

from protrain_plan.planning.model.counting import Counting
from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import solve
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import plan
from protrain_plan.planning.search.evaluation import step_seconds
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import Budgets, Persistent, StepSettings
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import MB, cpu, decoder, gpu, random_profile
from tests.support.random_problems import (
    PLENTY,
    random_choice,
    random_problem,
    random_rule,
    schedule,
)
from tests.support.thinning import thinned

DEVICE = 3_300 * MB


def on_two_tiers(host_bytes: int, *, blocks: int = 12) -> tuple[Profile, Budgets]:
    """Blocks of 2.8 GB of states each, a device for few of them and a host for some."""
    profile = decoder(gpu(disk_gb=1000, host_gb=64), blocks=blocks, kept=100 * MB)
    return profile, Budgets(device=DEVICE, host=host_bytes, disk=10**12)


@cache
def planned() -> Solved:
    """The plan for such a machine with room on the host for eight blocks or so."""
    outcome = plan(*on_two_tiers(24_000 * MB))
    assert isinstance(outcome, Solved)
    return outcome


def fixed_seconds(problem: Problem, choice: Choice) -> float:
    """The fluid model's step with these decisions; infinity where it has none."""
    fluid = Fluid(problem)
    kinds = zip(fluid.activations, fluid.states, choice, strict=True)
    for activations, states, (activation, state) in kinds:
        for variables, chosen in ((activations, activation), (states, state)):
            for number, variable in enumerate(variables):
                variable.bounds(int(number == chosen), int(number == chosen))
    answer = solve(fluid.pulp, integer=False)
    return fluid.second_unit * answer.bound if answer.status == "optimal" else inf


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
    answer = solve(fluid.pulp, integer=True, gap=1e-6)
    # Rounds end a little before the bound is what the numbers take.
    assert bound == pytest.approx(answer.bound * fluid.second_unit, rel=1e-3)


def test_whole_numbers_raise_the_bound_and_plans_stay_above_it() -> None:
    before, bound = proved(Problem.of(*on_two_tiers(24_000 * MB)), rounds=8)
    assert before * 1.02 < bound <= planned().plan.prediction.step_seconds


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


def test_a_host_for_some_chunks_is_filled_with_whole_ones() -> None:
    problem = Problem.of(*on_two_tiers(24_000 * MB))
    below = [one.states for one in planned().plan.units if not isinstance(one.states, Persistent)]
    on_disk = sum(states.tier == "disk" for states in below)
    largest = max(option.tier_bytes.get("host", 0) for option in problem.options[1].states)
    used = planned().plan.prediction.peak_bytes.host
    assert not on_disk or used + largest > 24_000 * MB
    assert planned().gap <= 0.05
