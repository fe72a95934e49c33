"""The passes of a measured profile for bytes and for seconds.

Each runs whole training steps of the plain model (no optimizer) and observes slot boundaries
through the runtime's hooks. Memory and time are measured in separate passes, because counting
allocations slows the code.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn

from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.profiling.memory.fake_meter import FakeMeter
from protrain_plan.profiling.structure import whereabouts
from protrain_runtime.activations.forms import around, wrap_forward
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.profile import Form
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import MemoryMeter, Segment, device_of
from protrain_runtime.engine.boundaries import Boundaries, Listener, in_backward

OnSlot = Callable[[int, Sequence[torch.Tensor]], None]
SAMPLED_S = 2.0
FEWEST_STEPS, MOST_STEPS = 3, 15
"""Medians of three steps of a quarter of a second were up to 15 % off where the machine's speed
changes from second to second."""


MeterFactory = Callable[[], MemoryMeter | FakeMeter]


@dataclass
class SlotWatch(Listener):
    """A listener to boundaries that calls `on_slot` once per slot, in order, and no more.

    It tells where measuring is, too, unless the step is `timed`.
    """

    on_slot: OnSlot
    on_leave: Callable[[Sequence[torch.Tensor]], None] = field(default=lambda _: None)
    timed: bool = False
    num_slots: int = 0
    slot: int = -1
    differentiated: set[int] = field(default_factory=set[int])  # units, by a forward itself
    last: Callable[[], AbstractContextManager[object]] = nullcontext  # around that part's forward
    _around: ExitStack = field(default_factory=ExitStack)

    def begin(self, *, training: bool) -> None:  # noqa: ARG002 (the signature of every listener)
        self.slot = -1
        self.enter(0, ())

    def enter(self, slot: int, inputs: Sequence[torch.Tensor]) -> None:
        while self.slot < slot:
            self.slot += 1
            if not self.timed:
                whereabouts.in_slot(self.slot)
            self.on_slot(self.slot, inputs if self.slot == slot else ())
            # Not if backward begins the slot, after a forward that skipped the last block.
            if slot == self.slot == self.num_slots // 2 - 1:
                self._around.enter_context(self.last())

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        self._around.close()
        self.on_leave(outputs)

    def differentiate(self, unit: int) -> None:
        self.differentiated.add(unit)

    def end_backward(self) -> None:
        # A model with frozen first units never enters their backward slots by itself.
        self.enter(self.num_slots - 1, ())

    def end_forward(self) -> None:
        self._around.close()

    abort = end_forward


@contextmanager
def watched(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    form: Form | Sequence[Form],
    watch: SlotWatch,
    *,
    kept: Set[int] = frozenset(),
    may_skip: bool = False,
) -> Iterator[None]:
    """The model with boundaries reported to `watch`, and every block's activations in `form`.

    A form of the last part is that part's alone. Of several forms each unit has its own. `kept`
    blocks keep theirs: see `ModelStructure.kept`. ProtrainError if a block is skipped, unless it
    `may_skip`.
    """
    whereabouts.in_form(form if isinstance(form, str) else "mixed")
    watch.num_slots = 2 * len(modules)
    if not isinstance(form, str):
        forms = form
    elif FORMS[form].of == "last part":
        forms = [*["keep"] * (len(modules) - 1), form]
    else:
        forms = [form] * len(modules)
    if FORMS[forms[-1]].of == "last part":
        watch.last = partial(around, forms[-1])
    with ExitStack() as stack:
        for unit, (module, own) in enumerate(zip(modules, forms, strict=True)):
            if module is not None and own != "keep" and unit not in kept:
                stack.callback(wrap_forward(module, own))
        boundaries = Boundaries(model, modules, watch)
        stack.callback(boundaries.remove)
        yield
        if boundaries.skipped and not may_skip:
            raise ProtrainError(
                f"block {boundaries.skipped[0] + 1} of the model's {len(modules)} units ran when"
                " they were found, and not in a later forward: values of the batch or of parameters"
                " steer that, or what a profile does not set back",
                fix="run it in every forward, times zero where it is not wanted; or have the"
                " factory's first batch run all blocks: plans hold for steps that skip some",
            )


def training_step(model: nn.Module, batch: Batch) -> float:
    """One forward and backward, as a training loop runs them; returns the loss."""
    loss = loss_of(call_model(model, batch))
    loss.backward()
    return loss.item()


_EARLY = "early "  # prefix of a mark where a slot may begin at run time


def _by_slot(segments: Sequence[Segment], gradients: Callable[[int], int]) -> Iterator[Segment]:
    """The slots' segments, with peaks from the earliest begin to the next's."""
    early: dict[int, int] = {}  # peaks without gradients since, of slots that may have begun
    running: Segment | None = None
    for segment in segments:
        if segment.label.startswith(_EARLY):
            assert running, "a slot runs"
            slots = range(int(running.label) + 1, int(segment.label[len(_EARLY) :]) + 1)
            early = dict.fromkeys(slots, 0) | early
            peak = max(running.peak_bytes, segment.peak_bytes)
            running = replace(running, peak_bytes=peak)
        else:
            if running:
                yield running
            slot, peak = int(segment.label), segment.peak_bytes
            if slot in early:
                peak = max(peak, early.pop(slot) + gradients(slot))
            running = replace(segment, peak_bytes=peak)
        if early:
            peak = segment.peak_bytes - gradients(int(running.label))
            early = {slot: max(since, peak) for slot, since in early.items()}
    assert running, "a step has slots"
    yield running


def memory_segments(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batch: Batch,
    form: Form | Sequence[Form],
    *,
    meter: MeterFactory,
    kept: Set[int] = frozenset(),
    num_warm: int = 0,
    may_skip: bool = False,
    gradients: Callable[[int], int] | None = None,
) -> tuple[Segment, ...]:
    """Live bytes of one step, one segment per slot and one after the last, states excluded.

    A backward slot's peak counts from the first read of the unit's saved tensors. `gradients` are
    the bytes arrived when a slot begins; None: a forward that differentiates by itself, without
    that check.

    A model's lasting tensors go when a later step replaces them. A meter notices that only for
    tensors that it has seen, so `num_warm` steps run before the reported one.
    """
    gc.collect()
    counting = meter()
    watch = SlotWatch(lambda slot, _: counting.mark(str(slot)))

    def read_early(held: tuple[int, torch.Tensor]) -> torch.Tensor:
        # At run time a read before the unit's slot begins that slot, if the read tensor has left.
        unit, tensor = held
        slot = watch.num_slots - 1 - unit
        if in_backward() and watch.slot < slot:
            counting.mark(f"{_EARLY}{slot}")
        return tensor

    seen = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (watch.slot, tensor.detach()),  # the tensor itself would hold the graph
        read_early,
    )
    with watched(model, modules, form, watch, kept=kept, may_skip=may_skip), counting:
        _warm(model, batch, num_warm)
        with seen if gradients else nullcontext():
            loss = loss_of(call_model(model, batch))
        loss.backward()
        counting.mark(str(2 * len(modules)))
    model.zero_grad()
    return tuple(_by_slot(counting.segments, gradients or (lambda _: 0)))[-(2 * len(modules) + 1) :]


def _warm(model: nn.Module, batch: Batch, num_steps: int) -> None:
    for _ in range(num_steps):
        loss_of(call_model(model, batch)).backward()  # its value may be unknown
        model.zero_grad()


@dataclass(slots=True, weakref_slot=True)
class _Held:
    """A saved tensor of autograd's; None once it has left."""

    tensor: torch.Tensor | None


