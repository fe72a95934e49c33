"""The passes of a measured profile: one for saved storages, one for bytes, one for seconds.

Each runs whole training steps of the plain model (no optimizer) and looks at the boundaries of
slots, through the same hooks that the runtime uses. Memory and time are measured in separate
passes, because counting allocations slows the code.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from protrain_plan.errors import ProtrainError
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.profiling import whereabouts
from protrain_plan.program import grouped, in_blocks
from protrain_plan.records.profile import Form
from protrain_runtime import devices
from protrain_runtime.activations import MIN_SWAP_BYTES
from protrain_runtime.boundaries import Boundaries
from protrain_runtime.measure import Segment, device_of, strided_parts
from protrain_runtime.preparation import wrap_forward
from protrain_runtime.statistics import Written, other_buffers, written_buffers
from protrain_runtime.trees import tensors_in

OnSlot = Callable[[int, Sequence[torch.Tensor]], None]
FORMS: tuple[Form, ...] = ("keep", "lite", "mlp", "attn", "full")
"""The forms of activations that profiles measure: each recomputes what the one before does."""
SAMPLED_S = 2.0
FEWEST_STEPS, MOST_STEPS = 3, 15
"""Medians of three steps of a quarter of a second were up to 15 % off where the machine's speed
changes from second to second."""


class Meter(Protocol):
    """What counts live bytes between marks; `segments` is there after the exit."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: Any) -> object: ...
    def mark(self, label: str) -> None: ...
    @property
    def segments(self) -> tuple[Segment, ...]: ...


MeterFactory = Callable[[], Meter]


@dataclass
class SlotWatch:
    """A listener to boundaries that calls `on_slot` once per slot, in order, and no more.

    It tells where measuring is, too, unless the step is `timed`.
    """

    on_slot: OnSlot
    on_leave: Callable[[Sequence[torch.Tensor]], None] = field(default=lambda _: None)
    timed: bool = False
    num_slots: int = 0
    slot: int = -1
    differentiated: set[int] = field(default_factory=set[int])  # units, by a forward itself

    def begin(self, *, training: bool) -> None:  # noqa: ARG002 (the signature of every listener)
        self.slot = -1
        self.enter(0, ())

    def begin_between(self) -> None:
        pass

    def enter(self, slot: int, inputs: Sequence[torch.Tensor]) -> None:
        while self.slot < slot:
            self.slot += 1
            if not self.timed:
                whereabouts.in_slot(self.slot)
            self.on_slot(self.slot, inputs if self.slot == slot else ())

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        self.on_leave(outputs)

    def differentiate(self, unit: int) -> None:
        self.differentiated.add(unit)

    def end_forward(self) -> None:
        pass

    def end_backward(self) -> None:
        # A model whose first units are frozen never enters their backward slots by itself.
        self.enter(self.num_slots - 1, ())

    def abort(self) -> None:
        pass


@contextmanager
def watched(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    form: Form,
    watch: SlotWatch,
    *,
    kept: Set[int] = frozenset(),
) -> Iterator[None]:
    """The model with boundaries reported to `watch`, and every block's activations in `form`.

    `kept` blocks keep theirs: see `Anatomy.kept`.
    """
    whereabouts.in_form(form)
    watch.num_slots = 2 * len(modules)
    blocks = [
        module for unit, module in enumerate(modules) if module is not None and unit not in kept
    ]
    undo = [wrap_forward(block, form) for block in blocks] if form != "keep" else []
    boundaries = Boundaries(model, modules, watch)
    try:
        yield
        if boundaries.skipped:
            raise ProtrainError(
                f"block {boundaries.skipped[0] + 1} of the model's {len(modules)} units ran when"
                " they were found, and not in a later forward of the same batch: what steers that"
                " is no generator's state and no number that a module keeps",
                fix="profile with no block skipped: plans hold for steps that skip some",
            )
    finally:
        boundaries.remove()
        for unwrap in reversed(undo):
            unwrap()


def identities(tensors: Iterable[torch.Tensor]) -> set[int]:
    """What tells the live storages behind tensors from others; fake tensors have no addresses."""
    return {int(part.untyped_storage()._cdata) for part in strided_parts(tensors)}


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """A tensor's storage, the first one of a sparse tensor."""
    return next(strided_parts([tensor])).untyped_storage()


def training_step(model: nn.Module, batch: Batch) -> float:
    """One forward and backward, as a training loop runs them; returns the loss."""
    loss = loss_of(call_model(model, batch))
    loss.backward()
    return loss.item()


def sparse_gradients(model: nn.Module) -> frozenset[str]:
    """The parameters whose gradients are sparse, now that a step has made them."""
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.layout != torch.strided
    )


