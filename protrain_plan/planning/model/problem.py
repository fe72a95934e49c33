"""One planning problem: a profile, budgets per tier, and options per unit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from itertools import accumulate
from typing import Any, TypeVar, TypeVarTuple, get_args

from protrain_plan.planning.model.options import Decision, Option, Pin, UnitOptions, pinned_options
from protrain_plan.simulation.group import (
    collective_seconds_per_byte,
    not_joined,
    profile_of_rank,
    through_cache,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import bind
from protrain_runtime.contract.program.effects import (
    ActivationOption,
    BoundProgram,
    Implications,
    StateOption,
    tier_staging_bytes,
)
from protrain_runtime.contract.program.memory import base_bytes
from protrain_runtime.contract.program.program import (
    COMPUTE,
    LAUNCHES,
    NETWORK,
    UPDATES,
    Channel,
    Lane,
)
from protrain_runtime.contract.records.decisions import activations_text, states_text
from protrain_runtime.contract.records.forms import FORMS, allowed_forms
from protrain_runtime.contract.records.hardware import Hardware, Tier, TierName, is_accelerator
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    Activations,
    Budgets,
    Placement,
    Plan,
    Schedule,
    StateTier,
    StepSettings,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import SPARSE, Profile
from protrain_runtime.contract.records.words import listed

MIN_PIECE_BYTES = 8 * 2**20
"""Smaller pieces are dominated by their start-up."""

MAX_PIECES_ON_DISK = 32
"""More pieces per chunk gain little: what reads, updates and writes begins with one piece, and
three of them stand in host memory (docs/decisions.md)."""

MANY_PIECES = {False: 5_000, True: 25_000}
"""Pieces of a step of which no more are asked for, by whether there is an accelerator: a search
looks at hundreds of steps."""

SAFE = 1e-6
"""Slack of a proven minimum, for rounding and the solver's tolerance."""

AMPLE = 2**62
"""More bytes than exist anywhere."""

OVERLAPPING = StepSettings(overlap_steps=True)
"""Default settings: steps overlap if possible."""

Choice = tuple[Decision, ...]
"""The decisions of all units."""

_bind = lru_cache(maxsize=8)(bind)
"""Candidate plans are often counted and simulated several times."""


def _with_leave(profile: Profile, allow: Sequence[str]) -> Profile:
    """The profile without inexact forms, except opted-in ones."""
    if set(profile.allowed) <= set(allow):
        return profile
    allowed = allowed_forms(allow, compiled=bool(profile.workload.compile))
    return replace(
        profile,
        units=tuple(
            replace(unit, forms=tuple(cost for cost in unit.forms if cost.form in allowed))
            for unit in profile.units
        ),
        allowed=tuple(opt_in for opt_in in profile.allowed if opt_in in allow),
    )


def most_of(tier: Tier, profile: Profile) -> int:
    """The largest budget for a tier; assumed tiers have no limit."""
    return tier.capacity_bytes if profile.method == "measured" else AMPLE


def checked(plan: Plan, profile: Profile) -> "Problem":
    """The problem that a plan answers; ProtrainError if the profile's units offer no such plan.

    It names the first key of the plan that does not fit them.
    """
    planned, there = [unit.name for unit in plan.units], [unit.name for unit in profile.units]
    if planned != there:
        same = [one == other for one, other in zip(planned, there, strict=False)]
        key = f"units[{[*same, False].index(False)}]"
        if missing := [name for name in there if name not in planned]:
            raise ProtrainError(f"the plan decides nothing for {missing[0]}", key=key)
        strange = [name for name in planned if name not in there]
        words = f"{strange[0]} is not in the profile" if strange else "the units' order differs"
        raise ProtrainError(words, key=key)
    if (reason := not_joined(plan, profile.hardware)) is not None:
        raise ProtrainError(reason, key="settings.group.num_devices")
    try:
        problem = Problem.of_plan(plan, profile)
    except ProtrainError as error:
        error.key = error.key or "units"
        raise
    for index, (unit, options) in enumerate(zip(plan.units, problem.options, strict=True)):
        activations, states = options.numbers
        if unit.activations not in activations:
            raise ProtrainError(
                f"{unit.name} cannot do this with its activations",
                key=f"units[{index}].activations",
                fix=f"decide on {listed([activations_text(one) for one in activations], 'or')}",
            )
        if unit.states not in states:
            stays = options.unit.stays
            raise ProtrainError(
                f"{unit.name} cannot have its states there"
                + (f": they stay on the device ({stays})" if stays else ""),
                key=f"units[{index}].states",
                fix=f"decide on {listed([states_text(one) for one in states], 'or')}",
            )
    return problem


