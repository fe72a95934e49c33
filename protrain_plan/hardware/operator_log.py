"""Work of operators as they run: bytes, and FLOPs of products, convolutions and attention."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from protrain_plan.hardware.kernels import Attention, Product, Work
from protrain_plan.hardware.operators import HALF, INT8_PRODUCT, PACKED_PRODUCT
from protrain_runtime.activations.trees import named, tensors_in
from protrain_runtime.contract.records.hardware import Rates
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
        "aten::_unsafe_view",
    )
)
"""They launch nothing; nor do views."""

_COPIES = (aten._to_copy.default, aten.copy_.default, aten.clone.default)
"""Element-wise like those that PyTorch tags so."""

_LONG_ROW = 2**16
"""Least bytes of a row that softmax rereads in each pass."""


@dataclass(eq=False)
class OperatorLog:
    """The work of running operators, between marks. The tensors may be fake."""

    slots: list[list[Work]] = field(default_factory=list[list[Work]])  # one per mark
    # Dropout on a CPU draws a mask, divides it and multiplies by it; on an accelerator it is one
    # kernel (fused_dropout_kernel, Dropout.cu).
    _mask: Callable[[], Tensor | None] = field(default=lambda: None, init=False)

    def mark(self) -> None:
        """Begin the next list."""
        self.slots.append([])

    def seconds(self, rates: Rates) -> list[float]:
        """The estimate for every mark."""
        return [sum(work.seconds(rates) for work in slot) for slot in self.slots]

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
    ) -> None:
        """Record an operator's call, except views and bookkeeping."""
        free = func.is_view or func.namespace == "prim" or func._schema.name in _FREE
        if not self.slots or free:
            return
        # FLOPs are two per multiplication and addition, 0 except for matrix products.
        flops, given = 0.0, tensors_in((args, kwargs))
        packs = func._schema.name in (PACKED_PRODUCT, INT8_PRODUCT)
        arguments = named(func, args, kwargs) if packs or func in _READ else {}
        if own := _FLOPS.get(func):
            flops = own(arguments)
        elif counted := flop_registry.get(func._overloadpacket):
            flops = float(counted(*args, **kwargs, out_val=result))
        # Each operand is read or written once; of a table, only the looked-up rows.
        moved = sum(_bytes(tensor) for tensor in tensors_in(result))
        if func in _LOOKUPS:
            moved = 2 * moved + sum(_bytes(tensor) for tensor in given[1:])
        elif func not in _WRITES_ONLY:
            moved += sum(_bytes(tensor) for tensor in given)
            if again := _READS_AGAIN.get(func):
                moved += again(given)
        half = any(tensor.dtype in HALF for tensor in given)
        shaped = _SHAPES.get(func)
        shape = shaped(arguments) if shaped else None
        if packs:
            rows, sizes = arguments["A"], arguments.get("shapeB") or arguments["B"].shape
            columns, inner = sizes[0], rows.shape[-1]
            shape = Product(1, rows.numel() // max(1, inner), columns, inner)
            flops = 2.0 * rows.numel() * columns
            if func._schema.name == PACKED_PRODUCT:
                # Packed bytes are read and numbers written, then multiplied.
                weight = math.prod(sizes) * rows.itemsize
                packed = sum(_bytes(tensor) for tensor in given) - _bytes(rows)
                self.slots[-1].append(Work(0.0, packed + weight, half))
                moved += weight - packed
            else:
                # At most as long as in 16 bits. Sums of int32 are written and read.
                half = True
                moved += 2 * 4 * rows.shape[0] * columns
        counted_once = _MODEL_FLOPS.get(func)
        model_flops = counted_once(arguments) if counted_once else flops
        fused = func is aten.div_.Scalar and given[0] is self._mask()
        if func is aten.bernoulli_.float:
            fused, self._mask = True, ref(given[0])
        work = Work(flops, moved, half, shape, model_flops, _accesses(func, given, result), fused)
        self.slots[-1].append(work)


_WRITES_ONLY = (aten.nll_loss_forward.default, aten.nll_loss_backward.default)
"""At most one probability per row is read, and all gradients written."""


def _long_rows(given: list[Tensor], passes: int) -> int:
    """Bytes of `passes` more passes over the first tensor, if its rows are long."""
    long = given[0].shape[-1] * given[0].itemsize > _LONG_ROW
    return passes * _bytes(given[0]) if long else 0


_READS_AGAIN: dict[Any, Callable[[list[Tensor]], int]] = {
    aten._log_softmax.default: partial(_long_rows, passes=2),  # largest number, sum, result
    aten._softmax.default: partial(_long_rows, passes=2),
    aten._log_softmax_backward_data.default: partial(_long_rows, passes=1),  # sum, result
    aten._softmax_backward_data.default: partial(_long_rows, passes=1),
    aten.native_layer_norm.default: lambda given: _bytes(given[0]),  # moments, result
    # A kernel of its own reads the inputs of the gradients of weight and bias.
    aten.native_layer_norm_backward.default: lambda given: _bytes(given[0]) + _bytes(given[1]),
}
"""Bytes that kernels reread (SoftMax.cu, layer_norm_kernel.cu of PyTorch)."""


def _accesses(func: Any, given: list[Tensor], result: object) -> int:
    """Numbers that an element-wise operator reads and writes singly: all or none."""
    if torch.Tag.pointwise not in func.tags and func not in _COPIES:
        return 0
    if not isinstance(result, Tensor):
        return 0
    operands = [tensor for tensor in given if tensor.dim()]
    # Casts of float32 to 16 bits are vectorized, too (bfloat16_copy_kernel_cuda, Copy.cu).
    cast = torch.float32 if func in _COPIES and result.dtype in HALF else result.dtype
    together = all(
        tensor.dtype in (result.dtype, cast)
        and tensor.shape == result.shape
        and tensor.stride() == result.stride()
        for tensor in operands
    )
    dense = together and torch.ops.aten.is_non_overlapping_and_dense.default(result)
    return 0 if dense else result.numel() * (len(operands) + 1)


_LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)


