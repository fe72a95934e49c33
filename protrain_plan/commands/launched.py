"""This process among those that a launcher (`torchrun`) started.

They come together at their store first, before anything can go wrong on one of them alone.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.devices import device as devices
from protrain_runtime.ranks.failure import Meeting
from protrain_runtime.ranks.group import leave

JOIN_S = 120.0
"""Seconds by which the ranks of one start may follow each other at most."""


@dataclass(eq=False)
class Launched:
    """This process, number `rank` of those that meet at a store."""

    rank: int
    count: int
    store: Store
    meeting: Meeting

    def agree(self, what: str, facts: Mapping[str, str]) -> None:
        """RanksError where a rank does not come, or was called with other `facts`."""
        self.meeting.agree(what, facts, lambda _: "start all ranks with the same command")

    @contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """The ranks can call collectives; each has the accelerator of its number on its node."""
        own = torch.device(device)
        if not devices.on_host(own):
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(
            devices.collectives(own),
            store=self.store,
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
    try:
        store, rank, count = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
    except (RuntimeError, ValueError) as error:
        raise ProtrainError(
            f"the ranks could not connect: {str(error).splitlines()[0]}",
            fix="start them with torchrun; with another launcher set RANK, WORLD_SIZE, MASTER_ADDR"
            " and MASTER_PORT",
        ) from error
    own = PrefixStore("protrain/launched", store)
    return Launched(rank, count, store, Meeting(own, rank, count, limit_s=JOIN_S))
