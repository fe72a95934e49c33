"""The passes of a measured profile: one for saved storages, one for bytes, one for seconds.

Each runs whole training steps of the plain model (no optimizer) and looks at the boundaries of
slots, through the same hooks that the runtime uses. Memory and time are measured in separate
passes, because counting allocations slows the code.
"""

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.profiling.structure import whereabouts
from protrain_plan.profiling.structure.rerun import held_tensors
from protrain_runtime.activations.forms import around, wrap_forward
from protrain_runtime.activations.saved_tensors import MIN_SWAP_BYTES
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import grouped
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.profile import HANDED_SIZES, Form
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import num_holders
from protrain_runtime.devices.memory_meter import Segment, device_of, strided_parts
from protrain_runtime.engine.boundaries import Boundaries

OnSlot = Callable[[int, Sequence[torch.Tensor]], None]
SAMPLED_S = 2.0
FEWEST_STEPS, MOST_STEPS = 3, 15
"""Medians of three steps of a quarter of a second were up to 15 % off where the machine's speed
changes from second to second."""


class Meter(Protocol):
    """A counter of live bytes between marks; `segments` is there after the exit."""

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
            # Not where backward begins the slot, of a forward that skipped the last block.
            if slot == self.slot == self.num_slots // 2 - 1:
                self._around.enter_context(self.last())

    def leave(self, outputs: Sequence[torch.Tensor]) -> None:
        self._around.close()
        self.on_leave(outputs)

    def differentiate(self, unit: int) -> None:
        self.differentiated.add(unit)

    def end_backward(self) -> None:
        # A model whose first units are frozen never enters their backward slots by itself.
        self.enter(self.num_slots - 1, ())

    def end_forward(self) -> None:
        self._around.close()

    def _ignore(self) -> None:
        pass

    abort = end_forward
    begin_between = backward_failed = _ignore


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
    blocks keep theirs: see `ModelStructure.kept`. ProtrainError where a block is skipped, unless it
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
    undo = [
        wrap_forward(module, own)
        for unit, (module, own) in enumerate(zip(modules, forms, strict=True))
        if module is not None and own != "keep" and unit not in kept
    ]
    boundaries = Boundaries(model, modules, watch)
    try:
        yield
        if boundaries.skipped and not may_skip:
            raise ProtrainError(
                f"block {boundaries.skipped[0] + 1} of the model's {len(modules)} units ran when"
                " they were found, and not in a later forward: values of the batch or of parameters"
                " steer that, or what a profile does not set back",
                fix="run it in every forward, times zero where it is not wanted; or let the"
                " factory's first batch run all blocks: plans hold for steps that skip some",
            )
    finally:
        boundaries.remove()
        for unwrap in reversed(undo):
            unwrap()


