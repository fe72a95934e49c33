"""The records as JSON Schema (draft 2020-12), for editors and for programs in other languages.

They are those of the version that is written today, and made from the dataclasses' own
annotations, as the reader is. What a schema cannot say, and the reader alone refuses: names that
stand twice, references to units that are not there, the order of `used_by`, runs that do not count
up, sizes as texts that are beyond their limits or lack a unit, characters that are not seen, and
numbers that do not go together.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from protrain_plan.checking.budgets import KEYS as BUDGET_KEYS
from protrain_plan.checking.budgets import PERCENTAGE
from protrain_plan.checking.budgets import VERSION as BUDGETS_VERSION
from protrain_runtime.contract.records.decisions import ACTIVATIONS, STATES
from protrain_runtime.contract.records.forms import FORMS, leaves_of
from protrain_runtime.contract.records.plan import Activations, Placement, Schedule, UnitPlan
from protrain_runtime.contract.records.profile import FormCost, Unit, Workload
from protrain_runtime.contract.records.schema import (
    KINDS,
    MAX_CHARACTERS,
    MAX_ENTRIES,
    MAX_LIST,
    MAX_UNITS,
    PATTERNS,
    SIZES,
    STEP_END,
    STEPS,
    VERSION,
    Limits,
    is_size,
    limits_of,
    may_miss,
)
from protrain_runtime.contract.records.tree import MAX_TEXT
from protrain_runtime.contract.units import LEAST_BARE

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
SIZE = r"^\s*[0-9]{1,30}(\.[0-9]{1,30})? ?([KMGTPkmgtp][Ii]?)?[Bb]?\s*$"


def record_schema(kind: type) -> Schema:
    """The schema of a file that holds a record of this kind."""
    definitions: dict[str, Schema] = {}
    top = _object(kind, definitions)
    return _file(KINDS[kind], VERSION, top["properties"], top["required"], definitions)


def budgets_schema() -> Schema:
    """The schema of a budgets.yaml."""
    typed = Limits(low=LEAST_BARE, high=SIZES.high)  # fewer bytes have a unit
    size = {"oneOf": [{"const": 0}, *_size(typed)["oneOf"]]}
    percentage = {"type": "string", "pattern": f"^{PERCENTAGE}$"}
    known: dict[str, Schema] = {
        **dict.fromkeys(("device", "host", "disk"), size),
        "headroom": percentage,
        "slowdown": percentage,
        "step_seconds": _bounded("number", STEPS),
        "plans": {"type": "array", "items": _text(MAX_TEXT), "maxItems": MAX_LIST},
    }
    machine = {
        "type": "object",
        "properties": {key: known[key] for key in BUDGET_KEYS},
        "additionalProperties": False,
    }
    machines = {"type": "object", "additionalProperties": machine}
    allow = {"type": "array", "items": {"enum": list(leaves_of(FORMS))}, "maxItems": MAX_LIST}
    keys = {"budgets": machines, "allow": allow}
    return _file("budgets", BUDGETS_VERSION, keys, ["budgets"], {})


SCHEMAS: dict[str, Callable[[], Schema]] = {
    **{name: partial(record_schema, kind) for kind, name in KINDS.items()},
    "budgets": budgets_schema,
}
"""Schemas published in `schemas/NAME.schema.json`."""


def _file(
    kind: str,
    version: int,
    properties: Schema,
    required: list[str],
    definitions: dict[str, Schema],
) -> Schema:
    header = {"protrain": {"const": kind}, "version": {"const": version}}
    schema: Schema = {
        "$schema": DRAFT,
        "title": f"protrain {kind}",
        "type": "object",
        "properties": header | properties,
        "required": [*header, *required],
        "additionalProperties": False,
    }
    return schema | ({"$defs": definitions} if definitions else {})


def _object(owner: Any, definitions: dict[str, Schema]) -> Schema:
    """The mapping that a dataclass is written as."""
    hints = get_type_hints(owner)
    properties = {
        f.name: _value(owner, f.name, hints[f.name], definitions)
        for f in fields(owner)
        if f.name != "schedule"
    }
    missing_ok = {*may_miss(owner), "used_by"}
    required = [f.name for f in fields(owner) if f.name not in missing_ok]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    if owner is UnitPlan:
        properties |= _object(Schedule, definitions)["properties"]
    if owner in (Unit, UnitPlan):
        # A unit has a name; a run of units has `names` instead.
        run = _text(MAX_TEXT) | {"pattern": "[0-9]-[0-9]"}
        schema["properties"] = {"name": _text(MAX_TEXT), "names": run} | properties
        required.remove("name")
        schema["oneOf"] = [{"required": ["name"]}, {"required": ["names"]}]
    return schema | {"additionalProperties": False}


def _value(owner: Any, name: str, hint: Any, definitions: dict[str, Schema]) -> Schema:
    if hint == Activations:
        return {"enum": list(ACTIVATIONS)}
    if (owner, name) == (FormCost, "form"):
        return {"enum": list(FORMS)}
    if hint == Placement:
        return {"enum": list(STATES)}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        items = _value(owner, name, get_args(hint)[0], definitions)
        most = MAX_ENTRIES.get((owner, name), MAX_LIST)
        if name == "units":
            most = MAX_UNITS
        schema = {"type": "array", "items": items, "maxItems": most}
        return schema | ({"minItems": 1} if name in ("units", "forms") else {})
    if (owner, name) in PATTERNS:
        return {"type": "string", "pattern": f"^{PATTERNS[owner, name][0]}$"}
    if hint == float | None:
        return {"oneOf": [_bounded("number", limits_of(owner, name)), {"const": STEP_END}]}
    if hint is int:
        limits = limits_of(owner, name)
        return _size(limits) if is_size(owner, name) else _bounded("integer", limits)
    if hint is float:
        return _bounded("number", limits_of(owner, name))
    if (owner, name) == (Workload, "model_config"):
        return _text(MAX_CHARACTERS[owner, name]) | {"pattern": r"^(\s*\{[\s\S]*\}\s*)?$"}
    if hint is str:
        return _text(MAX_CHARACTERS.get((owner, name), MAX_TEXT))
    if hint is bool:
        return {"type": "boolean"}
    [kind] = [part for part in get_args(hint) or (hint,) if part is not type(None)]
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _size(limits: Limits) -> Schema:
    """Bytes as a number, or as a text with a unit."""
    return {"oneOf": [_bounded("integer", limits), {"type": "string", "pattern": SIZE}]}


def _bounded(kind: str, limits: Limits) -> Schema:
    bounds = {"minimum": limits.low, "maximum": limits.high}
    if limits.or_zero:
        return {"type": kind, "anyOf": [{"const": 0}, bounds]}
    return {"type": kind, **bounds}


def _text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}
