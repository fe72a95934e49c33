"""Reasons for each group's decision, and limits of the step. Solved, not guessed.

reasons   one unit of a group takes another decision, all others as planned: the simulator gives its
          cost, or the memory count its excess over a budget
limits    the fluid model's dual values, in seconds per byte and shares of the step: the worth of a
          little more of a resource

[Note: shares] The model's optimum is proportional to its durations: if compute, all links and all
updates were 1 % slower, the step would be 1 % longer. A lane's share is its part of that 1 %: the
sum of -dual · term over the terms that hold its speed. Shares sum to one. With several optimal
duals (equal blocks, exact fits) the solver picks one: hence "about".

[Note: worth of memory] The dual of a row `bytes in slot t <= budget` is the change of the optimum
per byte. The optimum is convex in the budget: each further byte is worth the same or less.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import Literal, NamedTuple, get_args

import pulp

from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.options import Option
from protrain_plan.planning.model.problem import Choice, Problem, checked
from protrain_plan.planning.outcome import SearchStage
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.effects import ActivationOption
from protrain_runtime.contract.program.memory import evaluation_bytes
from protrain_runtime.contract.program.program import LAUNCHES, slot_words, unit_words
from protrain_runtime.contract.records.decisions import WORDINGS
from protrain_runtime.contract.records.folding import fold, runs
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    Plan,
    StateTier,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.words import listed
from protrain_runtime.contract.units import format_bytes, format_seconds

MAX_GROUPS = 12
"""Most groups to explain, largest first."""

MAX_RUNS = 4
"""Most runs of units in a text."""

SIMULATED_UNITS = 12_000
"""Simulated schedules times units after which an alternative gets the plan's rule alone: two
seconds or so."""

TIE = 2e-4
"""The fraction of the step that does not count: the planner gives away ten times as much to make
schedules simple."""

NOTEWORTHY = 0.1
"""Least share of a lane named in the one-line summary."""

GIB = 2**30

NEGLIGIBLE = 1e-7
"""The solver's tolerance: smaller duals are zero."""

