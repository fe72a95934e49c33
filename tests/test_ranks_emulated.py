"""Ranks on accelerators of their own: collectives in streams, beside compute and transfers.

What is asked of CPUs elsewhere is asked of the emulated device here, whose streams are late at
random. No rank's device is the one that is current in its threads.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.records.plan import Offload, Swap
from tests import test_ranks, test_ranks_checkpoints, test_ranks_guards
from tests.ranks_cases import ranks_on_emulated
from tests.runtime_cases import FRACTIONAL, decided, described
from tests.test_ranks import PLACES, Loop, assert_as_ddp, in_turn, several
from tests.test_ranks_matrix import assert_rows, numbered

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def cards(request: pytest.FixtureRequest) -> Iterator[None]:
    with ranks_on_emulated(request.node.nodeid):
        yield


NAME = "functional"


def test_two_ranks_match_ddp_bitwise(tmp_path: Path) -> None:
    """Every placement, and transfers cut in two."""
    cut = decided(described(NAME), Swap(tier="host"), Offload(tier="host"), FRACTIONAL[0])
    units = (in_turn(NAME, *PLACES), in_turn(NAME, *PLACES[2:], *PLACES[:2]), cut)
    assert_as_ddp(2, Loop(NAME), [several(Loop(NAME), each, 2) for each in units], tmp_path)


def test_two_ranks_add_micro_batches_up_as_ddp_does_bitwise(tmp_path: Path) -> None:
    loop = Loop(NAME, micro_batches=2)
    plan = several(loop, in_turn(NAME, *PLACES), 2)
    assert_as_ddp(2, loop, [plan, replace(plan, updates="after backward")], tmp_path)


def test_two_ranks_clip_one_norm(tmp_path: Path) -> None:
    loop = Loop(NAME, clips=True, double=True)
    plans = [several(loop, in_turn(NAME, *PLACES), 2)]
    assert_as_ddp(2, loop, plans, tmp_path, tolerance=test_ranks.ROUNDING)


def test_buffers_are_those_of_the_first_rank_bitwise(tmp_path: Path) -> None:
    """And what only some ranks have gradients for."""
    test_ranks_guards.test_gradients_that_some_ranks_have_and_running_statistics_match_ddp_bitwise(
        tmp_path
    )


def test_ranks_evaluate_together(tmp_path: Path) -> None:
    test_ranks_guards.test_ranks_evaluate_together(tmp_path)


def test_two_ranks_save_and_as_many_go_on_under_other_plans_bitwise(tmp_path: Path) -> None:
    test_ranks_checkpoints.test_two_ranks_save_and_as_many_go_on_under_other_plans_bitwise(tmp_path)


@pytest.mark.slow
class TestMore:
    """What takes longer."""

    test_placements = staticmethod(test_ranks.test_two_ranks_match_ddp_bitwise_in_every_placement)
    test_plans = staticmethod(test_ranks.test_two_ranks_match_ddp_bitwise_under_mixed_plans)
    test_micro_batches = staticmethod(
        test_ranks.test_two_ranks_add_micro_batches_up_as_ddp_does_bitwise
    )
    test_optimizers = staticmethod(
        test_ranks.test_two_ranks_match_ddp_bitwise_with_other_optimizers
    )
    test_clipping = staticmethod(test_ranks.test_two_ranks_clip_one_norm)
    test_replicas = staticmethod(test_ranks.test_two_replicas_share_nothing_and_match_ddp_bitwise)
    test_four_ranks = staticmethod(test_ranks.test_four_ranks_match_ddp_within_the_rounding_of_sums)
    test_overflows = staticmethod(
        test_ranks_guards.test_a_step_that_overflows_on_one_rank_is_skipped_by_all
    )
    test_evaluation = staticmethod(
        test_ranks_guards.test_ranks_evaluate_between_a_forward_and_its_backward
    )
    test_four_save_and_others_go_on = staticmethod(
        test_ranks_checkpoints.test_four_ranks_save_and_two_one_and_plain_pytorch_go_on
    )

    test_one_saves_and_two_go_on = staticmethod(
        test_ranks_checkpoints.test_one_device_saves_and_two_ranks_go_on
    )

    @pytest.mark.parametrize("part", range(8))
    def test_rows_of_the_matrix(self, part: int, tmp_path: Path) -> None:
        assert_rows(numbered("2", part, 8), 2, tmp_path)
