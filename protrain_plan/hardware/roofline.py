"""Seconds of operators from what they compute and move, by a machine's rates.

FLOPs are those of matrix products, convolutions and attention; everything else is its bytes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from protrain_plan.records.hardware import Rates
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.devices.memory_meter import storage_bytes

aten = torch.ops.aten

_FREE = frozenset(
    (
        "aten::detach",
        "aten::lift_fresh",
        "aten::_local_scalar_dense",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    )
)
"""They launch nothing; nor do views."""


class Work(NamedTuple):
    """What one operator computes and moves."""

    flops: float
    bytes: int
    half: bool  # computes in 16 bits

    def seconds(self, rates: Rates) -> float:
        """The formula of `Rates`."""
        peak = rates.bfloat16_flops_per_s if self.half else rates.float32_flops_per_s
        computing = self.flops / (peak * rates.compute_efficiency)
        moving = self.bytes / (rates.memory_bytes_per_s * rates.memory_efficiency)
        return max(computing, moving) + rates.operator_s


class OperatorLog:
    """The work of operators between marks, one list per mark. The tensors may be fake."""

    def __init__(self) -> None:
        self.slots: list[list[Work]] = []

    def mark(self) -> None:
        """What runs from here on belongs to the next list."""
        self.slots.append([])

    def seconds(self, rates: Rates) -> list[float]:
        """The estimate for every mark."""
        return [sum(work.seconds(rates) for work in slot) for slot in self.slots]

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
    ) -> None:
        """Write down a call of an operator; views and bookkeeping are none."""
        free = func.is_view or func.namespace == "prim" or func._schema.name in _FREE
        if self.slots and not free:
            self.slots[-1].append(operator_work(func, args, kwargs, result))


def operator_work(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
) -> Work:
    """What a call of an operator does.

    FLOPs are two per multiplication and addition, 0 for what is no matrix product. Each operand
    is read or written once; of a table, the rows that are looked up.
    """
    flops, given = 0.0, tensors_in((args, kwargs))
    if own := _FLOPS.get(func):
        flops = own(args, kwargs)
    elif counted := flop_registry.get(func._overloadpacket):
        flops = float(counted(*args, **kwargs, out_val=result))
    moved = sum(_bytes(tensor) for tensor in tensors_in(result))
    if func in _LOOKUPS:
        moved = 2 * moved + sum(_bytes(tensor) for tensor in tensors_in(args[1:]))
    else:
        moved += sum(_bytes(tensor) for tensor in given)
    return Work(flops, moved, any(t.dtype in (torch.bfloat16, torch.float16) for t in given))


_LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)


def _bytes(tensor: Tensor) -> int:
    """An expanded tensor has more elements than bytes."""
    if tensor.layout != torch.strided:
        return storage_bytes([tensor])
    return min(tensor.numel() * tensor.itemsize, int(tensor.untyped_storage().nbytes()))


def _attention(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, query: int, causal: int, products: int
) -> float:
    """Per product 2 B H Sq Sk D; half of the scores where the kernel skips the future.

    `query` and `causal` are places among the arguments.
    """
    batch, heads, length, width = args[query].shape
    flops: float = 2.0 * products * batch * heads * length * args[query + 1].shape[2] * width
    skips = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
    return flops / 2 if skips else flops


_FLOPS: dict[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: partial(
        _attention, query=0, causal=4, products=2
    ),
    # Scores are computed again, then four gradients.
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: partial(
        _attention, query=1, causal=7, products=5
    ),
    # Every row meets the weights of one group.
    aten._grouped_mm.default: lambda args, _: 2.0 * args[0].numel() * args[1].shape[-1],
}
"""Those that `torch.utils.flop_counter` lacks."""
