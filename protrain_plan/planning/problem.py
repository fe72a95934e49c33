"""One planning problem: a profile, what may be used of each tier, and the options per unit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from protrain_plan.planning.options import (
    ActivationOption,
    StateOption,
    UnitOptions,
    unit_options,
)
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import Budgets
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import staging_buffer_bytes

Choice = tuple[tuple[int, int], ...]
"""Per unit: the number of its activation option and of its state option."""


@dataclass(frozen=True)
class Problem:
    """Bytes in `device` are for tensors: the context is taken off already."""

    profile: Profile
    piece_bytes: int
    device: int
    tiers: dict[TierName, int]

    @staticmethod
    def of(profile: Profile, budgets: Budgets, *, piece_bytes: int) -> "Problem":
        """What the budgets leave, and no more than the machine has."""
        limits: dict[TierName, int] = {"host": budgets.host, "disk": budgets.disk}
        return Problem(
            profile=profile,
            piece_bytes=piece_bytes,
            device=budgets.device - profile.hardware.device.context_bytes,
            tiers={
                tier.name: min(tier.capacity_bytes, limits[tier.name])
                for tier in profile.hardware.tiers
            },
        )

    @cached_property
    def options(self) -> tuple[UnitOptions, ...]:
        return unit_options(self.profile, piece_bytes=self.piece_bytes)

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
                    bool(unit.used_by),
                    unit.forms,
                    len(self.options[index].states),
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

    def staging(self, states: Sequence[StateOption]) -> int:
        """Bytes of the staging buffers and of the host step's workspace."""
        buffers = staging_buffer_bytes(
            read_piece=max(state.read_piece for state in states),
            state_width=max(state.state_width for state in states),
        )
        return buffers + round(max(state.workspace for state in states))

    def tier_use(self, tier: TierName, choice: Choice) -> int:
        """What a choice takes of a tier below the device."""
        device = self.profile.hardware.device.kind
        total = sum(
            options.tier_bytes(tier, activation=activation, state=state, device=device)
            for options, (activation, state) in zip(self.options, choice, strict=True)
        )
        if tier == "host" and device != "cpu":
            total += self.staging(self.chosen(choice)[1])
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
        change[0] = self.profile.base_bytes
        for stays in (option.stays for options in (activations, states) for option in options):
            for first, last, size in stays:
                change[first] += size
                change[last + 1] -= size
        if self.profile.hardware.device.kind == "cpu":
            change[0] += self.staging(states)
        change[end] += round(max(state.device_workspace for state in states))
        for state in states:
            # No slot is left that could wait for what the last one produced.
            for leaving in (state.gradients, state.in_place):
                if leaving and leaving.slot == end - 1:
                    change[end] += leaving.held
        total, totals = 0, []
        for step in change[: end + 1]:
            total += step
            totals.append(total)
        return totals
