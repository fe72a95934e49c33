"""Tensors in what modules take and give: containers, and objects that hold tensors.

A tree is what PyTorch's pytrees know (tuples, lists, dicts, model outputs), and besides them sets,
containers of the user's classes, and objects with attributes: dataclasses, caches, contexts.
Modules, functions and classes are no part of a tree.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_NO_TREES = (
    *(*_VALUES, type, nn.Module, ModuleType, FunctionType, MethodType, BuiltinFunctionType),
    *(torch.Generator, torch.SymInt, torch.SymFloat, torch.SymBool, torch.UntypedStorage),
)

_LEAVES = (torch.Tensor, *_NO_TREES)

PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
"""The types of tensors that hold their values themselves, and of those that stand for such."""

Rebuild = Callable[[Sequence[torch.Tensor]], Any]
"""Makes a tree anew, of other tensors in the same order."""


def named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, defaults included.

    Names are those of an operator's schema, or of a function's signature. A function that PyTorch
    has in C++ has those of its ATen operator; what Python calls `input` may be `self` there.
    TypeError where the call has more arguments than there are names.
    """
    names, defaults = _parameters(func)
    if len(args) > len(names):
        raise TypeError(f"{func} takes {len(names)} arguments, got {len(args)}")
    given = defaults | dict(zip(names, args, strict=False)) | dict(kwargs)
    if "self" in names and "input" in kwargs:
        given["self"] = given.pop("input")
    return given


@cache
def _parameters(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of a function's arguments, in order, and the defaults of those that have one."""
    schema = getattr(func, "_schema", None)
    if schema is None and isinstance(func, FunctionType):
        found = inspect.signature(func).parameters
        empty = inspect.Parameter.empty
        return tuple(found), {n: p.default for n, p in found.items() if p.default is not empty}
    if schema is None:  # in C++: without a signature
        packet = getattr(torch.ops.aten, func.__name__)
        schema = getattr(packet, packet.overloads()[0])._schema
    names = tuple(argument.name for argument in schema.arguments)
    return names, {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


def written_arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    given = named(func, args, kwargs)
    return tensors_in(
        [
            given.get(argument.name)
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def tensors_in(tree: object) -> list[torch.Tensor]:
    """All tensors in a tree, in order, one as often as it stands there."""
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor)]


def leaves_in(tree: object) -> list[object]:
    """Everything in a tree that holds nothing itself, in order."""
    found: list[object] = []
    _collect(tree, found, set())
    return found


def is_value(leaf: object) -> bool:
    """Whether a leaf is a plain value: two that are equal are the same."""
    return isinstance(leaf, _VALUES)


def _collect(tree: object, found: list[object], seen: set[int]) -> None:
    if isinstance(tree, _LEAVES):
        found.append(tree)
        return
    # Most trees are arguments of an operator: PyTorch's own walk takes several times as long.
    if type(tree) is tuple or type(tree) is list:
        for inside in tree:
            _collect(inside, found, seen)
        return
    if type(tree) is dict:
        for inside in tree.values():
            _collect(inside, found, seen)
        return
    for leaf in tree_leaves(tree):
        if isinstance(leaf, _LEAVES):
            found.append(leaf)
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            parts = list(_parts(leaf))
            for _, inside in parts:
                _collect(inside, found, seen)
            if not parts:
                found.append(leaf)


def _parts(thing: object) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of an object that is no pytree, each with where it stands."""
    if isinstance(thing, dict):
        yield from dict.items(thing)
    elif isinstance(thing, list):
        yield from enumerate(list.__iter__(thing))
    elif isinstance(thing, set | frozenset):
        yield from enumerate(thing)
    yield from ((_Attribute(name), value) for name, value in getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                yield _Attribute(name), getattr(thing, name)


class _Attribute(str):
    """The name of an attribute, which is no key of a dict."""

    __slots__ = ()


def taken_apart(tree: object) -> tuple[list[torch.Tensor], Rebuild]:
    """Return the tensors in a tree, and what makes a tree anew that shares no container with it."""
    found: list[torch.Tensor] = []
    rebuild = _apart(tree, found, {})
    return found, lambda tensors: rebuild(tensors, {})


_Made = dict[int, Any]
"""Objects that were made already, by the identities of the first ones."""
_Rebuild = Callable[[Sequence[torch.Tensor], _Made], Any]


def _apart(tree: object, found: list[torch.Tensor], known: dict[int, _Rebuild]) -> _Rebuild:
    leaves, spec = tree_flatten(tree)
    rebuilds = [_leaf_apart(leaf, found, known) for leaf in leaves]
    del leaves, tree

    def rebuild(tensors: Sequence[torch.Tensor], made: _Made) -> Any:
        return tree_unflatten([each(tensors, made) for each in rebuilds], spec)

    return rebuild


def _leaf_apart(leaf: Any, found: list[torch.Tensor], known: dict[int, _Rebuild]) -> _Rebuild:
    if isinstance(leaf, torch.Tensor):
        place = len(found)
        found.append(leaf)
        return lambda tensors, _: tensors[place]
    if isinstance(leaf, _NO_TREES) or not tensors_in(leaf):
        return lambda *_: leaf
    identity = id(leaf)
    if identity not in known:
        known[identity] = lambda _, made: made[identity]  # met again: it is one object
        return _object_apart(leaf, found, known)
    return known[identity]


def _object_apart(thing: Any, found: list[torch.Tensor], known: dict[int, _Rebuild]) -> _Rebuild:
    identity, kind = id(thing), type(thing)
    parts = [(place, _apart(inside, found, known)) for place, inside in _parts(thing)]
    if isinstance(thing, set | frozenset):
        return lambda tensors, made: made.setdefault(
            identity, kind(rebuild(tensors, made) for _, rebuild in parts)
        )
    hollow = copy.copy(thing)
    for place, _ in parts:
        _put(hollow, place, None)

    def rebuild(tensors: Sequence[torch.Tensor], made: _Made) -> Any:
        new = made[identity] = copy.copy(hollow)
        for place, inside in parts:
            _put(new, place, inside(tensors, made))
        return new

    return rebuild


def _put(thing: Any, place: Any, value: object) -> None:
    if not isinstance(place, _Attribute):
        kind: Any = dict if isinstance(thing, dict) else list
        kind.__setitem__(thing, place, value)
    elif place in getattr(thing, "__dict__", {}):
        thing.__dict__[str(place)] = value  # also where the class is frozen
    else:
        object.__setattr__(thing, place, value)
