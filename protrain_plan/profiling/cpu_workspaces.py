"""What a CPU's operators hold in memory only while they run, where they cannot be called: bounds.

PyTorch's own kernels allocate alike on all processors (2.13; tests/test_tracking.py compares each
entry, to the byte). Those that choose by the processor say what the most is.
"""

import math
from typing import Any

import torch
from torch import Tensor

from protrain_plan.profiling.onednn_workspaces import (
    convolution,
    convolution_backward,
    half_product,
    packed_bytes,
)
from protrain_plan.profiling.operator_calls import HALF, OperatorCall, Workspace, contiguous

aten = torch.ops.aten

# --- element-wise operators -----------------------------------------------------------------------


def _elementwise(call: OperatorCall) -> int:
    """Operands of another dtype are cast as a whole; a number becomes a tensor, and is cast."""
    tensors = [tensor for tensor in call.inputs if tensor.dim() > 0]
    if not tensors:
        return 0
    common = tensors[0].dtype
    for tensor in tensors:
        common = torch.promote_types(common, tensor.dtype)
    casts = sum(t.numel() * common.itemsize for t in tensors if t.dtype != common)
    written = call.outputs[0]
    if call.func._schema.is_mutable and written.dtype != common:
        casts += written.numel() * common.itemsize
    return casts + _number(call, common)


def _number(call: OperatorCall, dtype: torch.dtype) -> int:
    """Eight bytes for a Python number, and once more in the dtype that is computed in."""
    numbers = [value for value in call.args[1:2] if isinstance(value, int | float)]
    if not numbers:
        return 0
    own = torch.float64 if isinstance(numbers[0], float) else torch.int64
    return own.itemsize + (0 if dtype == own else dtype.itemsize)


def _condition(call: OperatorCall) -> int:
    """`where`: the two values are cast to their common dtype; a number becomes one element."""
    values = [value for value in call.args[1:3] if isinstance(value, Tensor)]
    common = call.outputs[0].dtype
    casts = sum(value.numel() * common.itemsize for value in values if value.dtype != common)
    return casts + (2 - len(values)) * common.itemsize


def _mean(call: OperatorCall) -> int:
    """The sum is divided by a number; 16-bit values are summed up in float32, cast as a whole."""
    given, mean = call.args[0], call.outputs[0]
    if given.dtype in HALF:
        return int(4 * (given.numel() + mean.numel()) + 8)
    return int(8 + mean.dtype.itemsize)


def _cast_sum(call: OperatorCall) -> int:
    """A sum in another dtype casts its input first."""
    given, total = call.given, call.outputs[0]
    return given.numel() * total.itemsize if total.dtype != given.dtype else 0


# --- operators with temporaries of their own ------------------------------------------------------

_TRANSPOSED_BLOCK = 60  # ATen/native/Copy.cpp: matrices are transposed in square blocks


def _transposed_copy(call: OperatorCall) -> int:
    """A transposed matrix is copied through a block."""
    target, source = call.outputs[0], call.args[1] if len(call.args) > 1 else call.args[0]
    if call.func is not aten.copy_.default:
        source = call.args[0]
    if not isinstance(source, Tensor) or source.dtype != target.dtype or source.dim() != 2:
        return 0
    rows = source.shape[0]
    transposed = source.stride() == (1, rows) and target.is_contiguous()
    if not transposed or source.numel() < _TRANSPOSED_BLOCK**2:
        return 0
    return _TRANSPOSED_BLOCK**2 * source.itemsize


def _safe_softmax(call: OperatorCall) -> int:
    """Where all is masked: a mask of the values, one of the rows, a zero; or a contiguous input."""
    given, result = call.given, call.outputs[0]
    rows = result.numel() // max(1, result.shape[call.args[1]])
    copied = given.dtype != result.dtype or not given.is_contiguous()
    copy = given.numel() * result.itemsize if copied else 0
    return int(max(result.numel() + rows + result.itemsize, copy))


def _layer_norm_backward(call: OperatorCall) -> int:
    """Every thread sums up the gradients of weight and bias."""
    width = math.prod(call.args[2])
    return int(2 * call.num_threads * width * call.args[1].itemsize)


def _embedding(call: OperatorCall) -> int:
    """Indices of more than one dimension are flattened: a copy where they are a part of others."""
    return contiguous(call.args[1])


def _embedding_backward(call: OperatorCall) -> int:
    """The gradient and the indices are made contiguous."""
    return contiguous(*call.args[:2])


def _masked_index(call: OperatorCall) -> int:
    """A mask becomes the places where it is true: a whole number per dimension."""
    masks = [t for t in call.args[1] if t is not None and t.dtype == torch.bool]
    if len(masks) != 1:
        return 0
    (mask,) = masks
    chosen = call.outputs[0].numel() * mask.numel() // max(1, call.given.numel())
    return 8 * int(chosen) * int(mask.dim())


def _masked_select(call: OperatorCall) -> int:
    """The mask as whole numbers, and their running sum."""
    return 16 * call.given.numel()


def _batch_norm(call: OperatorCall) -> int:
    """A bound: four values per channel."""
    return 4 * int(call.given.shape[1]) * call.given.itemsize


def _batch_norm_backward(call: OperatorCall) -> int:
    """The normalised values."""
    return call.given.numel() * call.given.itemsize