Kind = Literal["activations", "states"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimit:
    """A lane's share of the step's time. See [Note: shares]."""

    resource: str  # "compute", "launch", "update", or a lane: "fetch host"
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Seconds saved by a little more of a tier. See [Note: worth of memory].

    `where` are slots, under the plan's decisions; "" means a new plan.
    """

    resource: StateTier
    seconds_per_gib: float
    where: str  # "backward of layers.12-31"


Limit = LaneLimit | MemoryLimit


class Shortfall(NamedTuple):
    """A budget's excess; on the device, with its worst slot."""

    bytes: int
    tier: StateTier
    slot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another decision for one unit of a group, all others as planned.

    Either it fits, and the step takes `extra_seconds` more (less, if negative: the plan is not
    perfect), each with its best schedule. Or it exceeds the budget of `tier` by `shortfall_bytes`,
    on the device worst in `slot`. `in_all`: in one unit it fits, in all units of the group it does
    not.
    """

    kind: Kind
    decision: str  # "swap to host"
    extra_seconds: float | None = None
    shortfall_bytes: int | None = None
    tier: StateTier | None = None
    slot: str = ""
    in_all: Shortfall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReason:
    """Units of equal cost and decisions, with reasons; `alternatives` as in the profile."""

    units: str  # "layers.0-11"
    num_units: int
    activations: str
    states: str
    reason: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The limits of a plan, by the relaxed model, and the reasons for its decisions.

    Lanes come first, then the device's slots, each with the tightest limit first, then the worth of
    more of each tier to a new plan. `evaluation_bytes` is the device's peak, without context, in an
    evaluation between a forward and its backward. `num_unexplained` counts omitted groups.
    """

    limits: tuple[Limit, ...]
    groups: tuple[GroupReason, ...]
    device_budget: int
    evaluation_bytes: int
    num_unexplained: int = 0
    search: tuple[SearchStage, ...] = ()


def explain(profile: Profile, plan: Plan, search: Sequence[SearchStage] = ()) -> Explanation:
    """Explain `plan`, made for `profile`; `search` are the stages that found it.

    ProtrainError if the profile lacks the plan's units or decisions, or exceeds its budgets.
    """
    try:
        problem = checked(plan, profile)
    except ProtrainError as error:
        raise ProtrainError(error.message, fix="plan again") from None
    choice = problem.choice_of(plan.units)
    explainer = _Explainer(problem, choice, gap=plan.gap)
    # Blocks of one class with the same decisions; a part is its own group.
    alike: dict[object, list[int]] = {}
    for number, members in enumerate(problem.classes):
        for unit in members:
            is_block = profile.units[unit].kind == "block"
            alike.setdefault((number, choice[unit]) if is_block else unit, []).append(unit)
    groups = sorted(alike.values(), key=lambda units: (-len(units), units[0]))
    return Explanation(
        limits=tuple(limits_of(problem, choice)),
        groups=tuple(explainer.reason(units) for units in groups[:MAX_GROUPS]),
        device_budget=plan.budgets.device,
        evaluation_bytes=evaluation_bytes(problem.program(plan.units)),
        num_unexplained=max(0, len(groups) - MAX_GROUPS),
        search=tuple(search),
    )


def in_words(explanation: Explanation) -> list[str]:
    """Two or three sentences on the limits, each group's reason, then the stages' results."""
    lanes = [limit for limit in explanation.limits if isinstance(limit, LaneLimit)]
    memory = [limit for limit in explanation.limits if isinstance(limit, MemoryLimit)]
    words: list[str] = []
    if shares := [limit for limit in lanes if limit.share >= 0.005]:
        parts = [f"{lane_words(limit.resource)} {100 * limit.share:.0f} %" for limit in shares]
        words.append(f"What makes up the step, about: {', '.join(parts)}.")
    # A round number of bytes, at most a tenth of the budget.
    amounts = (2**30, 100 * 2**20, 10 * 2**20)
    amount = next((one for one in amounts if 10 * one <= explanation.device_budget), 2**20)
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
            f"With a new plan {format_bytes(amount)} more would save {listed(worth, 'and')}."
        )
    words += [group.reason for group in explanation.groups]
    if explanation.num_unexplained:
        smaller = "group is" if explanation.num_unexplained == 1 else "groups are"
        words.append(f"{explanation.num_unexplained} smaller {smaller} not explained.")
    words.append(
        "Evaluated between a forward and its backward, the model takes up to"
        f" {format_bytes(explanation.evaluation_bytes)} of tensors on the device."
    )
    step, bound = inf, 0.0
    for one in explanation.search:
        found: list[str] = []
        if one.step_seconds < step * (1 - TIE):
            less = f", {1 - one.step_seconds / step:.1%} less" if step < inf else ""
            found.append(f"a step of {format_seconds(one.step_seconds)}{less}")
        if one.bound_seconds > bound * (1 + TIE):
            found.append(f"no plan takes less than {format_seconds(one.bound_seconds)}")
        step, bound = one.step_seconds, one.bound_seconds
        words.append(f"Search, {one.stage}: {'; '.join(found) or 'nothing faster'}.")
    if explanation.search:
        words.append(f"The plan's step is {step / bound - 1:.1%} above that bound.")
    return words


def limits_of(problem: Problem, choice: Choice) -> Iterator[Limit]:
    """Limits of the plan's decisions, then of every plan; none if HiGHS fails."""
    model = Fluid(problem)
    if not _solved(model.pulp):
        return
    device = sum(row.pi for phase in model.phases for row in phase.memory_rows)
    worth: dict[StateTier, float] = {"device": _seconds_per_gib(model, device)}
    for tier in problem.tiers:
        row = model.pulp.get_constraint_by_name(f"budget_{tier}")
        worth[tier] = _seconds_per_gib(model, row.pi)
    lanes = _lane_limits(model, choice)
    if lanes is None:
        return
    yield from lanes
    yield from sorted(_worth_of_slots(model), key=lambda limit: -limit.seconds_per_gib)
    for resource, seconds_per_gib in worth.items():
        yield MemoryLimit(resource=resource, seconds_per_gib=seconds_per_gib, where="")


def _lane_limits(model: Fluid, choice: Choice) -> list[LaneLimit] | None:
    """Lanes' shares of a step with these decisions, fixed from now on; None if HiGHS fails."""
    model.fix(choice)
    if not _solved(model.pulp):
        return None
    shares = sorted(_shares(model).items(), key=lambda item: -item[1])
    return [LaneLimit(resource=lane, share=share) for lane, share in shares if share > NEGLIGIBLE]


