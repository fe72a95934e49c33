"""A memory limit that everybody is under alike, and what a run took of it."""

import resource
from dataclasses import dataclass

import torch

from benchmarks.peers import accelerators
from benchmarks.peers.work import Work
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import (
    process_memory,
    reset_peak_rss,
    return_freed_memory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes at most since the limit was set.

    tensor_bytes   accelerators: what tensors took, as the caching allocator counts
    context_bytes  accelerators: what the context took in the end
    device_bytes   accelerators: what the allocator reserved, and the context; CPU: resident memory
    process_bytes  the process's resident memory: on accelerators the host's, without pinned memory
                   where the driver does not count it
    """

    tensor_bytes: int | None
    context_bytes: int | None
    device_bytes: int
    process_bytes: int


class Limit:
    """The work's limit: `before_building`, `before_training`, then `peaks`.

    On a CPU the operating system refuses more than `cap_bytes` of private memory (RLIMIT_DATA) from
    the start. On an accelerator the caching allocator gets what a card of `cap_bytes` would leave
    it beside the context; it binds from the first step on, because a plan's model is built whole.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._device = accelerators.found(work.device)

    def before_building(self) -> None:
        if not devices.on_host(self._device):
            return
        # The same for all, so that freed memory counts for nobody: see docs/decisions.md.
        return_freed_memory()
        if self._work.cap_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (self._work.cap_bytes, self._work.cap_bytes))

    def before_training(self) -> None:
        if not devices.on_host(self._device):
            devices.synchronize(self._device)
            devices.free_cached(self._device)
            if self._work.cap_bytes:
                room = max(0, self._work.cap_bytes - devices.context_bytes(self._device))
                accelerators.set_limit(self._device, room)
            torch.accelerator.reset_peak_memory_stats(self._device)
        reset_peak_rss()

    def peaks(self) -> Peaks:
        resident = process_memory().peak_resident_bytes
        if devices.on_host(self._device):
            return Peaks(
                tensor_bytes=None,
                context_bytes=None,
                device_bytes=resident,
                process_bytes=resident,
            )
        context = devices.context_bytes(self._device)  # kernels are loaded when they are first used
        return Peaks(
            tensor_bytes=torch.accelerator.max_memory_allocated(self._device),
            context_bytes=context,
            device_bytes=torch.accelerator.max_memory_reserved(self._device) + context,
            process_bytes=resident,
        )
