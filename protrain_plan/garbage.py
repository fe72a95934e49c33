"""How often Python looks for garbage while it imports and plans.

Libraries are a third of a million objects that stay, and planning makes millions that go by
themselves. To look through them for cycles as often as Python does takes a tenth of both.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

USUAL = gc.get_threshold()
"""As in a run: where bytes are counted, cycles may hold tensors until then."""

SELDOM = (20_000, 10, 1_000)
"""Objects more before the young ones are looked through, and how often before older ones are."""


@contextmanager
def collected(often: tuple[int, int, int]) -> Iterator[None]:
    """Inside, Python looks for garbage so often."""
    before = gc.get_threshold()
    gc.set_threshold(*often)
    try:
        yield
    finally:
        gc.set_threshold(*before)
