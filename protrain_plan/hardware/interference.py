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
from contextlib import closing
from typing import TypeVar

import torch
from torch import nn

from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory
from protrain_plan.models.precision import parameter_dtype
from protrain_plan.records.hardware import Contention
from protrain_plan.records.profile import DType, Precision
from protrain_runtime.chunks import OptimizerFactory, make_chunk, offload
from protrain_runtime.devices import current_stream, found, new_stream, on_host, synchronize
from protrain_runtime.lanes import Backend, take_one_thread
from protrain_runtime.masters import with_master_weights
from protrain_runtime.pieces import Piece, elementwise_states
from protrain_runtime.stores import HostStore
from protrain_runtime.update_team import UpdateTeam, spare_threads

Result = TypeVar("Result")

_UPDATE_PARAMETERS = 8 * 2**20  # 128 MiB with gradients and AdamW states: past every cache
_TIMES_BESIDE_ACCELERATOR = 8  # the caches of its machine, and the threads that share this out
_COPY_BYTES = 2**26  # as the probe copies them, to measure the link
_ROUNDS = 3
_WINDOW_S = 0.15
_TOKENS, _WIDTH = 256, 768  # a small model's: a few ms on two cores, so windows hold many


def update_speeds(
    dtype: DType,
    sizes: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    optimizer: str = DEFAULT_OPTIMIZER,
    precision: Precision = "pure",
) -> tuple[float, float]:
    """Parameters per second that one step updates: (in the update lane, on the device).

    The lane's is `host_update_speed`; the device updates tensors of a model's `sizes`, by the
    calling thread with the threads it has or on the accelerator: many small ones take longer than
    few large ones. Both with the master weights of the precision, from the median of short steps,
    first ones excluded.
    """
    lane = host_update_speed(dtype, device=device, optimizer=optimizer, precision=precision)
    alike = _alike(sizes)
    step = update_step(dtype, alike, device=device, optimizer=optimizer, precision=precision)
    return lane, sum(alike) / _median_seconds(step)


def _alike(sizes: Sequence[int]) -> tuple[int, ...]:
    """Every n-th of the sizes, of some _UPDATE_PARAMETERS in all; cut where one is larger."""
    every = max(1, round(sum(sizes) / _UPDATE_PARAMETERS))
    return tuple(min(size, _UPDATE_PARAMETERS) for size in sizes[::every]) or (_UPDATE_PARAMETERS,)


def host_update_speed(
    dtype: DType,
    *,
    device: torch.device | str = "cpu",
    optimizer: str = DEFAULT_OPTIMIZER,
    precision: Precision = "pure",
) -> float:
    """Parameters per second that the update lane updates in host memory.

    What runs is the runtime's own: a chunk in host memory, the ranges and the threads that a plan
    on `device` has, a lane's thread. Beside an accelerator it runs while copies go both ways, which
    read and write the same memory. The median of short steps, first ones excluded.
    """
    here = found(str(device))
    beside = not on_host(here)
    num_parameters = _UPDATE_PARAMETERS * (_TIMES_BESIDE_ACCELERATOR if beside else 1)
    with closing(UpdateTeam(spare_threads(here))) as team:
        update = lane_update(
            dtype, team, num_parameters=num_parameters, optimizer=optimizer, precision=precision
        )

        def seconds() -> float:
            return in_worker(lambda: _median_seconds(update))

        return num_parameters / (while_copying(here, seconds) if beside else seconds())


def lane_update(
    dtype: DType,
    team: UpdateTeam,
    *,
    num_parameters: int = _UPDATE_PARAMETERS,
    num_tensors: int = 1,
    optimizer: str = DEFAULT_OPTIMIZER,
    precision: Precision = "pure",
) -> Callable[[], None]:
    """One update of a chunk in host memory of as many parameters, in equal tensors.

    The states, 16 bytes of float32 per parameter with AdamW, are as long as what is returned.
    """
    stored = parameter_dtype(dtype, precision)
    factory = _factory(optimizer, precision)
    size = num_parameters // num_tensors
    values = [torch.full((size,), 0.5, dtype=stored) for _ in range(num_tensors)]
    named = [(str(number), nn.Parameter(each)) for number, each in enumerate(values)]
    chunk = make_chunk(0, named, used_by=(0,))
    store = HostStore(Backend(torch.device("cpu")))
    offload(chunk, store, {stored: elementwise_states(factory, stored)})
    chunk.unbind(chunk.every_group)
    gradients = {part.name: torch.full((size,), 1e-3, dtype=stored) for part in chunk.slices}
    options = dict.fromkeys(
        gradients, factory([{"params": [nn.Parameter(torch.zeros(1))]}]).defaults
    )

    def update() -> None:
        piece = Piece(chunk, 0, chunk.num_trainable)
        piece.view_store()
        piece.update(factory, options, gradients, team)
        piece.write(parameters=False)

    return update


