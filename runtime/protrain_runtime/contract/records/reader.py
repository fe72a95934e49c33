"""YAML text -> record, by the types of what files have. The first error ends the reading."""

from contextlib import suppress
from dataclasses import replace
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin

from msgspec import inspect

from protrain_runtime.contract.errors import RecordError, cut
from protrain_runtime.contract.records.decisions import ACTIVATIONS
from protrain_runtime.contract.records.folding import MAX_RUN, run_length, unfold
from protrain_runtime.contract.records.forms import PLAN_AGAIN, misfit
from protrain_runtime.contract.records.limits import (
    IS_JSON,
    IS_LINES,
    IS_SIZE,
    MAX_UNFOLDED,
    MAX_UNITS,
    Slots,
    Text,
)
from protrain_runtime.contract.records.plan import PipelinePlan, Plan, Schedule, UnitPlan
from protrain_runtime.contract.records.profile import Profile, Unit
from protrain_runtime.contract.records.schema import (
    KINDS,
    PHRASES,
    VERSION,
    Record,
    content_of,
    hints,
    mark_of,
)
from protrain_runtime.contract.records.tree import Document, Path, meant, parsed, parsed_json
from protrain_runtime.contract.records.words import did_you_mean, listed, refused_character, unseen
from protrain_runtime.contract.units import parse_bytes

R = TypeVar("R", bound=Record)


def loads(kind: type[R], text: str, source: str | None = None) -> R:
    """The record that `text` holds; RecordError, naming `source`, where it holds something else."""
    document = parsed(text, source).headed(KINDS[kind], VERSION)
    document.read(content_of(kind))
    record = kind(**_fields(kind, document))
    if isinstance(record, Plan):
        _check_plan(record, document)
        return cast(R, record.regraded())
    machine = document
    if isinstance(record, Profile):
        # Compiled blocks have no form that goes by what is inside, and others none of a graph.
        for index, entry in enumerate(document.data["units"]):
            for number, form in enumerate(cost["form"] for cost in entry["forms"]):
                if why := misfit(form, compiled=bool(record.workload.compile)):
                    where: Path = ("units", index, "forms", number, "form")
                    raise document.error(f"{form!r} {why}", "profile again", at=where)
        machine = document.at("hardware")
    _refuse_twice(machine.at("tiers"), "name", "tier")
    return cast(R, record)


def kind_of(text: str, source: str | None = None) -> str | None:
    """Return the kind that a text names; RecordError where it is no mapping in YAML."""
    kind = parsed(text, source).mapping().get("protrain")
    return None if kind is None else kind.read(Text)


def _fields(owner: type, document: Document) -> dict[str, Any]:
    types = hints(owner)
    return {key: _value(types[key], document.at(key)) for key in document.data if key in types}


def _value(hint: Any, document: Document) -> Any:
    """The value of a field, whose type is right already."""
    data, of = document.data, (get_args(hint) or (hint,))[0]
    match data:
        case dict():
            return of(**_fields(of, document))
        case list():
            item = get_args(of)[0] if get_origin(of) is tuple else of
            if item in (Unit, UnitPlan):
                return _units(item, document)
            return tuple(_value(item, document.at(index)) for index in range(len(data)))
        case str():
            return _text(hint, document)
        case _:
            return float(data) if of in (float, Slots) else data


def _text(hint: Any, document: Document) -> Any:
    """The value that a text stands for."""
    text: str = document.data
    for kind, words in PHRASES:
        if hint == kind:
            return words[text]
    extra = mark_of(hint)
    if extra == IS_SIZE:
        with document.located(meant(text, inspect.type_info(hint))):
            return replace(document, data=parse_bytes(text)).read(hint)
    if NoneType in get_args(hint):
        return None  # until the step's end
    if extra != IS_LINES and unseen(text):
        raise document.error(refused_character(text))
    if extra == IS_JSON:
        with suppress(RecordError):
            if not text or isinstance(parsed_json(text, None), dict):
                return text
        raise document.expected("a JSON object, or nothing")
    return text


def _units(owner: Any, document: Document) -> tuple[Any, ...]:
    """The units of a list, runs unfolded."""
    places: dict[str, int] = {}
    found: list[tuple[Any, Document]] = []
    unfolded = 0
    for entry in map(document.at, range(len(document.data))):
        values = _fields(owner, entry)
        if owner is UnitPlan:
            values["schedule"] = Schedule(**_fields(Schedule, entry))
        one = values.pop("name", None)
        if (one is None) == ("names" not in entry.data):
            missing = (
                "missing key 'name'" if one is None else "expected 'name' or 'names', got both"
            )
            raise entry.error(missing)
        names = [one] if one is not None else _run(entry.at("names"))
        unfolded += len(names) * _count(entry.data)
        for most, count, what in (
            (MAX_UNITS, len(places) + len(names), "units"),
            (MAX_UNFOLDED, unfolded, "keys and values"),
        ):
            if count > most:
                raise document.error(
                    f"expected at most {most} {what}, runs unfolded, got {count} up to"
                    f" {cut(names[-1])!r}"
                )
        for name in names:
            own = places.setdefault(name, len(found))
            if own < len(found):
                raise entry.error(f"the unit {cut(name)!r} appears twice")
            implied = {"used_by": (own,)} if owner is Unit else {}
            found.append((owner(name=name, **implied | values), entry))
    for own, (unit, entry) in enumerate(found):
        if owner is Unit:
            _check_unit(own, len(found), unit, entry)
            continue
        for index, user in enumerate(unit.also_used_by):
            if places.get(user, 0) <= own:
                fix = did_you_mean(user, list(places)[own + 1 :])
                raise entry.at("also_used_by", index).expected("the name of a later unit", fix)
    return tuple(unit for unit, _ in found)


