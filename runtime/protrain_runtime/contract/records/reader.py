"""YAML text -> record, by the dataclasses' own annotations. The first error ends the reading."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from protrain_runtime.contract.errors import ProtrainError, RecordError, cut
from protrain_runtime.contract.records.decisions import ACTIVATIONS, PLAIN, STATES
from protrain_runtime.contract.records.folding import MAX_RUN, run_length, unfold
from protrain_runtime.contract.records.forms import (
    FORMS,
    PLAN_AGAIN,
    misfit,
)
from protrain_runtime.contract.records.hardware import Hardware, Tier
from protrain_runtime.contract.records.plan import (
    Activations,
    PipelinePlan,
    Placement,
    Plan,
    Schedule,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import FormCost, Profile, Unit, Workload
from protrain_runtime.contract.records.schema import (
    KINDS,
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_LIST,
    MAX_UNFOLDED,
    MAX_UNITS,
    OF_LINES,
    PATTERNS,
    STEP_END,
    VERSION,
    Limits,
    Record,
    is_size,
    limits_of,
    may_miss,
)
from protrain_runtime.contract.records.tree import (
    MAX_TEXT,
    Node,
    did_you_mean,
    listed,
    parsed_json,
    root,
)
from protrain_runtime.contract.units import parse_bytes

R = TypeVar("R", bound=Record)
T = TypeVar("T")
N = TypeVar("N", int, float)
Reader = Callable[[Node], Any]


def loads(kind: type[R], text: str, source: str | None = None) -> R:
    """The record that `text` holds; RecordError, naming `source`, where it holds something else."""
    value = headed(root(text, source), KINDS[kind])
    record = _read_record(kind, value, {"protrain": Node.text, "version": Node.integer})
    if isinstance(record, Plan):
        _check_plan(record, value)
        return cast(R, record.regraded())
    if isinstance(record, Profile):
        _check_profile(record, value)
    return record


def kind_of(text: str, source: str | None = None) -> str | None:
    """Return the kind that a text names; RecordError where it is no mapping in YAML."""
    kind = root(text, source).any_mapping().get("protrain")
    return None if kind is None else kind.text()


def version_of(text: str) -> int:
    """The version that the text of a record says it is of."""
    return root(text, None).any_mapping()["version"].integer()


def headed(value: Node, kind: str, expected: int = VERSION) -> Node:
    """The same as a file of this kind; RecordError where its header says otherwise."""
    values = value.any_mapping()
    if "protrain" not in values:
        raise value.error("missing key 'protrain'", f"start the file with protrain: {kind}")
    if (found := values["protrain"].text()) != kind:
        fix = did_you_mean(found, [kind])
        what = f"a {kind}" if kind in ("plan", "profile") else kind
        raise values["protrain"].error(f"expected {what}, got {cut(found)!r}", fix)
    if "version" not in values:
        raise value.error("missing key 'version'", f"write version: {expected}")
    version = values["version"].integer()
    if version > expected:
        problem = f"version {version} is newer than this program, which reads {expected}"
        raise values["version"].error(problem, "update protrain-plan")
    if version < expected:
        problem = f"expected version {expected}, got {version}"
        fix = f"make the {kind} again" if version > 0 else None
        raise values["version"].error(problem, fix)
    return value


@cache
def _readers(owner: Any) -> Mapping[str, Reader]:
    """A reader for each field of a dataclass."""
    hints = get_type_hints(owner)
    return {f.name: _reader(owner, f.name, hints[f.name]) for f in fields(owner)}


def _reader(owner: Any, name: str, hint: Any) -> Reader:
    if (owner, name) in _OWN_RULES:
        return _OWN_RULES[owner, name]
    if hint == Activations:
        return _choice(ACTIVATIONS, shown=PLAIN)
    if (owner, name) == (FormCost, "form"):
        return lambda value: _choice({form: form for form in FORMS})(value)
    if hint == Placement:
        return _choice(STATES)
    if get_origin(hint) is Literal:
        return _choice({word: word for word in get_args(hint)})
    if get_origin(hint) is tuple:
        item = _reader(owner, name, get_args(hint)[0])
        most = MAX_ENTRIES.get((owner, name), MAX_LIST)
        return lambda value: tuple(item(entry) for entry in value.sequence(most))
    if (owner, name) in PATTERNS:
        return partial(_formed, *PATTERNS[owner, name])
    if hint in (float, float | None):
        number = partial(_limited, Node.number, "a number", limits_of(owner, name))
        return number if hint is float else partial(_drain, number)
    if NoneType in get_args(hint):  # a record that is absent where there is none
        return partial(_read_record, get_args(hint)[0])
    if hint is int:
        read, what = (_size, "a size") if is_size(owner, name) else (Node.integer, "an integer")
        return partial(_limited, read, what, limits_of(owner, name))
    if hint is str:
        most = MAX_CHARACTERS.get((owner, name), MAX_TEXT)
        return partial(Node.text, most=most, lines=(owner, name) in OF_LINES)
    return Node.boolean if hint is bool else partial(_read_record, hint)


def _read_record(
    owner: Callable[..., T], value: Node, header: Mapping[str, Reader] | None = None
) -> T:
    """The record at `value`, which may have the keys in `header` too."""
    header = header or {}
    readers = {**header, **_readers(owner)}
    values = value.mapping(readers, may_miss(owner))
    found = {name: read(values[name]) for name, read in readers.items() if name in values}
    return owner(**{name: field for name, field in found.items() if name not in header})


def _choice(choices: Mapping[str, Any], shown: Iterable[str] | None = None) -> Reader:
    expected = listed(choices if shown is None else shown, "or")

    def read(value: Node) -> Any:
        if not value.is_text():
            raise value.expected(expected)
        word = value.text()
        if word not in choices:
            fix = did_you_mean(word, choices)
            raise value.error(f"expected {expected}, got {cut(word)!r}", fix)
        return choices[word]

    return read


def _formed(pattern: str, expected: str, value: Node) -> str:
    if not value.is_text():
        raise value.expected(expected)
    if not re.fullmatch(pattern, text := value.text()):
        raise value.error(f"expected {expected}, got {cut(text)!r}")
    return text


def _configuration(value: Node) -> str:
    """A JSON object as text, or nothing."""
    text = value.text(MAX_CHARACTERS[Workload, "model_config"])
    with suppress(RecordError):
        if not text or isinstance(parsed_json(text, None), dict):
            return text
    raise value.error(f"expected a JSON object, or nothing, got {cut(text)!r}")


def _limited(read: Callable[[Node], N], what: str, limits: Limits, value: Node) -> N:
    if (number := read(value)) not in limits:
        raise value.expected(f"{what} {limits}")
    return number


def _size(value: Node) -> int:
    if not value.is_text():
        return value.integer("a size such as 1536MiB or an integer")
    try:
        return parse_bytes(value.text())
    except ProtrainError as error:
        raise value.error(error.message, error.fix or value.meant_integer()) from None


def _drain(number: Reader, value: Node) -> float | None:
    if not value.is_text():
        return float(number(value))
    if (text := value.text()) != STEP_END:
        raise value.error(f"expected a number or {STEP_END}, got {cut(text)!r}")
    return None


def _each_once(owner: Callable[..., T], key: str, what: str, value: Node) -> tuple[T, ...]:
    """Records of which no two have the same `key`."""
    found: dict[str, T] = {}
    for entry in value.sequence():
        record = _read_record(owner, entry)
        name = getattr(record, key)
        if name in found:
            raise entry.error(f"the {what} {name!r} stands here twice")
        found[name] = record
    return tuple(found.values())


def _forms(value: Node) -> tuple[FormCost, ...]:
    if forms := _each_once(FormCost, "form", "form", value):
        return forms
    raise value.error("expected at least one form, got none")


def _plan_units(value: Node) -> tuple[UnitPlan, ...]:
    schedule = _readers(Schedule)
    units: list[UnitPlan] = []
    shared: list[tuple[Node, int]] = []  # where also_used_by is written, and the unit's index
    for entry, names, found in _entries(value, UnitPlan, schedule):
        slots = Schedule(**{name: found.pop(name) for name in schedule if name in found})
        units += (UnitPlan(name=name, schedule=slots, **found) for name in names)
        if "also_used_by" in found:
            shared.append((entry.any_mapping()["also_used_by"], len(units) - 1))
    places = {unit.name: index for index, unit in enumerate(units)}
    for where, own in shared:
        for user in where.sequence():
            if places.get(user.text(), 0) <= own:
                problem = f"expected the name of a later unit, got {cut(user.text())!r}"
                later = [unit.name for unit in units[own + 1 :]]
                raise user.error(problem, did_you_mean(user.text(), later))
    return tuple(units)


def _profile_units(value: Node) -> tuple[Unit, ...]:
    units: list[Unit] = []
    explicit: list[tuple[Node, int]] = []  # where used_by is written, and the unit's index
    for entry, names, found in _entries(value, Unit):
        _check_bytes(entry, found)
        used_by = found.pop("used_by", None)
        for name in names:
            own = len(units)
            if used_by is not None:
                explicit.append((entry.any_mapping()["used_by"], own))
            units.append(Unit(name=name, used_by=(own,) if used_by is None else used_by, **found))
    for where, own in explicit:
        users = units[own].used_by
        for node, user in zip(where.sequence(), users, strict=True):
            if user >= len(units):
                problem = f"expected the index of a unit, 0 to {len(units) - 1}, got {user}"
                raise node.error(problem)
        if users and users[0] != own:
            raise where.error(f"expected the unit's own index {own} first, got {users[0]}")
        if list(users) != sorted(set(users)):
            raise where.error(f"expected ascending indices, got {cut(str(list(users)))}")
    return tuple(units)


def _check_bytes(entry: Node, found: Mapping[str, Any]) -> None:
    """Trainable parameters have bytes, and so have their gradients; pieces are all of them."""
    values = entry.any_mapping()
    for name in ("parameter_bytes", "gradient_bytes"):
        if found["num_parameters"] and not found[name]:
            raise values[name].error("expected bytes of the parameters, got 0")
    parameters, gradients = found.get("parameter_pieces", ()), found.get("gradient_pieces", ())
    parts = [
        (entry, "parameter_pieces", parameters, found["parameter_bytes"]),
        (entry, "gradient_pieces", gradients, found["gradient_bytes"]),
    ]
    for form, cost in zip(values["forms"].sequence(), found["forms"], strict=True):
        parts.append((form, "swap_pieces", cost.swap_pieces, cost.swappable_bytes))
    for holder, name, pieces, whole in parts:
        if pieces and sum(pieces) != whole:
            problem = f"expected pieces of {whole} bytes together, got {sum(pieces)}"
            raise holder.any_mapping()[name].error(problem)
    if len(parameters) != len(gradients):
        problem = "expected as many parameter_pieces as gradient_pieces"
        raise entry.error(f"{problem}, got {len(parameters)} and {len(gradients)}")


def _entries(
    value: Node, owner: Any, extra: Mapping[str, Reader] = MappingProxyType({})
) -> Iterator[tuple[Node, list[str], dict[str, Any]]]:
    """Each entry of a list of units, the names of the units it speaks of, and its other fields."""
    readers: dict[str, Reader] = {"names": _run, **_readers(owner), **extra}
    readers.pop("schedule", None)  # its fields are keys of the unit itself
    optional = ("name", "names", "used_by", *extra, *may_miss(owner))
    seen: set[str] = set()
    unfolded = 0
    for entry in value.sequence():
        values = entry.mapping(readers, optional)
        found = {name: read(values[name]) for name, read in readers.items() if name in values}
        one, several = found.pop("name", None), found.pop("names", None)
        if (one is None) == (several is None):
            raise entry.error(
                "missing key 'name'" if one is None else "expected 'name' or 'names', got both"
            )
        names = [one] if several is None else several
        unfolded += len(names) * entry.num_nodes
        for most, count, what in (
            (MAX_UNITS, len(seen) + len(names), "units"),
            (MAX_UNFOLDED, unfolded, "keys and values"),
        ):
            if count > most:
                raise value.error(
                    f"expected at most {most} {what}, runs unfolded, got {count} up to"
                    f" {cut(names[-1])!r}"
                )
        for name in names:
            if name in seen:
                raise entry.error(f"the unit {cut(name)!r} stands here twice")
            seen.add(name)
        yield entry, names, found
    if not seen:
        raise value.error("expected at least one unit, got none")


def _run(value: Node) -> list[str]:
    text = value.text()
    names = unfold(text)
    if (length := run_length(text)) > MAX_RUN:
        raise value.error(f"expected a run of at most {MAX_RUN} units, got {length}")
    if names is None:
        problem = f"expected a run of units such as layers.0-11, got {cut(text)!r}"
        raise value.error(problem, "write a single unit as name: ...")
    return names


def _check_plan(plan: Plan, value: Node) -> None:
    """Refuse unequal nodes or replicas, a wrong exactness, and forms that do not fit."""
    group = plan.group
    for key, parts in (("num_nodes", group.num_nodes), ("num_replicas", group.num_replicas)):
        if group.num_devices % parts:
            where = value.any_mapping()["settings"].any_mapping()["group"].any_mapping()[key]
            raise where.error(f"{group.num_devices} devices are no equal parts of {parts}")
    exactness, leaves = plan.opt_in
    by_host = plan.exactness == "host rounding"  # which needs no leave, and follows from the units
    rules = (
        ("exact", by_host or plan.exact, exactness == "bitwise"),
        ("exactness", "bitwise" if by_host else plan.exactness, exactness),
        ("allowed", plan.allowed, leaves),
    )
    for key, told, found in rules:
        if told != found:
            keys = value.any_mapping()
            shown = listed(found, "and") if isinstance(found, tuple) else str(found).lower()
            why = f"its activations take {listed(sorted(plan.forms), 'and')}"
            why += ", and reductions are in every micro-batch" * plan.settings.adds_shards
            raise keys.get(key, value).error(f"expected {shown or 'no leave'}: {why}")
    if plan.pipeline is not None:
        _check_pipeline(plan, plan.pipeline, value.any_mapping()["pipeline"])
    read = _readers(UnitPlan)["activations"]
    for entry in value.any_mapping()["units"].sequence():
        node = entry.any_mapping()["activations"]
        if why := misfit(read(node).form, compiled=bool(plan.workload.compile)):
            raise node.error(f"{node.text()!r} {why}", PLAN_AGAIN)


def _check_pipeline(plan: Plan, pipeline: PipelinePlan, value: Node) -> None:
    """Refuse stages that do not begin at units, in their order, as many times each."""
    keys = value.any_mapping()
    if plan.whole.num_devices % pipeline.num_nodes:
        nodes = f"{plan.whole.num_devices} devices are no equal parts of {pipeline.num_nodes} nodes"
        raise keys["num_nodes"].error(nodes)
    stages = keys["stages"]
    if len(pipeline.stages) < 2:
        raise stages.error(f"expected at least two stages, got {len(pipeline.stages)}")
    entries = [entry.any_mapping()["first_units"] for entry in stages.sequence()]
    interleaved, names = pipeline.schedule == "interleaved 1F1B", [unit.name for unit in plan.units]
    for entry, stage in zip(entries, pipeline.stages, strict=True):
        count = len(stage.first_units)
        if count != pipeline.chunks or (count > 1) != interleaved:
            wanted = "a unit for each chunk, as many in all stages" if interleaved else "one unit"
            raise entry.error(f"expected {wanted}, got {count}")
    after = -1
    for chunk in range(pipeline.chunks):
        for entry in entries:
            node = entry.sequence()[chunk]
            if (name := node.text()) not in names:
                problem = f"expected the name of a unit, got {cut(name)!r}"
                raise node.error(problem, did_you_mean(name, names))
            if (place := names.index(name)) <= after or (after < 0 and place):
                begins = names[0] if after < 0 else f"a unit behind {names[after]}"
                raise node.error(f"expected {begins}, got {cut(name)!r}")
            after = place


def _check_profile(profile: Profile, value: Node) -> None:
    """Compiled blocks have no form that goes by what is inside, and others none of a graph."""
    for entry in value.any_mapping()["units"].sequence():
        for cost in entry.any_mapping()["forms"].sequence():
            node = cost.any_mapping()["form"]
            if why := misfit(node.text(), compiled=bool(profile.workload.compile)):
                raise node.error(f"{node.text()!r} {why}", "profile again")


_OWN_RULES: dict[tuple[type, str], Reader] = {
    (Workload, "model_config"): _configuration,
    (Hardware, "tiers"): partial(_each_once, Tier, "name", "tier"),
    (Unit, "forms"): _forms,
    (Profile, "units"): _profile_units,
    (Plan, "units"): _plan_units,
}
"""Fields with rules of their own."""
