"""Objectives of users: the fastest step, the least memory for a speed, the largest batch, a front.

And whether a workload trains on a machine at all, how fast, and what binds (`fit`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from protrain_plan.planning.explain.explaining import lanes_in_a_line
from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.options import Pin
from protrain_plan.planning.model.problem import OVERLAPPING, SAFE, Choice, Problem, most_of
from protrain_plan.planning.model.solver import solve
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.allowance import allowance_bytes, is_tight
from protrain_plan.planning.questions.alternatives import Alternative, alternatives, bucket_bytes
from protrain_plan.planning.questions.growth import Quantity, largest
from protrain_plan.planning.questions.planner import (
    Hint,
    Progress,
    Solver,
    problem_of,
    solve_any,
    solve_problem,
    within,
)
from protrain_plan.planning.questions.spending import Spending, spending, tokens_in_step
from protrain_plan.planning.search.baselines import keeping
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.simulation.report import StepReport, report
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.group import profile_of_rank
from protrain_runtime.contract.program.implications import BoundProgram
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Budgets, DeviceGroup, StepSettings
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes

FIRST_STEP = 0.002
"""By how much of the budget the search for the least memory goes up at first."""

BISECTIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A profile to plan for, with budgets and the decisions that are fixed."""

    profile: Profile
    budgets: Budgets
    settings: StepSettings = OVERLAPPING
    pins: tuple[Pin, ...] = ()
    replicas: tuple[int, ...] = ()  # to choose from, fewest first; none: the group's
    allow: tuple[str, ...] = ()  # leave for forms of activations that are not exact

    @property
    def group(self) -> DeviceGroup:
        """The devices that are planned for."""
        return self.settings.group

    @property
    def tokens(self) -> int:
        """Tokens of a step: those of all devices' micro-batches."""
        return tokens_in_step(self.profile.workload, self.group, self.settings.micro_batches)

    def problem(self) -> Problem:
        """The planning problem; ProtrainError where a pin cannot be met, or devices not joined."""
        return self.problems()[0]

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems, one for each number of replicas to choose from."""
        groups = [replace(self.group, num_replicas=number) for number in self.replicas]
        return tuple(self._problem(self.profile, group) for group in groups or [self.group])

    def largest(self, quantity: Quantity) -> Profile | None:
        """The largest batch or sequence that fits; None where none does."""
        return largest(self.profile, quantity, lambda profile: self._problem(profile, self.group))

    def _problem(self, profile: Profile, group: DeviceGroup) -> Problem:
        hardware = profile_of_rank(profile, group).hardware
        asked: dict[TierName, int] = {"host": self.budgets.host, "disk": self.budgets.disk}
        for tier in hardware.tiers:
            most = most_of(tier, profile)
            if asked[tier.name] > most:
                times = group.in_node
                words = "host memory" if tier.name == "host" else "disk"
                raise ProtrainError(
                    f"{format_bytes(asked[tier.name] * times)} of {words} were asked for, and"
                    f" {format_bytes(most * times)} were found when {hardware.name} was measured",
                    key="--host-memory" if tier.name == "host" else "--disk",
                    fix="ask for as much as there is, or profile the model on a machine with more",
                )
        settings = replace(self.settings, group=group)
        return Problem.of(profile, self.budgets, settings, pins=self.pins, allow=self.allow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The aim; at most one of these, and none for the fastest step.

    max_slowdown    least device memory for a step of this many times the fastest
    maximize        the largest batch or sequence that fits
    pareto_points   the front of memory against time, over so many budgets
    """

    max_slowdown: float | None = None
    maximize: Quantity | None = None
    pareto_points: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, a front of plans (`solved` is the fastest), or why there is none.

    `profile` is the one that was planned for: with `maximize`, grown to `largest`; of several
    devices, one's part (see `profile_of_rank`). `kept_seconds` is the step that keeps everything on
    the device, where it fits.
    """

    profile: Profile
    solved: Solved | None = None
    infeasible: Infeasible | None = None
    least_memory: "LeastMemory | None" = None
    largest: Profile | None = None
    front: "tuple[Point, ...]" = ()
    seconds_without_pins: float | None = None
    kept_seconds: float | None = None
    program: BoundProgram | None = None  # of the plan, for one micro-batch with its update

    @cached_property
    def report(self) -> StepReport | None:
        """The simulated step of the plan; made when it is told, for which `fit` does not ask."""
        return report(self.program) if self.program else None


def ask(
    question: Question,
    objective: Objective,
    *,
    effort: Effort,
    solver: Solver = "milp",
    progress: Progress | None = None,
    told: "Callable[[Point], None] | None" = None,
    hints: Sequence[Hint] = (),
) -> Answer:
    """The answer to a question; ProtrainError where a pin does not fit it.

    The search for the fastest step begins with `hints`, too. Of a front, each point is `told` as
    soon as it is known.
    """
    found_largest = None
    if objective.maximize:
        found_largest = question.largest(objective.maximize)
        if found_largest:
            question = replace(question, profile=found_largest)
    problems, budgets = question.problems(), question.budgets
    answer = Answer(profile=problems[0].profile, largest=found_largest)
    outcome: Solved | Infeasible
    if objective.max_slowdown is not None:
        slowdown = objective.max_slowdown
        least = least_memory(
            problems, budgets, max_slowdown=slowdown, effort=effort, progress=progress
        )
        if isinstance(least, Infeasible):
            outcome = least
        else:
            outcome, answer = least.solved, replace(answer, least_memory=least)
    elif objective.pareto_points is not None:
        points = objective.pareto_points
        front = pareto(
            problems, budgets, num_points=points, effort=effort, progress=progress, told=told
        )
        if isinstance(front, Infeasible):
            outcome = front
        else:
            outcome, answer = front[-1].solved, replace(answer, front=front)
    else:
        outcome = solve_any(
            problems, budgets, effort=effort, solver=solver, progress=progress, hints=hints
        )
    if isinstance(outcome, Infeasible):
        batch, sequence = question.largest("batch-size"), question.largest("seq-len")
        outcome = replace(
            outcome,
            largest_batch_size=batch.workload.batch_size if batch else None,
            largest_seq_len=sequence.workload.seq_len if sequence else None,
        )
        return replace(answer, infeasible=outcome)
    if question.pins and objective == Objective():
        unpinned = replace(question, pins=()).problems()
        known = [outcome.plan.units]
        free = solve_any(unpinned, budgets, effort=effort, progress=progress, hints=known)
        assert isinstance(free, Solved), "a plan with pins fits, so one without them does"
        answer = replace(answer, seconds_without_pins=free.plan.prediction.step_seconds)
    problem = problem_of(outcome, problems)
    kept = keeping(problem, Evaluator(problem))
    return replace(
        answer,
        solved=outcome,
        program=problem.program(outcome.plan.units),
        kept_seconds=kept.seconds if kept else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The plan of least device memory found among those that take up to `limit_seconds`.

    No plan that fast fits a device budget below `lower_bound_bytes` (the context included).
    """

    solved: Solved
    limit_seconds: float
    fastest_seconds: float
    lower_bound_bytes: int


