"""What an accelerator's allocator does beside the tensors that a step has."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from protrain_runtime import devices
from protrain_runtime.measure import MemoryMeter, reachable_bytes


class Reserve:
    """What the allocator holds beyond what it has given out, at most, in the steps that it saw.

    It takes memory from the device in segments and cuts blocks from them; every limit is on the
    segments. Before each step all that nobody has is given back, so that a step has its own. On a
    CPU all of it is 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen_bytes = 0
        self._meters: list[MemoryMeter] = []

    @property
    def most_bytes(self) -> int:
        return max([self._seen_bytes, *(meter.allocator_bytes for meter in self._meters)])

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
        beyond = reserved - devices.peak_allocated_bytes(self._device)
        self._seen_bytes = max(self._seen_bytes, beyond)


class Libraries:
    """What an accelerator's libraries keep for themselves in the allocator, once they have run.

    A matrix library has a workspace for each thread and stream that it ran in: forward's, and
    autograd's. What the first steps of a model leave on its own tensors counts, too. On a CPU such
    memory is part of the context.
    """

    def __init__(self, device: torch.device) -> None:
        """Before the first step: what Python can reach now is not theirs."""
        self._device = device
        self._before_bytes = 0 if devices.on_host(device) else reachable_bytes(device)

    def kept_bytes(self) -> int:
        """What stands besides, now that no step runs and no gradient is there."""
        if devices.on_host(self._device):
            return 0
        gc.collect()
        return max(0, devices.allocated_bytes(self._device) - self._before_bytes)
