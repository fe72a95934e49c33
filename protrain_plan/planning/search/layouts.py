"""Layouts: how many units of a class take each option, and in which order.

Units of a class cost the same, so numbers describe a plan: of 48 blocks 30 swap and 18 recompute,
one after the other or spread evenly. A search over layouts makes steps of many units, and what it
finds is short enough to be read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, permutations, product
from typing import NamedTuple

from protrain_plan.planning.model.counting import Amounts, Layout, Row
from protrain_plan.planning.model.options import Decision
from protrain_plan.planning.model.problem import Choice, Problem

MOST_RUNS = 4
"""Runs of a row whose orders are tried: of four, 24 orders."""


@lru_cache(maxsize=10_000)
def decided(row: Row) -> tuple[int, ...]:
    """The option of every unit of the class."""
    count = sum(number for _, number in row.runs)
    if not row.spread or len(row.runs) == 1:
        return tuple(option for option, number in row.runs for _ in range(number))
    owed, left = [0.0] * len(row.runs), [number for _, number in row.runs]
    taken = []
    for _ in range(count):
        for place, (_, number) in enumerate(row.runs):
            owed[place] += number / count
        open_to = [place for place, number in enumerate(left) if number]
        best = max(open_to, key=lambda place: round(owed[place], 6))
        owed[best] -= 1.0
        left[best] -= 1
        taken.append(row.runs[best][0])
    return tuple(taken)


def choice_of(problem: Problem, layout: Layout) -> Choice:
    """The decisions of all units."""
    choice: list[Decision] = [(0, 0)] * problem.count
    for units, (activations, states) in zip(problem.classes, layout, strict=True):
        decisions = zip(decided(activations), decided(states), strict=True)
        for unit, decision in zip(units, decisions, strict=True):
            choice[unit] = decision
    return tuple(choice)


def layout_of(problem: Problem, choice: Choice) -> Layout:
    """The layout with a choice's numbers; spread, where an option stands in several runs."""
    rows: list[Row] = []
    for units, kind in product(problem.classes, (0, 1)):
        taken = [choice[unit][kind] for unit in units]
        counts = Counter(taken)
        breaks = sum(one != other for one, other in pairwise(taken))
        rows.append(Row(tuple(counts.items()), spread=breaks >= len(counts) + 1))
    return tuple(zip(rows[::2], rows[1::2], strict=True))


def layouts_near(problem: Problem, amounts: Amounts) -> Iterator[Layout]:
    """Layouts with about these amounts, in runs or spread, in the order of their places."""
    every: list[tuple[tuple[int, int], ...]] = []
    counts = [len(units) for units in problem.classes for _ in (0, 1)]
    for of_options, count in zip(amounts, counts, strict=True):
        # Whole numbers near the sums, `count` together: the largest rests are rounded up.
        numbers = {option: int(amount + 1e-6) for option, (amount, _) in of_options.items()}
        rests = sorted(numbers, key=lambda n: (numbers[n] - of_options[n][0], n))
        for option in rests[: count - sum(numbers.values())]:
            numbers[option] += 1
        taken = [option for option, number in numbers.items() if number]
        taken.sort(key=lambda n: (round(of_options[n][1], 6), n))
        every.append(tuple((option, numbers[option]) for option in taken))
    for spread in ((False, True), (False, False), (True, True), (True, False)):
        spreads = zip(every, spread * len(problem.classes), strict=True)
        rows = [Row(runs, is_spread and len(runs) > 1) for runs, is_spread in spreads]
        yield tuple(zip(rows[::2], rows[1::2], strict=True))


class Exchange(NamedTuple):
    """A change: up to `number` units of class `group` might take `into` in place of `option`."""

    group: int
    kind: int
    option: int
    into: int
    number: int

    def times(self, layout: Layout, count: int, *, before: bool = False) -> Layout:
        """The layout with so many units moved, adjacent if their option is new."""
        row = layout[self.group][self.kind].moved(self.option, self.into, count, before=before)
        return _with_row(layout, self.group, self.kind, row)


def _with_row(layout: Layout, group: int, kind: int, row: Row) -> Layout:
    first, second = layout[group]
    pair = (first, row) if kind else (row, second)
    return (*layout[:group], pair, *layout[group + 1 :])


def orders(layout: Layout, group: int, kind: int) -> Iterator[Layout]:
    """Layouts with one row's runs in other orders, or spread; none of a row of many runs."""
    row = layout[group][kind]
    if 2 <= len(row.runs) <= MOST_RUNS:
        for runs, spread in product(permutations(row.runs), (False, True)):
            if (other := Row(runs, spread)) != row:
                yield _with_row(layout, group, kind, other)


def exchanges(layout: Layout, open_to: Sequence[Sequence[Sequence[int]]]) -> Iterator[Exchange]:
    """Changes that are open to units of a class, one option for another."""
    for group, pair in enumerate(layout):
        for kind, row in enumerate(pair):
            for option, number in row.runs:
                for into in open_to[group][kind]:
                    if into != option:
                        yield Exchange(group, kind, option, into, number)


def steps(
    layout: Layout, open_to: Sequence[Sequence[Sequence[int]]]
) -> Iterator[tuple[Layout, Exchange]]:
    """Layouts with 1, 2, 4, ... units of a class in another option."""
    for exchange in exchanges(layout, open_to):
        row = layout[exchange.group][exchange.kind]
        new = not row.spread and all(one != exchange.into for one, _ in row.runs)
        count = 1
        while count < 2 * exchange.number:
            for before in (False, True) if new else (False,):
                yield exchange.times(layout, min(count, exchange.number), before=before), exchange
            count *= 2