def identities(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The identities of the live storages behind tensors; fake tensors have no addresses."""
    return {int(part.untyped_storage()._cdata) for part in strided_parts(tensors)}


def training_step(model: nn.Module, batch: Batch) -> float:
    """One forward and backward, as a training loop runs them; returns the loss."""
    loss = loss_of(call_model(model, batch))
    loss.backward()
    return loss.item()


def drop_gradients(model: nn.Module) -> None:
    """Drop gradients, as `zero_grad(set_to_none=True)` does."""
    for parameter in model.parameters():
        parameter.grad = None


@dataclass(slots=True, weakref_slot=True)
class Packed:
    """A saved tensor, alive for as long as autograd keeps it."""

    tensor: torch.Tensor


class TrackedStorage:
    """A storage, and who holds it: autograd, through what was packed, or others.

    It is not held here, so that it dies when all of these let go of it.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key = storage._cdata
        self.num_bytes = storage.nbytes()
        self.alive = StorageWeakRef(storage)  # no other gets its identity meanwhile
        self._packed: list[ref[Packed]] = []

    def pack(self, tensor: torch.Tensor) -> Packed:
        held = Packed(tensor.detach())  # the tensor itself would hold the graph that holds it
        if tensor.layout == torch.strided:  # a sparse one has several storages
            self._packed.append(ref(held))
        return held

    @property
    def awaited(self) -> bool:
        """Whether autograd still holds it."""
        return any(weak() is not None for weak in self._packed)

    def held_elsewhere(self) -> bool:
        """Whether it would stay if autograd let go of it."""
        packed = [held.tensor for held in (weak() for weak in self._packed) if held is not None]
        if not packed:
            return not self.alive.expired()
        return num_holders(packed[0].untyped_storage()) > len(packed)


class TrackedStorages(dict[int, TrackedStorage]):
    """The storages that were met, by identity; no new storage gets an identity that is in here."""

    def of(self, tensor: torch.Tensor) -> TrackedStorage:
        """The tensor's storage, the first one of a sparse tensor."""
        storage = next(strided_parts([tensor])).untyped_storage()
        if storage._cdata not in self:
            self[storage._cdata] = TrackedStorage(storage)
        return self[storage._cdata]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """The storages of its own that a unit saves for backward: all, and the inputs among them.

    `awaited` is False where all that the unit saved is gone when the forward has ended: the loss
    does not depend on it, as on LLaVA's last image layer. What such a block saves is no level that
    stands until backward, so that other units' costs would depend on its form: it has one alone.
    `linked` is a unit that hands what has gradients to more than the next unit, or gets such: an
    output of the encoder, a skip connection, a bias for all. In a plain chain no unit is.
    `differentiated`: the forward itself asks for gradients through what the unit hands on.
    `ends_in_cross_entropy`: the last part calls that. `handed_bytes` are of the inputs with
    gradients that the unit before saves as well, such as a relu's output. `shared_inputs` are bytes
    of inputs that others hold, too, and none saves, such as position ids: several blocks read them,
    or the model's code has a name for them two units later. They end with the model's forward,
    unless a block is recomputed, which holds them until then.
    """

    pieces: tuple[int, ...]  # bytes that move together, in groups as the runtime makes them
    leaving: Set[int]  # the numbers of the tensors that lie in these, of all that the unit saves
    own_inputs: tuple[int, ...]  # positions among the unit's input tensors
    awaited: bool
    linked: bool
    differentiated: bool = False
    ends_in_cross_entropy: bool = False
    handed_bytes: int = 0
    reads: tuple[int, ...] = ()
    gets: tuple[str, ...] = ()  # shape and dtype of each tensor from the unit before
    shared_inputs: tuple[int, ...] = ()  # each with the first unit that reads it

    @property
    def swappable_bytes(self) -> int:
        return sum(self.pieces)


class _LossSeen(TorchFunctionMode):
    """Sees whether a cross entropy is called."""

    seen = False

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        if func is cross_entropy and not torch.compiler.is_compiling():
            self.seen = True
        return func(*args, **(kwargs or {}))


def _handed(tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """The differentiated of these tensors, in words; where none is, the first with fractions."""

    def dtype(tensor: torch.Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    real = [one for one in tensors if dtype(one) in HANDED_SIZES and one.layout == torch.strided]
    handed = [one for one in real if one.requires_grad] or real[:1]
    return tuple(f"{'x'.join(map(str, one.shape)) or '1'} {dtype(one)}" for one in handed)


def saved_bytes(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batch: Batch,
    form: Form,
    *,
    own_inputs: Sequence[tuple[int, ...]] | None = None,
    kept: Set[int] = frozenset(),
    may_skip: bool = False,
) -> list[SavedBytes]:
    """For each unit, what a swap could take away when activations have `form`.

    `own_inputs`, if given, are the inputs that are the units' own in another form, and no others
    are here: the unit before may take that form, and hold what it hands on.

    A storage is a unit's own if no other unit saves it or has it among its inputs, nobody else
    holds it, it is no parameter, and it is not what the unit hands on. Who else holds it
    is seen where the runtime looks as well: when the unit has ended; of an input, two units later.
    What autograd has let go of by then (the graph of what a forward detaches) is no longer saved.
    The first block's input often stays, because a frame of the model's forward has a name for it:
    swapping it would free nothing before the forward returns. Parts swap nothing.
    """
    count = len(modules)
    shared = identities(model.parameters())
    saved: list[dict[int, TrackedStorage]] = [{} for _ in range(count)]
    packed: list[list[int]] = [[] for _ in range(count)]  # the storages of all that is saved
    inputs: list[list[TrackedStorage]] = [[] for _ in range(count)]
    held: list[set[int]] = [set() for _ in range(count)]  # by others, of what is saved
    gone: list[set[int]] = [set() for _ in range(count)]  # of what is saved, when the unit ends
    staying: list[set[int]] = [set() for _ in range(count)]  # of the inputs
    outputs: list[set[int]] = [set() for _ in range(count)]
    flowing: set[int] = set()  # what has gradients, of what blocks get and give
    gets: dict[int, tuple[str, ...]] = {}
    storages = TrackedStorages()
    current = 0

    def look_at_inputs(unit: int) -> None:
        staying[unit] = {place for place, one in enumerate(inputs[unit]) if one.held_elsewhere()}

    def on_slot(slot: int, tensors: Sequence[torch.Tensor]) -> None:
        nonlocal current
        current = min(slot, count - 1)
        if slot < count:
            inputs[slot].extend(map(storages.of, tensors))
            if slot and tensors:
                gets[slot] = _handed(tensors)
            shared.update(identities(t for t in tensors if t.layout != torch.strided))
            note(tensors)
        if 0 < slot <= count:
            saved_before = saved[slot - 1].items()
            held[slot - 1] = {key for key, one in saved_before if one.held_elsewhere()}
            gone[slot - 1] = {key for key, one in saved_before if not one.awaited}
        if 1 < slot <= count:
            look_at_inputs(slot - 2)

    def note(tensors: Sequence[torch.Tensor]) -> None:
        flowing.update(storages.of(tensor).key for tensor in tensors if tensor.requires_grad)

    def on_leave(tensors: Sequence[torch.Tensor]) -> None:
        outputs[current].update(identities(tensors))
        gets[current + 1] = _handed(tensors)
        note(tensors)

    def pack(tensor: torch.Tensor) -> Packed:
        if current == count - 1 and count > 1:
            # The last block's input: no unit begins two units later.
            look_at_inputs(count - 2)
        one = storages.of(tensor)
        packed[current].append(one.key)
        if tensor.layout == torch.strided:
            saved[current].setdefault(one.key, one)
        return one.pack(tensor)

    loss_seen = _LossSeen()
    watch = SlotWatch(on_slot, on_leave, last=lambda: loss_seen)
    with watched(model, modules, form, watch, kept=kept, may_skip=may_skip):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            loss = loss_of(call_model(model, batch))
        awaited = [{key for key, one in unit.items() if one.awaited} for unit in saved]
        del loss
    readers: dict[int, set[int]] = defaultdict(set)
    given_to: dict[int, set[int]] = defaultdict(set)
    for unit in range(count):
        for one in inputs[unit]:
            given_to[one.key].add(unit)
        for key in (*saved[unit], *(one.key for one in inputs[unit])):
            readers[key].add(unit)
    makers: dict[int, int] = {}
    for unit, handed in enumerate(outputs):
        for key in handed & flowing:
            makers.setdefault(key, unit)
    # What the model's code has a name for two units later may be read until the end. (Most have one
    # for the first block's input, and read it no more.)
    named = {
        inputs[unit][place].key
        for unit in range(2, count)
        for place in staying[unit]
        if inputs[unit][place].key in makers
    }
    lasting = [tensor for held in held_tensors(model).values() for tensor in held]
    known = identities([*model.parameters(), *model.buffers(), *tensors_in(batch), *lasting])
    known.update(key for unit in packed for key in unit)
    found: list[SavedBytes] = []
    for unit, module in enumerate(modules):
        keys = [one.key for one in inputs[unit]]
        shared_inputs: list[int] = []
        for place, one in enumerate(inputs[unit]):
            if one.key not in known and (
                len(given_to[one.key]) > 1 or (place in staying[unit] and unit < count - 2)
            ):
                known.add(one.key)
                shared_inputs.append(one.num_bytes)
        mostly = set(range(len(keys))) - staying[unit]
        may_be_own = mostly if own_inputs is None else set(own_inputs[unit])
        own = tuple(
            place
            for place, key in enumerate(keys)
            if readers[key] == {unit} and key not in shared and place in may_be_own
        )
        mine = {keys[place] for place in own}
        foreign = shared | outputs[unit] | gone[unit] | ({*keys, *held[unit]} - mine)
        leaving = {
            key: one.num_bytes
            for key, one in saved[unit].items()
            if key not in foreign and readers[key] == {unit} and one.num_bytes >= MIN_SWAP_BYTES
        }
        # What the loss does not depend on ends with the forward: a swap would take it twice.
        swaps = module is not None and leaving.keys() <= awaited[unit]
        if not swaps:
            leaving = {}
        swappable = list(leaving.values())
        pieces = tuple(sum(swappable[place] for place in group) for group in grouped(swappable))
        # Beyond the unit that made it, which may save it, and the one after that.
        linked = any(
            len(readers[key] - {unit - 1}) > 1 or (place in staying[unit] and unit > 1)
            for place, key in enumerate(keys)
            if key in flowing
        )
        found.append(
            SavedBytes(
                pieces=pieces,
                leaving={place for place, key in enumerate(packed[unit]) if key in leaving},
                own_inputs=own,
                awaited=bool(awaited[unit]) or not saved[unit],
                reads=tuple(
                    sorted(
                        {
                            maker
                            for key, maker in makers.items()
                            if maker < unit - 1
                            and (unit in readers[key] or (unit == count - 1 and key in named))
                        }
                    )
                ),
                gets=gets.get(unit, ()),
                shared_inputs=tuple(shared_inputs),
                linked=linked or len(flowing & (outputs[unit] - set(keys))) > 1,
                differentiated=unit in watch.differentiated,
                ends_in_cross_entropy=unit == count - 1 and module is None and loss_seen.seen,
                handed_bytes=sum(
                    saved[unit - 1][key].num_bytes
                    for key in (set(keys) & flowing & saved[unit - 1].keys() if unit else ())
                ),
            )
        )
    return found


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
) -> tuple[Segment, ...]:
    """Live bytes of one step, one segment per slot and one after the last, states excluded.

    What a model keeps from step to step goes when a later step replaces it. A meter sees that of
    tensors which it has seen come, so that `num_warm` steps run before the one that is told.
    """
    gc.collect()
    counting = meter()
    watch = SlotWatch(lambda slot, _: counting.mark(str(slot)))
    with watched(model, modules, form, watch, kept=kept, may_skip=may_skip), counting:
        _warm(model, batch, num_warm)
        loss = loss_of(call_model(model, batch))
        loss.backward()
        counting.mark("end")
    drop_gradients(model)
    return counting.segments[-(2 * len(modules) + 1) :]


def _warm(model: nn.Module, batch: Batch, num_steps: int) -> None:
    for _ in range(num_steps):
        loss_of(call_model(model, batch)).backward()  # whose value may be unknown
        drop_gradients(model)


@dataclass(slots=True, weakref_slot=True)
class _Held:
    """A saved tensor, which autograd has; None once it has left."""

    tensor: torch.Tensor | None


def swapped_segments(
    model: nn.Module,
    modules: Sequence[nn.Module | None],
    batch: Batch,
    saved: Sequence[SavedBytes],
    *,
    meter: MeterFactory,
    num_warm: int = 0,
) -> tuple[Segment, ...]:
    """Live bytes of one forward in which the units' swappable bytes leave when they end.

    A frame of the model's forward may hold a block's input a while longer.
    """
    gc.collect()
    counting = meter()
    packed: list[list[ref[_Held]]] = []  # by unit; what autograd has let go of is gone

    def on_slot(slot: int, _: object) -> None:
        for number in saved[slot - 1].leaving if packed and slot <= len(saved) else ():
            if number < len(packed[-1]) and (held := packed[-1][number]()) is not None:
                held.tensor = None
        packed.append([])
        counting.mark(str(slot))

    def pack(tensor: torch.Tensor) -> _Held:
        held = _Held(tensor.detach())
        packed[-1].append(ref(held))
        return held

    def unpack(held: _Held) -> torch.Tensor:
        assert held.tensor is not None, "there is no backward"
        return held.tensor

    watch = SlotWatch(on_slot)
    with watched(model, modules, "keep", watch, may_skip=True), counting:
        _warm(model, batch, num_warm)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = loss_of(call_model(model, batch))
        counting.mark("end")
        del loss
    return counting.segments[-(len(modules) + 1) : -1]


SlotSeconds = dict[Form, list[list[float]]]
"""By form, of every slot in each of several steps.  # [form][step][slot]"""


def sampled_steps(step_s: float) -> int:
    """Steps to time per form, of which each takes about so long."""
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
    """Seconds of every slot in each of `num_steps` steps per form, after one step that warms up.

    Second, on an accelerator, those of the processor in the thread that launches the slot, which
    waits for nothing; 0 where another thread ends the slot than began it.

    The forms take turns, so that what else the machine does is noise to all of them. None: as many
    steps as take `SAMPLED_S` per form, within `FEWEST_STEPS` and `MOST_STEPS`. `tick` hears the
    fraction that is done.
    """
    device = device_of(model)
    on_host = devices.on_host(device)
    steps: SlotSeconds = {form: [] for form in forms}
    launches: SlotSeconds = {form: [] for form in forms}

    def step(form: Form) -> tuple[list[float], list[float]]:
        # On an accelerator, moments are events of the compute stream, not waited for.
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
        drop_gradients(model)
        if on_host:
            return [end - start for start, end in pairwise(moments)], []
        devices.synchronize(device)
        return [start.elapsed_time(end) / 1000 for start, end in pairwise(moments)], [
            (end - start) * (one == other) for (one, start), (other, end) in pairwise(clocks)
        ]

    step(forms[0])
    if num_steps is None:
        first = sum(step(forms[0])[0])
        num_steps = sampled_steps(first)
    turns = num_steps * tuple(forms)
    for done, form in enumerate(turns, 1):
        seconds, launching = step(form)
        steps[form].append(seconds)
        launches[form].append(launching)
        tick(done / len(turns))
    return steps, {} if on_host else launches
