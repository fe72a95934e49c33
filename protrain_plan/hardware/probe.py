"""`probe`: this machine as a `Hardware` record, measured in a few seconds.

Under a launcher such as torchrun, `probe_with_ranks` also measures the network. Every rank runs the
same collectives in the same order, by counts and never by time. The figures are rank 0's.
"""

import contextlib
import gc
import mmap
import os
import platform
import shutil
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed

from protrain_plan.hardware.overheads import Overheads, measure_launches, measure_overheads
from protrain_plan.hardware.speeds import (
    PinnedLink,
    Stepped,
    contention,
    in_worker,
    kept_fraction,
    lane_update,
    measure_rates,
    median_seconds,
    rates_together,
    runs_per_second,
    small_compute,
    update_step,
    update_team,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import PAGE_BYTES
from protrain_runtime.contract.records.hardware import (
    Cached,
    Collectives,
    Contention,
    Device,
    Hardware,
    Interconnect,
    Link,
    Observed,
    Tier,
)
from protrain_runtime.contract.records.profile import DType
from protrain_runtime.contract.units import four_digits
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import process_memory
from protrain_runtime.devices.stores import DiskStore
from protrain_runtime.ranks.group import gather_shards, sum_shards

_BUFFER_BYTES = 2**20
"""Bytes that models on a CPU move at a time: tensors of up to a few MiB, too small for the huge
pages that larger buffers ask for, which are read more than twice as fast (docs/decisions.md)."""
_CHUNK_BYTES = 16 * _BUFFER_BYTES
"""Bytes per transfer past the page cache: a group of a chunk, in several requests."""
_FILE_BYTES = 128 * _BUFFER_BYTES  # per direction
_ROUNDS = 3

Progress = Callable[[str, float], None]
"""Called with the current task and the fraction done."""


class Watch(NamedTuple):
    """Limits of writing a disk before it is measured: the first one reached ends it."""

    seconds: float = 2.0
    num_bytes: int = 2 * 2**30


BRIEF = Watch()
"""Part of a probe of some seconds."""


def probe(
    device: torch.device | str,
    *,
    spill_directory: Path,
    name: str | None = None,
    dtype: DType = "float32",
    watch: Watch = BRIEF,
    progress: Progress = lambda *_: None,
) -> Hardware:
    """Measure this machine; about 15 s on two cores, 256 MiB of temporary files.

    The disk is written as `watch` says before it is measured. The device's context is this
    process's memory at the end, less exact than the profiler's measurement in a model's steps.
    `dtype` is that of the measured updates.

    ProtrainError if there is no such device, it lacks what plans need, or `spill_directory` is not
    writable.
    """
    where = devices.found(str(device))
    # A separate function: this process's memory at the end excludes its buffers.
    with devices.current(where):
        tiers, (read, write, update), overheads, said = _below(
            where, spill_directory, dtype, watch, progress
        )
        progress("measuring compute and memory", 0.8)
        rates = measure_rates(where, dtype=dtype)
    rates = replace(rates, host_piece_s=four_digits(overheads.piece_s))
    progress("done", 1.0)
    on_host, num_threads = devices.on_host(where), torch.get_num_threads()
    return Hardware(
        name=name or f"{where.type}-{num_threads}",
        device=Device(
            kind=where.type,
            name=processor_name() if on_host else devices.name(where),
            memory_bytes=host_memory_bytes() if on_host else devices.free_and_total_bytes(where)[1],
            context_bytes=held_bytes(where),
            num_threads=num_threads,
        ),
        tiers=tiers,
        read_contention=read,
        write_contention=write,
        update_contention=update,
        rates=rates,
        sources=(f"measured on the machine itself, with torch {torch.__version__}", *said),
        move_s=four_digits(overheads.move_s),
        launches=() if on_host else measure_launches(where),
    )


def _below(
    device: torch.device, directory: Path, dtype: DType, watch: "Watch", progress: Progress
) -> tuple[tuple[Tier, ...], list[Contention], Overheads, list[str]]:
    """The tiers below a device; contention of reads, writes and updates with compute; overheads.

    Those of transfers are 0 if the hardware moves by itself while the host prepares the next. Last,
    notes on the disk's measurement.
    """
    compute = small_compute(device)
    with _files(directory, device) as (reads, writes):
        progress("measuring the disk", 0.0)
        said = [f"disk: through the page cache, {reads.buffered}"] if reads.buffered else []
        seen = None if reads.buffered else observed(writes, watch)
        link = _disk_link(reads, writes)
        if not devices.on_host(device):
            with _files(directory, device, cached=True) as cached_files:
                cached = Cached(link=_disk_link(*cached_files))
            disk = _disk(directory, link, seen, cached)
            progress("measuring the link to host memory", 0.5)
            pinned = PinnedLink(device)
            host = Tier(name="host", capacity_bytes=host_memory_bytes(), link=pinned.measured())
            progress("measuring how transfers slow compute", 0.6)
            with contextlib.closing(update_team(device, Stepped(dtype))) as team:
                update = lane_update(Stepped(dtype), team)
                ways = (pinned.read, pinned.write)
                kept = [contention(compute, each, num_rounds=1) for each in ways]
                kept.append(contention(compute, update, num_rounds=1, num_threads=team.inside))
            progress("measuring the runtime's overhead", 0.75)
            overheads = measure_overheads(directory, device=device)
            # The link's latency includes transfers' costs.
            return (host, disk), kept, replace(overheads, transfer_s=0.0), said
        progress("measuring the runtime's overhead", 0.25)
        overheads = measure_overheads(directory)
        progress("measuring how transfers slow compute", 0.3)
        link = replace(link, latency_s=overheads.transfer_s)
        lanes = (reads.read, writes.write, update_step(Stepped(dtype), device=device))
        kept = [contention(compute, lane) for lane in lanes]
    with _files(directory, device, cached=True) as (reads, writes):
        progress("measuring the disk through the page cache", 0.6)
        latency_s = measure_overheads(directory, cached=True).transfer_s
        cached = Cached(
            link=replace(_disk_link(reads, writes), latency_s=latency_s),
            read_contention=contention(compute, reads.read),
            write_contention=contention(compute, writes.write),
        )
    return (_disk(directory, link, seen, cached),), kept, overheads, said


def _disk(directory: Path, link: Link, seen: Observed | None, cached: Cached) -> Tier:
    free_bytes = shutil.disk_usage(directory).free
    return Tier(name="disk", capacity_bytes=free_bytes, link=link, observed=seen, cached=cached)


@contextlib.contextmanager
def _files(
    directory: Path, device: torch.device, *, cached: bool = False
) -> Iterator[tuple["ProbedFile", "ProbedFile"]]:
    """A file to read and one to write, so that both can run at once."""
    with (
        contextlib.closing(ProbedFile(directory, device, cached=cached)) as reads,
        contextlib.closing(ProbedFile(directory, device, cached=cached)) as writes,
    ):
        yield reads, writes


def held_bytes(device: torch.device) -> int:
    """The bytes of this process, without tensors; 0 if unknown."""
    if not devices.on_host(device):
        return devices.context_bytes(device)
    with contextlib.suppress(OSError):
        return process_memory().data_bytes
    return 0


def host_memory_bytes() -> int:
    """Memory of this machine, or the rest within its control group (a container's limit)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in (
        Path("/sys/fs/cgroup/memory.max"),  # version 2
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1: huge if unlimited
    ):
        try:
            limit = limit_file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


@cache
def processor_name() -> str:
    """The processor's name from the system, or its kind (Arm: aarch64)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine() or "cpu"


# --- disk -----------------------------------------------------------------------------------------


class ProbedFile:
    """The runtime's spill file, and memory of the same size to write it from.

    Memory for the whole file, because a single reused buffer would stay in the cache. On a CPU
    machine reads go to fresh memory, as in a run: first touches are part of a read. Elsewhere they
    go to lasting memory, like staging. Past the page cache bytes move as chunks, many requests at a
    time; `cached` ones by small tensors.
    """

    def __init__(self, directory: Path, device: torch.device, *, cached: bool = False) -> None:
        self._device = device
        self._store = DiskStore(directory, cached=cached)
        self.buffered = self._store.buffered
        self._size = _BUFFER_BYTES if self.buffered else _CHUNK_BYTES
        free_bytes = shutil.disk_usage(directory).free
        num_buffers = min(_FILE_BYTES, free_bytes // 4) // self._size
        if num_buffers == 0:
            self._store.close()
            raise ProtrainError(
                f"too little space to measure the disk: {free_bytes} bytes free",
                source=str(directory),
                fix="free some space there, or name another spill directory",
            )
        self.num_bytes = num_buffers * self._size
        self._source = torch.ones(self.num_bytes, dtype=torch.uint8)
        self._start = self._store.reserve(self.num_bytes)
        self.write()  # allocates the blocks, as a run's first step does

    def read(self) -> None:
        """Read the whole file, buffer by buffer."""
        for at in range(0, self.num_bytes, self._size):
            target = self._source[at : at + self._size]
            if devices.on_host(self._device):
                # The system's own pages: the C library's may have been touched before.
                target = torch.frombuffer(mmap.mmap(-1, self._size + PAGE_BYTES), dtype=torch.uint8)
                # The start of large tensors, where whole blocks of the file are read directly.
                begin = (self._start + at) % PAGE_BYTES
                target = target[begin : begin + self._size]
            self._store.read(self._start + at, target)

    def write(self) -> None:
        """Write the whole file over, buffer by buffer."""
        for at in range(0, self.num_bytes, self._size):
            self._store.write(self._start + at, self._source[at : at + self._size])

    def read_little(self, target: torch.Tensor) -> None:
        """Fill `target`: a read's cost apart from its bytes."""
        self._store.read(self._start, target)

    def close(self) -> None:
        """Free the file."""
        self._store.close()


def observed(writes: ProbedFile, watch: Watch) -> Observed:
    """Write until the watch is over: the following measurement is not the disk's first burst."""
    seconds: list[float] = []
    start = time.perf_counter()
    while not seconds or (
        time.perf_counter() - start < watch.seconds
        and (len(seconds) + 1) * writes.num_bytes <= watch.num_bytes
    ):
        before = time.perf_counter()
        in_worker(writes.write)
        seconds.append(time.perf_counter() - before)
    quarter = -(-len(seconds) // 4)  # of the passes
    first, last = (
        four_digits(writes.num_bytes * quarter / sum(some))
        for some in (seconds[:quarter], seconds[-quarter:])
    )
    return Observed(
        seconds=four_digits(time.perf_counter() - start),
        written_bytes=len(seconds) * writes.num_bytes,
        first_bytes_per_s=first,
        last_bytes_per_s=last,
    )


def _disk_link(reads: ProbedFile, writes: ProbedFile) -> Link:
    """The directory's speed as the runtime sees it, in a lane's thread, and both ways at once.

    Past the page cache it is the disk's own; through it, it holds while the data fits in free
    memory. Reads and writes use separate files, so that both can run.
    """
    read_rates, write_rates, kept = [], [], []  # whole files per second
    for _ in range(_ROUNDS):
        read_rates.append(in_worker(lambda: runs_per_second(reads.read)))
        write_rates.append(in_worker(lambda: runs_per_second(writes.write)))
        read_beside, write_beside = rates_together(reads.read, writes.write)
        kept.append((read_beside / read_rates[-1] + write_beside / write_rates[-1]) / 2)
    page = torch.empty(PAGE_BYTES, dtype=torch.uint8)
    return Link(
        read_bytes_per_s=reads.num_bytes * statistics.median(read_rates),
        write_bytes_per_s=writes.num_bytes * statistics.median(write_rates),
        latency_s=median_seconds(lambda: reads.read_little(page), num_runs=50),
        duplex=kept_fraction(kept, at_least=0.5),
    )


# --- several devices ------------------------------------------------------------------------------

_CALLS = 4  # of a collective in one window
_SMALL_CALLS = 20
_WAIT = timedelta(minutes=10)  # for a rank, while others wait in a collective

Call = Callable[[], None]


class Rank(NamedTuple):
    """This process's rank under a launcher."""

    number: int
    of: int
    in_node: int

    @staticmethod
    def launched() -> "Rank | None":
        """This process's rank; None without a launcher."""
        of = int(os.environ.get("WORLD_SIZE", "1"))
        if of == 1:
            return None
        return Rank(int(os.environ["RANK"]), of, int(os.environ.get("LOCAL_WORLD_SIZE", of)))


def probe_with_ranks(
    device: torch.device | str,
    rank: Rank,
    *,
    spill_directory: Path,
    name: str | None = None,
    watch: Watch = BRIEF,
    progress: Progress = lambda *_: None,
) -> Hardware | None:
    """`probe` on rank 0, then the network; None on other ranks. Takes about 20 s on two cores."""
    where = devices.found(str(device))
    if not devices.on_host(where):
        where = torch.device(where.type, rank.number % rank.in_node)
        torch.accelerator.set_device_index(where.index)  # collectives ask which is the thread's
    found = None
    if rank.number == 0:
        # Before the ranks meet: the probe's steps are planned for one device.
        found = probe(
            where, spill_directory=spill_directory, name=name, watch=watch, progress=progress
        )
    before = held_bytes(where)
    distributed.init_process_group(devices.collectives(where), timeout=_WAIT)
    try:
        everyone = distributed.group.WORLD
        assert everyone is not None
        _Group(where, everyone, rank.of, num_bytes=4 * rank.of)
        library_bytes = max(0, held_bytes(where) - before)
        progress("measuring the links between ranks", 0.9)
        # All ranks' data: a decoder block of a small model, and of a large one.
        num_bytes = 2**25 if devices.on_host(where) else 2**28
        group = _Group(where, everyone, rank.of, num_bytes=num_bytes)
        within, across = group.speeds(), None
        if rank.of > rank.in_node:  # of one rank in a node, both are the same
            across = within
            if rank.in_node > 1:
                node, _ = distributed.new_subgroups(rank.in_node)
                within = _Group(where, node, rank.in_node, num_bytes=num_bytes).speeds()
        beside = _contention(group.gather, small_compute(where))
        # A rank's reads from the tier below: a file's bytes on a CPU, else pinned host memory.
        if devices.on_host(where):
            with contextlib.closing(ProbedFile(spill_directory, where)) as file:
                shared = _contention(group.gather, file.read)
        else:
            shared = _contention(group.gather, PinnedLink(where, num_bytes).read)
        progress("done", 1.0)
    finally:
        distributed.destroy_process_group()
    if found is None:
        return None
    how = f"interconnect: measured by {rank.of} ranks, {rank.in_node} in a node"
    return replace(
        found,
        interconnect=Interconnect(
            devices_per_node=rank.in_node,
            intra_node=within,
            inter_node=across,
            contention=beside,
            link_share=max(0.5, (shared.compute + shared.lane) / 2),
            library_bytes=library_bytes,
        ),
        sources=(*found.sources, how),
    )


class _Group:
    """Ranks that gather and reduce together in one buffer, as in the runtime."""

    def __init__(
        self, device: torch.device, group: distributed.ProcessGroup, size: int, *, num_bytes: int
    ) -> None:
        self.device, self.group, self.size = device, group, size
        self.whole = torch.ones(num_bytes // 4 // size * size, device=device)
        self.rank = distributed.get_rank(group)
        self.gather()  # connects the ranks
        self.reduce()

    def gather(self, each: int | None = None) -> None:
        """All-gather, of `each` elements per shard; returns when this rank has them."""
        whole = self.whole if each is None else self.whole[: self.size * each]
        gather_shards(whole, whole.chunk(self.size)[self.rank], self.group)
        self._wait()

    def reduce(self) -> None:
        """One reduce-scatter; returns when this rank has its sum."""
        sum_shards(self.whole, self.whole.chunk(self.size)[self.rank], self.group)
        self._wait()

    def _wait(self) -> None:
        if not devices.on_host(self.device):
            devices.current_stream(self.device).synchronize()

    def speeds(self) -> Collectives:
        """Bytes per second from the other ranks, and seconds of a hop."""

        def median(collective: Call, calls: int) -> float:
            seconds = timeit.repeat(collective, gc.enable, repeat=_ROUNDS, number=calls)
            return statistics.median(seconds) / calls

        others = self.whole.nbytes * (self.size - 1) / self.size
        # Almost no data: the cost apart from bytes.
        little = in_worker(lambda: median(lambda: self.gather(1), _SMALL_CALLS))
        gathered = in_worker(lambda: median(self.gather, _CALLS))
        reduced = in_worker(lambda: median(self.reduce, _CALLS))
        return Collectives(
            gather_bytes_per_s=four_digits(others / gathered),
            reduce_bytes_per_s=four_digits(others / reduced),
            latency_s=four_digits(little / (self.size - 1)),
        )


def _contention(collective: Call, other: Call) -> Contention:
    """Contention between `other`, on this thread, and a collective in a lane's."""
    ended, num_threads = threading.Event(), torch.get_num_threads()
    seconds = partial(timeit.timeit, collective, gc.enable, number=_CALLS)

    def lane() -> float:
        torch.set_num_threads(1)
        try:
            return seconds()
        finally:
            ended.set()

    kept_other, kept_collective = [], []
    for _ in range(_ROUNDS):
        distributed.barrier()
        alone = runs_per_second(other)
        distributed.barrier()
        alone_s = in_worker(seconds)
        ended.clear()
        with ThreadPoolExecutor(max_workers=1) as pool:
            beside_s = pool.submit(lane)
            torch.set_num_threads(num_threads)
            kept_other.append(runs_per_second(other, until=ended) / alone)
            kept_collective.append(alone_s / beside_s.result())
    return Contention(
        compute=four_digits(kept_fraction(kept_other)),
        lane=four_digits(kept_fraction(kept_collective)),
    )
