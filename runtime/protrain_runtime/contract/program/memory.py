"""Bytes on each tier, slot by slot: the only place that adds them up.

In forward slot u of a program, the device holds

    base + states of persistent chunks + level(u - 1) + forward_peak(u) + transfers(u)

and in the backward slot of unit u

    base + states of persistent chunks + level(u) + swapped(u) + backward_peak(u)
         + gradients of slots before + transfers(slot)

where level(u) sums kept - swapped over the units up to u, and transfers are the chunk buffers on
the device, prefetched bytes, and bytes not yet evicted by the program's own waits. A program waits
for moves and never for a clock, so these bounds hold at any speed of the lanes.

On several devices all bytes are one rank's. Gradients of shared chunks are copied to reduction
buffers group by group, at the end of their slot: the largest group, and the rank's shard of the
sum, count in that slot as far as they exceed the slot's own bytes. `exceeded` compares a step's
bytes with these.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod

from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.effects import (
    BoundProgram,
    LiveRange,
    LiveRangeKind,
    StateOption,
)
from protrain_runtime.contract.program.program import (
    BLOCK_BYTES,
    SAVING_BYTES,
    SHARD_ALIGNMENT,
    Move,
    Program,
    pieces_in,
    slot_words,
)
from protrain_runtime.contract.records.hardware import DeviceKind, is_accelerator
from protrain_runtime.contract.records.plan import Plan, StepSettings, TierBytes, UnitPlan
from protrain_runtime.contract.records.profile import HANDED_SIZES, Profile
from protrain_runtime.contract.units import format_bytes


@dataclass(frozen=True, slots=True)
class SlotBytes:
    """Bytes on the device in one slot at its peak, by kind."""

    by_kind: dict[LiveRangeKind, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def live_ranges(program: BoundProgram) -> Iterator[LiveRange]:
    """All live ranges on the device, by first and last slot; slot 2U is the device's update."""
    end, settings = len(program.slots), program.settings
    yield LiveRange("base", 0, 0, end, base_bytes(program.profile, settings))
    for activation, state in zip(program.activations, program.states, strict=True):
        yield from (*activation.live_ranges, *state.live_ranges)
    for slot_index, slot in enumerate(program.slots):
        for number in slot.submit:  # prefetches
            move = program.moves[number]
            if slot_index < move.slot and (size := _room(move, program.states[move.unit])):
                yield LiveRange("fetched ahead", move.unit, slot_index, move.slot - 1, size)
    gone_at = dict.fromkeys(program.reduced, end) | _gone_at(program)
    # By unit: the slot of the next step before which its update's buffers have left. Moves ahead in
    # the lane have ended with the awaited ones.
    gone_after: dict[int, int] = {}
    for index, slot in enumerate(program.slots):
        for number in slot.drained_before:
            lane = program.moves[number].lane
            for unit, last in program.updates.items():
                if last <= number and program.moves[last].lane == lane:
                    gone_after.setdefault(unit, index)
    runs_on = program.running_on
    for number, move in enumerate(program.moves):  # not yet evicted after its slot
        size = _held_until_moved(move, program.states[move.unit])
        gone = gone_at.get(number, end + 1)
        if size and gone > move.slot + 1:
            yield LiveRange("leaving", move.unit, move.slot + 1, gone - 1, size)
        until = gone_after.get(move.unit, 0) if number in runs_on else 0
        if size and gone > end and until:
            yield LiveRange("leaving", move.unit, 0, until - 1, size)
    if staging := program.staging_bytes("device"):
        yield LiveRange("staging", 0, 0, end, staging)
    workspace = max(state.device_workspace for state in program.states)
    yield LiveRange("staging", 0, end, end, round(workspace))


def base_bytes(profile: Profile, settings: StepSettings) -> int:
    """Bytes on the device in every slot, for any plan."""
    gaps = (
        gap_bytes(profile.tensors, profile.hardware.device.kind)
        if settings.group.num_devices > 1
        else 0
    )
    return profile.base_bytes + profile.fixed_bytes + gaps


_SHARDED_COPIES = 3
"""Copies of a parameter on a device: in its chunk's buffer, its gradient, a shard of either."""

_COUNTER_BYTES = 16
"""Bytes that an optimizer keeps of a parameter besides elementwise states, such as AdamW's step: as
much of a part of it as of the whole, and once more while a step is made."""

_COUNTER_BLOCKS = 4
"""The same on an accelerator, where each takes a block; two more round its part's bytes up."""

_RUN = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_WIDTHS = {"complex128": 16, "complex64": 8, **HANDED_SIZES}