def _run(document: Document) -> list[str]:
    text = _text(Text, document)
    if (length := run_length(text)) > MAX_RUN:
        raise document.error(f"expected a run of at most {MAX_RUN} units, got {length}")
    if (names := unfold(text)) is None:
        fix = "write a single unit as name: ..."
        raise document.expected("a run of units such as layers.0-11", fix)
    return names


def _count(data: Any) -> int:
    """The keys and values in here, itself included."""
    if isinstance(data, dict):
        return 1 + len(data) + sum(map(_count, data.values()))
    return 1 + (sum(map(_count, data)) if isinstance(data, list) else 0)


def _check_unit(own: int, count: int, unit: Unit, entry: Document) -> None:
    """Refuse unknown users, parameters without bytes, forms that are there twice, wrong pieces."""
    for index, user in enumerate(unit.used_by):
        if user >= count:
            where = entry.at("used_by", index)
            raise where.expected(f"the index of a unit, 0 to {count - 1}")
    users = list(unit.used_by)
    if users and users[0] != own:
        problem = f"expected the unit's own index {own} first, got {users[0]}"
        raise entry.at("used_by").error(problem)
    if users != sorted(set(users)):
        raise entry.at("used_by").error(f"expected ascending indices, got {cut(str(users))}")
    for name in ("parameter_bytes", "gradient_bytes"):
        if unit.num_parameters and not getattr(unit, name):
            raise entry.at(name).expected("bytes of the parameters")
    parts: list[tuple[Document, str, tuple[int, ...], int]] = [
        (entry, "parameter_pieces", unit.parameter_pieces, unit.parameter_bytes),
        (entry, "gradient_pieces", unit.gradient_pieces, unit.gradient_bytes),
    ]
    for index, cost in enumerate(unit.forms):
        form = entry.at("forms", index)
        parts.append((form, "swap_pieces", cost.swap_pieces, cost.swappable_bytes))
    _refuse_twice(entry.at("forms"), "form", "form")
    for holder, name, pieces, whole in parts:
        if pieces and sum(pieces) != whole:
            problem = f"expected pieces of {whole} bytes together, got {sum(pieces)}"
            raise holder.at(name).error(problem)
    if len(unit.parameter_pieces) != len(unit.gradient_pieces):
        raise entry.error(
            "expected as many parameter_pieces as gradient_pieces, got"
            f" {len(unit.parameter_pieces)} and {len(unit.gradient_pieces)}"
        )


def _refuse_twice(document: Document, key: str, what: str) -> None:
    """Refuse entries of a list that have the same word for a key."""
    words = [entry[key] for entry in document.data]
    for index, word in enumerate(words):
        if word in words[:index]:
            raise document.at(index).error(f"the {what} {word!r} appears twice")


def _check_plan(plan: Plan, document: Document) -> None:
    """Refuse unequal nodes or replicas, a wrong exactness, and forms that do not fit."""
    group = plan.group
    for key, parts in (("num_nodes", group.num_nodes), ("num_replicas", group.num_replicas)):
        if group.num_devices % parts:
            problem = f"{group.num_devices} devices cannot be divided into {parts}"
            raise document.error(problem, at=("settings", "group", key))
    exactness, allowed = plan.opt_in
    by_host = plan.exactness == "host rounding"  # not opted in to, and follows from the units
    rules = (
        ("exact", by_host or plan.exact, exactness == "bitwise"),
        ("exactness", "bitwise" if by_host else plan.exactness, exactness),
        ("allowed", plan.allowed, allowed),
    )
    for key, stated, found in rules:
        if stated != found:
            shown = listed(found, "and") if isinstance(found, tuple) else str(found).lower()
            why = f"its activations take {listed(sorted(plan.forms), 'and')}"
            why += ", and reductions are in every micro-batch" * plan.settings.adds_shards
            problem = f"expected {shown or 'an empty list'}: {why}"
            raise document.error(problem, at=(key,) if key in document.data else ())
    if plan.pipeline is not None:
        _check_pipeline(plan, plan.pipeline, document.at("pipeline"))
    for index, entry in enumerate(document.data["units"]):
        phrase = entry["activations"]
        if why := misfit(ACTIVATIONS[phrase].form, compiled=bool(plan.workload.compile)):
            where: Path = ("units", index, "activations")
            raise document.error(f"{phrase!r} {why}", PLAN_AGAIN, at=where)


def _check_pipeline(plan: Plan, pipeline: PipelinePlan, document: Document) -> None:
    """Refuse stages that do not begin at units, in their order, as many times each."""
    if plan.whole.num_devices % pipeline.num_nodes:
        nodes = f"{plan.whole.num_devices} devices cannot be divided into {pipeline.num_nodes}"
        raise document.error(f"{nodes} nodes", at=("num_nodes",))
    interleaved, names = pipeline.schedule == "interleaved 1F1B", [unit.name for unit in plan.units]
    for index, stage in enumerate(pipeline.stages):
        count = len(stage.first_units)
        if count != pipeline.chunks or (count > 1) != interleaved:
            wanted = "a unit for each chunk, as many in all stages" if interleaved else "one unit"
            problem = f"expected {wanted}, got {count}"
            raise document.error(problem, at=("stages", index, "first_units"))
    after = -1
    for chunk in range(pipeline.chunks):
        for index, stage in enumerate(pipeline.stages):
            where = document.at("stages", index, "first_units", chunk)
            if (name := stage.first_units[chunk]) not in names:
                raise where.expected("the name of a unit", did_you_mean(name, names))
            if (place := names.index(name)) <= after or (after < 0 and place):
                raise where.expected(names[0] if after < 0 else f"a unit behind {names[after]}")
            after = place
