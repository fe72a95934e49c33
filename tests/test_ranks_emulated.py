"""Ranks on accelerators of their own: collectives in streams, beside compute and transfers.

What `test_ranks` asks of CPUs, on the emulated device, whose streams are late at random. Every rank
has another device than the one that is current in its threads.
"""

from collections.abc import Iterator

import pytest

from tests import test_ranks, test_ranks_guards, test_ranks_checkpoints
from tests.ranks_cases import Cards, ranks_on
from tests.test_ranks import (  # noqa: F401 (asked again, on accelerators)
    test_two_ranks_match_ddp_bitwise_in_every_placement,
    test_two_ranks_match_ddp_bitwise_under_mixed_plans,
    test_two_ranks_add_micro_batches_up_as_ddp_does_bitwise,
    test_two_ranks_clip_one_norm,
    test_two_replicas_share_nothing_and_match_ddp_bitwise,
    test_two_ranks_match_ddp_bitwise_with_other_optimizers,
)
from tests.test_ranks_matrix import test_five_steps_of_two_rows_match_ddp_bitwise
from tests.test_ranks_checkpoints import test_two_ranks_save_and_as_many_go_on_under_other_plans_bitwise, test_one_device_saves_and_two_ranks_go_on
from tests.test_ranks_guards import (
    test_ranks_evaluate_together,
    test_ranks_evaluate_between_a_forward_and_its_backward,
    test_gradients_that_some_ranks_have_and_running_statistics_match_ddp_bitwise,
    test_a_step_that_overflows_on_one_rank_is_skipped_by_all,
)

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def cards(request: pytest.FixtureRequest) -> Iterator[None]:
    with ranks_on(Cards(("emulated:1", "emulated:0"), (0, 1), request.node.nodeid)):
        yield
