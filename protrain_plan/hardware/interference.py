"""How fast the optimizer is, and how much compute and a lane slow each other down.

On a CPU machine lanes are worker threads on the processors that also compute. Their waiting
threads must not spin: OMP_WAIT_POLICY=passive, which the command line sets before torch is
imported, is worth a factor of up to 15 here.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import nn

from protrain_plan.models.building import TORCH_DTYPES
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory
from protrain_plan.records.hardware import Contention
from protrain_plan.records.profile import DType
from protrain_runtime import devices

Result = TypeVar("Result")

_UPDATE_PARAMETERS = 8 * 2**20  # 128 MiB with gradients and AdamW states: past every cache
_ROUNDS = 3
_WINDOW_S = 0.15
_TOKENS, _WIDTH = 256, 768  # a small model's: a few ms on two cores, so windows hold many


def update_speeds(
    dtype: DType,
    sizes: Sequence[int],
    *,
    device: torch.device = devices.HOST,
    optimizer: str = DEFAULT_OPTIMIZER,
) -> tuple[float, float]:
    """Parameters per second that one step updates: (in the update lane, on the device).

    The lane is a worker thread with one intra-op thread; the device is the calling thread with
    the threads it has, or the GPU, and updates tensors of a model's `sizes`: many small ones take
    longer than few large ones. Both from the median of short steps, first ones excluded.
    """
    lane = host_update_speed(dtype, optimizer=optimizer)
    alike = _alike(sizes)
    step = update_step(dtype, alike, device=device, optimizer=optimizer)
    return lane, sum(alike) / _median_seconds(step)


def _alike(sizes: Sequence[int]) -> tuple[int, ...]:
    """Every n-th of the sizes, of some _UPDATE_PARAMETERS in all; cut where one is larger."""
    every = max(1, round(sum(sizes) / _UPDATE_PARAMETERS))
    return tuple(min(size, _UPDATE_PARAMETERS) for size in sizes[::every]) or (_UPDATE_PARAMETERS,)


def host_update_speed(dtype: DType, *, optimizer: str = DEFAULT_OPTIMIZER) -> float:
    """Parameters per second that one step in the update lane updates."""
    step = update_step(dtype, device=devices.HOST, optimizer=optimizer)
    return _UPDATE_PARAMETERS / in_worker(lambda: _median_seconds(step))


def update_step(
    dtype: DType,
    sizes: Sequence[int] = (_UPDATE_PARAMETERS,),
    *,
    device: torch.device,
    optimizer: str = DEFAULT_OPTIMIZER,
) -> Callable[[], None]:
    """One optimizer step on tensors of `sizes`; it returns when the step has ended."""
    parameters = [
        nn.Parameter(torch.full((size,), 0.5, dtype=TORCH_DTYPES[dtype], device=device))
        for size in sizes
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    stepper = optimizer_factory(optimizer)(parameters)

    def step() -> None:
        stepper.step()
        devices.synchronize(device)

    return step


def contention(lane: Callable[[], None]) -> Contention:
    """What compute on this CPU keeps of its speed while `lane` runs over and over, and vice versa.

    Compute is what a model does, matrix products and elementwise operators with fresh memory for
    every result, in the calling thread with the threads it has; the lane is a worker thread with
    one intra-op thread. Medians of short windows, alone and together.
    """
    compute = small_compute(devices.HOST)
    compute()
    in_worker(lane)
    compute_kept, lane_kept = [], []
    for _ in range(_ROUNDS):
        compute_alone = runs_per_second(compute)
        lane_alone = in_worker(lambda: runs_per_second(lane))
        compute_beside, lane_beside = rates_together(compute, lane)
        compute_kept.append(compute_beside / compute_alone)
        lane_kept.append(lane_beside / lane_alone)
    return Contention(compute=kept_fraction(compute_kept), lane=kept_fraction(lane_kept))


def small_compute(device: torch.device) -> Callable[[], None]:
    """What a model does in some milliseconds; it returns when that has ended."""

    def of(scale: int) -> Callable[[], None]:
        tokens = torch.full((scale * _TOKENS, scale * _WIDTH), 0.5, device=device)
        weight = torch.full((scale * _WIDTH, 4 * scale * _WIDTH), 0.5, device=device)

        def compute() -> None:
            hidden = torch.nn.functional.silu(tokens @ weight)
            torch.add(hidden @ weight.T, tokens)
            if not devices.on_host(device):
                devices.current_stream(device).synchronize()

        return compute

    return grown(of, device)[1]


_SCALES = (1, 2, 4, 8)
_LONG_ENOUGH_S = 5e-3


def grown(
    of: Callable[[int], Callable[[], Result]], device: torch.device
) -> tuple[int, Callable[[], Result]]:
    """Work that takes some milliseconds on an accelerator, and how often it is that of a CPU.

    `of` makes it of a scale, by which the sides of its matrices grow.
    """
    work = of(_SCALES[0])
    if devices.on_host(device):
        return _SCALES[0], work
    for scale in _SCALES:
        work = of(scale)
        for _ in range(2):  # the first one loads kernels
            start = time.perf_counter()
            work()
            devices.synchronize(device)
            seconds = time.perf_counter() - start
        if seconds >= _LONG_ENOUGH_S:
            break
    return scale, work


def kept_fraction(ratios: Iterable[float], *, at_least: float = 0.01) -> float:
    """The median, as a fraction: noise must not make anything faster than alone."""
    return min(1.0, max(at_least, statistics.median(ratios)))


def in_worker(work: Callable[[], Result]) -> Result:
    """`work()` in a fresh thread with one intra-op thread, as a lane runs."""
    num_threads = torch.get_num_threads()

    def alone() -> Result:
        torch.set_num_threads(1)
        return work()

    try:
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(alone).result()
    finally:
        # The number holds for the setting thread, and for all threads that come after it.
        torch.set_num_threads(num_threads)


def rates_together(compute: Callable[[], None], lane: Callable[[], None]) -> tuple[float, float]:
    """Runs per second of `compute` in the calling thread and of `lane` in a worker, at once."""
    stop = threading.Event()
    running = threading.Event()
    num_threads = torch.get_num_threads()

    def until_stopped() -> float:
        torch.set_num_threads(1)
        running.set()
        return runs_per_second(lane, until=stop)

    with ThreadPoolExecutor(max_workers=1) as pool:
        lane_rate = pool.submit(until_stopped)
        try:
            running.wait()
            torch.set_num_threads(num_threads)
            compute_rate = runs_per_second(compute)
        finally:
            stop.set()
        return compute_rate, lane_rate.result()


def runs_per_second(work: Callable[[], None], *, until: threading.Event | None = None) -> float:
    """Runs per second, over one window or until the event."""
    start = now = time.perf_counter()
    count = 0
    while not count or (now - start < _WINDOW_S if until is None else not until.is_set()):
        work()
        count += 1
        now = time.perf_counter()
    return count / (now - start)


def _median_seconds(work: Callable[[], None], *, num_runs: int = 7) -> float:
    """Of one run, after two that allocate and warm up."""
    work()
    work()
    seconds = []
    for _ in range(num_runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
