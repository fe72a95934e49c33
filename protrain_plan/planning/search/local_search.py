"""Local search over decisions: single changes, shifted runs and swapped pairs, by the simulator."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator

IMPROVEMENT = 1e-7
"""A step must be faster by this fraction to count: less is rounding in the simulator."""


@dataclass(slots=True, kw_only=True)
class Effort:
    """How long a search goes on, and when it is good enough.

    gap_target    a plan this close to the bound is good enough (0.005: half a per cent)
    enough_s      and so is one of as many seconds; a search that cannot get there is given up
    below_s       only plans that are faster than this matter; so is one that has none
    time_limit_s  for people in a hurry: with a limit that strikes, the plan depends on the machine
    seed          of the order in which changes are tried
    stopped       asked often; true ends the search with the best plan so far
    """

    gap_target: float = 0.005
    enough_s: float | None = None
    below_s: float = inf
    time_limit_s: float | None = None
    seed: int = 0
    stopped: Callable[[], bool] = lambda: False
    started: float = field(default_factory=time.monotonic)

    def spent(self) -> bool:
        """Whether the search has to end now."""
        return self.stopped() or self.left_s() <= 0

    def left_s(self) -> float:
        """Seconds until the time limit."""
        if self.time_limit_s is None:
            return float("inf")
        return self.time_limit_s - (time.monotonic() - self.started)


def improved(
    problem: Problem,
    evaluator: Evaluator,
    best: Evaluation,
    *,
    effort: Effort,
    max_simulations: int,
    enough_s: float,
) -> Evaluation:
    """`best`, or what changes of few decisions make of it, until it takes `enough_s` or less."""
    started = evaluator.num_simulations
    order = random.Random(effort.seed)
    while True:
        before = best
        neighbours = list(_neighbours(problem, best.choice))
        order.shuffle(neighbours)  # so that limited effort reaches all parts of the model
        for choice in neighbours:
            tried = evaluator.num_simulations - started
            if tried >= max_simulations or effort.spent() or best.seconds <= enough_s:
                return best
            enough = best.seconds * (1 - IMPROVEMENT)
            evaluation = evaluator.evaluate(choice, rules=(best.rule,), faster_than_s=enough)
            if evaluation and evaluation.seconds < enough:
                best = evaluation
                break
        if best is before:
            return best


def _neighbours(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """Choices that differ in one decision, then in one decision of each of two units."""
    for unit, options in enumerate(problem.options):
        activation, state = choice[unit]
        for k in range(len(options.states)):
            if k != state:
                yield _with(choice, {unit: (activation, k)})
        for k in range(len(options.activations)):
            if k != activation:
                yield _with(choice, {unit: (k, state)})
    for units in problem.classes:
        # Trade decisions where runs of equal decisions meet, and across the whole class.
        for distance in (1, 2, 4, 8, 16, 32):
            for first, second in zip(units, units[distance:], strict=False):
                (a1, s1), (a2, s2) = choice[first], choice[second]
                if a1 != a2:
                    yield _with(choice, {first: (a2, s1), second: (a1, s2)})
                if s1 != s2:
                    yield _with(choice, {first: (a1, s2), second: (a2, s1)})
                if a1 != a2 and s1 != s2:
                    yield _with(choice, {first: (a2, s2), second: (a1, s1)})


def _with(choice: Choice, changes: dict[int, tuple[int, int]]) -> Choice:
    return tuple(changes.get(unit, decision) for unit, decision in enumerate(choice))
