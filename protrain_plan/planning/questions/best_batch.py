"""Which of several micro-batches makes the fastest update of the same global batch."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.objectives import Question
from protrain_plan.planning.questions.planner import solve_any
from protrain_plan.planning.search.improving import Effort


def divisors(number: int) -> tuple[int, ...]:
    """All of them, the least first."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def fastest(questions: Sequence[Question], *, effort: Effort) -> int | None:
    """The number of the question with the fastest step; None where none has a plan.

    The questions are of the same sequences per update, in ever larger micro-batches. One is planned
    where its bound promises a step that is faster by more than the gap asked for: so the answer is
    the fastest but for that gap. Where bounds are equal, the larger micro-batch comes first.
    """
    bounds: dict[int, float] = {}
    for number, question in enumerate(questions):
        bound = least_lane_seconds(question.problem(), stopped=effort.spent)
        if bound is None:
            break  # larger ones need more memory
        bounds[number] = bound
    best, best_s = None, inf
    for number in sorted(bounds, key=lambda number: (bounds[number], -number)):
        if bounds[number] * (1 + effort.gap_target) >= best_s:
            break
        question = questions[number]
        found = solve_any(
            question.problems(), question.budgets, effort=replace(effort, below_s=best_s)
        )
        if isinstance(found, Solved) and found.plan.prediction.step_seconds < best_s:
            best, best_s = number, found.plan.prediction.step_seconds
    return best
