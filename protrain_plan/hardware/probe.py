"""`probe`: this machine as a `Hardware` record, measured in a few seconds."""

import contextlib
import mmap
import os
import platform
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from protrain_plan.errors import ProtrainError
from protrain_plan.hardware.speeds import (
    Overheads,
    contention,
    in_worker,
    kept_fraction,
    lane_update,
    measure_overheads,
    measure_rates,
    median_seconds,
    rates_together,
    runs_per_second,
    small_compute,
    update_step,
)
from protrain_plan.records.hardware import Contention, Device, Hardware, Link, Tier
from protrain_plan.records.profile import DType
from protrain_plan.units import four_digits
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.memory_meter import process_memory
from protrain_runtime.devices.stores import DiskStore
from protrain_runtime.states.updates import UpdateTeam, spare_threads

_BUFFER_BYTES = 2**20
"""What models that a CPU trains move at a time: tensors of up to a few MiB, too small for the huge
pages that larger buffers ask for, which are read more than twice as fast (docs/decisions.md)."""
_FILE_BYTES = 128 * _BUFFER_BYTES  # per direction
_ROUNDS = 3

Progress = Callable[[str, float], None]
"""Told what is being done, and the fraction that is done."""


def probe(
    device: torch.device | str,
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
    updates whose speed and contention with compute are measured.

    ProtrainError where there is no such device, it lacks what plans need, or `spill_directory`
    cannot be written.
    """
    where = devices.found(str(device))
    below = _below(where, spill_directory, dtype, progress)
    progress("measuring compute and memory", 0.8)
    rates = measure_rates(where, dtype=dtype)
    if below.overheads is not None:
        rates = replace(rates, host_piece_s=four_digits(below.overheads.piece_s))
    progress("done", 1.0)
    described = _device(where, held_bytes(where) if context_bytes is None else context_bytes)
    return Hardware(
        name=name or f"{where.type}-{described.num_threads}",
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


def _below(device: torch.device, directory: Path, dtype: DType, progress: Progress) -> _Below:
    with (
        contextlib.closing(SpillFile(directory, device)) as reads,
        contextlib.closing(SpillFile(directory, device)) as writes,
    ):
        progress("measuring the disk", 0.0)
        link = _disk_link(reads, writes)
        disk = Tier(name="disk", capacity_bytes=shutil.disk_usage(directory).free, link=link)
        if not devices.on_host(device):
            progress("measuring the link to host memory", 0.5)
            pinned = PinnedLink(device)
            host = Tier(name="host", capacity_bytes=host_memory_bytes(), link=pinned.measured())
            progress("measuring what lanes and compute leave each other", 0.6)
            compute = small_compute(device)
            with contextlib.closing(UpdateTeam(spare_threads(device))) as team:
                return _Below(
                    tiers=(host, disk),
                    read=contention(compute, pinned.read, num_rounds=1),
                    write=contention(compute, pinned.write, num_rounds=1),
                    update=contention(compute, lane_update(dtype, team), num_rounds=1),
                )
        progress("measuring the runtime itself", 0.25)
        overheads = measure_overheads(directory)
        progress("measuring what lanes and compute leave each other", 0.3)
        link = replace(link, latency_s=overheads.transfer_s)
        compute = small_compute(device)
        return _Below(
            tiers=(replace(disk, link=link),),
            overheads=overheads,
            read=contention(compute, reads.read),
            write=contention(compute, writes.write),
            update=contention(compute, update_step(dtype, device=device)),
        )


def held_bytes(device: torch.device) -> int:
    """What this process holds besides tensors, of which it has none here; 0 where none can say."""
    if not devices.on_host(device):
        return devices.context_bytes(device)
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


def _device(device: torch.device, context_bytes: int) -> Device:
    if devices.on_host(device):
        name, memory_bytes = processor_name(), host_memory_bytes()
    else:
        name, memory_bytes = devices.name(device), devices.free_and_total_bytes(device)[1]
    return Device(
        kind=device.type,
        name=name,
        memory_bytes=memory_bytes,
        context_bytes=context_bytes,
        num_threads=torch.get_num_threads(),
    )


@cache
def processor_name() -> str:
    """The processor's name as the system tells it; its kind where it tells none (Arm: aarch64)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine() or "cpu"


# --- disk -----------------------------------------------------------------------------------------


class SpillFile:
    """A spill file of the runtime's, and memory of the same size to write it from.

    Memory for the whole file, because one buffer used again and again would stay in the cache. On a
    CPU machine what is read goes to fresh memory, as in a run: touching that for the first time is
    part of a read. On others it goes to memory that stays, as their staging does.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
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
        """Where the buffer at `at` is read to."""
        if devices.on_host(self._device):
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
    return Link(
        read_bytes_per_s=reads.num_bytes * statistics.median(read_rates),
        write_bytes_per_s=writes.num_bytes * statistics.median(write_rates),
        latency_s=median_seconds(lambda: reads.read_little(page), num_runs=50),
        duplex=kept_fraction(kept, at_least=0.5),
    )


# --- pinned host memory of a machine with an accelerator ------------------------------------------


class PinnedLink:
    """Copies between host memory, pinned as the runtime pins it, and a device, on streams.

    The buffers are this object's; every copy has ended when a method returns.
    """

    def __init__(self, device: torch.device, num_bytes: int = 2**27) -> None:
        backend = Backend(device)
        self._num_bytes = num_bytes
        self._up_host, self._down_host = (backend.empty_host(num_bytes).fill_(1) for _ in range(2))
        self._up_device, self._down_device = (backend.empty(num_bytes).fill_(1) for _ in range(2))
        self._up, self._down = (torch.Stream(device=device) for _ in range(2))
        devices.synchronize(device)  # the device's buffers were filled on the current stream

    def read(self) -> None:
        """From the host to the device."""
        self._start_read(self._num_bytes)
        self._up.synchronize()

    def write(self) -> None:
        """From the device to the host."""
        self._start_write()
        self._down.synchronize()

    def both(self) -> None:
        """Both ways at once."""
        self._start_read(self._num_bytes)
        self._start_write()
        self._up.synchronize()
        self._down.synchronize()

    def read_little(self) -> None:
        """What a copy costs apart from its bytes."""
        self._start_read(4096)
        self._up.synchronize()

    def measured(self) -> Link:
        """The link that the copies make, from medians of a few each."""
        read_s, write_s, both_s, little_s = (
            median_seconds(copy, num_runs=5)
            for copy in (self.read, self.write, self.both, self.read_little)
        )
        return Link(
            read_bytes_per_s=self._num_bytes / read_s,
            write_bytes_per_s=self._num_bytes / write_s,
            latency_s=little_s,
            # Both ways in the time of the slower one alone: 1. One after the other: about 0.5.
            duplex=kept_fraction([max(read_s, write_s) / both_s], at_least=0.5),
        )

    def _start_read(self, num_bytes: int) -> None:
        with self._up:
            self._up_device[:num_bytes].copy_(self._up_host[:num_bytes], non_blocking=True)

    def _start_write(self) -> None:
        with self._down:
            self._down_host.copy_(self._down_device, non_blocking=True)
