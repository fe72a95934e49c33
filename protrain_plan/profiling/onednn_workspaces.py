"""What 16-bit products and convolutions take while they run: upper bounds for x86 processors.

PyTorch and oneDNN choose kernels by the processor's instructions, and each has scratch memory of
its own. A bound here is the most of those that may be chosen, from SSE4.1 to AVX-512
(`tests/random_calls.py` compares them at every level). With AMX the sources alone were read (oneDNN
3.12). Where the processor is at hand, no bound is needed (`scratch`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from protrain_plan.profiling.operator_calls import HALF, OperatorCall

_KERNEL_BYTES = 2**15
"""Per thread, for what is small and fixed: paddings, pointers, lines of sums."""

# --- products -------------------------------------------------------------------------------------

_UNIT = 64
"""Blocks are padded to so many elements at most: a cache line of them, or four of AMX's tiles."""

_BLOCK_BYTES = 2 * 256 * (1024 + 32) + 2 * 64 * 1024 + 4 * 256 * 16 * 128
"""Per thread, of a product: blocks of both operands and of float32 sums. oneDNN cuts at most 256
rows, 1024 elements of the inner dimension and 16 times 64 columns, padded
(`compute_blocking_heuristic_avx512` and `init_aux_values` in brgemm_matmul_utils.cpp). With AMX it
cuts what fits in the second-level cache, 2 MiB."""

_SPLIT_INNER = 2048
"""From here on threads may share the inner dimension, each with sums of the whole result, where
the left operand is transposed and there are more threads than blocks of columns (the same)."""


def packed_bytes(rows: int, inner: int, columns: int) -> int:
    """What one thread takes for a product of 16 bits: operands and float32 result, or blocks."""
    rows, inner, columns = _padded(rows), _padded(inner), _padded(columns)
    whole = 2 * (rows * inner + inner * columns) + 4 * rows * columns
    return min(whole, _BLOCK_BYTES) + _KERNEL_BYTES


def half_product(call: OperatorCall) -> int:
    """Every thread packs for itself, or a float32 result is there as a whole.

    The latter without instructions for 16 bits. Operands of float32 are read as they lie.
    """
    operands = [t for t in call.inputs if t.dim() > 1 and t.dtype in HALF]
    if not operands:
        return 0
    left, right = operands[-2:]
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    each = packed_bytes(rows, inner, columns)
    transposed = left.dim() == 2 and left.stride(-1) != 1
    if transposed and inner >= _SPLIT_INNER and call.num_threads * _UNIT > columns:
        each += 4 * _padded(rows) * _padded(columns)
    return max(
        call.num_threads * each,
        4 * call.outputs[0].numel() + call.num_threads * _KERNEL_BYTES,
    )


def _padded(size: int) -> int:
    return -(-size // _UNIT) * _UNIT


# --- convolutions ---------------------------------------------------------------------------------

_CHANNELS = 16
"""oneDNN lays channels out in blocks of so many with AVX-512; of 8 with AVX2."""
_PACKED = 64
"""Kernels may read weights with one side in four such blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elements:
    """How many elements a convolution's operands have, in whole blocks of channels in every group.

    `packed_weight` has larger blocks, as products read it; its gradient has none. `patches` are
    those of one image and one group, as a matrix that is multiplied by the weights.
    """

    given: int
    weight: int
    packed_weight: int
    result: int
    patches: int
    num_matrices: int  # of patches: one for each image and group

    @staticmethod
    def of(
        given: Tensor, weight: Tensor, result: Tensor, groups: int, *, transposed: bool
    ) -> "_Elements":
        inside, outside = given.shape[1] // groups, result.shape[1] // groups
        kernel = math.prod(weight.shape[2:])
        channels, places = (outside, given) if transposed else (inside, result)
        return _Elements(
            given=given.numel() // inside * _blocked(inside),
            weight=groups * kernel * _blocked(inside) * _blocked(outside),
            packed_weight=groups
            * kernel
            * max(
                _blocked(inside) * _blocked(outside, _PACKED),
                _blocked(inside, _PACKED) * _blocked(outside),
            ),
            result=result.numel() // outside * _blocked(outside),
            patches=kernel * channels * math.prod(places.shape[2:]),
            num_matrices=given.shape[0] * groups,
        )


def _blocked(channels: int, block: int = _CHANNELS) -> int:
    return -(-channels // block) * block


def convolution(call: OperatorCall) -> int:
    """The larger of two kinds of kernels.

    oneDNN's lay operands and result out anew, with float32 sums for 16 bits, or make one matrix of
    patches per thread (gemm_convolution_utils.cpp, im2col_sz). PyTorch's own, which it takes for
    single images, transposed ones, and 16 bits without AVX-512, makes those of all images
    (ConvolutionMM2d.cpp, finput).
    """
    given, weight = call.args[:2]
    transposed, groups = call.args[6], call.args[8]
    own = _Elements.of(given, weight, call.outputs[0], groups, transposed=transposed)
    item, half = int(given.itemsize), int(given.dtype in HALF)
    library = item * (own.given + own.packed_weight + own.result)
    library += 4 * half * (own.result + own.weight)
    library += call.num_threads * (4 * own.patches + _KERNEL_BYTES)
    if not _is_librarys(given, transposed=transposed):
        plain = own.num_matrices * own.patches + own.given + own.weight + 2 * own.result
        return max(library, item * plain)
    return library


def convolution_backward(call: OperatorCall) -> int:
    """The same kinds: gradients are laid out as their tensors are, operands of 16 bits twice.

    Every thread has float32 sums of the weight's gradient (gemm_convolution_utils.cpp,
    key_conv_wei_reduction), which are added up to another one.
    """
    gradient, given, weight = call.args[:3]
    transposed, groups = call.args[7], call.args[9]
    own = _Elements.of(given, weight, gradient, groups, transposed=transposed)
    item, half = int(given.itemsize), int(given.dtype in HALF)
    library = item * ((1 + half) * 2 * (own.given + own.result) + own.packed_weight)
    blocks = 4 * (1 + half + call.num_threads) + half * item
    matrices = 4 * item * (half + call.num_threads)  # booked as so many floats as there are bytes
    library += max(blocks, matrices) * own.weight
    library += call.num_threads * (4 * own.patches + _KERNEL_BYTES)
    if not _is_librarys(given, transposed=transposed):
        plain = own.num_matrices * own.patches + own.given + own.weight + own.result
        return max(library, item * 2 * plain)
    return library


def _is_librarys(given: Tensor, *, transposed: bool) -> bool:
    """Whether any x86 processor leaves it to oneDNN (Convolution.cpp, use_mkldnn)."""
    images = given.dim() == 4 and given.shape[0] > 1
    return images and given.dtype == torch.float32 and not transposed
