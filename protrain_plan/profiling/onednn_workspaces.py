"""What oneDNN's 16-bit products and convolutions take while they run: upper bounds.

Its kernels choose their scratch memory by the processor; these are from a machine with AVX-512 and
two threads, and were compared at AVX2 as well. Below that (AVX, SSE4.1) they are not bounds: the
backward of a vision transformer's patches took half as much again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from protrain_plan.profiling.operator_calls import HALF, OperatorCall

_KERNEL_BYTES = 8192
"""Per thread, for what is small and fixed: paddings, pointers, one line of sums."""

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


def half_product(call: OperatorCall) -> int:
    """A bound: operands packed, the right one by every thread, and a float32 result; or blocks."""
    operands = [t for t in call.inputs if t.dim() > 1 and t.dtype in HALF]
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


def convolution(call: OperatorCall) -> int:
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
    if given.dtype in HALF and apart:
        size += 4 * blocked.result
    return int(size) + _SUMS_BYTES * call.num_threads


def convolution_backward(call: OperatorCall) -> int:
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
    if given.dtype in HALF:
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
