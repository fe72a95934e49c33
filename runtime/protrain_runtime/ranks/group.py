"""This rank among the others: the groups of its collectives, and facts that ranks agree on.

Every rank runs the same program, so all meet in the same collectives in the same order. They wait
for a missing rank up to a time limit. A rank that fails reports at the ranks' store (see
`failure`).
"""

import ctypes
import gc
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import DeviceGroup, Plan
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import PATIENCE_S
from protrain_runtime.devices.memory_meter import borrowing
from protrain_runtime.devices.stores import in_rows
from protrain_runtime.ranks.failure import START_AGAIN, Meeting, RanksError, abandoned

CHECKPOINT_LIMIT_S = 3600.0
"""Seconds that ranks may differ in writing their parts of a checkpoint."""


# Their names since PyTorch 2.13, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_shards(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `whole` with the shards of a group; on a CPU `own` is a range of it, sent to all."""
    if whole.device.type != "cpu":
        _gather(whole, own, group=group)
        return
    for shard, place in enumerate(whole.split(own.numel())):
        dist.broadcast(_lent(place), group_src=shard, group=group)


def sum_shards(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum `whole`, which is consumed, over a group into `mine`, this rank's range of it."""
    if whole.device.type != "cpu":
        _reduce_scatter(mine, whole, group=group)
    else:
        dist.all_reduce(_lent(whole), group=group)


class Ranks:
    """The ranks of one data-parallel group; this one is number `rank` of `count`.

    They meet at their store first, and `connect` for collectives. Then `shard` of `num_shards` is
    this rank's place among those that share a chunk's states, and `in_node` its place and their
    number in its node.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, limit_s: float) -> None:
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.num_shards, self.shard, self.on_stream = 1, 0, False
        self.in_node = 0, 1
        self._limit_s = limit_s
        self._checkpoints: dist.ProcessGroup | None = None
        self._members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        own = PrefixStore(f"protrain/{'-'.join(map(str, self._members))}", _get_default_store())
        # Every rank calls `prepare` equally often, whatever the outcome.
        serial = own.add(f"calls/{self.rank}", 1)
        store = PrefixStore(str(serial), own)
        self.meeting = Meeting(store, self.rank, self.count, limit_s=limit_s)

    def connect(
        self, facts: Mapping[str, str], *, group: DeviceGroup, device: torch.device
    ) -> None:
        """Make groups for collectives. RanksError unless all ranks have the same `facts`."""
        library = devices.collectives(device)
        what = "prepare()"
        fixes = _ALIKE.items()
        self.meeting.agree(
            what, facts, lambda name: next(fix for kind, fix in fixes if kind in name or not kind)
        )
        self.device, self.on_stream = device, not devices.on_host(device)
        self.num_shards = group.num_shards
        self.in_node = self.rank % group.in_node, group.in_node
        self.shard = self.rank % self.num_shards
        first = self.rank - self.shard

        def made(ranks: Sequence[int]) -> dist.ProcessGroup:
            members = tuple(self._members[rank] for rank in ranks)
            limit_s = self._limit_s + (PATIENCE_S if self.on_stream else 0)
            return _group(members, library, limit_s)

        self._all = made(range(self.count))
        self._sharing = self._replicas = self._all
        if 1 < self.num_shards < self.count:
            self._sharing = made(range(first, first + self.num_shards))
            self._replicas = made(range(self.shard, self.count, self.num_shards))

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `whole` with the shards of all ranks that share it; `own` may lie in its place."""
        mine = whole[self.shard * own.numel() : (self.shard + 1) * own.numel()]
        if not (self.on_stream and self.num_shards > 1) and own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        if self.num_shards > 1:
            with self._collective():
                gather_shards(whole, own, self._sharing)

    def all_reduce(self, values: torch.Tensor) -> None:
        """The sum over all ranks, in place."""
        with self._collective():
            dist.all_reduce(_lent(values), group=self._all)

    def sum_of_shards(self, values: torch.Tensor) -> None:
        """The sum over ranks that share states, in place."""
        if self.num_shards > 1:
            with self._collective():
                dist.all_reduce(_lent(values), group=self._sharing)

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Sum `whole`, which is consumed, over all ranks; returns this rank's range of it."""
        size = whole.numel() // self.num_shards
        mine = whole[self.shard * size : (self.shard + 1) * size]
        with self._collective():
            if self.num_shards > 1:
                sum_shards(whole, mine, self._sharing)
            if self.num_shards < self.count:
                dist.all_reduce(_lent(mine), group=self._replicas)
        return mine

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int = 0) -> None:
        """One rank's values on every rank.  # dense tensors"""
        with self._collective():
            for tensor in tensors:
                with in_rows(tensor) as flat:
                    dist.broadcast(flat, src=self._members[source], group=self._all)

    def all_objects(self, mine: Any, what: str = "a call for all ranks") -> list[Any]:
        """Gather all ranks' objects, by rank; from host to host, on any device."""
        return self.meeting.meet(self.meeting.phases.get(threading.get_ident(), what), mine)

    def checkpoint_group(self) -> dist.ProcessGroup:
        """All ranks, for work beside training; collective at first use."""
        if self._checkpoints is None:
            self._checkpoints = _group(self._members, "gloo", CHECKPOINT_LIMIT_S)
        return self._checkpoints

    def writing(self) -> AbstractContextManager[None]:
        """Where ranks wait for each other's parts of a checkpoint."""
        return self._collective(CHECKPOINT_LIMIT_S)

    @contextmanager
    def _collective(self, limit_s: float | None = None) -> Iterator[None]:
        """Where ranks wait in collectives: turns RuntimeError into RanksError with the reason."""
        since = time.monotonic()
        try:
            yield
        except RanksError:
            raise
        except RuntimeError as error:
            self.meeting.refuse_lost()
            limit_s = self._limit_s if limit_s is None else limit_s
            late = time.monotonic() - since >= limit_s
            message = (
                f"rank {self.rank} of {self.count} waited for the others"
                f"{f' for {limit_s:g} s' if late else ''}: one of them ended, hangs, or has taken"
                " another path"
            )
            raise RanksError(message, fix=START_AGAIN) from error


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's memory, flat and borrowed: Gloo's thread may drop it late."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return borrowing(torch.frombuffer(memory, dtype=tensor.dtype))


