"""Cells of a grid, as records: one question under several settings, with answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from protrain_plan.planning.model.problem import most_of
from protrain_plan.planning.questions.answers import Answer, Question
from protrain_plan.planning.questions.spending import Spending, spending
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import Hardware, TierName

Resource = Literal["host", "device", "disk", "link"]
Order = Literal["time", "cost", "memory"]
Settings = tuple[tuple[str, float | str], ...]

GAP = 0.02
"""Plans this close to the bound are good enough to compare machines and batches."""

WORTH = GAP
"""Least gain of a change to name."""

MUCH = 0.1
"""Least gain of the change named in every answer."""

COMPUTE = "compute"
"""Bound: the units' least compute."""
LANES = "its lanes"
"""Bound: the least work of compute, links, updates and collectives, within the memory."""
MEMORY = "memory: no plan fits"
PLAN = "its plan"
"""Bound: a plan's proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A question by its `settings` that differ from others', with the price of all devices.

    `words` name the change. An `answer` compares equal tokens in other batches, too: `others`.
    """

    question: Question
    settings: Settings = ()
    name: str = ""
    words: str = ""
    price_per_hour: float = 0.0
    answer: Callable[[], Answer] | None = None
    others: tuple[Question, ...] = ()

    @property
    def first_bound(self) -> float:
        """An upper bound of any plan's tokens per second: the units' compute."""
        asked = (self.question, *self.others)
        return max(q.tokens / min(p.compute_seconds for p in q.problems()) for q in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A cell with its answer, or ruled out by a bound: `reached` is None.

    No plan exceeds `most_tokens_per_s`, 0 if none fits. `helps` are the requested changes of the
    cell, and `best` the one that gains most.
    """

    cell: Cell
    most_tokens_per_s: float
    bound: str
    reached: Answer | None = None
    helps: tuple["Tried", ...] = ()
    best: "Tried | None" = None

    @property
    def tokens_per_s(self) -> float:
        """The plan's speed; 0 without a plan."""
        return (self.reached and self.reached.tokens_per_s) or 0.0

    def times_as_fast(self, base: Answer) -> float | None:
        """Speed over that of `base`; 0 if neither fits, None if only this does.

        1 if a bound rules it out. A search ends when its bound on the gain is below `WORTH`, up to
        the planner's gap; the speed is the one at that time.
        """
        if not self.most_tokens_per_s:
            return 0.0
        if self.reached is None:
            return 1.0
        return self.tokens_per_s / base.tokens_per_s if base.tokens_per_s else None

    def spending(self, step_seconds: float | None) -> Spending:
        """The bill for steps of these seconds; empty if nothing fits."""
        if step_seconds is None:
            return Spending()
        question = self.reached.question if self.reached else self.cell.question
        return spending(
            question.profile,
            num_devices=question.group.num_devices,
            num_tokens=question.tokens,
            step_seconds=step_seconds,
            price_per_hour=self.cell.price_per_hour,
        )

    def rank(self, by: Order) -> tuple[bool, float]:
        """The sort key of an order: cells that do not fit are last."""
        if self.reached is None or self.reached.solved is None:
            return True, 0.0
        if by == "memory":
            return False, self.reached.solved.plan.prediction.peak_bytes.on_device
        cost = self.cell.price_per_hour if by == "cost" else 1.0
        return False, cost / self.tokens_per_s


def planned(cell: Cell, reached: Answer) -> Tried:
    """A cell with its plan and the plan's bound."""
    if reached.solved is None:
        return Tried(cell=cell, most_tokens_per_s=0.0, bound=MEMORY, reached=reached)
    most = reached.question.tokens / reached.solved.bound_seconds
    return Tried(cell=cell, most_tokens_per_s=most, bound=PLAN, reached=reached)


def refuse_missing(machine: Hardware, resource: Resource) -> None:
    """ProtrainError if a machine lacks the resource to change."""
    tier = "host" if resource == "link" else resource
    if tier != "device" and all(one.name != tier for one in machine.tiers):
        what = "host memory" if tier == "host" else "disk"
        raise ProtrainError(f"{machine.name} has no {what} below its device", key="--set")


def with_resource(question: Question, resource: Resource, value: float) -> Question:
    """The question with these bytes, or a link of these bytes per second.

    Host memory and disk are a node's, which has as much even if less was measured; the link is a
    device's, in both directions. The network between devices stays. ProtrainError if the machine
    has no such tier.
    """
    profile, size = question.profile, int(value)
    refuse_missing(profile.hardware, resource)
    if resource == "link":
        return with_link(question, "host", value, value)
    if resource != "device":
        tier = profile.hardware.tier(resource)
        if most_of(tier, profile) < size:
            larger = profile.hardware.with_tier(replace(tier, capacity_bytes=size))
            profile = replace(profile, hardware=larger)
        size //= question.group.in_node
    budgets = replace(question.budgets, **{resource: size})
    return replace(question, profile=profile, budgets=budgets)


def with_link(question: Question, tier: TierName, read: float, write: float) -> Question:
    """The question with another link to a tier, in bytes per second."""
    machine = question.profile.hardware.with_link(tier, read, write)
    return replace(question, profile=replace(question.profile, hardware=machine))
