"""The decisions open to each unit, and what each one costs: coefficients for model and schedule.

Every number comes from the functions that the simulator uses; nothing is modelled twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from protrain_plan.program import (
    num_pieces,
    residencies,
    updated_in_place,
)
from protrain_plan.records.hardware import DeviceKind, Hardware, TierName
from protrain_plan.records.plan import (
    Activations,
    Buffer,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Swap,
    SwapInput,
)
from protrain_plan.records.profile import Form, Profile, Unit
from protrain_plan.simulation.memory import (
    activation_bytes,
    activation_holdings,
    activation_tier_bytes,
    chunk_holdings,
    chunk_size,
    chunk_tier_bytes,
    staging_buffer_bytes,
)


class Stay(NamedTuple):
    """Bytes that stand on the device from the start of slot `first` to the end of slot `last`."""

    first: int
    last: int
    bytes: int


class Fetch(NamedTuple):
    """Bytes that a slot needs from a tier; they cannot be fetched before slot `earliest`."""

    tier: TierName
    slot: int
    earliest: int
    bytes: int


class Leaving(NamedTuple):
    """Bytes that a slot leaves to be moved to a tier; `held` stand on the device until then."""

    tier: TierName
    slot: int
    bytes: int
    held: int


@dataclass(frozen=True, slots=True)
class ActivationOption:
    """One activation decision of one unit. `swap_in` and `swap_out` are there or absent together.

    Seconds are compute; the fetch serves the unit's backward, the way out starts after forward.
    """

    decision: Activations
    forward_s: float
    backward_s: float
    stays: tuple[Stay, ...]
    swap_in: Fetch | None
    swap_out: Leaving | None


@dataclass(frozen=True, slots=True)
class StateOption:
    """One placement of one chunk.

    fetches        parameters, one per stay on the device
    gradients      what leaves after the chunk's last backward slot and is gone when it is moved
    in_place       what leaves only when the whole chain read -> update -> write is through
    read_bytes     optimizer states that come from disk for the update (after `update_slot`)
    write_bytes    what the update writes back to disk
    update_s       seconds of the optimizer on the host
    device_s       seconds of the optimizer on the device, after the last slot
    read_piece     bytes of its largest piece of states that is read from disk
    state_width    bytes of optimizer states per parameter, where they are read from disk
    workspace      bytes of the host step's workspace for its largest piece
    device_workspace   the same for the device's step
    """

    decision: Placement
    stays: tuple[Stay, ...]
    fetches: tuple[Fetch, ...] = ()
    gradients: Leaving | None = None
    in_place: Leaving | None = None
    update_slot: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    update_s: float = 0.0
    device_s: float = 0.0
    read_piece: int = 0
    state_width: int = 0
    workspace: float = 0.0
    device_workspace: float = 0.0

    @property
    def staging(self) -> int:
        """Bytes of the staging buffers that this option needs."""
        return staging_buffer_bytes(read_piece=self.read_piece, state_width=self.state_width)


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Everything that a unit may do. The first of each is the plain one: keep, persistent."""

    unit: Unit
    activations: tuple[ActivationOption, ...]
    states: tuple[StateOption, ...]

    def tier_bytes(self, tier: TierName, *, activation: int, state: int, device: DeviceKind) -> int:
        """What the options with these numbers take of a tier, staging apart."""
        return activation_tier_bytes(
            tier, self.activations[activation].decision, self.unit
        ) + chunk_tier_bytes(tier, self.states[state].decision, self.unit, device)


def unit_options(profile: Profile, *, piece_bytes: int) -> tuple[UnitOptions, ...]:
    """The options of every unit, in execution order."""
    count = len(profile.units)
    return tuple(
        UnitOptions(
            unit=unit,
            activations=tuple(
                _activation_option(index, decision, unit, count)
                for decision in _activations(unit, profile.hardware)
            ),
            states=tuple(
                _state_option(index, decision, profile, piece_bytes)
                for decision in _placements(unit, profile.hardware, count)
            ),
        )
        for index, unit in enumerate(profile.units)
    )


