"""Ranks on accelerators of their own: collectives in streams, beside compute and transfers.

What `test_ranks` asks of CPUs, on the emulated device, whose streams are late at random. Every rank
has another device than the one that is current in its threads.
"""

from collections.abc import Iterator

import pytest

from tests.ranks_cases import Cards, ranks_on
from tests.test_ranks import (  # noqa: F401 (asked again, on accelerators)
    test_two_ranks_match_ddp_bitwise_in_every_placement,
)

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def cards(request: pytest.FixtureRequest) -> Iterator[None]:
    with ranks_on(Cards(("emulated:1", "emulated:0"), (0, 1), request.node.nodeid)):
        yield
