"""How many bytes stand on each tier, slot by slot. The one place that adds them up.

In forward slot u of a programme, the device holds

    base + states of persistent chunks + level(u - 1) + forward_peak(u) + transfers(u)

and in the backward slot of unit u

    base + states of persistent chunks + level(u) + swapped(u) + backward_peak(u)
         + gradients of slots before + transfers(slot)

where level(u) sums kept - swapped over the units up to u, and transfers are the chunk buffers on
the device, what was fetched ahead, and what has not left yet by the programme's own waits. Since
a programme waits for moves and never for a clock, no speed of the lanes makes it exceed this.

On several devices all of it is one rank's. Gradients of shared chunks are copied to the buffers in
which they are reduced, group by group, when their slot ends: room for the largest group, and for
the rank's shard of the sum, is counted in that slot as far as it exceeds what the slot itself took.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple, assert_never

from protrain_plan.program import (
    BLOCK_BYTES,
    SAVING_BYTES,
    SHARD_ALIGNMENT,
    Move,
    Program,
    Settings,
    gradient_home,
    padded,
    pieces_in,
    residencies,
    shard_of,
)
from protrain_plan.records.hardware import DeviceKind, is_accelerator
from protrain_plan.records.plan import (
    Activations,
    Persistent,
    Placement,
    UnitPlan,
)
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.simulation.sizes import (
    activation_bytes,
    chunk_size,
    moved_bytes,
)
from protrain_plan.simulation.tiers import (
    staging_bytes,
)

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


def holdings(program: Program, plans: Sequence[UnitPlan], profile: Profile) -> Iterator[Holding]:
    """Everything that stands on the device, from the start of a slot to the end of another.

    Slot 2U, after the last one, is the update of the persistent chunks.
    """
    count, end = program.num_units, 2 * program.num_units
    settings = program.settings
    yield Holding("base", 0, 0, end, base_bytes(profile, settings))
    for index, (plan, unit) in enumerate(zip(plans, profile.units, strict=True)):
        yield from activation_holdings(index, plan.activations, unit, count)
        yield from chunk_holdings(index, plan.states, profile, settings)
    yield from _transfer_holdings(program, plans, profile)
    staging = staging_bytes(plans, profile, settings)
    if staging and not is_accelerator(settings.device):
        yield Holding("staging", 0, 0, end, staging)
    largest = max(
        device_workspace(plan.states, unit, profile, settings)
        for unit, plan in zip(profile.units, plans, strict=True)
    )
    yield Holding("staging", 0, end, end, round(largest))


def base_bytes(profile: Profile, settings: Settings) -> int:
    """What stands on the device in every slot, whatever is decided."""
    gaps = gap_bytes(profile.tensors, settings.device) if settings.num_devices > 1 else 0
    return profile.base_bytes + profile.fixed_bytes + gaps


_SHARDED_COPIES = 3
"""Of a parameter on a device: in its chunk's buffer, its gradient, and a shard of either."""

_COUNTER_BYTES = 16
"""What an optimizer keeps of a parameter besides elementwise states, such as AdamW's step: as much
of a part of it as of the whole, and once more while a step is made."""

_COUNTER_BLOCKS = 4
"""The same on an accelerator, where each takes a block; two more round its part's bytes up."""

_RUN = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_WIDTHS = {
    "complex128": 16,
    "complex64": 8,
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
}


@cache
def gap_bytes(tensors: tuple[str, ...], device: DeviceKind = "cpu") -> int:
    """What lies between the parameters of sharded chunks at most, from a profile's `tensors`.

    Each starts at a multiple of SHARD_ALIGNMENT; those of most models are as long. With counters.
    """
    alignment, counters = SHARD_ALIGNMENT, _COUNTER_BYTES
    if is_accelerator(device):
        alignment, counters = BLOCK_BYTES, _COUNTER_BLOCKS * BLOCK_BYTES
    total = 0
    for line in tensors:
        name, shape, dtype, *role = line.split(" ")[:4]
        if role not in (["trainable"], ["frozen"]):
            continue
        num_bytes = prod(int(size) for size in shape.split("x") if size.isdigit())
        num_bytes *= _WIDTHS.get(dtype, 1)
        count = prod(int(last) - int(first) + 1 for first, last in _RUN.findall(name))
        total += count * (_SHARDED_COPIES * (-num_bytes % alignment) + counters)
    return total


def device_workspace(states: Placement, unit: Unit, profile: Profile, settings: Settings) -> float:
    """What the device's update asks for besides: the workspace of its step on what it has.

    Of a gradient that waits below the device, the norm may be asked for after it has left: one at a
    time comes back.
    """
    if isinstance(states, Persistent):
        return unit.gradient_bytes * profile.optimizer.workspace_fraction * unit.reached
    if settings.num_devices > 1:
        own = shard_of(chunk_size(unit), settings).gradient_bytes
        return own * profile.optimizer.workspace_fraction if states.tier == "device" else 0.0
    if settings.updates == "after backward" and gradient_home(states, settings) in ("host", "disk"):
        return max(unit.gradient_pieces or (unit.gradient_bytes,))
    return 0.0


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


