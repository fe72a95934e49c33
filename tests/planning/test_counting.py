"""What whole chunks leave to slower tiers, against every plan of small problems."""

import random
from functools import cache
from itertools import product

import pytest

from protrain_plan.planning.model.decision_model import WORK, CountModel
from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import solve
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import plan
from protrain_plan.planning.search.choices import moved_down
from protrain_plan.records.plan import Budgets, Offload, Persistent, Swap
from protrain_plan.records.profile import Profile
from tests.support.planning_cases import MB, cpu, decoder, gpu

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


def uniform(problem: Problem, activation: int, state: int) -> Choice:
    return tuple(
        (min(activation, len(options.activations) - 1), min(state, len(options.states) - 1))
        for options in problem.options
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_within_the_budgets_leaves_less_work(seed: int) -> None:
    rng = random.Random(seed)
    hardware = cpu() if seed % 3 == 2 else gpu(disk_gb=1000)
    profile = decoder(hardware, blocks=3, kept=100 * MB, tied=seed % 2 == 1)
    host = rng.randrange(6_000, 16_000) * MB
    problem = Problem.of(
        profile, Budgets(device=rng.randrange(4_000, 9_000) * MB, host=host, disk=10**12)
    )
    least = [CountModel(problem).least(amount) for amount in WORK]
    found = [float("inf")] * len(WORK)
    for states in product(*(range(len(options.states)) for options in problem.options)):
        for activation in range(len(problem.options[1].activations)):
            activations = [a for a, _ in uniform(problem, activation, 0)]
            choice = tuple(zip(activations, states, strict=True))
            within = max(problem.static_bytes(choice)) <= problem.device
            if not within or not problem.within_tiers(choice):
                continue
            chosen = problem.chosen(choice)[1]
            for k, amount in enumerate(WORK):
                found[k] = min(found[k], sum(amount(state) for state in chosen))
    assert max(found) < float("inf"), "some choice meets the budgets"
    for proven, enumerated in zip(least, found, strict=True):
        assert proven <= enumerated
        # With three blocks of one class, numbers decide: what is proven is what there is.
        assert proven == pytest.approx(enumerated, rel=1e-3)


def test_facts_about_whole_chunks_raise_the_bound_and_plans_stay_above_it() -> None:
    profile, budgets = on_two_tiers(24_000 * MB)
    problem = Problem.of(profile, budgets)
    fluid, model = Fluid(problem), CountModel(problem)
    before = fluid.lower_bound_seconds(solve(fluid.pulp, integer=False).bound)
    for amount in WORK:
        fluid.at_least(amount.__name__, amount, model.least(amount))
    answer = solve(fluid.pulp, integer=False)
    bound = fluid.lower_bound_seconds(answer.bound)
    assert before < bound <= planned().plan.prediction.step_seconds


def test_nearest_numbers_are_whole_and_meet_the_budgets() -> None:
    profile, budgets = on_two_tiers(24_000 * MB)
    problem = Problem.of(profile, budgets)
    fluid, model = Fluid(problem), CountModel(problem)
    numbers = model.nearest(solve(fluid.pulp, integer=False).values)
    assert numbers is not None
    assert sum(numbers.values()) == problem.count
    host = sum(
        number * model.placed[name].option.tier_bytes.get("host", 0)
        for name, number in numbers.items()
    )
    assert host <= budgets.host
    with fluid.placing(numbers, spare_swaps=0):
        placed = solve(fluid.pulp, integer=False)
    assert placed.status == "optimal"
    assert {name: round(placed.values[name], 6) for name in numbers} == numbers
    assert solve(fluid.pulp, integer=False).bound <= placed.bound


def test_a_choice_that_exceeds_the_host_is_moved_down() -> None:
    profile, budgets = on_two_tiers(24_000 * MB)
    problem = Problem.of(profile, budgets)
    swap = [option.decision for option in problem.options[1].activations].index(Swap(tier="host"))
    offload = [option.decision for option in problem.options[1].states].index(Offload(tier="host"))
    choice = uniform(problem, swap, offload)
    assert not problem.within_tiers(choice)
    moved = list(moved_down(problem, choice))
    assert all(problem.within_tiers(one) for one in moved)
    on_host = [
        sum(state.decision == Offload(tier="host") for state in problem.chosen(one)[1])
        for one in moved
    ]
    # Activations that leave the host make room for chunks.
    assert on_host[0] <= min(on_host[1:])
    assert list(moved_down(problem, moved[0])) == [moved[0]]


def test_a_host_for_some_chunks_is_filled_with_whole_ones() -> None:
    problem = Problem.of(*on_two_tiers(24_000 * MB))
    below = [one.states for one in planned().plan.units if not isinstance(one.states, Persistent)]
    least = CountModel(problem).least(WORK[0])
    written = max(option.write_bytes for option in problem.options[1].states)
    on_disk = sum(states.tier == "disk" for states in below)
    assert on_disk * written <= least * 1.2
    assert planned().gap <= 0.05
