"""What another decision would do: one unit takes it, everything else stays as planned.

The simulator says what that costs, or the memory count by how much it exceeds a budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.judging import Judge, Judged
from protrain_plan.planning.limiting import Tier, slot_name
from protrain_plan.planning.network import Network
from protrain_plan.planning.options import ActivationOption, StateOption
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.wording import activations_doing, states_doing
from protrain_plan.records import activations_text, states_text
from protrain_plan.records.hardware import Hardware

SIMULATED_UNITS = 12_000
"""Simulated schedules times units after which an alternative gets the plan's rule alone: two
seconds or so."""

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


class Work(NamedTuple):
    """What a decision has a unit do; memory apart, the plain decision does least of each."""

    compute_s: float
    transfer_s: float
    update_s: float

    def is_less_than(self, other: "Work") -> bool:
        return self != other and all(one <= two for one, two in zip(self, other, strict=True))


def activation_work(option: ActivationOption, hardware: Hardware) -> Work:
    """Of a choice for a unit's activations."""
    moved = 0.0
    if option.swap_in and option.swap_out:
        link = hardware.tier(option.swap_in.tier).link
        moved = option.swap_in.bytes / link.read_bytes_per_s
        moved += option.swap_out.bytes / link.write_bytes_per_s
    return Work(option.forward_s + option.backward_s, moved, 0.0)


def state_work(option: StateOption, hardware: Hardware, network: Network) -> Work:
    """Without the device's own update, which moving the states elsewhere is no means to save."""
    moved = network.gathering_s(option) + network.reducing_s(option)
    for fetch in option.fetches:
        moved += fetch.bytes / hardware.tier(fetch.tier).link.read_bytes_per_s
    if option.gradients:
        link = hardware.tier(option.gradients.tier).link
        moved += option.gradients.bytes / link.write_bytes_per_s
    if option.write_bytes:
        disk = hardware.tier("disk").link
        moved += option.read_bytes / disk.read_bytes_per_s
        moved += option.write_bytes / disk.write_bytes_per_s
    return Work(0.0, moved, option.update_s)


class Judgement(NamedTuple):
    """An alternative, how to say it, and what it has the unit do."""

    alternative: Alternative
    doing: str
    work: Work


class Neighbours:
    """The choices that differ from a plan's in one decision of one unit, or of one group's units.

    ProtrainError where the plan's own choice exceeds its budgets.
    """

    def __init__(self, problem: Problem, choice: Choice) -> None:
        self.problem, self.choice = problem, choice
        self._hardware, self._network = problem.profile.hardware, Network.of(problem)
        self._judge = Judge(problem)
        base = self._judge.judge_well(choice)
        if base is None:
            raise ProtrainError("the plan exceeds its budgets with this profile", fix="plan again")
        self.base: Judged = base

    def activations(self, units: Sequence[int]) -> list[Judgement]:
        """The group's middle unit with every other decision about its activations."""
        return [
            Judgement(
                self._alternative(units, "activations", number, activations_text(option.decision)),
                activations_doing(option.decision, many=len(units) > 1),
                activation_work(option, self._hardware),
            )
            for number, option in enumerate(self.problem.options[units[0]].activations)
            if number != self.choice[units[0]][0]
        ]

    def states(self, units: Sequence[int]) -> list[Judgement]:
        """The same with every other place of its states."""
        return [
            Judgement(
                self._alternative(units, "states", number, states_text(option.decision)),
                states_doing(option.decision),
                state_work(option, self._hardware, self._network),
            )
            for number, option in enumerate(self.problem.options[units[0]].states)
            if number != self.choice[units[0]][1]
        ]

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
        if self._judge.num_simulations * self.problem.count < SIMULATED_UNITS:
            judged = self._judge.judge_well(changed, rule=self.base.rule)
        else:
            judged = self._judge.judge(changed, rules=(self.base.rule,))
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
