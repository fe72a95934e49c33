"""Random calls of operators whose kernels choose their scratch memory, against their bounds.

    python -m tests.support.random_calls NUM_CALLS SEED NUM_THREADS

prints each that took more than its bound, and fails then. `levels.py` chooses the kernels.
"""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from protrain_plan.hardware.operators import CPU_WORKSPACES, OperatorCall
from protrain_plan.profiling.memory.fake_meter import MeasuredCall, measured_bytes
from protrain_runtime.activations.trees import tensors_in

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RandomCall = tuple[Any, tuple[Any, ...]]


def size(rng: random.Random, most: int) -> int:
    """As many small ones as large ones, half of them round."""
    power: float = most ** rng.random()
    return max(1, round(power / 8) * 8 if rng.random() < 0.5 else round(power))


def matrix(rng: random.Random, rows: int, columns: int, dtype: torch.dtype, *batch: int) -> Tensor:
    """Zeros that lie row by row, or column by column."""
    if rng.random() < 0.5:
        return torch.zeros(*batch, rows, columns, dtype=dtype)
    return torch.zeros(*batch, columns, rows, dtype=dtype).transpose(-1, -2)


def product(rng: random.Random) -> RandomCall:
    dtype = rng.choice(DTYPES)
    rows, inner, columns = (size(rng, 1500) for _ in range(3))
    if rng.random() < 0.3:
        batch, rows, inner, columns = size(rng, 16), *(min(n, 256) for n in (rows, inner, columns))
        left = matrix(rng, rows, inner, dtype, batch)
        return aten.bmm.default, (left, matrix(rng, inner, columns, dtype, batch))
    pair = matrix(rng, rows, inner, dtype), matrix(rng, inner, columns, dtype)
    if rng.random() < 0.5:
        return aten.mm.default, pair
    return aten.addmm.default, (torch.zeros(columns, dtype=dtype), *pair)


def convolution(rng: random.Random) -> RandomCall:
    """Forward or backward, in one to three dimensions, of images, groups and single channels."""
    dtype, dims = rng.choice(DTYPES), rng.choice((1, 2, 2, 2, 3))
    widths = (1, 1, 2, 3, 3, 4, 5, 7, 8, 14, 16) if dims < 3 else (1, 2, 3)
    kernel = [rng.choice(widths) for _ in range(dims)]
    stride = kernel if rng.random() < 0.3 else [rng.choice((1, 1, 2, 4)) for _ in range(dims)]
    padding = [rng.choice((0, width // 2)) for width in kernel]
    dilation = [rng.choice((1, 1, 1, 2)) for _ in range(dims)]
    transposed = rng.random() < 0.2
    groups = rng.choice((1, 1, 1, 2, 4))
    inside, outside = (groups * rng.choice((1, 3, 5, 8, 16, 24, 48)) for _ in range(2))
    if rng.random() < 0.1:
        groups = inside = outside = rng.choice((8, 17, 32))
    spans = [step * (width - 1) + 1 for step, width in zip(dilation, kernel, strict=True)]
    edges = [max(span, size(rng, 40 if dims < 3 else 8)) for span in spans]
    given = torch.zeros(rng.choice((1, 2, 3, 8)), inside, *edges, dtype=dtype)
    shape = (inside, outside // groups) if transposed else (outside, inside // groups)
    weight = torch.zeros(*shape, *kernel, dtype=dtype)
    if rng.random() < 0.2 and dims == 2:
        given = given.contiguous(memory_format=torch.channels_last)
    rest = (stride, padding, dilation, transposed, [0] * dims, groups)
    bias = torch.zeros(outside, dtype=dtype) if rng.random() < 0.5 else None
    if rng.random() < 0.5:
        return aten.convolution.default, (given, weight, bias, *rest)
    result = aten.convolution.default(given, weight, None, *rest)
    mask = [rng.random() < 0.7, True, rng.random() < 0.7]
    sizes = [outside] if mask[2] else None
    return aten.convolution_backward.default, (result, given, weight, sizes, *rest, mask)


def attention(rng: random.Random) -> RandomCall:
    """Forward or backward of flash attention, heads outermost or innermost."""
    dtype = rng.choice(DTYPES)
    batch, heads, width = rng.choice((1, 2)), rng.choice((1, 2, 4)), rng.choice((8, 17, 32, 64, 65))
    length, keys = size(rng, 900), size(rng, 900)
    causal = rng.random() < 0.5

    def operand(rows: int) -> Tensor:
        if rng.random() < 0.5:
            return torch.zeros(batch, heads, rows, width, dtype=dtype)
        return torch.zeros(batch, rows, heads, width, dtype=dtype).transpose(1, 2)

    query, key, value = (operand(rows) for rows in (length, keys, keys))
    if rng.random() < 0.5:
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        return forward, (query, key, value, 0.0, causal)
    sums = torch.zeros(batch, heads, length)
    gradient, out = operand(length), operand(length)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward, (gradient, query, key, value, out, sums, 0.0, causal)


MAKERS: tuple[Callable[[random.Random], RandomCall], ...] = (product, convolution, attention)


def overruns(num_calls: int, seed: int) -> Iterator[str]:
    """Descriptions of the random calls that took more than their bounds."""
    rng = random.Random(seed)
    bounds: dict[MeasuredCall, tuple[int, str]] = {}
    for _ in range(num_calls):
        func, args = rng.choice(MAKERS)(rng)
        results = tuple(tensors_in(func(*args)))
        given = OperatorCall(
            func=func, args=args, kwargs={}, outputs=results, num_threads=torch.get_num_threads()
        )
        call = MeasuredCall.of(func, args, {}, results)
        assert call is not None, "random operands are small"
        bounds[call] = CPU_WORKSPACES[func](given), f"{func} of {_described(args)}"
    taken = measured_bytes(bounds)
    for call, (bound, described) in bounds.items():
        num_bytes = taken[call]
        assert num_bytes is not None, described
        if num_bytes > bound:
            yield f"{num_bytes} > {bound}: {described}"


def _described(args: tuple[Any, ...]) -> str:
    return " ".join(
        f"{each.dtype}{list(each.shape)}{list(each.stride())}".removeprefix("torch.")
        if isinstance(each, Tensor)
        else str(each)
        for each in args
    )


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    found = list(overruns(int(sys.argv[1]), int(sys.argv[2])))
    print("\n".join(found))
    sys.exit(bool(found))
