"""Without the lines that keep collectives in their place, they do go wrong.

As `test_ordering`, of what only several ranks have: two of them, each on an emulated device, whose
streams come late to their work. A scenario returns where a rank's training differs from
DistributedDataParallel's. The table is in `tests.support.mutations`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mutations import AMONG_RANKS, names
from tests.support.ranks_cases import ranks_on_emulated, run_ranks
from tests.support.ranks_scenarios import SCENARIOS, TRIES, assert_none_holds, holding

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def cards() -> Iterator[None]:
    with ranks_on_emulated(__name__):
        yield


def test_scenarios_hold(tmp_path: Path) -> None:
    assert run_ranks(holding, 2, tmp_path, [*SCENARIOS]) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenario_holds(scenario: str, tmp_path: Path) -> None:
    assert run_ranks(holding, 2, tmp_path, [scenario] * TRIES) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(AMONG_RANKS)), ids=names(AMONG_RANKS))
def test_the_scenario_does_not_hold_without_the_line(number: int, tmp_path: Path) -> None:
    assert_none_holds((number,), tmp_path)
