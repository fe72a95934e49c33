"""The planner on the grid of what users have (`benchmarks.grid`): its bound, baselines, seconds.

    python -m benchmarks.planner [--sample 60] [--machines NAME...] [--jobs 2] [--stop-after S]

Times of steps are simulated: the benchmark measures decisions, not the simulator's fidelity.
Planning is measured in seconds of the processor, which other work beside hardly changes.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import grid
from benchmarks.reporting import CaseResult, gap_table, summary, summary_lines, write
from protrain_plan.hardware.catalogue import hardware_names
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_any
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort


def run(case: grid.Case, time_limit_s: float | None) -> CaseResult:
    """Plan a case, and judge the baselines under the same budgets."""
    problems = case.problems()
    started = time.process_time()
    outcome = solve_any(problems, case.budgets, effort=Effort(time_limit_s=time_limit_s))
    taken = time.process_time() - started
    baselines_started = time.process_time()
    problem = problems[0].overlapping(False)
    seconds: dict[str, float | None] = {}
    for name in BASELINES:
        evaluation = baseline(name, problem, Evaluator(problem))
        seconds[name] = evaluation.seconds if evaluation else None
    result = CaseResult(
        setup=str(case.setup).partition(": ")[2],
        machine=case.setup.machine,
        share=case.share,
        budget_bytes=case.device,
        plain_seconds=problem.compute_seconds,
        baseline_seconds=seconds,
        baselines_solve_seconds=time.process_time() - baselines_started,
    )
    match outcome:
        case Solved():
            prediction = outcome.plan.prediction
            return replace(
                result,
                status=outcome.status,
                gap=outcome.gap,
                step_seconds=prediction.step_seconds,
                lower_bound_seconds=prediction.lower_bound_seconds,
                stall_seconds=outcome.stall_seconds,
                solve_seconds=taken,
            )
        case Infeasible():
            return result
        case _:
            assert_never(outcome)


def _finished(futures: Iterable[Future[CaseResult]]) -> Iterator[CaseResult]:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def main() -> None:
    arguments = _arguments()
    machines = arguments.machines or list(hardware_names())
    chosen = grid.sample(arguments.sample) if arguments.sample else grid.cases()
    cases = [case for case in chosen if case.setup.machine in machines]
    random.Random(0).shuffle(cases)  # so that a run that is stopped has seen all parts
    results: list[CaseResult] = []
    stop_at = time.monotonic() + arguments.stop_after if arguments.stop_after else float("inf")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        ProcessPoolExecutor(arguments.jobs) as pool,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("cases", total=len(cases))
        futures = [pool.submit(run, case, arguments.time_limit) for case in cases]
        try:
            for result in _finished(futures):
                results.append(result)
                progress.advance(task)
                if time.monotonic() > stop_at:
                    break
        except KeyboardInterrupt:
            pass
        pool.shutdown(wait=False, cancel_futures=True)
    results.sort(key=lambda r: (machines.index(r.machine), r.setup, r.share))
    numbers = summary(results, not_run=len(cases) - len(results))
    command = "python -m benchmarks.planner " + " ".join(sys.argv[1:])
    write(arguments.out, results, numbers, command=command.strip(), jobs=arguments.jobs)
    console = Console(width=max(120, Console().width))
    console.print(gap_table(results))
    for line in summary_lines(numbers):
        console.print(line, highlight=False)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__)
    names = list(hardware_names())
    parser.add_argument("--machines", nargs="+", metavar="NAME", choices=names)
    parser.add_argument("--sample", type=int, help="so many cases from all parts of the grid")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planner.json"))
    parser.add_argument("--time-limit", type=float, help="seconds per plan (default: none)")
    parser.add_argument("--stop-after", type=float, help="seconds; report what is done by then")
    return parser.parse_args()


if __name__ == "__main__":
    main()
