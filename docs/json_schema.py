"""The records as JSON Schema (draft 2020-12), for editors and for programs in other languages.

They are of the types that the reader takes. What a schema cannot say, and the reader alone refuses:
names that stand twice, references to units that are not there, the order of `used_by`, runs that do
not count up, sizes as texts that are beyond their limits or lack a unit, characters that are not
seen, numbers that are next to 0, and what does not go together.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from protrain_plan.checking.budgets import content
from protrain_runtime.contract.records.schema import KINDS, content_of

Schema = dict[str, Any]
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(name: str, kind: Callable[[], type]) -> Schema:
    """The schema of a file of a type."""
    (top,), definitions = msgspec.json.schema_components([kind()], ref_template="#/$defs/{name}")
    schema: Schema = definitions.pop(top["$ref"].rpartition("/")[2])
    for unit in ("Unit", "UnitPlan"):
        if unit in definitions:  # a unit has a name, and a run of units has names
            definitions[unit]["oneOf"] = [{"required": ["name"]}, {"required": ["names"]}]
    schema = {"$schema": DRAFT, **schema, "title": f"protrain {name}"}
    return schema | ({"$defs": definitions} if definitions else {})


SCHEMAS: dict[str, Callable[[], Schema]] = {
    **{name: partial(schema_of, name, partial(content_of, kind)) for kind, name in KINDS.items()},
    "budgets": partial(schema_of, "budgets", content),
}
"""Schemas published in `schemas/NAME.schema.json`."""
