"""A plan compiled: the ordered moves of one training step, on named lanes, with what they wait for.

The simulator reads a `Program` with a profile's durations; the runtime executes the same one. Unit
u of U computes in slot u (forward) and in slot 2U - 1 - u (backward).

What happens around a slot, in this order, in both readers:

1. the `drained` moves have ended: their bytes have left the device;
2. the `submit` moves (fetches) enter their lanes;
3. the `ready` moves have ended: what the slot reads is on the device;
4. the slot computes;
5. the chunks in `release` leave the device, and the `finish` moves (what the slot produced) enter
   their lanes.

A lane runs its moves one at a time in the order in which they were submitted; a move starts when
the moves in `after` have ended. Every move waits only for moves submitted before it, so no order
of events can deadlock. Since each wait is stated here and none depends on a clock, the bytes that
can stand on the device in a slot do not depend on how fast the lanes are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, assert_never

from protrain_plan.records.hardware import DeviceKind, TierName
from protrain_plan.records.plan import (
    Buffer,
    Keep,
    Offload,
    Persistent,
    Recompute,
    Swap,
    SwapInput,
    UnitPlan,
)

MoveKind = Literal[
    "gather",  # a chunk's parameters to the device
    "swap in",  # a unit's swapped activations back to the device
    "swap out",  # a unit's activations off the device
    "spill gradients",  # a chunk's gradients to where its optimizer runs
    "read states",  # a piece of optimizer states from disk to where the optimizer runs
    "update",  # the optimizer's step on a piece
    "write states",  # the piece's new parameters and states to disk
]
Direction = Literal["fetch", "spill", "update"]

STAGING_PIECES = 3
"""Pieces of optimizer states in memory at once: one being read, one updated, one written."""

PIECE_ALIGNMENT = 64
"""Within a parameter, pieces are cut at multiples of this many elements. Fused CPU optimizers
finish a range that is no multiple of the vector width in scalar code, which may round otherwise;
64 elements cover the widest vectors, so that every element meets the code it would meet uncut."""


class Lane(NamedTuple):
    """A lane beside compute: transfers to or from a tier, or the optimizer on the host."""

    direction: Direction
    tier: TierName | None

    def __str__(self) -> str:
        return self.direction if self.tier is None else f"{self.direction} {self.tier}"


UPDATE = Lane("update", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """Bytes of the chunk of states first used in a unit, and the units that read it."""

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    num_parameters: int  # trainable
    used_by: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One transfer or update. `start:stop` are the trainable parameters of a piece."""

    kind: MoveKind
    unit: int
    slot: int  # the slot that it serves (fetches), or that produced what it moves
    lane: Lane
    bytes: int | None  # None: the unit's swapped activations, known to the profile or at run time
    start: int = 0
    stop: int = 0
    after: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Slot:
    """One compute step and the moves around it, as indices into `Program.moves`."""

    unit: int
    forward: bool
    drained: list[int] = field(default_factory=list[int])
    submit: list[int] = field(default_factory=list[int])
    ready: list[int] = field(default_factory=list[int])
    release: list[int] = field(default_factory=list[int])  # units whose chunk buffer goes
    finish: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The moves of one step and the slots that they stand around.

    After the last slot the persistent chunks are updated on the device, and the step ends when
    every move has ended.
    """

    moves: tuple[Move, ...]
    slots: tuple[Slot, ...]

    @property
    def num_units(self) -> int:
        return len(self.slots) // 2

    def move_name(self, index: int) -> str:
        """A name that the simulated and the recorded timeline share."""
        move = self.moves[index]
        piece = f" [{move.start}:{move.stop}]" if move.stop else ""
        return f"{move.kind} {move.unit} @{move.slot}{piece}"


def use_slots(used_by: Sequence[int], num_units: int) -> list[int]:
    """The slots that read a chunk, in order: forward of its users, then their backward."""
    return [*used_by, *(2 * num_units - 1 - unit for unit in reversed(used_by))]


class Residency(NamedTuple):
    """One stay of a chunk's parameters on the device, from its gather to its release."""

    first: int  # the slot that the gather serves
    last: int  # the last slot before the release


