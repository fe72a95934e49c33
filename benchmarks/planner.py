"""The planner on a grid of models, machines and device budgets, against its bound and baselines.

    python -m benchmarks.planner [--quick] [--shapes NAME...] [--machines NAME...] [--jobs 2]

Budgets of a shape on a machine run from 1 % above the least that any plan needs to what everything
kept and persistent needs. They are the experiment's variable and may exceed the card's memory.
Times are simulated: the benchmark measures decisions, not the simulator's fidelity.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
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

from benchmarks.machines import MACHINES
from benchmarks.reporting import CaseResult, gap_table, summary, summary_lines, write
from benchmarks.shapes import SHAPES, profile
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import plan
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.records.plan import Budgets
from protrain_plan.records.profile import Profile

SHARES = (0.0, 0.1, 0.25, 0.45, 0.7, 1.0)
"""Where budgets lie between the smallest and the largest, on a logarithmic scale."""

AMPLE = 10**15
QUICK_SHAPES = ("gpt2-xl", "llama-3.1-8b", "t5-11b", "llama-2-7b-lora")
QUICK_MACHINES = ("rtx3090", "h200")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One budget of one shape on one machine; `plain_s` is the step with everything kept."""

    shape: str
    machine: str
    share: float
    budgets: Budgets
    plain_s: float


@cache
def _profile(shape_name: str, machine_name: str) -> Profile:
    shape = next(shape for shape in SHAPES if shape.name == shape_name)
    machine = next(machine for machine in MACHINES if machine.name == machine_name)
    return profile(shape, machine, batch_size=shape.batch_size(machine), seq_len=shape.seq_len)


def _budgets(profiled: Profile, device: int) -> Budgets:
    """All of the machine's lower tiers."""
    capacity = {tier.name: tier.capacity_bytes for tier in profiled.hardware.tiers}
    return Budgets(device=device, host=capacity.get("host", 0), disk=capacity.get("disk", 0))


def cases_of(shape: str, machine: str, shares: tuple[float, ...]) -> list[Case]:
    """The cases of one shape on one machine; none where no plan meets the lower tiers."""
    profiled = _profile(shape, machine)
    problem = Problem.of(profiled, _budgets(profiled, AMPLE))
    lean = min_memory(problem)
    if lean is None:
        return []
    context = profiled.hardware.device.context_bytes
    plain = ((0, 0),) * problem.count
    evaluation = Evaluator(problem).evaluate(plain)
    assert evaluation, "everything kept and persistent fits an ample device"
    smallest = lean.bytes + context
    largest = max(problem.static_bytes(plain)) + context
    cases = []
    for share in shares:
        device = round(smallest * (largest / smallest) ** share) if share < 1 else largest
        if share == 0:
            device = min(largest, round(smallest * 1.01))
        cases.append(
            Case(
                shape=shape,
                machine=machine,
                share=share,
                budgets=_budgets(profiled, device),
                plain_s=evaluation.seconds,
            )
        )
    return cases


def run(case: Case, time_limit_s: float | None) -> CaseResult:
    """Plan a case, and judge the baselines under the same budgets."""
    profiled = _profile(case.shape, case.machine)
    outcome = plan(profiled, case.budgets, effort=Effort(time_limit_s=time_limit_s))
    baselines_started = time.monotonic()
    problem = Problem.of(profiled, case.budgets)
    seconds: dict[str, float | None] = {}
    for name in BASELINES:
        evaluation = baseline(name, problem, Evaluator(problem))
        seconds[name] = evaluation.seconds if evaluation else None
    result = CaseResult(
        shape=case.shape,
        machine=case.machine,
        share=case.share,
        budget_bytes=case.budgets.device,
        plain_seconds=case.plain_s,
        baseline_seconds=seconds,
        baselines_solve_seconds=time.monotonic() - baselines_started,
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
                solve_seconds=outcome.solve_seconds,
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
    shapes = arguments.shapes or [shape.name for shape in SHAPES]
    machines = arguments.machines or [machine.name for machine in MACHINES]
    num_budgets = arguments.budgets
    if arguments.quick:
        shapes, machines = arguments.shapes or QUICK_SHAPES, arguments.machines or QUICK_MACHINES
        num_budgets = min(num_budgets, 3)
    shares = _spread(num_budgets)
    results: list[CaseResult] = []
    left_out: list[str] = []
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
        pairs = [(shape, machine) for shape in shapes for machine in machines]
        cases: list[Case] = []
        task = progress.add_task("budgets", total=len(pairs))
        planned = pool.map(cases_of, *zip(*pairs, strict=True), [shares] * len(pairs))
        for (shape, machine), found in zip(pairs, planned, strict=True):
            cases += found
            if not found:
                left_out.append(f"{shape} on {machine}")
            progress.advance(task)
        random.Random(0).shuffle(cases)  # so that a run that is stopped has seen all parts
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
    results.sort(key=lambda r: (shapes.index(r.shape), machines.index(r.machine), r.share))
    numbers = summary(results, left_out=left_out, not_run=len(cases) - len(results))
    command = "python -m benchmarks.planner " + " ".join(sys.argv[1:])
    write(arguments.out, results, numbers, command=command.strip(), jobs=arguments.jobs)
    console = Console(width=max(120, Console().width))
    console.print(gap_table(results))
    for line in summary_lines(numbers):
        console.print(line, highlight=False)


def _spread(count: int) -> tuple[float, ...]:
    """`count` of the shares, the ends among them where there are two or more."""
    if count >= len(SHARES):
        return SHARES
    if count <= 1:
        return SHARES[1:2]
    return tuple(SHARES[round(n * (len(SHARES) - 1) / (count - 1))] for n in range(count))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__)
    shapes, machines = [s.name for s in SHAPES], [m.name for m in MACHINES]
    parser.add_argument("--shapes", nargs="+", metavar="NAME", choices=shapes)
    parser.add_argument("--machines", nargs="+", metavar="NAME", choices=machines)
    parser.add_argument("--budgets", type=int, default=len(SHARES), help="per shape and machine")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planner.json"))
    parser.add_argument("--time-limit", type=float, help="seconds per plan (default: none)")
    parser.add_argument("--stop-after", type=float, help="seconds; report what is done by then")
    parser.add_argument("--quick", action="store_true", help="4 shapes x 2 machines x 3 budgets")
    return parser.parse_args()


if __name__ == "__main__":
    main()