def lanes_in_a_line(problem: Problem, choice: Choice) -> str:
    """The lanes of the plan's step: "transfers to disk 87%, compute 13%"."""
    lanes = _lane_limits(Fluid(problem), choice) or []
    named = [limit for limit in lanes if limit.share >= NOTEWORTHY] or lanes[:1]
    return ", ".join(f"{lane_words(limit.resource)} {limit.share:.0%}" for limit in named)


def _solved(model: pulp.LpProblem) -> bool:
    """Solve the relaxation and keep the duals in the rows, unlike `solver.solve`."""
    pulp.HiGHS(mip=False, msg=False, threads=1, random_seed=0).actualSolve(model)
    return bool(model.sol_status == pulp.LpSolutionOptimal)


def _seconds_per_gib(model: Fluid, dual: float) -> float:
    """Seconds saved per GiB, from a row's dual; more memory never costs time."""
    saved = -dual if dual < -NEGLIGIBLE else 0.0
    return saved * model.second_unit / model.byte_unit * GIB


def _worth_of_slots(model: Fluid) -> Iterator[MemoryLimit]:
    """Seconds per GiB in runs of full slots."""
    problem, count = model.problem, model.problem.count
    rows = zip(*(phase.memory_rows for phase in model.phases), strict=True)
    worth = [_seconds_per_gib(model, sum(row.pi for row in of_phases)) for of_phases in rows]
    in_backward = [worth[2 * count - 1 - unit] for unit in range(count)]
    names = [unit_words(problem.profile.units, unit) for unit in range(count)]
    for direction, seconds in (("forward", worth[:count]), ("backward", in_backward)):
        for positive, units in groupby(range(count), key=lambda unit: seconds[unit] > 0):
            if not positive:
                continue
            run = list(units)
            inside = [names[unit] for unit in run]
            is_run = len(list(runs(inside))) == 1
            words = fold(inside[0], inside[-1]) if is_run else f"{inside[0]} to {inside[-1]}"
            yield MemoryLimit(
                resource="device",
                seconds_per_gib=sum(seconds[unit] for unit in run),
                where=f"{direction} of {words}",
            )
    if worth[-1]:
        where = slot_words(problem.profile.units, 2 * count)
        yield MemoryLimit(resource="device", seconds_per_gib=worth[-1], where=where)


def _shares(model: Fluid) -> dict[str, float]:
    """See [Note: shares]; for a model solved with fixed decisions."""
    lanes: dict[str, str] = {}  # by the variable of a lane's work
    for phase in model.phases:
        for flow in phase.flows.values():
            lanes.update(
                (variable.name, str(flow.channel)) for variable in (*flow.stall, *flow.compute)
            )
    gradients = {
        y.name: f"spill {state.gradients.tier}" if state.gradients else "collect"
        for _, state, y in model.each_state()
        if state.gradients or state.scattered
    }
    decisions = {one.name for _, one, _ in model.each()}
    shares: dict[str, float] = defaultdict(float)
    for row in model.pulp.constraints():
        if abs(row.pi) < NEGLIGIBLE:
            continue
        kind = row.name.removeprefix("micro_")
        for variable, factor in row.items():
            lane: str | None = None
            if kind.startswith(("lane_", "beside_")):
                lane = lanes.get(variable.name)
            elif kind.startswith("compute_"):  # updates on the device take turns with it
                lane = "compute" if variable.name in decisions else lanes.get(variable.name)
            elif kind == "launches" and variable.name in decisions:
                lane = LAUNCHES
            elif "updates_" in kind and variable.name in decisions:
                lane = "update on device" if kind.startswith("device_") else "update"
            elif kind.startswith("tail_"):
                lane = gradients.get(variable.name)
            if lane:
                shares[lane] -= row.pi * factor * variable.varValue
    seconds = pulp.value(model.pulp.objective)
    return {name: share / seconds for name, share in shares.items()}


class _Burden(NamedTuple):
    """Seconds of a unit's work by a decision; memory apart, the plain decision does least."""

    compute_s: float
    transfer_s: float
    update_s: float

    def is_less_than(self, other: "_Burden") -> bool:
        return self != other and all(one <= two for one, two in zip(self, other, strict=True))


class _Compared(NamedTuple):
    """An alternative, its wording, the unit's work under it, and the budget that it exceeds."""

    alternative: Alternative
    doing: str
    burden: _Burden
    short: Shortfall | None

    @property
    def extra_s(self) -> float:
        """Infinite if it does not fit."""
        extra = self.alternative.extra_seconds
        return float("inf") if extra is None else extra


