"""Options outside every plan within the budgets: the relaxation would take fractions of them.

An option is out of reach if its bytes in some slot, with the least of all other decisions, exceed
the device, or those on a tier exceed the tier.
"""

from collections.abc import Sequence
from itertools import accumulate

from protrain_plan.planning.model.problem import Problem
from protrain_runtime.contract.program.memory import base_bytes

_Rows = list[list[int]]
"""Bytes on the device per option and slot, the device's update included."""


def least_bytes(problem: Problem) -> int:
    """A lower bound on every choice's peak: each slot with each unit's least bytes."""
    return max(_least(problem, _rows(problem)))


def within_reach(problem: Problem) -> Problem:
    """The problem without options out of reach; its options are renumbered."""
    rows = _rows(problem)
    left = [[list(range(len(of_kind))) for of_kind in pair] for pair in rows]
    fewer = True
    while fewer:  # the rest may have a larger least
        fewer = False
        open_rows = [
            tuple([of_kind[n] for n in numbers] for of_kind, numbers in zip(*one, strict=True))
            for one in zip(rows, left, strict=True)
        ]
        room = [problem.device - size for size in _least(problem, open_rows)]
        for options, pair, numbers in zip(problem.options, open_rows, left, strict=True):
            kinds = (options.activations, options.states)
            for kind, held in enumerate(pair):
                least = [min(column) for column in zip(*held, strict=True)]
                found: list[int] = []
                for number, row in zip(numbers[kind], held, strict=True):
                    below = kinds[kind][number].tier_bytes
                    if any(below.get(tier, 0) > limit for tier, limit in problem.tiers.items()):
                        continue
                    slots = zip(row, least, room, strict=True)
                    if all(one - low <= free for one, low, free in slots):
                        found.append(number)
                fewer |= len(found) < len(numbers[kind])
                numbers[kind] = found
    if any(not of_kind for pair in left for of_kind in pair):
        return problem  # there is no plan
    assert not problem.left, "numbers are those of all options"
    return problem.changed(left=tuple((pair[0], pair[1]) for pair in left))


def _rows(problem: Problem) -> list[tuple[_Rows, _Rows]]:
    """By unit, the rows of its activation options and of its state options."""

    def row(changes: tuple[tuple[int, int], ...]) -> list[int]:
        change = [0] * (2 * problem.count + 2)
        for slot, size in changes:
            change[slot] = size
        return list(accumulate(change[:-1]))

    return [(list(map(row, acts)), list(map(row, states))) for acts, states in problem.changes]


def _least(problem: Problem, rows: Sequence[Sequence[_Rows]]) -> list[int]:
    """Bytes per slot with the least of each row."""
    least = [[min(column) for column in zip(*held, strict=True)] for pair in rows for held in pair]
    base = base_bytes(problem.profile, problem.settings)
    return [base + sum(column) for column in zip(*least, strict=True)]
