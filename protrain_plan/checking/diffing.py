"""Changes: between two profiles of a model, bytes unit by unit; between two plans, decisions.

With the bytes and seconds that the plans predict, before and after.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from protrain_runtime.contract.records.decisions import activations_text, states_text
from protrain_runtime.contract.records.folding import fold, runs
from protrain_runtime.contract.records.plan import (
    SETTINGS,
    PipelinePlan,
    Plan,
    Prediction,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Profile, Unit
from protrain_runtime.contract.units import exact_bytes, format_bytes, format_seconds

Entry = TypeVar("Entry")
Change = TypeVar("Change")


def _changes(
    old: Mapping[str, Entry],
    new: Mapping[str, Entry],
    change: Callable[[Entry | None, Entry | None], Change],
) -> Iterator[tuple[str, int, Change]]:
    """Runs of units with the same change: their names, folded, how many they are, and the change.

    In the order of `new`; those that went come last. A unit that is in one alone is None in the
    other.
    """
    names = [*new, *(name for name in old if name not in new)]
    changes = [change(old.get(name), new.get(name)) for name in names]
    for run in runs(names, changes):
        first, last = names[run[0]], names[run[-1]]
        yield first if len(run) == 1 else fold(first, last), len(run), changes[run[0]]


# --- two profiles ---------------------------------------------------------------------------------

_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGrowth:
    """Bytes that each unit of a run takes more (or, below zero, less).

    states_bytes      parameters, gradients and optimizer states
    activation_bytes  what autograd keeps of it from forward to backward, when all of it is kept
    """

    units: str  # "model.layers.0", or a run: "model.layers.0-11"
    num_units: int
    states_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_units * (self.states_bytes + self.activation_bytes)

    def __str__(self) -> str:
        parts = [
            f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'} {what}"
            for size, what in (
                (self.states_bytes, "states"),
                (self.activation_bytes, "activations"),
            )
            if size
        ]
        each = " each" if self.num_units > 1 else ""
        return f"{self.units}: {', '.join(parts)}{each}"


def growth(before: Profile, after: Profile) -> tuple[UnitGrowth, ...]:
    """The units whose bytes differ, in the order of `after`; those that went come last.

    A unit that is in one profile alone counts with all its bytes.
    """
    old, new = ({unit.name: unit for unit in profile.units} for profile in (before, after))

    def size(unit: Unit | None) -> tuple[int, int]:
        if unit is None:
            return 0, 0
        states = unit.parameter_bytes + unit.gradient_bytes + unit.state_bytes
        return states, unit.cost("keep").kept_bytes

    def grown(was: Unit | None, now: Unit | None) -> tuple[int, int]:
        (states, kept), (states_before, kept_before) = size(now), size(was)
        return states - states_before, kept - kept_before

    return tuple(
        UnitGrowth(
            units=units, num_units=num_units, states_bytes=states, activation_bytes=activations
        )
        for units, num_units, (states, activations) in _changes(old, new, grown)
        if states or activations
    )


def growth_in_words(grown: Sequence[UnitGrowth]) -> str:
    """The units that changed most, as an enumeration."""
    most = sorted(grown, key=lambda unit: -abs(unit.total_bytes))[:_MAX_SHOWN]
    more = f"; and {len(grown) - len(most)} more" if len(grown) > len(most) else ""
    return "; ".join(map(str, most)) + more


# --- two plans ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that both plans say, and say differently, as texts."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionChange:
    """A run of units that decide otherwise; `None`: the units are not in that plan.

    Where the decisions are the same, what differs is their leads and drains.
    """

    units: str
    num_units: int
    before: str | None
    after: str | None


_OF_STAGE = "device peak of stage"
"""The names of amounts that the table has, and the sentence has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A predicted number, in bytes or seconds."""

    name: str
    before: float
    after: float
    in_bytes: bool

    def text(self, value: float) -> str:
        """A value of its kind for a reader."""
        return format_bytes(round(value)) if self.in_bytes else format_seconds(value)

    @property
    def change(self) -> str:
        """The difference, in its unit and as a part of the number before."""
        if self.before == self.after:
            return "same"
        sign = "+" if self.after > self.before else "-"
        size = self.text(abs(self.after - self.before))
        part = f" ({self.after / self.before - 1:+.1%})" if self.before else ""
        return f"{sign}{size}{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """All that a reviewer has to know of a new plan."""

    num_units: int  # of both plans together
    facts: tuple[Fact, ...]
    decisions: tuple[DecisionChange, ...]
    amounts: tuple[Amount, ...]

    @property
    def num_changed(self) -> int:
        return sum(change.num_units for change in self.decisions)


def plan_diff(old: Plan, new: Plan) -> PlanDiff:
    """Compare two plans; units are the same where their names are."""
    before, after = ({unit.name: unit for unit in plan.units} for plan in (old, new))
    return PlanDiff(
        num_units=len({*before, *after}),
        facts=tuple(_facts(old, new)),
        decisions=tuple(
            DecisionChange(units=units, num_units=count, before=change[0], after=change[1])
            for units, count, change in _changes(before, after, _change)
            if change is not None
        ),
        amounts=tuple(_amounts(old, new)),
    )


def in_words(diff: PlanDiff) -> str:
    """The change in a sentence or two."""
    if not diff.decisions:
        first = "No decision differs."
    else:
        first = f"{diff.num_changed} of {diff.num_units} layers decide otherwise."
    moved = [
        f"{amount.name} {'grows' if amount.after > amount.before else 'shrinks'}"
        f" from {amount.text(amount.before)} to {amount.text(amount.after)}"
        for amount in diff.amounts
        if amount.before != amount.after and not amount.name.startswith(_OF_STAGE)
    ]
    if not moved:
        return f"{first} All predictions are the same."
    *most, last = moved
    joined = f"{', '.join(most)} and {last}" if most else last
    return f"{first} The predicted {joined}."


def _facts(old: Plan, new: Plan) -> Iterator[Fact]:
    texts: list[tuple[str, Callable[[Plan], str]]] = [
        ("model", lambda plan: plan.workload.model),
        ("model fingerprint", lambda plan: plan.model_fingerprint),
        ("batch", lambda plan: f"{plan.workload.batch_size} x {plan.workload.seq_len} tokens"),
        ("dtype", lambda plan: f"{plan.workload.dtype}, {plan.workload.precision}"),
        ("adapter", lambda plan: plan.workload.adapter or "none"),
        ("quantised weights", lambda plan: plan.workload.quantize or "none"),
        ("compiled", lambda plan: plan.workload.compile or "nothing"),
        ("machine", lambda plan: plan.hardware),
        ("optimizer", lambda plan: plan.optimizer),
        ("profile", lambda plan: plan.profile_fingerprint),
        ("device budget", lambda plan: _size(plan.budgets.device)),
        ("host budget", lambda plan: _size(plan.budgets.host)),
        ("disk budget", lambda plan: _size(plan.budgets.disk)),
    ]
    both = [(name, text(old), text(new)) for name, text in texts]
    for name, (words, _) in SETTINGS.items():
        before, after = (_setting_text(name, getattr(one.settings, name)) for one in (old, new))
        both.append((words, before, after))
    for words, of in _PIPELINE.items():
        pipelines = (old.pipeline, new.pipeline)
        before, after = ("none" if one is None else str(of(one)) for one in pipelines)
        both.append((words, before, after))
    both.append(("exactness", old.exactness, new.exactness))
    for name, before, after in both:
        if before != after:
            yield Fact(name=name, before=before, after=after)


_PIPELINE: dict[str, Callable[[PipelinePlan], object]] = {
    "stages": lambda pipeline: len(pipeline.stages),
    "schedule of stages": lambda pipeline: pipeline.schedule,
    "layout of stages": lambda pipeline: pipeline.layout,
    "nodes of all stages": lambda pipeline: pipeline.num_nodes,
    "first units of stages": lambda pipeline: "; ".join(
        ", ".join(stage.first_units) for stage in pipeline.stages
    ),
    "micro-batches held by stages": lambda pipeline: ", ".join(
        str(stage.held) for stage in pipeline.stages
    ),
}
"""Facts about a pipeline."""


def _setting_text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return _size(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _size(size: int) -> str:
    """Exactly, and for a reader where that is a long number: `1.40 GiB (1500000000)`."""
    exact = exact_bytes(size)
    return f"{format_bytes(size)} ({exact})" if exact.isdigit() and size >= 1024 else exact


def _change(old: UnitPlan | None, new: UnitPlan | None) -> tuple[str | None, str | None] | None:
    """Both decisions as texts, None where they are the same."""
    before, after = (
        None
        if unit is None
        else f"{activations_text(unit.activations)}; {states_text(unit.states)}"
        for unit in (old, new)
    )
    if before != after:
        return before, after
    assert old and new
    if old.schedule == new.schedule:
        return None
    return f"{before}, with {_schedule(old)}", f"{after}, with {_schedule(new)}"


def _schedule(unit: UnitPlan) -> str:
    plan = unit.schedule
    leads = "/".join(f"{lead:g}" for lead in (plan.forward_lead, plan.backward_lead))
    drains = "/".join(
        "end" if drain is None else f"{drain:g}" for drain in (plan.swap_drain, plan.update_drain)
    )
    late = ", updated late" if plan.update_late else ""
    return f"leads {leads}/{plan.swap_lead:g}, drains {drains}{late}"


def _amounts(old: Plan, new: Plan) -> Iterator[Amount]:
    numbers: tuple[tuple[str, Callable[[Prediction], float], bool], ...] = (
        ("device peak", lambda found: found.peak_bytes.on_device, True),
        ("host peak", lambda found: found.peak_bytes.host, True),
        ("disk peak", lambda found: found.peak_bytes.disk, True),
        ("step", lambda found: found.step_seconds, False),
        ("first step", lambda found: found.first_step_seconds, False),
        ("clipped step", lambda found: found.clipped_step_seconds, False),
        ("bound on the step", lambda found: found.lower_bound_seconds, False),
    )
    may_be_absent = ("host peak", "disk peak", "first step", "clipped step")
    for name, number, in_bytes in numbers:
        before, after = number(old.prediction), number(new.prediction)
        if name in may_be_absent and not (before or after):
            continue
        if name in may_be_absent and not in_bytes:  # 0: it takes as long as every step
            before = before or old.prediction.step_seconds
            after = after or new.prediction.step_seconds
        yield Amount(name=name, before=before, after=after, in_bytes=in_bytes)
    stages = [plan.pipeline.stages if plan.pipeline else () for plan in (old, new)]
    if len(stages[0]) == len(stages[1]):
        for stage, (was, now) in enumerate(zip(*stages, strict=True)):
            before, after = was.peak_bytes.on_device, now.peak_bytes.on_device
            yield Amount(name=f"{_OF_STAGE} {stage}", before=before, after=after, in_bytes=True)
