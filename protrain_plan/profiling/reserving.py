"""What an accelerator's allocator does beside the tensors that a step has."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protrain_runtime import devices
from protrain_runtime.measure import MemoryMeter, reachable_bytes

SMALL_BYTES, LARGE_BYTES = 512, 2**20 + 512
"""Tensors of the sizes that CUDA's allocator takes from segments of their own (2 MiB for those of
up to 1 MiB, 20 MiB for others; c10/cuda/CUDACachingAllocator.cpp, kSmallSize)."""

_MOST_TENSORS = 2**16


class Reserve:
    """What the allocator holds beyond what it has given out, at most, as far as steps show it.

    It takes memory from the device in segments and cuts blocks from them; every limit is on the
    segments. How much of them stays unused in a step was seen in those that were watched. Another
    plan's step may begin one more segment of each kind that they had, and hardly use it. Before
    each step all that nobody has is given back, so that a step has its own. On a CPU all of it is
    0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[tuple[int, int]] = []  # reserved, and given out, at most
        self._meters: list[MemoryMeter] = []

    @property
    def most_bytes(self) -> int:
        """What plans are to hold back."""
        if devices.on_host(self._device):
            return 0
        seen = [*self._seen, *(meter.reserved_and_allocated for meter in self._meters)]
        kinds = {self._segment_bytes(SMALL_BYTES), self._segment_bytes(LARGE_BYTES)}
        largest = max(reserved for reserved, _ in seen)
        return max(reserved - allocated for reserved, allocated in seen) + sum(
            segment for segment in kinds if segment <= largest
        )

    def _segment_bytes(self, num_bytes: int) -> int:
        """What the allocator takes from the device for one more tensor of this size."""
        devices.free_cached(self._device)
        before = devices.reserved_bytes(self._device)
        held: list[torch.Tensor] = []  # what fits into what there is
        while devices.reserved_bytes(self._device) == before and len(held) < _MOST_TENSORS:
            held.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return devices.reserved_bytes(self._device) - before

    def meter(self) -> MemoryMeter:
        """A meter of a step that is seen, too."""
        devices.free_cached(self._device)
        self._meters.append(MemoryMeter(self._device))
        return self._meters[-1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the step inside."""
        if devices.on_host(self._device):
            yield
            return
        gc.collect()
        devices.free_cached(self._device)
        devices.reset_peaks(self._device)
        yield
        reserved = devices.peak_reserved_bytes(self._device)
        self._seen.append((reserved, devices.peak_allocated_bytes(self._device)))


class Libraries:
    """What an accelerator's libraries keep for themselves in the allocator, once they have run.

    A matrix library has a workspace for each thread and stream that it ran in: forward's, and
    autograd's. What the first steps of a model leave on its own tensors counts, too. On a CPU such
    memory is part of the context.
    """

    def __init__(self, device: torch.device) -> None:
        """Before the first step: what Python can reach now is not theirs."""
        self._device = device
        self._before_bytes = 0
        if not devices.on_host(device):
            gc.collect()  # what nobody names any more would be missing later
            self._before_bytes = reachable_bytes(device)

    def kept_bytes(self) -> int:
        """What stands besides, now that no step runs and no gradient is there."""
        if devices.on_host(self._device):
            return 0
        gc.collect()
        return max(0, devices.allocated_bytes(self._device) - self._before_bytes)
