"""How many bytes stand on each tier, slot by slot. The one place that adds them up.

In forward slot u of a programme, the device holds

    base + states of persistent chunks + level(u - 1) + forward_peak(u) + transfers(u)

and in the backward slot of unit u

    base + states of persistent chunks + level(u) + swapped(u) + backward_peak(u)
         + gradients of slots before + transfers(slot)

where level(u) sums kept - swapped over the units up to u, and transfers are the chunk buffers on
the device, what was fetched ahead, and what has not left yet by the programme's own waits. Since
a programme waits for moves and never for a clock, no speed of the lanes makes it exceed this.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

from protrain_plan.program import (
    PIECE_ALIGNMENT,
    STAGING_PIECES,
    ChunkSize,
    Move,
    Program,
    compile_plan,
    residencies,
    updated_in_place,
)
from protrain_plan.records.hardware import DeviceKind, TierName
from protrain_plan.records.plan import (
    Activations,
    Keep,
    Persistent,
    Placement,
    Recompute,
    Swap,
    SwapInput,
    UnitPlan,
)
from protrain_plan.records.profile import FormCost, Profile, Unit

HoldingKind = Literal[
    "base", "states", "activations", "gradients", "buffers", "fetched ahead", "leaving", "staging"
]


class Holding(NamedTuple):
    """Bytes on the device from the start of slot `first` to the end of slot `last`."""

    kind: HoldingKind
    unit: int
    first: int
    last: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SlotBytes:
    """What stands on the device in one slot at its peak, by kind, in bytes."""

    by_kind: dict[HoldingKind, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


class ActivationBytes(NamedTuple):
    """A unit's costs under its decision; `swapped` of `cost.kept_bytes` leave the device."""

    cost: FormCost
    swapped: int
    tier: TierName | None


def activation_bytes(activations: Activations, unit: Unit) -> ActivationBytes:
    """The form that a decision implies and the bytes that it moves."""
    match activations:
        case Keep():
            return ActivationBytes(unit.cost("keep"), 0, None)
        case Recompute():
            return ActivationBytes(unit.cost("full"), 0, None)
        case Swap(tier=tier):
            cost = unit.cost("keep")
            return ActivationBytes(cost, cost.swappable_bytes, tier)
        case SwapInput(tier=tier):
            cost = unit.cost("full")
            return ActivationBytes(cost, cost.swappable_bytes, tier)
        case _:
            assert_never(activations)


def chunk_size(unit: Unit) -> ChunkSize:
    """The chunk of a profile's unit, as programmes are compiled from."""
    return ChunkSize(
        parameter_bytes=unit.parameter_bytes,
        gradient_bytes=unit.gradient_bytes,
        state_bytes=unit.state_bytes,
        num_parameters=unit.num_parameters,
        used_by=unit.used_by,
    )


def compile_units(units: Sequence[UnitPlan], profile: Profile, *, piece_bytes: int) -> Program:
    """The programme of `units` for the model and machine of `profile`."""
    return compile_plan(
        units,
        [chunk_size(unit) for unit in profile.units],
        device=profile.hardware.device.kind,
        piece_bytes=piece_bytes,
    )


def holdings(program: Program, plans: Sequence[UnitPlan], profile: Profile) -> Iterator[Holding]:
    """Everything that stands on the device, from the start of a slot to the end of another.

    Slot 2U, after the last one, is the update of the persistent chunks.
    """
    count, end = program.num_units, 2 * program.num_units
    device = profile.hardware.device.kind
    yield Holding("base", 0, 0, end, profile.base_bytes)
    for index, (plan, unit) in enumerate(zip(plans, profile.units, strict=True)):
        yield from activation_holdings(index, plan.activations, unit, count)
        yield from chunk_holdings(index, plan.states, unit, count)
    yield from _transfer_holdings(program, plans, profile)
    staging = staging_bytes(program, profile)
    if device == "cpu" and staging:
        yield Holding("staging", 0, 0, end, staging)
    largest = max(
        (
            unit.gradient_bytes
            for unit, plan in zip(profile.units, plans, strict=True)
            if isinstance(plan.states, Persistent)
        ),
        default=0,
    )
    yield Holding("staging", 0, end, end, round(largest * profile.optimizer.workspace_fraction))


def activation_holdings(
    index: int, activations: Activations, unit: Unit, count: int
) -> Iterator[Holding]:
    """What a unit's own slots need above the levels around them, and its level in between."""
    end = 2 * count
    cost, swapped, _ = activation_bytes(activations, unit)
    yield Holding("activations", index, index, index, cost.forward_peak_bytes)
    level = cost.kept_bytes - swapped
    yield Holding("activations", index, index + 1, end - 1 - index, level)
    # The level after the unit's forward: all its kept bytes stand in its backward.
    backward = cost.backward_peak_bytes + swapped
    yield Holding("activations", index, end - 1 - index, end - 1 - index, backward)


def chunk_holdings(index: int, states: Placement, unit: Unit, count: int) -> Iterator[Holding]:
    """A chunk's states or buffers, and the gradients that wait between slots."""
    if not unit.used_by:
        return
    end = 2 * count
    first_gradient = end - 1 - max(unit.used_by)
    last_gradient = end - 1 - min(unit.used_by)
    if isinstance(states, Persistent):
        yield Holding("states", index, 0, end, unit.parameter_bytes + unit.state_bytes)
        yield Holding("gradients", index, first_gradient + 1, end, unit.gradient_bytes)
        return
    for stay in residencies(states, unit.used_by, count):
        yield Holding("buffers", index, stay.first, stay.last, unit.parameter_bytes)
    # The gradient of a tied parameter grows from its last use to its first.
    yield Holding("gradients", index, first_gradient + 1, last_gradient, unit.gradient_bytes)


