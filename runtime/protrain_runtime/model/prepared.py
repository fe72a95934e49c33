"""A prepared model's plan, its view for other code, and `restore`.

A copy or a pickle is a plain model with the current values: modules are compared before and after
`prepare`, and additions of the plan (hooks, code, threads behind them) are left out. State dicts
show and accept the real values of offloaded parameters.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import local
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import overridden
from protrain_runtime.devices.thread_guard import ThreadGuard, ThreadGuardError
from protrain_runtime.engine.engine import Engine
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.ranks.group import CHECKPOINT_LIMIT_S, Ranks
from protrain_runtime.states.chunks import Chunk, Slice, read_values, write_values
from protrain_runtime.states.stand_ins import come_back, let_list
from protrain_runtime.states.unchanged_model import UnchangedModel
from protrain_runtime.states.values import unpacked_values

ATTRIBUTE = "_protrain_prepared"
"""The attribute of a model for its `Prepared`: both are freed together."""

Undo = list[Callable[[], object]]
"""Steps that detach a plan from a model, run last to first."""


@dataclass(slots=True)
class Prepared:
    """The parts that `prepare` attached to a model; stores are empty until `has_values`."""

    engine: Engine | None
    chunks: Sequence[Chunk]
    optimizer: PlannedOptimizer
    undo: Undo
    plan: Plan
    below: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ranks: Ranks | None = None
    unchanged: UnchangedModel | None = None
    has_values: bool = True
    plain: Callable[[], tuple[nn.Module, torch.optim.Optimizer] | None] = lambda: None  # a copy


def prepared_of(model: nn.Module) -> Prepared | None:
    """The `Prepared` of a model; None without a plan."""
    prepared: Prepared | None = model.__dict__.get(ATTRIBUTE)
    return prepared


def together(model: nn.Module, what: str) -> AbstractContextManager[None]:
    """A collective call of all ranks of the model: it succeeds on all or raises on all."""
    prepared = prepared_of(model)
    if prepared is None or prepared.ranks is None:
        return nullcontext()
    return prepared.ranks.meeting.reporting(what, limit_s=CHECKPOINT_LIMIT_S)


def meet(ranks: Ranks, what: str, mine: Any = None) -> list[Any]:
    """Inside `together`: wait for all ranks; an earlier failure raises here.

    This rank's reads have ended: others may write. Returns each rank's `mine`.
    """
    devices.synchronize(ranks.device)
    return ranks.meeting.meet(what, mine, limit_s=CHECKPOINT_LIMIT_S)


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a model; None without a plan, or if the plan keeps everything."""
    prepared = prepared_of(model)
    return prepared.engine if prepared else None


def thread_guard_of(model: nn.Module) -> ThreadGuard | None:
    """The guard of a model's threads; None without an engine."""
    engine = engine_of(model)
    return engine.thread_guard if engine else None


def below_device(model: nn.Module) -> tuple[int, int]:
    """Bytes in host memory and on disk that a model's plan takes."""
    prepared = prepared_of(model)
    return prepared.below() if prepared else (0, 0)


def parameter_values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a planned or plain model by name; offloaded ones one at a time."""
    prepared = prepared_of(model)
    if prepared and prepared.engine:
        prepared.engine.settle("parameters were read")
    offloaded = offloaded_parameters(prepared)
    for name, parameter in model.named_parameters():
        if name in offloaded:
            yield name, read_values(*offloaded[name])
        else:
            yield name, parameter.detach()


def restore(model: nn.Module) -> nn.Module:
    """Return the plain model with its current parameters; its optimizer continues plainly."""
    prepared = prepared_of(model)
    if prepared is None:
        return model
    with together(model, "restore()"):
        if prepared.engine is not None:
            prepared.engine.settle("restore() was called", outside=True)
    return restore_as_is(model)


def restore_as_is(model: nn.Module) -> nn.Module:
    """`restore` for steps that change no parameter: also after an interrupted update."""
    prepared: Prepared = model.__dict__[ATTRIBUTE]
    if prepared.engine is not None:
        prepared.engine.end_updates()
    for chunk in prepared.chunks if prepared.engine is not None else ():
        chunk.forget_dropped()
        for part in chunk.slices:
            if part.name in chunk.offloaded_gradients:  # they wait below the device
                part.parameter.grad = chunk.offloaded_gradients[part.name].whole()
        chunk.drop_consumed()
        chunk.clear_gradients()
    del model.__dict__[ATTRIBUTE]
    try:
        prepared.optimizer.give_back()
    finally:
        undo_all(prepared.undo)
    return model


def undo_all(undo: Undo) -> None:
    """Run all steps, last first, even if one raises."""
    with ExitStack() as stack:
        for each in undo:
            stack.callback(each)
        undo.clear()


_REDUCE = "__reduce_ex__"
_OWN = ("_parameters", "_buffers", "_modules")
_ABSENT = object()

Look = Mapping[nn.Module, Mapping[str, object]]
"""By module: its attributes, and the keys of its hook tables."""


def look_at(model: nn.Module) -> Look:
    """Snapshot the modules' attributes, to find later additions."""
    return {
        module: {
            name: frozenset(value) if _is_table(name, value) else value
            for name, value in module.__dict__.items()
        }
        for module in model.modules()
    }


