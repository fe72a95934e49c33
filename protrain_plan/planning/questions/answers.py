"""Questions and their answers, as records.

Nothing here plans: cached answers are shown without importing the planner, which takes longer.
"""

from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Literal

from protrain_plan.planning.model.options import Pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem, most_of
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.allocator_slack import (
    is_tight,
    left_free_bytes,
    reserved_bytes,
)
from protrain_plan.planning.questions.spending import tokens_in_step
from protrain_plan.simulation.group import profile_of_rank
from protrain_plan.simulation.report import StepReport, report
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.forms import ROUNDING
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    Budgets,
    DeviceGroup,
    StepSettings,
    TierBytes,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes

Quantity = Literal["batch-size", "seq-len"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A profile to plan for, with budgets and fixed decisions."""

    profile: Profile
    budgets: Budgets
    settings: StepSettings = OVERLAPPING
    pins: tuple[Pin, ...] = ()
    replicas: tuple[int, ...] = ()  # candidates, fewest first; none: the group's
    allow: tuple[str, ...] = ()  # opted-in inexact forms of activations

    @property
    def group(self) -> DeviceGroup:
        """The planned devices."""
        return self.settings.group

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all devices' micro-batches."""
        return tokens_in_step(self.profile.workload, self.group, self.settings.micro_batches)

    def problem(self) -> Problem:
        """The planning problem; ProtrainError if a pin cannot be met, or devices lack a network."""
        return self.problems()[0]

    def problems(self) -> tuple[Problem, ...]:
        """The problems, one per candidate number of replicas."""
        groups = [replace(self.group, num_replicas=number) for number in self.replicas]
        return tuple(self.problem_of(self.profile, group) for group in groups or [self.group])

    def adding_shards(self) -> "Question | None":
        """The question if no plan fits: opt-in reductions in every micro-batch."""
        settings = replace(self.settings, reductions="in every micro-batch")
        is_open = ROUNDING in self.allow and settings.adds_shards
        return replace(self, settings=settings) if is_open and settings != self.settings else None

    def problem_of(self, profile: Profile, group: DeviceGroup) -> Problem:
        """The problem of another profile, on these devices; errors as in `problem`."""
        hardware = profile_of_rank(profile, group).hardware
        asked: dict[TierName, int] = {"host": self.budgets.host, "disk": self.budgets.disk}
        for tier in hardware.tiers:
            most = most_of(tier, profile)
            if asked[tier.name] > most:
                times = group.in_node
                words = "host memory" if tier.name == "host" else "disk"
                raise ProtrainError(
                    f"{format_bytes(asked[tier.name] * times)} of {words} were requested, but"
                    f" {format_bytes(most * times)} were found when {hardware.name} was measured",
                    key="--host-memory" if tier.name == "host" else "--disk",
                    fix="request at most that, or profile the model on a machine with more",
                )
        settings = replace(self.settings, group=group)
        return Problem.of(profile, self.budgets, settings, pins=self.pins, allow=self.allow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The aim; at most one of these, and none for the fastest step.

    max_slowdown    least device memory for a step of this many times the fastest
    pareto_points   the front of memory against time, over so many budgets
    """

    max_slowdown: float | None = None
    pareto_points: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The leanest plan found within `limit_seconds`; no such plan is below `lower_bound_bytes`."""

    solved: Solved
    limit_seconds: float
    fastest_seconds: float
    lower_bound_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the Pareto front: its plan needs `device_bytes`, context included."""

    device_bytes: int
    solved: Solved


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A policy without a planner: bytes of one device and of its part of the rest, seconds.

    With `checkpointing`, every block is recomputed. `step_seconds` is None if it does not fit: then
    `lacks` are the short tiers, and `peak_bytes` its need of each. `bottleneck` names the step's
    lanes, or the shortage. It is `is_tight` if it fits with less room than the allocator may
    reserve (see `allocator_slack`).
    """

    name: str
    checkpointing: bool
    step_seconds: float | None
    peak_bytes: TierBytes
    bottleneck: str
    lacks: tuple[str, ...] = ()
    units: tuple[UnitPlan, ...] = ()  # where it fits
    is_tight: bool = False
    adds_shards: bool = False  # reduces every micro-batch's gradients


Feasibility = Literal["fits", "fits with a plan", "does not fit"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question with a plan, a front of plans (`solved` is the fastest), or why there is none.

    As far as that was asked for: `bottleneck` says what makes up the step, or what there is too
    little of. `plain_bytes` is what plain PyTorch would need of the device, what is besides tensors
    included; of several devices, with all states on each and DDP's buckets. `kept_seconds` is the
    step that keeps everything on the device, where it fits. `alternatives` are what people do
    without a planner.
    """

    question: Question
    solved: Solved | None = None
    infeasible: Infeasible | None = None
    bottleneck: str = ""
    plain_bytes: int = 0
    kept_seconds: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    least_memory: LeastMemory | None = None
    front: tuple[Point, ...] = ()
    seconds_without_pins: float | None = None

    @property
    def profile(self) -> Profile:
        """The planned profile, with its machine."""
        return self.question.profile

    @cached_property
    def of_rank(self) -> Profile:
        """One device's part of the profile (see `profile_of_rank`)."""
        return self.question.problem().profile

    @cached_property
    def report(self) -> StepReport | None:
        """The plan's simulated step: one micro-batch with its update."""
        from protrain_plan.planning.questions.planner import problem_of

        if self.solved is None:
            return None
        problem = problem_of(self.solved, self.question.problems())
        return report(problem.program(self.solved.plan.units))

    @property
    def group(self) -> DeviceGroup:
        """All devices, with the plan's number of replicas."""
        return self.solved.plan.whole if self.solved else self.question.group

    @property
    def verdict(self) -> Feasibility:
        """`fits`: in plain PyTorch, without a plan (which may still be faster)."""
        if self.solved is None:
            return "does not fit"
        plain = self.plain_bytes <= self.solved.plan.budgets.device
        return "fits" if plain else "fits with a plan"

    @property
    def is_tight(self) -> bool:
        """Whether the plan leaves less room than the allocator may reserve beyond tensors."""
        return self.solved is not None and is_tight(
            self.profile, self.solved.plan.prediction.peak_bytes
        )

    @property
    def reserved_bytes(self) -> int:
        """Expected bytes of the process on the device; 0 without a plan."""
        if self.solved is None:
            return 0
        return reserved_bytes(self.profile, self.solved.plan.prediction.peak_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the device that the question leaves free."""
        return left_free_bytes(self.profile, self.question.budgets)

    @property
    def tokens_per_s(self) -> float | None:
        return self.question.tokens / self.step_seconds if self.step_seconds else None

    @property
    def step_seconds(self) -> float | None:
        return self.solved.step_seconds if self.solved else None

    def is_for_less(self, other: Question) -> bool | None:
        """Whether another question offers everything that this one does, perhaps with more memory.

        None if it concerns another step or model.
        """
        mine, profile = self.question, self.profile
        here = replace(mine, profile=replace(profile, hardware=other.profile.hardware))
        if replace(here, budgets=other.budgets) != other:
            return None
        sizes = zip(astuple(mine.budgets), astuple(other.budgets), strict=True)
        return here == mine and all(one <= more for one, more in sizes)
