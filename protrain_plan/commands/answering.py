"""A question in, an answer out: one that was kept, or one that is planned now and kept.

The planner, which takes longer to import than a known answer to tell, is imported where it plans.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING

from protrain_plan.planning.questions.answers import Answer, Fit, Objective, Point, Question
from protrain_plan.planning.questions.kept_answers import AnswerCache

if TYPE_CHECKING:
    from protrain_plan.planning.questions.planner import Progress, Solver
    from protrain_plan.planning.search.improving import Effort


GAP = 0.02
"""Plans this close to the bound are good enough to compare machines and batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """Answers of `fit`, from this process or from another one."""

    kept: AnswerCache
    compare: bool = False

    def known(self, question: Question) -> Fit | None:
        """Return the answer of before; None where there is none."""
        return self.kept.fit(question, GAP, self.compare)

    def __call__(self, question: Question) -> Fit:
        from protrain_plan.planning.questions.objectives import fit
        from protrain_plan.planning.search.improving import Effort

        effort = Effort(gap_target=GAP)
        found = fit(question, effort=effort, compare=self.compare)
        self.kept.keep(found, question, GAP, self.compare)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeping:
    """Answers of `fit --sweep`: those of a line are found, and known, together."""

    kept: AnswerCache

    def known(self, line: Sequence[Question]) -> tuple[Fit, ...] | None:
        """Return the answers of before; None where one is missing."""
        name = self._named(line)
        found = [self.kept.fit(question, name) for question in line]
        return None if None in found else tuple(filter(None, found))

    def __call__(self, line: Sequence[Question]) -> tuple[Fit, ...]:
        from protrain_plan.planning.questions.shopping import sweep

        found, name = sweep(line, gap=GAP), self._named(line)
        for question, one in zip(line, found, strict=True):
            self.kept.keep(one, question, name)
        return found

    def _named(self, line: Sequence[Question]) -> str:
        return f"sweep {GAP} {sha256(repr(line).encode()).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestBatch:
    """The number of the fastest of a global batch's questions; 0 where none has a plan."""

    kept: AnswerCache

    def known(self, questions: Sequence[Question]) -> int | None:
        """Return the number of before; None where there is none."""
        return self.kept.number("fastest", GAP, questions)

    def __call__(self, questions: Sequence[Question]) -> int:
        from protrain_plan.planning.questions.shopping import fastest_batch
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
    solver: "Solver",
    progress: "Progress",
    told: Callable[[Point], None] | None,
) -> Answer:
    """Answer as `objectives.ask` does; of a front that was kept, each point is `told`, too."""
    from protrain_plan.planning.questions import objectives
    from protrain_plan.planning.questions.planner import problem_of

    asked = (objective, solver, effort.gap_target, effort.time_limit_s, effort.seed)
    found = kept.answer(question, *asked)
    if found is None:
        found = objectives.ask(
            question, objective, effort=effort, solver=solver, progress=progress, told=told
        )
        if not effort.spent():
            kept.keep(found, question, *asked)
        return found
    for point in found.front:
        if told is not None:
            told(point)
    problems = question.problems()
    program = None
    if found.solved is not None:
        problem = problem_of(found.solved, problems)
        program = problem.program(found.solved.plan.units)
    return replace(found, profile=problems[0].profile, program=program)