def _is_table(name: str, value: object) -> bool:
    return name.startswith("_") and name not in _OWN and isinstance(value, dict)


def let_copy(before: Look) -> Callable[[], None]:
    """Make copies of the modules plain; returns the undo."""
    stack = ExitStack()
    for module, state in before.items():
        hooks: dict[str, frozenset[object]] = {}  # added by the plan, by table
        attributes: dict[str, object] = {}  # previous values of attributes that the plan replaced
        for name, value in module.__dict__.items():
            known = state.get(name, _ABSENT)
            if _is_table(name, value) and isinstance(known, frozenset):
                if new := frozenset(value) - known:
                    hooks[name] = new
            elif value is not known and name not in _OWN:
                attributes[name] = known
        if hooks or attributes:
            plainly = partial(_reduce_plainly, module, hooks, attributes)
            stack.callback(overridden(module, _REDUCE, plainly))
    return stack.close


def _reduce_plainly(
    module: nn.Module,
    hooks: Mapping[str, frozenset[object]],
    attributes: dict[str, object],
    protocol: Any,
) -> Any:
    """Reduce the module without the plan, by its class, for `copy` and `pickle`."""
    state = module.__dict__
    whole = dict(state)
    plain = {name: value for name, value in whole.items() if name != _REDUCE} | attributes
    plain = {name: value for name, value in plain.items() if value is not _ABSENT}
    for name, keys in hooks.items():
        table = plain[name]
        plain[name] = type(table)((k, v) for k, v in table.items() if k not in keys)
    state.clear()
    state.update(plain)
    try:
        reduced = type(module).__reduce_ex__(module, protocol)
    finally:
        state.clear()
        state.update(whole)
    if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is state:
        reduced = (*reduced[:2], plain, *reduced[3:])
    return reduced


@contextmanager
def writing_together(chunks: Sequence[Chunk], what: str) -> Iterator[None]:
    """Ranks write shared parameters inside, after all have read them, and read after all wrote."""
    shared = (chunk.sharding for chunk in chunks if chunk.sharding is not None)
    ranks = next((each.ranks for each in shared if each.common is not None), None)
    if ranks is None:
        yield
        return
    with ranks.meeting.reporting(what):
        meet(ranks, what)
        yield


def offloaded_parameters(prepared: "Prepared | None") -> dict[str, tuple[Chunk, Slice]]:
    """The places of offloaded parameters, by name."""
    return {
        part.name: (chunk, part)
        for chunk in (prepared.chunks if prepared else ())
        if chunk.store is not None
        for part in chunk.slices
    }


@dataclass(frozen=True, slots=True)
class DrawnValues:
    """A new model's values by parameter, on their way to their tiers; dropped after use."""

    values: dict[str, torch.Tensor]

    def facts(self) -> str:
        """The same text on all ranks: all take rank 0's values."""
        return "drawn"

    def fill(self, model: nn.Module, prepared: Prepared) -> None:
        """Copy every value to its place; ranks get rank 0's."""
        ranks, offloaded = prepared.ranks, offloaded_parameters(prepared)
        packed = {name: unpacked for _, name, unpacked in unpacked_values(model, offloaded)}
        for name, parameter in model.named_parameters():
            if name not in self.values:
                continue
            values = self.values.pop(name).to(parameter.device)
            if ranks is not None:
                ranks.broadcast([values])
            if name in packed and values.is_floating_point():
                packed[name].pack(values.contiguous())
            elif name in offloaded:
                write_values(*offloaded[name], values)
            else:
                parameter.data.copy_(values)


