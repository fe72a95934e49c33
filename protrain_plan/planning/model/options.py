"""The decisions open to each unit of a profile, each with what it implies."""

from collections.abc import Iterator
from dataclasses import dataclass

from protrain_plan.program.implications import ActivationOption, Implications, StateOption
from protrain_plan.program.program import Settings, gradient_home, residencies
from protrain_plan.records.hardware import Hardware
from protrain_plan.records.plan import (
    Activations,
    Offload,
    Persistent,
    Placement,
    StateTier,
    activations_in,
)
from protrain_plan.records.profile import Unit


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Everything that a unit may do; without pins, keep and persistent come first."""

    unit: Unit
    activations: tuple[ActivationOption, ...]
    states: tuple[StateOption, ...]


def unit_options(implied: Implications) -> tuple[UnitOptions, ...]:
    """The options of every unit, in execution order."""
    profile, settings = implied.profile, implied.settings
    hardware, count = profile.hardware, len(profile.units)
    return tuple(
        UnitOptions(
            unit=unit,
            activations=tuple(
                implied.activations(index, decision) for decision in _activations(unit, hardware)
            ),
            states=tuple(
                implied.states(index, decision)
                for decision in _placements(unit, hardware, count, settings)
            ),
        )
        for index, unit in enumerate(profile.units)
    )


def _activations(unit: Unit, hardware: Hardware) -> Iterator[Activations]:
    for cost in unit.forms:
        yield activations_in(cost.form)
        if cost.swappable_bytes > 0:
            for tier in hardware.tiers:
                yield activations_in(cost.form, tier.name)


def _placements(
    unit: Unit, hardware: Hardware, count: int, settings: Settings
) -> Iterator[Placement]:
    yield Persistent()
    if not unit.used_by or unit.stays:
        return
    names = [tier.name for tier in hardware.tiers]
    homes: list[StateTier] = ["device"] if settings.num_devices > 1 else []
    for name in (*homes, *names):
        offload, buffer = Offload(tier=name), Offload(tier=name, keep_gathered=True)
        if gradient_home(offload, settings) == "host" and "host" not in names:
            continue  # the optimizer of this chunk would run in host memory
        yield offload
        if residencies(offload, unit.used_by, count) != residencies(buffer, unit.used_by, count):
            yield buffer