_groups: dict[tuple[tuple[int, ...], str, float], dist.ProcessGroup] = {}
_world: list[dist.ProcessGroup | None] = [None]  # of their making

_ALIKE = {
    "version": "install the same versions on every node",
    "optimizer": "give prepare() the same optimizer and the same param_groups on every rank",
    "parameter group": "give prepare() the same optimizer and the same param_groups on every rank",
    "": "start every rank with the same model and the same plan",
}


def leave() -> None:
    """Release all groups before their world is destroyed.

    Gloo ends a group's threads with its last reference, and freeing what they hold needs Python: a
    group that lives until the interpreter ends could still run one. Garbage models have groups
    until collected.
    """
    gc.collect()
    _groups.clear()
    _world[0] = dist.group.WORLD


def _group(members: tuple[int, ...], backend: str, limit_s: float) -> dist.ProcessGroup:
    """The cached group of these ranks: a new one would find old addresses at the store."""
    if _world[0] is not dist.group.WORLD:  # the others' world is gone
        _groups.clear()
        _world[0] = dist.group.WORLD
    key = members, backend, limit_s
    if key not in _groups:
        _groups[key] = dist.new_group(
            list(members),
            timeout=timedelta(seconds=limit_s),
            backend=backend,
            use_local_synchronization=True,
        )
    return _groups[key]


def ranks_of(group: dist.ProcessGroup | None, *, limit_s: float) -> Ranks | None:
    """The ranks of a group, at their store; None for a single process."""
    if not _initialized() or dist.get_world_size(group) <= 1:
        return None
    try:
        return Ranks(group, limit_s=limit_s)
    except RuntimeError as error:
        raise abandoned(dist.get_rank(group), dist.get_world_size(group)) from error


def check_ranks(plan: Plan, group: dist.ProcessGroup | None) -> None:
    """ProtrainError if the plan is for another number of ranks."""
    running = dist.get_world_size(group) if _initialized() else 1
    if plan.group.num_devices == running:
        return
    if running == 1:
        nodes = f"--nnodes {plan.group.num_nodes} " if plan.group.num_nodes > 1 else ""
        fix = f"start it with torchrun {nodes}--nproc-per-node {plan.group.in_node}"
        if not _initialized():
            fix += ", and call torch.distributed.init_process_group() before prepare()"
    else:
        fix = f"plan with --num-devices {running}"
    needed = plan.group.num_devices
    raise ProtrainError(
        f"the plan needs {needed} device{'s' * (needed > 1)};"
        f" {running} process{'es are' if running > 1 else ' is'} running",
        key="settings.group.num_devices",
        fix=fix,
    )


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