def swapped_segments(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batch: Batch,
    forms: Sequence[Form],
    leaving: Sequence[Set[int]],
    *,
    meter: MeterFactory,
    kept: Set[int] = frozenset(),
    num_warm: int = 0,
) -> tuple[Segment, ...]:
    """Live bytes of one forward in which saved tensors leave at the end of their unit."""
    gc.collect()
    counting = meter()
    packed: list[list[ref[_Held]]] = []  # by unit; tensors released by autograd are gone

    def on_slot(slot: int, _: object) -> None:
        for number in leaving[slot - 1] if packed and slot <= len(leaving) else ():
            if number < len(packed[-1]) and (held := packed[-1][number]()) is not None:
                held.tensor = None
        packed.append([])
        counting.mark(str(slot))

    def pack(tensor: torch.Tensor) -> _Held:
        held = _Held(tensor.detach())
        packed[-1].append(ref(held))
        return held

    watch = SlotWatch(on_slot)
    with watched(model, modules, forms, watch, kept=kept, may_skip=True), counting:
        _warm(model, batch, num_warm)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            loss = loss_of(call_model(model, batch))
        watch.enter(len(modules) - 1, ())  # skipped blocks have not begun it
        counting.mark("end")
        del loss
    return counting.segments[-(len(modules) + 1) : -1]


SlotSeconds = dict[Form, list[list[float]]]
"""By form, of every slot in each of several steps.  # [form][step][slot]"""


def sampled_steps(step_s: float) -> int:
    """Timed steps per form, for steps of `step_s`."""
    return max(FEWEST_STEPS, min(MOST_STEPS, round(SAMPLED_S / step_s)))


def slot_seconds(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batches: Iterator[Batch],
    forms: Sequence[Form],
    *,
    num_steps: int | None,
    tick: Callable[[float], None],
    kept: Set[int] = frozenset(),
) -> tuple[SlotSeconds, SlotSeconds]:
    """Seconds of every slot in each of `num_steps` steps per form, after one warm-up step.

    Second, on an accelerator, seconds of the launching thread's processor, without waits; 0 if a
    slot ends on another thread. Forms alternate, so that noise affects all. None: as many steps as
    take `SAMPLED_S` per form, within `FEWEST_STEPS` and `MOST_STEPS`. `tick` receives the completed
    fraction.
    """
    device = device_of(model)
    on_host = devices.on_host(device)
    steps: SlotSeconds = {form: [] for form in forms}
    launches: SlotSeconds = {form: [] for form in forms}

    def step(form: Form) -> tuple[list[float], list[float]]:
        # On an accelerator, moments are events of the compute stream, without waits.
        moments: list[Any] = []
        clocks: list[tuple[int, float]] = []  # the threads' own

        def stamp(*_: object) -> None:
            now = time.perf_counter() if on_host else devices.record_event(device, timing=True)
            moments.append(now)
            clocks.append((threading.get_ident(), time.thread_time()))

        with watched(model, modules, form, SlotWatch(stamp, timed=True), kept=kept):
            devices.synchronize(device)
            training_step(model, next(batches))
            stamp()
        model.zero_grad()
        if on_host:
            return [end - start for start, end in pairwise(moments)], []
        devices.synchronize(device)
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(moments)], [
            (end - start) * (one == other) for (one, start), (other, end) in pairwise(clocks)
        ]

    step(forms[0])
    if num_steps is None:
        num_steps = sampled_steps(sum(step(forms[0])[0]))
    turns = num_steps * tuple(forms)
    for done, form in enumerate(turns, 1):
        seconds, launching = step(form)
        steps[form].append(seconds)
        launches[form].append(launching)
        tick(done / len(turns))
    return steps, {} if on_host else launches
