"""This machine's speeds: compute, optimizer, runtime, lanes beside compute.

On a CPU machine lanes are worker threads on the computing processors. Waiting threads must not
spin: OMP_WAIT_POLICY=passive, which the command line sets before torch is imported, is worth a
factor of up to 15 here.
"""

import gc
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.functional import linear

from protrain_plan.models.building import parameter_dtype
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, OptimizerFactory, optimizer_factory
from protrain_runtime.contract.records.hardware import Contention, Link, Rates
from protrain_runtime.contract.records.profile import DType, Precision
from protrain_runtime.contract.units import four_digits
from protrain_runtime.devices.device import current_stream, found, on_host, synchronize
from protrain_runtime.devices.lanes import Backend, take_threads
from protrain_runtime.devices.stores import HostStore
from protrain_runtime.states.chunk_layouts import make_chunk
from protrain_runtime.states.known_optimizers import in_turn
from protrain_runtime.states.master_weights import with_master_weights
from protrain_runtime.states.offloading import offload
from protrain_runtime.states.stepping import options_of
from protrain_runtime.states.update_rules import UpdateRules, smaller
from protrain_runtime.states.updates import Piece, UpdateTeam, spare_threads, updates_by_lines

Result = TypeVar("Result")

_UPDATE_PARAMETERS = 8 * 2**20  # 128 MiB with gradients and AdamW states: past every cache
_UPDATED = torch.Size([_UPDATE_PARAMETERS])
_TIMES_BESIDE_ACCELERATOR = 8  # the caches of its machine, and the threads that share this out
_COPY_BYTES = 2**26  # as the probe copies them, to measure the link
_ROUNDS = 3
_WINDOW_S = 0.15
_TOKENS, _COMPUTE_WIDTH = 256, 768  # a small model's: a few ms on two cores, so windows hold many


class Stepped(NamedTuple):
    """Updated parameters: dtype and precision, and the optimizer."""

    dtype: DType
    optimizer: str = DEFAULT_OPTIMIZER
    precision: Precision = "pure"

    @property
    def stored(self) -> torch.dtype:
        return parameter_dtype(self.dtype, self.precision)

    @property
    def factory(self) -> OptimizerFactory:
        return optimizer_factory(self.optimizer, self.precision)


