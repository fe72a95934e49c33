"""What decisions are worth: the fastest of several schedules, by the simulator."""

from collections.abc import Sequence
from typing import NamedTuple

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.schedule import ScheduleRule, fill, plans_of
from protrain_plan.records.plan import Persistent, Schedule, UnitPlan
from protrain_plan.simulation.timeline import simulated_seconds

ALL = 1 << 20
"""A depth that no lead reaches."""

DEPTHS = (0, 1, 2, 3, 4, 6, 9, 14, ALL)
WINDOWS = (0, 0.25, 0.5, 1, 2, 4, ALL)

QUICK_GRID = (ScheduleRule(3, 1), ScheduleRule(ALL, 1))
"""The rules that decisions are compared with during local search."""


class Evaluation(NamedTuple):
    """Decisions with their best schedule, and the rule that made it."""

    seconds: float
    stall_s: float
    choice: Choice
    rule: ScheduleRule
    plans: tuple[UnitPlan, ...]


class Evaluator:
    """Simulates schedules of one problem, each at most once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_simulations = 0
        self._seen: dict[Choice, dict[tuple[Schedule, ...], Evaluation]] = {}

    def evaluate(
        self,
        choice: Choice,
        *,
        rules: Sequence[ScheduleRule] = QUICK_GRID,
        faster_than_s: float = float("inf"),
    ) -> Evaluation | None:
        """The fastest schedule of `choice` under `rules`, and under those it was tried with before.

        None where the choice exceeds a budget, or can at best reach `faster_than_s`.
        """
        problem = self.problem
        if problem.least_seconds(choice) >= faster_than_s:
            return None
        if not problem.within_tiers(choice):
            return None
        free = [problem.device - total for total in problem.static_bytes(choice)]
        if min(free) < 0:
            return None
        seen = self._seen.setdefault(choice, {})
        for rule in rules if moves_anything(problem, choice) else rules[:1]:
            schedules = fill(problem, choice, list(free), rule)
            if schedules not in seen:
                seen[schedules] = self._simulated(choice, rule, schedules)
        return min(seen.values(), key=lambda evaluation: evaluation.seconds)

    def best_schedule(
        self, choice: Choice, *, rule: ScheduleRule = QUICK_GRID[0]
    ) -> Evaluation | None:
        """The fastest schedule of `choice` under a search over rules that starts at `rule`.

        Depths and windows in turn, until neither gives a faster one.
        """
        best = self.evaluate(choice, rules=(rule,))
        if best is None or not moves_anything(self.problem, choice):
            return best
        before = None
        while before is None or best.seconds < before:
            before = best.seconds
            windows = [ScheduleRule(best.rule.depth, window) for window in WINDOWS]
            best = self.evaluate(choice, rules=windows) or best
            depths = [ScheduleRule(depth, best.rule.window) for depth in DEPTHS]
            best = self.evaluate(choice, rules=depths) or best
        return best

    def _simulated(
        self, choice: Choice, rule: ScheduleRule, schedules: tuple[Schedule, ...]
    ) -> Evaluation:
        plans = plans_of(self.problem, choice, schedules)
        seconds, stall = step_seconds(self.problem, plans)
        self.num_simulations += 1
        return Evaluation(seconds, stall, choice, rule, plans)


def step_seconds(problem: Problem, plans: Sequence[UnitPlan]) -> tuple[float, float]:
    """A step's simulated seconds and those of its stalls, over all its micro-batches."""
    seconds, stall = simulated_seconds(problem.program(plans))
    if before := problem.settings.micro_batches - 1:
        more, more_stall = simulated_seconds(problem.program(plans, updating=False))
        seconds, stall = seconds + before * more, stall + before * more_stall
    return seconds, stall


def moves_anything(problem: Problem, choice: Choice) -> bool:
    """Whether some unit offloads its states or swaps activations."""
    activations, states = problem.chosen(choice)
    return any(option.swap_in for option in activations) or any(
        not isinstance(state.decision, Persistent) for state in states
    )
