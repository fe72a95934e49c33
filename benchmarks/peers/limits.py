"""A memory limit that everybody is under alike, and what a run took of it."""

import resource
from dataclasses import dataclass

import torch

from benchmarks.peers.work import Work
from protrain_runtime.measure import process_memory, reset_peak_rss, return_freed_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes at most since the limit was set.

    tensor_bytes   CUDA: what tensors took, as the caching allocator counts
    device_bytes   CUDA: what the allocator reserved, and the context; CPU: resident memory
    process_bytes  the process's resident memory: on CUDA the host's, without pinned memory where
                   the driver does not count it
    """

    tensor_bytes: int | None
    device_bytes: int
    process_bytes: int


class Limit:
    """The work's limit: `before_building`, `before_training`, then `peaks`.

    On a CPU the operating system refuses more than `cap_bytes` of private memory (RLIMIT_DATA) from
    the start. On CUDA the caching allocator gets what a card of `cap_bytes` would leave it beside
    the context; it binds from the first step on, because a plan's model is built whole.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._context_bytes = 0

    def before_building(self) -> None:
        if self._work.device == "cuda":
            self._context_bytes = _context_bytes()
            return
        # The same for all, so that freed memory counts for nobody: see docs/decisions.md.
        return_freed_memory()
        if self._work.cap_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (self._work.cap_bytes, self._work.cap_bytes))

    def before_training(self) -> None:
        if self._work.device == "cuda":
            torch.cuda.empty_cache()
            if self._work.cap_bytes:
                total = torch.cuda.get_device_properties(0).total_memory
                room = max(0, self._work.cap_bytes - self._context_bytes)
                torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
            torch.cuda.reset_peak_memory_stats()
        reset_peak_rss()

    def peaks(self) -> Peaks:
        resident = process_memory().peak_resident_bytes
        if self._work.device != "cuda":
            return Peaks(tensor_bytes=None, device_bytes=resident, process_bytes=resident)
        return Peaks(
            tensor_bytes=torch.cuda.max_memory_allocated(),
            device_bytes=torch.cuda.max_memory_reserved() + self._context_bytes,
            process_bytes=resident,
        )


def _context_bytes() -> int:
    """What the device lost to this process before any tensor; other processes count with it."""
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
