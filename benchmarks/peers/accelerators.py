"""The accelerator that a cell runs on, through the names that PyTorch has for all of them."""

from collections.abc import Callable
from typing import Any

import torch

from protrain_runtime.contract.records.hardware import DeviceKind, Hardware
from protrain_runtime.devices import device as devices

EMULATED = "emulated"
"""The type of the device of dry runs: threads of a CPU (tests/emulated). Of speed it says nothing;
its allocator follows CUDA's rules."""


def found(kind: DeviceKind) -> torch.device:
    """The device of this type that is current, with its index; ProtrainError where there is none.

    PyTorch knows the emulated one in this process from here on.
    """
    if kind == EMULATED:
        from tests.emulated.device import extension

        extension()
    return devices.found(kind)


def set_limit(device: torch.device, num_bytes: int) -> None:
    """Let the device's allocator reserve no more than this."""
    _LIMITS.get(device.type, _limit_by_fraction)(device, num_bytes)


def _limit_by_fraction(device: torch.device, num_bytes: int) -> None:
    """As CUDA's module, ROCm's and XPU's call it."""
    module = torch.get_device_module(device)
    total: int = module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def _limit_emulated(device: torch.device, num_bytes: int) -> None:
    from tests.emulated.device import extension

    extension().set_cap(device.index, num_bytes)


_LIMITS: dict[str, Callable[[torch.device, int], None]] = {EMULATED: _limit_emulated}
"""By the type of the device, where it is not a fraction of its memory."""


def described(device: DeviceKind) -> dict[str, Any]:
    """The device of this type, for a run's record; ProtrainError where there is none.

    For a process that ends: its context would count against all cells that come after.
    """
    card = found(device)
    return {
        "kind": card.type,
        "name": devices.name(card),
        "memory_bytes": devices.free_and_total_bytes(card)[1],
        "built_for": torch.version.cuda or torch.version.hip,
    }


def as_estimated(machine: Hardware) -> DeviceKind:
    """The type whose operators an estimate for this machine knows."""
    return "cuda" if machine.device.kind == EMULATED else machine.device.kind