def residencies(
    states: Offload | Buffer, used_by: Sequence[int], num_units: int
) -> list[Residency]:
    """When an offloaded chunk stands on the device.

    O: for each run of consecutive slots that read it. B: from the first use to the last.
    """
    slots = use_slots(used_by, num_units)
    match states:
        case Buffer():
            return [Residency(slots[0], slots[-1])]
        case Offload():
            stays = [Residency(slots[0], slots[0])]
            for slot in slots[1:]:
                if slot == stays[-1].last + 1:
                    stays[-1] = Residency(stays[-1].first, slot)
                else:
                    stays.append(Residency(slot, slot))
            return stays
        case _:
            assert_never(states)


def updated_in_place(states: Offload | Buffer, device: DeviceKind) -> bool:
    """Whether a chunk is updated where the device computed its gradients.

    So it is on a CPU machine for a chunk on disk: host memory is the device's memory. The
    parameters then wait on the device for the update instead of being released.
    """
    return device == "cpu" and states.tier == "disk"


def num_pieces(chunk: ChunkSize, piece_bytes: int) -> int:
    """In how many pieces a chunk's states are read, updated and written."""
    return max(1, -(-max(chunk.state_bytes, chunk.parameter_bytes) // piece_bytes))


def compile_plan(
    units: Sequence[UnitPlan],
    chunks: Sequence[ChunkSize],
    *,
    device: DeviceKind,
    piece_bytes: int,
) -> Program:
    """The programme that `units` imply for chunks of the given sizes."""
    return _Compiler(units, chunks, device, piece_bytes).compile()


class _Compiler:
    def __init__(
        self,
        units: Sequence[UnitPlan],
        chunks: Sequence[ChunkSize],
        device: DeviceKind,
        piece_bytes: int,
    ) -> None:
        self.units, self.chunks = units, chunks
        self.device: DeviceKind = device
        self.piece_bytes = piece_bytes
        count = len(units)
        self.slots = [
            Slot(unit=min(t, 2 * count - 1 - t), forward=t < count) for t in range(2 * count)
        ]
        self.moves: list[Move] = []
        self.fetches: list[tuple[int, int, Move]] = []  # (slot to submit in, slot served, move)
        self.written: list[int] = []  # the "write states" moves so far, for the staging pool
        self.swapped_out: dict[int, int] = {}  # unit -> its "swap out" move

    def compile(self) -> Program:
        for unit in range(len(self.units)):
            self._plan_fetches(unit)
        # Among the fetches that one slot submits, the one needed first goes first.
        self.fetches.sort(key=lambda fetch: fetch[:2])
        pending = iter([*self.fetches, None])
        fetch = next(pending)
        for index, slot in enumerate(self.slots):
            while fetch is not None and fetch[0] == index:
                slot.submit.append(self._add_fetch(fetch[2]))
                fetch = next(pending)
            self._add_finish(index, slot)
        return Program(moves=tuple(self.moves), slots=tuple(self.slots))

    def _plan_fetches(self, unit: int) -> None:
        plan, chunk, count = self.units[unit], self.chunks[unit], len(self.units)
        match plan.states:
            case Persistent():
                pass
            case Offload() | Buffer() as states if chunk.used_by:
                earliest = 0  # a chunk is not fetched again before its last stay has ended
                for stay in residencies(states, chunk.used_by, count):
                    forward = stay.first < count
                    schedule = plan.schedule
                    lead = schedule.forward_lead if forward else schedule.backward_lead
                    move = Move(
                        kind="gather",
                        unit=unit,
                        slot=stay.first,
                        lane=Lane("fetch", states.tier),
                        bytes=chunk.parameter_bytes,
                    )
                    self.fetches.append((max(earliest, stay.first - lead), stay.first, move))
                    earliest = stay.last + 1
                    in_place = updated_in_place(states, self.device) and chunk.num_parameters
                    final = stay.last == 2 * count - 1 - chunk.used_by[0]
                    if not (final and in_place):
                        self.slots[stay.last].release.append(unit)
            case _:
                pass
        match plan.activations:
            case Keep() | Recompute():
                pass
            case Swap(tier=tier) | SwapInput(tier=tier):
                served = 2 * count - 1 - unit
                move = Move(
                    kind="swap in", unit=unit, slot=served, lane=Lane("fetch", tier), bytes=None
                )
                self.fetches.append((self._swap_in_slot(unit), served, move))
            case _:
                assert_never(plan.activations)

    def _swap_in_slot(self, unit: int) -> int:
        """The slot that submits the way back of a unit's activations."""
        served = 2 * len(self.units) - 1 - unit
        return max(unit + 1, served - self.units[unit].schedule.swap_lead)

    def _add_fetch(self, move: Move) -> int:
        if move.kind == "swap in":
            move = Move(
                kind=move.kind,
                unit=move.unit,
                slot=move.slot,
                lane=move.lane,
                bytes=None,
                after=(self.swapped_out[move.unit],),
            )
        index = self._add(move)
        self.slots[move.slot].ready.append(index)
        return index

    def _add(self, move: Move) -> int:
        self.moves.append(move)
        return len(self.moves) - 1

    def _add_finish(self, index: int, slot: Slot) -> None:
        """The moves that carry away what the slot produced."""
        unit, plan = slot.unit, self.units[slot.unit]
        if slot.forward:
            match plan.activations:
                case Keep() | Recompute():
                    pass
                case Swap(tier=tier) | SwapInput(tier=tier):
                    lane = Lane("spill", tier)
                    move = self._add(
                        Move(kind="swap out", unit=unit, slot=index, lane=lane, bytes=None)
                    )
                    self.swapped_out[unit] = move
                    slot.finish.append(move)
                    # What comes back needs its room again: the way out ends before that.
                    drain = plan.schedule.swap_drain
                    latest = self._swap_in_slot(unit) - index - 1
                    self._drain(move, index, latest if drain is None else min(drain, latest))
                case _:
                    assert_never(plan.activations)
            return
        chunk = self.chunks[unit]
        if not chunk.used_by or not chunk.num_parameters or isinstance(plan.states, Persistent):
            return
        drain = plan.schedule.update_drain
        gradients_here: tuple[int, ...] = ()
        if not updated_in_place(plan.states, self.device):
            # On a machine with a disk tier, the way down to the host is the host tier's link.
            spill = self._add(
                Move(
                    kind="spill gradients",
                    unit=unit,
                    slot=index,
                    lane=Lane("spill", "host"),
                    bytes=chunk.gradient_bytes,
                )
            )
            slot.finish.append(spill)
            self._drain(spill, index, drain)
            gradients_here = (spill,)
        last = self._add_update(index, slot, plan.states.tier, gradients_here)
        if updated_in_place(plan.states, self.device):
            self._drain(last, index, drain)

    def _add_update(
        self, index: int, slot: Slot, tier: TierName, gradients_here: tuple[int, ...]
    ) -> int:
        """Reads, steps and writes a chunk's states piece by piece; returns the last move."""
        unit, chunk = slot.unit, self.chunks[slot.unit]
        pieces = num_pieces(chunk, self.piece_bytes) if tier == "disk" else 1
        bounds = [chunk.num_parameters * n // pieces for n in range(pieces + 1)]
        in_place = updated_in_place(Offload(tier=tier), self.device)
        last = -1
        for start, stop in pairwise(bounds):
            fraction = (stop - start) / chunk.num_parameters
            state_bytes = round(chunk.state_bytes * fraction)
            # In pure precision the trainable parameters are as many bytes as their gradients.
            parameter_bytes = round(chunk.gradient_bytes * fraction)
            read: tuple[int, ...] = ()
            if tier == "disk":
                # The staging buffer is free again when the piece that had it is written.
                ring_is_full = len(self.written) >= STAGING_PIECES
                free = (self.written[-STAGING_PIECES],) if ring_is_full else ()
                move = Move(
                    kind="read states",
                    unit=unit,
                    slot=index,
                    lane=Lane("fetch", tier),
                    bytes=state_bytes if in_place else state_bytes + parameter_bytes,
                    start=start,
                    stop=stop,
                    after=free,
                )
                read = (self._add(move),)
                slot.finish.append(read[0])
            move = Move(
                kind="update",
                unit=unit,
                slot=index,
                lane=UPDATE,
                bytes=0,
                start=start,
                stop=stop,
                after=gradients_here + read,
            )
            last = self._add(move)
            slot.finish.append(last)
            if tier == "disk":
                move = Move(
                    kind="write states",
                    unit=unit,
                    slot=index,
                    lane=Lane("spill", tier),
                    bytes=state_bytes + parameter_bytes,
                    start=start,
                    stop=stop,
                    after=(last,),
                )
                last = self._add(move)
                self.written.append(last)
                slot.finish.append(last)
        return last

    def _drain(self, move: int, produced: int, drain: int | None) -> None:
        if drain is None:
            return
        slot = produced + drain + 1
        if slot < len(self.slots):
            self.slots[slot].drained.append(move)
