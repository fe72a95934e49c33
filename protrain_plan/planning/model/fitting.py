"""Options outside every plan within the budgets: the relaxation would take fractions of them.

An option is out of reach if its bytes in some slot, with the least of all other decisions, exceed
the device, or those on a tier exceed the tier.
"""

from collections.abc import Iterable
from itertools import accumulate

from protrain_plan.planning.model.problem import Problem
from protrain_runtime.contract.program.memory import base_bytes

_Row = list[int]
"""Bytes on the device per slot, the device's update included."""


def least_bytes(problem: Problem) -> int:
    """A lower bound on every choice's peak: each slot with each unit's least bytes."""
    return max(_sum(problem, map(_least, _rows(problem))))


def within_reach(problem: Problem) -> Problem:
    """The problem without options out of reach; its options are renumbered."""
    options = [of_kind for unit in problem.options for of_kind in unit.kinds]
    rows = _rows(problem)
    left = [list(range(len(of_kind))) for of_kind in rows]
    fewer = True
    while fewer:  # the rest may have a larger least
        fewer = False
        open_rows = zip(rows, left, strict=True)
        least = [_least([of_kind[n] for n in numbers]) for of_kind, numbers in open_rows]
        room = [problem.device - size for size in _sum(problem, least)]
        for place, numbers in enumerate(left):
            found: list[int] = []
            for number in numbers:
                below = options[place][number].tier_bytes
                if any(below.get(tier, 0) > limit for tier, limit in problem.tiers.items()):
                    continue
                slots = zip(rows[place][number], least[place], room, strict=True)
                if all(one - low <= free for one, low, free in slots):
                    found.append(number)
            fewer |= len(found) < len(numbers)
            left[place] = found
    if not all(left):
        return problem  # there is no plan
    assert not problem.left, "numbers are those of all options"
    return problem.changed(left=list(zip(left[::2], left[1::2], strict=True)))


def _rows(problem: Problem) -> list[list[_Row]]:
    """The rows of each unit's options; activations and states alternate."""

    def row(changes: tuple[tuple[int, int], ...]) -> _Row:
        change = [0] * (2 * problem.count + 2)
        for slot, size in changes:
            change[slot] = size
        return list(accumulate(change[:-1]))

    return [[row(one) for one in of_kind] for of_unit in problem.changes for of_kind in of_unit]


def _least(rows: Iterable[_Row]) -> _Row:
    """The least of these rows in each slot."""
    return [min(column) for column in zip(*rows, strict=True)]


def _sum(problem: Problem, rows: Iterable[_Row]) -> _Row:
    """Bytes of these rows together, and of what is there in any case."""
    base = base_bytes(problem.profile, problem.settings)
    return [base + sum(column) for column in zip(*rows, strict=True)]