def chunk_holdings(
    index: int, states: Placement, profile: Profile, settings: Settings
) -> Iterator[Holding]:
    """A chunk's states or buffers, and the gradients that wait between slots.

    Gradients to which micro-batches add up on the device stand there all the time; on several
    devices all do, whole, until they are reduced. A persistent chunk that no gradient reaches is
    its parameters alone; an offloaded one has room for all.
    """
    unit, count = profile.units[index], len(profile.units)
    if not unit.used_by:
        return
    if settings.num_devices > 1:
        yield from _sharded_holdings(index, states, profile, settings)
        return
    end = 2 * count
    first_gradient = end - 1 - max(unit.used_by)
    last_gradient = end - 1 - min(unit.used_by)
    add_up = settings.micro_batches > 1
    on_device = isinstance(states, Persistent) or gradient_home(states, settings) in (
        "in place",
        "device",
    )
    if isinstance(states, Persistent):
        state_bytes = unit.state_bytes if unit.reached else 0
        yield Holding("states", index, 0, end, unit.parameter_bytes + state_bytes)
        if not unit.reached:
            return
    else:
        for stay in residencies(states, unit.used_by, count):
            yield Holding("buffers", index, stay.first, stay.last, unit.parameter_bytes)
    if add_up and on_device:
        yield Holding("gradients", index, 0, end, unit.gradient_bytes)
    # The gradient of a tied parameter grows from its last use to its first.
    stays = isinstance(states, Persistent) and not add_up
    last = end if stays else last_gradient
    yield Holding("gradients", index, first_gradient + 1, last, unit.gradient_bytes)


def _sharded_holdings(
    index: int, states: Placement, profile: Profile, settings: Settings
) -> Iterator[Holding]:
    """The same of several devices, for one of them."""
    unit, count = profile.units[index], len(profile.units)
    end = 2 * count
    first_gradient = end - 1 - max(unit.used_by)
    reduced = end - 1 - min(unit.used_by)
    chunk = chunk_size(unit)
    whole, own = padded(chunk, settings), shard_of(chunk, settings)
    add_up = settings.micro_batches > 1
    if add_up:
        yield Holding("gradients", index, 0, end - 1, unit.gradient_bytes)
    # The gradient of a tied parameter grows from its last use to its first.
    yield Holding("gradients", index, first_gradient + 1, reduced, unit.gradient_bytes)
    if isinstance(states, Persistent):
        yield Holding("states", index, 0, end, unit.parameter_bytes + unit.state_bytes)
        summed = end if add_up else reduced + 1
        yield Holding("gradients", index, summed, end, unit.gradient_bytes)
        return
    for stay in residencies(states, unit.used_by, count):
        yield Holding("buffers", index, stay.first, stay.last, whole.parameter_bytes)
    if states.tier == "device":
        yield Holding("states", index, 0, end, own.parameter_bytes + own.state_bytes)
    if not unit.num_parameters:
        return
    yield Holding("gradients", index, reduced, reduced, _room_to_copy(index, profile, settings))
    # The shard that an update in backward takes away leaves with a move of the programme.
    waits = settings.updates == "after backward" or states.tier == "device"
    if waits and gradient_home(states, settings) == "device":
        # Before the update it stands, if at all, in place of what was added up.
        more = max(0, own.gradient_bytes - unit.gradient_bytes) if add_up else own.gradient_bytes
        yield Holding("gradients", index, reduced + 1, end - 1, more)
        yield Holding("gradients", index, end, end, own.gradient_bytes)


def _room_to_copy(index: int, profile: Profile, settings: Settings) -> int:
    """What is copied when a chunk's last slot has ended, as far as it exceeds the slot's own peak.

    The largest group of the gradients is copied while it stands, beside the rank's shards. Of the
    unit's activations nothing is left by then but what the slot after this one starts with.
    """
    unit, chunk = profile.units[index], chunk_size(profile.units[index])
    whole, own = padded(chunk, settings), shard_of(chunk, settings)
    copies = max(whole.gradient_pieces or (whole.gradient_bytes,)) + own.gradient_bytes
    following = profile.units[index - 1].forms if index else ()
    passed_on = min((form.backward_peak_bytes for form in following), default=0)
    stands = 0 if settings.micro_batches > 1 else unit.gradient_bytes
    peak = min(form.kept_bytes + form.backward_peak_bytes for form in unit.forms)
    return max(0, passed_on + stands + copies - peak)


def checkpoint_bytes(plans: Sequence[UnitPlan], profile: Profile) -> int:
    """What stands on a CPU machine while a checkpoint is written or read, between two steps."""
    standing = sum(
        unit.parameter_bytes + (unit.state_bytes if unit.reached else 0)
        for plan, unit in zip(plans, profile.units, strict=True)
        if isinstance(plan.states, Persistent)
    )
    return profile.base_bytes + profile.fixed_bytes + standing + SAVING_BYTES


