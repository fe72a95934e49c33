"""This rank among the others: the groups that collectives run in, agreement, and who is missing.

Every rank runs the same programme, so that all of them meet in the same collectives in the same
order. A rank that does not come makes the others wait. A rank that fails tells them why (see
`telling`), and a thread of each ends the collective that it waits in. Collectives have a time limit
besides, and who fails in one asks at the ranks' store who is still there: that thread answers. On
accelerators a collective is submitted to a stream, and nothing fails where it was: the thread looks
how long collectives take, and says who is missing before the library of collectives ends the
process.

Ranks that a launcher started come together at their store first, before anything can go wrong on
one of them alone: a file that a node lacks is told like what fails later.
"""

import ctypes
import gc
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import DeviceGroup, Plan
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import PATIENCE_S
from protrain_runtime.devices.memory_meter import borrowing
from protrain_runtime.ranks.telling import (
    ANSWER_S,
    START_AGAIN,
    Meeting,
    RanksError,
    abandoned,
    known,
    known_error,
)

GRACE_S = 1.0
"""A collective that began before another rank failed may end well; it has so long."""

CHECKPOINT_LIMIT_S = 3600.0
"""Seconds that a rank may take longer than another one to write its part of a checkpoint."""


# Their names since PyTorch 2.13, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_shards(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `whole` with the shards of a group; on a CPU `own` is a range of it, and sent to all."""
    if whole.device.type != "cpu":
        _gather(whole, own, group=group)
        return
    for shard, place in enumerate(whole.split(own.numel())):
        dist.broadcast(_lent(place), group_src=shard, group=group)


