"""Records as YAML: what the reader, the writer and the JSON Schemas have to agree on.

A file starts with `protrain: KIND` and `version: 3`, then has the fields of the record under
their own names, in their own order. What differs from the dataclasses:

- A field that has a default is absent where it has that value.
- A size is an integer or a text such as `1.5GiB`.
- A decision is a phrase (see `decisions`).
- The fields of a unit's `Schedule` are keys of the unit itself; a drain that ends with the step is
  `end`.
- Consecutive units that differ in nothing but the last integer of their names are one entry, with
  `names: model.layers.0-11` instead of `name: model.layers.0`.
- A unit whose parameters are used by itself alone has no `used_by`.

Files of earlier versions are refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Final, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from protrain_runtime.contract.records.decisions import ACTIVATIONS, STATES
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.limits import IS_SIZE, MAX_LIST, Text
from protrain_runtime.contract.records.plan import (
    Activations,
    Placement,
    Plan,
    Schedule,
    StepSettings,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Form, Profile, Unit
from protrain_runtime.contract.records.words import listed

VERSION: Final = 3
Record = Hardware | Profile | Plan
KINDS: dict[type, str] = {Hardware: "hardware", Profile: "profile", Plan: "plan"}

STEP_END: Final = "end"
"""A drain of `None`: until the step's end."""
SIZE: Final = r"^\s*[0-9]{1,30}(\.[0-9]{1,30})? ?([KMGTPkmgtp][Ii]?)?[Bb]?\s*$"
PHRASES: tuple[tuple[Any, Mapping[str, object]], ...] = (
    (Activations, ACTIVATIONS),
    (Placement, STATES),
)
"""Types of decisions, with the phrases that a file has for them."""


@cache
def hints(owner: Any) -> dict[str, Any]:
    """The types of a record's fields, with their limits."""
    return get_type_hints(owner, include_extras=True)


def mark_of(hint: Any) -> Mapping[str, str] | None:
    """The mark of a type besides its limits: `IS_SIZE` and others."""
    return getattr((get_args(hint) or (None,))[-1], "extra", None)


def content_of(owner: type) -> type[msgspec.Struct]:
    """The type of what a file has for a record."""
    return _content(owner, tuple(ACTIVATIONS), is_file=True)  # forms may be registered


@cache
def _content(
    owner: type, phrases: tuple[str, ...], *, is_file: bool = False
) -> type[msgspec.Struct]:
    columns: list[Any] = list(_columns(owner, phrases))
    if is_file:
        header: Any = ("protrain", Literal[KINDS[owner]]), ("version", Literal[VERSION])
        columns = [*header, *columns]
    if owner in (Unit, UnitPlan):
        description = "a run of units such as layers.0-11; a single unit has a name"
        run = Annotated[Text, Meta(pattern="[0-9]-[0-9]", description=description)]
        columns.insert(1, ("names", run, msgspec.field(default_factory=NoneType)))
    return msgspec.defstruct(owner.__name__, columns, kw_only=True, forbid_unknown_fields=True)


def _columns(owner: type, phrases: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Keys with the types of their values, and a default where they may be absent."""
    for f in fields(owner):
        kind = _kind(hints(owner)[f.name], phrases)
        is_chosen = (owner, f.name) == (StepSettings, "piece_bytes")  # its default says: not yet
        if kind is Schedule:
            yield from _columns(Schedule, phrases)
        elif (f.default is MISSING or is_chosen) and f.name not in _IMPLIED.get(owner, ()):
            yield f.name, kind
        else:
            yield f.name, kind, msgspec.field(default_factory=NoneType)


_IMPLIED = {Unit: ("name", "used_by"), UnitPlan: ("name",)}


def _kind(hint: Any, phrases: tuple[str, ...]) -> Any:
    """The type that a file has in the place of a field's."""
    for kind, words in (*PHRASES, (Form, FORMS)):
        if hint == kind:
            simple = r".+" if kind == Form else r"\S+( to \S+)?"
            plain = [word for word in words if re.fullmatch(simple, word)]
            found: Any = Literal[tuple(words)]
            return Annotated[found, Meta(description=listed(plain, "or"))]
    if mark_of(hint) == IS_SIZE:
        return hint | Annotated[str, Meta(extra_json_schema={"pattern": SIZE})]
    of, *others = get_args(hint) or (hint,)
    if tuple in (get_origin(hint), get_origin(of)):  # with limits of its own, or without
        item = of if get_origin(hint) is tuple else get_args(of)[0]
        limits = Meta(max_length=MAX_LIST) if get_origin(hint) is tuple else others[0]
        found = tuple[_kind(item, phrases), ...]  # type: ignore[misc]
        return Annotated[found, limits]
    if is_dataclass(of):  # perhaps absent
        return of if of is Schedule else _content(cast(type, of), phrases)
    if NoneType in others:  # a drain
        return of | Literal[STEP_END]
    return Text if hint is str else hint
