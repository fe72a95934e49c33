"""`probe`: this machine as a `Hardware` record, measured in a few seconds."""

import contextlib
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from protrain_plan.errors import ProtrainError
from protrain_plan.hardware.interference import (
    contention,
    in_worker,
    kept_fraction,
    rates_together,
    runs_per_second,
    update_step,
)
from protrain_plan.hardware.overheads import Overheads, measure_overheads
from protrain_plan.hardware.rates import measure_rates
from protrain_plan.records.hardware import Contention, Device, DeviceKind, Hardware, Link, Tier
from protrain_plan.records.profile import DType
from protrain_plan.units import four_digits
from protrain_runtime.measure import process_memory
from protrain_runtime.stores import DiskStore

_BUFFER_BYTES = 2**20
"""What models that a CPU trains move at a time: tensors of up to a few MiB, too small for the huge
pages that larger buffers ask for, which are read more than twice as fast (docs/decisions.md)."""
_FILE_BYTES = 128 * _BUFFER_BYTES  # per direction
_ROUNDS = 3

Progress = Callable[[str, float], None]
"""Told of what is being measured, and of the share that is done."""


def probe(
    device: DeviceKind,
    *,
    spill_directory: Path,
    name: str | None = None,
    context_bytes: int | None = None,
    dtype: DType = "float32",
    progress: Progress = lambda *_: None,
) -> Hardware:
    """Measure this machine; about 10 s on two cores, 256 MiB of files that are gone afterwards.

    `context_bytes` is recorded as given; without it, as what this process holds in the end, which
    is less exact than what the profiler measures in a model's own steps. `dtype` is that of the
    updates whose speed and contention with compute are measured. On CUDA, contention is taken as
    none: copies and the host's updates run on other hardware than compute.

    ProtrainError where there is no such device, or `spill_directory` cannot be written.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ProtrainError(
            "this machine has no CUDA device that torch can use",
            fix="--device cpu, or a CUDA build of torch on a machine with a GPU",
        )
    below = _below(device, spill_directory, dtype, progress)
    progress("measuring compute and memory", 0.8)
    rates = measure_rates(device, dtype=dtype)
    if below.overheads is not None:
        rates = replace(rates, host_piece_s=four_digits(below.overheads.piece_s))
    progress("done", 1.0)
    described = _device(device, held_bytes(device) if context_bytes is None else context_bytes)
    return Hardware(
        name=name or f"{device}-{described.num_threads}",
        device=described,
        tiers=below.tiers,
        read_contention=below.read,
        write_contention=below.write,
        update_contention=below.update,
        rates=rates,
        sources=(f"measured on the machine itself, with torch {torch.__version__}",),
        move_s=four_digits(below.overheads.move_s) if below.overheads else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Below:
    """The tiers below a device, and how their lanes and updates interfere with compute.

    Without overheads, the hardware moves by itself while the host prepares what is next.
    """

    tiers: tuple[Tier, ...]
    read: Contention
    write: Contention
    update: Contention
    overheads: Overheads | None = None


def _below(device: DeviceKind, directory: Path, dtype: DType, progress: Progress) -> _Below:
    with (
        contextlib.closing(SpillFile(directory, device)) as reads,
        contextlib.closing(SpillFile(directory, device)) as writes,
    ):
        progress("measuring the disk", 0.0)
        link = _disk_link(reads, writes)
        disk = Tier(name="disk", capacity_bytes=shutil.disk_usage(directory).free, link=link)
        if device == "cuda":
            progress("measuring the link to host memory", 0.5)
            alone = Contention(compute=1.0, lane=1.0)
            return _Below(tiers=(_pinned_host(), disk), read=alone, write=alone, update=alone)
        progress("measuring the runtime itself", 0.25)
        overheads = measure_overheads(directory)
        progress("measuring what lanes and compute leave each other", 0.3)
        link = replace(link, latency_s=overheads.transfer_s)
        return _Below(
            tiers=(replace(disk, link=link),),
            overheads=overheads,
            read=contention(reads.read),
            write=contention(writes.write),
            update=contention(update_step(dtype, device="cpu")),
        )


def held_bytes(device: DeviceKind) -> int:
    """What this process holds besides tensors, of which it has none here; 0 where none can say."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
    with contextlib.suppress(OSError):
        return process_memory().data_bytes
    return 0


