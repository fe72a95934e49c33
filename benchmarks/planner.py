"""The planner on the grid of what users have (`benchmarks.grid`): its bound, baselines, seconds.

    python -m benchmarks.planner [--only MACHINE...] [--jobs 2]

Times of steps are simulated: the benchmark measures decisions, not the simulator's fidelity.
Planning is measured in seconds of the processor, which other work beside hardly changes.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, assert_never

from benchmarks import grid
from benchmarks.grid import Case, Setup
from benchmarks.pages import markdown_table, quantile, runs_list
from benchmarks.runner import Cell, Document, found, main
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_any
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.units import format_seconds

SAMPLE = 60
"""Cases, from all parts of the grid."""

BINDS = 1.01
"""Memory binds where our step takes more than this times the computation that is least."""

TIE = 1e-9
"""Relative seconds below which two plans are equally fast."""


def cells() -> list[Cell]:
    """A cell for each case of the sample, in an order in which any part of them is a sample."""
    cases = grid.sample(SAMPLE)
    random.Random(0).shuffle(cases)
    return [
        Cell(key=str(case), task="planner case", arguments=asdict(case), limit_s=1800)
        for case in cases
    ]


def solved(setup: dict[str, Any], share: float, device: int) -> Document:
    """Plan a case, and judge the baselines under the same budgets."""
    case = Case(setup=Setup(**setup), share=share, device=device)
    problems = case.problems()
    started = time.process_time()
    outcome = solve_any(problems, effort=Effort())
    taken = time.process_time() - started
    problem = problems[0].overlapping(False)
    others = {name: baseline(name, problem, Evaluator(problem)) for name in BASELINES}
    answer: Document = {
        "plain_seconds": problem.compute_seconds,
        "baseline_seconds": {name: one.seconds if one else None for name, one in others.items()},
    }
    match outcome:
        case Solved():
            prediction = outcome.plan.prediction
            return answer | {
                "status": outcome.status,
                "gap": outcome.gap,
                "step_seconds": prediction.step_seconds,
                "lower_bound_seconds": prediction.lower_bound_seconds,
                "stall_seconds": outcome.stall_seconds,
                "solve_seconds": taken,
            }
        case Infeasible():
            return answer | {"status": "infeasible"}
        case _:
            assert_never(outcome)


# --- the page -------------------------------------------------------------------------------------


def page(document: Document) -> str:
    """The summary, and every case."""
    results = found(document)
    lines = ["# The planner", "", *runs_list(document["runs"]), ""]
    lines += [f"- {line}" for line in in_short(results)]
    rows = [["case", "gap", "step", "planning", *(f"{name} / ours" for name in BASELINES)]]
    for key, case in sorted(results.items()):
        if case["status"] == "infeasible":
            rows.append([key, "infeasible", *[""] * (2 + len(BASELINES))])
            continue
        ratios = (_ratio(case, name) for name in BASELINES)
        seconds = (case["step_seconds"], case["solve_seconds"])
        rows.append(
            [
                key,
                f"{case['gap']:.2%}",
                *map(format_seconds, seconds),
                *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
            ]
        )
    failed = [f"- {key}: {cell['status']}" for key, cell in document["cells"].items()]
    failed = [line for line in failed if not line.endswith(": ran")]
    return "\n".join([*lines, "", *markdown_table(rows, numbers_from=1), "", *failed]) + "\n"


def in_short(results: dict[str, Document]) -> Iterator[str]:
    """A run in sentences."""
    cases = [case for case in results.values() if case["status"] != "infeasible"]
    if not cases:
        yield "no case was solved"
        return
    gaps, seconds = ([case[key] for case in cases] for key in ("gap", "solve_seconds"))
    yield (
        f"{len(cases)} of {len(results)} cases solved; the gap is at most 1 % in"
        f" {sum(gap <= 0.01 for gap in gaps) / len(gaps):.0%}, {statistics.median(gaps):.1%} in the"
        f" median and {max(gaps):.1%} at worst."
    )
    yield (
        f"Planning took {format_seconds(statistics.median(seconds))} of the processor in the"
        f" median, {format_seconds(quantile(seconds, 0.95))} in 95 % and"
        f" {format_seconds(max(seconds))} at worst."
    )
    ratios = {name: list(_ratios(cases, name)) for name in BASELINES}
    faster = sum(ratio < 1 - TIE for ones in ratios.values() for ratio in ones)
    yield f"A baseline is faster in {faster} cases."
    binding = [c for c in cases if c["step_seconds"] > BINDS * c["plain_seconds"]]
    if bound := list(_ratios(binding, "four-parameter")):
        yield (
            f"Where memory binds (it costs more than {BINDS - 1:.0%}; {len(bound)} cases), the"
            " paper's four-parameter search, judged by the same simulator, takes"
            f" {statistics.fmean(bound):.2f} times as long in the mean and"
            f" {statistics.median(bound):.2f} in the median."
        )


def _ratio(case: Document, name: str) -> float | None:
    seconds: float | None = case["baseline_seconds"][name]
    return None if seconds is None else seconds / case["step_seconds"]


def _ratios(cases: Iterable[Document], name: str) -> Iterator[float]:
    return (ratio for case in cases if (ratio := _ratio(case, name)) is not None)


if __name__ == "__main__":
    sys.exit(main("planner", cells(), page, says=__doc__))
