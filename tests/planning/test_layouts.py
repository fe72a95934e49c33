"""Layouts: numbers of units per option, and the steps and repairs of a search over them."""

import random
from collections import Counter
from itertools import product
from math import factorial

import pytest

from protrain_plan.planning.model.counting import Amounts, Caution, Counting, Layout, Row
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.search.descending import Descent
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.layouts import (
    MOST_RUNS,
    choice_of,
    layout_of,
    layouts_near,
    orders,
)
from protrain_runtime.contract.records.plan import Budgets
from tests.support.planning_cases import MB, decoder, gpu
from tests.support.random_problems import random_choice


def problem_of(device: int = 3_300 * MB, host: int = 24_000 * MB, blocks: int = 12) -> Problem:
    """Blocks of 2.8 GB of states each, a device for few of them and a host for some."""
    profile = decoder(gpu(disk_gb=1000, host_gb=64), blocks=blocks, kept=100 * MB)
    return Problem.of(profile, Budgets(device=device, host=host, disk=10**12))


def amounts_of(problem: Problem, free: float = 0.0) -> Amounts:
    counting = Counting(problem, window=2)
    counting.relax()
    amounts = counting.amounts(Caution(free, 0.0))
    assert amounts
    return amounts


def numbers(layout: Layout) -> list[Counter[int]]:
    return [Counter(dict(row.runs)) for pair in layout for row in pair]


@pytest.mark.parametrize(("device", "host"), [(3_300, 24_000), (2_900, 9_000), (6_000, 12_000)])
def test_a_layout_beyond_the_budgets_is_repaired(device: int, host: int) -> None:
    problem = problem_of(device * MB, host * MB)
    counting = Counting(problem, window=2)
    descent = Descent(problem, Evaluator(problem), counting.relax(), random.Random(0))
    swaps = tuple(
        (
            Row(((min(5, len(o.activations) - 1), len(units)),)),
            Row(((1 % len(o.states), len(units)),)),
        )
        for units in problem.classes
        for o in (problem.options[units[0]],)
    )
    for layout in (swaps, *layouts_near(problem, amounts_of(problem))):
        repaired = descent.repaired(layout)
        assert repaired is None or problem.fits(choice_of(problem, repaired))
        if problem.fits(choice_of(problem, layout)):
            assert repaired == layout
    assert any(descent.repaired(one) for one in layouts_near(problem, amounts_of(problem)))


def test_other_orders_have_the_same_numbers_and_are_taken_where_the_walk_is_faster() -> None:
    problem = problem_of()
    descent = Descent(
        problem, Evaluator(problem), Counting(problem, window=2).relax(), random.Random(0)
    )
    changed = 0
    for layout in filter(None, map(descent.repaired, layouts_near(problem, amounts_of(problem)))):
        for group, pair in enumerate(layout):
            for kind, row in enumerate(pair):
                others = list(orders(layout, group, kind))
                few = 1 < len(row.runs) <= MOST_RUNS
                assert len(set(others)) == few * (2 * factorial(len(row.runs)) - 1)
                assert layout not in others
                assert all(numbers(other) == numbers(layout) for other in others)
        best = descent.reordered(layout)
        assert numbers(best) == numbers(layout)
        if best != layout:
            changed += 1
            before, after = (descent.walked(choice_of(problem, one)) for one in (layout, best))
            assert after < before
    assert changed


@pytest.mark.nightly
def test_steps_downhill_find_a_plan_within_the_budgets_that_is_no_slower() -> None:
    problem = problem_of()
    counting = Counting(problem, window=2)
    evaluator = Evaluator(problem)
    descent = Descent(problem, evaluator, counting.relax(), random.Random(0))
    layouts = [descent.repaired(one) for one in layouts_near(problem, amounts_of(problem))]
    start = next(layout for layout in layouts if layout)
    first = evaluator.evaluate(choice_of(problem, start), paces=(descent.pace,))
    assert first
    best = descent.descended(start, most=150, enough_s=0.0)
    assert best
    assert problem.fits(best.choice)
    assert counting.bound_seconds <= best.seconds <= first.seconds
    later = descent.descended(layout_of(problem, best.choice), most=100, enough_s=0.0)
    assert later
    assert later.seconds <= best.seconds
    assert problem.fits(later.choice)


def test_what_the_relaxation_prices_out_lifts_it_by_so_much() -> None:
    """A plan that takes an option takes at least the bound and the option's reduced cost."""
    problem = problem_of(blocks=6)
    prices = Counting(problem).relax()
    evaluator, rng = Evaluator(problem), random.Random(0)
    looked_at = 0
    for _ in range(300):
        choice = random_choice(problem, rng)
        if (found := evaluator.evaluate(choice)) is None:
            continue
        looked_at += 1
        for units, pair in zip(problem.classes, prices.reduced_costs, strict=True):
            for unit, kind in product(units, (0, 1)):
                least = prices.bound + pair[kind][choice[unit][kind]]
                assert found.seconds >= least * (1 - 1e-6)
    assert looked_at > 5
