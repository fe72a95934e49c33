"""Joining the ranks that a launcher started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from protrain_runtime import devices

JOIN_S = 120.0
"""How long the ranks of one start may come one after the other."""


@contextmanager
def joined(device: str) -> Iterator[tuple[int, int]]:
    """This rank's number and how many there are: 0 of 1 where no launcher (`torchrun`) said else.

    Where there are accelerators a rank takes the one of its number on its node.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, 1
        return
    own = torch.device(device)
    if not devices.on_host(own):
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(devices.collectives(own), timeout=timedelta(seconds=JOIN_S))
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
