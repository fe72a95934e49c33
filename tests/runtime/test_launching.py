"""Calls of Python and of torch that a planned step takes beyond a plain one: they may only fall."""

import sys

import pytest

from tests.support import launching

MOST = {
    "E": {"python": 636, "torch": 134, "lanes": 0},
    "S": {"python": 377, "torch": 218, "lanes": 0},
    "O": {"python": 285, "torch": 112, "lanes": 35},
    "D": {"python": 354, "torch": 139, "lanes": 0},
    "F": {"python": 523, "torch": 285, "lanes": 35},
}
"""Per block and step, by plan (`launching.PLANS`): functions of Python and of torch that the thread
that launches calls, and all that lanes' threads call. A change that takes fewer lowers its row.
Between runs F differs by a few calls, as a lane's thread may be at work still."""


@pytest.mark.emulated
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="comprehensions are no calls there")
@pytest.mark.parametrize("plan", MOST)
def test_a_step_calls_no_more_than_before(plan: str) -> None:
    found = launching.calls(plan)
    lanes = sum(count for kind, count in found.items() if kind.startswith("lanes: "))
    counted = {"python": found["python"], "torch": found["torch"], "lanes": lanes}
    assert {kind: count for kind, count in counted.items() if count > MOST[plan][kind]} == {}
