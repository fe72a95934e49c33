"""Parts of all pages of results: tables, what was asked and found, and where a run was."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from protrain_runtime.contract.units import format_bytes


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that the project asks for, and what came."""

    name: str
    asked: str
    held: bool
    found: str


def markdown_table(rows: Iterable[Sequence[str]], *, numbers_from: int | None = None) -> list[str]:
    """The first row as header; columns from `numbers_from` on stand to the right."""
    header, *body = rows
    words = len(header) if numbers_from is None else numbers_from
    return [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * words + " ---: |" * (len(header) - words),
        *("| " + " | ".join(row) + " |" for row in body),
    ]


def bars_table(bars: Iterable[Bar]) -> list[str]:
    """A row for each bar."""
    told = ((b.name, b.asked, "held" if b.held else "**missed**", b.found) for b in bars)
    return markdown_table([("", "asked", "result", "found"), *told])


def quantile(values: Iterable[float], share: float) -> float:
    """The least of the values below which so large a share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float]) -> str:
    """`1.13 in the median, 0.96 to 1.39 from the 10th to the 90th percentile, 1.82 at most`."""
    return (
        f"{statistics.median(values):.2f} in the median, {quantile(values, 0.1):.2f} to"
        f" {quantile(values, 0.9):.2f} from the 10th to the 90th percentile, {max(values):.2f} at"
        " most"
    )


def runs_list(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where each run was made: command, machine, versions, commit."""
    for run in runs:
        versions = ", ".join(f"{name} {v}" for name, v in run["versions"].items() if v)
        here = run.get("accelerator")
        gpu = ""
        if here is not None:
            built_for = f", {here['kind']} {here['built_for']}" if here["built_for"] else ""
            gpu = f"{here['name']}, {format_bytes(here['memory_bytes'])}{built_for}; "
        memory = f", {format_bytes(run['memory_bytes'])}" if "memory_bytes" in run else ""
        load = f"; load {run['load']:.1f} at the start" if "load" in run else ""
        yield (
            f"- `{run['command']}`: {gpu}{run['platform']}, {run['cpus']} processors{memory};"
            f" Python {run['python']}, {versions}; {run['date']}, commit {run['commit']}{load}"
        )
