"""How often Python looks for garbage while it imports and plans.

Libraries are a third of a million objects that stay, and planning makes millions that go by
themselves. To look through them for cycles as often as Python does takes a tenth of both.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
_SELDOM = (20_000, 10, 1_000)
"""Objects more before the young ones are looked through, and how often before older ones are."""


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Inside, Python looks for garbage seldom."""
    with _thresholds(_SELDOM):
        yield


@contextmanager
def collected_as_usual() -> Iterator[None]:
    """Inside, as it does in a run: where bytes are counted, cycles may hold tensors until then."""
    with _thresholds(_USUAL):
        yield


@contextmanager
def _thresholds(wanted: tuple[int, int, int]) -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*wanted)
    try:
        yield
    finally:
        gc.set_threshold(*before)
