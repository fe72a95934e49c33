"""What a run of the planner's benchmark amounts to: a summary, tables, files."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from benchmarks.provenance import commit, today

TIE = 1e-9
"""Relative seconds below which two plans are equally fast."""

BINDS = 1.01
"""Memory binds where our step takes more than this times the computation that is least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case's outcome; seconds are None where there is no plan."""

    setup: str
    machine: str
    share: float
    budget_bytes: int
    plain_seconds: float
    baseline_seconds: dict[str, float | None]
    baselines_solve_seconds: float
    status: Literal["optimal", "feasible", "infeasible"] = "infeasible"
    gap: float | None = None
    step_seconds: float | None = None
    lower_bound_seconds: float | None = None
    stall_seconds: float | None = None
    solve_seconds: float | None = None

    @property
    def label(self) -> str:
        return f"{self.setup} on {self.machine}, {self.budget_bytes / 1e9:.1f} GB ({self.share:g})"

    @property
    def binds(self) -> bool:
        """Whether memory costs time."""
        return self.step_seconds is not None and self.step_seconds > BINDS * self.plain_seconds


def summary(results: Sequence[CaseResult], *, not_run: int) -> dict[str, Any]:
    """The run's numbers under stable keys."""
    solved = [r for r in results if r.gap is not None]
    gaps = [r.gap for r in results if r.gap is not None]
    solve = sorted(r.solve_seconds for r in results if r.solve_seconds is not None)
    ratios: dict[str, list[float]] = {}
    faster: list[str] = []
    within_target: list[str] = []
    only_baseline: list[str] = []
    for r in results:
        for name, seconds in r.baseline_seconds.items():
            if seconds is None:
                continue
            if r.step_seconds is None:
                only_baseline.append(f"{r.label}: {name}")
            elif seconds < r.step_seconds * (1 - TIE):
                found = within_target if r.status == "optimal" else faster
                found.append(f"{r.label}: {name} by {r.step_seconds / seconds - 1:.3%}")
            if r.step_seconds is not None and r.binds:
                ratios.setdefault(name, []).append(seconds / r.step_seconds)
    by_gap = sorted(solved, key=lambda r: -(r.gap or 0.0))
    by_time = sorted(solved, key=lambda r: -(r.solve_seconds or 0.0))
    return {
        "num_cases": len(results),
        "num_solved": len(solved),
        "num_not_run": not_run,
        "solve_seconds": {
            "median": statistics.median(solve) if solve else None,
            "p95": solve[min(len(solve) - 1, int(0.95 * len(solve)))] if solve else None,
            "worst": solve[-1] if solve else None,
        },
        "share_gap_within_1_percent": sum(g <= 0.01 for g in gaps) / max(1, len(gaps)),
        "share_gap_within_0.5_percent": sum(g <= 0.005 for g in gaps) / max(1, len(gaps)),
        "share_gap_within_5_percent": sum(g <= 0.05 for g in gaps) / max(1, len(gaps)),
        "worst_gap": max(gaps, default=None),
        "num_memory_binds": sum(r.binds for r in results),
        "baseline_over_ours_where_memory_binds": {
            name: {
                "cases": len(values),
                "mean": statistics.mean(values),
                "median": statistics.median(values),
                "max": max(values),
            }
            for name, values in sorted(ratios.items())
        },
        "baseline_faster": faster,
        "baseline_faster_within_gap_target": within_target,
        "only_baseline_feasible": only_baseline,
        "worst_gaps": [f"{r.label}: gap {r.gap:.2%}, {r.solve_seconds:.1f} s" for r in by_gap[:12]],
        "slowest": [f"{r.label}: {r.solve_seconds:.1f} s, gap {r.gap:.2%}" for r in by_time[:12]],
    }


def summary_lines(numbers: dict[str, Any]) -> list[str]:
    """The summary for a person, as Markdown list items."""
    solve = numbers["solve_seconds"]
    lines = [
        f"- cases: {numbers['num_cases']} ({numbers['num_solved']} solved, "
        f"{numbers['num_not_run']} not run)"
    ]
    if numbers["num_solved"]:
        lines += [
            f"- seconds of the processor: median {solve['median']:.2f}, p95 {solve['p95']:.2f}, "
            f"worst {solve['worst']:.2f}",
            f"- gap at most 1 %: {numbers['share_gap_within_1_percent']:.1%} of cases, "
            f"at most 0.5 %: {numbers['share_gap_within_0.5_percent']:.1%}, "
            f"at most 5 %: {numbers['share_gap_within_5_percent']:.1%}, "
            f"worst {numbers['worst_gap']:.2%}",
        ]
    lines.append(f"- memory binds in {numbers['num_memory_binds']} cases")
    for name, ratio in numbers["baseline_over_ours_where_memory_binds"].items():
        lines.append(
            f"- {name} / ours where memory binds ({ratio['cases']} cases): "
            f"mean {ratio['mean']:.3f}, median {ratio['median']:.3f}, max {ratio['max']:.2f}"
        )
    for title, key in (
        ("a baseline is faster, ours not within the gap target", "baseline_faster"),
        ("a baseline is faster, ours within it", "baseline_faster_within_gap_target"),
        ("only a baseline is feasible", "only_baseline_feasible"),
        ("worst gaps", "worst_gaps"),
        ("slowest", "slowest"),
    ):
        lines.append(f"- {title}: {len(numbers[key])}")
        lines += [f"    - {item}" for item in numbers[key]]
    return lines


def gap_rows(results: Sequence[CaseResult]) -> tuple[list[str], list[list[str]]]:
    """Per machine and setup, the gap at every budget, in percent."""
    shares = sorted({r.share for r in results})
    rows: dict[tuple[str, str], dict[float, str]] = {}
    for r in results:
        text = "infeasible" if r.gap is None else f"{r.gap:.2%}"
        rows.setdefault((r.machine, r.setup), {})[r.share] = text
    header = ["machine", "setup", *(f"{share:g}" for share in shares)]
    return header, [[*pair, *(row.get(s, "") for s in shares)] for pair, row in rows.items()]


def gap_table(results: Sequence[CaseResult]) -> Table:
    """The same for a terminal."""
    header, rows = gap_rows(results)
    table = Table(title="gap to the lower bound, by budget (0: smallest, 1: nothing binds)")
    for n, name in enumerate(header):
        table.add_column(name, justify="left" if n < 2 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def write(
    path: Path,
    results: Sequence[CaseResult],
    numbers: dict[str, Any],
    *,
    command: str,
    jobs: int,
) -> None:
    """Everything as JSON at `path`, and tables as Markdown beside it."""
    names = ("protrain-plan", "highspy", "pulp")
    document = {
        "command": command,
        "jobs": jobs,
        "date": today(),
        "commit": commit(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "processors": os.cpu_count(),
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
        "summary": numbers,
        "cases": [asdict(r) for r in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    header, rows = gap_rows(results)
    text = [
        "# Planner benchmark",
        "",
        f"`{command}`, {document['date']}, commit {document['commit']}",
        "",
        *summary_lines(numbers),
        "",
        "Gap to the lower bound by budget (0: 1 % above the least; 1: everything kept, or the",
        "whole device):",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * 2 + "---:|" * (len(header) - 2),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    path.with_suffix(".md").write_text("\n".join(text) + "\n")
