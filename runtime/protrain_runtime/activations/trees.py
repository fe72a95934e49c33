"""Tensors in what modules take and give: containers, and objects that hold tensors.

A tree is what PyTorch's pytrees know (tuples, lists, dicts, model outputs), and besides them sets,
containers of the user's classes, and objects with attributes: dataclasses, caches, contexts.
Modules, functions and classes are no part of a tree.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
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


_Put = Callable[[Any, Any], object]
"""Puts a value into an object, where a part of another one stands."""
_ADDS: tuple[tuple[Any, _Put | None], ...] = (
    (list, list.append),
    (set, set.add),
    (tuple, None),
    (frozenset, None),
)
"""Functions that add an item, past code of a user's own class; None: an item cannot be added."""


def _parts(thing: object) -> Iterator[tuple[_Put | None, Any]]:
    """Yield the parts of an object that is no pytree, each with what puts another in its place."""
    if isinstance(thing, dict):
        base = _builtin(type(thing))  # an OrderedDict has an order of its own
        for key, value in base.items(thing):
            yield partial(_set_item, base, key), value
    for base, add in _ADDS:
        if isinstance(thing, base):
            yield from ((add, value) for value in base.__iter__(thing))
    for name, value in getattr(thing, "__dict__", {}).items():
        yield partial(_set_attribute, name), value
    for kind in type(thing).__mro__:
        for name, slot in kind.__dict__.items():
            if isinstance(slot, MemberDescriptorType) and name not in _NO_SLOTS:
                with suppress(AttributeError):  # it has no value
                    yield slot.__set__, slot.__get__(thing)


_NO_SLOTS = ("__dict__", "__weakref__", "__callback__")
"""Slots that are no part: the last is a weak reference's."""


def _builtin(kind: type) -> Any:
    """The first class among those of `kind` that is not written in Python."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _WRITTEN_IN_PYTHON)


_WRITTEN_IN_PYTHON = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: made as Python runs, also by an extension."""


def _set_item(base: Any, key: object, thing: Any, value: object) -> None:
    base.__setitem__(thing, key, value)


def _set_attribute(name: str, thing: Any, value: object) -> None:
    thing.__dict__[name] = value  # also where the class is frozen


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
    """Take an object apart, past what its class does to copy, pickle or set attributes."""
    identity, kind = id(thing), type(thing)
    parts = [(put, _apart(inside, found, known)) for put, inside in _parts(thing)]
    base = _builtin(kind)
    empty: Callable[..., Any] = partial(base.__new__, kind)
    if base not in (object, dict, OrderedDict, defaultdict, *(base for base, _ in _ADDS)):
        hollow = copy.copy(thing)  # of an extension: it knows what else there is
        for put, _ in parts:
            assert put is not None
            put(hollow, None)
        empty = partial(copy.copy, hollow)

    def rebuild(tensors: Sequence[torch.Tensor], made: _Made) -> Any:
        items = [inside(tensors, made) for put, inside in parts if put is None]
        new = made[identity] = empty(items) if items else empty()
        for put, inside in parts:
            if put is not None:
                put(new, inside(tensors, made))
        return new

    return rebuild