@cache
def gap_bytes(tensors: tuple[str, ...], device: DeviceKind = "cpu") -> int:
    """Upper bound of bytes between parameters of sharded chunks, from a profile's `tensors`.

    Each starts at a multiple of SHARD_ALIGNMENT; most models' are multiples. Counters included.
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


def checkpoint_bytes(plans: Sequence[UnitPlan], profile: Profile) -> int:
    """Bytes on a CPU machine while a checkpoint is written or read, between steps."""
    standing = sum(
        unit.parameter_bytes + (unit.state_bytes if unit.reached else 0)
        for plan, unit in zip(plans, profile.units, strict=True)
        if plan.states.is_persistent
    )
    return profile.base_bytes + profile.fixed_bytes + standing + SAVING_BYTES


def evaluation_bytes(program: BoundProgram) -> int:
    """The peak of an evaluation between a forward and its backward.

    Beside bytes that wait for backward, such a forward of a profiled batch holds at most a forward
    that keeps the minimum, and one unit's chunks at a time.
    """
    last = program.num_units - 1
    waiting = program.activations[last]
    standing = waiting.cost.kept_bytes - waiting.swapped
    buffers = [0] * program.num_units
    for held in live_ranges(program):
        inside = held.kind == "activations" and held.first == held.last
        if held.first <= last <= held.last and not inside:
            standing += held.bytes
            if held.kind == "buffers":
                buffers[held.unit] += held.bytes
    level = most = 0
    for index, unit in enumerate(program.profile.units):
        lean = min(unit.forms, key=lambda form: (form.kept_bytes, form.forward_peak_bytes))
        brought = sum(
            max(0, state.whole.parameter_bytes - there)
            for state, there in zip(program.states, buffers, strict=True)
            if index in state.whole.used_by and not state.decision.is_persistent
        )
        most = max(most, level + lean.forward_peak_bytes + brought)
        level += lean.kept_bytes
    return standing + most


def _gone_at(program: Program) -> dict[int, int]:
    """The first slot that waits for each move, by itself or a later piece of its chunk."""
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


def _room(move: Move, state: StateOption) -> int:
    """Bytes that an arrival allocates; a rank's shard is read into the gather buffer."""
    if move.kind == "swap in":
        return move.bytes
    if move.kind == "all-gather" and state.fetches:
        return 0  # allocated by the fetch before
    sizes = state.whole.each_parameters
    held = pieces_in(sizes, move.share)
    if state.from_disk and move.lane.tier == "disk":
        near = state.fetches[0].pieces[held.start : held.stop]
        if any(near):
            return 0  # or by the fetch from host memory
    return sum(sizes[held.start : held.stop])


def _held_until_moved(move: Move, state: StateOption) -> int:
    """Device bytes live until the move ends."""
    if move.kind in ("swap out", "spill gradients", "reduce-scatter"):
        return move.bytes
    if move.kind != "write states" or not (leaving := state.in_place):
        return 0
    if state.scattered:  # the gradients' shard waits for the update's last piece
        return leaving.held if move.stop == state.own.num_parameters else 0
    held = pieces_in(leaving.pieces, move.share)
    return sum(leaving.held_pieces[held.start : held.stop])


def device_bytes(program: BoundProgram) -> tuple[SlotBytes, ...]:
    """Upper bounds of device bytes in each slot; the last entry is the device's update."""
    kinds: list[dict[LiveRangeKind, int]] = [{} for _ in range(len(program.slots) + 1)]
    for held in live_ranges(program):
        for slot in range(held.first, held.last + 1):
            by_kind = kinds[slot]
            by_kind[held.kind] = by_kind.get(held.kind, 0) + held.bytes
    return tuple(SlotBytes(by_kind) for by_kind in kinds)


def device_totals(program: BoundProgram) -> list[int]:
    """The sums of `device_bytes`, sooner."""
    change = [0] * (len(program.slots) + 2)
    for held in live_ranges(program):
        change[held.first] += held.bytes
        change[held.last + 1] -= held.bytes
    return list(accumulate(change[:-1]))


def peak_bytes(program: BoundProgram, slots: Sequence[SlotBytes] | None = None) -> TierBytes:
    """A step's peak on each tier; `slots` are its `device_bytes`, if known."""
    device = program.profile.hardware.device
    there = {tier.name for tier in program.profile.hardware.tiers}
    return TierBytes(
        device=max(slot.total for slot in slots or device_bytes(program)),
        context=device.context_bytes,
        allocator=device.allocator_bytes,
        host=program.tier_bytes("host") if "host" in there else 0,
        disk=program.tier_bytes("disk") if "disk" in there else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Bytes over the prediction, and where: `the device's tensors in the backward of layers.3`."""

    where: str
    predicted_bytes: int
    measured_bytes: int

    def __str__(self) -> str:
        predicted, measured = format_bytes(self.predicted_bytes), format_bytes(self.measured_bytes)
        more = format_bytes(self.measured_bytes - self.predicted_bytes)
        return f"{self.where}: {predicted} predicted, {measured} measured, {more} more"


def slot_name(plan: Plan, slot: int) -> str:
    """Name a slot: `backward of layers.3`, or `the update on the device`."""
    the = "the " if slot == 2 * len(plan.units) else ""
    return the + slot_words(plan.units, slot)


def promised_bytes(plan: Plan, profile: Profile) -> tuple[int, ...]:
    """Predicted peaks of device tensors in every slot, and in the update after them."""
    return tuple(slot.total for slot in device_bytes(program_of(plan, profile)))


def exceeded(
    plan: Plan, measured: TierBytes, slots: Sequence[int], profile: Profile | None = None
) -> tuple[Excess, ...]:
    """A step's excesses over its plan's predictions, largest first.

    `slots` are measured bytes of device tensors in every slot and in the update; none or one if
    slots were not distinguished. Without the profile their highest is compared with the step's.
    Bytes of an allocator or a library are compared if `measured`.
    """
    promised, told_apart = plan.prediction.peak_bytes, len(slots) == 2 * len(plan.units) + 1
    compared: list[tuple[str, int, int]] = []
    if profile is not None and told_apart:
        of_slots = zip(promised_bytes(plan, profile), slots, strict=True)
        compared += [(slot_name(plan, slot), *pair) for slot, pair in enumerate(of_slots)]
    else:
        where = f", {slot_name(plan, slots.index(max(slots)))}" if told_apart else ""
        compared.append((f"the step's peak of tensors{where}", promised.device, measured.device))
    compared += [
        ("the process besides tensors", promised.context, measured.context),
        ("host memory", promised.host, measured.host),
        ("disk", promised.disk, measured.disk),
    ]
    found = [
        Excess(where=where, predicted_bytes=most, measured_bytes=size)
        for where, most, size in compared
        if size > most
    ]
    return tuple(sorted(found, key=lambda one: one.predicted_bytes - one.measured_bytes))
