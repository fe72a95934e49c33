"""YAML text -> record, by the dataclasses' own annotations. The first error ends the reading."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache, partial
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from protrain_plan.errors import ProtrainError
from protrain_plan.records.folding import unfold
from protrain_plan.records.hardware import Hardware, Tier
from protrain_plan.records.plan import Activations, Placement, Plan, Schedule, UnitPlan
from protrain_plan.records.profile import FormCost, Profile, Unit
from protrain_plan.records.schema import (
    ACTIVATIONS,
    FORM_WORDS,
    KINDS,
    LIMITS,
    NOT_NEGATIVE,
    PATTERNS,
    STATES,
    STEP_END,
    VERSION,
    Limits,
    Record,
    is_size,
)
from protrain_plan.records.tree import Value, did_you_mean, listed, root
from protrain_plan.units import parse_bytes

R = TypeVar("R", bound=Record)
T = TypeVar("T")
Reader = Callable[[Value], Any]


def loads(kind: type[R], text: str, source: str | None = None) -> R:
    """The record that `text` holds; RecordError, naming `source`, where it holds something else."""
    value = root(text, source)
    _check_header(value, KINDS[kind])
    return _read_record(kind, value, {"protrain": Value.text, "version": Value.integer})


def kind_of(text: str, source: str | None = None) -> str | None:
    """What the text says that it holds; RecordError where it is no mapping in YAML."""
    kind = root(text, source).any_mapping().get("protrain")
    return None if kind is None else kind.text()


def _check_header(value: Value, kind: str) -> None:
    """First of all: is this the right kind of file, in a version that is known here?"""
    values = value.any_mapping()
    if "protrain" not in values:
        raise value.error("missing key 'protrain'", f"start the file with protrain: {kind}")
    if (found := values["protrain"].text()) != kind:
        fix = did_you_mean(found, [kind])
        what = kind if kind == "hardware" else f"a {kind}"
        raise values["protrain"].error(f"expected {what}, got {found!r}", fix)
    if "version" not in values:
        raise value.error("missing key 'version'", f"write version: {VERSION}")
    version = values["version"].integer()
    if version > VERSION:
        problem = f"version {version} is newer than this program, which reads version {VERSION}"
        raise values["version"].error(problem, "update protrain-plan")
    if version < VERSION:
        raise values["version"].error(f"expected version {VERSION}, got {version}")


@cache
def _readers(owner: Any) -> Mapping[str, Reader]:
    """A reader for each field of a dataclass."""
    hints = get_type_hints(owner)
    return {f.name: _reader(owner, f.name, hints[f.name]) for f in fields(owner)}


def _reader(owner: Any, name: str, hint: Any) -> Reader:
    limits = LIMITS.get((owner, name), NOT_NEGATIVE)
    if (owner, name) in _LISTS:
        return _LISTS[owner, name]
    if (owner, name) in PATTERNS:
        return partial(_formed, *PATTERNS[owner, name])
    if hint == Activations:
        plain = [text for text in ACTIVATIONS if not text.endswith(FORM_WORDS)]
        return _choice(ACTIVATIONS, shown=plain)
    if hint == Placement:
        return _choice(STATES)
    if get_origin(hint) is Literal:
        return _choice({word: word for word in get_args(hint)})
    if get_origin(hint) is tuple:
        item = _reader(owner, name, get_args(hint)[0])
        return lambda value: tuple(item(entry) for entry in value.sequence())
    if hint == float | None:
        return _drain
    if NoneType in get_args(hint):  # a record that is absent where there is none
        return partial(_read_record, get_args(hint)[0])
    if hint is int:
        return lambda value: (
            _size(value, limits) if is_size(owner, name) else _integer(value, limits)
        )
    if hint is float:
        return lambda value: _number(value, limits)
    scalars: dict[Any, Reader] = {str: Value.text, bool: Value.boolean}
    return scalars.get(hint) or partial(_read_record, hint)


def _with_default(owner: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(owner) if f.default is not MISSING)


def _read_record(
    owner: Callable[..., T], value: Value, header: Mapping[str, Reader] | None = None
) -> T:
    """The record at `value`, which may have the keys in `header` too."""
    found = _read_fields(value, {**(header or {}), **_readers(owner)}, _with_default(owner))
    return owner(**{name: field for name, field in found.items() if name not in (header or {})})


def _read_fields(
    value: Value, readers: Mapping[str, Reader], optional: tuple[str, ...]
) -> dict[str, Any]:
    values = value.mapping(readers, optional)
    return {name: readers[name](values[name]) for name in readers if name in values}


def _choice(choices: Mapping[str, Any], shown: Iterable[str] | None = None) -> Reader:
    expected = listed(choices if shown is None else shown, "or")

    def read(value: Value) -> Any:
        if not value.is_text():
            raise value.expected(expected)
        word = value.text()
        if word not in choices:
            raise value.error(f"expected {expected}, got {word!r}", did_you_mean(word, choices))
        return choices[word]

    return read


def _formed(pattern: str, expected: str, value: Value) -> str:
    if not value.is_text():
        raise value.expected(expected)
    if not re.fullmatch(pattern, text := value.text()):
        raise value.error(f"expected {expected}, got {text!r}")
    return text


def _size(value: Value, limits: Limits) -> int:
    if value.is_text():
        try:
            size = parse_bytes(value.text())
        except ProtrainError as error:
            raise value.error(error.message, error.fix or value.meant_integer()) from None
    else:
        size = value.integer("a size such as 1536MiB or an integer")
    if size not in limits:
        raise value.expected(f"a size {limits}")
    return size


def _integer(value: Value, limits: Limits) -> int:
    number = value.integer()
    if number not in limits:
        raise value.expected(f"an integer {limits}")
    return number


def _number(value: Value, limits: Limits) -> float:
    number = value.number()
    if number not in limits:
        raise value.expected(f"a number {limits}")
    return number


def _drain(value: Value) -> float | None:
    if value.is_text():
        if value.text() != STEP_END:
            raise value.error(f"expected a number or {STEP_END}, got {value.text()!r}")
        return None
    return _number(value, NOT_NEGATIVE)


def _tiers(value: Value) -> tuple[Tier, ...]:
    tiers: dict[str, Tier] = {}
    for entry in value.sequence():
        tier = _read_record(Tier, entry)
        if tier.name in tiers:
            raise entry.error(f"the tier {tier.name!r} stands here twice")
        tiers[tier.name] = tier
    return tuple(tiers.values())


def _forms(value: Value) -> tuple[FormCost, ...]:
    forms: dict[str, FormCost] = {}
    for entry in value.sequence():
        cost = _read_record(FormCost, entry)
        if cost.form in forms:
            raise entry.error(f"the form {cost.form!r} stands here twice")
        forms[cost.form] = cost
    if not forms:
        raise value.error("expected at least one form, got none")
    return tuple(forms.values())


def _plan_units(value: Value) -> tuple[UnitPlan, ...]:
    schedule = _readers(Schedule)
    units: list[UnitPlan] = []
    shared: list[tuple[Value, int]] = []  # where also_used_by is written, and the unit's index
    for entry, names, found in _entries(value, UnitPlan, schedule):
        slots = Schedule(**{name: found.pop(name) for name in schedule if name in found})
        units += (UnitPlan(name=name, schedule=slots, **found) for name in names)
        if "also_used_by" in found:
            shared.append((entry.any_mapping()["also_used_by"], len(units) - 1))
    for where, own in shared:
        later = [unit.name for unit in units[own + 1 :]]
        for user in where.sequence():
            if user.text() not in later:
                problem = f"expected the name of a later unit, got {user.text()!r}"
                raise user.error(problem, did_you_mean(user.text(), later))
    return tuple(units)


def _profile_units(value: Value) -> tuple[Unit, ...]:
    units: list[Unit] = []
    explicit: list[tuple[Value, int]] = []  # where used_by is written, and the unit's index
    for entry, names, found in _entries(value, Unit):
        used_by = found.pop("used_by", None)
        for name in names:
            own = len(units)
            if used_by is not None:
                explicit.append((entry.any_mapping()["used_by"], own))
            units.append(Unit(name=name, used_by=(own,) if used_by is None else used_by, **found))
    for where, own in explicit:
        _check_used_by(where, own, units[own].used_by, len(units))
    return tuple(units)


def _check_used_by(where: Value, own: int, used_by: tuple[int, ...], num_units: int) -> None:
    for i, user in enumerate(used_by):
        if user >= num_units:
            problem = f"expected the index of a unit, 0 to {num_units - 1}, got {user}"
            raise where.sequence()[i].error(problem)
    if used_by and used_by[0] != own:
        raise where.error(f"expected the unit's own index {own} first, got {used_by[0]}")
    if list(used_by) != sorted(set(used_by)):
        raise where.error(f"expected ascending indices, got {list(used_by)}")


def _entries(
    value: Value, owner: Any, extra: Mapping[str, Reader] = MappingProxyType({})
) -> Iterator[tuple[Value, list[str], dict[str, Any]]]:
    """Each entry of a list of units, the names of the units it speaks of, and its other fields."""
    readers = {"name": Value.text, "names": _run, **_readers(owner), **extra}
    readers.pop("schedule", None)  # its fields stand in the unit itself
    optional = ("name", "names", "used_by", *extra, *_with_default(owner))
    seen: set[str] = set()
    for entry in value.sequence():
        found = _read_fields(entry, readers, optional)
        one, several = found.pop("name", None), found.pop("names", None)
        if (one is None) == (several is None):
            raise entry.error(
                "missing key 'name'" if one is None else "expected 'name' or 'names', got both"
            )
        names = [one] if several is None else several
        for name in names:
            if name in seen:
                raise entry.error(f"the unit {name!r} stands here twice")
            seen.add(name)
        yield entry, names, found
    if not seen:
        raise value.error("expected at least one unit, got none")


def _run(value: Value) -> list[str]:
    text = value.text()
    names = unfold(text)
    if names is None:
        problem = f"expected a run of units such as layers.0-11, got {text!r}"
        raise value.error(problem, "write a single unit as name: ...")
    return names


_LISTS: dict[tuple[type, str], Reader] = {
    (Hardware, "tiers"): _tiers,
    (Unit, "forms"): _forms,
    (Profile, "units"): _profile_units,
    (Plan, "units"): _plan_units,
}
"""Lists with rules of their own."""
