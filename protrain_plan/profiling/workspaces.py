"""What operators hold in memory only while they run, which fake tensors cannot show.

Each entry is `operator -> bytes` beyond its inputs and outputs at its highest point. On a CPU they
were found by comparing with the allocator's own events (PyTorch 2.13, float32 to the byte;
tests/test_tracking.py compares each entry). Kernels of oneDNN, for 16-bit matrix products and
convolutions, choose their scratch memory by the processor: these entries are upper bounds, taken
from a machine with AVX-512 and two threads.

The entries for CUDA were read from PyTorch's sources and have not been compared with a device. They
are upper bounds where a size depends on the launch. Convolutions are not bounded: cuDNN chooses
its workspace by trying.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protrain_plan.records.hardware import Device
from protrain_runtime.boundaries import tensors_in

aten = torch.ops.aten

CUDA_BLOCK_BYTES = 512
"""The caching allocator's smallest unit (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
_SCRATCH_BYTES = 2**20
"""A bound on what CUDA's reductions and scans take for partial results."""


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """One operator as it was called, and what it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    num_threads: int

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def given(self) -> Tensor:
        """The first argument."""
        tensor: Tensor = self.args[0]
        return tensor

    def argument(self, position: int, name: str, default: Any) -> Any:
        """An argument that may be given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