def _bytes(tensor: Tensor) -> int:
    """An expanded tensor has more elements than bytes."""
    if tensor.layout != torch.strided:
        return storage_bytes([tensor])
    return min(tensor.numel() * tensor.itemsize, int(tensor.untyped_storage().nbytes()))


Arguments = Mapping[str, Any]
"""Arguments of an operator, by the names of its schema."""


def _attention_flops(arguments: Arguments, *, products: int, skips: bool = True) -> float:
    """Per product 2 B H Sq Sk D; half of the scores if the kernel `skips` the future."""
    batch, heads, length, width = arguments["query"].shape
    flops: float = 2.0 * products * batch * heads * length * arguments["key"].shape[2] * width
    return flops / 2 if skips and arguments["is_causal"] else flops


def _product(arguments: Arguments, *, left: str = "self", right: str = "mat2") -> Product:
    """Return the product of two named operands; batches of them in three dimensions.

    Groups of rows, of which each meets one of several weights, are taken as equal.
    """
    given, weight = arguments[left], arguments[right]
    groups = weight.shape[0] if weight.dim() == 3 else 1
    rows = given.shape[-2] if given.dim() == weight.dim() else -(-given.shape[-2] // groups)
    return Product(groups, rows, weight.shape[-1], given.shape[-1])


def _attention_shape(arguments: Arguments, *, backward: bool) -> Attention:
    keys, width = arguments["key"].shape[2:]
    masked = arguments["attn_mask"] is not None
    return Attention(keys / 2 if arguments["is_causal"] else float(keys), width, backward, masked)


_SHAPES: dict[Any, Callable[[Arguments], Product | Attention]] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten._grouped_mm.default: _product,
    aten.addmm.default: partial(_product, left="mat1"),
    aten.baddbmm.default: partial(_product, left="batch1", right="batch2"),
    aten._scaled_dot_product_flash_attention_for_cpu.default: partial(
        _attention_shape, backward=False
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: partial(
        _attention_shape, backward=True
    ),
}
"""Operators whose efficiency depends on their shape."""

_FLOPS: dict[Any, Callable[[Arguments], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: partial(_attention_flops, products=2),
    # Scores are recomputed, then four gradients.
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: partial(
        _attention_flops, products=5
    ),
    # Every row meets one group's weights.
    aten._grouped_mm.default: lambda of: 2.0 * of["self"].numel() * of["mat2"].shape[-1],
}
"""FLOPs that `torch.utils.flop_counter` lacks."""

_MODEL_FLOPS: dict[Any, Callable[[Arguments], float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: partial(
        _attention_flops, products=2, skips=False
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: partial(
        _attention_flops, products=4, skips=False
    ),
}
"""FLOPs for model FLOPs utilisation, if different: all scores, each once."""

_READ = {*_SHAPES, *_FLOPS, *_MODEL_FLOPS}
"""Operators whose arguments are read."""