def update_speeds(
    stepped: Stepped, shapes: Sequence[torch.Size], *, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Parameters per second that one step updates: (in the update lane, on the device).

    The lane's is `host_update_speed`; the device updates tensors of a model's `shapes`, on the
    calling thread with its threads or on the accelerator: many small ones take longer than few
    large ones. Updates that cannot run in pieces never run in the lane: the device's speed is used.
    Both include the precision's master weights, as medians of short steps, first ones excluded. On
    an accelerator, a step on one number is subtracted: the host's launch and wait, as long as one
    on 60 M parameters on an H200.
    """
    beside = not on_host(found(str(device)))
    most = _UPDATE_PARAMETERS * (_TIMES_BESIDE_ACCELERATOR if beside else 1)
    # Every n-th shape, of about as many in all; larger ones reduced.
    every = max(1, round(sum(shape.numel() for shape in shapes) / most))
    alike = [smaller(shape, most) for shape in shapes[::every]] or [torch.Size([most])]
    taken, launching = median_seconds(update_step(stepped, alike, device=device)), 0.0
    if beside:
        launching = median_seconds(update_step(stepped, [torch.Size([1])], device=device))
    speed = sum(shape.numel() for shape in alike) / max(taken - launching, taken / 2**5)
    rules = UpdateRules(stepped.factory)
    if all(rules.of(stepped.stored, shape).reason for shape in alike):
        return speed, speed
    return host_update_speed(stepped, device=device), speed


def host_update_speed(stepped: Stepped, *, device: torch.device | str = "cpu") -> float:
    """Parameters per second that the update lane updates in host memory.

    Runs the runtime's own code: a host chunk, the ranges and threads of a plan on `device`, a
    lane's thread. Beside an accelerator, copies run both ways meanwhile, through the same memory.
    The median of short steps, first ones excluded.
    """
    here = found(str(device))
    beside = not on_host(here)
    num_parameters = _UPDATE_PARAMETERS * (_TIMES_BESIDE_ACCELERATOR if beside else 1)
    with closing(update_team(here, stepped)) as team:
        update = lane_update(stepped, team, num_parameters=num_parameters)
        measured = partial(median_seconds, update)
        seconds = partial(in_worker, measured, num_threads=team.inside)
        if not beside:
            return num_parameters / seconds()
        link = PinnedLink(here, _COPY_BYTES)
        with ThreadPoolExecutor(max_workers=1) as pool:
            result = pool.submit(seconds)
            while not result.done():
                link.both()
            return num_parameters / result.result()


def update_team(device: torch.device, stepped: Stepped) -> UpdateTeam:
    """The threads of a plan on `device` for optimizer steps in host memory."""
    made = stepped.factory([{"params": [nn.Parameter(torch.zeros(1))]}])
    return UpdateTeam(spare_threads(device), by_lines=updates_by_lines(made))


def lane_update(
    stepped: Stepped,
    team: UpdateTeam,
    *,
    num_parameters: int = _UPDATE_PARAMETERS,
    num_tensors: int = 1,
) -> Callable[[], None]:
    """One update of a chunk in host memory of as many parameters, in equal tensors.

    The states, 16 bytes of float32 per parameter with AdamW, are as long as what is returned.
    """
    stored, factory = stepped.stored, in_turn(optimizer_factory(stepped.optimizer))
    if stepped.precision == "master":
        factory = with_master_weights(factory)
    size = num_parameters // num_tensors
    values = [torch.full((size,), 0.5, dtype=stored) for _ in range(num_tensors)]
    named = [(str(number), nn.Parameter(each)) for number, each in enumerate(values)]
    chunk = make_chunk(0, named, used_by=(0,))
    store = HostStore(Backend(torch.device("cpu")))
    offload(chunk, store, UpdateRules(factory))
    chunk.unbind(chunk.every_group)
    gradients = {part.name: torch.full((size,), 1e-3, dtype=stored) for part in chunk.slices}
    (chosen,) = options_of(factory([{"params": [nn.Parameter(torch.zeros(1))]}]))
    options = dict.fromkeys(gradients, chosen)

    piece = Piece(chunk, 0, chunk.num_trainable, keeps=True)

    def update() -> None:
        piece.view_store()
        piece.update(factory, options, gradients, team)
        piece.write(parameters=False)

    return update


class PinnedLink:
    """Copies between pinned host memory and a device, on streams, which methods wait for."""

    def __init__(self, device: torch.device, num_bytes: int = 2**27) -> None:
        backend = Backend(device)
        self._num_bytes = num_bytes
        self._up_host, self._down_host = (backend.empty_host(num_bytes).fill_(1) for _ in range(2))
        self._up_device, self._down_device = (backend.empty(num_bytes).fill_(1) for _ in range(2))
        self._up, self._down = (torch.Stream(device=device) for _ in range(2))
        synchronize(device)  # the device's buffers were filled on the current stream

    def read(self, num_bytes: int | None = None, *, waits: bool = True) -> None:
        """From the host to the device: all, or `num_bytes`."""
        with self._up:
            self._up_device[:num_bytes].copy_(self._up_host[:num_bytes], non_blocking=True)
        if waits:
            self._up.synchronize()

    def write(self, *, waits: bool = True) -> None:
        """From the device to the host."""
        with self._down:
            self._down_host.copy_(self._down_device, non_blocking=True)
        if waits:
            self._down.synchronize()

    def both(self) -> None:
        """Both ways at once."""
        self.read(waits=False)
        self.write(waits=False)
        self._up.synchronize()
        self._down.synchronize()

    def measured(self) -> Link:
        """The link by medians of a few copies each."""
        # A copy of a few bytes: the cost apart from bytes.
        copies = (self.read, self.write, self.both, lambda: self.read(4096))
        read_s, write_s, both_s, little_s = (median_seconds(copy, num_runs=5) for copy in copies)
        return Link(
            read_bytes_per_s=self._num_bytes / read_s,
            write_bytes_per_s=self._num_bytes / write_s,
            latency_s=little_s,
            # Both ways in the slower one's time: 1. One after the other: about 0.5.
            duplex=kept_fraction([max(read_s, write_s) / both_s], at_least=0.5),
        )


def update_step(
    stepped: Stepped, shapes: Sequence[torch.Size] = (_UPDATED,), *, device: torch.device | str
) -> Callable[[], None]:
    """One optimizer step on tensors of `shapes`; returns when the device has ended it."""
    here = found(str(device))
    parameters = [
        nn.Parameter(torch.full(shape, 0.5, dtype=stepped.stored, device=here)) for shape in shapes
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    stepper = stepped.factory([{"params": parameters}])

    def step() -> None:
        stepper.step()
        synchronize(here)

    return step


def contention(
    compute: Callable[[], None],
    lane: Callable[[], None],
    *,
    num_rounds: int = _ROUNDS,
    num_threads: int = 1,
) -> Contention:
    """The fractions of speed that compute and `lane` keep while both run.

    Compute is model-like work (`small_compute`), on the calling thread with its threads; the lane
    is a worker thread with `num_threads` intra-op threads. Medians of short windows, alone and
    together. Beside an accelerator one round is enough: copies and host updates use other hardware
    than compute and slow it little, but share its memory and the link.
    """
    compute()
    in_worker(lane, num_threads=num_threads)
    compute_kept, lane_kept = [], []
    for _ in range(num_rounds):
        compute_alone = runs_per_second(compute)
        lane_alone = in_worker(lambda: runs_per_second(lane), num_threads=num_threads)
        compute_beside, lane_beside = rates_together(compute, lane, num_threads=num_threads)
        compute_kept.append(compute_beside / compute_alone)
        lane_kept.append(lane_beside / lane_alone)
    return Contention(
        compute=four_digits(kept_fraction(compute_kept)), lane=four_digits(kept_fraction(lane_kept))
    )


def small_compute(device: torch.device | str) -> Callable[[], None]:
    """Some milliseconds of model-like work: products, elementwise operators, fresh memory."""
    here = found(str(device))

    def of(scale: int) -> Callable[[], None]:
        tokens = torch.full((scale * _TOKENS, scale * _COMPUTE_WIDTH), 0.5, device=here)
        weight = torch.full((scale * _COMPUTE_WIDTH, 4 * scale * _COMPUTE_WIDTH), 0.5, device=here)

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
        work()  # loads kernels
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if time.perf_counter() - start >= _LONG_ENOUGH_S:
            break
    return scale, work


def kept_fraction(ratios: Iterable[float], *, at_least: float = 0.01) -> float:
    """The median, at most 1: noise must not make anything faster than alone."""
    return min(1.0, max(at_least, statistics.median(ratios)))


def in_worker(work: Callable[[], Result], *, num_threads: int = 1) -> Result:
    """`work()` in a fresh thread with `num_threads` intra-op threads, like a lane's."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1, initializer=take_threads, initargs=(num_threads,)) as pool:
            return pool.submit(work).result()
    finally:
        # The number also holds for all later threads.
        torch.set_num_threads(before)


def rates_together(
    compute: Callable[[], None], lane: Callable[[], None], *, num_threads: int = 1
) -> tuple[float, float]:
    """Runs per second of `compute` in the calling thread and of `lane` in a worker, at once."""
    stop = threading.Event()
    running = threading.Event()
    before = torch.get_num_threads()

    def until_stopped() -> float:
        take_threads(num_threads)
        running.set()
        return runs_per_second(lane, until=stop)

    with ThreadPoolExecutor(max_workers=1) as pool:
        lane_rate = pool.submit(until_stopped)
        try:
            running.wait()
            torch.set_num_threads(before)
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


def median_seconds(work: Callable[[], object], *, num_runs: int = 7) -> float:
    """The median of single runs, after two warm-up runs."""
    work()
    work()
    # Without `gc.enable` it would run without garbage collection.
    return statistics.median(timeit.repeat(work, gc.enable, repeat=num_runs, number=1))


# --- how fast this machine computes ---------------------------------------------------------------

_CALLS = 1000  # of the small operator in one run: a run is milliseconds
_PRODUCT_WIDTH, _SUM_BYTES = 1024, 2**26
"""Sizes of the matrix product and of each operand of the sum: a run is some ten milliseconds on two
cores, and the sum is past every cache. On an accelerator both grow until a run takes as long
(`grown`)."""


def measure_rates(device: torch.device | str, *, dtype: DType) -> Rates:
    """This process's rates, on the calling thread with its threads. Takes about 2 s.

    Measured peaks are the reached rates: both efficiencies are 1. `dtype` is that of the host's
    updates, measured as in the update lane.
    """
    here = found(str(device))
    small = torch.ones(64, device=here)

    def small_products() -> None:
        # Negligible compute: half are recorded for backward, half run there.
        value = small.clone().requires_grad_()
        for _ in range(_CALLS // 2):
            value = torch.mul(value, small)
        value.sum().backward()

    # Two operands are read and one is written, in fresh memory, as results are. On a CPU the system
    # clears every result's pages, which takes longer than the sum. A GPU's allocator caches them.
    def addition(scale: int) -> Callable[[], object]:
        count = scale * _SUM_BYTES // 4
        left, right = (torch.ones(count, dtype=torch.float32, device=here) for _ in range(2))
        return lambda: torch.add(left, right)

    scale, work = grown(addition, here)
    return Rates(
        float32_flops_per_s=four_digits(_flops_per_s(torch.float32, here)),
        bfloat16_flops_per_s=four_digits(_flops_per_s(torch.bfloat16, here)),
        compute_efficiency=1.0,
        memory_bytes_per_s=four_digits(3 * scale * _SUM_BYTES * _per_second(work, here)),
        memory_efficiency=1.0,
        operator_s=four_digits(1 / (_CALLS * _per_second(small_products, here))),
        host_parameters_per_s=four_digits(host_update_speed(Stepped(dtype), device=here)),
    )


def _flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    def product(scale: int) -> Callable[[], object]:
        # Not constants: multiplying these draws less power, and raises a GPU's clock.
        source, width = torch.Generator(device).manual_seed(0), scale * _PRODUCT_WIDTH
        tokens, weight = (
            torch.rand(width, width, generator=source, device=device).sub(0.5).to(dtype)
            for _ in range(2)
        )
        return lambda: linear(tokens, weight)

    scale, work = grown(product, device)
    return 2 * (scale * _PRODUCT_WIDTH) ** 3 * _per_second(work, device)


def _per_second(work: Callable[[], object], device: torch.device) -> float:
    """Runs per second, the median of a few windows after one run that warms up."""

    def run() -> None:
        work()
        synchronize(device)

    run()
    return statistics.median(runs_per_second(run) for _ in range(_ROUNDS))