def _scatter(call: OperatorCall) -> int:
    """16-bit sums go through float32."""
    return 4 * call.given.numel() if call.given.dtype in HALF else 0


def _sort(call: OperatorCall) -> int:
    """Indices of one row."""
    given = call.args[0]
    dim = call.argument(1, "dim", -1)
    return 8 * int(given.shape[dim]) if given.dim() else 0


def _histogram(call: OperatorCall) -> int:
    """Edges, and counts per thread."""
    return int((3 * call.argument(1, "bins", 100) + 1) * call.args[0].itemsize)


def _dropout(call: OperatorCall) -> int:
    """The random mask is drawn in the values' dtype."""
    return call.given.numel() * call.given.itemsize


def _dropout_backward(call: OperatorCall) -> int:
    """The mask is cast to the gradient's dtype, and multiplied by a number."""
    return call.given.numel() * call.given.itemsize + 8 + call.given.itemsize


def _fourier(call: OperatorCall) -> int:
    """MKL transforms the last dimensions; others are brought there by a copy of the input.

    Back to real numbers, all dimensions but one are transformed into another copy.
    """
    given, dims = call.given, call.args[1]
    size = given.numel() * given.itemsize
    last = sorted(dim % given.dim() for dim in dims) == list(
        range(given.dim() - len(dims), given.dim())
    )
    if len(dims) > 1 and call.func is aten._fft_c2r.default:
        return 2 * size
    return 0 if last and given.is_contiguous() else size


def _attention_blocks(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """How CPU flash attention cuts: rows of q and of k at a time, and the head's width."""
    length = int(query.shape[2])
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, int(key.shape[2])), int(query.shape[3])


def _packed_attention(call: OperatorCall) -> int:
    """Keys and values as AMX's tiles want them, in pairs of rows; a block of keys per thread.

    As FlashAttentionKernel.cpp has them where it packs (`need_pack`): an Intel Xeon with AMX took
    so much to the byte. It leaves short sequences as they are, and those of few rows per thread.
    """
    query, key = call.args[:2]
    rows, columns, width = _attention_blocks(query, key)
    length = int(key.shape[2])
    keys = key.numel() // width * _even(width)
    values = key.numel() // length * _even(length)
    block = columns * width + rows * (_even(columns) - columns)
    padded_query = rows * _even(width) if width % 2 else 0
    return int(2 * (keys + values + call.num_threads * (block + padded_query)))


def _even(number: int) -> int:
    return number + number % 2


def _attention(call: OperatorCall) -> int:
    """Per thread a block of scores, its maxima and sums, a block of output; scores in 16 bits.

    A bound in 16 bits, which a processor may pack or not; exact in float32.
    """
    query, key = call.args[:2]
    rows, columns, width = _attention_blocks(query, key)
    size = call.num_threads * 4 * (rows * columns + 2 * rows + rows * width)
    if query.dtype in HALF:
        size += call.num_threads * 2 * rows * columns + _packed_attention(call)
    return size


def _attention_backward(call: OperatorCall) -> int:
    """Per thread two blocks of scores and a row of sums; the gradient with heads innermost.

    In 16 bits the blocks are there once more, and packed for one of five products: a bound.
    """
    gradient, query, key = call.args[:3]
    rows, columns, width = _attention_blocks(query, key)
    size = call.num_threads * 4 * 2 * rows * columns + 4 * rows
    if not gradient.transpose(1, 2).is_contiguous():
        size += gradient.numel() * gradient.itemsize
    if query.dtype in HALF:
        size += call.num_threads * 2 * 2 * rows * columns
        size += call.num_threads * max(
            packed_bytes(rows, width, columns),
            packed_bytes(columns, rows, width),
            packed_bytes(rows, columns, width),
        )
    return size


_BINARY = [
    getattr(aten, f"{name}{suffix}")
    for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "floor_divide")
    for suffix in ("", "_")
]
_ELEMENTWISE = [
    getattr(packet, overload)
    for packet in (*_BINARY, aten.rsub, aten.remainder, aten.maximum, aten.minimum)
    for overload in packet.overloads()
    if overload in ("Tensor", "Scalar", "default")
]
_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
)

_FOURIER = (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)

CPU_WORKSPACES: dict[Any, Workspace] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    aten.where.self: _condition,
    aten.where.ScalarOther: _condition,
    aten.where.ScalarSelf: _condition,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _cast_sum,
    aten.sum.default: _cast_sum,
    aten.cumsum.default: _cast_sum,
    aten.clone.default: _transposed_copy,
    aten.copy_.default: _transposed_copy,
    aten._to_copy.default: _transposed_copy,
    aten._safe_softmax.default: _safe_softmax,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index.Tensor: _masked_index,
    aten.masked_select.default: _masked_select,
    aten.masked_scatter_backward.default: _masked_select,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.index_add.default: _scatter,
    aten.scatter_add.default: _scatter,
    aten.sort.default: _sort,
    aten.histc.default: _histogram,
    aten.native_dropout.default: _dropout,
    aten.native_dropout_backward.default: _dropout_backward,
    **dict.fromkeys(_PRODUCTS, half_product),
    **dict.fromkeys(_FOURIER, _fourier),
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