Work = dict[Channel | Lane | str, float]
"""Seconds by the channel of lanes, `COMPUTE`, `LAUNCHES`, or the lane of states."""


class LaneSeconds:
    """Least seconds of each lane in a step, over all its micro-batches.

    Slots' moves count by the channel that lanes share. Lanes of states work on the update, which
    starts after the first backward slot: their seconds count from the step's beginning, or if steps
    overlap from that slot to the next step's.
    """

    def __init__(self, hardware: Hardware, settings: StepSettings) -> None:
        self.times = float(settings.micro_batches)
        self.overlap = settings.overlap_steps
        self.launches = is_accelerator(hardware.device.kind)  # in a thread beside compute
        # On several devices only the last micro-batch moves gradients, except for sums of shards.
        self.spills = self.times if settings.group.num_devices == 1 else 1.0
        self.scatters = self.times if settings.adds_shards else 1.0
        # Seconds per byte of collectives, without the latency of each.
        self.gathered = self.scattered = self.summed = 0.0
        if settings.group.num_devices > 1:
            self.gathered = collective_seconds_per_byte("all-gather", hardware, settings)
            self.scattered = collective_seconds_per_byte("reduce-scatter", hardware, settings)
            self.summed = collective_seconds_per_byte("all-reduce", hardware, settings)
        self.per_byte: dict[Channel, float] = {}
        self.lanes: list[Channel | Lane | str] = [COMPUTE, LAUNCHES, UPDATES, NETWORK]
        for tier in hardware.tiers:
            name, link = tier.name, tier.link
            self.per_byte[Channel(name, True)] = 1 / link.read_bytes_per_s
            self.per_byte[Channel(name)] = 1 / link.write_bytes_per_s
            self.lanes += [Channel(name, True), Channel(name)]
            self.lanes += [Lane("read", name), Lane("write", name)]

    def moved(self, option: Option) -> Work:
        """Seconds of each lane for transfers: of activations, or parameters, gradients, states."""
        if isinstance(option, ActivationOption):
            if not option.swap_in or not option.swap_out:
                return {}
            tier = option.swap_in.tier
            moves = (Channel(tier, True), option.swap_in), (Channel(tier), option.swap_out)
            return {on: self.times * move.bytes * self.per_byte[on] for on, move in moves}
        gathered = sum(gather.bytes for gather in option.gathers)
        scattered = self.scatters * option.scattered.bytes if option.scattered else 0
        reducing = self.scattered * scattered + self.summed * option.summed_bytes
        seconds: Work = {NETWORK: self.times * (self.gathered * gathered) + reducing}
        for fetch in (*option.fetches, *option.from_disk):
            channel = Channel(fetch.tier, True)
            seconds.setdefault(channel, 0.0)
            seconds[channel] += self.times * fetch.bytes * self.per_byte[channel]
        if option.gradients and option.gradients.tier:
            channel = Channel(option.gradients.tier)
            seconds[channel] = self.spills * (option.gradients.bytes * self.per_byte[channel])
        if option.state_lanes:
            read, _, write = option.state_lanes
            seconds[read] = option.read_bytes * self.per_byte[read.channel]
            seconds[write] = option.write_bytes * self.per_byte[write.channel]
        return seconds

    def of(self, option: Option, *, last: bool = False) -> Work:
        """Seconds of each lane for a decision; `last` if its unit's backward is the first.

        Updates on the device take turns with compute.
        """
        seconds = self.moved(option)
        if isinstance(option, ActivationOption):
            cost = option.cost
            first = (self.times - 1) * cost.compute_s + cost.forward_s + cost.backward_s * last
            first *= not self.overlap
            computed: Work = {COMPUTE: self.times * cost.compute_s, UPDATES: first}
            if self.launches:
                computed[LAUNCHES] = self.times * cost.launch_s
            computed |= {lane: first for lane in self.lanes if isinstance(lane, Lane)}
            return computed | seconds
        seconds[NETWORK] += option.device_s
        if option.decision.update_on_device:
            # One direction of the link carries states and everything else.
            for lane in (Lane("read", "host"), Lane("write", "host")):
                seconds[lane.channel] = seconds.get(lane.channel, 0.0) + seconds[lane]
            return seconds | {COMPUTE: option.device_s + option.update_s}
        return seconds | {COMPUTE: option.device_s, UPDATES: option.update_s}

    def streamed(self, option: Option) -> Iterator[tuple[Channel, float]]:
        """Seconds of states on a link beside slots' moves, unless `of` has them there."""
        if isinstance(option, StateOption) and not option.decision.update_on_device:
            for lane, taken in self.moved(option).items():
                if isinstance(lane, Lane):
                    yield lane.channel, taken


