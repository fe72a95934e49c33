"""Why each group of units got its decision, and what limits the step. Solved, not guessed.

reasons   one unit of a group takes another decision, everything else stays; the simulator says
          what that costs, or the memory count by how much it exceeds a budget
limits    the fluid model's dual values: what a little more of a resource is worth

"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.judging import Judge, Judged
from protrain_plan.planning.limiting import (
    GIB,
    LaneLimit,
    Limit,
    MemoryLimit,
    Tier,
    limits_of,
    slot_name,
)
from protrain_plan.planning.options import ActivationOption, StateOption
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.wording import (
    activations_does,
    activations_doing,
    amount_of,
    at_most,
    lane_words,
    listed_words,
    states_does,
    states_doing,
    units_text,
)
from protrain_plan.records import activations_text, states_text
from protrain_plan.records.hardware import Hardware
from protrain_plan.records.plan import (
    Keep,
    Persistent,
    Plan,
)
from protrain_plan.records.profile import Profile
from protrain_plan.units import format_bytes, format_seconds

MAX_GROUPS = 12
"""Groups that are explained, the largest first."""

SIMULATED_UNITS = 12_000
"""Simulated schedules times units after which an alternative gets the plan's rule alone: two
seconds or so."""

TIE = 2e-4
"""The fraction of the step that does not count: the planner's tidying gives away ten times as
much."""

Kind = Literal["activations", "states"]


class Shortfall(NamedTuple):
    """By how much a budget is exceeded; on the device, in which slot most of all."""

    bytes: int
    tier: Tier
    slot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another decision for one unit of a group, all others as planned.

    Either it fits, and the step takes `extra_seconds` more (less, if negative: the plan is not
    perfect), each with its best schedule. Or it exceeds the budget of `tier` by `shortfall_bytes`;
    on the device most of all in `slot`. `in_all` says so of the decision in all units of the group,
    where it fits in one.
    """

    kind: Kind
    decision: str  # "swap to host"
    extra_seconds: float | None = None
    shortfall_bytes: int | None = None
    tier: Tier | None = None
    slot: str = ""
    in_all: Shortfall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReason:
    """Units that cost the same and do the same, and why; `alternatives` as the profile has them."""

    units: str  # "layers.0-11"
    num_units: int
    activations: str
    states: str
    reason: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The limits of a plan, by the relaxed model, and the reasons for its decisions.

    Lanes come first, then the device's slots, each with what limits most at the head, then what
    more of each tier is worth to a new plan. `num_unexplained` counts the groups left out.
    """

    limits: tuple[Limit, ...]
    groups: tuple[GroupReason, ...]
    device_budget: int
    num_unexplained: int = 0


def explain(profile: Profile, plan: Plan) -> Explanation:
    """Why `plan`, made for `profile`, is as it is.

    ProtrainError where the profile does not have the plan's units and decisions, or gives them
    more bytes than the plan's budgets.
    """
    problem = Problem.of(
        profile,
        plan.budgets,
        piece_bytes=plan.piece_bytes,
        updates=plan.updates,
        micro_batches=plan.micro_batches,
    )
    choice = _choice(problem, plan)
    neighbours = _Neighbours(problem, choice, gap=plan.gap)
    groups = sorted(_groups(problem, choice), key=lambda units: (-len(units), units[0]))
    return Explanation(
        limits=tuple(limits_of(problem, choice)),
        groups=tuple(neighbours.reason(units) for units in groups[:MAX_GROUPS]),
        device_budget=plan.budgets.device,
        num_unexplained=max(0, len(groups) - MAX_GROUPS),
    )


# The plan's choice and its groups


def _choice(problem: Problem, plan: Plan) -> Choice:
    names = [unit.name for unit in problem.profile.units]
    if [unit.name for unit in plan.units] != names:
        raise ProtrainError("the plan has other units than the profile", fix="plan again")
    choice: list[tuple[int, int]] = []
    for unit, options in zip(plan.units, problem.options, strict=True):
        activations = [option.decision for option in options.activations]
        states = [option.decision for option in options.states]
        if unit.activations not in activations or unit.states not in states:
            decisions = f"{activations_text(unit.activations)}, {states_text(unit.states)}"
            raise ProtrainError(
                f"the profile does not offer {unit.name} its decisions: {decisions}",
                fix="plan again",
            )
        choice.append((activations.index(unit.activations), states.index(unit.states)))
    return tuple(choice)


def _groups(problem: Problem, choice: Choice) -> Iterator[list[int]]:
    """Blocks of one class with the same decisions; a part stands alone."""
    for members in problem.classes:
        groups: dict[object, list[int]] = {}
        for unit in members:
            is_block = problem.profile.units[unit].kind == "block"
            groups.setdefault(choice[unit] if is_block else unit, []).append(unit)
        yield from groups.values()


# Alternatives


class _Work(NamedTuple):
    """What a decision has a unit do; memory apart, the plain decision does least of each."""

    compute_s: float
    transfer_s: float
    update_s: float

    def is_less_than(self, other: "_Work") -> bool:
        return self != other and all(one <= two for one, two in zip(self, other, strict=True))


def _activation_work(option: ActivationOption, hardware: Hardware) -> _Work:
    moved = 0.0
    if option.swap_in and option.swap_out:
        link = hardware.tier(option.swap_in.tier).link
        moved = option.swap_in.bytes / link.read_bytes_per_s
        moved += option.swap_out.bytes / link.write_bytes_per_s
    return _Work(option.forward_s + option.backward_s, moved, 0.0)


def _state_work(option: StateOption, hardware: Hardware) -> _Work:
    """Without the device's own update, which moving the states elsewhere is no means to save."""
    moved = 0.0
    for fetch in option.fetches:
        moved += fetch.bytes / hardware.tier(fetch.tier).link.read_bytes_per_s
    if option.gradients:
        link = hardware.tier(option.gradients.tier).link
        moved += option.gradients.bytes / link.write_bytes_per_s
    if option.write_bytes:
        disk = hardware.tier("disk").link
        moved += option.read_bytes / disk.read_bytes_per_s
        moved += option.write_bytes / disk.write_bytes_per_s
    return _Work(0.0, moved, option.update_s)