def evaluation_bytes(program: Program, plans: Sequence[UnitPlan], profile: Profile) -> int:
    """The most that stands while the model is evaluated between a forward and its backward.

    Beside what waits for backward, such a forward of a batch of the profile's size holds no more
    than one that keeps as little as can be, and the chunks of one unit at a time.
    """
    last = program.num_units - 1
    waiting = activation_bytes(plans[last].activations, profile.units[last])
    standing = waiting.cost.kept_bytes - waiting.swapped
    buffers = dict.fromkeys(range(program.num_units), 0)
    for holding in holdings(program, plans, profile):
        inside = holding.kind == "activations" and holding.first == holding.last
        if holding.first <= last <= holding.last and not inside:
            standing += holding.bytes
            if holding.kind == "buffers":
                buffers[holding.unit] += holding.bytes
    level = most = 0
    for index, unit in enumerate(profile.units):
        lean = min(unit.forms, key=lambda form: (form.kept_bytes, form.forward_peak_bytes))
        brought = sum(
            max(0, padded(chunk_size(other), program.settings).parameter_bytes - buffers[place])
            for place, other in enumerate(profile.units)
            if index in other.used_by and not isinstance(plans[place].states, Persistent)
        )
        most = max(most, level + lean.forward_peak_bytes + brought)
        level += lean.kept_bytes
    return standing + most


def _transfer_holdings(
    program: Program, plans: Sequence[UnitPlan], profile: Profile
) -> Iterator[Holding]:
    """What was fetched ahead of its slot, and what has not left after its slot."""
    for slot_index, slot in enumerate(program.slots):
        for number in slot.submit:
            move = program.moves[number]
            size = moved_bytes(move, plans, profile)
            # A rank's shard is read into its place among the others', which are gathered there.
            read = move.kind == "gather" and program.settings.num_devices > 1
            if slot_index < move.slot and not read:
                yield Holding("fetched ahead", move.unit, slot_index, move.slot - 1, size)
    end = len(program.slots)
    gone_at = dict.fromkeys(program.reduced, end) | _gone_at(program)
    for number, move in enumerate(program.moves):
        size = _held_until_moved(number, program, plans, profile)
        gone = gone_at.get(number, end + 1)
        if size and gone > move.slot + 1:
            yield Holding("leaving", move.unit, move.slot + 1, gone - 1, size)


def _gone_at(program: Program) -> dict[int, int]:
    """For each move that a slot waits for before it starts: the first such slot.

    The pieces of one chunk are written in order: whoever waits for one, waits for those before.
    """
    slots: dict[int, int] = {}
    for index, slot in enumerate(program.slots):
        for number in slot.drained:
            slots.setdefault(number, index)
    later: dict[int, int] = {}  # unit -> the slot before which its later writes have ended
    for number in reversed(range(len(program.moves))):
        move = program.moves[number]
        known = slots.get(number, later.get(move.unit))
        if move.kind == "write states" and known is not None:
            slots[number] = later[move.unit] = min(known, later.get(move.unit, known))
    return slots


def _held_until_moved(
    number: int, program: Program, plans: Sequence[UnitPlan], profile: Profile
) -> int:
    """Device bytes that stand until the move has ended."""
    move, unit = program.moves[number], profile.units[program.moves[number].unit]
    match move.kind:
        case "swap out" | "spill gradients" | "reduce-scatter":
            return moved_bytes(move, plans, profile)
        case "write states" if program.settings.num_devices > 1:
            return _shard_until_written(move, plans, unit, program)
        case "write states":
            return in_place_bytes(unit, move.share, program.settings)
        case (
            "gather"
            | "all-gather"
            | "all-reduce"
            | "swap in"
            | "add gradients"
            | "read states"
            | "update"
        ):
            return 0
        case _:
            assert_never(move.kind)


def _shard_until_written(
    move: Move, plans: Sequence[UnitPlan], unit: Unit, program: Program
) -> int:
    """The gradients that wait on the device for an update in backward: until its last piece."""
    states, settings = plans[move.unit].states, program.settings
    assert not isinstance(states, Persistent)
    own = shard_of(chunk_size(unit), settings)
    waits = gradient_home(states, settings) == "device" and settings.updates == "in backward"
    return own.gradient_bytes if waits and move.stop == own.num_parameters else 0


def in_place_bytes(unit: Unit, share: tuple[float, float], settings: Settings) -> int:
    """What a share of a chunk holds on the device until it is updated in place and written."""
    parameters = unit.parameter_pieces or (unit.parameter_bytes,)
    held = pieces_in(parameters, share)
    total = sum(parameters[held.start : held.stop])
    if settings.micro_batches == 1:  # else the gradients' room stays
        gradients = unit.gradient_pieces or (unit.gradient_bytes,)
        total += sum(gradients[held.start : held.stop])
    return total


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
