"""What joins several devices, measured by all ranks that a launcher such as torchrun started.

Every rank runs the same collectives in the same order, by counts and never until a time is over:
no rank may call one that another does not. The figures are rank 0's.
"""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed

from protrain_plan.hardware.probe import PinnedLink, Progress, SpillFile, held_bytes, probe
from protrain_plan.hardware.speeds import (
    in_worker,
    kept_fraction,
    runs_per_second,
    small_compute,
)
from protrain_plan.records.hardware import (
    Collectives,
    Contention,
    Hardware,
    Interconnect,
)
from protrain_plan.units import four_digits
from protrain_runtime.devices import device as devices

_CALLS = 4  # of a collective in one window
_SMALL_CALLS = 20
_ROUNDS = 3
_WAIT = timedelta(minutes=10)  # for a rank, while others wait in a collective

Call = Callable[[], None]


def _num_bytes(device: torch.device) -> int:
    """Of what all ranks hold together: a decoder block of a small model, and of a large one."""
    return 2**25 if devices.on_host(device) else 2**28


class Rank(NamedTuple):
    """This process among those that a launcher started."""

    number: int
    of: int
    in_node: int

    @staticmethod
    def launched() -> "Rank | None":
        """Who this process is; None where it was started by itself."""
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
    progress: Progress = lambda *_: None,
) -> Hardware | None:
    """`probe` on rank 0 while the others wait for it, then what joins them; None on the others.

    Takes about 20 s on two cores. A rank takes the accelerator of its number in its node.
    """
    where = devices.found(str(device))
    if not devices.on_host(where):
        where = torch.device(where.type, rank.number % rank.in_node)
        torch.accelerator.set_device_index(where.index)  # collectives ask which is the thread's
    found = None
    if rank.number == 0:
        # Before the ranks meet: the probe's steps are planned for one device, and are asked for it.
        found = probe(where, spill_directory=spill_directory, name=name, progress=progress)
    before = held_bytes(where)
    distributed.init_process_group(devices.collectives(where), timeout=_WAIT)
    try:
        everyone = distributed.group.WORLD
        assert everyone is not None
        _Group(where, everyone, rank.of, num_bytes=4 * rank.of)
        library_bytes = max(0, held_bytes(where) - before)
        progress("measuring what joins the ranks", 0.9)
        joined = _interconnect(where, rank, everyone, spill_directory)
        progress("done", 1.0)
    finally:
        distributed.destroy_process_group()
    if found is None:
        return None
    how = f"interconnect: measured by {rank.of} ranks, {rank.in_node} in a node"
    return replace(
        found,
        interconnect=replace(joined, library_bytes=library_bytes),
        sources=(*found.sources, how),
    )


def _interconnect(
    device: torch.device, rank: Rank, everyone: distributed.ProcessGroup, spill_directory: Path
) -> Interconnect:
    """What joins the ranks, without what the library holds.

    Of one rank in a node, `intra_node` is as `inter_node`.
    """
    group = _Group(device, everyone, rank.of, num_bytes=_num_bytes(device))
    speeds, across = group.speeds(), None
    if rank.of > rank.in_node:
        across = speeds
        if rank.in_node > 1:
            node, _ = distributed.new_subgroups(rank.in_node)
            within = _Group(device, node, rank.in_node, num_bytes=_num_bytes(device))
            speeds = within.speeds()
    beside = _contention(group.gather, small_compute(device))
    with _link_read(device, spill_directory) as read:
        shared = _contention(group.gather, read)
    return Interconnect(
        devices_per_node=rank.in_node,
        intra_node=speeds,
        inter_node=across,
        contention=beside,
        link_share=max(0.5, (shared.compute + shared.lane) / 2),
    )


class _Group:
    """Ranks that gather and reduce together, with their buffers."""

    def __init__(
        self, device: torch.device, group: distributed.ProcessGroup, size: int, *, num_bytes: int
    ) -> None:
        self.device, self.group, self.size = device, group, size
        self.whole = torch.ones(num_bytes // 4 // size * size, device=device)
        self.shard = torch.ones(self.whole.numel() // size, device=device)
        self.gather()  # connects the ranks
        self.reduce()

    def gather(self) -> None:
        """One all-gather; returns when this rank has everything."""
        self._gather(self.whole, self.shard)

    def fetch_little(self) -> None:
        """An all-gather of next to nothing: what it takes apart from its bytes."""
        self._gather(self.whole[: self.size], self.shard[:1])

    def _gather(self, whole: torch.Tensor, shard: torch.Tensor) -> None:
        distributed.all_gather(list(whole.chunk(self.size)), shard, group=self.group)
        self._wait()

    def reduce(self) -> None:
        """One reduce-scatter; returns when this rank has its sum."""
        parts = list(self.whole.chunk(self.size))
        distributed.reduce_scatter(self.shard, parts, group=self.group)
        self._wait()

    def _wait(self) -> None:
        if not devices.on_host(self.device):
            devices.current_stream(self.device).synchronize()

    def speeds(self) -> Collectives:
        """Bytes per second that this rank gets from the others, and the seconds of a hop."""
        others = self.whole.nbytes * (self.size - 1) / self.size
        hops = self.size - 1
        little = in_worker(lambda: _median_seconds(self.fetch_little, _SMALL_CALLS))
        gathered = in_worker(lambda: _median_seconds(self.gather, _CALLS))
        reduced = in_worker(lambda: _median_seconds(self.reduce, _CALLS))
        return Collectives(
            gather_bytes_per_s=four_digits(others / gathered),
            reduce_bytes_per_s=four_digits(others / reduced),
            latency_s=four_digits(little / hops),
        )


def _median_seconds(collective: Call, calls: int) -> float:
    return statistics.median(_seconds(collective, calls) for _ in range(_ROUNDS)) / calls


def _seconds(collective: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        collective()
    return time.perf_counter() - start


def _contention(collective: Call, other: Call) -> Contention:
    """What `other`, in the calling thread, and a collective in a lane's leave each other."""
    kept_other, kept_collective = [], []
    for _ in range(_ROUNDS):
        distributed.barrier()
        alone = runs_per_second(other)
        distributed.barrier()
        collective_alone = _CALLS / in_worker(lambda: _seconds(collective, _CALLS))
        beside, collective_beside = _together(collective, other)
        kept_other.append(beside / alone)
        kept_collective.append(collective_beside / collective_alone)
    return Contention(
        compute=four_digits(kept_fraction(kept_other)),
        lane=four_digits(kept_fraction(kept_collective)),
    )


def _together(collective: Call, other: Call) -> tuple[float, float]:
    """Runs per second of `other` and of so many collectives in a worker, at once."""
    ended, num_threads = threading.Event(), torch.get_num_threads()

    def lane() -> float:
        torch.set_num_threads(1)
        try:
            return _CALLS / _seconds(collective, _CALLS)
        finally:
            ended.set()

    with ThreadPoolExecutor(max_workers=1) as pool:
        rate = pool.submit(lane)
        torch.set_num_threads(num_threads)
        return runs_per_second(other, until=ended), rate.result()


@contextlib.contextmanager
def _link_read(device: torch.device, directory: Path) -> Iterator[Call]:
    """What a rank reads of the tier below: a file's bytes on a CPU, else pinned host memory."""
    if not devices.on_host(device):
        yield PinnedLink(device, _num_bytes(device)).read
        return
    with contextlib.closing(SpillFile(directory, device)) as file:
        yield file.read
