"""Seconds of decisions: the fastest of several schedules, by the simulator."""

from collections.abc import Sequence
from functools import cached_property, partial
from math import inf, isinf
from typing import NamedTuple

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import Stopped
from protrain_plan.planning.search.pacing import Pace, Pacer
from protrain_plan.planning.search.scheduling import (
    DEPTHS,
    LATES,
    QUICK_GRID,
    WINDOWS,
    ScheduleRule,
    fill,
)
from protrain_plan.simulation.timeline import simulated_seconds
from protrain_runtime.contract.records.plan import Persistent, Schedule, UnitPlan

Rule = ScheduleRule | Pace
"""A rule that makes a schedule for decisions."""

PACES = (Pace(), Pace(wait=0.0), Pace(wait=0.5))
"""Paces that are tried, the first of them with decisions that are compared."""


class Evaluation(NamedTuple):
    """Decisions with their best schedule, and the rule that made it."""

    seconds: float
    stall_s: float
    choice: Choice
    rule: Rule
    plans: tuple[UnitPlan, ...]


class Evaluator:
    """Simulates schedules of one problem, each at most once; when `stopped`, none any more."""

    def __init__(self, problem: Problem, stopped: Stopped = lambda: False) -> None:
        self.problem, self.stopped = problem, stopped
        self.num_simulations = 0
        self._seen: dict[Choice, dict[tuple[Schedule, ...], Evaluation]] = {}

    @cached_property
    def pacer(self) -> Pacer:
        return Pacer(self.problem)

    def evaluate(
        self,
        choice: Choice,
        *,
        rules: Sequence[Rule] = QUICK_GRID,
        faster_than_s: float = float("inf"),
    ) -> Evaluation | None:
        """The fastest schedule of `choice` under `rules`, and under those it was tried with before.

        None where the choice exceeds a budget, or can at best reach `faster_than_s`.
        """
        problem = self.problem
        if problem.least_seconds(choice) >= faster_than_s or not problem.within_tiers(choice):
            return None
        free = [problem.device - total for total in problem.static_bytes(choice)]
        if min(free) < 0:
            return None
        seen = self._seen.setdefault(choice, {})
        for rule in rules if moves_anything(problem, choice) else rules[:1]:
            if self.stopped():
                break
            if isinstance(rule, Pace):
                paced = self.pacer.walk(choice, rule)
                assert paced, "the choice meets the device's budget"
                schedules = paced.schedules
            else:
                schedules = fill(problem, choice, list(free), rule)
            if schedules not in seen:
                plans = plans_of(problem, choice, schedules)
                seconds, stall_s = step_seconds(problem, plans, within_s=faster_than_s)
                self.num_simulations += 1
                if isinf(seconds):
                    continue  # it is not known how long it takes
                seen[schedules] = Evaluation(seconds, stall_s, choice, rule, plans)
        return min(seen.values(), key=lambda evaluation: evaluation.seconds, default=None)

    def fastest(self, count: int) -> list[Choice]:
        """So many of the choices that were simulated, the fastest first."""
        seconds = {
            choice: min(one.seconds for one in seen.values())
            for choice, seen in self._seen.items()
            if seen
        }
        return sorted(seconds, key=lambda choice: seconds[choice])[:count]

    def best_schedule(self, choice: Choice, *, rule: Rule = QUICK_GRID[0]) -> Evaluation | None:
        """The fastest schedule of `choice` under a search over rules that starts at `rule`.

        All paces, or depths and windows in turn, until neither gives a faster one.
        """
        best = self.evaluate(choice, rules=(rule,))
        if best is None or not moves_anything(self.problem, choice):
            return best
        before = None
        while before is None or best.seconds < before:
            before = best.seconds
            # The best known may be of the other kind of rules.
            kinds = [rule] if isinstance(best.rule, type(rule)) else [rule, best.rule]
            for rules in (rules for kind in kinds for rules in self._beside(kind)):
                best = self.evaluate(choice, rules=rules, faster_than_s=best.seconds) or best
            if isinstance(best.rule, type(rule)):
                rule = best.rule
        return best

    def _beside(self, rule: Rule) -> list[list[Rule]]:
        """Rules that differ in one number from the one that is best so far, kind by kind."""
        lates = LATES if self.problem.settings.overlap_steps else ()
        if isinstance(rule, Pace):
            paces = [pace._replace(late=rule.late) for pace in PACES]
            return [[*paces], [rule._replace(late=late) for late in lates]]
        return [
            [rule._replace(window=window) for window in WINDOWS],
            [rule._replace(depth=depth) for depth in DEPTHS],
            [rule._replace(late=late) for late in lates],
        ]


def plans_of(
    problem: Problem, choice: Choice, schedules: Sequence[Schedule]
) -> tuple[UnitPlan, ...]:
    """The plans of the units that a choice and its schedules mean."""
    activations, states = problem.chosen(choice)
    return tuple(
        problem.unit_plan(unit, activation.decision, state.decision, schedule)
        for unit, (activation, state, schedule) in enumerate(
            zip(activations, states, schedules, strict=True)
        )
    )


def step_seconds(
    problem: Problem, plans: Sequence[UnitPlan], *, within_s: float = inf, lanes_at: float = 1.0
) -> tuple[float, float]:
    """A step's simulated seconds and those of its stalls, over all its micro-batches.

    Lanes run `lanes_at` this fraction of their speed.

    Where updates are speculative, the mean of steps that are clipped, and others that are not.
    Infinity, where one that is not already takes `within_s`.
    """
    more = more_stall = 0.0
    seconds_of = partial(simulated_seconds, lanes_at=lanes_at)
    if before := problem.settings.micro_batches - 1:
        rest = problem.program(plans, updating=False)
        more, more_stall = seconds_of(rest, within_s=within_s / before)
        if before * more >= within_s:
            return inf, inf
    program = problem.program(plans)
    seconds, stall = seconds_of(program, within_s=within_s - before * more)
    if seconds + before * more >= within_s:
        return inf, inf
    share = problem.settings.clip_share if program.speculative else 0.0
    if share:
        clipped, clipped_stall = seconds_of(problem.program(plans, clipped=True))
        # Which takes no less: it does the same, and more.
        seconds += share * max(0.0, clipped - seconds)
        stall += share * max(0.0, clipped_stall - stall)
    return seconds + before * more, stall + before * more_stall


def moves_anything(problem: Problem, choice: Choice) -> bool:
    """Whether some unit offloads its states or swaps activations."""
    activations, states = problem.chosen(choice)
    return any(option.swap_in for option in activations) or any(
        not isinstance(state.decision, Persistent) for state in states
    )
