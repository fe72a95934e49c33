"""Record -> YAML text: the same record always gives the same bytes, and every byte has a reason."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_args, get_origin

from protrain_runtime.contract.records.decisions import WORDINGS, Decision
from protrain_runtime.contract.records.folding import fold, runs
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.limits import IS_SIZE, Lines, Slots, Tensors
from protrain_runtime.contract.records.plan import Plan, Schedule, UnitPlan
from protrain_runtime.contract.records.profile import Profile, Unit
from protrain_runtime.contract.records.schema import (
    KINDS,
    STEP_END,
    VERSION,
    Record,
    hints,
    mark_of,
)
from protrain_runtime.contract.records.words import number_text
from protrain_runtime.contract.units import exact_bytes

_COMMENTS: dict[type[Record], str] = {
    Hardware: """\
# What a machine offers to a training run: its device, the tiers below, their links and speeds.
#   rates    for estimates: an operator takes FLOPs / (flops_per_s * efficiency of its shape) or
#            bytes / (memory_bytes_per_s * memory_efficiency), whichever is more, and operator_s
#   sources  where the numbers are from
""",
    Profile: """\
# What a model costs on a machine, unit by unit in execution order, in bytes and seconds.
#   names      a run of equal units (layers.0-2: layers.0, layers.1, layers.2)
#   used_by    the units that read the parameters; absent: the unit alone; []: no parameters
""",
    Plan: """\
# A training plan: what each unit keeps for backward, and where its model states live.
#   names        a run of equal units (layers.0-2: layers.0, layers.1, layers.2)
#   activations  keep | recompute | swap to TIER | swap-input to TIER (and recompute)
#                recompute lite|mlp|attn, swap to TIER and recompute lite|mlp|attn: in part
#   states       persistent (and update in backward) | offload to TIER or shard (and keep gathered)
#   ..._lead     a fetch may start this many slots before the one it serves; absent: 0
#   ..._drain    bytes have left the device this many slots later; absent: by the step's end
#                (1.3: two slots for 30 % of the bytes, one slot for the others)
""",
}

_OF_PIPELINES = """\
#   pipeline     stages, each with the units from its first ones up to another stage's; held:
#                micro-batches whose activations it has at a time
"""


class _Line(dict[str, Any]):
    """A mapping that is written on one line."""


class _Sentences(list[str]):
    """A list that is written with one item on each line."""


_ON_ONE_LINE = (
    *("Link", "Observed", "Contention", "Rates", "Collectives", "FormCost", "Repetitions"),
    *("Compilation", "Budgets", "TierBytes", "UnitPlan", "StepSettings", "DeviceGroup"),
)


def dumps(record: Record) -> str:
    """The record as YAML text, with a header that explains it."""
    header = {"protrain": KINDS[type(record)], "version": str(VERSION)}
    comments = _COMMENTS[type(record)]
    if isinstance(record, Plan) and record.pipeline is not None:
        comments += _OF_PIPELINES
    return comments + _text(header | _mapping(record))


def fingerprint(record: Record) -> str:
    """`sha256:` and 16 digits; equal for equal records, whatever the comments of their files."""
    text = _text({"protrain": KINDS[type(record)]} | _mapping(record))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _text(mapping: Mapping[str, Any]) -> str:
    return "".join(f"{line}\n" for line in _block(mapping))


def _mapping(record: Any) -> dict[str, Any]:
    """The record's fields as text, lists and mappings of these."""
    mapping = _Line() if type(record).__name__ in _ON_ONE_LINE else {}
    types = hints(record.__class__)
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, Schedule):
            mapping |= _mapping(value)  # its fields are keys of the unit itself
        elif value != f.default:
            mapping[f.name] = _field(types[f.name], value)
    return mapping


def _field(hint: Any, value: Any) -> Any:
    of = (get_args(hint) or (hint,))[0]
    match value:
        case None:
            return STEP_END
        case bool():
            return "true" if value else "false"
        case int() if mark_of(hint) == IS_SIZE:
            return exact_bytes(value)
        case int() | float() if Slots in (hint, of) and float(value).is_integer():
            return str(int(value))
        case int() | float():
            return str(value) if of is int else number_text(value)
        case str():
            return _quoted(value)
        case (Unit() | UnitPlan(), *_):
            return _units(value)
        case tuple():
            item = get_args(of)[0] if get_origin(of) is tuple else of
            texts = [_field(item, one) for one in value]
            return _Sentences(texts) if hint == Tensors or item == Lines else texts
        case _ if isinstance(value, Decision):
            return WORDINGS[value].phrase
        case _:
            return _mapping(value)


def _units(units: Sequence[Unit | UnitPlan]) -> list[dict[str, Any]]:
    """One entry for each run of units that are written alike."""
    contents = [_mapping(unit) for unit in units]
    for own, (unit, content) in enumerate(zip(units, contents, strict=True)):
        del content["name"]
        if isinstance(unit, Unit) and unit.used_by == (own,):
            del content["used_by"]
    entries = []
    for run in runs([unit.name for unit in units], contents):
        first, last = units[run[0]].name, units[run[-1]].name
        name = {"name": first} if len(run) == 1 else {"names": fold(first, last)}
        content = contents[run[0]]
        entries.append(type(content)({key: _quoted(text) for key, text in name.items()} | content))
    return entries


def _block(mapping: Mapping[str, Any]) -> list[str]:
    """The lines of a mapping with one key on each."""
    lines: list[str] = []
    for key, value in mapping.items():
        match value:
            case [dict(), *_] | _Sentences():
                lines.append(f"{key}:")
                for item in value:
                    block = _block(item) if type(item) is dict else [_flow(item)]
                    lines += (f"  {'  ' if i else '- '}{line}" for i, line in enumerate(block))
            case dict() if not isinstance(value, _Line):
                lines.append(f"{key}:")
                lines += (f"  {line}" for line in _block(value))
            case _:
                lines.append(f"{key}: {_flow(value)}")
    return lines


def _flow(value: Any) -> str:
    """The value on one line."""
    match value:
        case dict():
            return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{', '.join(_flow(item) for item in value)}]"
        case _:
            return str(value)


# Words of these characters are texts in every version of YAML, in blocks as in lines...
_PLAIN = re.compile(r"[A-Za-z_](?:[A-Za-z0-9_./@+-]|[ :](?=[A-Za-z0-9_./@+-]))*")
# ... except for these, which stand for a boolean or for nothing.
_RESERVED = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


def _quoted(text: str) -> str:
    """The text as YAML that reads back exactly: plain where that is safe."""
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08X}"