def least_memory(
    problems: Sequence[Problem],
    budgets: Budgets,
    *,
    max_slowdown: float,
    effort: Effort,
    progress: Progress | None = None,
) -> LeastMemory | Infeasible:
    """The least device memory for a step of `max_slowdown` times the fastest within `budgets`.

    The fluid model, asked for the least budget at that speed, gives the bound and the place to
    start; plans for budgets from there on show how much whole moves need more.
    """
    fastest = solve_any(problems, budgets, effort=effort, progress=progress)
    if isinstance(fastest, Infeasible):
        return fastest
    fewest = problems[0]
    step = fastest.plan.prediction.step_seconds
    limit_s = step * max_slowdown
    besides = fewest.profile.hardware.device.besides_bytes
    least = 0
    if not effort.spent():
        least = int(min(_least_bytes(problem, limit_s, effort) for problem in problems))
    best, best_bytes = fastest, _needed(fastest)
    hints = [fastest.plan.units]
    inner = replace(effort, enough_s=limit_s)

    def planned(device: int) -> bool:
        nonlocal best, best_bytes
        smaller = replace(budgets, device=device + besides)
        found = solve_any(
            within(problems, device), smaller, effort=inner, progress=progress, hints=hints
        )
        if isinstance(found, Solved):
            hints.append(found.plan.units)
        if isinstance(found, Infeasible) or found.plan.prediction.step_seconds > limit_s:
            return False
        if _needed(found) < best_bytes:
            best, best_bytes = found, _needed(found)
        return True

    low = max(least, getattr(min_memory(fewest, stopped=effort.spent), "bytes", 0))
    grow, high = FIRST_STEP, low
    while not effort.spent() and high < best_bytes and not planned(high):
        low, high = high, int(high * (1 + grow))
        grow *= 2
    for _ in range(BISECTIONS):
        middle = (low + min(high, best_bytes)) // 2
        if middle <= low * (1 + FIRST_STEP) or effort.spent():
            break
        if planned(middle):
            high = middle
        else:
            low = middle
    return LeastMemory(
        solved=best,
        limit_seconds=limit_s,
        fastest_seconds=step,
        lower_bound_bytes=min(least, best_bytes) + besides,
    )


