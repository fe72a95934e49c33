"""What a CUDA device's operators hold in memory only while they run.

Read from PyTorch's sources, and not compared with a device. They are upper bounds where a size
depends on the launch. Convolutions are not bounded: cuDNN chooses its workspace by trying.
"""

import math
from typing import Any

import torch

from protrain_plan.profiling.operator_calls import OperatorCall, Workspace, contiguous
from protrain_plan.program import BLOCK_BYTES

aten = torch.ops.aten

_SCRATCH_BYTES = 2**20
"""A bound on what CUDA's reductions and scans take for partial results."""


def _cuda_partial(_: OperatorCall) -> int:
    return _SCRATCH_BYTES


def _cuda_random_state(_: OperatorCall) -> int:
    """Seed and offset of the dropout, which the kernel returns besides, in a block each."""
    return 2 * BLOCK_BYTES


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
    return contiguous(*call.inputs)


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