def drop_gradients(model: nn.Module) -> None:
    """What `zero_grad(set_to_none=True)` does."""
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def writing(modules: Sequence[nn.Module | None]) -> Iterator[set[int]]:
    """The blocks whose forward writes buffers of theirs while inside; running statistics apart."""
    found: set[int] = set()
    before: dict[int, Written] = {}

    def begin(unit: int, module: nn.Module, *_: object) -> None:
        before[unit] = other_buffers(module)

    def end(unit: int, module: nn.Module, *_: object) -> None:
        if written_buffers(before.pop(unit), other_buffers(module)):
            found.add(unit)

    with ExitStack() as stack:
        for unit, module in enumerate(modules):
            if module is not None:
                stack.callback(module.register_forward_pre_hook(partial(begin, unit)).remove)
                stack.callback(module.register_forward_hook(partial(end, unit)).remove)
        yield found


@dataclass(slots=True, weakref_slot=True)
class _Packed:
    """A saved tensor, alive for as long as autograd keeps it."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """What a unit saves for backward that is its own: storages, and the inputs among them.

    `awaited` is False where all that the unit saved is gone when the forward has ended: the loss
    does not depend on it, as on LLaVA's last image layer. What such a block saves is no level that
    stands until backward, so that other units' costs would depend on its form: it has one alone.
    """

    pieces: tuple[int, ...]  # bytes that move together, in groups as the runtime makes them
    own_inputs: tuple[int, ...]  # positions among the unit's input tensors
    awaited: bool

    @property
    def swappable_bytes(self) -> int:
        return sum(self.pieces)


def saved_bytes(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batch: Batch,
    form: Form,
    *,
    own_inputs: Sequence[tuple[int, ...]] | None = None,
    kept: Set[int] = frozenset(),
) -> list[SavedBytes]:
    """For each unit, what a swap could take away when activations have `form`.

    `own_inputs`, if given, are the inputs that are the units' own in another form, and no others
    are here: the unit before may take that form, and hold what it hands on.

    A storage is a unit's own if no other unit saves it or has it among its inputs, the model's
    code holds it no longer, it is no parameter or buffer, and it is not what the unit hands on.
    Parts swap nothing.
    """
    count = len(modules)
    shared = identities((*model.parameters(), *model.buffers()))
    saved: list[dict[int, torch.UntypedStorage]] = [{} for _ in range(count)]
    inputs: list[list[torch.UntypedStorage]] = [[] for _ in range(count)]
    may_be_own = released_inputs(model, modules, batch) if own_inputs is None else own_inputs
    outputs: list[set[int]] = [set() for _ in range(count)]
    packed: list[list[tuple[int, ref[_Packed]]]] = [[] for _ in range(count)]
    keep_alive: list[torch.Tensor] = []  # so that an identity means one storage in this pass
    current = 0

    def on_slot(slot: int, tensors: Sequence[torch.Tensor]) -> None:
        nonlocal current
        current = min(slot, count - 1)
        if slot < count:
            keep_alive.extend(tensor.detach() for tensor in tensors)
            inputs[slot].extend(map(_storage, tensors))
            shared.update(identities(t for t in tensors if t.layout != torch.strided))

    def on_leave(tensors: Sequence[torch.Tensor]) -> None:
        outputs[current].update(identities(tensors))

    def pack(tensor: torch.Tensor) -> _Packed:
        storage = _storage(tensor)
        if tensor.layout == torch.strided:
            saved[current].setdefault(storage._cdata, storage)
        held = _Packed(tensor.detach())  # the tensor itself would hold the graph that holds it
        packed[current].append((storage._cdata, ref(held)))
        return held

    watch = SlotWatch(on_slot, on_leave)
    with watched(model, modules, form, watch, kept=kept):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            loss = loss_of(call_model(model, batch))
        # What the loss does not depend on ends with the forward: a swap would take it twice.
        awaited = [{key for key, held in unit if held() is not None} for unit in packed]
        del loss
    readers: dict[int, set[int]] = {}
    for unit in range(count):
        for pointer in {*saved[unit], *(storage._cdata for storage in inputs[unit])}:
            readers.setdefault(pointer, set()).add(unit)
    found: list[SavedBytes] = []
    for unit, module in enumerate(modules):
        pointers = [storage._cdata for storage in inputs[unit]]
        own = tuple(
            position
            for position, pointer in enumerate(pointers)
            if readers[pointer] == {unit} and pointer not in shared and position in may_be_own[unit]
        )
        foreign = shared | (set(pointers) - {pointers[n] for n in own}) | outputs[unit]
        swappable = [
            storage.nbytes()
            for pointer, storage in saved[unit].items()
            if pointer not in foreign
            and pointer in awaited[unit]
            and readers[pointer] == {unit}
            and storage.nbytes() >= MIN_SWAP_BYTES
        ]
        pieces = tuple(
            sum(swappable[place] for place in group)
            for group in (grouped(swappable) if module is not None else ())
        )
        needed = bool(awaited[unit]) or not packed[unit]
        found.append(SavedBytes(pieces=pieces, own_inputs=own, awaited=needed))
    return found


def released_inputs(
    model: nn.Module, modules: Sequence[nn.Module | None], batch: Batch
) -> list[tuple[int, ...]]:
    """For each unit, the positions of its input tensors that nobody holds two units later.

    The first block's input often stays, because a frame of the model's forward has a name for it:
    swapping it would free nothing before the forward returns. Found without a graph, so that only
    the model's own code holds anything.
    """
    count = len(modules)
    inputs: list[list[StorageWeakRef]] = [[] for _ in range(count)]
    held: list[set[int]] = [set() for _ in range(count)]

    def on_slot(slot: int, tensors: Sequence[torch.Tensor]) -> None:
        if slot >= count:
            return
        inputs[slot] = [StorageWeakRef(_storage(tensor)) for tensor in tensors]
        for unit in range(slot - 1):
            held[unit].update(n for n, weak in enumerate(inputs[unit]) if not weak.expired())

    with watched(model, modules, "keep", SlotWatch(on_slot)), torch.no_grad():
        call_model(model, batch)
    return [
        tuple(n for n in range(len(inputs[unit])) if n not in held[unit]) for unit in range(count)
    ]


def shared_input_bytes(
    model: nn.Module, modules: Sequence[nn.Module | None], batch: Batch, *, block: int = 1
) -> int:
    """Bytes of the inputs that several blocks share and none saves, such as position ids.

    They end with the model's forward, unless a block is recomputed: it holds them until then. Each
    storage takes whole blocks of `block` bytes.
    """
    count = len(modules)
    known = [*model.parameters(), *model.buffers(), *tensors_in(batch)]
    pointers = identities(known)
    readers: dict[int, set[int]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    saved: set[int] = set()

    def on_slot(slot: int, tensors: Sequence[torch.Tensor]) -> None:
        for storage in (part.untyped_storage() for part in strided_parts(tensors)):
            if slot < count and storage._cdata not in pointers:
                readers.setdefault(storage._cdata, set()).add(slot)
                storages[storage._cdata] = storage

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.update(identities([tensor]))
        return tensor.detach()

    with watched(model, modules, "keep", SlotWatch(on_slot)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(call_model(model, batch))
        del loss
    return sum(
        in_blocks(storages[pointer].nbytes(), block)
        for pointer, units in readers.items()
        if len(units) > 1 and pointer not in saved
    )


def memory_segments(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batch: Batch,
    form: Form,
    *,
    meter: MeterFactory,
    kept: Set[int] = frozenset(),
) -> tuple[Segment, ...]:
    """Live bytes of one step, one segment per slot and one after the last, states excluded."""
    gc.collect()
    counting = meter()
    watch = SlotWatch(lambda slot, _: counting.mark(str(slot)))
    with watched(model, modules, form, watch, kept=kept), counting:
        loss = loss_of(call_model(model, batch))
        loss.backward()
        counting.mark("end")
    drop_gradients(model)
    return counting.segments


def slot_seconds(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batches: Iterator[Batch],
    forms: Sequence[Form],
    *,
    num_steps: int | None,
    tick: Callable[[float], None],
    kept: Set[int] = frozenset(),
) -> dict[Form, list[list[float]]]:
    """Seconds of every slot in each of `num_steps` steps per form, after one step that warms up.

    The forms take turns, so that what else the machine does is noise to all of them. None: as many
    steps as take `SAMPLED_S` per form, within `FEWEST_STEPS` and `MOST_STEPS`. `tick` hears the
    fraction that is done.
    # [form][step][slot]
    """
    device = device_of(model)
    clock = _CpuClock() if devices.on_host(device) else _EventClock(device)
    steps: dict[Form, list[list[float]]] = {form: [] for form in forms}

    def step(form: Form) -> list[float]:
        watch = SlotWatch(lambda *_: clock.stamp(), timed=True)
        with watched(model, modules, form, watch, kept=kept):
            clock.restart()
            training_step(model, next(batches))
            clock.stamp()
        drop_gradients(model)
        return clock.seconds()

    step(forms[0])
    if num_steps is None:
        first = sum(step(forms[0]))
        num_steps = max(FEWEST_STEPS, min(MOST_STEPS, round(SAMPLED_S / first)))
    turns = num_steps * tuple(forms)
    for done, form in enumerate(turns, 1):
        steps[form].append(step(form))
        tick(done / len(turns))
    return steps


class _CpuClock:
    def __init__(self) -> None:
        self._stamps: list[float] = []

    def restart(self) -> None:
        self._stamps = []

    def stamp(self) -> None:
        self._stamps.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - start for start, end in pairwise(self._stamps)]


class _EventClock:
    """Events on the compute stream: nothing waits while the step runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.Event] = []

    def restart(self) -> None:
        devices.synchronize(self._device)
        self._events = []

    def stamp(self) -> None:
        self._events.append(devices.record_event(self._device, timing=True))

    def seconds(self) -> list[float]:
        devices.synchronize(self._device)
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(self._events)]
