"""How fast this machine computes: large matrix products, large sums, and an operator's floor."""

import statistics
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from protrain_plan.hardware.interference import grown, host_update_speed, runs_per_second
from protrain_plan.records.hardware import Rates
from protrain_plan.records.profile import DType
from protrain_plan.units import four_digits
from protrain_runtime.devices import found, synchronize

_ROUNDS = 3
_CALLS = 1000  # of the small operator in one run: a run is milliseconds
_WIDTH, _SUM_BYTES = 1024, 2**26
"""Of the matrix product, and of each operand of the sum: a run is some ten milliseconds on two
cores, and the sum is past every cache. On an accelerator both grow until a run takes as long
(`grown`)."""


def measure_rates(device: torch.device | str, *, dtype: DType) -> Rates:
    """The rates that this process reaches, in the calling thread with the threads it has.

    Peak and reached are the same in a measurement: both efficiencies are 1. `dtype` is that of
    the host's updates, which are measured as in the update lane. About 2 s.
    """
    here = found(str(device))
    return Rates(
        float32_flops_per_s=four_digits(_flops_per_s(torch.float32, here)),
        bfloat16_flops_per_s=four_digits(_flops_per_s(torch.bfloat16, here)),
        compute_efficiency=1.0,
        memory_bytes_per_s=four_digits(_memory_bytes_per_s(here)),
        memory_efficiency=1.0,
        operator_s=four_digits(_operator_s(here)),
        host_parameters_per_s=four_digits(host_update_speed(dtype, device=here)),
    )


def _flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    def product(scale: int) -> Callable[[], object]:
        # No constants: multiplying by them draws less power, so that a GPU's clock stays higher.
        source, width = torch.Generator(device).manual_seed(0), scale * _WIDTH
        tokens, weight = (
            torch.rand(width, width, generator=source, device=device).sub(0.5).to(dtype)
            for _ in range(2)
        )
        return lambda: linear(tokens, weight)

    scale, work = grown(product, device)
    return 2 * (scale * _WIDTH) ** 3 * _per_second(work, device)


def _memory_bytes_per_s(device: torch.device) -> float:
    """Two operands are read and one is written: where it is allocated anew, as results are.

    On a CPU the system clears the pages of every result, which takes longer than the sum. On a GPU
    the allocator keeps them.
    """

    def addition(scale: int) -> Callable[[], object]:
        count = scale * _SUM_BYTES // 4
        left, right = (torch.ones(count, dtype=torch.float32, device=device) for _ in range(2))
        return lambda: torch.add(left, right)

    scale, work = grown(addition, device)
    return 3 * scale * _SUM_BYTES * _per_second(work, device)


def _operator_s(device: torch.device) -> float:
    """Of products too small to take time: half are written down for backward, half run there."""
    small = torch.ones(64, device=device)

    def calls() -> None:
        value = small.clone().requires_grad_()
        for _ in range(_CALLS // 2):
            value = torch.mul(value, small)
        value.sum().backward()

    return 1 / (_CALLS * _per_second(calls, device))


def _per_second(work: Callable[[], object], device: torch.device) -> float:
    """Runs per second, the median of a few windows after one run that warms up."""

    def run() -> None:
        work()
        synchronize(device)

    run()
    return statistics.median(runs_per_second(run) for _ in range(_ROUNDS))