def sum_shards(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum `whole`, which is used up, over a group into `mine`, this rank's range of it."""
    if whole.device.type != "cpu":
        _reduce_scatter(mine, whole, group=group)
    else:
        dist.all_reduce(_lent(whole), group=group)


class Ranks:
    """The ranks of one data-parallel group, of which this one is number `rank` of `count`.

    They meet at their store first, and `connect` for collectives. `shard` of `num_shards` is then
    this one's place among those that share the states of a chunk, and `in_node` its place, and
    their number, among those of its node.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, limit_s: float) -> None:
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.num_shards, self.shard, self.on_stream = 1, 0, False
        self.in_node = 0, 1
        self._under_way: deque[tuple[torch.Event, float]] = deque()  # on the stream, since when
        self._waits: dict[int, tuple[float, tuple[dist.ProcessGroup, ...]]] = {}  # by thread
        self._asked = False  # of one that did not end in time
        self._late = ""  # what was said of it
        self._limit_s = limit_s
        self._checkpoints: dist.ProcessGroup | None = None
        self._world = dist.group.WORLD
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        own = PrefixStore(f"protrain/{'-'.join(map(str, self._members))}", _get_default_store())
        # Every rank calls `prepare` as often as the others, whatever came of it.
        serial = own.add(f"calls/{self.rank}", 1)
        store = PrefixStore(str(serial), own)
        self.meeting = Meeting(store, self.rank, self.count, limit_s=limit_s)
        self.meeting.look = self._look
        _connected.add(self)

    def connect(
        self, facts: Mapping[str, str], *, group: DeviceGroup, device: torch.device
    ) -> None:
        """Make groups for collectives. RanksError where not all ranks have the same `facts`."""
        library = devices.collectives(device)
        what = "prepare()"
        _of_this_world()
        given_up_here = _given_up_of.get(self._members, "")
        given_up = next(filter(None, self.meeting.meet(what, given_up_here)), "")
        if given_up:
            anew = "destroy the process group and initialize it anew, on all ranks"
            raise known(RanksError(given_up, fix=f"{anew}, or start all ranks again"))
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
        self._groups = tuple(
            {id(g): g for g in (self._all, self._sharing, self._replicas)}.values()
        )

    def tell_end(self, error: BaseException | None, what: str) -> None:
        """Tell that this rank cannot go on; RanksError where another failed before."""
        if error is not None:
            self.meeting.explain(error)
            self.meeting.tell(error, what, final=True)

    def _look(self) -> None:
        """End a collective that waits for a failed rank; say once who is missing in a late one."""
        if self._under_way:
            with devices.current(self.device):  # this thread's own is the first one
                while self._under_way and self._under_way[0][0].query():
                    self._under_way.popleft()
        now = time.monotonic()
        if not self._asked and self._under_way and now - self._under_way[0][1] > self._limit_s:
            self._asked = True
            # Not in the thread that answers others who ask.
            Thread(target=self._say_late, name="protrain asks", daemon=True).start()
        failure = self.meeting.failure
        if failure is None or self._world is not dist.group.WORLD:  # destroyed, and its groups
            return
        if self._under_way and now - max(self._under_way[0][1], failure[1]) > GRACE_S:
            self._give_up(self._groups)
        for since, groups in list(self._waits.values()):
            if now - max(since, failure[1]) > GRACE_S:
                self._give_up(groups)

    def _give_up(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._note_given_up()
        for group in groups:
            if id(group) not in _ended:
                _end(group)

    def _note_given_up(self) -> None:
        if self._world is _world[0]:  # not where all was begun anew meanwhile
            _given_up_of[self._members] = (
                "these ranks' collectives were given up when one of them failed"
            )

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
        """The sum over the ranks that share states, in place."""
        if self.num_shards > 1:
            with self._collective():
                dist.all_reduce(_lent(values), group=self._sharing)

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Sum `whole`, which is used up, over all ranks; returns this rank's range of it."""
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
                values = tensor.detach()
                dense = values.contiguous()
                flat = dense.view(-1).view(torch.uint8)
                dist.broadcast(flat, src=self._members[source], group=self._all)
                if dense is not values:
                    values.copy_(dense)

    def all_objects(self, mine: Any, what: str = "a call for all ranks") -> list[Any]:
        """Gather objects of all ranks, by rank; from host to host, whatever they train on."""
        return self.meeting.meet(self.meeting.phases.get(threading.get_ident(), what), mine)

    def checkpoint_group(self) -> dist.ProcessGroup:
        """All ranks, for what runs beside training; made when it is first asked for, by all."""
        if self._checkpoints is None:
            self._checkpoints = _group(self._members, "gloo", CHECKPOINT_LIMIT_S)
        return self._checkpoints

    @contextmanager
    def waiting(self, groups: Sequence[dist.ProcessGroup], limit_s: float) -> Iterator[None]:
        """Where ranks wait in collectives: RanksError, with the reason, for RuntimeError."""
        me, since = threading.get_ident(), time.monotonic()
        self._waits[me] = since, tuple(groups)
        try:
            yield
        except RanksError:
            raise
        except RuntimeError as error:
            self._note_given_up()
            raise self._why(limit_s, in_time=time.monotonic() - since < limit_s) from error
        finally:
            del self._waits[me]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return `waiting` for a checkpoint's group: a save beside training is not given up."""
        inside = threading.get_ident() in self.meeting.phases
        with self.waiting((self.checkpoint_group(),) if inside else (), CHECKPOINT_LIMIT_S):
            yield

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """`meeting`, of what may be on a stream when it is left."""
        if self._late:
            raise RanksError(self._late, fix=START_AGAIN)
        self.meeting.refuse_lost()
        with self.waiting(self._groups, self._limit_s):
            yield
        if self.on_stream:
            self._under_way.append((devices.record_event(self.device), time.monotonic()))

    def _say_late(self) -> None:
        self._late = self._why(self._limit_s).message
        warnings.warn(f"{self._late}; {START_AGAIN}", RuntimeWarning, stacklevel=1)

    def _why(self, limit_s: float, *, in_time: bool = False) -> RanksError:
        """Say what made a collective fail: who failed before it (`in_time`), or who is missing."""
        meeting = self.meeting
        try:
            absent = [] if meeting.failure else meeting.missing(patient=in_time)
        except RuntimeError:
            return abandoned(self.rank, self.count)
        if meeting.failure is not None:
            return meeting.failure[0].error(self.rank, self.count)
        if absent:
            return meeting.tell_missing(absent)
        return RanksError(
            f"rank {self.rank} of {self.count} waited for the others"
            f"{'' if in_time else f' for {limit_s:g} s'}, and all of them run: one hangs, or has"
            " taken another path",
            fix=START_AGAIN,
        )


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's memory, flat, not kept: Gloo's thread may drop it later than anybody."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return borrowing(torch.frombuffer(memory, dtype=tensor.dtype))


_groups: dict[tuple[tuple[int, ...], str, float], dist.ProcessGroup] = {}
_given_up_of: dict[tuple[int, ...], str] = {}  # by members: why their groups are of no use
_ended: set[int] = set()  # groups of which the collectives were ended, by identity
_world: list[dist.ProcessGroup | None] = [None]  # in which they were made
_connected: WeakSet["Ranks"] = WeakSet()

_ALIKE = {
    "version": "install the same versions on every node",
    "optimizer": "give prepare() the same optimizer and the same param_groups on every rank",
    "parameter group": "give prepare() the same optimizer and the same param_groups on every rank",
    "": "start every rank with the same model and the same plan",
}


def _of_this_world() -> None:
    """Forget the groups of a world that is gone."""
    if _world[0] is not dist.group.WORLD:
        _groups.clear()
        _given_up_of.clear()
        _ended.clear()
        _world[0] = dist.group.WORLD


def leave() -> None:
    """Let go of all groups, before the world that they are in is destroyed.

    Gloo ends a group's threads when nobody has it any more, and what they hold needs Python to be
    freed. A group that is kept until the interpreter ends could still run one then; and a model
    that only a cycle keeps has ranks that answer, and groups, until the collector comes by.
    """
    gc.collect()
    for ranks in list(_connected):
        ranks.meeting.close()
    _groups.clear()
    _of_this_world()


def _group(members: tuple[int, ...], backend: str, limit_s: float) -> dist.ProcessGroup:
    """The group of these ranks, kept: one made anew would find its old addresses at the store."""
    _of_this_world()
    key = members, backend, limit_s
    if key not in _groups:
        _groups[key] = dist.new_group(
            list(members),
            timeout=timedelta(seconds=limit_s),
            backend=backend,
            use_local_synchronization=True,
        )
    return _groups[key]


def _end(group: dist.ProcessGroup) -> None:
    """Let the collectives of a group fail, on this rank and where its peers wait for it."""
    _ended.add(id(group))
    if dist.get_backend(group) != "gloo":
        with suppress(RuntimeError):  # what fails has ended
            group.abort()
        return
    # Gloo cannot abort. A receive that comes too late closes all connections of its group; where
    # the peer has closed its own it fails at once, and others may still be waited for.
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(1, group.size()):
        with suppress(RuntimeError):
            source = (group.rank() + peer) % group.size()
            group.recv([nothing], source, _NO_TAG).wait(timedelta(milliseconds=1))


_NO_TAG = 0x7C0FFEE
"""Nobody sends under it."""


def ranks_of(group: dist.ProcessGroup | None, *, limit_s: float) -> Ranks | None:
    """The ranks of a group, at their store; None where this process is alone."""
    if not _initialized() or dist.get_world_size(group) <= 1:
        return None
    try:
        return Ranks(group, limit_s=limit_s)
    except RuntimeError as error:
        raise abandoned(dist.get_rank(group), dist.get_world_size(group)) from error


def check_ranks(plan: Plan, group: dist.ProcessGroup | None) -> int:
    """Count the ranks; ProtrainError where the plan is for another number of them."""
    running = dist.get_world_size(group) if _initialized() else 1
    if plan.group.num_devices == running:
        return running
    if running == 1:
        nodes = f"--nnodes {plan.group.num_nodes} " if plan.group.num_nodes > 1 else ""
        fix = f"start it with torchrun {nodes}--nproc-per-node {plan.group.in_node}"
        if not _initialized():
            fix += ", and call torch.distributed.init_process_group() before prepare()"
    else:
        fix = f"plan with --num-devices {running}"
    planned = "1 device" if plan.group.num_devices == 1 else f"{plan.group.num_devices} devices"
    raise ProtrainError(
        f"the plan is for {planned}, and {running} run{'s' if running == 1 else ''}",
        key="settings.group.num_devices",
        fix=fix,
    )


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


JOIN_S = 120.0
"""How long the ranks of one start may come one after the other."""


class Launched:
    """This process among those that a launcher (`torchrun`) started: rank 0 of 1 without one."""

    def __init__(self, store: Store | None, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._store = store
        self._meeting: Meeting | None = None
        if store is not None:
            own = PrefixStore("protrain/launched", store)
            self._meeting = Meeting(own, rank, count, limit_s=JOIN_S, holds_others=True)

    def agree(self, what: str, facts: Mapping[str, str]) -> None:
        """RanksError where a rank does not come, or was called with other `facts`."""
        if self._meeting is not None:
            self._meeting.agree(what, facts, lambda _: "start all ranks with the same command")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Tell the others what fails inside; they say who failed, in one line."""
        if self._meeting is None:
            yield
            return
        try:
            with self._meeting.telling(what, final=True):
                yield
        except Exception as error:
            if (cause := known_error(error)) is not None:
                raise ProtrainError(cause.message) from None
            # PyTorch's own collectives may have failed because another rank did, which tells soon.
            end = time.monotonic() + ANSWER_S
            waits = isinstance(error, RuntimeError)
            while waits and self._meeting.lost is None and time.monotonic() < end:
                time.sleep(0.05)
            lost = self._meeting.lost if waits else None
            if lost is not None and lost[0].rank != self.rank:
                raise ProtrainError(lost[0].error(self.rank, self.count).message) from None
            raise
        finally:
            self._meeting.close()

    @contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """The ranks can call collectives; each has the accelerator of its number on its node."""
        if self._store is None:
            yield
            return
        own = torch.device(device)
        if not devices.on_host(own):
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            devices.collectives(own),
            store=self._store,
            rank=self.rank,
            world_size=self.count,
            timeout=timedelta(seconds=JOIN_S),
        )
        try:
            yield
            leave()  # not where something failed: who failed says why first
        finally:
            dist.destroy_process_group()


def launched() -> Launched:
    """Who this process is, once the ranks' store is there. ProtrainError where it does not come."""
    if _initialized():
        return Launched(None, dist.get_rank(), dist.get_world_size())
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Launched(None, 0, 1)
    try:
        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
    except (RuntimeError, ValueError) as error:
        raise ProtrainError(
            f"the ranks did not come together: {str(error).splitlines()[0]}",
            fix="start them with torchrun; with another launcher set RANK, WORLD_SIZE, MASTER_ADDR"
            " and MASTER_PORT",
        ) from error
    return Launched(store, rank, count)
