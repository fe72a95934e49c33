"""Cells of a grid, as records: one question under several settings, with answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

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
"""Least gain of a change that is named."""

MUCH = 0.1
"""Least gain of the one change that every answer names."""

COMPUTE = "compute"
"""Bound: what units compute at least."""
LANES = "its lanes"
"""Bound: what compute, links, updates and collectives do at least, within the memory."""
MEMORY = "memory: no plan fits"
PLAN = "its plan"
"""Bound: the one that a plan was proven with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A question by the `settings` in which it differs from others, with the price of all devices.

    `words` say what is changed. With an `answer`, it is about as many tokens in other batches, too:
    those of `others`.
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
        """Tokens per second that no plan exceeds: units are computed."""
        asked = (self.question, *self.others)
        return max(q.tokens / min(p.compute_seconds for p in q.problems()) for q in asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A cell with its answer, or ruled out by a bound: `reached` is None.

    No plan is faster than `most_tokens_per_s`, which is 0 where none fits. `helps` are the changes
    of the cell that were asked for, and `best` the one that gains most.
    """

    cell: Cell
    most_tokens_per_s: float
    bound: str
    reached: Answer | None = None
    helps: tuple["Tried", ...] = ()
    best: "Tried | None" = None

    @property
    def tokens_per_s(self) -> float:
        """Speed of the plan; 0 where there is none."""
        return (self.reached and self.reached.tokens_per_s) or 0.0

    def times_as_fast(self, base: Answer) -> float | None:
        """Speed over that of `base`; 0 where neither fits, None where only this does.

        1 where a bound rules it out. A search ends where its bound says that the gain is less than
        `WORTH`, up to the planner's gap, and the speed is the one that it has then.
        """
        if not self.most_tokens_per_s:
            return 0.0
        if self.reached is None:
            return 1.0
        return self.tokens_per_s / base.tokens_per_s if base.tokens_per_s else None

    def spending(self, step_seconds: float | None) -> Spending:
        """Return the bill for steps of so many seconds; of nothing for what does not fit."""
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
        """Return the place in an order: those that do not fit are last."""
        if self.reached is None or self.reached.solved is None:
            return True, 0.0
        if by == "memory":
            return False, self.reached.solved.plan.prediction.peak_bytes.on_device
        cost = self.cell.price_per_hour if by == "cost" else 1.0
        return False, cost / self.tokens_per_s


def planned(cell: Cell, reached: Answer) -> Tried:
    """Return a cell with its plan, whose bound holds for all of its plans."""
    if reached.solved is None:
        return Tried(cell=cell, most_tokens_per_s=0.0, bound=MEMORY, reached=reached)
    most = reached.question.tokens / reached.solved.plan.prediction.lower_bound_seconds
    return Tried(cell=cell, most_tokens_per_s=most, bound=PLAN, reached=reached)


def refuse_missing(machine: Hardware, resource: Resource) -> None:
    """Raise ProtrainError where a machine does not have what is to be changed."""
    tier = "host" if resource == "link" else resource
    if tier != "device" and all(one.name != tier for one in machine.tiers):
        what = "host memory" if tier == "host" else "disk"
        raise ProtrainError(f"{machine.name} has no {what} below its device", key="--set")


def with_resource(question: Question, resource: Resource, value: float) -> Question:
    """Return the question with so many bytes, or with a link of so many bytes per second.

    Host memory and disk are those of a node; the link is that of a device, in both directions. What
    joins several devices stays as it is. ProtrainError where the machine has no such tier.
    """
    refuse_missing(question.profile.hardware, resource)
    if resource == "link":
        return with_link(question, "host", value, value)
    size = int(value) if resource == "device" else int(value) // question.group.in_node
    return replace(question, budgets=replace(question.budgets, **{resource: size}))


def with_link(question: Question, tier: TierName, read: float, write: float) -> Question:
    """Return the question with another link to a tier, in bytes per second."""
    machine = question.profile.hardware.with_link(tier, read, write)
    return replace(question, profile=replace(question.profile, hardware=machine))
