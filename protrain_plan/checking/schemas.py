"""The records as JSON Schema (draft 2020-12), for editors and for programs in other languages.

Made from the dataclasses' own annotations, as the reader is. What a schema cannot say, and the
reader alone refuses: names that stand twice, references to units that are not there, the order of
`used_by`, runs that do not count up, sizes and integers beyond 2**63 in places of numbers or texts.
"""

import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from protrain_plan.checking.budgets import KEYS as BUDGET_KEYS
from protrain_plan.checking.budgets import PERCENTAGE
from protrain_plan.records.hardware import Hardware
from protrain_plan.records.plan import Activations, Placement, Plan, Schedule, UnitPlan
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.records.schema import (
    ACTIVATIONS,
    KINDS,
    LIMITS,
    NOT_NEGATIVE,
    PATTERNS,
    STATES,
    STEP_END,
    VERSION,
    Limits,
    is_size,
)

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
SIZE = r"^\s*[0-9]{1,30}(\.[0-9]{1,30})? ?([KMGTPkmgtp][Ii]?)?[Bb]?\s*$"
_MAX_INTEGER = 2**63 - 1


def record_schema(kind: type) -> Schema:
    """The schema of a file that holds a record of this kind."""
    definitions: dict[str, Schema] = {}
    top = _object(kind, definitions)
    return _file(KINDS[kind], top["properties"], top["required"], definitions)


def budgets_schema() -> Schema:
    """The schema of a budgets.yaml."""
    size = _size(NOT_NEGATIVE)
    percentage = {"type": "string", "pattern": f"^{PERCENTAGE}$"}
    known: dict[str, Schema] = {
        **dict.fromkeys(("device", "host", "disk"), size),
        "headroom": percentage,
        "slowdown": percentage,
        "step_seconds": {"type": "number", "exclusiveMinimum": 0},
        "plans": {"type": "array", "items": {"type": "string"}},
    }
    machine = {
        "type": "object",
        "properties": {key: known[key] for key in BUDGET_KEYS},
        "additionalProperties": False,
    }
    machines = {"type": "object", "additionalProperties": machine}
    return _file("budgets", {"budgets": machines}, ["budgets"], {})


SCHEMAS: dict[str, Callable[[], Schema]] = {
    "hardware": lambda: record_schema(Hardware),
    "profile": lambda: record_schema(Profile),
    "plan": lambda: record_schema(Plan),
    "budgets": budgets_schema,
}
"""What is published in `schemas/NAME.schema.json`."""


def _file(
    kind: str, properties: Schema, required: list[str], definitions: dict[str, Schema]
) -> Schema:
    header = {"protrain": {"const": kind}, "version": {"const": VERSION}}
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
    required = [
        f.name for f in fields(owner) if f.default is MISSING and f.name not in ("used_by",)
    ]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    if owner is UnitPlan:
        properties |= _object(Schedule, definitions)["properties"]
    if owner in (Unit, UnitPlan):
        _name_or_names(schema)
    return schema | {"additionalProperties": False}


def _name_or_names(schema: Schema) -> None:
    """A unit has a name; a run of units has `names` instead."""
    run = {"type": "string", "pattern": "[0-9]-[0-9]"}
    schema["properties"] = {"name": {"type": "string"}, "names": run} | schema["properties"]
    schema["required"].remove("name")
    schema["oneOf"] = [{"required": ["name"]}, {"required": ["names"]}]


def _value(owner: Any, name: str, hint: Any, definitions: dict[str, Schema]) -> Schema:
    limits = LIMITS.get((owner, name), NOT_NEGATIVE)
    if (owner, name) in PATTERNS:
        return {"type": "string", "pattern": f"^{PATTERNS[owner, name][0]}$"}
    if hint == Activations:
        return {"enum": list(ACTIVATIONS)}
    if hint == Placement:
        return {"enum": list(STATES)}
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        items = _value(owner, name, get_args(hint)[0], definitions)
        schema = {"type": "array", "items": items}
        return schema | ({"minItems": 1} if name in ("units", "forms") else {})
    if hint == float | None:
        return {"oneOf": [_bounded("number", limits), {"const": STEP_END}]}
    if hint is int:
        return _size(limits) if is_size(owner, name) else _bounded("integer", limits)
    scalars: dict[Any, Schema] = {
        float: _bounded("number", limits),
        str: {"type": "string"},
        bool: {"type": "boolean"},
    }
    if hint in scalars:
        return scalars[hint]
    [kind] = [part for part in get_args(hint) or (hint,) if part is not type(None)]
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = _object(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _size(limits: Limits) -> Schema:
    """Bytes as a number, or as a text with a unit."""
    return {"oneOf": [_bounded("integer", limits), {"type": "string", "pattern": SIZE}]}


def _bounded(kind: str, limits: Limits) -> Schema:
    schema: Schema = {"type": kind}
    if limits.low > -math.inf:
        schema["minimum" if limits.low_allowed else "exclusiveMinimum"] = limits.low
    if limits.high is not None:
        schema["maximum"] = limits.high
    elif kind == "integer":
        schema["maximum"] = _MAX_INTEGER
    return schema
