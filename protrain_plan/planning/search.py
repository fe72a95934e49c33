"""Local search over decisions: single changes, shifted runs and swapped pairs, by the simulator."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from protrain_plan.planning.judging import Judge, Judged
from protrain_plan.planning.problem import Choice, Problem

IMPROVEMENT = 1e-7
"""A step must be faster by this fraction to count: less is rounding in the simulator."""


@dataclass(slots=True)
class Effort:
    """How much a search may do, in simulated moves and slots: the same on machines of all speeds.

    The deadline only stops a search that would keep its user waiting.
    """

    moves: int
    deadline: float  # of time.monotonic()

    def spent(self, judge: Judge, started: int) -> bool:
        """Whether no further choice should be judged."""
        return judge.num_moves - started >= self.moves or time.monotonic() > self.deadline


def improved(
    problem: Problem, judge: Judge, best: Judged, *, effort: Effort, enough_s: float
) -> Judged:
    """`best`, or what changes of few decisions make of it, until it takes `enough_s` or less."""
    started = judge.num_moves
    order = random.Random(0)
    while True:
        before = best
        neighbours = list(_neighbours(problem, best.choice))
        order.shuffle(neighbours)  # so that limited effort reaches all parts of the model
        for choice in neighbours:
            if effort.spent(judge, started) or best.seconds <= enough_s:
                return best
            enough = best.seconds * (1 - IMPROVEMENT)
            judged = judge.judge(choice, faster_than_s=enough)
            if judged and judged.seconds < enough:
                best = judged
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
