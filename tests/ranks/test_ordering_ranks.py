"""What keeps collectives in their place, taken away: what it keeps from happening does happen.

As `test_ordering`, of what only several ranks have: two of them, each on an emulated device, whose
streams come late to their work. A scenario returns where a rank's training differs from
DistributedDataParallel's. The table is docs/reference/ordering-ranks.md (`pytest --write-golden`).
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.mutations import AMONG_RANKS, assert_page, names
from tests.support.ranks_cases import ranks_on_emulated, run_ranks
from tests.support.ranks_scenarios import FIRST, MUTATIONS, PAGE, TRIES, assert_none_holds, holding

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def cards() -> Iterator[None]:
    with ranks_on_emulated(__name__):
        yield


SCENARIOS = tuple(dict.fromkeys(mutation.scenario for mutation in MUTATIONS))


def test_scenarios_hold(tmp_path: Path) -> None:
    first = tuple(dict.fromkeys(MUTATIONS[number].scenario for number in FIRST))
    for found in run_ranks(holding, 2, tmp_path, first):
        assert not any(any(by_rank) for by_rank in found.values()), found


@pytest.mark.slow
def test_they_do_not_hold_without_the_lines(tmp_path: Path) -> None:
    assert_none_holds(FIRST, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_scenario_holds(scenario: Callable[[], list[str]], tmp_path: Path) -> None:
    for found in run_ranks(holding, 2, tmp_path, [scenario] * TRIES):
        assert not any(any(by_rank) for by_rank in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=names(MUTATIONS))
def test_the_scenario_does_not_hold_without_the_line(number: int, tmp_path: Path) -> None:
    assert_none_holds((number,), tmp_path)


def test_the_page_names_every_line_and_what_it_keeps(request: pytest.FixtureRequest) -> None:
    assert_page(request, PAGE, MUTATIONS, AMONG_RANKS)
