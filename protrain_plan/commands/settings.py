"""`fit --set NAME=VALUES`: each combination of the values is a cell of the grid."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from protrain_plan.commands.option_records import StepOptions, WorkloadOptions, filled
from protrain_plan.commands.options import on_command_line, size
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.hardware import PCIE
from protrain_runtime.contract.records.limits import MAX_COUNT
from protrain_runtime.contract.records.words import did_you_mean, listed

if TYPE_CHECKING:
    from protrain_plan.planning.questions.cells import Resource, Settings

Record = TypeVar("Record")

RESOURCES = ("host", "device", "disk", "link")
COUNTS = ("num-devices", "seq-len", "batch-size")
OPTIONS = tuple(
    f.name.replace("_", "-") for record in (WorkloadOptions, StepOptions) for f in fields(record)
)
WITH_COMMAS = ("lora", "optimizer-args")
"""Options whose text has commas: each `--set` is one value."""
MOST_VALUES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values by names: of resources (bytes, bytes per second), of counts, and of options."""

    given: dict[str, tuple[Any, ...]]

    def _chosen(self, names: Iterable[str]) -> "list[Settings]":
        return list(product(*([(n, v) for v in self.given[n]] for n in names if n in self.given)))

    @property
    def values(self) -> "list[tuple[tuple[Resource, float], ...]]":
        """Combinations of resources; one empty one if none is set."""
        return self._chosen(RESOURCES)  # type: ignore[return-value]

    def filled(self, record: Record) -> Record:
        """Return the record with the counts that were set, as texts."""
        counts = {n: ",".join(map(str, self.given[n])) for n in COUNTS if n in self.given}
        return filled(record, counts)

    def refuse_typed(self, context: typer.Context) -> None:
        """ProtrainError if the command line has an option that is also set here."""
        given = on_command_line(context)
        for name in (name for name in self.given if name != "link"):
            typed = f"{name}-memory" if name in ("device", "host") else name
            if _parameter(context, typed).name in given:
                problem = f"--set already has values of {name}"
                raise ProtrainError(problem, key=f"--{typed}", fix="use one of the two")

    def rows(
        self, workload: WorkloadOptions, step: StepOptions
    ) -> "Iterator[tuple[Settings, WorkloadOptions, StepOptions]]":
        """Yield the options with each combination of the values that were set."""
        for chosen in self._chosen(OPTIONS):
            yield chosen, filled(workload, dict(chosen)), filled(step, dict(chosen))


def read_settings(context: typer.Context, texts: Sequence[str] | None, sweep: str | None) -> Grid:
    """Read `host=64GiB..1TiB`, `link=pcie-3,pcie-4` or `optimizer=adamw,sgd` of --set and --sweep.

    Raises ProtrainError for other texts.
    """
    given: dict[str, tuple[Any, ...]] = {}
    named = [("--set", text) for text in texts or ()]
    for option, text in [*named, *([("--sweep", sweep)] if sweep else [])]:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            expected = "a setting and its values, such as host=64GiB..1TiB"
            raise ProtrainError(f"expected {expected}, got {cut(text)!r}", key=option)
        known = (*RESOURCES, *COUNTS, *OPTIONS)
        if name not in known:
            fix = did_you_mean(name, known) or f"there is {listed(known, 'and')}"
            raise ProtrainError(f"expected a setting, got {cut(name)!r}", key=option, fix=fix)
        if name in OPTIONS:
            parts = [values] if name in WITH_COMMAS else values.split(",")
            read = _parameter(context, name).process_value  # as the command line reads it
            found = tuple(read(context, part.strip()) for part in parts)
            given[name] = tuple(dict.fromkeys((*given.get(name, ()), *found)))
        else:
            given[name] = tuple(sorted({*given.get(name, ()), *_numbers(option, name, values)}))
        if (count := len(given[name])) > MOST_VALUES:
            raise ProtrainError(f"expected at most {MOST_VALUES} values, got {count}", key=option)
    return Grid(given=given)


def _parameter(context: typer.Context, name: str) -> Any:
    return next(one for one in context.command.params if f"--{name}" in one.opts)


def _numbers(option: str, name: str, text: str) -> list[float]:
    """Return the values of a text; those of a range double up to its end."""
    found: list[float] = []
    for part in text.split(","):
        first, several, last = part.partition("..")
        found.append(_number(option, name, first))
        if several:
            low, high = found[-1], _number(option, name, last)
            if not 0 < low <= high:
                how = "goes up" if low else "starts above zero"
                raise ProtrainError(f"expected a range that {how}, got {cut(part)!r}", key=option)
            while 2 * found[-1] < high and len(found) <= MOST_VALUES:
                found.append(2 * found[-1])
            found.append(high)
    return found


def _number(option: str, name: str, text: str) -> float:
    """A size, or a positive speed or count."""
    text = text.strip()
    if name in ("host", "device", "disk"):
        return size(option, text, 0)
    if name == "link":
        expected, per_s = f"{', '.join(PCIE)} or a speed such as 12GB/s", text.removesuffix("/s")
        value = PCIE[text] if text in PCIE else size(option, per_s, 0) if per_s != text else 0
    else:
        most = MAX_COUNT if name == "num-devices" else 10**9
        expected, is_number = f"a number from 1 to {most:,}", re.fullmatch("[0-9]{1,9}", text)
        value = int(text) if is_number and int(text) <= most else 0
    if value <= 0:
        raise ProtrainError(f"expected {expected}, got {cut(text)!r}", key=option)
    return value
