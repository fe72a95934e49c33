"""One planning problem: a profile, what may be used of each tier, and the options per unit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.model.lane_seconds import LaneSeconds
from protrain_plan.planning.model.options import UnitOptions, unit_options
from protrain_plan.planning.model.pins import Pin, pinned_options
from protrain_plan.program.compiling import bind
from protrain_plan.program.group import ALONE, DeviceGroup, not_joined, profile_of_rank
from protrain_plan.program.implications import (
    ActivationOption,
    BoundProgram,
    Implications,
    StateOption,
    staging_bytes,
    tier_bytes,
)
from protrain_plan.program.program import Settings
from protrain_plan.records.decisions import activations_text, states_text
from protrain_plan.records.forms import FORMS
from protrain_plan.records.hardware import TierName, is_accelerator
from protrain_plan.records.plan import (
    Activations,
    Budgets,
    Keep,
    Persistent,
    Placement,
    Plan,
    Schedule,
    UnitPlan,
    Updates,
)
from protrain_plan.records.profile import SPARSE, Form, Profile
from protrain_plan.records.tree import did_you_mean, listed
from protrain_plan.simulation.memory import base_bytes

MIN_PIECE_BYTES = 8 * 2**20
"""Smaller pieces spend their time on starting."""

MAX_PIECES_ON_DISK = 32
"""More pieces per chunk gain little: what reads, updates and writes begins with one piece, and
three of them stand in host memory (docs/decisions.md)."""

MANY_PIECES = {False: 5_000, True: 25_000}
"""Pieces of a step of which no more are asked for, by whether there is an accelerator: a search
looks at thousands of steps. (Frozen parameters count, and stay in pieces that are small.)"""

Choice = tuple[tuple[int, int], ...]
"""Per unit: the number of its activation option and of its state option."""


def default_piece_bytes(profile: Profile) -> int:
    """The piece in which optimizer states move, unless the user says otherwise.

    On a CPU machine the staging buffers stand on the device: the smallest that is worth it. With a
    device beside it, the largest chunk's states make up to `MAX_PIECES_ON_DISK` pieces. A step has
    no more of them than a search can look at.
    """
    beside = is_accelerator(profile.hardware.device.kind)
    largest = max(unit.state_bytes for unit in profile.units) if beside else 0
    sizes = [max(unit.state_bytes, unit.parameter_bytes) for unit in profile.units]
    piece, many = MIN_PIECE_BYTES, MANY_PIECES[beside]
    while piece * MAX_PIECES_ON_DISK < largest or sum(-(-size // piece) for size in sizes) > many:
        piece *= 2
    return piece


def _refuse_sums_of_sparse(profile: Profile, *, micro_batches: int, devices: int) -> None:
    """ProtrainError where gradients are summed that grow with every one that is added."""
    sparse = [unit.name for unit in profile.units if unit.stays == SPARSE]
    if not sparse or (micro_batches == 1 and devices == 1):
        return
    key, what = ("num_devices", "devices") if devices > 1 else ("micro_batches", "micro-batches")
    raise ProtrainError(
        f"{sparse[0]} has sparse gradients, and their sum over {what} has no bytes that are known",
        key=key,
        fix="let the embedding have dense gradients (sparse=False)",
    )


def _with_leave(profile: Profile, allow: Sequence[Form]) -> Profile:
    """The profile without the forms that are not exact, but for those in `allow`."""
    inexact = {name for name, form in FORMS.items() if not form.exact}
    for name in allow:
        if name not in inexact:
            raise ProtrainError(
                f"expected an activation option that is not exact, got {name!r}",
                key="--allow",
                fix=did_you_mean(name, inexact)
                or (f"there is {listed(sorted(inexact), 'and')}" if inexact else "there is none"),
            )
    if inexact <= set(allow):
        return profile
    return replace(
        profile,
        units=tuple(
            replace(
                unit,
                forms=tuple(c for c in unit.forms if c.form in allow or c.form not in inexact),
            )
            for unit in profile.units
        ),
    )


class Misfit(NamedTuple):
    """Why a plan does not decide about a profile's units, the key that says so, and what would."""

    problem: str
    key: str
    fix: str | None = None


