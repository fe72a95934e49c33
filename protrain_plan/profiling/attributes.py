"""What a model's modules hold in plain attributes, containers and objects of their own.

A snapshot tells whether a forward changed any of it, and which tensors stand there between steps.
"""

import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from protrain_runtime.trees import tensors_in

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | {"forward"}
"""What is no attribute of the user's; a planned or watched module has its forward there."""

_VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)
_DEEPEST = 8


@dataclass(frozen=True, eq=False)
class _Held:
    """An object, held so that no other takes its identity; of a tensor with its version."""

    value: object
    version: int = 0

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Held) and self.value is other.value and self.version == other.version
        )

    __hash__ = None  # type: ignore[assignment]


def attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The module's own attributes and those of the modules in it, with their paths."""
    for path, inner in module.named_modules():
        for name, value in inner.__dict__.items():
            if name not in _OF_EVERY_MODULE:
                yield f"{path}.{name}".removeprefix("."), value


def snapshot(module: nn.Module) -> dict[str, object]:
    """Every attribute and parameter by path, in a form that `==` compares.

    Tensors by identity and version, numbers and texts by value, containers and plain objects by
    what they hold.
    """
    described: dict[int, object] = {}
    found = {path: _described(value, described, _DEEPEST) for path, value in attributes(module)}
    return found | {path: _tensor(value) for path, value in module.named_parameters()}


def held_tensors(module: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The tensors in every attribute that holds any but parameters and buffers, by its path."""
    known = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    found = {path: _tensors(value) for path, value in attributes(module)}
    others = {
        path: [t for t in tensors if t.untyped_storage()._cdata not in known]
        for path, tensors in found.items()
    }
    return {path: tensors for path, tensors in others.items() if tensors}


def _tensor(tensor: torch.Tensor) -> _Held:
    return _Held(tensor, 0 if tensor.is_inference() else tensor._version)


def _described(value: object, described: dict[int, object], depth: int) -> object:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, _OPAQUE) or depth == 0:
        return _Held(value)
    if id(value) not in described:
        described[id(value)] = _Held(value)  # for what holds itself
        inside = [_described(one, described, depth - 1) for one in _inside(value)]
        described[id(value)] = _Held(value), inside
    return described[id(value)]


def _inside(value: object) -> Iterator[object]:
    """What a container or an object holds, keys before values."""
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, _SEQUENCES):
        yield from value
    elif hasattr(value, "__dict__"):
        yield from vars(value).keys()
        yield from vars(value).values()


def _tensors(value: object) -> list[torch.Tensor]:
    """The tensors that an attribute holds, however deep; modules hold their own."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    stack: list[Any] = [(value, _DEEPEST)]
    while stack:
        held, depth = stack.pop()
        if isinstance(held, torch.Tensor):
            found.append(held)
        elif not isinstance(held, (*_VALUES, *_OPAQUE)) and depth and id(held) not in seen:
            seen.add(id(held))
            stack.extend((one, depth - 1) for one in _inside(held))
    return [tensor for tensor in tensors_in(found) if tensor.layout is torch.strided]
