"""Joining the ranks that a launcher started.

They come together at their store first, before anything can go wrong on one of them alone: a file
that a node lacks is told like what fails later.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from protrain_plan.errors import ProtrainError
from protrain_runtime.devices import device as devices
from protrain_runtime.ranks.group import leave
from protrain_runtime.ranks.telling import ANSWER_S, Meeting, known_error

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
        """What fails inside is told to the others, who say who failed, in one line."""
        if self._meeting is None:
            yield
            return
        try:
            with self._meeting.telling(what, final=True):
                yield
        except Exception as error:
            if (cause := known_error(error)) is not None:
                raise ProtrainError(cause.message) from None
            self._explain(error, self._meeting)
            raise
        finally:
            self._meeting.close()

    def _explain(self, error: Exception, meeting: Meeting) -> None:
        """ProtrainError where PyTorch's own collectives failed because another rank did."""
        end = time.monotonic() + ANSWER_S
        while isinstance(error, RuntimeError) and time.monotonic() < end:
            lost = meeting.lost
            if lost is not None:
                if lost[0].rank != self.rank:
                    raise ProtrainError(lost[0].error(self.rank, self.count).message) from None
                return
            time.sleep(0.05)

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
    if dist.is_available() and dist.is_initialized():
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
