"""How many replicas: the planner is asked about the numbers that may be best, and rules out others.

    bounds  = what the lanes take at least with each number; from the first without a plan on,
              more have none either
    solved  = the fewest replicas whose bound is the least, or nearly; then whichever may still be
              faster by more than the gap asked for. A search ends when its bound says: not so
    proof   = the least of all bounds

All problems are of the same devices and budgets. The first has the fewest replicas, and needs the
least memory.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from protrain_plan.planning.lanes import least_lane_seconds
from protrain_plan.planning.outcome import Infeasible, Replicas, Solved
from protrain_plan.planning.planner import Progress, Solver, solve_problem, status_of
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.search import Effort
from protrain_plan.records.plan import Budgets


def solve_any(
    problems: Sequence[Problem],
    budgets: Budgets,
    *,
    effort: Effort | None = None,
    solver: Solver = "milp",
    progress: Progress | None = None,
    hints: Sequence[Choice] = (),
) -> Solved | Infeasible:
    """The fastest plan found for any of the problems; why the first has none, where none has any.

    The bound is one on the plans of all of them. Arguments as of `solve_problem`.
    """
    effort = effort or Effort()
    if len(problems) == 1:
        return solve_problem(
            problems[0], budgets, effort=effort, solver=solver, progress=progress, hints=hints
        )
    started = time.monotonic()
    search = _Search(problems, budgets, effort, solver, progress, hints)
    for number in search.order():
        if search.is_ruled_out(number) or search.is_over():
            continue
        search.solve(number)
    if search.best is None:
        return search.reasons.get(0) or search.solve(0)
    return search.proven(time.monotonic() - started)


def problem_of(solved: Solved, problems: Sequence[Problem]) -> Problem:
    """The problem that a plan was made for."""
    number = solved.plan.num_replicas
    return next(one for one in problems if one.settings.num_replicas == number)


def within(problems: Sequence[Problem], device: int) -> tuple[Problem, ...]:
    """The same with so many bytes for tensors on the device."""
    return tuple(replace(problem, device=device) for problem in problems)


class _Search:
    """What is known of each problem; problems are told by their places."""

    def __init__(
        self,
        problems: Sequence[Problem],
        budgets: Budgets,
        effort: Effort,
        solver: Solver,
        progress: Progress | None,
        hints: Sequence[Choice],
    ) -> None:
        self.problems, self.budgets = problems, budgets
        self.effort, self.solver, self.progress = effort, solver, progress
        self.hints = list(hints)
        self.best: Solved | None = None
        self.seconds: dict[int, float] = {}  # of the plans found
        self.reasons: dict[int, Infeasible] = {}  # where none was
        self.bounds = dict(enumerate(_first_bounds(problems)))  # of all that may have plans

    def order(self) -> list[int]:
        """The most promising first; those whose bounds hardly differ by their replicas."""
        near = min(self.bounds.values(), default=0.0) * (1 + self.effort.gap_target)
        return sorted(self.bounds, key=lambda n: max(near, self.bounds[n]))

    def is_ruled_out(self, number: int) -> bool:
        """Whether no plan of it is faster than the best one by more than the gap asked for."""
        return self.bounds[number] * (1 + self.effort.gap_target) >= self._best_s()

    def is_over(self) -> bool:
        """Whether the best plan is good enough, or the time is up."""
        return self.best is not None and (
            self.effort.spent() or self._best_s() <= (self.effort.enough_s or 0.0)
        )

    def solve(self, number: int) -> Solved | Infeasible:
        """Plan a problem."""
        found = solve_problem(
            self.problems[number],
            self.budgets,
            effort=replace(self.effort, below_s=self._best_s()),
            solver=self.solver,
            progress=self._progress(self.problems[number].settings.num_replicas),
            hints=self.hints,
        )
        if isinstance(found, Infeasible):
            self.bounds.pop(number, None)
            self.reasons[number] = found
            return found
        prediction = found.plan.prediction
        self.bounds[number] = prediction.lower_bound_seconds
        if not self.is_ruled_out(number):  # otherwise the search was given up
            self.seconds[number] = prediction.step_seconds
        if prediction.step_seconds < self._best_s():
            self.seconds[number] = prediction.step_seconds
            self.best = found
            # The options are the same for every number of replicas.
            self.hints.append(self.problems[number].choice_of(found.plan.units))
        return found

    def proven(self, seconds: float) -> Solved:
        """The best plan, with a bound on those of all problems."""
        assert self.best, "asked when there is a plan"
        plan = self.best.plan
        bound = min(self.bounds.values())
        plan = replace(plan, prediction=replace(plan.prediction, lower_bound_seconds=bound))
        return replace(
            self.best,
            plan=plan,
            gap=plan.gap,
            status=status_of(plan.gap, self.effort),
            solve_seconds=seconds,
            replicas=tuple(
                Replicas(
                    number=problem.settings.num_replicas,
                    step_seconds=self.seconds.get(number),
                    lower_bound_seconds=self.bounds.get(number),
                )
                for number, problem in enumerate(self.problems)
            ),
        )

    def _best_s(self) -> float:
        return self.best.plan.prediction.step_seconds if self.best else inf

    def _progress(self, num_replicas: int) -> Progress | None:
        told = self.progress
        if told is None:
            return None
        word = "replica" if num_replicas == 1 else "replicas"
        return lambda stage, step_s, bound_s: told(
            f"{num_replicas} {word}: {stage}", step_s, bound_s
        )


def _first_bounds(problems: Sequence[Problem]) -> Iterator[float]:
    """A bound on each problem's plans, until one has none: more replicas need more memory."""
    for problem in problems:
        bound = least_lane_seconds(problem)
        if bound is None:
            return
        yield bound
