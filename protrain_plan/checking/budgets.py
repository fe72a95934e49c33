"""What each machine may be taken of: `[tool.protrain.budgets]` in pyproject.toml, or a YAML file.

    protrain: budgets                       [tool.protrain.budgets.rtx-4090]
    version: 1                              device = "22GiB"
    budgets:                                headroom = "5%"
      rtx-4090: {device: 22GiB, headroom: 5%, slowdown: 10%, plans: ["plans/*-4090/*"]}

device, host, disk  the most that a plan may take of the machine's tiers
headroom            the part of each of these that has to stay free
step_seconds        the most that a predicted step may take
slowdown            how much slower than the plan's own prediction a step may become
plans               patterns of plans, besides those made for this machine, that have to fit it
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

import yaml

from protrain_plan.errors import ProtrainError, RecordError
from protrain_plan.records.files import read_text
from protrain_plan.records.schema import VERSION
from protrain_plan.records.tree import Value, did_you_mean, listed, root
from protrain_plan.units import parse_bytes

KIND = "budgets"
YAML_NAME, TOML_NAME = "budgets.yaml", "pyproject.toml"

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
        """Whether a plan is among those that have to fit this machine, whatever made for."""
        return any(PurePath(plan).match(pattern) for pattern in self.plans)


KEYS = tuple(f.name for f in fields(MachineBudget) if f.name not in ("machine", "source"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A value of either file as text (or a list of texts), and where it stands."""

    value: str | list[str] | None  # None: something else
    source: str
    line: int | None
    key: str

    def error(self, message: str, fix: str | None = None) -> RecordError:
        return RecordError(message, source=self.source, line=self.line, key=self.key, fix=fix)

    def text(self, what: str) -> str:
        if not isinstance(self.value, str):
            raise self.error(f"expected {what}, got {'a list' if self.value else 'a mapping'}")
        return self.value


def find_budgets(named: Path | None, *, folder: Path = Path()) -> dict[str, MachineBudget]:
    """Budgets by machine: those of `named`, else of budgets.yaml or pyproject.toml in `folder`.

    Empty where there is neither. RecordError where a file has something else, ProtrainError where
    both files have budgets.
    """
    if named is not None:
        return _read_toml(named) if named.suffix == ".toml" else _read_yaml(named)
    as_yaml, as_toml = folder / YAML_NAME, folder / TOML_NAME
    from_toml = _read_toml(as_toml) if as_toml.is_file() else {}
    if not as_yaml.is_file():
        return from_toml
    if from_toml:
        raise ProtrainError(
            f"there are budgets here and in {as_toml}",
            source=str(as_yaml),
            fix="keep one of them, or name it with --budgets",
        )
    return _read_yaml(as_yaml)


def _read_yaml(path: Path) -> dict[str, MachineBudget]:
    top = root(read_text(path), str(path))
    values = top.mapping(("protrain", "version", "budgets"))
    if (kind := values["protrain"].text()) != KIND:
        raise values["protrain"].error(f"expected {KIND}, got {kind!r}", did_you_mean(kind, [KIND]))
    if (version := values["version"].integer()) != VERSION:
        raise values["version"].error(f"expected version {VERSION}, got {version}")
    return {
        machine: _budget(
            machine,
            str(path),
            {key: _of_yaml(value) for key, value in entry.mapping(KEYS, optional=KEYS).items()},
        )
        for machine, entry in values["budgets"].any_mapping().items()
    }


def _of_yaml(value: Value) -> _Setting:
    found: str | list[str] | None = None
    if isinstance(value.node, yaml.ScalarNode):
        found = value.node.value
    elif isinstance(value.node, yaml.SequenceNode):
        found = [item.text() for item in value.sequence()]
    return _Setting(
        value=found,
        source=value.source or "",
        line=value.node.start_mark.line + 1,
        key=value.key or "",
    )


def _read_toml(path: Path) -> dict[str, MachineBudget]:
    source = str(path)
    try:
        document = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise RecordError(f"not readable as TOML: {error}", source=source) from None
    tool = _table(document, "tool", source, known=None)
    ours = _table(tool, "tool.protrain", source, known=("budgets",))
    machines = _table(ours, "tool.protrain.budgets", source, known=None)
    budgets = {}
    for machine in machines:
        where = f"tool.protrain.budgets.{machine}"
        entry = _table(machines, where, source, known=KEYS, name=machine)
        settings = {key: _of_toml(value, f"{where}.{key}", source) for key, value in entry.items()}
        budgets[machine] = _budget(machine, source, settings)
    return budgets


def _table(
    above: Mapping[str, Any],
    where: str,
    source: str,
    *,
    known: tuple[str, ...] | None,
    name: str | None = None,
) -> Mapping[str, Any]:
    """The table called so (empty where there is none), with keys that are known."""
    table = above.get(name or where.rpartition(".")[2], {})
    if not isinstance(table, dict):
        raise RecordError(f"expected a table, got {table!r}", source=source, key=where)
    for key in table if known else ():
        if known and key not in known:
            fix = did_you_mean(key, known) or f"the keys are {listed(known, 'and')}"
            raise RecordError(f"unknown key {key!r}", source=source, key=where, fix=fix)
    return table


def _of_toml(value: object, key: str, source: str) -> _Setting:
    found: str | list[str] | None = None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        found = value
    elif isinstance(value, str | int | float):
        found = str(value)
    return _Setting(value=found, source=source, line=None, key=key)


def _budget(machine: str, source: str, settings: Mapping[str, _Setting]) -> MachineBudget:
    def size(key: str) -> int | None:
        setting = settings.get(key)
        if setting is None:
            return None
        try:
            return parse_bytes(setting.text("a size"))
        except RecordError:
            raise
        except ProtrainError as error:
            raise setting.error(error.message, error.fix) from None

    headroom = _fraction(settings.get("headroom"))
    if headroom is not None and headroom >= 1:
        raise settings["headroom"].error("expected less than 100%")
    return MachineBudget(
        machine=machine,
        source=source,
        device=size("device"),
        host=size("host"),
        disk=size("disk"),
        headroom=headroom or 0.0,
        step_seconds=_seconds(settings.get("step_seconds")),
        slowdown=_fraction(settings.get("slowdown")),
        plans=_patterns(settings.get("plans")),
    )


def _fraction(setting: _Setting | None) -> float | None:
    if setting is None:
        return None
    text = setting.text("a percentage such as 5%")
    if re.fullmatch(PERCENTAGE, text) is None:
        raise setting.error(f"expected a percentage such as 5%, got {text!r}")
    return float(text.removesuffix("%")) / 100


def _seconds(setting: _Setting | None) -> float | None:
    if setting is None:
        return None
    text = setting.text("seconds such as 3.5")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise setting.error(f"expected seconds such as 3.5, got {text!r}")
    return seconds


def _patterns(setting: _Setting | None) -> tuple[str, ...]:
    if setting is None:
        return ()
    if not isinstance(setting.value, list):
        raise setting.error("expected a list of patterns such as ['plans/*']")
    return tuple(setting.value)