def _activations(unit: Unit, hardware: Hardware) -> Iterator[Activations]:
    forms: dict[Form, int] = {cost.form: cost.swappable_bytes for cost in unit.forms}
    yield Keep()
    if "full" in forms:
        yield Recompute()
    for tier in hardware.tiers:
        if forms["keep"] > 0:
            yield Swap(tier=tier.name)
        if forms.get("full", 0) > 0:
            yield SwapInput(tier=tier.name)


def _placements(unit: Unit, hardware: Hardware, count: int) -> Iterator[Placement]:
    yield Persistent()
    if not unit.used_by:
        return
    names = [tier.name for tier in hardware.tiers]
    for name in names:
        if "host" not in names and not updated_in_place(Offload(tier=name), hardware.device.kind):
            continue  # the optimizer of this chunk would run in host memory
        offload, buffer = Offload(tier=name), Buffer(tier=name)
        yield offload
        if residencies(offload, unit.used_by, count) != residencies(buffer, unit.used_by, count):
            yield buffer


def _activation_option(
    index: int, decision: Activations, unit: Unit, count: int
) -> ActivationOption:
    cost, swapped, tier = activation_bytes(decision, unit)
    served = 2 * count - 1 - index
    return ActivationOption(
        decision=decision,
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        stays=tuple(
            Stay(held.first, held.last, held.bytes)
            for held in activation_holdings(index, decision, unit, count)
        ),
        swap_in=Fetch(tier, served, index + 1, swapped) if tier else None,
        swap_out=Leaving(tier, index, swapped, swapped) if tier else None,
    )


def _state_option(
    index: int, decision: Placement, profile: Profile, piece_bytes: int
) -> StateOption:
    unit, count = profile.units[index], len(profile.units)
    optimizer, device = profile.optimizer, profile.hardware.device.kind
    stays = tuple(
        Stay(held.first, held.last, held.bytes)
        for held in chunk_holdings(index, decision, unit, count)
        if held.first <= held.last
    )
    match decision:
        case Persistent():
            return StateOption(
                decision=decision,
                stays=stays,
                device_s=unit.num_parameters / optimizer.device_parameters_per_s,
                device_workspace=unit.gradient_bytes * optimizer.workspace_fraction
                if unit.used_by
                else 0.0,
            )
        case Offload() | Buffer():
            pass
        case _:
            assert_never(decision)
    fetches: list[Fetch] = []
    earliest = 0
    for stay in residencies(decision, unit.used_by, count):
        fetches.append(Fetch(decision.tier, stay.first, earliest, unit.parameter_bytes))
        earliest = stay.last + 1
    if not unit.num_parameters:
        return StateOption(decision=decision, stays=stays, fetches=tuple(fetches))
    on_disk, in_place = decision.tier == "disk", updated_in_place(decision, device)
    slot = 2 * count - 1 - index
    read = unit.state_bytes if in_place else unit.state_bytes + unit.gradient_bytes
    written = unit.state_bytes + unit.gradient_bytes
    pieces = num_pieces(chunk_size(unit), piece_bytes) if on_disk else 1
    largest = -(-unit.num_parameters // pieces)
    fraction = largest / unit.num_parameters
    read_piece = round(unit.state_bytes * fraction)
    if not in_place:
        read_piece += round(unit.gradient_bytes * fraction)
    return StateOption(
        decision=decision,
        stays=stays,
        fetches=tuple(fetches),
        gradients=None
        if in_place
        else Leaving("host", slot, unit.gradient_bytes, unit.gradient_bytes),
        in_place=Leaving(decision.tier, slot, written, unit.parameter_bytes + unit.gradient_bytes)
        if in_place
        else None,
        update_slot=slot,
        read_bytes=read if on_disk else 0,
        write_bytes=written if on_disk else 0,
        update_s=unit.num_parameters / optimizer.host_parameters_per_s,
        read_piece=read_piece if on_disk else 0,
        state_width=-(-unit.state_bytes // unit.num_parameters) if on_disk else 0,
        workspace=(largest * unit.gradient_bytes // unit.num_parameters)
        * optimizer.workspace_fraction,
    )
