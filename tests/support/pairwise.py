"""Covering arrays: few rows in which every two values of two factors meet, where they may."""

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, str]
"""A value for each factor."""

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors with a value each, in the factors' order."""

_ATTEMPTS = 20
"""Rows that are tried for each row that is taken: the one with the most new pairs."""


@dataclass(frozen=True, kw_only=True)
class Impossible:
    """Values that never stand in one row, and why: a row is one if it has one of each factor's."""

    reason: str
    values: Mapping[str, Collection[str]]

    def holds(self, row: Row) -> bool:
        return all(row.get(factor) in values for factor, values in self.values.items())


def allowed_pairs(
    factors: Mapping[str, Sequence[str]], impossible: Sequence[Impossible]
) -> dict[Pair, Row]:
    """Every pair that some row can have, with such a row."""
    found: dict[Pair, Row] = {}
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(factors[one], factors[other]):
            start = dict(zip((one, other), pair, strict=True))
            row = next(_completed(start, factors, impossible), None)
            if row is not None:
                found[((one, pair[0]), (other, pair[1]))] = row
    return found


def pairs_of(row: Row, factors: Collection[str]) -> set[Pair]:
    """The pairs that a row covers."""
    return set(itertools.combinations(((factor, row[factor]) for factor in factors), 2))


def covering_rows(
    factors: Mapping[str, Sequence[str]],
    impossible: Sequence[Impossible],
    *,
    costly: Collection[str] = (),
) -> list[Row]:
    """Rows that cover every allowed pair; the same for the same factors.

    Greedy: each row starts from a pair that is left, and takes for one factor after the other, in
    an order drawn at random, the value that meets the most new pairs. Afterwards the factors that
    are `costly` have their first value in as many rows as can be, the last ones first.
    """
    left = dict.fromkeys(allowed_pairs(factors, impossible))
    rng = random.Random(0)
    rows: list[Row] = []
    while left:
        best: Row = {}
        new: set[Pair] = set()
        for first in rng.choices(list(left), k=_ATTEMPTS):
            order = rng.sample(list(factors), len(factors))
            row = next(_completed(dict(first), {f: factors[f] for f in order}, impossible, left))
            covered = pairs_of(row, factors) & left.keys()
            if len(covered) > len(new):
                best, new = row, covered
        rows.append({factor: best[factor] for factor in factors})
        for pair in new:
            del left[pair]
    for factor in costly:
        for number in reversed(range(len(rows))):
            cheaper = {**rows[number], factor: factors[factor][0]}
            rest = (row for index, row in enumerate(rows) if index != number)
            others = set[Pair]().union(*(pairs_of(row, factors) for row in rest))
            needed = pairs_of(rows[number], factors) - others - pairs_of(cheaper, factors)
            if not needed and not any(each.holds(cheaper) for each in impossible):
                rows[number] = cheaper
    return rows


def _completed(
    start: dict[str, str],
    factors: Mapping[str, Sequence[str]],
    impossible: Sequence[Impossible],
    left: Collection[Pair] = (),
) -> Iterator[Row]:
    """The rows that continue a start, those whose next value meets more pairs of `left` first."""
    if any(each.holds(start) for each in impossible):
        return
    factor = next((factor for factor in factors if factor not in start), None)
    if factor is None:
        yield start
        return

    def num_new(value: str) -> int:
        here = (factor, value)
        return sum(((f, v), here) in left or (here, (f, v)) in left for f, v in start.items())

    for value in sorted(factors[factor], key=num_new, reverse=True):
        yield from _completed({**start, factor: value}, factors, impossible, left)