def host_memory_bytes() -> int:
    """Memory of this machine, or what its control group (a container's limit) leaves of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in (
        Path("/sys/fs/cgroup/memory.max"),  # version 2
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1: huge where unlimited
    ):
        try:
            limit = limit_file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _device(kind: DeviceKind, context_bytes: int) -> Device:
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory_bytes = properties.name, properties.total_memory
    else:
        name, memory_bytes = _processor(), host_memory_bytes()
    return Device(
        kind=kind,
        name=name,
        memory_bytes=memory_bytes,
        context_bytes=context_bytes,
        num_threads=torch.get_num_threads(),
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return "cpu"


# --- disk -----------------------------------------------------------------------------------------


class SpillFile:
    """A spill file of the runtime's, and memory of the same size to write it from.

    Memory for the whole file, because one buffer used again and again would stay in the cache. On a
    CPU machine what is read goes to fresh memory, as in a run: touching that for the first time is
    part of a read. On others it goes to memory that stays, as their staging does.
    """

    def __init__(self, directory: Path, device: DeviceKind) -> None:
        self._device = device
        self._store = DiskStore(directory)
        free_bytes = shutil.disk_usage(directory).free
        num_buffers = min(_FILE_BYTES, free_bytes // 4) // _BUFFER_BYTES
        if num_buffers == 0:
            raise ProtrainError(
                f"too little room to measure the disk: {free_bytes} bytes free",
                source=str(directory),
                fix="free some space there, or name another spill directory",
            )
        self.num_bytes = num_buffers * _BUFFER_BYTES
        self._source = torch.ones(self.num_bytes, dtype=torch.uint8)
        self._store.reserve(self.num_bytes)
        self.write()  # allocates the blocks: what a run does once, in its first step

    def read(self) -> None:
        """Read the whole file, buffer by buffer."""
        for at in range(0, self.num_bytes, _BUFFER_BYTES):
            self._store.read(at, self._target(at))

    def _target(self, at: int) -> torch.Tensor:
        """Where the buffer that stands at `at` is read to."""
        if self._device == "cpu":
            # The system's own pages: the C library may have some that were touched before.
            return torch.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), dtype=torch.uint8)
        return self._source[at : at + _BUFFER_BYTES]

    def write(self) -> None:
        """Write the whole file over, buffer by buffer."""
        for at in range(0, self.num_bytes, _BUFFER_BYTES):
            self._store.write(at, self._source[at : at + _BUFFER_BYTES])

    def read_little(self, target: torch.Tensor) -> None:
        """Read as much as `target` holds: what a read costs apart from its bytes."""
        self._store.read(0, target)

    def close(self) -> None:
        """Free the file."""
        self._store.close()


def _disk_link(reads: SpillFile, writes: SpillFile) -> Link:
    """The directory's speed as the runtime sees it: buffered, without fsync, in a lane's thread.

    These are speeds through the page cache. They hold while the spilled bytes fit in memory that
    nobody else wants; a run that spills more drops to the disk's own speed, which this does not
    measure. Reads and writes use files of their own, so that both can run at once.
    """
    read_rates, write_rates, kept = [], [], []  # whole files per second
    for _ in range(_ROUNDS):
        read_rates.append(in_worker(lambda: runs_per_second(reads.read)))
        write_rates.append(in_worker(lambda: runs_per_second(writes.write)))
        read_beside, write_beside = rates_together(reads.read, writes.write)
        kept.append((read_beside / read_rates[-1] + write_beside / write_rates[-1]) / 2)
    page = torch.empty(4096, dtype=torch.uint8)
    latencies = [_seconds(lambda: reads.read_little(page)) for _ in range(50)]
    return Link(
        read_bytes_per_s=reads.num_bytes * statistics.median(read_rates),
        write_bytes_per_s=writes.num_bytes * statistics.median(write_rates),
        latency_s=statistics.median(latencies),
        duplex=kept_fraction(kept, at_least=0.5),
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- pinned host memory of a CUDA machine ---------------------------------------------------------


def _pinned_host() -> Tier:
    """Copies between pinned host memory and the device, one way and both ways at once."""
    num_bytes = 2 * 2**26
    up_host, down_host = (torch.ones(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2))
    up_device, down_device = (torch.ones_like(t, device="cuda") for t in (up_host, down_host))
    up_stream, down_stream = torch.cuda.Stream(), torch.cuda.Stream()

    def up() -> None:
        with torch.cuda.stream(up_stream):
            up_device.copy_(up_host, non_blocking=True)

    def down() -> None:
        with torch.cuda.stream(down_stream):
            down_host.copy_(down_device, non_blocking=True)

    def both() -> None:
        up()
        down()

    def seconds(copy: Callable[[], object]) -> float:
        runs = []
        for _ in range(2 + 5):  # two to warm up
            torch.cuda.synchronize()
            start = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            runs.append(time.perf_counter() - start)
        return statistics.median(runs[2:])

    up_s, down_s, both_s = seconds(up), seconds(down), seconds(both)
    small = up_host[:4096]
    return Tier(
        name="host",
        capacity_bytes=host_memory_bytes(),
        link=Link(
            read_bytes_per_s=num_bytes / up_s,
            write_bytes_per_s=num_bytes / down_s,
            latency_s=seconds(lambda: up_device[:4096].copy_(small, non_blocking=True)),
            # Both ways in the time of the slower one alone: 1. One after the other: about 0.5.
            duplex=kept_fraction([max(up_s, down_s) / both_s], at_least=0.5),
        ),
    )
