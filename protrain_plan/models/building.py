"""What every kind of model source needs to build: dtypes, and random states that are given back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protrain_plan.records.profile import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The random states that building may use start from the seed, and are put back after."""
    before = random.getstate()
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(before)
