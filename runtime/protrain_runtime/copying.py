"""Copies and pickles of a planned model are plain models, with the values that it has now.

What a plan puts on modules (hooks, code, threads behind them) is the plan's. It is told by looking
at the modules before and after; a copy is made of what is left without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_REDUCE = "__reduce_ex__"
_OWN = ("_parameters", "_buffers", "_modules")
_ABSENT = object()

Look = Mapping[nn.Module, Mapping[str, object]]
"""By module: its attributes, and of its tables of hooks the keys."""


def look_at(model: nn.Module) -> Look:
    """What the modules have now, to tell later what has been added."""
    return {
        module: {
            name: frozenset(value) if _is_table(name, value) else value
            for name, value in module.__dict__.items()
        }
        for module in model.modules()
    }


def _is_table(name: str, value: object) -> bool:
    return name.startswith("_") and name not in _OWN and isinstance(value, dict)


@dataclass(frozen=True, slots=True)
class _Added:
    """What a plan has put on a module: hooks by table, and attributes with what was there."""

    hooks: Mapping[str, frozenset[object]]
    attributes: Mapping[str, object]

    def without(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A module's attributes as they are without the plan."""
        plain = {name: value for name, value in state.items() if name != _REDUCE}
        for name, keys in self.hooks.items():
            table = plain[name]
            plain[name] = type(table)((k, v) for k, v in table.items() if k not in keys)
        for name, before in self.attributes.items():
            if before is _ABSENT:
                plain.pop(name, None)
            else:
                plain[name] = before
        return plain


def let_copy(before: Look) -> Callable[[], None]:
    """Let copies of the modules be plain; returns what undoes it."""
    touched: list[nn.Module] = []
    for module, state in before.items():
        added = _added(module, state)
        if added.hooks or added.attributes:
            module.__dict__[_REDUCE] = _reduction(module, added)
            touched.append(module)

    def undo() -> None:
        for module in touched:
            module.__dict__.pop(_REDUCE, None)

    return undo


def _added(module: nn.Module, before: Mapping[str, object]) -> _Added:
    hooks: dict[str, frozenset[object]] = {}
    attributes: dict[str, object] = {}
    for name, value in module.__dict__.items():
        known = before.get(name, _ABSENT)
        if _is_table(name, value) and isinstance(known, frozenset):
            if new := frozenset(value) - known:
                hooks[name] = new
        elif value is not known and name not in _OWN:
            attributes[name] = known
    return _Added(hooks, attributes)


def _reduction(module: nn.Module, added: _Added) -> Callable[[Any], Any]:
    """What `copy` and `pickle` call: the class's own answer, for the module without the plan."""

    def reduce(protocol: Any) -> Any:
        state = module.__dict__
        whole = dict(state)
        plain = added.without(whole)
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

    return reduce