def while_copying(device: torch.device, work: Callable[[], Result]) -> Result:
    """`work()` in a thread, while copies between pinned memory and the device go both ways."""
    backend = Backend(device)
    ends = [(backend.empty_host(_COPY_BYTES), backend.empty(_COPY_BYTES)) for _ in range(2)]
    (up_host, up_device), (down_host, down_device) = ends
    up, down = new_stream(device), new_stream(device)
    with ThreadPoolExecutor(max_workers=1) as pool:
        result = pool.submit(work)
        while not result.done():
            with up:
                up_device.copy_(up_host, non_blocking=True)
            with down:
                down_host.copy_(down_device, non_blocking=True)
            up.synchronize()
            down.synchronize()
        return result.result()


def update_step(
    dtype: DType,
    sizes: Sequence[int] = (_UPDATE_PARAMETERS,),
    *,
    device: torch.device | str,
    optimizer: str = DEFAULT_OPTIMIZER,
    precision: Precision = "pure",
) -> Callable[[], None]:
    """One optimizer step on tensors of `sizes`; it returns when the device has ended it."""
    here = found(str(device))
    stored = parameter_dtype(dtype, precision)
    parameters = [
        nn.Parameter(torch.full((size,), 0.5, dtype=stored, device=here)) for size in sizes
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    stepper = _factory(optimizer, precision)([{"params": parameters}])

    def step() -> None:
        stepper.step()
        synchronize(here)

    return step


def _factory(optimizer: str, precision: Precision) -> OptimizerFactory:
    """What `prepare` makes optimizers by."""
    plain = optimizer_factory(optimizer)
    return with_master_weights(plain) if precision == "master" else plain


def contention(lane: Callable[[], None]) -> Contention:
    """What compute on this CPU keeps of its speed while `lane` runs over and over, and vice versa.

    Compute is what a model does, matrix products and elementwise operators with fresh memory for
    every result, in the calling thread with the threads it has; the lane is a worker thread with
    one intra-op thread. Medians of short windows, alone and together.
    """
    compute = small_compute("cpu")
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


def small_compute(device: torch.device | str) -> Callable[[], None]:
    """What a model does in some milliseconds; it returns when the device has ended it."""
    here = found(str(device))

    def of(scale: int) -> Callable[[], None]:
        tokens = torch.full((scale * _TOKENS, scale * _WIDTH), 0.5, device=here)
        weight = torch.full((scale * _WIDTH, 4 * scale * _WIDTH), 0.5, device=here)

        def compute() -> None:
            hidden = torch.nn.functional.silu(tokens @ weight)
            torch.add(hidden @ weight.T, tokens)
            if not on_host(here):
                current_stream(here).synchronize()

        return compute

    return grown(of, here)[1]


_SCALES = (1, 2, 4, 8)
_LONG_ENOUGH_S = 5e-3


def grown(
    of: Callable[[int], Callable[[], Result]], device: torch.device
) -> tuple[int, Callable[[], Result]]:
    """Work that takes some milliseconds on an accelerator, and how often it is that of a CPU.

    `of` makes it of a scale, by which the sides of its matrices grow.
    """
    work = of(_SCALES[0])
    if on_host(device):
        return _SCALES[0], work
    for scale in _SCALES:
        work = of(scale)
        for _ in range(2):  # the first one loads kernels
            start = time.perf_counter()
            work()
            synchronize(device)
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
        take_one_thread()
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
        take_one_thread()
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
