"""A question in, an answer out: one that was kept, or one that is planned now and kept.

The planner, which takes longer to import than a known answer to tell, is imported where it plans.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from protrain_plan.commands.cells import GAP
from protrain_plan.planning.questions.answers import Answer, Fit, Objective, Point, Question
from protrain_plan.planning.questions.kept_answers import AnswerCache

if TYPE_CHECKING:
    from protrain_plan.planning.questions.planner import Progress, Solver
    from protrain_plan.planning.search.improving import Effort


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
    problems = replace(question, profile=found.largest or question.profile).problems()
    program = None
    if found.solved is not None:
        problem = problem_of(found.solved, problems)
        program = problem.program(found.solved.plan.units)
    return replace(found, profile=problems[0].profile, program=program)
