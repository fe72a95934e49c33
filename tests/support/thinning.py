"""Tables of cases, a part in every run of the tests and the rest in the slow one."""

from collections.abc import Sequence

import pytest


def thinned(*axes: Sequence[object], every: int = 3, of_these: int = 1) -> list[object]:
    """All combinations of the axes' values, as parameters: one in `every` is fast, the rest slow.

    The fast ones lie on diagonals, so that no value of any axis of `every` values or more is left
    out, and two values that meet in no fast case meet in a slow one. Where cases are costly, one in
    so many `of_these` is fast.
    """
    cases: list[tuple[tuple[object, ...], int]] = [((), 0)]
    for axis in axes:
        cases = [
            ((*values, value), number + position)
            for values, number in cases
            for position, value in enumerate(axis)
        ]
    fast = [values for values, number in cases if number % every == 0][::of_these]
    return [
        pytest.param(*values, marks=() if values in fast else pytest.mark.slow)
        for values, _ in cases
    ]