Workspace = Callable[[OperatorCall], int]


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """How a device's allocator counts: blocks of `block_bytes`, workspaces by operator.

    `python_scalars`: a Python number that meets a tensor becomes a tensor in the device's memory,
    which autograd keeps if a gradient needs it (true of a CPU, whose memory is the host's).
    """

    workspaces: Mapping[Any, Workspace]
    block_bytes: int
    python_scalars: bool
    num_threads: int

    def rounded(self, num_bytes: int) -> int:
        """What a storage of `num_bytes` takes."""
        return -(-num_bytes // self.block_bytes) * self.block_bytes

    def workspace(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """What `func` takes besides its inputs and outputs while it runs."""
        formula = self.workspaces.get(func)
        if formula is None:
            return 0
        call = OperatorCall(
            func=func,
            args=args,
            kwargs=kwargs,
            outputs=tuple(tensors_in(result)),
            num_threads=self.num_threads,
        )
        return self.rounded(formula(call))


def allocator_of(device: Device) -> Allocator:
    """How the allocator of `device` counts."""
    if device.kind == "cuda":
        return Allocator(
            workspaces=_CUDA,
            block_bytes=CUDA_BLOCK_BYTES,
            python_scalars=False,
            num_threads=1,  # no kernel of a card cares
        )
    return Allocator(
        workspaces=_CPU, block_bytes=1, python_scalars=True, num_threads=device.num_threads
    )


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
    if given.dtype in _HALF:
        return int(4 * (given.numel() + mean.numel()) + 8)
    return int(8 + mean.dtype.itemsize)


def _cast_sum(call: OperatorCall) -> int:
    """A sum in another dtype casts its input first."""
    given, total = call.given, call.outputs[0]
    return given.numel() * total.itemsize if total.dtype != given.dtype else 0


# --- operators with temporaries of their own ------------------------------------------------------

_HALF = (torch.bfloat16, torch.float16)
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


def _contiguous(*tensors: Tensor) -> int:
    """What copies of those take that do not lie in a row."""
    return sum(t.numel() * t.itemsize for t in tensors if not t.is_contiguous())


def _embedding(call: OperatorCall) -> int:
    """Indices of more than one dimension are flattened: a copy where they are a part of others."""
    return _contiguous(call.args[1])


def _embedding_backward(call: OperatorCall) -> int:
    """The gradient and the indices are made contiguous."""
    return _contiguous(*call.args[:2])


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
    return 4 * call.given.numel() if call.given.dtype in _HALF else 0


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


_LONG_ROWS = 2048
_LONG_COLUMNS = 512


def _packed_per_thread(left: Tensor) -> int:
    """The most scratch that oneDNN took for a 16-bit product, per thread, and some more.

    It depends on the inner dimension. Left operands that lie row by row took 193 KiB, beyond 2048
    elements 721 KiB; others are packed, too: 275 KiB, beyond 512 elements 2385 KiB. (Operands from
    64 x 64 to 8192 x 11008 x 4096.)
    """
    inner = left.shape[-1]
    if left.stride(-1) == 1:
        return 2**18 if inner <= _LONG_ROWS else 2**20
    return 2**19 if inner <= _LONG_COLUMNS else 5 * 2**19


_KERNEL_BYTES = 8192
"""Per thread, for what is small and fixed: paddings, pointers, one line of sums."""


def _half_product(call: OperatorCall) -> int:
    """A bound: operands packed, the right one by every thread, and a float32 result; or blocks."""
    operands = [t for t in call.inputs if t.dim() > 1 and t.dtype in _HALF]
    if not operands:
        return 0
    left, right = operands[-2:] if len(operands) > 1 else (operands[0], operands[0])
    whole = left.numel() + call.num_threads * right.numel() + 2 * call.outputs[0].numel()
    most = min(whole * left.itemsize, call.num_threads * _packed_per_thread(left))
    return most + _KERNEL_BYTES * call.num_threads


_SUMS_BYTES = 2**15
"""Per thread, of a convolution: up to 12 KiB were seen besides what the bounds below name."""
_CHANNELS = 16
"""oneDNN lays channels out in blocks of up to so many (AVX-512; 8 with AVX2)."""


_IMAGE_CHANNELS = 3
_WIDEST_KERNEL = 14
"""Of those that compute the gradient of weights in blocks: 8 x 8 is one, 16 x 16 is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocked:
    """Elements of a convolution's operands with whole blocks of channels in every group.

    If `images`, the few channels of an image stay as they are: there are kernels for those.
    """

    given: int
    weight: int
    result: int

    @staticmethod
    def of(
        given: Tensor, weight: Tensor, result: Tensor, groups: int, *, images: bool
    ) -> "_Blocked":
        if groups == weight.shape[0] == given.shape[1]:  # a group is a channel
            own = _in_blocks(groups)
            return _Blocked(
                given=given.numel() // groups * own,
                weight=weight.numel() // groups * own,
                result=result.numel() // groups * own,
            )
        inside, outside = int(weight.shape[1]), int(weight.shape[0]) // groups
        kernel = math.prod(weight.shape[2:])
        is_image = images and groups == 1 and inside <= _IMAGE_CHANNELS
        blocked = inside if is_image else _in_blocks(inside)
        return _Blocked(
            given=given.numel() // inside * blocked,
            weight=groups * blocked * _in_blocks(outside) * kernel,
            result=result.numel() // outside * _in_blocks(outside),
        )


def _in_blocks(channels: int) -> int:
    return -(-channels // _CHANNELS) * _CHANNELS


def _strided_image(weight: Tensor, stride: Sequence[int], result: Tensor) -> int:
    """Elements of one image's pixels that a strided 1 x 1 kernel reads, which are put in a row."""
    if math.prod(weight.shape[2:]) > 1 or max(stride) == 1:
        return 0
    return _in_blocks(int(weight.shape[1])) * math.prod(result.shape[2:])


def _convolution(call: OperatorCall) -> int:
    """A bound: operands are laid out anew for the kernel; after it, the result.

    Small kernels in 16 bits add up in float32.
    """
    given, weight = call.args[:2]
    stride, transposed, groups = call.args[3], call.args[6], call.args[8]
    result = call.outputs[0]
    # Kernels that are not oneDNN's take single images.
    if transposed or given.shape[0] == 1:
        return _any_convolution(call)
    blocked = _Blocked.of(given, weight, result, groups, images=True)
    before = blocked.given + blocked.weight + blocked.result - result.numel()
    before += call.num_threads * _strided_image(weight, stride, result)
    size = max(before, blocked.result) * given.itemsize
    apart = all(step >= width for step, width in zip(stride, weight.shape[2:], strict=True))
    if given.dtype in _HALF and apart:
        size += 4 * blocked.result
    return int(size) + _SUMS_BYTES * call.num_threads


def _convolution_backward(call: OperatorCall) -> int:
    """A bound: operands are laid out anew, and every thread sums up the weight's gradient.

    The input's gradient is there in both layouts, and once more. 16-bit operands are transposed
    besides.
    """
    gradient, given, weight = call.args[:3]
    stride, transposed, groups = call.args[4], call.args[7], call.args[9]
    if transposed or given.shape[0] == 1:
        return _any_convolution(call)
    images = not call.args[10][0]
    if weight.shape[-1] > _WIDEST_KERNEL:
        return _any_convolution(call) + _columns(call, weight, gradient)
    blocked = _Blocked.of(given, weight, gradient, groups, images=images)
    laid_out = blocked.given + max(blocked.given, blocked.result)
    if given.dtype in _HALF:
        laid_out = 2 * (blocked.given + blocked.result)
    size = laid_out * given.itemsize
    size += 4 * (1 + call.num_threads) * blocked.weight
    size += 4 * call.num_threads * _strided_image(weight, stride, gradient)
    return int(size) + _SUMS_BYTES * call.num_threads


def _columns(call: OperatorCall, weight: Tensor, gradient: Tensor) -> int:
    """Bytes of one image's patches as rows of a matrix, for every thread and once more."""
    patches = math.prod(weight.shape[1:]) * math.prod(gradient.shape[2:])
    return 4 * (1 + call.num_threads) * patches


def _any_convolution(call: OperatorCall) -> int:
    """A bound for the kernels that are not oneDNN's, too: everything four times, in float32."""
    return 16 * sum(t.numel() for t in (*call.inputs, *call.outputs))


def _attention_blocks(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """How CPU flash attention cuts: rows of q and of k at a time, and the head's width."""
    length = int(query.shape[2])
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, int(key.shape[2])), int(query.shape[3])


def _attention(call: OperatorCall) -> int:
    """Per thread a block of scores, its maxima and sums, a block of output; scores in 16 bits."""
    query, key = call.args[:2]
    rows, columns, width = _attention_blocks(query, key)
    floats = rows * columns + 2 * rows + rows * width
    half = 2 * rows * columns if query.dtype in _HALF else 0
    return call.num_threads * (4 * floats + half)


def _attention_backward(call: OperatorCall) -> int:
    """Per thread two blocks of scores, a row of sums; the gradient with heads innermost.

    16-bit blocks are stored twice, and packed for their products: the last term is a bound.
    """
    gradient, query, key = call.args[:3]
    rows, columns, width = _attention_blocks(query, key)
    size = call.num_threads * 4 * 2 * rows * columns + 4 * rows
    if not gradient.transpose(1, 2).is_contiguous():
        size += gradient.numel() * gradient.itemsize
    if query.dtype in _HALF:
        size += call.num_threads * 2 * 2 * rows * columns
        size += call.num_threads * 4 * (2 * rows * columns + (rows + columns) * width)
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

_CPU: dict[Any, Workspace] = {
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
    **dict.fromkeys(_PRODUCTS, _half_product),
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


# --- CUDA -----------------------------------------------------------------------------------------


def _cuda_partial(_: OperatorCall) -> int:
    return _SCRATCH_BYTES


def _cuda_random_state(_: OperatorCall) -> int:
    """Seed and offset of the dropout, which the kernel returns besides, in a block each."""
    return 2 * CUDA_BLOCK_BYTES


def _cuda_attention_backward(call: OperatorCall) -> int:
    """The gradient of q in float32, sums of rows, and gradients of k and v before heads are summed.

    Lengths are rounded up to 128, widths to 32 (flash_attn/flash_api.cpp, mha_bwd).
    """
    _, query, key = call.args[:3]
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    wide = -(-width // 32) * 32
    size = 4 * batch * heads * rounded * (wide + 1)
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * width * key.itemsize
    return int(size)


def _cuda_embedding_backward(call: OperatorCall) -> int:
    """Sorted indices with the sort's own memory, and float32 sums of partial segments.

    Segments have ten rows (ATen/native/cuda/EmbeddingBackwardKernel.cu, NROWS_PER_THREAD).
    """
    gradient, indices, num_weights = call.args[:3]
    count = indices.numel()
    segments = -(-count // 10) + min(count, num_weights)
    return int(8 * 8 * count + 4 * segments * gradient.shape[-1] + _SCRATCH_BYTES)


def _cuda_layer_norm_backward(call: OperatorCall) -> int:
    """Gradients of weight and bias in 64 parts, in float32."""
    return int(2 * 64 * 4 * math.prod(call.args[2]))


def _cuda_sort(call: OperatorCall) -> int:
    """Keys and values twice."""
    return 4 * 8 * call.given.numel() + _SCRATCH_BYTES


def _cuda_contiguous_operands(call: OperatorCall) -> int:
    """A bound: operands that the library cannot read as they lie are copied."""
    return _contiguous(*call.inputs)


_CUDA: dict[Any, Workspace] = {
    **dict.fromkeys(
        (
            aten.sum.default,
            aten.sum.dim_IntList,
            aten.mean.default,
            aten.mean.dim,
            aten.cumsum.default,
            aten.linalg_vector_norm.default,
            aten.nll_loss_forward.default,
            aten.histc.default,
            aten._grouped_mm.default,
        ),
        _cuda_partial,
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _cuda_random_state,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cuda_attention_backward,
    aten.embedding_dense_backward.default: _cuda_embedding_backward,
    aten.native_layer_norm_backward.default: _cuda_layer_norm_backward,
    aten.sort.default: _cuda_sort,
    aten.index_put.default: _cuda_sort,
    aten.index_put_.default: _cuda_sort,
    aten._index_put_impl_.default: _cuda_sort,
    aten.bmm.default: _cuda_contiguous_operands,
}
