"""Compressed copies as their tests look at them: their seed, and their scales."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from protrain_runtime.activations import compressed
from protrain_runtime.activations.compressed import GROUP


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The packing's own seed."""
    compressed.SEED = seed
    try:
        yield
    finally:
        compressed.SEED = 0


def scales_of(packed: Tensor, count: int) -> Tensor:
    """Of every element: float64 [elements]."""
    groups = -(-count // GROUP)
    scales = packed[: 4 * groups].view(torch.float32).double()
    return scales.repeat_interleave(GROUP)[:count]