class _Judgement(NamedTuple):
    """An alternative, how to say it, and what it has the unit do."""

    alternative: Alternative
    doing: str
    work: _Work


class _Neighbours:
    """The choices that differ from a plan's in one decision of one unit."""

    def __init__(self, problem: Problem, choice: Choice, *, gap: float) -> None:
        self.problem, self.choice = problem, choice
        self.hardware = problem.profile.hardware
        self.judge = Judge(problem)
        base = self.judge.judge_well(choice)
        if base is None:
            raise ProtrainError("the plan exceeds its budgets with this profile", fix="plan again")
        self.base: Judged = base
        self.tie_s = TIE * base.seconds
        self.gap_s = max(gap, TIE) * base.seconds

    def reason(self, units: Sequence[int]) -> GroupReason:
        """Judge the group's middle unit with every other decision."""
        options = self.problem.options[units[0]]
        activation, state = self.choice[units[0]]
        many = len(units) > 1
        activations = [
            _Judgement(
                self._alternative(units, "activations", number, activations_text(option.decision)),
                activations_doing(option.decision, many=many),
                _activation_work(option, self.hardware),
            )
            for number, option in enumerate(options.activations)
            if number != activation
        ]
        states = [
            _Judgement(
                self._alternative(units, "states", number, states_text(option.decision)),
                states_doing(option.decision),
                _state_work(option, self.hardware),
            )
            for number, option in enumerate(options.states)
            if number != state
        ]
        chosen, placed = options.activations[activation], options.states[state]
        names = [self.problem.profile.units[index].name for index in units]
        return GroupReason(
            units=units_text(names),
            num_units=len(units),
            activations=activations_text(chosen.decision),
            states=states_text(placed.decision),
            reason=self._sentences(names, chosen, placed, activations, states),
            alternatives=tuple(judged.alternative for judged in (*activations, *states)),
        )

    def _alternative(
        self, units: Sequence[int], kind: Kind, number: int, decision: str
    ) -> Alternative:
        changed = self._changed(units[len(units) // 2 :][:1], kind, number)
        if short := _shortfall(self.problem, changed):
            return Alternative(
                kind=kind,
                decision=decision,
                shortfall_bytes=short.bytes,
                tier=short.tier,
                slot=short.slot,
            )
        if self.judge.num_simulations * self.problem.count < SIMULATED_UNITS:
            judged = self.judge.judge_well(changed, rule=self.base.rule)
        else:
            judged = self.judge.judge(changed, rules=(self.base.rule,))
        assert judged, "a choice that meets the budgets has a schedule"
        return Alternative(
            kind=kind,
            decision=decision,
            extra_seconds=judged.seconds - self.base.seconds,
            in_all=_shortfall(self.problem, self._changed(units, kind, number)),
        )

    def _changed(self, units: Sequence[int], kind: Kind, number: int) -> Choice:
        """The plan's choice with another decision of one kind for `units`."""
        return tuple(
            pair
            if unit not in units
            else (number, pair[1])
            if kind == "activations"
            else (pair[0], number)
            for unit, pair in enumerate(self.choice)
        )

    # The sentences of a group

    def _sentences(
        self,
        names: Sequence[str],
        activation: ActivationOption,
        state: StateOption,
        activations: Sequence[_Judgement],
        states: Sequence[_Judgement],
    ) -> str:
        many = len(names) > 1
        does = activations_does(activation.decision, many=many)
        places = states_does(state.decision, many=many)
        subject, again = units_text(names), "They" if many else "It"
        if activation.decision == Keep() and state.decision == Persistent():
            on_device = "activations and states on the device"
            does = f"keep their {on_device}" if many else f"keeps its {on_device}"
            return f"{subject} {does}: {self._plain([*activations, *states], many=many)}."
        work = _activation_work(activation, self.hardware)
        why = self._why(work, activations, many=many)
        sentences = f"{subject} {does}: {why}."
        if not states:
            return sentences  # nothing to place, or nowhere else to
        why = self._why(_state_work(state, self.hardware), states, many=many)
        return f"{sentences} {again} {places}: {why}."

    def _plain(self, judgements: Sequence[_Judgement], *, many: bool) -> str:
        """Why units do what is least work."""
        if not judgements:
            return f"nothing else is open to {'them' if many else 'it'}"
        extra = min(_extra_seconds(judged.alternative) for judged in judgements)
        words = "there is room, and any other choice only adds work"
        if self.tie_s < extra < float("inf"):
            words += f", at least {format_seconds(extra)}{' per block' if many else ''}"
        return words

    def _why(self, work: _Work, judgements: Sequence[_Judgement], *, many: bool) -> str:
        """What excludes the decisions that are less work, and what the others cost."""
        less = sorted(
            (judged for judged in judgements if judged.work.is_less_than(work)),
            key=lambda judged: judged.work,
        )
        others = [judged for judged in judgements if judged not in less]
        if not judgements or (not less and all(work.is_less_than(one.work) for one in others)):
            return self._plain(others, many=many)
        # Of what is less work, the plainest and the nearest; of the rest, the fastest.
        told = [*less[:1], *less[1:][-1:]]
        told += sorted(others, key=lambda judged: _extra_seconds(judged.alternative))[:1]
        excluded = [one for one in told if one.alternative.shortfall_bytes is not None]
        fitting = [one for one in told if one not in excluded]
        ties = [
            one for one in fitting if -self.gap_s <= _extra_seconds(one.alternative) <= self.tie_s
        ]
        one_more = " in one more block" if many else ""
        clauses: list[str] = []
        before = None
        for judged in excluded:
            short = _shortfall_of(judged.alternative)
            if before and before[1:] == short[1:]:
                clauses.append(f"so would {judged.doing}, by {format_bytes(short.bytes)}")
            else:
                clauses.append(f"{judged.doing}{one_more} would {_exceed(short)}")
            before = short
        each = " per block" if many else ""
        for judged in fitting:
            extra = _extra_seconds(judged.alternative)
            if judged in ties:
                continue
            if extra < 0:  # such a plan is not the planner's
                clauses.append(f"{judged.doing} would be {format_seconds(-extra)} faster{each}")
            else:
                fits = " fits, but" if judged in less else ""
                clauses.append(f"{judged.doing}{fits} costs {format_seconds(extra)} more{each}")
        if ties:
            doing = listed_words([judged.doing for judged in ties], "or")
            clauses.append(f"{doing}{one_more} would be no slower")
        for judged in ties:
            if judged in less and judged.alternative.in_all:
                clauses.append(
                    f"in all of them, {judged.doing} would " + _exceed(judged.alternative.in_all)
                )
                break
        return "; ".join(clauses)


def _shortfall(problem: Problem, choice: Choice) -> Shortfall | None:
    """The budget that a choice exceeds; None where it meets all of them."""
    static = problem.static_bytes(choice)
    if (peak := max(static)) > problem.device:
        slot = slot_name(problem, static.index(peak))
        return Shortfall(peak - problem.device, "device", slot)
    for tier, limit in problem.tiers.items():
        if (used := problem.tier_use(tier, choice)) > limit:
            return Shortfall(used - limit, tier)
    return None


def _shortfall_of(found: Alternative) -> Shortfall:
    assert found.shortfall_bytes is not None and found.tier is not None
    return Shortfall(found.shortfall_bytes, found.tier, found.slot)


def _extra_seconds(found: Alternative) -> float:
    """Infinite for what does not fit."""
    return float("inf") if found.extra_seconds is None else found.extra_seconds


def _exceed(short: Shortfall) -> str:
    where = f" in the {short.slot}" if short.slot else ""
    return f"exceed the {short.tier} budget by {format_bytes(short.bytes)}{where}"


def in_words(explanation: Explanation) -> list[str]:
    """Two or three sentences on the limits, then the reason of each group."""
    lanes = [limit for limit in explanation.limits if isinstance(limit, LaneLimit)]
    memory = [limit for limit in explanation.limits if isinstance(limit, MemoryLimit)]
    words: list[str] = []
    if shares := [limit for limit in lanes if limit.share >= 0.005]:
        parts = [f"{lane_words(limit.resource)} {100 * limit.share:.0f} %" for limit in shares]
        words.append(f"What makes up the step, about: {', '.join(parts)}.")
    amount = amount_of(explanation.device_budget)
    if memory:
        slots = [limit for limit in memory if limit.where]
        saved = sum(limit.seconds_per_gib for limit in slots) * amount / GIB
        more = f"{format_bytes(amount)} more on the device"
        sentence = f"With these decisions {more} would save "
        if slots:
            most = max(slots, key=lambda limit: limit.seconds_per_gib)
            share = most.seconds_per_gib / sum(limit.seconds_per_gib for limit in slots)
            part = f"{100 * share:.0f} % of it " if len(slots) > 1 else ""
            sentence += f"{at_most(saved)}, {part}in the {most.where}."
        else:
            sentence += "nothing."
        words.append(sentence)
        worth = [
            f"{at_most(limit.seconds_per_gib * amount / GIB)} on the {limit.resource}"
            for limit in memory
            if not limit.where
        ]
        words.append(
            f"With a new plan {format_bytes(amount)} more would save {listed_words(worth, 'and')}."
        )
    words += [group.reason for group in explanation.groups]
    if explanation.num_unexplained:
        smaller = "group is" if explanation.num_unexplained == 1 else "groups are"
        words.append(f"{explanation.num_unexplained} smaller {smaller} not explained.")
    return words