def _transfer_holdings(
    program: Program, plans: Sequence[UnitPlan], profile: Profile
) -> Iterator[Holding]:
    """What was fetched ahead of its slot, and what has not left after its slot."""
    for slot_index, slot in enumerate(program.slots):
        for number in slot.submit:
            move = program.moves[number]
            size = _moved_bytes(move, plans, profile)
            if slot_index < move.slot:
                yield Holding("fetched ahead", move.unit, slot_index, move.slot - 1, size)
    end = len(program.slots)
    drained_by = _drained_by(program)
    for number, move in enumerate(program.moves):
        size = _held_until_moved(number, program, plans, profile)
        gone = drained_by.get(number, end + 1)
        if size and gone > move.slot + 1:
            yield Holding("leaving", move.unit, move.slot + 1, gone - 1, size)


def _drained_by(program: Program) -> dict[int, int]:
    """For each move that a slot waits for before it starts: the first such slot."""
    slots: dict[int, int] = {}
    for index, slot in enumerate(program.slots):
        for number in slot.drained:
            slots.setdefault(number, index)
    return slots


def _moved_bytes(move: Move, plans: Sequence[UnitPlan], profile: Profile) -> int:
    if move.bytes is not None:
        return move.bytes
    return activation_bytes(plans[move.unit].activations, profile.units[move.unit]).swapped


def _held_until_moved(
    number: int, program: Program, plans: Sequence[UnitPlan], profile: Profile
) -> int:
    """Device bytes that stand until the move has ended."""
    move, unit = program.moves[number], profile.units[program.moves[number].unit]
    match move.kind:
        case "swap out" | "spill gradients":
            return _moved_bytes(move, plans, profile)
        case "write states":
            # Updated in place, parameters and gradients stay until the last piece is written.
            is_last = move.stop == unit.num_parameters
            in_place = profile.hardware.device.kind == "cpu"
            return unit.parameter_bytes + unit.gradient_bytes if in_place and is_last else 0
        case "gather" | "swap in" | "read states" | "update":
            return 0
        case _:
            assert_never(move.kind)


def staging_bytes(program: Program, profile: Profile) -> int:
    """Bytes of the buffers that optimizer states pass through, with the step's workspace."""
    read = [move.bytes or 0 for move in program.moves if move.kind == "read states"]
    pieces = [
        (move.stop - move.start)
        * profile.units[move.unit].gradient_bytes
        // max(1, profile.units[move.unit].num_parameters)
        for move in program.moves
        if move.kind == "update"
    ]
    workspace = round(max(pieces, default=0) * profile.optimizer.workspace_fraction)
    widths = [
        -(-profile.units[move.unit].state_bytes // max(1, profile.units[move.unit].num_parameters))
        for move in program.moves
        if move.kind == "read states"
    ]
    return workspace + staging_buffer_bytes(
        read_piece=max(read, default=0), state_width=max(widths, default=0)
    )


def staging_buffer_bytes(*, read_piece: int, state_width: int) -> int:
    """Bytes of the buffers for the largest piece and the widest states per parameter.

    A piece may be cut up to PIECE_ALIGNMENT elements later than its even share.
    """
    return STAGING_PIECES * (read_piece + PIECE_ALIGNMENT * state_width)


def device_bytes(
    program: Program, plans: Sequence[UnitPlan], profile: Profile
) -> tuple[SlotBytes, ...]:
    """The most that the device can hold in each slot; the last entry is the device's update."""
    count = program.num_units
    kinds: list[dict[HoldingKind, int]] = [{} for _ in range(2 * count + 1)]
    for holding in holdings(program, plans, profile):
        for slot in range(holding.first, holding.last + 1):
            by_kind = kinds[slot]
            by_kind[holding.kind] = by_kind.get(holding.kind, 0) + holding.bytes
    return tuple(SlotBytes(by_kind) for by_kind in kinds)


def tier_bytes(
    tier: TierName, program: Program, plans: Sequence[UnitPlan], profile: Profile
) -> int:
    """The most that a tier below the device holds: states, and swapped activations."""
    device = profile.hardware.device.kind
    total = sum(
        activation_tier_bytes(tier, plan.activations, unit)
        + chunk_tier_bytes(tier, plan.states, unit, device)
        for plan, unit in zip(plans, profile.units, strict=True)
    )
    if tier == "host" and device != "cpu":
        total += staging_bytes(program, profile)
    return total


def activation_tier_bytes(tier: TierName, activations: Activations, unit: Unit) -> int:
    """What a unit's swapped activations take of `tier`."""
    _, swapped, swap_tier = activation_bytes(activations, unit)
    return swapped if swap_tier == tier else 0


def chunk_tier_bytes(tier: TierName, states: Placement, unit: Unit, device: DeviceKind) -> int:
    """What an offloaded chunk takes of `tier`: its states, and gradients on their way."""
    if isinstance(states, Persistent) or not unit.used_by:
        return 0
    total = unit.parameter_bytes + unit.state_bytes if states.tier == tier else 0
    # Gradients wait in host memory for an optimizer that runs there.
    if tier == "host" and not updated_in_place(states, device):
        total += unit.gradient_bytes
    return total
