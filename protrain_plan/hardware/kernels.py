"""How long a kernel takes, by its kind and its shape: pure functions of a machine's `Rates`.

Nothing here knows of tensors.

Products of matrices. A kernel cuts the result into tiles, and each multiprocessor computes one at a
time. So a product takes whole tiles, and whole waves of as many tiles as there are multiprocessors
(NVIDIA, Matrix Multiplication Background User's Guide, tile and wave quantization). A library
chooses among tiles: a tile reads each operand once per row or column of its own, so that smaller
ones are slower by what they read, and fill more multiprocessors. It may share a long inner
dimension, too, and add up the parts. Here it chooses what takes least. No number is fitted but what
large products reach, and what a launch takes (`operator_s`); published tables of square products on
five cards are met within a sixth from 4096 on, and on data centre cards within a quarter below
(tests/hardware/test_kernels.py). Cards with half the tensor rate lose less by small tiles: there,
products of 1024 are up to twice as fast.

Attention. A fused kernel takes the FLOPs of its products, and besides

- for each row of queries as long as `_EDGE_KEYS` further keys take: rows are started and ended, and
  blocks that the mask cuts are computed whole;
- for each score as long as `_SCORE_WIDTH` further columns of a head take: exponentials are no
  products.

Both hold within 10 % for FlashAttention-2 on an A100 and an H100, forward and backward together, at
512 to 16,384 keys, causal or not, in heads 64 and 128 wide (Dao-AILab/flash-attention, README;
tests/hardware/test_kernels.py has these figures).

Element-wise kernels. What lies in a row and has one dtype is read and written several numbers at a
time, as fast as memory. PyTorch reads anything else (broadcast, strided, of several dtypes) one
number at a time, each at a place that it computes (`gpu_kernel_impl`, CUDALoops.cuh): then no
more than `_ACCESSES_PER_CYCLE` numbers go through a multiprocessor.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from protrain_runtime.contract.records.hardware import Rates

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the result; the first ones run at a multiprocessor's full speed."""

_PARTS = (1, 2, 4, 8, 16)
_LEAST_PART = 2048
"""Least part of the inner dimension; shorter ones take as long."""

_FLOAT32_TILES = (*_TILES, (128, 32), (32, 128), (32, 32))
"""Without tensor cores a multiprocessor computes a sixteenth as fast, so that what narrow tiles
read does not slow it (cuBLAS' ampere_sgemm_128x32 and 32x32_sliced1x4)."""

_ACCESSES_PER_CYCLE = 3.2
"""Numbers that a multiprocessor reads or writes in a cycle, where each has a place of its own:
rotary embeddings of 16,384 tokens forward on an A100 take 3.8 ms for 1.85e9 (linkedin/Liger-Kernel,
benchmark/data/all_benchmark_data.csv at ead96b61, `rope`, huggingface)."""

_LANES = (128, 64)
"""Float32 units of a multiprocessor; the latter are a GA100's, at which others' clocks would be
twice as high as they are."""
_LEAST_CLOCK = 1e9

_EDGE_KEYS = 256
_SCORE_WIDTH = 22
_RATED_WIDTH = 128
"""Efficiencies of attention are for heads of this width; wider ones are no faster."""

_MASKED = 0.48
"""With a mask of its own, attention is another kernel's, which is slower: 98 TFLOP/s where
FlashAttention-2 has 203 (the same figures, xformers', on an A100)."""


class Product(NamedTuple):
    """Products of a [rows, inner] and an [inner, columns] matrix, as many as `batches`."""

    batches: int
    rows: int
    columns: int
    inner: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention: keys per row of queries, and the width of a head."""

    keys: float  # on average: half of them if the future is skipped
    width: int
    backward: bool
    masked: bool


@lru_cache(maxsize=4096)
def product_efficiency(product: Product, multiprocessors: int, *, half: bool = True) -> float:
    """This product's part of large products' speed, at most 1.

    `half`: in 16 bits. A product scaled by a whole factor in every direction is never less
    efficient, and one larger in any direction never takes less time.
    """
    batches, rows, columns, inner = product
    if not (multiprocessors and batches and rows and columns and inner):
        return 1.0
    rated = sum(1 / side for side in _TILES[0])
    least = min(
        # One multiprocessor's time, in multiplications.
        -(-batches * -(-rows // high) * -(-columns // wide) * parts // multiprocessors)
        * (  # a tile's compute, and its reads beyond the first one's
            (high + wide) / rated if half else high * wide
        )
        * (inner if parts == 1 else max(-(-inner // parts), _LEAST_PART))
        for high, wide in (_TILES if half else _FLOAT32_TILES)
        for parts in _PARTS
    )
    return min(1.0, batches * rows * columns * inner / multiprocessors / least)


def attention_efficiency(attention: Attention, rates: Rates) -> float:
    """The part of the peak that fused attention reaches in 16 bits."""
    large = rates.attention_efficiency
    if attention.backward:
        large = rates.attention_backward_efficiency
    if not large:
        return rates.compute_efficiency
    rated = _RATED_WIDTH / (_RATED_WIDTH + _SCORE_WIDTH)
    narrow = min(1.0, attention.width / (attention.width + _SCORE_WIDTH) / rated)
    short = attention.keys / (attention.keys + _EDGE_KEYS)
    return large * narrow * short * (_MASKED if attention.masked else 1.0)


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
        """Whether it is its own kernel: on an accelerator, `fused` work is part of another."""
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
        if rates.multiprocessors:  # numbers read and written one at a time
            wide, narrow = (rates.float32_flops_per_s / (2 * lanes) for lanes in _LANES)
            fast = wide if wide > rates.multiprocessors * _LEAST_CLOCK else narrow
            # In cycles of all multiprocessors.
            moving = max(moving, self.accesses / (fast * _ACCESSES_PER_CYCLE))
        return max(computing, moving) + rates.operator_s
