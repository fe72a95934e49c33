"""Bytes that units save for backward and pass on, from one traced forward."""

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.profiling.memory.lasting import identities
from protrain_plan.profiling.memory.passes import SlotWatch, watched
from protrain_plan.profiling.structure.rerun import held_tensors
from protrain_runtime.activations.saved_tensors import MIN_SWAP_BYTES
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.contract.program.program import grouped
from protrain_runtime.contract.records.profile import HANDED_SIZES, Form
from protrain_runtime.devices.lanes import num_holders
from protrain_runtime.devices.memory_meter import strided_parts


@dataclass(slots=True, weakref_slot=True)
class Packed:
    """A saved tensor, alive as long as autograd keeps it."""

    tensor: torch.Tensor


@dataclass(eq=False)
class TrackedStorage:
    """A storage and its holders: autograd, through packed tensors, or others.

    Only weakly referenced here, so that it dies when all holders release it.
    """

    key: int
    num_bytes: int
    alive: StorageWeakRef  # keeps its identity from reuse
    _packed: list[ref[Packed]] = field(default_factory=list[ref[Packed]], init=False)

    def pack(self, tensor: torch.Tensor) -> Packed:
        held = Packed(tensor.detach())  # the tensor itself would keep the graph alive that holds it
        if tensor.layout == torch.strided:  # a sparse one has several storages
            self._packed.append(ref(held))
        return held

    @property
    def awaited(self) -> bool:
        """Whether autograd still holds it."""
        return any(weak() is not None for weak in self._packed)

    def held_elsewhere(self) -> bool:
        """Whether it would outlive autograd's release."""
        packed = [held.tensor for held in (weak() for weak in self._packed) if held is not None]
        if not packed:
            return not self.alive.expired()
        return num_holders(packed[0].untyped_storage()) > len(packed)


