"""Memory meters: live tensor bytes to the byte, and the process's memory.

`MemoryMeter` counts tensors, with one interface on CPU and accelerators. The functions below it ask
the operating system (Linux; no-ops elsewhere).
"""

import ctypes
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain_runtime.contract.program.program import block_bytes, in_blocks
from protrain_runtime.devices import device as devices

# The profiler's events of these names are marks, by number, and ends of storages from before the
# profile, by bytes.
_MARK, _END = "protrain::mark::", "protrain::end::"

_BORROWS = "_protrain_borrows"


def _note(name: str) -> None:
    with record_function(name):
        pass


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

    On an accelerator the numbers are those of its allocator (whole blocks of 512 bytes); its peak
    statistics are reset at every mark, and `reserved_and_allocated` are the highest of them. On a
    CPU they are exact, intra-operator temporaries included, but come from the profiler's allocation
    events, so:

    - only the entering thread is seen; a backward of CPU tensors runs in the thread that calls it;
    - a block that another thread frees counts until its address is given out again;
    - a block from before the meter counts as alive until the end (an allocator sees its release),
      unless it is the memory of a storage that is given as `standing`: until that is freed, or
      until the next mark where another thread frees it.

    `segments` is there after the exit, in the order of the marks. Meters cannot be nested on a
    CPU (the profiler runs once per process). The profiler slows the code: do not time it.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        start_bytes: int = 0,
        standing: Iterable[torch.UntypedStorage] = (),
    ) -> None:
        self._device = torch.device(device)
        self._on_host = devices.on_host(self._device)
        self._start_bytes = start_bytes
        self._ended: list[int] = []  # bytes of freed standing storages, not noted yet
        self._ends = [weakref.finalize(one, self._end, one.nbytes()) for one in standing]
        for end in self._ends:
            end.atexit = False
        self._thread = 0  # the entering one, while inside
        self._labels: list[str] = []
        self._segments: tuple[Segment, ...] | None = None
        self._profile: profile | None = None  # CPU, while inside
        # On an accelerator: (peak until the mark, bytes at it), the allocator's bytes at entry, and
        # the most that it reserved.
        self._readings: list[tuple[int, int]] = []
        self._entry_bytes = 0
        self._reserved_bytes = 0

    def __enter__(self) -> Self:
        if not self._on_host:
            self._entry_bytes = torch.accelerator.memory_allocated(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            with _without_chatter():
                self._profile.start()
            self._thread = threading.get_ident()
            while self._ended:  # freed between the count of bytes and here, unseen
                self._start_bytes -= self._ended.pop()
        return self

    def _end(self, num_bytes: int) -> None:
        """Note the end of a standing storage, or defer to the thread that is seen."""
        if threading.get_ident() == self._thread:
            _note(f"{_END}{num_bytes}")
        else:
            self._ended.append(num_bytes)

    def mark(self, label: str) -> None:
        """End the running segment, if any, and start the one called `label`."""
        if not self._on_host:
            self._read()
        else:
            while self._ended:
                _note(f"{_END}{self._ended.pop()}")
            _note(f"{_MARK}{len(self._labels)}")
        self._labels.append(label)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not self._on_host:
            self._read()
            shift = self._start_bytes - self._entry_bytes
            self._segments = tuple(
                Segment(
                    label=label,
                    start_bytes=start + shift,
                    peak_bytes=max(start, peak) + shift,
                    end_bytes=end + shift,
                )
                # One reading more than labels: the first ends no segment.
                for label, (_, start), (peak, end) in zip(
                    self._labels, self._readings, self._readings[1:], strict=False
                )
            )
        else:
            assert self._profile is not None
            with _without_chatter():
                self._profile.stop()
            for end in self._ends:
                end.detach()
            if error is None:
                self._segments = _cpu_segments(self._profile, self._labels, self._start_bytes)
            self._profile = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, in order of marks; RuntimeError inside the with block."""
        if self._segments is None:
            raise RuntimeError("MemoryMeter: segments are known after the with block has ended")
        return self._segments

    @property
    def reserved_and_allocated(self) -> tuple[int, int]:
        """The most bytes that an accelerator's allocator held, and gave out; zeros on a CPU."""
        return self._reserved_bytes, max((peak for peak, _ in self._readings), default=0)

    def _read(self) -> None:
        # The allocator counts on the host when an operator is issued: no synchronisation.
        peak = torch.accelerator.max_memory_allocated(self._device)
        self._readings.append((peak, torch.accelerator.memory_allocated(self._device)))
        reserved = torch.accelerator.max_memory_reserved(self._device)
        self._reserved_bytes = max(self._reserved_bytes, reserved)
        torch.accelerator.reset_peak_memory_stats(self._device)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Drop kineto's output to standard error at start and stop."""
    if sys.stderr is not None:  # a model may have closed it
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


PARTS = "_protrain_parts"
"""The parts of a fake sparse tensor, whose own indices and values are empty."""


def strided_parts(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors with storages: of a sparse tensor, its indices and values."""
    for tensor in tensors:
        if tensor.layout == torch.strided:
            yield tensor
        elif PARTS in tensor.__dict__:
            yield from tensor.__dict__[PARTS]
        elif tensor.layout == torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        else:
            plain = tensor.detach()
            if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
                yield from (plain.crow_indices(), plain.col_indices())
            else:  # by columns
                yield from (plain.ccol_indices(), plain.row_indices())
            yield plain.values()


def addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Addresses of the tensors' storages."""
    return frozenset(part.untyped_storage().data_ptr() for part in strided_parts(tensors))


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The distinct storages behind `tensors`, by identity."""
    with torch._C.DisableTorchFunctionSubclass():  # stand-ins refuse the question
        found = [part.untyped_storage() for part in strided_parts(tensors)]
    return {storage._cdata: storage for storage in found}


def storage_bytes(tensors: Iterable[torch.Tensor], *, block: int = 1) -> int:
    """Bytes of the distinct storages behind `tensors`, each in whole blocks of `block` bytes."""
    return sum(in_blocks(storage.nbytes(), block) for storage in storages_of(tensors).values())


def reachable_bytes(device: torch.device) -> int:
    """Bytes, in the allocator's blocks, of all tensors on an accelerator that Python can reach."""
    return storage_bytes(reachable(device), block=block_bytes(device.type))


def borrowing(view: torch.Tensor) -> torch.Tensor:
    """Mark a `view` of memory that it does not own: it counts for nothing."""
    setattr(view, _BORROWS, True)
    return view


def reachable(device: torch.device) -> list[torch.Tensor]:
    """All tensors on a device that Python can reach, except fake ones."""
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    found: list[Any] = []
    for tensor in (each for each in tensors if _BORROWS not in each.__dict__):
        # A torch.func tensor has no storage: a compiler may keep some.
        while _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        found.append(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # stand-ins for gradients refuse questions
        real = [  # fake tensors and wrappers only claim to be on their device
            t for t in found if not (isinstance(t, FakeTensor) or is_traceable_wrapper_subclass(t))
        ]
        return [t for t in real if t.device == device]


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters; some may be on `meta`."""
    return next(p.device for p in model.parameters() if not p.is_meta)


def _cpu_segments(finished: profile, labels: list[str], start_bytes: int) -> tuple[Segment, ...]:
    """Replay one profile's allocation events between its marks.

    Accounted per address: the profiler remembers blocks across profiles, and reports the release of
    a block seen by an earlier profile, but not of one that none saw.
    """
    assert finished.profiler is not None
    results = finished.profiler.kineto_results
    assert results is not None
    events: list[Any] = []  # each before its children
    stack = [*reversed(results.experimental_event_tree())]
    while stack:
        events.append(stack.pop())
        stack += reversed(events[-1].children)
    events.sort(key=lambda event: event.start_time_ns)
    rows: list[tuple[str, list[int]]] = []  # each segment's label; start, peak and end
    sizes: dict[int, int] = {}  # address -> bytes of the live blocks seen
    live = start_bytes
    for event in events:
        if event.name.startswith(_MARK):
            rows.append((labels[int(event.name.removeprefix(_MARK))], [live, live, live]))
        elif event.name.startswith(_END):
            live -= int(event.name.removeprefix(_END))
        elif event.tag.name == "Allocation":
            block = event.extra_fields
            # An allocation at a live address: another thread has freed the block.
            live -= sizes.pop(block.ptr, 0)
            if block.alloc_size > 0:
                sizes[block.ptr] = block.alloc_size
                live += block.alloc_size
        if rows:
            _, row = rows[-1]
            row[1:] = max(row[1], live), live
    return tuple(
        Segment(label=label, start_bytes=start, peak_bytes=peak, end_bytes=end)
        for label, (start, peak, end) in rows
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The operating system's counts for this process (Linux: /proc/self/status).

    data_bytes           VmData: private writable memory, touched or not (what RLIMIT_DATA limits)
    resident_bytes       VmRSS
    peak_resident_bytes  VmHWM: the highest VmRSS since the start or `reset_peak_rss`
    """

    data_bytes: int
    resident_bytes: int
    peak_resident_bytes: int


def process_memory() -> ProcessMemory:
    """This process's memory now; OSError without /proc/self/status."""
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
    """Restart `peak_resident_bytes` from the present resident bytes (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def return_freed_memory(threshold_bytes: int = 65536) -> bool:
    """Make glibc return freed blocks of `threshold_bytes` or more to the system at once.

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
    settings = {  # by glibc's numbers in malloc.h
        -3: threshold_bytes,  # M_MMAP_THRESHOLD
        -1: threshold_bytes,  # M_TRIM_THRESHOLD: stops glibc from raising both
        -8: 1,  # M_ARENA_MAX: each further thread would take its own address space
    }
    done = all(libc.mallopt(option, value) == 1 for option, value in settings.items())
    libc.malloc_trim(0)  # earlier frees
    return done
