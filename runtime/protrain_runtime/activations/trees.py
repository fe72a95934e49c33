"""Tensors in arguments and results of modules: in containers and in objects.

A tree is anything that PyTorch's pytrees know (tuples, lists, dicts, model outputs), and also sets,
containers of user classes, and objects with attributes: dataclasses, caches, contexts. Modules,
functions and classes are not part of a tree.
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
"""Types of tensors that hold their values, and of their fakes."""

Rebuild = Callable[[Sequence[torch.Tensor]], Any]
"""Rebuilds a tree from other tensors in the same order."""


def named(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults.

    Names are those of an operator's schema, or of a function's signature. A C++ function of PyTorch
    has its ATen operator's; Python's `input` may be `self` there. TypeError if the call has more
    arguments than names.
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
    """A function's argument names in order, and the defaults."""
    schema = getattr(func, "_schema", None)
    if schema is None and isinstance(func, FunctionType):
        found = inspect.signature(func).parameters
        empty = inspect.Parameter.empty
        return tuple(found), {n: p.default for n, p in found.items() if p.default is not empty}
    if schema is None:  # in C++: no signature
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
    """All tensors in a tree, in order, with repetitions."""
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor)]


def leaves_in(tree: object) -> list[object]:
    """All leaves of a tree, in order."""
    found: list[object] = []
    _collect(tree, found, set())
    return found


def is_value(leaf: object) -> bool:
    """Whether a leaf is a plain value, identified by equality."""
    return isinstance(leaf, _VALUES)


def _collect(tree: object, found: list[object], seen: set[int]) -> None:
    if isinstance(tree, _LEAVES):
        found.append(tree)
        return
    # Most trees are an operator's arguments: PyTorch's own walk takes several times as long.
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
"""Puts a value into an object, in place of another's part."""
_ADDS: tuple[tuple[Any, _Put | None], ...] = (
    (list, list.append),
    (set, set.add),
    (tuple, None),
    (frozenset, None),
)
"""Functions that add an item, bypassing user classes; None: not possible."""


def _parts(thing: object) -> Iterator[tuple[_Put | None, Any]]:
    """The parts of a non-pytree object, each with its setter."""
    if isinstance(thing, dict):
        base = _builtin(type(thing))  # an OrderedDict has its own order
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
                with suppress(AttributeError):  # without a value
                    yield slot.__set__, slot.__get__(thing)


_NO_SLOTS = ("__dict__", "__weakref__", "__callback__")
"""Slots that are not parts: the last is a weak reference's."""


def _builtin(kind: type) -> Any:
    """The first base class of `kind` that is not written in Python."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _WRITTEN_IN_PYTHON)


_WRITTEN_IN_PYTHON = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: created at run time, also by an extension."""


def _set_item(base: Any, key: object, thing: Any, value: object) -> None:
    base.__setitem__(thing, key, value)


def _set_attribute(name: str, thing: Any, value: object) -> None:
    thing.__dict__[name] = value  # works for frozen classes, too


def taken_apart(tree: object) -> tuple[list[torch.Tensor], Rebuild]:
    """The tensors in a tree, and a function that rebuilds it with new containers."""
    found: list[torch.Tensor] = []
    rebuild = _apart(tree, found, {})
    return found, lambda tensors: rebuild(tensors, {})


_Made = dict[int, Any]
"""Objects already rebuilt, by the originals' identities."""
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
        known[identity] = lambda _, made: made[identity]  # met again: the same object
        return _object_apart(leaf, found, known)
    return known[identity]


def _object_apart(thing: Any, found: list[torch.Tensor], known: dict[int, _Rebuild]) -> _Rebuild:
    """Take an object apart, bypassing its class's copy, pickle and attribute code."""
    identity, kind = id(thing), type(thing)
    parts = [(put, _apart(inside, found, known)) for put, inside in _parts(thing)]
    base = _builtin(kind)
    empty: Callable[..., Any] = partial(base.__new__, kind)
    if base not in (object, dict, OrderedDict, defaultdict, *(base for base, _ in _ADDS)):
        hollow = copy.copy(thing)  # of an extension: only it knows its other parts
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
