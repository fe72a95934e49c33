"""Changes between two profiles (bytes of each unit) and between two plans.

Changes of plans are decisions, facts, and the predicted bytes and seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from protrain_runtime.contract.records.decisions import activations_text, states_text
from protrain_runtime.contract.records.folding import fold, runs
from protrain_runtime.contract.records.plan import SETTINGS, Plan, UnitPlan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import exact_bytes, format_bytes, format_seconds

Entry = TypeVar("Entry")
Change = TypeVar("Change")


def _changes(
    old: Mapping[str, Entry],
    new: Mapping[str, Entry],
    change: Callable[[Entry | None, Entry | None], Change],
) -> Iterator[tuple[str, int, Change]]:
    """Yield runs of units with the same change: folded names, number of units, and the change.

    The order is that of `new`; removed units come last. A missing unit is None.
    """
    names = list(dict.fromkeys((*new, *old)))
    changes = [change(old.get(name), new.get(name)) for name in names]
    for run in runs(names, changes):
        yield fold(names[run[0]], names[run[-1]]), len(run), changes[run[0]]


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
        sizes = {"states": self.states_bytes, "activations": self.activation_bytes}
        parts = [
            f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'} {what}"
            for what, size in sizes.items()
            if size
        ]
        each = " each" if self.num_units > 1 else ""
        return f"{self.units}: {', '.join(parts)}{each}"


def growth(before: Profile, after: Profile) -> tuple[UnitGrowth, ...]:
    """The units whose bytes differ, in the order of `after`; removed units come last.

    A unit that is in only one profile counts with all its bytes.
    """
    old, new = (
        {
            unit.name: (unit.model_state_bytes, unit.cost("keep").kept_bytes)
            for unit in profile.units
        }
        for profile in (before, after)
    )

    def grown(was: tuple[int, int] | None, now: tuple[int, int] | None) -> tuple[int, int]:
        (states, kept), (states_before, kept_before) = now or (0, 0), was or (0, 0)
        return states - states_before, kept - kept_before

    return tuple(
        UnitGrowth(units=units, num_units=count, states_bytes=states, activation_bytes=kept)
        for units, count, (states, kept) in _changes(old, new, grown)
        if states or kept
    )


def growth_in_words(grown: Sequence[UnitGrowth]) -> str:
    """The units that changed most, as an enumeration."""
    most = sorted(grown, key=lambda unit: -abs(unit.total_bytes))[:_MAX_SHOWN]
    more = f"; and {len(grown) - len(most)} more" if len(grown) > len(most) else ""
    return "; ".join(map(str, most)) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact about both plans that differs, as texts."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionChange:
    """A run of units with other decisions, leads or drains; None: the plan lacks these units."""

    units: str
    num_units: int
    before: str | None
    after: str | None


_OF_STAGE = "device peak of stage"
"""Beginning of the names of amounts that only the table shows."""


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
    """All differences between two plans."""

    num_units: int  # of both plans together
    facts: tuple[Fact, ...]
    decisions: tuple[DecisionChange, ...]
    amounts: tuple[Amount, ...]

    @property
    def num_changed(self) -> int:
        return sum(change.num_units for change in self.decisions)


def plan_diff(old: Plan, new: Plan) -> PlanDiff:
    """Compare two plans; units are matched by name."""
    before, after = ({unit.name: unit for unit in plan.units} for plan in (old, new))
    facts, new_facts = _facts(old), _facts(new)
    return PlanDiff(
        num_units=len({*before, *after}),
        facts=tuple(
            Fact(name=name, before=text, after=new_facts[name])
            for name, text in facts.items()
            if text != new_facts[name]
        ),
        decisions=tuple(
            DecisionChange(units=units, num_units=count, before=change[0], after=change[1])
            for units, count, change in _changes(before, after, _change)
            if change is not None
        ),
        amounts=tuple(_amounts(old, new)),
    )


def in_words(diff: PlanDiff) -> str:
    """The change in a sentence or two."""
    first = "No decision differs."
    if diff.decisions:
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


def _facts(plan: Plan) -> dict[str, str]:
    """Everything that a plan says besides its decisions and predictions, as texts by name."""
    workload, budgets, pipeline = plan.workload, plan.budgets, plan.pipeline
    facts = {
        "model": workload.model,
        "model fingerprint": plan.model_fingerprint,
        "batch": f"{workload.batch_size} x {workload.seq_len} tokens",
        "dtype": f"{workload.dtype}, {workload.precision}",
        "adapter": workload.adapter or "none",
        "quantised weights": workload.quantize or "none",
        "compiled": workload.compile or "nothing",
        "machine": plan.hardware,
        "optimizer": plan.optimizer,
        "profile": plan.profile_fingerprint,
        "device budget": _size(budgets.device),
        "host budget": _size(budgets.host),
        "disk budget": _size(budgets.disk),
    }
    for name, (words, _) in SETTINGS.items():
        value = getattr(plan.settings, name)
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        facts[words] = _size(value) if name.endswith("_bytes") else text
    of_pipeline = {
        "stages": pipeline and len(pipeline.stages),
        "schedule of stages": pipeline and pipeline.schedule,
        "layout of stages": pipeline and pipeline.layout,
        "nodes of all stages": pipeline and pipeline.num_nodes,
        "first units of stages": pipeline
        and "; ".join(", ".join(stage.first_units) for stage in pipeline.stages),
        "micro-batches held by stages": pipeline
        and ", ".join(str(stage.held) for stage in pipeline.stages),
    }
    facts |= {name: "none" if value is None else str(value) for name, value in of_pipeline.items()}
    return facts | {"exactness": plan.exactness}


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
    peaks = {"device peak": "on_device", "host peak": "host", "disk peak": "disk"}
    for name, field in peaks.items():
        before, after = (getattr(one.prediction.peak_bytes, field) for one in (old, new))
        if before or after or field == "on_device":
            yield Amount(name=name, before=before, after=after, in_bytes=True)
    times = {
        "step": "step_seconds",
        "first step": "first_step_seconds",
        "clipped step": "clipped_step_seconds",
        "bound on the step": "lower_bound_seconds",
    }
    for name, field in times.items():
        before, after = (getattr(one.prediction, field) for one in (old, new))
        if name in ("first step", "clipped step"):
            if not (before or after):
                continue
            # 0: it takes as long as every step.
            before = before or old.prediction.step_seconds
            after = after or new.prediction.step_seconds
        yield Amount(name=name, before=before, after=after, in_bytes=False)
    stages = [plan.pipeline.stages if plan.pipeline else () for plan in (old, new)]
    if len(stages[0]) == len(stages[1]):
        for stage, (was, now) in enumerate(zip(*stages, strict=True)):
            before, after = was.peak_bytes.on_device, now.peak_bytes.on_device
            yield Amount(name=f"{_OF_STAGE} {stage}", before=before, after=after, in_bytes=True)
