"""Budgets of each machine: `[tool.protrain.budgets]` in pyproject.toml, or a YAML file.

    protrain: budgets                       [tool.protrain.budgets.rtx-4090]
    version: 1                              device = "22GiB"
    budgets:                                headroom = "5%"
      rtx-4090: {device: 22GiB, headroom: 5%, slowdown: 10%, plans: ["plans/*-4090/*"]}

device, host, disk  the most that a plan may take of the machine's tiers
headroom            the part of each of these that has to stay free
step_seconds        the most that a predicted step may take
slowdown            how much slower than the plan's own prediction a step may become
plans               patterns of plans, besides those made for this machine, that have to fit it

Beside the machines stands what plans may have leave for: `allow: [rounding]`, and
`allow = ["rounding"]` in `[tool.protrain]`.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any, TypeVar

import yaml

from protrain_runtime.contract.errors import ProtrainError, RecordError, cut
from protrain_runtime.contract.records.files import read_text, refuse_outside
from protrain_runtime.contract.records.forms import FORMS, leaves_of
from protrain_runtime.contract.records.reader import headed
from protrain_runtime.contract.records.schema import MAX_LIST, STEPS
from protrain_runtime.contract.records.tree import (
    Node,
    as_seen,
    did_you_mean,
    listed,
    parsed_toml,
    root,
)
from protrain_runtime.contract.units import typed_bytes

Number = TypeVar("Number", int, float)

KIND_KEY, KIND, VERSION = "protrain", "budgets", 1
YAML_NAME, TOML_NAME = "budgets.yaml", "pyproject.toml"

_MAX_MACHINES, _MAX_PATTERN = 200, 200  # characters of a pattern, whose wildcards take time

PERCENTAGE = r"[0-9]{1,6}(\.[0-9]{1,9})? ?%"


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
        """Return whether a plan has to fit this machine, whatever it was made for."""
        return any(PurePath(plan).match(pattern) for pattern in self.plans)


KEYS = tuple(f.name for f in fields(MachineBudget) if f.name not in ("machine", "source"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of plans: budgets by machine, and leave for what is not exact."""

    budgets: Mapping[str, MachineBudget] = field(default_factory=dict)
    allow: tuple[str, ...] = ()


def find_limits(named: Path | None, *, folder: Path = Path()) -> Limits:
    """The limits of `named`, else of budgets.yaml or pyproject.toml in `folder`.

    None where there is neither. RecordError where a file has something else, ProtrainError where
    both files have budgets.
    """
    if named is not None:
        return _read_toml(named) if named.suffix == ".toml" else read_limits(named)
    as_yaml, as_toml = folder / YAML_NAME, folder / TOML_NAME
    for path in sorted(folder.iterdir()):
        alike = path.name.lower() in (YAML_NAME, "budgets.yml") and path.name != YAML_NAME
        if alike or path in (as_yaml, as_toml):
            refuse_outside(path, folder)
        if alike and f"protrain: {KIND}" in read_text(path):
            problem, fix = f"budgets are read from {YAML_NAME} alone", f"call it {YAML_NAME}"
            raise ProtrainError(problem, source=str(path), fix=fix)
    # What is there and cannot be read, such as a link that leads nowhere, is an error.
    from_toml = _read_toml(as_toml) if os.path.lexists(as_toml) else Limits()
    if not os.path.lexists(as_yaml):
        return from_toml
    if from_toml != Limits():
        raise ProtrainError(
            f"there are budgets here and in {as_toml}",
            source=str(as_yaml),
            fix="keep one of them, or name it with --budgets",
        )
    return read_limits(as_yaml)


def read_limits(path: Path) -> Limits:
    """The limits in a YAML file; RecordError where it has something else."""
    # Of a file that is none of ours no key is shown.
    top = headed(root(read_text(path), str(path)), KIND, VERSION)
    values = top.mapping((KIND_KEY, "version", "budgets", "allow"), optional=("allow",))
    return Limits(
        budgets=_budgets(values["budgets"], str(path)), allow=_leaves(values.get("allow"))
    )