def misfit(plan: Plan, profile: Profile) -> Misfit | None:
    """Where a plan's decisions are not open to the profile's units; None where all are."""
    planned, there = [unit.name for unit in plan.units], [unit.name for unit in profile.units]
    if planned != there:
        same = [one == other for one, other in zip(planned, there, strict=False)]
        key = f"units[{[*same, False].index(False)}]"
        if missing := [name for name in there if name not in planned]:
            return Misfit(f"the plan decides nothing for {missing[0]}", key)
        strange = [name for name in planned if name not in there]
        return Misfit(f"{strange[0]} is not in the profile" if strange else _ORDER, key)
    if (reason := not_joined(plan, profile.hardware)) is not None:
        return Misfit(reason, "num_devices")
    try:
        problem = Problem.of_plan(plan, profile)
    except ProtrainError as error:
        return Misfit(error.message, error.key or "units", error.fix)
    for index, (unit, options) in enumerate(zip(plan.units, problem.options, strict=True)):
        activations = [option.decision for option in options.activations]
        if unit.activations not in activations:
            return Misfit(
                f"{unit.name} cannot do this with its activations",
                f"units[{index}].activations",
                f"decide on {listed([activations_text(one) for one in activations], 'or')}",
            )
        states = [option.decision for option in options.states]
        if unit.states not in states:
            stays = options.unit.stays
            return Misfit(
                f"{unit.name} cannot have its states there"
                + (f": they stay on the device ({stays})" if stays else ""),
                f"units[{index}].states",
                f"decide on {listed([states_text(one) for one in states], 'or')}",
            )
    return None


_ORDER = "the units' order differs"