def bring_back(chunk: Chunk) -> None:
    """Give an offloaded chunk's parameters memory of their own again."""
    if not chunk.hollow:
        return
    chunk.viewing.clear()
    for part in chunk.slices:
        if part.group in chunk.hollow:
            come_back(part.parameter)
            part.parameter.data = read_values(chunk, part, device=part.parameter.device)
    chunk.hollow.clear()


@dataclass(eq=False)
class _Listing(local):
    """Real values of offloaded parameters in state dicts, of the model or of a module in it.

    They are copies in host memory; tied parameters share one within a state dict. Each thread has
    its own listing: if another thread trains meanwhile, the state dict is refused.
    """

    model: ref[nn.Module]
    engine: Engine
    offloaded: Mapping[nn.Parameter, tuple[Chunk, Slice]]
    # The model of the current state dict, and the steps begun by then.
    _top: ref[nn.Module] | None = field(default=None, init=False)
    _num_steps: int = field(default=0, init=False)
    _target: ref[Any] | None = field(default=None, init=False)  # the current state dict
    _read: WeakValueDictionary[str, torch.Tensor] = field(
        default_factory=WeakValueDictionary[str, torch.Tensor], init=False
    )

    def before(self, module: nn.Module, *_: object) -> None:
        if self._top is None or module is self.model():
            self._top, self._num_steps = ref(module), self.engine.thread_guard.num_steps
        self.engine.settle("state_dict() was called")
        for parameter in module._parameters.values():
            if parameter is not None:
                let_list(parameter)

    def after(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        if self._target is None or self._target() is not state:
            self._target = ref(state) if isinstance(state, OrderedDict) else None
            self._read.clear()
        for own, parameter in module._parameters.items():
            found = self.offloaded.get(parameter) if parameter is not None else None
            if found is None or prefix + own not in state:
                continue
            name = found[1].name
            value = self._read.get(name)
            if value is None:
                value = self._read[name] = read_values(*found)
            state[prefix + own] = value
        if self.engine.thread_guard.num_steps != self._num_steps:
            raise ThreadGuardError(
                "another thread trained while state_dict() was called: some values are of before"
                " its step",
                fix="call it between the steps of the thread that trains",
            )
        if self._top is not None and module is self._top():
            self._top = None


def add_state_dict_hooks(
    model: nn.Module, chunks: Sequence[Chunk], engine: Engine, undo: Undo
) -> None:
    """Make state dicts show and accept offloaded parameters' values, all at once."""
    offloaded = [chunk for chunk in chunks if chunk.store is not None]
    places = {part.parameter: (chunk, part) for chunk in offloaded for part in chunk.slices}
    listing = _Listing(ref(model), engine, places)
    loading: list[nn.Module] = []  # the outermost module whose state dict is loaded

    def placed(module: nn.Module) -> tuple[list[tuple[Chunk, Slice]], list[Chunk]]:
        found = [places[each] for each in module.parameters() if each in places]
        return found, [chunk for chunk in chunks if any(chunk is each for each, _ in found)]

    def before_load(  # type: ignore[no-untyped-def]
        module: nn.Module, _: object, __: str, metadata: Mapping[str, Any], *___: object
    ):
        if loading and module is not loading[0] and module in loading[0].modules():
            return
        engine.settle("load_state_dict() was called", outside=True)
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) replaces the parameters that the plan has placed:"
                " load without it, or before prepare()"
            )
        loading[:] = [module]
        for chunk in placed(module)[1]:
            bring_back(chunk)

    def after_load(module: nn.Module, _: object) -> None:
        if loading != [module]:
            return
        loading.clear()
        found, below = placed(module)
        with writing_together(below, "load_state_dict()"):
            for chunk, part in found:
                write_values(chunk, part, part.parameter)
        for chunk in below:
            chunk.unbind(chunk.every_group)

    handles: list[RemovableHandle] = []
    for module in model.modules():
        if module is model or not places.keys().isdisjoint(module._parameters.values()):
            handles.append(module.register_state_dict_pre_hook(listing.before))
            # PyTorch sets an attribute on the hook, which bound methods refuse.
            handles.append(module.register_state_dict_post_hook(partial(listing.after)))
        if module is model or any(each in places for each in module.parameters()):
            handles.append(module.register_load_state_dict_pre_hook(before_load))
            handles.append(module.register_load_state_dict_post_hook(after_load))
    undo.extend(handle.remove for handle in handles)
