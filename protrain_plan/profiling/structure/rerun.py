"""Blocks whose forward cannot run a second time with the same result, found by running it twice.

Recomputation runs a block's forward once more in backward, on the same inputs and with the same
random numbers. What else a forward reads or writes is no part of that: buffers and attributes that
it changes (`snapshot`), arguments that it writes into (`writing_arguments`), inputs that it or
later code writes to, closures, globals, the clock.
"""

import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from protrain_plan.models.batches import Batch, call_model
from protrain_plan.profiling.structure.discovery import FoundUnit
from protrain_runtime.activations import own_checkpoints
from protrain_runtime.activations.compiled import code_of, replace_code, watch_calls
from protrain_runtime.activations.recompute import (
    Draws,
    other_buffers,
    unchanged,
    with_running_statistics,
    written_buffers,
)
from protrain_runtime.activations.trees import Rebuild, is_value, leaves_in, taken_apart, tensors_in
from protrain_runtime.activations.twice import as_now
from protrain_runtime.contract.errors import ProtrainError

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"forward", "dynamo_ctx"}
"""Names that are no attributes of the user's: a planned or watched module has its forward there, a
compiled one its compiler, which notes that it has run."""

_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)
_DEEPEST = 8


@dataclass(frozen=True)
class _Held:
    """An object's identity, of a tensor with its version; held so that no other takes it."""

    identity: int
    value: object = field(compare=False)
    version: int = 0


def _attributes(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, object]]:
    """The modules' own attributes by path; modules in modules are no attributes of theirs."""
    for path, inner in modules:
        for name, value in inner.__dict__.items():
            if name not in _OF_EVERY_MODULE:
                yield f"{path}.{name}".removeprefix("."), value


def snapshot(module: nn.Module) -> dict[str, object]:
    """Every attribute and parameter by path, in a form that `==` compares.

    Tensors by identity and version, numbers and texts by value, containers and plain objects by
    what they hold.
    """
    found = _described(module.named_modules())
    return found | {path: _tensor(value) for path, value in module.named_parameters()}


def _described(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, object]:
    walk = _Walk()
    return {path: walk.described(value) for path, value in _attributes(modules)}