@dataclass(frozen=True)
class Problem:
    """Bytes in `device` are for tensors: what they cannot have is taken off already.

    `profile` is `made_from` as one of the devices has it (see `profile_of_rank`).
    """

    profile: Profile
    made_from: Profile
    settings: Settings
    device: int
    tiers: dict[TierName, int]
    pins: tuple[Pin, ...] = ()

    @staticmethod
    def of(
        profile: Profile,
        budgets: Budgets,
        *,
        piece_bytes: int | None = None,
        updates: Updates = "in backward",
        micro_batches: int = 1,
        pins: Sequence[Pin] = (),
        group: DeviceGroup = ALONE,
        allow: Sequence[Form] = (),
    ) -> "Problem":
        """What the budgets leave, and no more than the machine has below the device.

        Budgets are one device's. Forms of activations that are not exact are options only if
        `allow` names them. ProtrainError where the profile's machine does not say what joins
        several devices, or sparse gradients would have to be summed.
        """
        _refuse_sums_of_sparse(profile, micro_batches=micro_batches, devices=group.num_devices)
        made_from, profile = profile, _with_leave(profile_of_rank(profile, group), allow)
        limits: dict[TierName, int] = {"host": budgets.host, "disk": budgets.disk}
        return Problem(
            profile=profile,
            made_from=made_from,
            settings=Settings(
                device=profile.hardware.device.kind,
                piece_bytes=piece_bytes or default_piece_bytes(profile),
                updates=updates,
                micro_batches=micro_batches,
                **asdict(group),
            ),
            pins=tuple(pins),
            device=budgets.device - profile.hardware.device.besides_bytes,
            tiers={
                tier.name: min(tier.capacity_bytes, limits[tier.name])
                for tier in profile.hardware.tiers
            },
        )

    @staticmethod
    def of_plan(plan: Plan, profile: Profile, budgets: Budgets | None = None) -> "Problem":
        """The problem that the plan answers, within its own budgets or other ones."""
        return Problem.of(
            profile,
            budgets or plan.budgets,
            piece_bytes=plan.piece_bytes,
            updates=plan.updates,
            micro_batches=plan.micro_batches,
            group=DeviceGroup.of(plan),
            allow=plan.inexact_forms,
        )

    @cached_property
    def implied(self) -> Implications:
        return Implications(self.profile, self.settings)

    @cached_property
    def lane_seconds(self) -> LaneSeconds:
        return LaneSeconds(self.profile.hardware, self.settings)

    @cached_property
    def _busy(self) -> list[tuple[list[tuple[float, ...]], list[tuple[float, ...]]]]:
        """Per unit and option, in the order of choices, the seconds of each lane."""
        lanes = self.lane_seconds
        found: list[tuple[list[tuple[float, ...]], list[tuple[float, ...]]]] = []
        for unit, options in enumerate(self.options):
            last = unit == self.count - 1
            pair = (
                [lanes.of_activations(option, last=last) for option in options.activations],
                [lanes.of_states(option) for option in options.states],
            )
            activations, states = (
                [tuple(seconds.get(lane, 0.0) for lane in lanes.lanes) for seconds in of_kind]
                for of_kind in pair
            )
            found.append((activations, states))
        return found

    def least_seconds(self, choice: Choice) -> float:
        """A bound on the seconds of every schedule of a choice: no lane is faster than its work."""
        rows = (
            row
            for (activations, states), (activation, state) in zip(self._busy, choice, strict=True)
            for row in (activations[activation], states[state])
        )
        return max(map(sum, zip(*rows, strict=True)))

    @cached_property
    def options(self) -> tuple[UnitOptions, ...]:
        return pinned_options(unit_options(self.implied), self.pins)

    def program(self, plans: Sequence[UnitPlan], *, updating: bool = True) -> BoundProgram:
        """The programme of `plans`; without `updating`, of a micro-batch before the last."""
        return bind(plans, self.implied, updating=updating)

    @cached_property
    def _described(self) -> tuple[UnitPlan, ...]:
        """What the units are, as a plan says it, with nothing decided."""
        units = self.profile.units
        return tuple(
            UnitPlan(
                name=unit.name,
                kind=unit.kind,
                parameters=unit.parameters,
                also_used_by=tuple(units[user].name for user in unit.used_by if user != index),
                own_inputs=unit.own_inputs,
                activations=Keep(),
                states=Persistent(),
            )
            for index, unit in enumerate(units)
        )

    def unit_plan(
        self, unit: int, activations: Activations, states: Placement, schedule: Schedule
    ) -> UnitPlan:
        """The plan of one unit with these decisions."""
        described = self._described[unit]
        return replace(described, activations=activations, states=states, schedule=schedule)

    @property
    def count(self) -> int:
        """Units; there are 2 * count slots, and one more for the device's update."""
        return len(self.profile.units)

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Units that cost the same, chunks shared between units apart, in execution order."""
        groups: dict[object, list[int]] = {}
        for index, unit in enumerate(self.profile.units):
            plain = len(unit.used_by) <= 1
            key = (
                (
                    unit.parameter_bytes,
                    unit.gradient_bytes,
                    unit.state_bytes,
                    unit.num_parameters,
                    unit.reached,
                    bool(unit.used_by),
                    unit.forms,
                    unit.parameter_pieces,
                    len(self.options[index].activations),
                    len(self.options[index].states),
                    self.options[index].activations[0].decision,
                    self.options[index].states[0].decision,
                )
                if plain
                else index
            )
            groups.setdefault(key, []).append(index)
        return tuple(tuple(group) for group in groups.values())

    def chosen(self, choice: Choice) -> tuple[list[ActivationOption], list[StateOption]]:
        """The options that a choice names."""
        return (
            [
                options.activations[activation]
                for options, (activation, _) in zip(self.options, choice, strict=True)
            ],
            [
                options.states[state]
                for options, (_, state) in zip(self.options, choice, strict=True)
            ],
        )

    def choice_of(self, plans: Sequence[UnitPlan]) -> Choice:
        """A plan's decisions, which are among the options, as a choice."""
        return tuple(
            (
                [option.decision for option in options.activations].index(plan.activations),
                [option.decision for option in options.states].index(plan.states),
            )
            for options, plan in zip(self.options, plans, strict=True)
        )

    def tier_use(self, tier: TierName, choice: Choice) -> int:
        """What a choice takes of a tier below the device."""
        return tier_bytes(tier, *self.chosen(choice), self.implied)

    def within_tiers(self, choice: Choice) -> bool:
        """Whether a choice meets the budgets of the tiers below the device."""
        return all(self.tier_use(tier, choice) <= limit for tier, limit in self.tiers.items())

    def static_bytes(self, choice: Choice) -> list[int]:
        """Device bytes per slot with every lead and drain 0: the least that a choice can hold.

        Entry 2U is the device's update of the persistent chunks.
        """
        end = 2 * self.count
        activations, states = self.chosen(choice)
        change = [0] * (end + 2)
        change[0] = base_bytes(self.profile, self.settings)
        for held in (h for options in (activations, states) for o in options for h in o.holdings):
            change[held.first] += held.bytes
            change[held.last + 1] -= held.bytes
        if not is_accelerator(self.settings.device):
            change[0] += staging_bytes(states, self.profile)
        change[end] += round(max(state.device_workspace for state in states))
        for state in states:
            # No slot is left that could wait for what the last one produced.
            if (leaving := state.leaving) and leaving.slot == end - 1:
                change[end] += leaving.kept
        total, totals = 0, []
        for step in change[: end + 1]:
            total += step
            totals.append(total)
        return totals
