"""Plans on several ranks against DistributedDataParallel, over what a training run may combine.

Every two values of two factors meet in some row, and each row trains five steps. All of it is
bitwise, on four ranks too, and with clipping:

- In each step two ranks count, and the losses of others are multiplied by zero. A sum of two
  numbers and zeros does not depend on their order, which gloo chooses by where in a buffer they
  lie. Over the steps every rank counts, with others.
- A norm of parts is rounded otherwise than that of the whole. The norm that the plan's ranks clip
  by is compared with the norm that DistributedDataParallel's ranks have, within a few roundings,
  and what they clip by is the same number.
"""

from pathlib import Path

import pytest

from tests.support.pairwise import allowed_pairs, pairs_of
from tests.support.ranks_rows import (
    COUNTED,
    FACTORS,
    IMPOSSIBLE,
    NUM_STEPS,
    assert_rows,
    every_row,
    numbered,
)


def test_rows_cover_every_pair_that_is_possible() -> None:
    covered = set().union(*(pairs_of(row, FACTORS) for row in every_row()))
    assert covered == set(allowed_pairs(FACTORS, IMPOSSIBLE))
    assert not any(each.holds(row) for row in every_row() for each in IMPOSSIBLE)


def test_every_rank_counts_in_steps_of_four() -> None:
    assert all(len(set(counted)) == 2 for counted in COUNTED[4])
    assert {rank for counted in COUNTED[4] for rank in counted} == set(range(4))
    assert len(COUNTED[4]) == NUM_STEPS


def test_five_steps_of_two_rows_match_ddp_bitwise(tmp_path: Path) -> None:
    """Rows that have all of a training run in few units."""
    rows = [
        (number, row)
        for number, row in numbered("2", 0, 1)
        if row["model"] == "functional" and row["placement"] == "mixed"
    ]
    assert_rows(rows[:2], 2, tmp_path)


PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", FACTORS["ranks"])
def test_five_steps_match_ddp_bitwise(ranks: str, part: int, tmp_path: Path) -> None:
    rows = numbered(ranks, part, PARTS)
    assert rows
    assert_rows(rows, int(ranks), tmp_path)
