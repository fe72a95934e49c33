"""Work of operators, and their seconds by a machine's rates. Nothing here knows of tensors."""

from collections.abc import Iterable
from typing import NamedTuple

from protrain_plan.hardware.kernels import (
    Attention,
    Product,
    accesses_per_s,
    attention_efficiency,
    product_efficiency,
)
from protrain_runtime.contract.records.hardware import Rates


class Work(NamedTuple):
    """Work of one operator: what it computes and moves.

    `model_flops` are its part of what model FLOPs utilisation counts (`records.Profile`).
    """

    flops: float
    bytes: int
    half: bool  # computes in 16 bits
    shape: Product | Attention | None = None
    model_flops: float = 0.0
    accesses: int = 0
    fused: bool = False

    def seconds(self, rates: Rates) -> float:
        """The formula of `Rates`."""
        if self.fused and rates.multiprocessors:
            return 0.0
        peak = rates.flops_per_s(half=self.half)
        efficiency = rates.compute_efficiency
        match self.shape:
            case Product():
                efficiency *= product_efficiency(self.shape, rates.multiprocessors, half=self.half)
            case Attention() if self.half:
                efficiency = attention_efficiency(self.shape, rates)
        computing = self.flops / (peak * efficiency)
        moving = self.bytes / (rates.memory_bytes_per_s * rates.memory_efficiency)
        moving = max(moving, self.accesses / accesses_per_s(rates))
        return max(computing, moving) + rates.operator_s


class WorkLog:
    """The work of operators between marks, one list per mark."""

    def __init__(self, slots: Iterable[list[Work]] = ()) -> None:
        self.slots = list(slots)

    def mark(self) -> None:
        """Begin the next list, to which belongs what runs from here on."""
        self.slots.append([])

    def seconds(self, rates: Rates) -> list[float]:
        """The estimate for every mark."""
        return [sum(work.seconds(rates) for work in slot) for slot in self.slots]

    def launch_seconds(self, rates: Rates) -> list[float]:
        """Seconds of the thread that launches the operators, for every mark."""
        return [
            rates.operator_s * sum(not (work.fused and rates.multiprocessors) for work in slot)
            for slot in self.slots
        ]

    def model_flops(self) -> list[float]:
        """Return what model FLOPs utilisation counts, for every mark."""
        return [sum(work.model_flops for work in slot) for slot in self.slots]
