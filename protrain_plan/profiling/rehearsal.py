"""A rehearsal of a planned run, to see what a process holds besides tensors.

Lanes, their files, the optimizer and the engine take memory of their own, and kernels are loaded
where they first run. The rehearsal offloads and swaps everything, for two steps with a learning
rate of zero, so that no parameter changes. An accelerator keeps the states of its smallest unit,
so that its optimizer runs, too, and clips and unscales a few gradients of every dtype. States that
cannot leave the device stay there.

`Reserve` sees what an accelerator's allocator does besides the tensors of steps.
"""

import gc
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from protrain_plan.hardware.overheads import plan_to_measure
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, OptimizerFactory, optimizer_factory
from protrain_plan.profiling.structure import whereabouts
from protrain_plan.profiling.unit_by_unit import SHARE_OF_FREE_MEMORY, free_bytes
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import FILE_BYTES
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    Activations,
    Placement,
    Plan,
    Schedule,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.device import out_of_memory
from protrain_runtime.devices.memory_meter import MemoryMeter, device_of, reachable_bytes
from protrain_runtime.devices.spill_file import SpillFile
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer
from protrain_runtime.model.prepared import engine_of, restore_as_is
from protrain_runtime.preparation import prepare
from protrain_runtime.states.chunk_layouts import unit_parameters

SMALL_BYTES, LARGE_BYTES = 512, 2**20 + 512
"""Tensors of the sizes that CUDA's allocator takes from segments of their own (2 MiB for those of
up to 1 MiB, 20 MiB for others; c10/cuda/CUDACachingAllocator.cpp, kSmallSize)."""

_MOST_TENSORS = 2**16


