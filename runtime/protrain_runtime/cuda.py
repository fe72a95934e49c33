"""What only CUDA has: the one module that names `torch.cuda`. ROCm's builds answer to the same."""

from collections.abc import Callable
from functools import partial

import torch


def pin(address: int, num_bytes: int) -> Callable[[], None]:
    """Register host pages, so that the card copies from and to them; returns what undoes it.

    PyTorch's own pinned memory is rounded up to powers of two, and is never given back.
    """
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    return partial(runtime.cudaHostUnregister, address)


def memory_limit(device: torch.device) -> int | None:
    """The cap of `set_per_process_memory_fraction`; it holds for what the allocator reserves."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return int(torch.cuda.get_per_process_memory_fraction(device) * total)
