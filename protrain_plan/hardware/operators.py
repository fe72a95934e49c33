"""Scratch memory of operators, in addition to operands and results.

Bytes are by type of device, in one table, `DEVICE_TYPES`: fake tensors cannot show them. For CPUs
the entries are of three kinds:

- PyTorch's own kernels allocate alike on all processors (2.13; each entry is compared to the byte
  in tests/profiling/test_tracking.py).
- 16-bit products and convolutions: PyTorch and oneDNN choose kernels by the processor's
  instructions, and each has scratch memory of its own. A bound is the most of those that may be
  chosen, from SSE4.1 to AVX-512 (tests/support/random_calls.py compares them at every level). With
  AMX the sources alone were read (oneDNN 3.12).
- Where the processor is at hand (`is_this_machine`), operators are called, and no entry is needed.

CUDA's entries were read in PyTorch's sources, and not compared with a device. They are upper bounds
where a size depends on the launch. Convolutions are not bounded: cuDNN chooses its workspace by
trying.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from protrain_plan.hardware.probe import processor_name
from protrain_runtime.activations.trees import named, tensors_in
from protrain_runtime.contract.program.program import BLOCK_BYTES, block_bytes, in_blocks
from protrain_runtime.contract.records.hardware import Device, DeviceKind, is_accelerator

aten = torch.ops.aten
PACKED_PRODUCT = "bitsandbytes::gemm_4bit"
INT8_PRODUCT = "bitsandbytes::int8_scaled_mm"
"""By name: operators exist once bitsandbytes is imported."""
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """One operator's call and result."""

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
        tensor: Tensor = self[self.func._schema.arguments[0].name]
        return tensor

    @property
    def given_bytes(self) -> int:
        return self.given.numel() * self.given.itemsize

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments, by the names of the operator's schema."""
        return named(self.func, self.args, self.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


Workspace = Callable[[OperatorCall], int]
"""Bytes beyond inputs and outputs at an operator's highest point."""


def contiguous(*tensors: Tensor) -> int:
    """Bytes of contiguous copies of the tensors that need one."""
    return sum(t.numel() * t.itemsize for t in tensors if not t.is_contiguous())


_KERNEL_BYTES = 2**15
"""Per thread, for small fixed parts: paddings, pointers, lines of sums."""

# --- products -------------------------------------------------------------------------------------

_UNIT = 64
"""Most elements of a block's padding: a cache line of them, or four of AMX's tiles."""

_BLOCK_BYTES = 2 * 256 * (1024 + 32) + 2 * 64 * 1024 + 4 * 256 * 16 * 128
"""Per thread, of a product: blocks of both operands and of float32 sums. oneDNN cuts at most 256
rows, 1024 elements of the inner dimension and 16 times 64 columns, padded
(`compute_blocking_heuristic_avx512` and `init_aux_values` in brgemm_matmul_utils.cpp). With AMX it
cuts what fits in the second-level cache, 2 MiB."""

_SPLIT_INNER = 2048
"""From here on threads may share the inner dimension, each with sums of the whole result, where
the left operand is transposed and there are more threads than blocks of columns (the same)."""


def packed_bytes(rows: int, inner: int, columns: int) -> int:
    """Bytes of one thread for a 16-bit product: operands and float32 result, or blocks."""
    rows, inner, columns = (in_blocks(size, _UNIT) for size in (rows, inner, columns))
    whole = 2 * (rows * inner + inner * columns) + 4 * rows * columns
    return min(whole, _BLOCK_BYTES) + _KERNEL_BYTES


def half_product(call: OperatorCall) -> int:
    """Each thread packs for itself; or a whole float32 result, without 16-bit instructions.

    Operands of float32 are read in place.
    """
    operands = [t for t in call.inputs if t.dim() > 1 and t.dtype in HALF]
    if not operands:
        return 0
    left, right = operands[-2:]
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    each = packed_bytes(rows, inner, columns)
    transposed = left.dim() == 2 and left.stride(-1) != 1
    if transposed and inner >= _SPLIT_INNER and call.num_threads * _UNIT > columns:
        each += 4 * in_blocks(rows, _UNIT) * in_blocks(columns, _UNIT)
    return max(
        call.num_threads * each, 4 * call.outputs[0].numel() + call.num_threads * _KERNEL_BYTES
    )


# --- convolutions ---------------------------------------------------------------------------------

_CHANNELS = 16
"""oneDNN's block of channels with AVX-512; 8 with AVX2."""
_PACKED = 64
"""Kernels may read weights with one side in four blocks."""


def convolution(call: OperatorCall) -> int:
    """The larger of two kinds of kernels.

    oneDNN's reorder operands and result, with float32 sums for 16 bits, or make one matrix of
    patches per thread (gemm_convolution_utils.cpp, im2col_sz). PyTorch's own, used for single
    images, transposed ones, and 16 bits without AVX-512, makes those of all images
    (ConvolutionMM2d.cpp, finput).

    In backward the kinds are the same: gradients are laid out as their tensors, operands of 16 bits
    twice. Every thread has float32 sums of the weight's gradient (gemm_convolution_utils.cpp,
    key_conv_wei_reduction), which are added to another one.
    """
    backward = call.func is aten.convolution_backward.default
    given, weight = call["input"], call["weight"]
    transposed, groups = call["transposed"], call["groups"]
    result = call["grad_output"] if backward else call.outputs[0]
    item, half = int(given.itemsize), int(given.dtype in HALF)
    # Elements, in whole blocks of channels per group. Patches are one image's and one group's, as a
    # matrix to multiply by the weights; packed weights have larger blocks on one side, as in
    # products.
    inside, outside = given.shape[1] // groups, result.shape[1] // groups
    kernel = math.prod(weight.shape[2:])
    blocks_in, blocks_out = in_blocks(inside, _CHANNELS), in_blocks(outside, _CHANNELS)
    num_given = given.numel() // inside * blocks_in
    num_result = result.numel() // outside * blocks_out
    num_weight = groups * kernel * blocks_in * blocks_out
    larger = max(blocks_in * in_blocks(outside, _PACKED), in_blocks(inside, _PACKED) * blocks_out)
    packed_weight = groups * kernel * larger
    channels, places = (outside, given) if transposed else (inside, result)
    patches = kernel * channels * math.prod(places.shape[2:])
    plain: int = given.shape[0] * groups * patches + num_given + num_weight + num_result
    library: int = call.num_threads * (4 * patches + _KERNEL_BYTES)
    if backward:
        plain *= 2
        library += item * ((1 + half) * 2 * (num_given + num_result) + packed_weight)
        blocks = 4 * (1 + half + call.num_threads) + half * item
        matrices = 4 * item * (half + call.num_threads)  # allocated as that many floats as bytes
        library += max(blocks, matrices) * num_weight
    else:
        plain += num_result
        library += item * (num_given + packed_weight + num_result)
        library += 4 * half * (num_result + num_weight)
    # Whether any x86 processor uses oneDNN (Convolution.cpp, use_mkldnn).
    images = given.dim() == 4 and given.shape[0] > 1
    if images and given.dtype == torch.float32 and not transposed:
        return library
    return max(library, item * plain)


# --- products with packed weights -----------------------------------------------------------------


def packed_product(call: OperatorCall) -> int:
    """The dequantized weight, from float32 scales, which exist twice while made.

    On CUDA fused kernels, which need neither, are used for few rows (bitsandbytes 0.50,
    backends/cuda/ops.py, `_gemm_4bit_use_custom_fn`): a bound. The product itself packs 16-bit
    operands on a CPU.
    """
    count = math.prod(call["shapeB"])
    scales = 4 * -(-count // call["blocksize"])
    return int(count * call.given.itemsize + 2 * scales)


def _cpu_packed_product(call: OperatorCall) -> int:
    if call.given.dtype not in HALF:
        return packed_product(call)
    rows, inner = call.given.numel() // call.given.shape[-1], call.given.shape[-1]
    each = packed_bytes(rows, inner, call["shapeB"][0])
    whole = 4 * call.outputs[0].numel() + call.num_threads * _KERNEL_BYTES
    return packed_product(call) + max(call.num_threads * each, whole)


def int8_product(call: OperatorCall) -> int:
    """Product of int8 [rows, inner] and [columns, inner]: sums of int32, then of float16.

    The latter are the result if float16 (bitsandbytes 0.50, backends/cuda/ops.py,
    `int8_mm_dequant`). Inner sizes other than multiples of 4, or without a kernel, are multiplied
    in float32.
    """
    given, weight = call["A"], call["B"]
    each = in_blocks(call.outputs[0].numel(), BLOCK_BYTES)
    if given.shape[-1] % 4:
        operands = in_blocks(given.numel(), BLOCK_BYTES) + in_blocks(weight.numel(), BLOCK_BYTES)
        return 4 * operands + 3 * 4 * each
    return 4 * each + (0 if call.outputs[0].dtype == torch.float16 else 2 * each)


# --- element-wise operators -----------------------------------------------------------------------


def _elementwise(call: OperatorCall) -> int:
    """Operands of another dtype are cast whole; a number becomes a tensor, and is cast."""
    tensors = [tensor for tensor in call.inputs if tensor.dim() > 0]
    if not tensors:
        return 0
    common = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    cast = [tensor for tensor in tensors if tensor.dtype != common]
    if call.func._schema.is_mutable and call.outputs[0].dtype != common:
        cast.append(call.outputs[0])
    size = sum(tensor.numel() for tensor in cast) * common.itemsize
    number = call.arguments.get("other")
    if isinstance(number, int | float):  # eight bytes, and again in the common dtype
        own = torch.float64 if isinstance(number, float) else torch.int64
        size += own.itemsize + (0 if common == own else common.itemsize)
    return size


def _condition(call: OperatorCall) -> int:
    """`where`: both values are cast to their common dtype; a number becomes one element."""
    values = [call[name] for name in ("self", "other") if isinstance(call[name], Tensor)]
    common = call.outputs[0].dtype
    casts: int = sum(value.numel() * common.itemsize for value in values if value.dtype != common)
    return casts + (2 - len(values)) * common.itemsize


def _mean(call: OperatorCall) -> int:
    """The sum is divided by a number; 16-bit values are summed in float32, cast whole."""
    given, mean = call.given, call.outputs[0]
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
    target, copies = call.outputs[0], call.func is aten.copy_.default
    source = call["src"] if copies else call.given
    if not isinstance(source, Tensor) or source.dtype != target.dtype or source.dim() != 2:
        return 0
    transposed = source.stride() == (1, source.shape[0]) and target.is_contiguous()
    if not transposed or source.numel() < _TRANSPOSED_BLOCK**2:
        return 0
    return _TRANSPOSED_BLOCK**2 * source.itemsize


def _safe_softmax(call: OperatorCall) -> int:
    """Masks of values and rows, and a zero, for fully masked rows; or a copy of the input."""
    given, result = call.given, call.outputs[0]
    rows = result.numel() // max(1, result.shape[call["dim"]])
    copied = given.dtype != result.dtype or not given.is_contiguous()
    copy = given.numel() * result.itemsize if copied else 0
    return int(max(result.numel() + rows + result.itemsize, copy))


def _masked_index(call: OperatorCall) -> int:
    """A mask becomes indices of its true elements: a whole number per dimension."""
    masks = [t for t in call["indices"] if t is not None and t.dtype == torch.bool]
    if len(masks) != 1:
        return 0
    (mask,) = masks
    chosen = call.outputs[0].numel() * mask.numel() // max(1, call.given.numel())
    return 8 * int(chosen) * int(mask.dim())


INDEX_PUTS = (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


def _fourier(call: OperatorCall) -> int:
    """MKL transforms the last dimensions; others are moved there by a copy of the input.

    Back to real numbers, all dimensions but one are transformed into another copy.
    """
    given, dims = call.given, call["dim"]
    if len(dims) > 1 and call.func is aten._fft_c2r.default:
        return 2 * call.given_bytes
    last = list(range(given.dim() - len(dims), given.dim()))
    is_last = sorted(dim % given.dim() for dim in dims) == last
    return 0 if is_last and given.is_contiguous() else call.given_bytes


def _attention_blocks(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """Blocks of CPU flash attention: rows of q and of k, and the head's width."""
    length = int(query.shape[2])
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, int(key.shape[2])), int(query.shape[3])


def _attention(call: OperatorCall) -> int:
    """Per thread a block of scores, its maxima and sums, a block of output; scores in 16 bits.

    A bound in 16 bits, which a processor may pack or not; exact in float32. Packed are keys and
    values for AMX's tiles, in pairs of rows, and a block of keys per thread, as in
    FlashAttentionKernel.cpp (`need_pack`): equal to the byte on an Intel Xeon with AMX. Short
    sequences, and few rows per thread, stay unpacked.
    """
    query, key = call["query"], call["key"]
    rows, columns, width = _attention_blocks(query, key)
    each = 4 * (rows * columns + 2 * rows + rows * width)
    if query.dtype not in HALF:
        return call.num_threads * each
    num_keys, length = key.numel(), int(key.shape[2])
    packed = num_keys // width * in_blocks(width, 2) + num_keys // length * in_blocks(length, 2)
    block = columns * width + rows * (columns % 2)
    padded_query = rows * (width + 1) if width % 2 else 0
    each += 2 * (rows * columns + block + padded_query)
    return int(2 * packed + call.num_threads * each)


def _attention_backward(call: OperatorCall) -> int:
    """Per thread two blocks of scores and a row of sums; the gradient with heads innermost.

    In 16 bits the blocks are there once more, and packed for one of five products: a bound.
    """
    gradient, query, key = call["grad_out"], call["query"], call["key"]
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
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm)

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
    # Every thread sums up the gradients of weight and bias.
    aten.native_layer_norm_backward.default: lambda call: (
        2 * call.num_threads * math.prod(call["normalized_shape"]) * call["input"].itemsize
    ),
    # Multi-dimensional indices are flattened: copied if part of others.
    aten.embedding.default: lambda call: contiguous(call["indices"]),
    aten.embedding_dense_backward.default: lambda call: contiguous(
        call["grad_output"], call["indices"]
    ),
    aten.index.Tensor: _masked_index,
    # A bound: every element of the mask is true (see `_masked_index`).
    **dict.fromkeys(
        INDEX_PUTS,
        lambda call: sum(
            8 * t.numel() * t.dim()
            for t in call["indices"]
            if t is not None and t.dtype == torch.bool
        ),
    ),
    # The mask as integers, and their running sum.
    aten.masked_select.default: lambda call: 16 * call.given.numel(),
    aten.masked_scatter_backward.default: lambda call: 16 * call.given.numel(),
    # A bound: four values per channel. In backward, the normalised values.
    aten.native_batch_norm.default: lambda call: 4 * call.given.shape[1] * call.given.itemsize,
    aten.native_batch_norm_backward.default: lambda call: call.given_bytes,
    # 16-bit sums go through float32.
    aten.index_add.default: lambda call: 4 * call.given.numel() * (call.given.dtype in HALF),
    aten.scatter_add.default: lambda call: 4 * call.given.numel() * (call.given.dtype in HALF),
    # Indices of one row.
    aten.sort.default: lambda call: 8 * call.given.shape[call["dim"]] if call.given.dim() else 0,
    # The bins' edges, and each thread's counts.
    aten.histc.default: lambda call: (
        ((1 + call.num_threads) * call["bins"] + 1) * call.given.itemsize
    ),
    # The mask is drawn in the values' dtype; it is cast to the gradient's, times a number.
    aten.native_dropout.default: lambda call: call.given_bytes,
    aten.native_dropout_backward.default: lambda call: call.given_bytes + 8 + call.given.itemsize,
    **{product.default: half_product for product in _PRODUCTS},
    aten._fft_r2c.default: _fourier,
    aten._fft_c2r.default: _fourier,
    aten._fft_c2c.default: _fourier,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    PACKED_PRODUCT: _cpu_packed_product,
}


_SCRATCH_BYTES = 2**20
"""A bound on partial results of CUDA's reductions and scans."""


def _cuda_attention_backward(call: OperatorCall) -> int:
    """The gradient of q in float32, sums of rows, and gradients of k and v before heads are summed.

    Lengths are rounded up to 128, widths to 32 (flash_attn/flash_api.cpp, mha_bwd).
    """
    query, key = call["query"], call["key"]
    batch, heads, length, width = query.shape
    size = 4 * batch * heads * in_blocks(length, 128) * (in_blocks(width, 32) + 1)
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * width * key.itemsize
    return int(size)


def _cuda_embedding_backward(call: OperatorCall) -> int:
    """Sorted indices with the sort's own memory, and float32 sums of partial segments.

    Segments have ten rows (ATen/native/cuda/EmbeddingBackwardKernel.cu, NROWS_PER_THREAD).
    """
    gradient, indices, num_weights = (
        call[name] for name in ("grad_output", "indices", "num_weights")
    )
    count = indices.numel()
    segments = -(-count // 10) + min(count, num_weights)
    return int(8 * 8 * count + 4 * segments * gradient.shape[-1] + _SCRATCH_BYTES)


CUDA_WORKSPACES: dict[Any, Workspace] = {
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
        lambda _: _SCRATCH_BYTES,
    ),
    # Dropout's seed and offset, further results of the kernel, in a block each.
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda _: 2 * BLOCK_BYTES,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cuda_attention_backward,
    aten.embedding_dense_backward.default: _cuda_embedding_backward,
    # Gradients of weight and bias in 64 parts, in float32.
    aten.native_layer_norm_backward.default: lambda call: (
        2 * 64 * 4 * math.prod(call["normalized_shape"])
    ),
    # Keys and values twice.
    **dict.fromkeys(
        (aten.sort.default, *INDEX_PUTS),
        lambda call: 4 * 8 * call.given.numel() + _SCRATCH_BYTES,
    ),
    # A bound: operands that the library cannot read in place are copied.
    aten.bmm.default: lambda call: contiguous(*call.inputs),
    PACKED_PRODUCT: packed_product,
    INT8_PRODUCT: int8_product,
}


def _cuda_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Which attention keeps its scores on CUDA: read in PyTorch's sources, not tried on a device.

    The fused kernels there draw dropout themselves; on a CPU dropout means that scores are kept.
    In float32 none of them shares keys and values among heads (ATen/native/transformers/cuda/
    sdp_utils.cpp), so that grouped heads mean it there.
    """
    given = named(scaled_dot_product_attention, args, kwargs)
    kind = given["query"].device.type
    cast = torch.is_autocast_enabled(kind)  # casts inside the attention
    dtype = torch.get_autocast_dtype(kind) if cast else given["query"].dtype
    if given["enable_gqa"] and dtype == torch.float32:
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(**given)
    return scaled_dot_product_attention(**{**given, "dropout_p": 0.0})


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """A type of devices, for estimates.

    workspaces      upper bounds of operators' bytes beyond operands and results while they run
    attention       replaces `scaled_dot_product_attention` if its kernels keep other tensors than a
                    CPU's
    """

    workspaces: Mapping[Any, Workspace]
    attention: Callable[..., Tensor] | None = None


_CUDA = DeviceType(workspaces=CUDA_WORKSPACES, attention=_cuda_attention)
DEVICE_TYPES: dict[DeviceKind, DeviceType] = {
    "cpu": DeviceType(workspaces=CPU_WORKSPACES),
    "cuda": _CUDA,
}
"""By type name; models can be estimated for these. ROCm's devices are called cuda."""


def device_type(kind: DeviceKind) -> DeviceType:
    """A device type's entry; CUDA's for unknown accelerators: enough to sketch, not to estimate."""
    return DEVICE_TYPES.get(kind, _CUDA)


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Rules by which a device's allocator counts: blocks of `block_bytes`, workspaces by operator.

    python_scalars  a Python number that meets a tensor becomes a tensor in the device's memory,
                    which autograd keeps if a gradient needs it (a CPU's memory is the host's)
    num_threads     of the host, for each of which kernels take scratch memory
    is_here         operators can be called on the device itself: workspaces can be measured
    """

    workspaces: Mapping[Any, Workspace]
    block_bytes: int
    python_scalars: bool
    num_threads: int
    is_here: bool = False

    def workspace(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Return the maximum scratch bytes of `func`, without its inputs and outputs."""
        formula = self.workspaces.get(func) or self.workspaces.get(func._schema.name)
        if formula is None:
            return 0
        call = OperatorCall(
            func=func,
            args=args,
            kwargs=kwargs,
            outputs=tuple(tensors_in(result)),
            num_threads=self.num_threads,
        )
        return in_blocks(formula(call), self.block_bytes)


def is_this_machine(device: Device) -> bool:
    """Whether this is the present processor, by name, with PyTorch's present threads."""
    here = (processor_name(), torch.get_num_threads())
    return not is_accelerator(device.kind) and (device.name, device.num_threads) == here


def allocator_of(device: Device) -> Allocator:
    """Return the rules of the allocator of `device`."""
    on_host = not is_accelerator(device.kind)
    return Allocator(
        workspaces=device_type(device.kind).workspaces,
        block_bytes=block_bytes(device.kind),
        python_scalars=on_host,
        num_threads=device.num_threads if on_host else 1,
        is_here=is_this_machine(device),
    )
