"""What memory a piece of code takes: live tensor bytes to the byte, and what the process holds.

`MemoryMeter` counts tensors, with one interface on CPU and CUDA. The functions below it ask the
operating system about the whole process (Linux; they do nothing elsewhere).
"""

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "protrain::mark::"  # the profiler's events of this name are marks; a number follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Live tensor bytes from one mark to the next (the last one: to the meter's end)."""

    label: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int


class MemoryMeter:
    """Live tensor bytes at marks, and the highest value between two marks.

        with MemoryMeter(device) as meter:
            meter.mark("forward")
            ...
        meter.segments

    Bytes are counted from `start_bytes` at entry: pass the bytes of the tensors that are alive
    then (`storage_bytes`) to get absolute numbers, or nothing to get what the code adds.

    On CUDA the numbers are those of the caching allocator (blocks rounded to 512 bytes); its
    peak statistics are reset at every mark. On a CPU they are exact, intra-operator temporaries
    included, but come from the profiler's allocation events, so:

    - only the entering thread is seen; a backward of CPU tensors runs in the thread that calls it;
    - a block that another thread frees counts until its address is given out again;
    - a block from before the meter counts as alive until the end (on CUDA its release is seen).

    `segments` is there after the exit, in the order of the marks. Meters cannot be nested on a
    CPU (the profiler runs once per process). The profiler slows the code: do not time it.
    """

    def __init__(self, device: torch.device | str = "cpu", *, start_bytes: int = 0) -> None:
        self._device = torch.device(device)
        if self._device.type not in ("cpu", "cuda"):
            raise ValueError(f"MemoryMeter: expected a cpu or cuda device, got {self._device}")
        self._start_bytes = start_bytes
        self._labels: list[str] = []
        self._segments: tuple[Segment, ...] | None = None
        self._profile: profile | None = None  # CPU, while inside
        self._readings: list[tuple[int, int]] = []  # CUDA: (peak until the mark, bytes at it)
        self._entry_bytes = 0  # CUDA: the allocator's bytes at entry

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._entry_bytes = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            with _without_chatter():
                self._profile.start()
        return self

    def mark(self, label: str) -> None:
        """End the segment that runs, if any, and start the one called `label`."""
        if self._device.type == "cuda":
            self._read_cuda()
        else:
            with record_function(f"{_MARK}{len(self._labels)}"):
                pass
        self._labels.append(label)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            self._read_cuda()
            self._segments = self._cuda_segments()
        else:
            assert self._profile is not None
            with _without_chatter():
                self._profile.stop()
            if error is None:
                self._segments = _cpu_segments(self._profile, self._labels, self._start_bytes)
            self._profile = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in the order of the marks; RuntimeError before the meter has ended."""
        if self._segments is None:
            raise RuntimeError("MemoryMeter: segments are known after the with block has ended")
        return self._segments

    def _read_cuda(self) -> None:
        # The caching allocator counts on the host when an operator is issued: no synchronisation.
        peak = torch.cuda.max_memory_allocated(self._device)
        self._readings.append((peak, torch.cuda.memory_allocated(self._device)))
        torch.cuda.reset_peak_memory_stats(self._device)

    def _cuda_segments(self) -> tuple[Segment, ...]:
        shift = self._start_bytes - self._entry_bytes
        return tuple(
            Segment(
                label=label,
                start_bytes=start[1] + shift,
                peak_bytes=max(start[1], end[0]) + shift,
                end_bytes=end[1] + shift,
            )
            for label, start, end in zip(
                self._labels, self._readings, self._readings[1:], strict=False
            )
        )


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Drop what kineto prints to the process's standard error when it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors` (a view counts its whole storage once)."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are; some may have no memory, and be on `meta`."""
    return next(p.device for p in model.parameters() if not p.is_meta)


def _cpu_segments(finished: profile, labels: list[str], start_bytes: int) -> tuple[Segment, ...]:
    """Replay the allocation events of one profile between its marks.

    Accounted per address, because the profiler remembers blocks across profiles: it reports the
    release of a block that an earlier profile saw, and no release of one that none saw.
    """
    assert finished.profiler is not None
    results = finished.profiler.kineto_results
    assert results is not None
    events = sorted(_flat(results.experimental_event_tree()), key=lambda e: e.start_time_ns)
    segments: list[Segment] = []
    sizes: dict[int, int] = {}  # address -> bytes of the live blocks seen
    live = start = peak = start_bytes
    current: str | None = None

    def close() -> None:
        if current is not None:
            segments.append(
                Segment(label=current, start_bytes=start, peak_bytes=peak, end_bytes=live)
            )

    for event in events:
        if event.name.startswith(_MARK):
            close()
            current = labels[int(event.name.removeprefix(_MARK))]
            start = peak = live
        elif event.tag.name == "Allocation":
            block = event.extra_fields
            # An allocation at a live address: another thread has freed the block meanwhile.
            live -= sizes.pop(block.ptr, 0)
            if block.alloc_size > 0:
                sizes[block.ptr] = block.alloc_size
                live += block.alloc_size
                peak = max(peak, live)
    close()
    return tuple(segments)


def _flat(events: list[Any]) -> Iterator[Any]:
    """All events of a profiler's tree, each before its children, without recursion."""
    stack = list(reversed(events))
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """What the operating system counts for this process (Linux: /proc/self/status).

    data_bytes           VmData: private writable memory, touched or not (what RLIMIT_DATA limits)
    resident_bytes       VmRSS
    peak_resident_bytes  VmHWM: the highest VmRSS since the start or `reset_peak_rss`
    """

    data_bytes: int
    resident_bytes: int
    peak_resident_bytes: int


def process_memory() -> ProcessMemory:
    """Memory of this process now; OSError where there is no /proc/self/status."""
    fields: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[key] = int(value.removesuffix(" kB")) * 1024
    return ProcessMemory(
        data_bytes=fields["VmData"],
        resident_bytes=fields["VmRSS"],
        peak_resident_bytes=fields["VmHWM"],
    )


def reset_peak_rss() -> None:
    """Make `peak_resident_bytes` start again from the present resident bytes (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


_M_TRIM_THRESHOLD = -1  # glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def return_freed_memory(threshold_bytes: int = 65536) -> bool:
    """Let glibc give a freed block of `threshold_bytes` or more back to the system at once.

    From then on resident memory follows the tensors; every such allocation costs page faults
    (10-35 % of step time), so this is for runs under a hard limit and for memory measurements,
    not for timing. False where the C library is not glibc: nothing has changed then.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
        libc = ctypes.CDLL("libc.so.6")
    except (OSError, ValueError):
        return False
    # Setting the trim threshold too turns off glibc's habit of raising both on its own.
    # One arena: every further thread would otherwise take address space of its own.
    settings = (
        (_M_MMAP_THRESHOLD, threshold_bytes),
        (_M_TRIM_THRESHOLD, threshold_bytes),
        (_M_ARENA_MAX, 1),
    )
    done = all(libc.mallopt(option, value) == 1 for option, value in settings)
    libc.malloc_trim(0)  # what was freed before
    return done