class TrackedStorages(dict[int, TrackedStorage]):
    """Known storages by identity; new storages cannot reuse these identities."""

    def of(self, tensor: torch.Tensor) -> TrackedStorage:
        """The tensor's storage, the first one of a sparse tensor."""
        storage = next(strided_parts([tensor])).untyped_storage()
        key = storage._cdata
        if key not in self:
            self[key] = TrackedStorage(key, storage.nbytes(), StorageWeakRef(storage))
        return self[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """The unit's own storages saved for backward: all, and its inputs among them.

    `awaited` is False if all saved tensors are gone at the end of the forward: the loss does not
    depend on them, as for LLaVA's last image layer. They are not a level until backward, and other
    units' costs would depend on the block's form: it has only one. `linked` is a unit that passes
    tensors with gradients beyond the next unit, or gets such: an encoder's output, a skip
    connection, a bias for all; none in a plain chain. `gives` are storages of parameters whose
    views it returns. `differentiated`: the forward itself asks for gradients through the unit's
    outputs. `ends_in_cross_entropy`: the last part calls it. `handed_bytes` are inputs with
    gradients that the unit before also saves, such as a relu's output. `shared_inputs` are bytes of
    inputs that others hold and none saves, such as position ids: several blocks read them, or the
    model's code names them two units later. They end with the model's forward, unless a recomputed
    block holds them.
    """

    pieces: tuple[int, ...]  # bytes that move together, in the runtime's groups
    leaving: Set[int]  # indices of their tensors among all saved by the unit
    input_leaves: bool  # whether one of these is an input
    own_inputs: tuple[int, ...]  # positions among the unit's input tensors
    awaited: bool
    linked: bool
    differentiated: bool = False
    ends_in_cross_entropy: bool = False
    gives: Set[int] = frozenset()
    handed_bytes: int = 0
    reads: tuple[int, ...] = ()
    gets: tuple[str, ...] = ()  # shape and dtype of each tensor from the previous unit
    shared_inputs: tuple[int, ...] = ()  # each with the first unit that reads it

    def staying(self) -> "SavedBytes":
        """The same without swaps."""
        return replace(self, pieces=(), leaving=frozenset(), input_leaves=False)


class _LossSeen(TorchFunctionMode):
    """Detects calls of cross entropy."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is cross_entropy and not torch.compiler.is_compiling():
            self.seen = True
        return func(*args, **(kwargs or {}))


def _handed(tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Texts of the differentiated tensors; without any, of the first floating-point one."""
    dtypes = {one.dtype: str(one.dtype).removeprefix("torch.") for one in tensors}
    strided = [one for one in tensors if one.layout == torch.strided]
    real = [one for one in strided if dtypes[one.dtype] in HANDED_SIZES]
    handed = [one for one in real if one.requires_grad] or real[:1]
    return tuple(f"{'x'.join(map(str, one.shape)) or '1'} {dtypes[one.dtype]}" for one in handed)


@dataclass(slots=True)
class _UnitSeen:
    """The storages that one unit of a forward met, most by their identity.

    packed   of all that it saves, in order
    held     of what it saves: by others, when the unit ends
    gone     of what it saves: no longer, when the unit ends
    staying  places of inputs that others hold two units later
    awaited  of what it saves: by autograd, when the forward has ended
    gets     its inputs from the unit before, described
    """

    inputs: list[TrackedStorage] = field(default_factory=list[TrackedStorage])
    saved: dict[int, TrackedStorage] = field(default_factory=dict[int, TrackedStorage])
    packed: list[int] = field(default_factory=list[int])
    held: set[int] = field(default_factory=set[int])
    gone: set[int] = field(default_factory=set[int])
    staying: set[int] = field(default_factory=set[int])
    outputs: set[int] = field(default_factory=set[int])
    awaited: set[int] = field(default_factory=set[int])
    gets: tuple[str, ...] = ()

    @property
    def keys(self) -> list[int]:
        """Its inputs' storages, by place."""
        return [one.key for one in self.inputs]

    def look_at_inputs(self) -> None:
        self.staying = {place for place, one in enumerate(self.inputs) if one.held_elsewhere()}


class _ForwardSeen:
    """One forward of a model, with storages followed from unit to unit."""

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module | None]) -> None:
        self._model, self._modules = model, modules
        self.units = [_UnitSeen() for _ in modules]
        self._last, self._current = len(modules) - 1, 0
        self._storages = TrackedStorages()
        self._parameters = identities(model.parameters())
        self._shared = {*self._parameters}  # with sparse tensors passed between units
        self._flowing: set[int] = set()  # units' inputs and outputs with gradients
        self._loss = _LossSeen()
        self._watch = SlotWatch(self._on_slot, self._on_leave, last=lambda: self._loss)
        self._readers: dict[int, set[int]] = defaultdict(set)
        self._given_to: dict[int, set[int]] = defaultdict(set)
        self._makers: dict[int, int] = {}

    def run(self, batch: Batch, form: Form, *, kept: Set[int], may_skip: bool) -> None:
        with watched(self._model, self._modules, form, self._watch, kept=kept, may_skip=may_skip):
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
                loss = loss_of(call_model(self._model, batch))
            for unit in self.units:
                unit.awaited = {key for key, one in unit.saved.items() if one.awaited}
            del loss
        for number, unit in enumerate(self.units):
            for key in unit.keys:
                self._given_to[key].add(number)
            for key in (*unit.saved, *unit.keys):
                self._readers[key].add(number)
            for key in unit.outputs & self._flowing:
                self._makers.setdefault(key, number)

    def _on_slot(self, slot: int, tensors: Sequence[torch.Tensor]) -> None:
        self._current = min(slot, self._last)
        if slot <= self._last:
            unit = self.units[slot]
            unit.inputs.extend(map(self._storages.of, tensors))
            if slot and tensors:
                unit.gets = _handed(tensors)
            self._shared.update(identities(t for t in tensors if t.layout != torch.strided))
            self._note(tensors)
        if 0 < slot <= self._last + 1:
            ended = self.units[slot - 1]
            ended.held = {key for key, one in ended.saved.items() if one.held_elsewhere()}
            ended.gone = {key for key, one in ended.saved.items() if not one.awaited}
        if 1 < slot <= self._last + 1:
            self.units[slot - 2].look_at_inputs()

    def _on_leave(self, tensors: Sequence[torch.Tensor]) -> None:
        self.units[self._current].outputs.update(identities(tensors))
        if self._current < self._last:
            self.units[self._current + 1].gets = _handed(tensors)
        self._note(tensors)

    def _note(self, tensors: Sequence[torch.Tensor]) -> None:
        self._flowing.update(self._storages.of(one).key for one in tensors if one.requires_grad)

    def _pack(self, tensor: torch.Tensor) -> Packed:
        if self._current == self._last and self._last:
            # The last block's input: no unit begins two units later.
            self.units[self._last - 1].look_at_inputs()
        one, unit = self._storages.of(tensor), self.units[self._current]
        unit.packed.append(one.key)
        if tensor.layout == torch.strided:
            unit.saved.setdefault(one.key, one)
        return one.pack(tensor)

    def shared_inputs(self, batch: Batch) -> list[tuple[int, ...]]:
        """Bytes of inputs that others hold and none saves, with each one's first unit."""
        lasting = [tensor for held in held_tensors(self._model).values() for tensor in held]
        states = [*self._model.parameters(), *self._model.buffers()]
        known = identities([*states, *tensors_in(batch), *lasting])
        known.update(key for unit in self.units for key in unit.packed)
        found: list[tuple[int, ...]] = []
        for number, unit in enumerate(self.units):
            own: list[int] = []
            for place, one in enumerate(unit.inputs):
                stays = place in unit.staying and number < self._last - 1
                if one.key not in known and (stays or len(self._given_to[one.key]) > 1):
                    known.add(one.key)
                    own.append(one.num_bytes)
            found.append(tuple(own))
        return found

    def unit_bytes(
        self, number: int, own_inputs: Set[int] | None, shared_inputs: tuple[int, ...]
    ) -> SavedBytes:
        unit, module, keys = self.units[number], self._modules[number], self.units[number].keys
        may_be_own = set(range(len(keys))) - unit.staying if own_inputs is None else own_inputs
        own = tuple(
            place
            for place, key in enumerate(keys)
            if self._readers[key] == {number} and key not in self._shared and place in may_be_own
        )
        others = {*keys, *unit.held} - {keys[place] for place in own}
        foreign = self._shared | unit.outputs | unit.gone | others
        leaving = {
            key: one.num_bytes
            for key, one in unit.saved.items()
            if key not in foreign
            and self._readers[key] == {number}
            and one.num_bytes >= MIN_SWAP_BYTES
        }
        # What the loss does not depend on ends with the forward: a swap would take it twice.
        if module is None or not leaving.keys() <= unit.awaited:
            leaving = {}
        # The units before the one before it, of whose results with gradients it reads any. The last
        # unit reads what the model's code has a name for two units later, which may be read until
        # the end. (Most have one for the first block's input, and read it no more.)
        read = {key for key in self._makers if number in self._readers[key]}
        for other in self.units[2:] if number == self._last else ():
            read.update(other.keys[place] for place in other.staying)
        makers = {self._makers[key] for key in read & self._makers.keys()}
        # Whether it hands what has gradients beyond the next unit, or gets such: beyond the unit
        # that made it, which may save it, and the one after that.
        linked = len(self._flowing & (unit.outputs - set(keys))) > 1
        for place, key in enumerate(keys):
            beyond = len(self._readers[key] - {number - 1}) > 1
            stays = place in unit.staying and number > 1
            linked = linked or (key in self._flowing and (beyond or stays))
        sizes = list(leaving.values())
        before = self.units[number - 1].saved if number else {}
        return SavedBytes(
            pieces=tuple(sum(sizes[place] for place in group) for group in grouped(sizes)),
            leaving={place for place, key in enumerate(unit.packed) if key in leaving},
            input_leaves=not leaving.keys().isdisjoint(keys),
            own_inputs=own,
            awaited=bool(unit.awaited) or not unit.saved,
            reads=tuple(sorted(maker for maker in makers if maker < number - 1)),
            gets=unit.gets,
            shared_inputs=shared_inputs,
            linked=linked,
            differentiated=number in self._watch.differentiated,
            gives=unit.outputs & self._parameters,
            ends_in_cross_entropy=number == self._last and module is None and self._loss.seen,
            handed_bytes=sum(
                before[key].num_bytes for key in set(keys) & self._flowing & before.keys()
            ),
        )


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
    """For each unit, the storages that a swap could evict when activations have `form`.

    `own_inputs`, if given, are the units' own inputs in another form, and the only ones here: the
    unit before may take that form, and hold its outputs.

    A storage is a unit's own if no other unit saves it or has it as input, nothing else holds it,
    it is not a parameter, and the unit does not pass it on. Other holders are detected as in the
    runtime: at the unit's end; of an input, two units later. Storages released by autograd by then
    (a detached graph) do not count. The first block's input often stays, named by a frame of the
    model's forward: swapping it would free nothing before the forward returns. Parts swap nothing.
    """
    seen = _ForwardSeen(model, modules)
    seen.run(batch, form, kept=kept, may_skip=may_skip)
    return [
        seen.unit_bytes(number, None if own_inputs is None else set(own_inputs[number]), shared)
        for number, shared in enumerate(seen.shared_inputs(batch))
    ]