class _Explainer:
    """Compares a plan's choice with those that differ in one decision.

    ProtrainError if the plan's choice exceeds its budgets. Slower by less than a tie counts as
    equal; faster by less than the plan's gap is within the planner's tolerance.
    """

    def __init__(self, problem: Problem, choice: Choice, *, gap: float) -> None:
        self.problem, self.choice = problem, choice
        self._evaluator = Evaluator(problem)
        base = self._evaluator.best_schedule(choice)
        if base is None:
            raise ProtrainError("the plan exceeds its budgets with this profile", fix="plan again")
        self.base: Evaluation = base
        self._tie_s, self._gap_s = TIE * base.seconds, max(gap, TIE) * base.seconds

    def reason(self, units: Sequence[int]) -> GroupReason:
        """The group's decisions and their reason: its middle unit tries every other one."""
        names = [unit_words(self.problem.profile.units, index) for index in units]
        options, (activation, state) = self.problem.options[units[0]], self.choice[units[0]]
        chosen, placed = options.activations[activation], options.states[state]
        activations, states = self._others(units, 0), self._others(units, 1)
        alternatives = tuple(one.alternative for one in (*activations, *states))
        many, subject = len(units) > 1, units_text(names)
        plural = many or subject != self.problem.profile.units[units[0]].name  # with the loss
        now, again = WORDINGS[chosen.decision], WORDINGS[placed.decision]
        if placed.decision == PERSISTENT:
            # The same with an update of its own, needed only for lack of room.
            stepped = WORDINGS[OPTIMIZER_IN_BACKWARD].phrase
            states = [one for one in states if one.alternative.decision != stepped]
        if chosen.decision == KEEP and placed.decision == PERSISTENT:
            does = "keep their" if plural else "keeps its"
            why = options.unit.runs_once if options.unit.kind == "part" else ""
            why = why or self._plain([*activations, *states], many=many)
            reason = f"{subject} {does} activations and states on the device: {why}."
        else:
            why = self._why(self._burden(chosen), activations, many=many)
            reason = f"{subject} {now.does(many=plural)}: {why}."
            if states:  # else there is nothing to place, or nowhere else
                why = self._why(self._burden(placed), states, many=many)
                reason += f" {'They' if plural else 'It'} {again.does(many=plural)}: {why}."
        return GroupReason(
            units=subject,
            num_units=len(units),
            activations=now.phrase,
            states=again.phrase,
            reason=reason,
            alternatives=alternatives,
        )

    def _others(self, units: Sequence[int], kind: int) -> list[_Compared]:
        """The group's middle unit with every other decision of one kind."""
        found: list[_Compared] = []
        for number, option in enumerate(self.problem.options[units[0]].kinds[kind]):
            if number == self.choice[units[0]][kind]:
                continue
            wording = WORDINGS[option.decision]
            alternative = Alternative(kind=KINDS[kind], decision=wording.phrase)
            changed = self._changed([units[len(units) // 2]], kind, number)
            short = _shortfall(self.problem, changed)
            if short is not None:
                alternative = replace(
                    alternative, shortfall_bytes=short.bytes, tier=short.tier, slot=short.slot
                )
            else:
                if self._evaluator.num_simulations * self.problem.count < SIMULATED_UNITS:
                    evaluation = self._evaluator.best_schedule(changed, pace=self.base.pace)
                else:
                    evaluation = self._evaluator.evaluate(changed, paces=(self.base.pace,))
                assert evaluation, "a choice that meets the budgets has a schedule"
                alternative = replace(
                    alternative,
                    extra_seconds=evaluation.seconds - self.base.seconds,
                    in_all=_shortfall(self.problem, self._changed(units, kind, number)),
                )
            doing = wording.doing(many=len(units) > 1)
            found.append(_Compared(alternative, doing, self._burden(option), short))
        return found

    def _burden(self, option: Option) -> _Burden:
        """Without the device's own update: moving states elsewhere is not a means to save it."""
        moved_s = sum(self.problem.lane_seconds.moved(option).values())
        if isinstance(option, ActivationOption):
            return _Burden(option.cost.compute_s, moved_s, 0.0)
        update_s = option.update_s
        if option.decision.update_on_device:  # beside compute, in turns
            return _Burden(update_s, moved_s, 0.0)
        return _Burden(0.0, moved_s, update_s)

    def _changed(self, units: Sequence[int], kind: int, number: int) -> Choice:
        """The plan's choice with another decision of one kind for `units`."""
        choice = list(self.choice)
        for unit in units:
            activation, state = choice[unit]
            choice[unit] = (activation, number) if kind else (number, state)
        return tuple(choice)

    def _plain(self, compared: Sequence[_Compared], *, many: bool) -> str:
        """The reason for units with the least work."""
        if not compared:
            return f"nothing else is open to {'them' if many else 'it'}"
        extra = min(one.extra_s for one in compared)
        words = "there is room, and any other choice only adds work"
        if self._tie_s < extra < float("inf"):
            words += f", at least {format_seconds(extra)}{' per block' if many else ''}"
        return words

    def _why(self, burden: _Burden, compared: Sequence[_Compared], *, many: bool) -> str:
        """The budgets that exclude decisions of less work, and the costs of the others."""
        less = sorted(
            (one for one in compared if one.burden.is_less_than(burden)), key=lambda one: one.burden
        )
        others = [one for one in compared if one not in less]
        if not compared or (not less and all(burden.is_less_than(one.burden) for one in others)):
            return self._plain(others, many=many)
        # Of those with less work, the plainest and the nearest; of the rest, the fastest.
        chosen = [*less[:1], *less[1:][-1:]]
        chosen += sorted(others, key=lambda one: one.extra_s)[:1]
        fitting = [one for one in chosen if one.short is None]
        ties = [one for one in fitting if -self._gap_s <= one.extra_s <= self._tie_s]
        one_more = " in one more block" if many else ""
        clauses: list[str] = []
        before: Shortfall | None = None
        for one in chosen:
            if (short := one.short) is None:
                continue
            if before and before[1:] == short[1:]:
                clauses.append(f"so would {one.doing}, by {format_bytes(short.bytes)}")
            else:
                clauses.append(f"{one.doing}{one_more} would {_exceed(short)}")
            before = short
        each = " per block" if many else ""
        for one in fitting:
            if one in ties:
                continue
            if one.extra_s < 0:  # not a plan of the planner's
                clauses.append(f"{one.doing} would be {format_seconds(-one.extra_s)} faster{each}")
            else:
                fits = " fits, but" if one in less else ""
                clauses.append(f"{one.doing}{fits} costs {format_seconds(one.extra_s)} more{each}")
        if ties:
            doing = listed([one.doing for one in ties], "or")
            clauses.append(f"{doing}{one_more} would be no slower")
        for one in ties:
            if one in less and (short_in_all := one.alternative.in_all):
                clauses.append(f"in all of them, {one.doing} would {_exceed(short_in_all)}")
                break
        return "; ".join(clauses)


def _shortfall(problem: Problem, choice: Choice) -> Shortfall | None:
    """The budget that a choice exceeds; None if it meets all."""
    beyond = problem.beyond(choice)
    if not beyond:
        return None
    tier, size = next(iter(beyond.items()))
    static = problem.static_bytes(choice)
    tightest = slot_words(problem.profile.units, static.index(max(static)))
    return Shortfall(size, tier, tightest if tier == "device" else "")


def _exceed(short: Shortfall) -> str:
    where = f" in the {short.slot}" if short.slot else ""
    return f"exceed the {short.tier} budget by {format_bytes(short.bytes)}{where}"


def units_text(names: Sequence[str]) -> str:
    """Names in runs, such as `layers.0-3, layers.7`; only the longest if there are many."""
    longest = sorted(runs(names), key=len, reverse=True)[:MAX_RUNS]
    shown = sorted(longest, key=lambda run: run.start)
    texts = [fold(names[run[0]], names[run[-1]]) for run in shown]
    if rest := len(names) - sum(map(len, shown)):
        return f"{', '.join(texts)} and {rest} more"
    return listed(texts, "and")


def lane_words(lane: str) -> str:
    """A phrase for a lane: "transfers from host"."""
    if lane.startswith("update"):
        return "updates on the device" if lane.endswith("device") else "updates on the host"
    if lane == "collect":
        return "collectives"
    word, _, tier = lane.partition(" ")
    return f"transfers {'from' if word == 'fetch' else 'to'} {tier}" if tier else word


def at_most(seconds: float) -> str:
    """An upper bound of the saving: "at most about 13.4 ms"."""
    return f"at most about {format_seconds(seconds)}" if seconds else "nothing"