def _needed(solved: Solved) -> int:
    return solved.plan.prediction.peak_bytes.device


def _least_bytes(problem: Problem, limit_s: float, effort: Effort) -> float:
    """A bound on the bytes of the device, context excluded, at a step of `limit_s` or less.

    Infinity where no plan is that fast.
    """
    fluid = Fluid(problem)
    fluid.minimise_memory(limit_s)
    answer = solve(fluid.pulp, integer=False, stopped=effort.spent)
    return max(0.0, answer.bound * fluid.byte_unit * (1 - SAFE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the Pareto front: its plan needs `device_bytes`, context included."""

    device_bytes: int
    solved: Solved


def pareto(
    problems: Sequence[Problem],
    budgets: Budgets,
    *,
    num_points: int,
    effort: Effort,
    progress: Progress | None = None,
    told: Callable[[Point], None] | None = None,
) -> tuple[Point, ...] | Infeasible:
    """Plans from the least memory to what `budgets` allow, each faster than those of less.

    Budgets are in equal ratios between the least and the largest that helps; a plan that a
    smaller one beats is left out. Each point is `told` as soon as it is known.
    """
    problem = problems[0]  # with the fewest replicas, which needs least
    lean = min_memory(problem, stopped=effort.spent)
    if lean is None or lean.bytes > problem.device:
        found = solve_problem(problem, budgets, effort=effort)
        assert isinstance(found, Infeasible)
        return found
    besides = problem.profile.hardware.device.besides_bytes
    plain: Choice = tuple((0, 0) for _ in problem.options)
    largest = max(lean.bytes, min(problem.device, max(problem.static_bytes(plain))))
    points: list[Point] = []
    hints: Sequence[Hint] = ()
    for number in range(num_points):
        share = number / max(1, num_points - 1)
        device = round(lean.bytes * (largest / lean.bytes) ** share)
        if effort.spent() and points:
            break
        found = solve_any(
            within(problems, device),
            replace(budgets, device=device + besides),
            effort=effort,
            progress=progress,
            hints=hints,
        )
        if isinstance(found, Infeasible):
            continue  # rounding of the least budget
        hints = (found.plan.units,)
        step = found.plan.prediction.step_seconds
        if not points or step < points[-1].solved.plan.prediction.step_seconds:
            points.append(Point(device_bytes=_needed(found) + besides, solved=found))
            if told:
                told(points[-1])
    return tuple(points)


Feasibility = Literal["fits", "fits with a plan", "does not fit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A question with its plan, or why there is none.

    `binds` says in words what makes up the step, or what there is too little of. As far as that was
    asked for: `plain_bytes` is what plain PyTorch would need of the device, what is besides tensors
    included; of several devices, with all states on each and DDP's buckets. `plain_seconds` is the
    step that keeps everything on the device, where it fits. `alternatives` are what people do
    without a planner.
    """

    question: Question
    solved: Solved | None
    infeasible: Infeasible | None
    binds: str
    plain_bytes: int = 0
    plain_seconds: float | None = None
    alternatives: tuple[Alternative, ...] = ()

    @staticmethod
    def of(
        question: Question,
        problems: Sequence[Problem],
        found: Solved | Infeasible,
        **asked: Any,
    ) -> "Fit":
        """Return an answer to the question with these problems, in words what binds, and more."""
        if isinstance(found, Infeasible):
            binds = found.in_a_line
            return Fit(question=question, solved=None, infeasible=found, binds=binds, **asked)
        problem = problem_of(found, problems)
        binds = lanes_in_a_line(problem, problem.choice_of(found.plan.units))
        return Fit(question=question, solved=found, infeasible=None, binds=binds, **asked)

    @property
    def profile(self) -> Profile:
        """The profile that was planned for, with its machine."""
        return self.question.profile

    @property
    def group(self) -> DeviceGroup:
        """The devices, with the plan's number of replicas."""
        return self.solved.plan.group if self.solved else self.question.group

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update."""
        return self.question.settings.micro_batches

    @property
    def verdict(self) -> Feasibility:
        """`fits`: as plain PyTorch, with nothing planned (a plan may be faster all the same)."""
        if self.solved is None:
            return "does not fit"
        plain = self.plain_bytes <= self.solved.plan.budgets.device
        return "fits" if plain else "fits with a plan"

    @property
    def is_tight(self) -> bool:
        """Whether the plan's peak leaves less room than its allowance, until it is measured."""
        return self.solved is not None and is_tight(
            self.profile, self.solved.plan.prediction.peak_bytes
        )

    @property
    def allowance_bytes(self) -> int:
        """Bytes that the allocator may reserve beyond the plan's tensors; 0 without a plan."""
        if self.solved is None:
            return 0
        return allowance_bytes(self.profile, self.solved.plan.prediction.peak_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of a step per second of the predicted one."""
        return self.tokens_per_step / self.step_seconds if self.step_seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of the plan's step."""
        return self.solved.plan.prediction.step_seconds if self.solved else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all devices' micro-batches."""
        return self.question.tokens

    def spending(self, step_seconds: float | None) -> Spending | None:
        """Return the bill for steps of so many seconds; None where the alternative does not fit."""
        if step_seconds is None:
            return None
        return spending(
            self.profile, self.group, micro_batches=self.micro_batches, step_seconds=step_seconds
        )


def fit(question: Question, *, effort: Effort, compare: bool = False) -> Fit:
    """Plan the question's profile, and say what binds; with `compare`, beside alternatives.

    Where an alternative is faster by more than the gap that is good enough, the search begins there
    once more.
    """
    problems = question.problems()
    answer = ask(question, Objective(), effort=effort)
    others = alternatives(problems) if compare else ()
    if answer.solved is not None:
        enough_s = answer.solved.plan.prediction.step_seconds / (1 + effort.gap_target)
        faster = [one for one in others if one.step_seconds and one.step_seconds < enough_s]
        if faster:
            hints = [one.units for one in faster]
            answer = ask(question, Objective(), effort=effort, hints=hints)
    problem = problem_of(answer.solved, problems) if answer.solved else problems[0]
    besides = problem.profile.hardware.device.besides_bytes
    buckets = bucket_bytes(problem.profile) if problem.settings.group.num_devices > 1 else 0
    plain = tuple((0, 0) for _ in problem.options)
    found = answer.solved or answer.infeasible
    assert found is not None
    return Fit.of(
        question,
        problems,
        found,
        plain_bytes=max(problem.static_bytes(plain)) + besides + buckets,
        plain_seconds=answer.kept_seconds,
        alternatives=others,
    )
