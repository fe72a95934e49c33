"""This rank among the others: the groups that collectives run in, agreement, and who is missing.

Every rank runs the same programme, so that all of them meet in the same collectives in the same
order. A rank that does not come makes the others wait. Collectives have a time limit, and who fails
in one asks at the ranks' store who is still there: a thread of every rank answers. On accelerators
a collective is submitted to a stream, and nothing fails where it was: that thread looks how long
collectives take, and says who is missing before the library of collectives ends the process.
"""

import ctypes
import json
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from protrain_plan.errors import ProtrainError
from protrain_plan.records.plan import Plan
from protrain_runtime import devices
from protrain_runtime.lanes import PATIENCE_S

ANSWER_S = 3.0
"""How long a rank that is there may take to say so; it looks four times a second."""

_START_AGAIN = "see what that rank said last; start all ranks again, from a checkpoint"

_LOOK_S = 0.25
_SERIAL = count()
"""Tells the groups that this process is in apart; every rank counts alike."""


CHECKPOINT_LIMIT_S = 3600.0
"""What a rank may take longer than another one to write its part of a checkpoint."""


# Their names since PyTorch 2.13, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RanksError(ProtrainError, RuntimeError):
    """Another rank did not come, or disagrees."""


class Ranks:
    """The ranks of one data-parallel group, of which this one is number `rank` of `count`.

    `shard` of `num_shards` is its place among those that share the states of a chunk. RanksError
    where the ranks have not all come, with equal `facts`, within `limit_s`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        num_replicas: int,
        device: torch.device,
        facts: Mapping[str, str],
        limit_s: float,
    ) -> None:
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.num_shards = self.count // num_replicas
        self.shard = self.rank % self.num_shards
        self.on_stream = not devices.on_host(device)
        self._device = device
        self._under_way: deque[tuple[torch.Event, float]] = deque()  # on the stream, since when
        self._asked = False  # of one that did not end in time
        self._late = ""  # what was said of it
        self._library = devices.collectives(device)
        self._limit_s = limit_s
        self._checkpoints: dist.ProcessGroup | None = None
        self._members = dist.get_process_group_ranks(group or dist.group.WORLD)
        members = "-".join(map(str, self._members))
        self._store = PrefixStore(f"protrain/{members}/{next(_SERIAL)}", _get_default_store())
        self._agree(facts)
        self._answering = _Answering(
            self._store.clone(),  # type: ignore[attr-defined] # a connection of its own
            self.rank,
            self._look_for_late,
        )
        try:
            first = self.rank - self.shard
            self._all = self._new_group(range(self.count))
            self._sharing = self._replicas = self._all
            if 1 < self.num_shards < self.count:
                self._sharing = self._new_group(range(first, first + self.num_shards))
                self._replicas = self._new_group(range(self.shard, self.count, self.num_shards))
        except BaseException:
            self._answering.close()
            raise

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        members = tuple(self._members[rank] for rank in ranks)
        return _group(members, self._library, self._limit_s + (PATIENCE_S if self.on_stream else 0))

    def close(self) -> None:
        """Answer no more. The groups stay, for the next one: see `_group`."""
        self._answering.close()

    # ---- before the first collective ----------------------------------------------------------

    def _agree(self, facts: Mapping[str, str]) -> None:
        """Let every rank see every other's facts: all of them raise, or none."""
        self._store.set(f"facts/{self.rank}", json.dumps(dict(facts)))
        others: list[Mapping[str, str]] = []
        end = time.monotonic() + self._limit_s
        for rank in range(self.count):
            key = f"facts/{rank}"
            try:
                left = max(end - time.monotonic(), 0.001)
                self._store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                raise RanksError(
                    f"rank {rank} of {self.count} did not come to prepare() within"
                    f" {self._limit_s:g} s",
                    fix="see what that rank says; every rank calls prepare() once per model, in the"
                    " same order",
                ) from error
            others.append(json.loads(self._store.get(key)))
        for rank, other in enumerate(others):
            for name, value in others[0].items():
                if other[name] != value:
                    raise RanksError(
                        f"rank {rank} has another {name} than rank 0: {other[name]} instead of"
                        f" {value}",
                        fix="start every rank with the same model and the same plan",
                    )

    # ---- collectives --------------------------------------------------------------------------

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `whole` with the shards of all ranks that share it; `own` may lie in its place.

        Gloo's own all-gather makes a copy of `whole`: there, each rank sends its range to all.
        """
        if self.on_stream and self.num_shards > 1:
            with self._collective():
                _gather(whole, own, group=self._sharing)
            return
        size, first = own.numel(), self.rank - self.shard
        mine = whole[self.shard * size : (self.shard + 1) * size]
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        if self.num_shards == 1:
            return
        with self._collective():
            for shard in range(self.num_shards):
                place = whole[shard * size : (shard + 1) * size]
                source = self._members[first + shard]
                dist.broadcast(_lent(place), src=source, group=self._sharing)

    def all_reduce(self, values: torch.Tensor) -> None:
        """The sum over all ranks, in place."""
        with self._collective():
            dist.all_reduce(_lent(values), group=self._all)

    def sum_of_shards(self, values: torch.Tensor) -> None:
        """The sum over the ranks that share states, in place."""
        if self.num_shards > 1:
            with self._collective():
                dist.all_reduce(_lent(values), group=self._sharing)

    def reduce_scatter(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """The sum of `whole` over all ranks: this rank's range of it goes to `own`.

        `whole` is used up. Gloo's own reduce-scatter sums a copy of it.
        """
        size = own.numel()
        mine = whole[self.shard * size : (self.shard + 1) * size]
        with self._collective():
            if self.num_shards > 1 and self.on_stream:
                _reduce_scatter(mine, whole, group=self._sharing)
            elif self.num_shards > 1:
                dist.all_reduce(_lent(whole), group=self._sharing)
            if self.num_shards < self.count:
                dist.all_reduce(_lent(mine), group=self._replicas)
        own.copy_(mine)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Rank 0's values on every rank.  # dense tensors"""
        with self._collective():
            for tensor in tensors:
                values = tensor.detach()
                dense = values.contiguous()
                flat = dense.view(-1).view(torch.uint8)
                dist.broadcast(flat, src=self._members[0], group=self._all)
                if dense is not values:
                    values.copy_(dense)

    def all_objects(self, mine: Any) -> list[Any]:
        """What every rank has, by rank; from host to host, whatever they train on."""
        found: list[Any] = [None] * self.count
        with self.meeting():
            hosts = _group(tuple(self._members), "gloo", self._limit_s)
            dist.all_gather_object(found, mine, group=hosts)
        return found

    def checkpoint_group(self) -> dist.ProcessGroup:
        """All ranks, for what runs beside training; made when it is first asked for, by all."""
        if self._checkpoints is None:
            self._checkpoints = _group(tuple(self._members), "gloo", CHECKPOINT_LIMIT_S)
        return self._checkpoints

    @contextmanager
    def meeting(self, limit_s: float | None = None) -> Iterator[None]:
        """Where all ranks meet: RanksError, with who is missing, in place of RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            raise RanksError(
                self._who_is_missing(self._limit_s if limit_s is None else limit_s),
                fix=_START_AGAIN,
            ) from error

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """`meeting`, of what may be on a stream when it is left."""
        if self._late:
            raise RanksError(self._late, fix=_START_AGAIN)
        with self.meeting():
            yield
        if self.on_stream:
            self._under_way.append((devices.record_event(self._device), time.monotonic()))

    def _look_for_late(self) -> None:
        """Say once, of a collective on a stream that has not ended in time, who is missing."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        if self._asked or not self._under_way:
            return
        if time.monotonic() - self._under_way[0][1] > self._limit_s:
            self._asked = True
            # Not in the thread that answers others who ask.
            Thread(target=self._tell, name="protrain asks", daemon=True).start()

    def _tell(self) -> None:
        self._late = self._who_is_missing(self._limit_s)
        warnings.warn(f"{self._late}; {_START_AGAIN}", RuntimeWarning, stacklevel=1)

    def _who_is_missing(self, limit_s: float) -> str:
        """Ask who is there, and say who is not."""
        here = f"rank {self.rank} of {self.count} waited for the others"
        try:
            self._answering.ask(self._store)
            time.sleep(ANSWER_S)
            present = [self._store.check([_answer(rank)]) for rank in range(self.count)]
        except RuntimeError:
            return (
                f"{here}, and their meeting place is gone: the rank that keeps it (rank 0, or the"
                " launcher) has ended"
            )
        absent = [rank for rank, answered in enumerate(present) if not answered]
        if not absent:
            return (
                f"{here} for {limit_s:g} s, and all of them run: one hangs, or has taken"
                " another path"
            )
        which = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {_listed(absent)}"
        return f"{here}, and {which} ended or hangs"


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's memory as a flat tensor that does not keep it.

    Gloo's own thread may hold what it was given for a moment longer than the collective takes, and
    would then be the one that frees it: see [Note: who frees what] in `moves`.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)