def _read_toml(path: Path) -> Limits:
    source, where = str(path), "tool.protrain.budgets"
    document = parsed_toml(read_text(path), source)
    ours = _table(_table(document, "tool", source), "tool.protrain", source)
    for key in ours:
        if key not in ("budgets", "allow"):
            fix = did_you_mean(key, ["budgets", "allow"]) or "the keys are budgets and allow"
            problem = f"unknown key {cut(key)!r}"
            raise RecordError(problem, source=source, key="tool.protrain", fix=fix)
    machines = _table(ours, where, source)
    above = where

    def as_yaml(value: object) -> Node:
        # So that one reader reads both; its lines are not the file's.
        return root(yaml.safe_dump(value, sort_keys=False), source)

    try:
        budgets = _budgets(as_yaml(machines), source)
        above = "tool.protrain"
        given = as_yaml({key: ours[key] for key in ("allow",) if key in ours})
        leaves = _leaves(given.mapping(("allow",), optional=("allow",)).get("allow"))
    except RecordError as error:
        key = f"{above}.{error.key}" if error.key else above
        raise RecordError(error.message, source=source, key=key, fix=error.fix) from None
    return Limits(budgets=budgets, allow=leaves)


def _table(above: Mapping[str, Any], where: str, source: str) -> dict[str, Any]:
    """The table called so, empty where there is none."""
    name = where.rpartition(".")[2]
    for key in above:
        if key != name and as_seen(key).strip() == name:
            problem = f"the key {key!a} is not {name}, and looks like it"
            raise RecordError(problem, source=source, key=where, fix=f"write it as {name}")
    table = above.get(name, {})
    if not isinstance(table, dict):
        raise RecordError(f"expected a table, got {cut(repr(table))}", source=source, key=where)
    return table


def _budgets(machines: Node, source: str) -> dict[str, MachineBudget]:
    entries = machines.any_mapping()
    found = {
        machine: _budget(machine, source, entry.mapping(KEYS, optional=KEYS))
        for machine, entry in entries.items()
    }
    # A plan is held against all of them.
    num_patterns = sum(len(budget.plans) for budget in found.values())
    for what, count, most in (
        ("machines", len(found), _MAX_MACHINES),
        ("patterns of plans", num_patterns, MAX_LIST),
    ):
        if count > most:
            raise machines.error(f"expected at most {most} {what}, got {count}")
    return found


def _budget(machine: str, source: str, values: Mapping[str, Node]) -> MachineBudget:
    def size(key: str) -> int | None:
        return _parsed(values.get(key), "a size", typed_bytes)

    def fraction(key: str) -> float | None:
        return _parsed(values.get(key), "a percentage such as 5%", _fraction)

    headroom = fraction("headroom")
    if headroom is not None and headroom >= 1:
        raise values["headroom"].error("expected less than 100%")
    return MachineBudget(
        machine=machine,
        source=source,
        device=size("device"),
        host=size("host"),
        disk=size("disk"),
        headroom=headroom or 0.0,
        step_seconds=_parsed(values.get("step_seconds"), "seconds such as 3.5", _seconds),
        slowdown=fraction("slowdown"),
        plans=_patterns(values.get("plans")),
    )


def _parsed(value: Node | None, what: str, parse: Callable[[str], Number]) -> Number | None:
    """Return the number of an entry, if there is one; `parse` raises ValueError for other texts."""
    if value is None:
        return None
    if not isinstance(value.node, yaml.ScalarNode):
        found = "a list" if isinstance(value.node, yaml.SequenceNode) else "a mapping"
        raise value.error(f"expected {what}, got {found}")
    text = str(value.node.value)
    try:
        return parse(text)
    except ProtrainError as error:
        raise value.error(error.message, error.fix) from None
    except ValueError:
        raise value.error(f"expected {what}, got {cut(text)!r}") from None


def _fraction(text: str) -> float:
    if re.fullmatch(PERCENTAGE, text) is None:
        raise ValueError
    return float(text.removesuffix("%")) / 100


def _seconds(text: str) -> float:
    seconds = float(text)
    if seconds not in STEPS:
        raise ProtrainError(f"expected seconds {STEPS}, got {cut(text)!r}")
    return seconds


def _leaves(value: Node | None) -> tuple[str, ...]:
    """Words that `--allow` knows."""
    if value is None:
        return ()
    known = leaves_of(FORMS)
    if not isinstance(value.node, yaml.SequenceNode):
        raise value.error(f"expected a list of {listed(known, 'and')}")
    found = {item.text(): item for item in value.sequence(MAX_LIST)}
    for leave, item in found.items():
        if leave not in known:
            raise item.error(f"expected {listed(known, 'or')}, got {cut(leave)!r}")
    return tuple(found)


def _patterns(value: Node | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value.node, yaml.SequenceNode):
        raise value.error("expected a list of patterns such as ['plans/*']")
    found = {item.text(_MAX_PATTERN): item for item in value.sequence(MAX_LIST)}
    for pattern, item in found.items():
        try:
            PurePath().match(pattern)
        except ValueError:  # of no parts, such as '' and '.'
            problem = f"expected a pattern such as plans/*, got {cut(pattern)!r}"
            raise item.error(problem) from None
    return tuple(found)
