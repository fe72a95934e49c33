"""Answers of planning: a plan with its proof, or the reason that there is none, and remedies."""

from dataclasses import dataclass
from typing import Literal

from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Plan

Status = Literal["optimal", "feasible"]

STAGES = "stages"
"""The solver of plans chosen among numbers of stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """A number of replicas, and the result for it.

    `step_seconds` is None without a plan, and so is `lower_bound_seconds` if none fits; otherwise
    it bounds every plan with this number.
    """

    number: int
    step_seconds: float | None
    lower_bound_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStage:
    """The end of a search stage: the best step so far and the bound, in seconds."""

    stage: str
    step_seconds: float
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A plan that meets the budgets.

    gap            step_seconds / lower_bound_seconds - 1 of the plan's prediction
    status         "optimal" where the gap is at most the one asked for, else "feasible"
    stall_seconds  simulated time in which compute waits for transfers
    solve_seconds  those of the search; where the plan was `kept`, of the one that found it
    replicas       the numbers of replicas that the plan's was chosen from; none where it was given
    seconds_without_disk  of the fastest plan found that does without the disk, where one was asked
                   for and fits
    search         the stages that ran, in order
    """

    plan: Plan
    status: Status
    gap: float
    stall_seconds: float
    solve_seconds: float
    solver: str
    replicas: tuple[Replicas, ...] = ()
    kept: bool = False
    seconds_without_disk: float | None = None
    search: tuple[SearchStage, ...] = ()

    @property
    def step_seconds(self) -> float:
        return self.plan.prediction.step_seconds

    @property
    def bound_seconds(self) -> float:
        return self.plan.prediction.lower_bound_seconds

    @property
    def uses_disk(self) -> bool:
        return self.plan.prediction.peak_bytes.disk > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No plan meets the budgets.

    The leanest plan within the other tiers' budgets needs `smallest_budget_bytes` of `tier`,
    counted like the budget (for the device: context included). On the device its peak is in `slot`,
    with `occupants`: bytes by kind, the context included. No plan at all works below
    `proven_budget_bytes`. The largest batch and sequence that fit are for the profile scaled in
    proportion; `None` if none fits, or not requested.
    """

    tier: Literal["device"] | TierName
    slot: str
    occupants: tuple[tuple[str, int], ...]
    budget_bytes: int
    shortfall_bytes: int
    smallest_budget_bytes: int
    proven_budget_bytes: int
    advice: tuple[str, ...]
    largest_batch_size: int | None = None
    largest_seq_len: int | None = None
