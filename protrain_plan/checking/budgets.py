"""Budgets by machine: `[tool.protrain.budgets]` in pyproject.toml, or a YAML file.

    protrain: budgets                       [tool.protrain.budgets.rtx-4090]
    version: 1                              device = "22GiB"
    budgets:                                headroom = "5%"
      rtx-4090: {device: 22GiB, headroom: 5%, slowdown: 10%, plans: ["plans/*-4090/*"]}

device, host, disk  maximum that a plan may take of the machine's tiers
headroom            share of each of these that has to stay free
step_seconds        maximum of a predicted step
slowdown            how much slower than the plan's own prediction a step may become
plans               patterns of plans, besides those made for this machine, that have to fit it

Besides machines, budgets list allowed approximations: `allow: [rounding]`, and
`allow = ["rounding"]` in `[tool.protrain]`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml
from msgspec import UNSET, Meta, UnsetType

from protrain_plan.checking.reviewed import refuse_outside
from protrain_runtime.contract.errors import ProtrainError, RecordError, cut
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.forms import FORMS, opt_ins_of
from protrain_runtime.contract.records.limits import MAX_LIST, MAX_TEXT, Bytes, StepSeconds
from protrain_runtime.contract.records.schema import SIZE
from protrain_runtime.contract.records.tree import Document, parsed, parsed_toml
from protrain_runtime.contract.records.words import as_seen, did_you_mean
from protrain_runtime.contract.units import typed_bytes

KIND: Final = "budgets"
VERSION: Final = 1
YAML_NAME, TOML_NAME = "budgets.yaml", "pyproject.toml"

_MAX_MACHINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineBudget:
    """The limits of one machine, in bytes, seconds and fractions; `source` is their file."""

    machine: str
    source: str
    device: int | None = None
    host: int | None = None
    disk: int | None = None
    headroom: float = 0.0
    step_seconds: float | None = None
    slowdown: float | None = None
    plans: tuple[str, ...] = ()

    def names(self, plan: Path) -> bool:
        """Return whether a plan has to fit this machine, even if it was made for another one."""
        return any(PurePath(plan).match(pattern) for pattern in self.plans)


_Size = Annotated[
    Bytes | Annotated[str, Meta(max_length=MAX_TEXT, extra_json_schema={"pattern": SIZE})],
    Meta(description="a size such as 22GiB"),
]
_Percentage = Annotated[
    str, Meta(pattern=r"^[0-9]{1,6}(\.[0-9]{1,9})? ?%$", description="a percentage such as 5%")
]


class Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A machine's limits in a file."""

    device: _Size | UnsetType = UNSET
    host: _Size | UnsetType = UNSET
    disk: _Size | UnsetType = UNSET
    headroom: _Percentage | UnsetType = UNSET
    step_seconds: StepSeconds | UnsetType = UNSET
    slowdown: _Percentage | UnsetType = UNSET
    plans: (
        Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=MAX_LIST)] | UnsetType
    ) = UNSET