def held_tensors(module: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The tensors in every attribute that holds any but parameters and buffers, by its path."""
    known = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    found: dict[str, list[torch.Tensor]] = {}
    for path, value in _attributes(module.named_modules()):
        walk = _Walk()
        walk.described(value)
        for tensor in walk.tensors:
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in known:
                found.setdefault(path, []).append(tensor)
    return found


def aliases(model: nn.Module) -> set[int]:
    """The storages of tensors that attributes hold, but for parameters themselves."""
    walk = _Walk()
    for _, value in _attributes(model.named_modules()):
        walk.described(value)
    parameters = {id(parameter) for parameter in model.parameters()}
    return {
        tensor.untyped_storage()._cdata
        for tensor in (*walk.tensors, *model.buffers())
        if tensor.layout is torch.strided and id(tensor) not in parameters
    }


def _tensor(tensor: torch.Tensor) -> _Held:
    return _Held(id(tensor), tensor, 0 if tensor.is_inference() else tensor._version)


@dataclass(frozen=True, slots=True)
class _Walk:
    """A walk through values: each object is described once, and the tensors met are `tensors`."""

    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    _objects: dict[int, object] = field(default_factory=dict[int, object])

    def described(self, value: object, depth: int = _DEEPEST) -> object:
        """The value in a form that `==` compares; modules hold their own."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return _tensor(value)
        if isinstance(value, _VALUES):
            return type(value), value
        if isinstance(value, _OPAQUE) or depth == 0:
            return _Held(id(value), value)
        if id(value) not in self._objects:
            itself = self._objects[id(value)] = _Held(id(value), value)  # for what holds itself
            held: Any = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", ())
            inside = (*held.keys(), *held.values()) if isinstance(held, Mapping) else held
            described = [self.described(one, depth - 1) for one in inside]
            self._objects[id(value)] = itself, described
        return self._objects[id(value)]


@dataclass(frozen=True, slots=True)
class Written:
    """The blocks, by number, that wrote into their arguments.

    anything  wrote at all
    lasting   what they wrote would be seen if they ran again on the same arguments
    tensors   handed tensors on by writing them there, besides those that they returned
    """

    anything: set[int] = field(default_factory=set[int])
    lasting: set[int] = field(default_factory=set[int])
    tensors: set[int] = field(default_factory=set[int])


@contextmanager
def writing_arguments(modules: Sequence[nn.Module | None]) -> Iterator[Written]:
    """The blocks that run while inside; None is a part."""
    found = Written()
    # The arguments, their tensors, what makes a second run's of them, and the contents of both.
    before: dict[int, tuple[Any, list[Any], Rebuild, list[object], list[object]]] = {}

    def begin(unit: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = (args, kwargs)
        tensors, again = taken_apart(given)
        before[unit] = given, tensors, again, _contents(given), _contents(again(tensors))

    def end(unit: int, _: nn.Module, __: Any, ___: Any, output: Any) -> None:
        # Not the arguments here: of a module with backward hooks those are views.
        given, tensors, again, contents, repeated = before.pop(unit)
        if _contents(given) == contents:
            return
        found.anything.add(unit)
        if _contents(again(tensors)) != repeated:
            found.lasting.add(unit)
        known = {id(tensor) for tensor in (*tensors, *tensors_in(output))}
        if any(id(tensor) not in known for tensor in tensors_in(given)):
            found.tensors.add(unit)

    with ExitStack() as stack:
        for unit, module in enumerate(modules):
            if module is not None:
                stack.callback(watch_calls(module, partial(begin, unit), partial(end, unit)))
        yield found


def _contents(tree: object) -> list[object]:
    """The leaves of a tree: plain values, and the identities of everything else."""
    return [(type(leaf), leaf) if is_value(leaf) else id(leaf) for leaf in leaves_in(tree)]


Versions = list[tuple[torch.Tensor, int]]
_NONE = object()  # of an attribute that is not there


def run_once(model: nn.Module, found: Sequence[FoundUnit], batch: Batch) -> dict[int, str]:
    """The blocks that cannot run twice, each with the reason, from one forward of the model.

    They run again when the model's forward has ended, as they do in backward: what stood around
    their calls is gone then. Fake tensors have no values: what a second run would give is not
    looked at then. ProtrainError where the model itself reruns such a block (`own_checkpoints`).
    """
    modules = [unit.module for unit in found]
    inside = {inner for module in modules if module is not None for inner in module.modules()}
    outside = [(path, own) for path, own in model.named_modules() if own not in inside]
    reasons: dict[int, str] = {}
    inputs: dict[int, Versions] = {}
    checkpointed: dict[int, str] = {}  # by the model itself: what a second run would change
    at_end: list[Callable[[], None]] = []

    @own_checkpoints.replaced(lambda _: False)  # those in blocks stay the model's
    def twice(unit: int, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> object:
        """Run a block's forward, and have it run once more at the end."""
        given = tensors_in((args, kwargs))
        _refuse_around(type(module).__name__, given)
        before = inputs[unit] = [(t, t._version) for t in given if not t.is_inference()]
        buffers, held, others = other_buffers(module), snapshot(module), _described(outside)
        draws = Draws([*module.modules()])
        tensors, again = taken_apart((args, kwargs))  # what the first run writes into is not seen
        where = {p.device for p in module.parameters() if not p.is_meta}
        as_then = as_now(*(torch.empty(0, device=device) for device in where))
        asking = [parameter.requires_grad for parameter in module.parameters()]
        kinds = own_checkpoints.inside()
        reads = _Reads(chain(*held_tensors(module).values()) if kinds else ())
        with draws.first(), reads if reads.tensors else nullcontext():
            result: object = forward(*args, **kwargs)
        names = written_buffers(buffers, other_buffers(module))
        now, others_now = snapshot(module), _described(outside)
        changed = [key for key in {**held, **now} if held.get(key, _NONE) != now.get(key, _NONE)]
        if why := _first_run(names, changed, others_now != others, before):
            reasons[unit] = why
        with_grad = torch.is_grad_enabled()
        ones = [tensor.detach().clone() for tensor in tensors_in(result)]  # may be written to
        if kinds:
            # A second run would put the same tensors there, unless it reads what the first one has
            # put there; but a reentrant one's have no graph.
            after = (now.get(key) for key in changed)
            same = not (names or reads.any) and all(
                isinstance(one, _Held) and isinstance(one.value, torch.Tensor) for one in after
            )
            elsewhere = {name for other in found for name in other.also_uses}
            shared = elsewhere.intersection((*found[unit].parameters, *found[unit].also_uses))

        @own_checkpoints.replaced(lambda _: False)
        def end() -> None:
            fake = any(isinstance(tensor, FakeTensor) for tensor in module.parameters())
            if unit not in reasons and not fake and not _written(before):
                second: object = None
                with (
                    suppress(Exception),  # any code of the model runs here
                    torch.set_grad_enabled(with_grad),
                    as_then(),
                    draws.again(),
                    unchanged(with_running_statistics(module)),
                ):
                    own_args, own_kwargs = again(tensors)
                    second = forward(*own_args, **own_kwargs)
                others = tensors_in(second)
                if len(ones) != len(others) or not all(map(_equal, ones, others)):
                    reasons[unit] = (
                        "its forward gave another result when it ran again on the same inputs"
                    )
                elif _written(before):
                    reasons[unit] = "its forward writes an input in place when it runs again"
                elif asking != [parameter.requires_grad for parameter in module.parameters()]:
                    reasons[unit] = "requires_grad of its parameters changes after it has run"
            if kinds:
                why = "it draws from a generator of its own" if draws.any else reasons.get(unit, "")
                checkpointed[unit] = "" if changed and same and not any(kinds) else why
                if any(kinds) and shared:
                    checkpointed[unit] = own_checkpoints.OTHER_ORDER.format(min(shared))

        at_end.append(end)
        return result

    with ExitStack() as stack:
        stack.enter_context(own_checkpoints.replaced(lambda _: True))
        for unit, module in enumerate(modules):
            if module is not None:
                stack.callback(replace_code(module, partial(twice, unit, module, code_of(module))))
        call_model(model, batch)
        for end in at_end:
            end()
    for unit, versions in inputs.items():
        if _written(versions):
            reasons.setdefault(unit, "an input of its forward is written to after it has run")
    for unit, why in checkpointed.items():
        if why:
            own_checkpoints.refuse(type(modules[unit]).__name__, why)
    return reasons


def _first_run(
    buffers: Sequence[str], attributes: Sequence[object], around: bool, inputs: Versions
) -> str:
    """The reason in what a forward has written: its buffers, attributes, modules around, inputs."""
    if buffers:
        return f"its forward writes its buffer {buffers[0]!r}"
    if attributes:
        return f"its forward changes its attribute {attributes[0]!r}"
    if around:
        return "its forward changes an attribute of a module around it"
    return "its forward writes an input in place" if _written(inputs) else ""


def _refuse_around(kind: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a block whose forward is transformed, or saves what hooks around it change."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise ProtrainError(
            f"the model calls {kind} inside a transform of torch.func, such as vmap: nothing can be"
            " saved or moved there",
            fix="call blocks on whole batches, outside of transforms",
        )
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    first = next((t.detach() for t in tensors if t.is_floating_point()), None)
    if hooks is not None and first is not None and not isinstance(first, FakeTensor):
        pack, unpack = hooks
        if not _equal(unpack(pack(first)), first):
            raise ProtrainError(
                f"saved-tensor hooks around {kind} change what it saves: a plan has hooks of its"
                " own there",
                fix="have these hooks in the block, or none",
            )


class _Reads(TorchFunctionMode):
    """Sees whether any of these tensors is an argument of a function."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = list(tensors)
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        self.any |= any(id(tensor) in given for tensor in self.tensors)
        return func(*args, **(kwargs or {}))


def _written(versions: Versions) -> bool:
    return any(tensor._version != version for tensor, version in versions)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with torch.no_grad():
        return bool(torch.all((one == other) | ((one != one) & (other != other))))
