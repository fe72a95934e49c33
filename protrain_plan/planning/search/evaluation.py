"""Seconds of decisions: the fastest of several schedules, by the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf, isinf
from typing import NamedTuple

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import Stopped
from protrain_plan.planning.search.pacing import PLAIN, Pace, Pacer
from protrain_plan.simulation.timeline import simulated_seconds
from protrain_runtime.contract.records.plan import Schedule, UnitPlan

PACES = (PLAIN, Pace(wait=0.0), Pace(wait=0.5))
"""Paces that are tried, the first of them with decisions that are compared."""

LATES = (0.0, 0.3, 0.6, 0.8, 1.0)
"""Fractions of the chunks that are updated late, where steps overlap."""


class Evaluation(NamedTuple):
    """Decisions with their best schedule, and the pace that made it."""

    seconds: float
    stall_s: float
    choice: Choice
    pace: Pace
    plans: tuple[UnitPlan, ...]


@dataclass(eq=False)
class Evaluator:
    """Simulates schedules of one problem, each at most once; when `stopped`, none any more."""

    problem: Problem
    stopped: Stopped = lambda: False
    num_simulations: int = 0
    _seen: dict[Choice, dict[tuple[Schedule, ...], Evaluation]] = field(
        default_factory=dict[Choice, dict[tuple[Schedule, ...], Evaluation]], init=False
    )

    @cached_property
    def pacer(self) -> Pacer:
        return Pacer(self.problem)

    def evaluate(
        self,
        choice: Choice,
        *,
        paces: Sequence[Pace] = PACES[:1],
        faster_than_s: float = float("inf"),
    ) -> Evaluation | None:
        """The fastest schedule of `choice` under `paces`, and under those it was tried with before.

        None where the choice exceeds a budget, or can at best reach `faster_than_s`.
        """
        problem = self.problem
        if problem.least_seconds(choice) >= faster_than_s or not problem.fits(choice):
            return None
        seen = self._seen.setdefault(choice, {})
        for pace in paces if moves_anything(problem, choice) else paces[:1]:
            if self.stopped():
                break
            paced = self.pacer.walk(choice, pace)
            assert paced, "the choice meets the device's budget"
            if paced.schedules not in seen:
                plans = plans_of(problem, choice, paced.schedules)
                seconds, stall_s = step_seconds(problem, plans, within_s=faster_than_s)
                self.num_simulations += 1
                if isinf(seconds):
                    continue  # it is not known how long it takes
                seen[paced.schedules] = Evaluation(seconds, stall_s, choice, pace, plans)
        return min(seen.values(), key=lambda evaluation: evaluation.seconds, default=None)

    def best_schedule(self, choice: Choice, *, pace: Pace = PLAIN) -> Evaluation | None:
        """The fastest schedule of `choice` that paces in turn find, until none is faster."""
        best = self.evaluate(choice, paces=(pace,))
        if best is None or not moves_anything(self.problem, choice):
            return best
        lates = LATES if self.problem.settings.overlap_steps else ()
        before = inf
        while best.seconds < before:
            before = best.seconds
            waits = [each._replace(late=best.pace.late) for each in PACES]
            for paces in (waits, [best.pace._replace(late=late) for late in lates]):
                best = self.evaluate(choice, paces=paces, faster_than_s=best.seconds) or best
        return best


def plans_of(
    problem: Problem, choice: Choice, schedules: Sequence[Schedule]
) -> tuple[UnitPlan, ...]:
    """The plans of the units that a choice and its schedules mean."""
    decided = zip(*problem.chosen(choice), schedules, strict=True)
    return tuple(
        problem.unit_plan(unit, activation.decision, state.decision, schedule)
        for unit, (activation, state, schedule) in enumerate(decided)
    )


def step_seconds(
    problem: Problem, plans: Sequence[UnitPlan], *, within_s: float = inf, lanes_at: float = 1.0
) -> tuple[float, float]:
    """A step's simulated seconds and those of its stalls, over all its micro-batches.

    Lanes run `lanes_at` this fraction of their speed. Where updates are speculative, the mean of
    steps that are clipped, and others that are not.
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
        not state.decision.is_persistent for state in states
    )