_Asked = TypeVarTuple("_Asked")
_Found = TypeVar("_Found")


def _once(method: Callable[["Problem", *_Asked], _Found]) -> Callable[["Problem", *_Asked], _Found]:
    """Cache a problem's answer about a choice: searches repeat them."""

    @wraps(method)
    def known(self: "Problem", *asked: *_Asked) -> _Found:
        answers: dict[object, _Found] = self.__dict__.setdefault(f"_{method.__name__}_of", {})
        if (found := answers.get(asked)) is None:
            found = answers[asked] = method(self, *asked)
        return found

    return known


@dataclass(frozen=True)
class Problem:
    """Bytes in `device` are for tensors; `profile` is one device's part of `made_from`.

    `budgets` are as asked for; `device` and `tiers` are what they leave on this machine.
    """

    profile: Profile
    made_from: Profile
    budgets: Budgets
    settings: StepSettings
    device: int
    tiers: dict[TierName, int]
    pins: tuple[Pin, ...] = ()
    ahead_on: tuple[StateTier, ...] = get_args(TierName)  # tiers with such updates
    left: Sequence[Sequence[Sequence[int]]] = ()  # of options, by unit and kind; none: all
    in_parts: bool = True  # whether a chunk may lie in two tiers

    @staticmethod
    def of(
        profile: Profile,
        budgets: Budgets,
        settings: StepSettings = OVERLAPPING,
        *,
        pins: Sequence[Pin] = (),
        allow: Sequence[str] = (),
    ) -> "Problem":
        """Make the problem: budgets below the device are capped by the machine's measured sizes.

        An estimated profile assumes its machine's sizes: budgets override them. Budgets are one
        device's. Inexact forms of activations are options only if in `allow`. Steps overlap only if
        possible (see `StepSettings`). ProtrainError if the profile's machine lacks a network
        between devices, or sparse gradients would have to be summed.
        """
        group, page_cache_bytes = settings.group, settings.page_cache_bytes
        sparse = [unit.name for unit in profile.units if unit.stays == SPARSE]
        if sparse and (settings.micro_batches > 1 or group.num_devices > 1):
            # Such a sum grows with every added gradient.
            several = group.num_devices > 1
            what = "devices" if several else "micro-batches"
            raise ProtrainError(
                f"{sparse[0]} has sparse gradients, and their sum over {what} is of unknown size",
                key="settings.group.num_devices" if several else "settings.micro_batches",
                fix="give the embedding dense gradients (sparse=False)",
            )
        made_from, profile = profile, _with_leave(profile_of_rank(profile, group), allow)
        profile = replace(profile, hardware=through_cache(profile.hardware, page_cache_bytes))
        # Bytes through the page cache are limited to its budget.
        on_disk = min(budgets.disk, page_cache_bytes) if page_cache_bytes else budgets.disk
        limits: dict[TierName, int] = {"host": budgets.host, "disk": on_disk}
        # Piece size of optimizer states. On a CPU machine the staging buffers are on the device:
        # the smallest worthwhile. Beside a device, the largest chunk's states make up to
        # `MAX_PIECES_ON_DISK`. A step has at most as many as a search can handle.
        beside = is_accelerator(profile.hardware.device.kind)
        largest = max(unit.state_bytes for unit in profile.units) if beside else 0
        sizes = [max(unit.state_bytes, unit.gradient_bytes) for unit in profile.units]
        piece, many = MIN_PIECE_BYTES, MANY_PIECES[beside]
        while piece * MAX_PIECES_ON_DISK < largest or sum(-(-s // piece) for s in sizes) > many:
            piece *= 2
        return Problem(
            profile=profile,
            made_from=made_from,
            budgets=budgets,
            settings=replace(
                settings,
                piece_bytes=settings.piece_bytes or piece,
                overlap_steps=settings.overlap_steps and settings.is_single,
            ),
            pins=tuple(pins),
            device=budgets.device - profile.hardware.device.besides_bytes,
            tiers={
                tier.name: min(limits[tier.name], most_of(tier, profile))
                for tier in profile.hardware.tiers
            },
        )

    @staticmethod
    def of_plan(plan: Plan, profile: Profile, budgets: Budgets | None = None) -> "Problem":
        """The problem that the plan answers, within its own budgets or others."""
        return Problem.of(profile, budgets or plan.budgets, plan.settings, allow=plan.allowed)

    def changed(self, **changes: Any) -> "Problem":
        """The problem with other budgets or options; shares the profile's implications."""
        found = replace(self, **changes)
        kept = ("implied", "lane_seconds", "_described", "_all_options")
        found.__dict__.update({name: getattr(self, name) for name in kept})
        return found

    def overlapping(self, overlap_steps: bool) -> "Problem":
        """The problem with overlapping steps, or without."""
        if overlap_steps == self.settings.overlap_steps:
            return self
        return replace(self, settings=replace(self.settings, overlap_steps=overlap_steps))

    def exactly(self) -> "Problem | None":
        """The problem without opt-in activations; None if a pin requires them."""
        if any(
            all(FORMS[option.decision.form].opt_in for option in unit.activations)
            for unit in self.options
        ):
            return None
        return replace(self, profile=_with_leave(self.profile, ()))

    @cached_property
    def implied(self) -> Implications:
        return Implications(self.profile, self.settings, recorded=self.made_from)

    @cached_property
    def lane_seconds(self) -> LaneSeconds:
        return LaneSeconds(self.profile.hardware, self.settings)

    def _by_option(self, fact: Callable[[int, Option], _Found]) -> list[list[list[_Found]]]:
        """A fact of each unit's options: by unit, kind and option, in the order of choices."""
        return [
            [[fact(unit, option) for option in of_kind] for of_kind in options.kinds]
            for unit, options in enumerate(self.options)
        ]

    @cached_property
    def _busy(self) -> list[list[list[tuple[float, ...]]]]:
        """The seconds of each lane by an option."""
        lanes, last = self.lane_seconds, self.count - 1

        def busy(unit: int, option: Option) -> tuple[float, ...]:
            seconds = lanes.of(option, last=unit == last)
            return tuple(seconds.get(lane, 0.0) for lane in lanes.lanes)

        return self._by_option(busy)

    @cached_property
    def compute_seconds(self) -> float:
        """The least compute of any plan, over all micro-batches: a bound without search."""
        both = (
            min(option.cost.compute_s for option in options.activations) for options in self.options
        )
        return self.settings.micro_batches * sum(both) * (1 - SAFE)

    @_once
    def least_seconds(self, choice: Choice) -> float:
        """A lower bound on every schedule's seconds: each lane's work."""
        rows = (
            row
            for (activations, states), (activation, state) in zip(self._busy, choice, strict=True)
            for row in (activations[activation], states[state])
        )
        return max(map(sum, zip(*rows, strict=True)))

    @cached_property
    def _all_options(self) -> tuple[UnitOptions, ...]:
        """Options under the pins."""
        pins = self.pins
        if not is_accelerator(self.implied.device):  # its own kernels do all updates
            pins = tuple(pin for pin in pins if not pin.exact_updates)
        return pinned_options(self.implied, pins)

    @cached_property
    def options(self) -> tuple[UnitOptions, ...]:
        def is_open(one: StateOption) -> bool:
            ahead = not one.decision.speculate or one.tier in self.ahead_on
            return ahead and (self.in_parts or not one.decision.on_disk)

        found = tuple(unit.placed(is_open) for unit in self._all_options)
        if not self.left:
            return found
        return tuple(
            UnitOptions(
                unit.unit,
                tuple(unit.activations[number] for number in activations),
                tuple(unit.states[number] for number in states),
            )
            for unit, (activations, states) in zip(found, self.left, strict=True)
        )

    def speculating(self, *tiers: StateTier) -> "Problem":
        """The problem with speculative updates only on these tiers, and pinned ones."""
        return self.changed(ahead_on=tiers)

    def program(
        self, plans: Sequence[UnitPlan], *, updating: bool = True, clipped: bool = False
    ) -> BoundProgram:
        """The program of `plans`: of the `updating` micro-batch, or of a `clipped` step."""
        return _bind(tuple(plans), self.implied, updating=updating, clipped=clipped)

    @cached_property
    def _described(self) -> tuple[UnitPlan, ...]:
        """The units as plans describe them, undecided."""
        units = self.profile.units
        return tuple(
            UnitPlan(
                name=unit.name,
                kind=unit.kind,
                parameters=unit.parameters,
                also_used_by=tuple(units[user].name for user in unit.used_by if user != index),
                own_inputs=unit.own_inputs,
                activations=KEEP,
                states=PERSISTENT,
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
        """Units of equal cost, except chunks shared between units, in execution order."""
        groups: dict[object, list[int]] = {}
        for index, unit in enumerate(self.profile.units):
            options = self.options[index]
            costs = (
                unit.parameter_bytes,
                unit.gradient_bytes,
                unit.state_bytes,
                unit.num_parameters,
                unit.reached,
                bool(unit.used_by),
                unit.forms,
                unit.parameter_pieces,
                unit.gradient_pieces,
                len(options.activations),
                len(options.states),
                options.activations[0].decision,
                options.states[0].decision,
            )
            groups.setdefault(costs if len(unit.used_by) <= 1 else index, []).append(index)
        return tuple(tuple(group) for group in groups.values())

    def chosen(self, choice: Choice) -> tuple[list[ActivationOption], list[StateOption]]:
        """The options that a choice names."""
        pairs = list(zip(self.options, choice, strict=True))
        return (
            [options.activations[activation] for options, (activation, _) in pairs],
            [options.states[state] for options, (_, state) in pairs],
        )

    def choice_of(self, plans: Sequence[UnitPlan]) -> Choice:
        """A plan's decisions as a choice; they are among the options."""
        choice = self.known_choice((plan.activations, plan.states) for plan in plans)
        assert choice, "all of them are"
        return choice

    def known_choice(self, decisions: Iterable[tuple[Activations, Placement]]) -> Choice | None:
        """The units' decisions as a choice; None if one is not an option."""
        choice: list[Decision] = []
        for options, (activations, states) in zip(self.options, decisions, strict=True):
            known, placements = options.numbers
            if activations not in known or states not in placements:
                return None
            choice.append((known[activations], placements[states]))
        return tuple(choice)

    @cached_property
    def changes(self) -> list[list[list[tuple[tuple[int, int], ...]]]]:
        """The slots with changes of an option's bytes: by unit, kind and option."""

        def changes(_: int, option: Option) -> tuple[tuple[int, int], ...]:
            sums: dict[int, int] = {}
            for held in option.live_ranges:
                sums[held.first] = sums.get(held.first, 0) + held.bytes
                sums[held.last + 1] = sums.get(held.last + 1, 0) - held.bytes
            return tuple((slot, size) for slot, size in sums.items() if size)

        return self._by_option(changes)

    @_once
    def _kinds(self, choice: Choice) -> tuple[list[ActivationOption], list[StateOption]]:
        """A choice's distinct options of each kind: equal ones have equal maxima."""
        activations: dict[tuple[int, int], ActivationOption] = {}
        states: dict[tuple[int, int], StateOption] = {}
        decided = zip(self.options, choice, self._class_of, strict=True)
        for options, (activation, state), group in decided:
            activations[group, activation] = options.activations[activation]
            states[group, state] = options.states[state]
        return list(activations.values()), list(states.values())

    @cached_property
    def _class_of(self) -> list[int]:
        of = {unit: number for number, units in enumerate(self.classes) for unit in units}
        return [of[unit] for unit in range(self.count)]

    @_once
    def tier_use(self, tier: TierName, choice: Choice) -> int:
        """A choice's bytes on a tier below the device."""
        total = 0
        for options, (activation, state) in zip(self.options, choice, strict=True):
            total += options.activations[activation].tier_bytes.get(tier, 0)
            total += options.states[state].tier_bytes.get(tier, 0)
        return total + tier_staging_bytes(tier, *self._kinds(choice), self.implied)

    def beyond(self, choice: Choice) -> dict[StateTier, int]:
        """A choice's excess over each budget."""
        found: dict[StateTier, int] = {"device": max(self.static_bytes(choice)) - self.device}
        found |= {tier: self.tier_use(tier, choice) - limit for tier, limit in self.tiers.items()}
        return {tier: size for tier, size in found.items() if size > 0}

    def fits(self, choice: Choice) -> bool:
        """Whether a choice meets all budgets."""
        return max(self.static_bytes(choice)) <= self.device and all(
            self.tier_use(tier, choice) <= limit for tier, limit in self.tiers.items()
        )

    @_once
    def static_bytes(self, choice: Choice) -> list[int]:
        """Device bytes per slot with every lead and drain 0: a choice's minimum.

        Entry 2U is the device's update of the persistent chunks.
        """
        end = 2 * self.count
        change = [0] * (end + 2)
        change[0] = base_bytes(self.profile, self.settings)
        for (of_activations, of_states), (a, s) in zip(self.changes, choice, strict=True):
            for slot, size in of_activations[a]:
                change[slot] += size
            for slot, size in of_states[s]:
                change[slot] += size
        activations, states = self._kinds(choice)
        change[0] += tier_staging_bytes("device", activations, states, self.implied)
        change[end] += round(max(state.device_workspace for state in states))
        # No slot waits for the last one's output: the first unit's.
        leaving = self.options[0].states[choice[0][1]].leaving
        if leaving and leaving.slot == end - 1:
            change[end] += leaving.kept
        return list(accumulate(change[: end + 1]))
