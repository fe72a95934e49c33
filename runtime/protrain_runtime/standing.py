"""What a planned step holds at one moment, by owner: for the message when memory has run out."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from protrain_runtime import devices
from protrain_runtime.measure import process_memory, storage_bytes
from protrain_runtime.taken import TakenGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Bytes in one slot, as they stand.

    slot       the programme's slot; the one after the last is the device's update
    states     persistent parameters (the optimizer's states are the optimizer's to tell)
    gradients  of all parameters, while they are on the device
    transfers  buffers of chunks, and swapped activations on their way
    staging    what optimizer states and gradients pass through
    in_all     CPU: what the process holds of the kind that RLIMIT_DATA counts; on an accelerator
               what its allocator gave out
    """

    slot: int
    states: int
    gradients: int
    transfers: int
    staging: int
    in_all: int


def held_bytes(tensors: Iterable[torch.Tensor | None], device: torch.device) -> int:
    """Of those tensors that are on `device`, each storage once; stand-ins hold nothing."""
    real = [t for t in tensors if t is not None and not isinstance(t, TakenGradient)]
    return storage_bytes(t for t in real if t.device == device)


def all_bytes(device: torch.device) -> int:
    """What the process holds of the memory that `device` has; 0 where the system does not say."""
    if not devices.on_host(device):
        return devices.allocated_bytes(device)
    try:
        return process_memory().data_bytes
    except OSError:
        return 0
