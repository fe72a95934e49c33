"""One planning problem: a profile, what may be used of each tier, and the options per unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from protrain_plan.compiling import compile_plan
from protrain_plan.errors import ProtrainError
from protrain_plan.planning.options import (
    ActivationOption,
    StateOption,
    UnitOptions,
    unit_options,
)
from protrain_plan.planning.pins import Pin, pinned_options
from protrain_plan.program import (
    ChunkSize,
    Program,
    Settings,
)
from protrain_plan.records.hardware import TierName, is_accelerator
from protrain_plan.records.plan import (
    Activations,
    Budgets,
    Keep,
    Persistent,
    Placement,
    Schedule,
    UnitPlan,
    Updates,
)
from protrain_plan.records.profile import SPARSE, Profile
from protrain_plan.simulation.memory import base_bytes
from protrain_plan.simulation.ranks import ALONE, Group, profile_of_rank
from protrain_plan.simulation.sizes import chunk_size
from protrain_plan.simulation.tiers import passage_bytes, total_staging

MIN_PIECE_BYTES = 8 * 2**20
"""Smaller pieces spend their time on starting."""

MAX_PIECES_ON_DISK = 32
"""More pieces per chunk gain little: what reads, updates and writes begins with one piece, and
three of them stand in host memory (docs/decisions.md)."""

Choice = tuple[tuple[int, int], ...]
"""Per unit: the number of its activation option and of its state option."""


def default_piece_bytes(profile: Profile) -> int:
    """The piece in which optimizer states move, unless the user says otherwise.

    On a CPU machine the staging buffers stand on the device: the smallest that is worth it. With
    a device beside it, the largest chunk's states make up to `MAX_PIECES_ON_DISK` pieces.
    """
    if not is_accelerator(profile.hardware.device.kind):
        return MIN_PIECE_BYTES
    largest = max(unit.state_bytes for unit in profile.units)
    piece = MIN_PIECE_BYTES
    while piece * MAX_PIECES_ON_DISK < largest:
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
        group: Group = ALONE,
    ) -> "Problem":
        """What the budgets leave, and no more than the machine has below the device.

        Budgets are one device's. ProtrainError where the profile's machine does not say what joins
        several devices, or sparse gradients would have to be summed.
        """
        _refuse_sums_of_sparse(profile, micro_batches=micro_batches, devices=group.num_devices)
        made_from, profile = profile, profile_of_rank(profile, group)
        limits: dict[TierName, int] = {"host": budgets.host, "disk": budgets.disk}
        return Problem(
            profile=profile,
            made_from=made_from,
            settings=Settings(
                device=profile.hardware.device.kind,
                piece_bytes=piece_bytes or default_piece_bytes(profile),
                updates=updates,
                micro_batches=micro_batches,
                num_devices=group.num_devices,
                num_replicas=group.num_replicas,
                num_nodes=group.num_nodes,
            ),
            pins=tuple(pins),
            device=budgets.device - profile.hardware.device.besides_bytes,
            tiers={
                tier.name: min(tier.capacity_bytes, limits[tier.name])
                for tier in profile.hardware.tiers
            },
        )

    @cached_property
    def options(self) -> tuple[UnitOptions, ...]:
        return pinned_options(unit_options(self.profile, self.settings), self.pins)

    @cached_property
    def _chunks(self) -> tuple[ChunkSize, ...]:
        return tuple(chunk_size(unit) for unit in self.profile.units)

    def program(self, plans: Sequence[UnitPlan], *, updating: bool = True) -> Program:
        """The programme of `plans`; without `updating`, of a micro-batch before the last."""
        return compile_plan(plans, self._chunks, self.settings, updating=updating)

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
        return UnitPlan(
            name=described.name,
            activations=activations,
            states=states,
            schedule=schedule,
            kind=described.kind,
            parameters=described.parameters,
            also_used_by=described.also_used_by,
            own_inputs=described.own_inputs,
        )

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

    def staging(self, states: Sequence[StateOption]) -> int:
        """Bytes of the staging buffers and of the host step's workspace."""
        return total_staging([state.staging for state in states], self.profile)

    def tier_use(self, tier: TierName, choice: Choice) -> int:
        """What a choice takes of a tier below the device."""
        activations, states = self.chosen(choice)
        total = sum(o.tier_bytes.get(tier, 0) for options in (activations, states) for o in options)
        if tier == "host" and is_accelerator(self.settings.device):
            total += self.staging(states)
            below = (o.tier_bytes for options in (activations, states) for o in options)
            on_disk = any("disk" in sizes for sizes in below)
            total += passage_bytes(on_disk=on_disk, settings=self.settings)
        return total

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
        for stays in (o.stays for options in (activations, states) for o in options):
            for first, last, size in stays:
                change[first] += size
                change[last + 1] -= size
        if not is_accelerator(self.settings.device):
            change[0] += self.staging(states)
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