def content() -> type[msgspec.Struct]:
    """The type of a file."""
    words: Any = Literal[opt_ins_of(FORMS)]
    allow = Annotated[list[words], Meta(max_length=MAX_LIST)]
    header = ("protrain", Literal[KIND]), ("version", Literal[VERSION])
    keys = (*header, ("budgets", dict[str, Entry]), ("allow", allow | UnsetType, UNSET))
    return msgspec.defstruct("budgets", keys, kw_only=True, forbid_unknown_fields=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of plans: budgets by machine, and allowed approximations."""

    budgets: Mapping[str, MachineBudget] = field(default_factory=dict)
    allow: tuple[str, ...] = ()


def find_limits(named: Path | None, *, folder: Path = Path()) -> Limits:
    """The limits of `named`, or of budgets.yaml or pyproject.toml in `folder`, if there are any.

    Raises RecordError for a file with other content, ProtrainError if both files have budgets.
    """
    if named is not None:
        return _read_toml(named) if named.suffix == ".toml" else read_limits(named)
    as_yaml, as_toml = folder / YAML_NAME, folder / TOML_NAME
    for path in sorted(folder.iterdir()):
        alike = path.name.lower() in (YAML_NAME, "budgets.yml") and path.name != YAML_NAME
        if alike or path in (as_yaml, as_toml):
            refuse_outside(path, folder)
        if alike and f"protrain: {KIND}" in read_text(path):
            problem, fix = f"budgets are read from {YAML_NAME} only", f"call it {YAML_NAME}"
            raise ProtrainError(problem, source=str(path), fix=fix)
    # A file that cannot be read, such as a link that leads nowhere, is an error.
    from_toml = _read_toml(as_toml) if os.path.lexists(as_toml) else Limits()
    if not os.path.lexists(as_yaml):
        return from_toml
    if from_toml != Limits():
        problem, fix = f"budgets are defined here and in {as_toml}", "keep one of them, or name it"
        raise ProtrainError(problem, source=str(as_yaml), fix=f"{fix} with --budgets")
    return read_limits(as_yaml)


def read_limits(path: Path) -> Limits:
    """The limits in a YAML file; RecordError for other content."""
    return _limits(parsed(read_text(path), str(path)).headed(KIND, VERSION))


def _limits(top: Document) -> Limits:
    budgets: dict[str, MachineBudget] = {}
    if "budgets" in top.data:
        machines = top.at("budgets")
        budgets = {name: _budget(name, entry) for name, entry in machines.mapping().items()}
        # A plan is checked against all of them.
        patterns = sum(len(budget.plans) for budget in budgets.values())
        most = {
            "machines": (_MAX_MACHINES, len(budgets)),
            "patterns of plans": (MAX_LIST, patterns),
        }
        for what, (limit, count) in most.items():
            if count > limit:
                raise machines.error(f"expected at most {limit} {what}, got {count}")
    top.read(content())
    return Limits(budgets=budgets, allow=tuple(dict.fromkeys(top.data.get("allow", ()))))


def _read_toml(path: Path) -> Limits:
    source, where = str(path), "tool.protrain.budgets"
    document = parsed_toml(read_text(path), source)
    ours = _table(_table(document, "tool", source), "tool.protrain", source)
    for key in ours:
        if key not in ("budgets", "allow"):
            fix = did_you_mean(key, ["budgets", "allow"]) or "the valid keys are budgets and allow"
            problem = f"unknown key {cut(key)!r}"
            raise RecordError(problem, source=source, key="tool.protrain", fix=fix)
    machines = _table(ours, where, source)
    header = {"protrain": KIND, "version": VERSION}
    # One reader reads both formats; its line numbers are not those of this file.
    text = yaml.safe_dump(header | ours | {"budgets": machines}, sort_keys=False)
    try:
        return _limits(parsed(text, source))
    except RecordError as error:
        key = f"tool.protrain.{error.key}" if error.key else "tool.protrain"
        raise RecordError(error.message, source=source, key=key, fix=error.fix) from None


def _table(above: Mapping[str, Any], where: str, source: str) -> dict[str, Any]:
    """The table of this name; empty if there is none."""
    name = where.rpartition(".")[2]
    for key in above:
        if key != name and as_seen(key).strip() == name:
            problem = f"the key {key!a} is not {name}, but looks like it"
            raise RecordError(problem, source=source, key=where, fix=f"write it as {name}")
    table = above.get(name, {})
    if not isinstance(table, dict):
        raise RecordError(f"expected a table, got {cut(repr(table))}", source=source, key=where)
    return table


def _budget(machine: str, entry: Document) -> MachineBudget:
    entry.read(Entry)
    found = dict[str, Any](entry.data)
    for key in found.keys() & {"device", "host", "disk"}:
        with entry.at(key).located():
            found[key] = typed_bytes(str(found[key]))
    for key in found.keys() & {"headroom", "slowdown"}:
        found[key] = float(found[key].removesuffix("%")) / 100
    if found.get("headroom", 0) >= 1:
        raise entry.at("headroom").error("expected less than 100%")
    found["plans"] = tuple(dict.fromkeys(found.get("plans", ())))
    for index, pattern in enumerate(entry.data.get("plans", ())):
        try:
            PurePath().match(pattern)
        except ValueError:  # of no parts, such as '' and '.'
            raise entry.at("plans", index).expected("a pattern such as plans/*") from None
    return MachineBudget(machine=machine, source=str(entry.source), **found)
