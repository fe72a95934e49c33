"""Answers to questions: cached, or planned and then cached.

The planner is imported only where it plans, since its import takes longer than a cached answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from protrain_plan.planning.questions.answer_cache import AnswerCache
from protrain_plan.planning.questions.answers import Answer, Objective, Point, Question
from protrain_plan.planning.questions.cells import GAP, Cell

if TYPE_CHECKING:
    from protrain_plan.planning.search.improving import Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Answers to lines of cells, in any process; those of a line come together, see `grid.fits`."""

    kept: AnswerCache
    compare: bool = False

    def known(self, line: Sequence[Cell]) -> list[Answer] | None:
        """Return the cached answers; None if one is missing."""
        if line[0].answer is not None:
            return None
        name = self._named(line)
        found = [self.kept.answer(cell.question, *name) for cell in line]
        return None if None in found else [one for one in found if one is not None]

    def __call__(self, line: Sequence[Cell]) -> list[Answer]:
        from protrain_plan.planning.questions.grid import fits

        if line[0].answer is not None:
            return [cell.answer() for cell in line if cell.answer is not None]
        found = fits([cell.question for cell in line], compare=self.compare)
        for one in found:
            self.kept.keep(one, *self._named(line))
        return found

    def _named(self, line: Sequence[Cell]) -> tuple[object, ...]:
        others = repr([cell.question for cell in line]) if len(line) > 1 else ""
        return GAP, self.compare, sha256(others.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BestBatch:
    """The number of the fastest of a global batch's questions; 0 if none has a plan."""

    kept: AnswerCache

    def known(self, questions: Sequence[Question]) -> int | None:
        """Return the cached number; None if there is none."""
        return self.kept.number("fastest", GAP, questions)

    def __call__(self, questions: Sequence[Question]) -> int:
        from protrain_plan.planning.questions.grid import fastest_batch
        from protrain_plan.planning.search.improving import Effort

        found = fastest_batch(questions, effort=Effort(gap_target=GAP)) or 0
        self.kept.keep_number(found, "fastest", GAP, questions)
        return found


def ask(
    question: Question,
    objective: Objective,
    kept: AnswerCache,
    *,
    effort: "Effort",
    report: Callable[[Point], None] | None,
) -> Answer:
    """Answer as `objectives.ask` does, or from the cache; `report` gets each front point."""
    from protrain_plan.planning.questions import objectives

    asked = (objective, effort.solver, effort.gap_target, effort.time_limit_s, effort.seed)
    found = kept.answer(question, *asked)
    if found is None:
        found = objectives.ask(question, objective, effort=effort, report=report)
        if not effort.spent():
            kept.keep(found, *asked)
        return found
    for point in found.front:
        if report is not None:
            report(point)
    return found
