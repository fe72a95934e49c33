"""One forward, written down: which modules ran when, and which parameters each operator read."""

import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from protrain_plan.models.batches import Batch, call_model
from protrain_plan.profiling import whereabouts
from protrain_runtime import devices
from protrain_runtime.compiled import uncompiled
from protrain_runtime.parameters import extent
from protrain_runtime.replaying import written_arguments
from protrain_runtime.trees import tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One run of a module's forward, from `begin` to `end` on the execution's clock."""

    path: str
    module: nn.Module
    begin: int
    end: int

    def holds(self, other: "Call") -> bool:
        """Whether `other` ran inside this call."""
        return self.begin < other.begin and other.end < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator: the parameters whose storage it was given, and whether it does any work.

    `written` are those of them that it wrote to. `signature` is its name with its arguments:
    shapes, strides and dtypes of tensors, and numbers.
    """

    at: int
    parameters: tuple[str, ...]
    written: tuple[str, ...]
    trivial: bool  # a view, or bookkeeping: computes nothing and saves nothing
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The calls in order of their beginnings, and the operations in order."""

    calls: tuple[Call, ...]
    operations: tuple[Operation, ...]


Attributes = dict[nn.Module, dict[str, object]]
"""By module and name: plain values, which are no part of what it computes with but may steer it."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a forward begins with besides its batch: a seed of all generators, and attributes."""

    seed: int
    attributes: Attributes


def plain_attributes(model: nn.Module) -> Attributes:
    """The numbers, truths and texts that modules have as attributes, such as counters of steps."""
    return {
        module: {
            name: value
            for name, value in module.__dict__.items()
            if isinstance(value, bool | int | float | str) or value is None
        }
        for module in model.modules()
    }


def restore_attributes(attributes: Attributes) -> None:
    """Give modules these attributes again, but those that they have in another kind now."""
    for module, values in attributes.items():
        for name, value in values.items():
            if name in module.__dict__ and type(module.__dict__[name]) is type(value):
                module.__dict__[name] = value


@contextmanager
def repeating(model: nn.Module, start: Start) -> Iterator[None]:
    """Every forward inside begins from `start`: what it does by chance or by count is the same."""

    def begin(*_: object) -> None:
        torch.manual_seed(start.seed)
        random.seed(start.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(start.seed)
        restore_attributes(start.attributes)

    handle = model.register_forward_pre_hook(begin)
    try:
        yield
    finally:
        handle.remove()


def record_execution(model: nn.Module, batch: Batch, start: Start | None = None) -> Execution:
    """Run one forward in train mode with gradients enabled, and write down what happened.

    Compiled modules run uncompiled, so that all of theirs is seen. Parameters, gradients, buffers,
    train flags, hooks and the random state are afterwards what they were; the autograd graph is
    freed. Fake tensors work too.
    """
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        if start is not None:
            stack.enter_context(repeating(model, start))
        stack.enter_context(uncompiled())
        stack.enter_context(recorder.hooks())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder)
        call_model(model, batch)
    return Execution(
        calls=tuple(sorted(recorder.calls, key=lambda call: call.begin)),
        operations=tuple(recorder.operations),
    )


# Operators that compute nothing although their schema names no alias.
_BOOKKEEPING = frozenset(
    ("aten::detach", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::empty")
)


class _Recorder(TorchDispatchMode):
    """Sees every operator below autograd, functional ones on bare parameters included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.operations: list[Operation] = []
        self._paths = {module: path for path, module in model.named_modules()}
        self._clock = 0
        self._begun: dict[nn.Module, list[int]] = defaultdict(list)
        self._inside: list[str] = []  # the paths of the modules that run
        # Parameters by the storage they live in; several may share a flat one. An identity, not
        # an address: fake tensors have none.
        self._owners: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            first, past = extent(parameter)
            self._owners[parameter.untyped_storage()._cdata].append((first, past, name))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch every module of the model while inside."""
        with ExitStack() as stack:
            for module in self._paths:
                before = module.register_forward_pre_hook(
                    self._begin, prepend=True, with_kwargs=True
                )
                stack.callback(before.remove)
                after = module.register_forward_hook(self._end, with_kwargs=True)
                stack.callback(after.remove)
            yield

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _begin(self, module: nn.Module, *_: object) -> None:
        self._begun[module].append(self._tick())
        self._inside.append(self._paths[module])
        whereabouts.in_module(self._inside[-1])

    def _end(self, module: nn.Module, *_: object) -> None:
        self._inside.pop()
        whereabouts.in_module(self._inside[-1] if self._inside else "")
        self.calls.append(
            Call(
                path=self._paths[module],
                module=module,
                begin=self._begun[module].pop(),
                end=self._tick(),
            )
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func.namespace == "prim":  # questions that fake tensors ask about themselves
            return func(*args, **(kwargs or {}))
        used = dict.fromkeys(
            name for tensor in tensors_in((args, kwargs)) for name in self._parameters_in(tensor)
        )
        trivial = func.is_view or func._schema.name in _BOOKKEEPING
        self.operations.append(
            Operation(
                at=self._tick(),
                parameters=tuple(used),
                written=tuple(self._written(func, args, kwargs or {}) if used else ()),
                trivial=trivial,
                signature=_signature(func, args, kwargs),
            )
        )
        return func(*args, **(kwargs or {}))

    def _written(
        self, func: Any, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Iterator[str]:
        if func._schema.is_mutable:
            for tensor in written_arguments(func, args, kwargs):
                yield from self._parameters_in(tensor)

    def _parameters_in(self, tensor: Tensor) -> Iterator[str]:
        if tensor.layout is not torch.strided:
            return
        owners = self._owners.get(tensor.untyped_storage()._cdata, ())
        first, past = extent(tensor) if len(owners) > 1 else (0, 0)
        for owner_first, owner_past, name in owners:
            if len(owners) == 1 or (first < owner_past and owner_first < past):
                yield name


def _signature(func: Any, args: object, kwargs: object) -> str:
    described = tree_map_only(
        Tensor, lambda t: (t.dtype, tuple(t.shape), _strides(t)), (args, kwargs or {})
    )
    return f"{func} {described}"


def _strides(tensor: Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else tensor.layout


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Train mode inside; train flags, buffers and random states as before afterwards.

    Random states are those of PyTorch (of the model's devices too), of Python and, where it is
    loaded, of NumPy.
    """
    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, dict(module._buffers), [(b, b.detach().clone()) for b in _own_buffers(module)])
        for module in model.modules()
    ]
    with torch.random.fork_rng(devices=[]), _other_random_states(), _of_accelerators(model):
        model.train()
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for module, named, contents in buffers:
                    for buffer, content in contents:
                        buffer.copy_(content)
                    module._buffers.clear()
                    module._buffers.update(named)


def _own_buffers(module: nn.Module) -> Iterator[Tensor]:
    return (buffer for buffer in module._buffers.values() if buffer is not None)


@contextmanager
def _of_accelerators(model: nn.Module) -> Iterator[None]:
    there = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    states = {
        device: devices.random_state(device)
        for device in there
        if device.type != "meta" and not devices.on_host(device)
    }
    try:
        yield
    finally:
        for device, state in states.items():
            devices.set_random_state(device, state)


@contextmanager
def _other_random_states() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