_groups: dict[tuple[tuple[int, ...], str, float], dist.ProcessGroup] = {}
_world: list[dist.ProcessGroup | None] = [None]  # in which they were made


def _group(members: tuple[int, ...], backend: str, limit_s: float) -> dist.ProcessGroup:
    """The group of these ranks of the world, made when first asked for, and kept.

    PyTorch names such a group by its members and by how many groups there are: one that is
    destroyed and made anew has the name of the one before, and finds its addresses at the store.
    """
    if _world[0] is not dist.group.WORLD:
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


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"


def _answer(rank: int) -> str:
    return f"here/{rank}"


_ASKED = "asked"


class _Answering:
    """A thread that says that this rank is there, once somebody has asked; `look` has it look."""

    def __init__(self, store: Store, rank: int, look: Callable[[], None]) -> None:
        self._store, self._rank, self._look = store, rank, look
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="protrain answers", daemon=True)
        self._thread.start()

    def ask(self, store: Store) -> None:
        """Ask all ranks to answer, this one too."""
        store.set(_ASKED, "1")

    def close(self) -> None:
        self._closed.set()
        self._thread.join(ANSWER_S)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: there is nobody to answer
            answered = False
            while not self._closed.wait(_LOOK_S):
                self._look()
                if not answered and self._store.check([_ASKED]):
                    self._store.set(_answer(self._rank), "1")
                    answered = True


def check_ranks(plan: Plan, group: dist.ProcessGroup | None) -> int:
    """How many ranks run; ProtrainError where the plan is for another number of them."""
    running = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if plan.num_devices == running:
        return running
    if running == 1:
        fix = f"start it with torchrun --nproc-per-node {plan.num_devices}"
        if not (dist.is_available() and dist.is_initialized()):
            fix += ", and call torch.distributed.init_process_group() before prepare()"
    else:
        fix = f"plan with --num-devices {running}"
    raise ProtrainError(
        f"the plan is for {_devices(plan.num_devices)}, and {running} run"
        + ("s" if running == 1 else ""),
        key="num_devices",
        fix=fix,
    )


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"
