"""Whether a workload trains on a machine, how fast, and what binds: from its profile alone."""

from dataclasses import dataclass
from typing import Literal

from protrain_plan.planning.limiting import LaneLimit, limits_of
from protrain_plan.planning.objectives import Objective, Question, ask
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.problem import Problem
from protrain_plan.planning.replicas import problem_of
from protrain_plan.planning.search import Effort
from protrain_plan.planning.wording import lane_words
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.ranks import Group
from protrain_plan.units import format_bytes

Verdict = Literal["fits", "fits with a plan", "does not fit"]

NOTEWORTHY = 0.1
"""A lane that makes up less of the step is not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One workload on one machine: a plan, or why there is none.

    `plain_bytes` is what plain PyTorch would need of the device, what is besides tensors included;
    of several devices, with all states on each. `plain_seconds` is the step that keeps everything
    on the device, where it fits.
    `binds` says in words what makes up the step, or what there is too little of.
    """

    profile: Profile
    group: Group
    plain_bytes: int
    plain_seconds: float | None
    solved: Solved | None
    infeasible: Infeasible | None
    binds: str

    @property
    def verdict(self) -> Verdict:
        """`fits`: as plain PyTorch, with nothing planned (a plan may be faster all the same)."""
        if self.solved is None:
            return "does not fit"
        plain = self.plain_bytes <= self.solved.plan.budgets.device
        return "fits" if plain else "fits with a plan"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all devices' micro-batches per second of the predicted step."""
        if self.solved is None:
            return None
        workload, plan = self.profile.workload, self.solved.plan
        tokens = workload.batch_size * workload.seq_len * plan.micro_batches * plan.num_devices
        return tokens / plan.prediction.step_seconds


def fit(question: Question, *, effort: Effort) -> Fit:
    """Plan the question's profile, and say what binds."""
    answer = ask(question, Objective(), effort=effort)
    problems = question.problems()
    problem = problem_of(answer.solved, problems) if answer.solved else problems[0]
    besides = problem.profile.hardware.device.besides_bytes
    plain = tuple((0, 0) for _ in problem.options)
    if answer.solved is not None:
        binds = _lanes(problem, answer.solved)
    else:
        assert answer.infeasible is not None
        binds = _shortage(answer.infeasible)
    return Fit(
        profile=question.profile,
        group=Group.of(answer.solved.plan) if answer.solved else question.group,
        plain_bytes=max(problem.static_bytes(plain)) + besides,
        plain_seconds=answer.kept_seconds,
        solved=answer.solved,
        infeasible=answer.infeasible,
        binds=binds,
    )


def _shortage(answer: Infeasible) -> str:
    return f"{format_bytes(answer.shortfall_bytes)} of {answer.tier} memory, in {answer.slot}"


def _lanes(problem: Problem, solved: Solved) -> str:
    limits = limits_of(problem, problem.choice_of(solved.plan.units))
    lanes = sorted(
        (limit for limit in limits if isinstance(limit, LaneLimit)), key=lambda limit: -limit.share
    )
    named = [limit for limit in lanes if limit.share >= NOTEWORTHY] or lanes[:1]
    return ", ".join(f"{lane_words(limit.resource)} {limit.share:.0%}" for limit in named)
