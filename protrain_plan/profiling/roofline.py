"""Seconds of operators from what they compute and move, by a machine's rates.

FLOPs are those of matrix products, convolutions and attention; everything else is its bytes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from protrain_plan.records.hardware import Rates
from protrain_runtime.measure import storage_bytes
from protrain_runtime.trees import tensors_in

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


class OperatorLog(TorchDispatchMode):
    """The work of operators between marks, one list per mark. The tensors may be fake."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots: list[list[Work]] = []

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def mark(self) -> None:
        """What runs from here on stands in the next list."""
        self.slots.append([])

    def seconds(self, rates: Rates) -> list[float]:
        """The estimate for every mark."""
        return [sum(work.seconds(rates) for work in slot) for slot in self.slots]

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
    ) -> None:
        """Write down a call of an operator that somebody else saw."""
        if self.slots and not _is_free(func):
            self.slots[-1].append(operator_work(func, args, kwargs, result))


def _is_free(func: Any) -> bool:
    return bool(func.is_view) or func.namespace == "prim" or func._schema.name in _FREE


def operator_work(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
) -> Work:
    """What a call of an operator does; views and bookkeeping are not asked about."""
    half = any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors_in((args, kwargs)))
    return Work(
        operator_flops(func, args, kwargs, result),
        operator_bytes(func, args, kwargs, result),
        half,
    )


def operator_flops(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
) -> float:
    """Two per multiplication and addition; 0 for operators that are not matrix products."""
    own = _FLOPS.get(func)
    if own is not None:
        return own(args, kwargs)
    counted = flop_registry.get(func._overloadpacket)
    return 0.0 if counted is None else float(counted(*args, **kwargs, out_val=result))


def operator_bytes(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
) -> int:
    """Bytes read and written, each operand once. Of a table, the rows that are looked up."""
    outputs = tensors_in(result)
    written = sum(_bytes(tensor) for tensor in outputs)
    if func in _LOOKUPS:
        return 2 * written + sum(_bytes(tensor) for tensor in tensors_in(args[1:]))
    return written + sum(_bytes(tensor) for tensor in tensors_in((args, kwargs)))


_LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)


def _bytes(tensor: Tensor) -> int:
    """An expanded tensor has more elements than bytes."""
    if tensor.layout != torch.strided:
        return storage_bytes([tensor])
    return min(tensor.numel() * tensor.itemsize, int(tensor.untyped_storage().nbytes()))


def _attention_flops(query: Tensor, key: Tensor, *, products: int, causal: bool) -> float:
    """Per product 2 B H Sq Sk D; half of the scores where the kernel skips the future."""
    batch, heads, length, width = query.shape
    flops = 2.0 * products * batch * heads * length * key.shape[2] * width
    return flops / 2 if causal else flops


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    return _attention_flops(args[0], args[1], products=2, causal=causal)


def _attention_backward(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Scores are computed again, then four gradients."""
    causal = args[7] if len(args) > 7 else kwargs.get("is_causal", False)
    return _attention_flops(args[1], args[2], products=5, causal=causal)


def _grouped_product(args: tuple[Any, ...], _: Mapping[str, Any]) -> float:
    """Every row meets the weights of one group."""
    left, right = args[:2]
    return 2.0 * int(left.numel()) * int(right.shape[-1])


_FLOPS: dict[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten._grouped_mm.default: _grouped_product,
}
"""Those that `torch.utils.flop_counter` lacks."""
