"""Work of operators, and their seconds by a machine's rates. Nothing here knows of tensors."""

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

    def is_launched(self, rates: Rates) -> bool:
        """Whether it is a kernel of its own: on an accelerator, another one does `fused` work."""
        return not (self.fused and rates.multiprocessors)

    def seconds(self, rates: Rates) -> float:
        """The formula of `Rates`."""
        if not self.is_launched(rates):
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