class Reserve:
    """The most that the allocator was seen to hold beyond what it has given out.

    It takes memory from the device in segments and cuts blocks from them; every limit is on the
    segments. How much of them stays unused in a step was seen in those that were watched. Another
    plan's step may begin one more segment of each kind that they had, and hardly use it. Before
    each step free segments are released, so that each is measured alone. 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Before the first step: what Python can reach now is no library's."""
        self._device = device
        self._before_bytes = 0
        if not devices.on_host(device):
            gc.collect()  # garbage collected later would be missing then
            self._before_bytes = reachable_bytes(device)
        self._meters: list[MemoryMeter] = []

    @property
    def most_bytes(self) -> int:
        """The bytes that plans hold back."""
        if devices.on_host(self._device):
            return 0
        seen = [meter.reserved_and_allocated for meter in self._meters]
        kinds = {self._segment_bytes(SMALL_BYTES), self._segment_bytes(LARGE_BYTES)}
        largest = max(reserved for reserved, _ in seen)
        return max(reserved - allocated for reserved, allocated in seen) + sum(
            segment for segment in kinds if segment <= largest
        )

    def library_bytes(self) -> int:
        """The bytes that libraries keep while no step runs and no gradient is there.

        A matrix library has a workspace for each thread and stream that it ran in: forward's, and
        autograd's. What the first steps of a model leave on its own tensors counts, too, unless as
        much of what others had is gone since. On a CPU such memory is part of the context.
        """
        if devices.on_host(self._device):
            return 0
        gc.collect()
        reached = min(self._before_bytes, reachable_bytes(self._device))
        return max(0, torch.accelerator.memory_allocated(self._device) - reached)

    def _segment_bytes(self, num_bytes: int) -> int:
        """The bytes that the allocator takes from the device for one more tensor of this size."""
        devices.free_cached(self._device)
        before = torch.accelerator.memory_reserved(self._device)
        held: list[torch.Tensor] = []  # what fits into what there is
        while (
            torch.accelerator.memory_reserved(self._device) == before and len(held) < _MOST_TENSORS
        ):
            held.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return torch.accelerator.memory_reserved(self._device) - before

    def meter(self) -> MemoryMeter:
        """A meter of a step that is seen, too."""
        devices.free_cached(self._device)
        self._meters.append(MemoryMeter(self._device))
        return self._meters[-1]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the step inside, on an accelerator."""
        if devices.on_host(self._device):
            yield
            return
        gc.collect()
        with self.meter():
            yield


ALLOWANCE_BYTES = 6 * 2**20
"""A run's context may exceed the rehearsal's by this: the heap is not the same twice. Runs of one
plan exceeded it by up to 0.4 MiB (tests/runtime/test_peaks.py compares them), steps after the
second by up to 1.9 MiB more, and plans with updates after backward by 4.9 MiB in all (tiny-llama
with all states on disk, six steps, ten runs; PyTorch 2.13 on an x86 machine)."""

ABSENT_UNIT_BYTES = 2**20
"""Added for a unit that does not run: its hooks, moves and counted operators. A layer of SmolLM2
135M takes 0.65 MiB (324.9 MiB with 27 of 32 units absent, 342.6 MiB with all; PyTorch 2.13)."""

_STATE_BYTES = 20
"""Tensors of a parameter at most: itself, its gradient, a float32 master and AdamW's two states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Findings: `context_bytes` besides tensors at most, and the seconds of a step of `plan`.

    Seconds are None where no step was timed. `held_views` are units with a view of their parameters
    held after their slot: these cannot leave the device as predicted.
    """

    context_bytes: int
    plan: Plan
    step_seconds: float | None
    held_views: Set[int]


def rehearse(
    model: nn.Module,
    batch: Batch,
    units: Sequence[UnitPlan],
    workload: Workload,
    spill_directory: Path,
    reserve: Reserve,
    *,
    optimizer: str = DEFAULT_OPTIMIZER,
    absent: Sequence[int] = (),
    staying: Set[int] = frozenset(),
    swapped_bytes: int = 0,
    timed: bool = False,
) -> Rehearsal:
    """Run two steps of a plan that offloads and swaps everything, and see what the process holds.

    `units` say what the model's units are; their decisions are made here. Rehearse before bytes are
    counted: what that leaves behind in the process would count, too. On an accelerator: what is
    taken of the device besides its allocator's memory; `reserve` sees the second step. `absent` are
    units that do not run: their parameters are never read. The states of `staying` ones cannot
    leave the device. `swapped_bytes` is what the others swap. Where it is `timed`, a step more is
    run for that.
    """
    device = device_of(model)
    moved, trained = _all_moved(model, units, absent, staying, swapped_bytes)
    made = plan_to_measure(model, moved, workload, optimizer="adamw")
    model, stepper = prepare(
        model,
        made,
        optimizer=partial(_idle, optimizer_factory(optimizer)),
        param_groups=[{"params": trained}],
        spill_directory=spill_directory,
    )

    def step(observe: Observer) -> None:
        loss = loss_of(call_model(model, batch))
        loss.backward()
        observe("update")
        stepper.step()
        stepper.zero_grad()

    engine = engine_of(model)
    assert engine is not None, "the rehearsal offloads"
    try:
        try:
            engine.observer, engine.refuses_views = _tell, False
            step(_tell)
            engine.observer = None
        except RuntimeError as error:
            if out_of_memory(error) or isinstance(error, ProtrainError):
                raise
            said = str(error).splitlines() or [type(error).__name__]
            raise ProtrainError(
                f"the model runs plainly, but not under a plan that moves everything: {said[0]}",
                fix="its code is right without a plan. Plans mostly cannot follow a view"
                " of parameters, or a gradient or tensor, that the code keeps: offloaded"
                " tensors move",
            ) from error
        seconds = None
        if timed:
            devices.synchronize(device)
            start = time.perf_counter()
            step(lambda _: None)
            devices.synchronize(device)
            seconds = time.perf_counter() - start
        if devices.on_host(device):
            held = measure_step(model, step).context_bytes + len(absent) * ABSENT_UNIT_BYTES
            held += unseen_staging_bytes(spill_directory)
        else:
            with reserve.watching():
                step(lambda _: None)
            _clip_and_unscale(model)
            devices.synchronize(device)
            held = devices.context_bytes(device)
        return Rehearsal(
            context_bytes=held + ALLOWANCE_BYTES,
            plan=made,
            step_seconds=seconds,
            held_views=frozenset(engine.held_views),
        )
    finally:
        restore_as_is(model)  # the learning rate is zero


def _all_moved(
    model: nn.Module,
    units: Sequence[UnitPlan],
    absent: Sequence[int],
    staying: Set[int],
    swapped_bytes: int,
) -> tuple[list[UnitPlan], list[nn.Parameter]]:
    """The units with everything offloaded and swapped, and the parameters that are trained."""
    of_units = unit_parameters(model, units)
    missing = {p for index in absent for _, p in of_units[index]}
    trained = [p for p in model.parameters() if p.requires_grad and p not in missing]
    sizes = [
        sum(p.numel() for _, p in own if p.requires_grad and p not in missing) for own in of_units
    ]
    left_alone: Sequence[int] = absent
    tier: TierName = "disk"
    if not devices.on_host(device_of(model)):
        # The unit with the fewest parameters to update, of those that have any.
        smallest = min((size, index) for index, size in enumerate(sizes) if size)[1]
        left_alone = (*absent, smallest)
        # Host memory is pinned: it is taken only where there is room.
        most_bytes = SHARE_OF_FREE_MEMORY * free_bytes(devices.HOST)
        tier = "host" if _STATE_BYTES * sum(sizes) + swapped_bytes <= most_bytes else "disk"
    schedule = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=0)
    moved = [
        unit
        if index in left_alone
        else replace(
            unit,
            activations=Activations(tier=tier) if unit.kind == "block" else KEEP,
            states=PERSISTENT if index in staying else Placement(tier=tier),
            schedule=schedule,
        )
        for index, unit in enumerate(units)
    ]
    return moved, trained


def _clip_and_unscale(model: nn.Module) -> None:
    """Load the kernels of what plans that update after backward do between it and the step."""
    device, trained = device_of(model), (p for p in model.parameters() if p.requires_grad)
    few = [nn.Parameter(torch.ones(8, dtype=d, device=device)) for d in {p.dtype for p in trained}]
    for parameter in few:
        parameter.grad = torch.ones_like(parameter)
    scaled = [parameter for parameter in few if parameter.dtype == torch.float32]
    if scaled:  # PyTorch unscales no others on all devices
        scaler, stepper = torch.amp.GradScaler(device.type), torch.optim.SGD(scaled, lr=0.0)
        scaler.scale(torch.ones((), device=device))
        scaler.unscale_(stepper)
        scaler.step(stepper)
        scaler.update()
    torch.nn.utils.clip_grad_norm_(few, 1.0)


def unseen_staging_bytes(directory: Path) -> int:
    """Staging of a spill file with direct I/O, which the file system here does not take."""
    with closing(SpillFile(directory)) as file:
        return 0 if file.direct else FILE_BYTES


def _tell(what: str) -> None:
    """Say which slot begins, of what the engine tells its observer."""
    kind, _, number = what.partition(" ")
    if kind == "slot":
        whereabouts.in_slot(int(number))


def _idle(factory: OptimizerFactory, parameters: ParamsT) -> torch.optim.Optimizer:
    """The factory's optimizer with a learning rate of zero: it changes nothing."""
    made = factory(parameters)
    for group in made.param_groups:
        rate = group["lr"]  # some take a tensor alone
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    return made
