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

After the last slot the device updates the persistent chunks. Where offloaded chunks are updated
after backward, all moves end first (clipping needs the norm of all gradients), and the `last` moves
enter their lanes when that update begins.

A lane runs its moves one at a time in the order in which they were submitted; a move starts when
the moves in `after` have ended. Every move waits only for moves submitted before it, so no order
of events can deadlock. Since each wait is stated here and none depends on a clock, the bytes that
can stand on the device in a slot do not depend on how fast the lanes are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import floor
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
    Updates,
)

MoveKind = Literal[
    "gather",  # a chunk's parameters to the device
    "swap in",  # a unit's swapped activations back to the device
    "swap out",  # a unit's activations off the device
    "spill gradients",  # a chunk's gradients to where its optimizer runs
    "add gradients",  # to those of the micro-batches before
    "read states",  # a piece of optimizer states from disk to where the optimizer runs
    "update",  # the optimizer's step on a piece
    "write states",  # the piece's new parameters and states to disk
]
Direction = Literal["fetch", "read", "spill", "write", "update"]

STAGING_PIECES = 3
"""Pieces of optimizer states in memory at once: one being read, one updated, one written."""

PIECE_ALIGNMENT = 64
"""Within a parameter, pieces are cut at multiples of this many elements. Fused CPU optimizers
finish a range that is no multiple of the vector width in scalar code, which may round otherwise;
64 elements cover the widest vectors, so that every element meets the code it would meet uncut."""


class Lane(NamedTuple):
    """A lane beside compute: transfers to or from a tier, or the host's optimizer on its chunks.

    What compute waits for is fetched and spilled on lanes of its own; "read" and "write" carry
    optimizer states, of which there is so much that nothing should stand behind them in a queue.
    Updates of chunks on disk wait for their states, those of chunks in host memory do not: they
    have a lane each, too.
    """

    direction: Direction
    tier: TierName

    def __str__(self) -> str:
        return f"{self.direction} {self.tier}"


MAX_PIECES = 8
"""Pieces that a chunk's parameters, or a unit's swapped activations, move in at most. A decoder
block has about as many large tensors, and tensors are not cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What holds for a whole step: the machine's kind, and how the optimizer runs.

    piece_bytes    optimizer states move and are updated in pieces of at most this size
    updates        of offloaded chunks: while backward goes on, or after it (clipping)
    micro_batches  forwards and backwards per update
    """

    device: DeviceKind
    piece_bytes: int
    updates: Updates = "in backward"
    micro_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """Bytes of the chunk of states first used in a unit, and the units that read it.

    The pieces are the same bytes in groups of whole parameters (see `grouped`); empty: one group.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    num_parameters: int  # trainable
    used_by: tuple[int, ...]
    parameter_pieces: tuple[int, ...] = ()
    gradient_pieces: tuple[int, ...] = ()


class Move(NamedTuple):
    """One transfer or update. (Not a dataclass: searches make millions, and tuples are quick.)

    `start:stop` are the trainable parameters of a piece of states. `share` is the part of a
    chunk's or a unit's bytes that a gather, a swap or a spill moves; see `pieces_in`. That of
    "write states" after an update in place is the part of the chunk's parameters and gradients
    that leaves the device with it.
    """

    kind: MoveKind
    unit: int
    slot: int  # the slot that it serves (fetches), or that produced what it moves
    lane: Lane
    bytes: int | None  # None: the unit's swapped activations, known to the profile or at run time
    start: int = 0
    stop: int = 0
    after: tuple[int, ...] = ()
    share: tuple[float, float] = (0.0, 1.0)


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
    """The moves of one forward and backward, and the slots that they stand around.

    `updating` where an update follows: not in the micro-batches before the last, which end when
    every move has ended.
    """

    moves: tuple[Move, ...]
    slots: tuple[Slot, ...]
    last: tuple[int, ...]  # moves that are submitted when the device's update begins
    settings: Settings
    updating: bool

    @property
    def num_units(self) -> int:
        return len(self.slots) // 2

    def move_name(self, index: int) -> str:
        """A name that the simulated and the recorded timeline share."""
        move = self.moves[index]
        piece = f" [{move.start}:{move.stop}]" if move.stop else ""
        if move.share != (0.0, 1.0) and not move.stop:
            piece += f" ({move.share[0]:g}-{move.share[1]:g})"
        return f"{move.kind} {move.unit} @{move.slot}{piece}"


def grouped(sizes: Sequence[int]) -> list[range]:
    """Consecutive tensors in at most MAX_PIECES groups of about equal bytes, by their indices."""
    total, groups = sum(sizes), list[range]()
    first = done = 0
    for index, size in enumerate(sizes):
        done += size
        # The group ends with the tensor that brings it to its share of what is left, the last group
        # with the last tensor (which may be empty).
        left = MAX_PIECES - len(groups)
        full = left > 1 and done >= (total - sum(sizes[:first])) / left
        if full or index == len(sizes) - 1:
            groups.append(range(first, index + 1))
            first, done = index + 1, 0
    return groups


def pieces_in(sizes: Sequence[int], share: tuple[float, float]) -> range:
    """The pieces that lie in a share of the bytes, first to last; a cut one is in the later share.

    So the shares (0, f) and (f, 1) hold every piece once.
    """
    return range(_pieces_before(sizes, share[0]), _pieces_before(sizes, share[1]))


def _pieces_before(sizes: Sequence[int], fraction: float) -> int:
    if fraction <= 0:
        return 0
    if fraction >= 1:
        return len(sizes)
    limit, done = fraction * sum(sizes) * (1 + 1e-9), 0
    for index, size in enumerate(sizes):
        done += size
        if done > limit:
            return index
    return len(sizes)


def shares(slots: float) -> tuple[int, float]:
    """A lead or drain as whole slots, and the fraction of the bytes that has one slot more."""
    whole = floor(slots)
    return whole, slots - whole


PAGE_BYTES = 4096


def pinned_bytes(num_bytes: int) -> int:
    """What a pinned host buffer takes: whole pages of the operating system."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


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


GradientHome = Literal["in place", "device", "host", "disk"]


def gradient_home(states: Offload | Buffer, settings: Settings) -> GradientHome:
    """Where the gradients of an offloaded chunk wait for its update, after the chunk's backward.

    host       in host memory, where the optimizer runs (and where micro-batches add up)
    in place   on the device with the parameters: of a CPU machine's chunk on disk, whose optimizer
               runs in the device's memory. There it is one chain: read states, update, write.
    disk       on disk, if that update comes after backward
    device     on the device, if it comes after backward and micro-batches add up there
    """
    if not (settings.device == "cpu" and states.tier == "disk"):
        return "host"
    if settings.updates == "in backward":
        return "in place"
    return "disk" if settings.micro_batches == 1 else "device"


def written_share(chunk: ChunkSize, start: int, stop: int) -> tuple[float, float]:
    """The part of a chunk's parameters that no later piece needs, once `start:stop` is written."""
    sizes = chunk.parameter_pieces or (chunk.parameter_bytes,)
    gradients = chunk.gradient_pieces or (chunk.gradient_bytes,)
    ends = [done * chunk.num_parameters for done in accumulate(gradients)]
    total, fractions = sum(sizes), []
    for element in (start, stop):
        past = sum(end <= element * chunk.gradient_bytes for end in ends[:-1])
        fractions.append(sum(sizes[:past]) / total if total else 0.0)
    return (fractions[0] if start else 0.0, 1.0 if stop == chunk.num_parameters else fractions[1])


def num_pieces(chunk: ChunkSize, piece_bytes: int) -> int:
    """In how many pieces a chunk's states are read, updated and written."""
    return max(1, -(-max(chunk.state_bytes, chunk.parameter_bytes) // piece_bytes))


def compile_plan(
    units: Sequence[UnitPlan],
    chunks: Sequence[ChunkSize],
    settings: Settings,
    *,
    updating: bool = True,
) -> Program:
    """The programme that `units` imply for chunks of the given sizes.

    Without `updating`, that of a micro-batch before the last.
    """
    return _Compiler(units, chunks, settings, updating=updating).compile()


class _Compiler:
    def __init__(
        self,
        units: Sequence[UnitPlan],
        chunks: Sequence[ChunkSize],
        settings: Settings,
        *,
        updating: bool,
    ) -> None:
        self.units, self.chunks = units, chunks
        self.settings, self.updating = settings, updating
        count = len(units)
        self.slots = [
            Slot(unit=min(t, 2 * count - 1 - t), forward=t < count) for t in range(2 * count)
        ]
        self.moves: list[Move] = []
        self.last: list[int] = []
        self.fetches: list[tuple[int, int, Move]] = []  # (slot to submit in, slot served, move)
        self.written: list[int] = []  # the "write states" moves so far, for the staging pool
        self.swapped_out: dict[int, list[int]] = {}  # unit -> its "swap out" moves

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
        if self.updating and self.settings.updates == "after backward":
            for unit in reversed(range(len(self.units))):
                self._add_last(unit)
        return Program(
            moves=tuple(self.moves),
            slots=tuple(self.slots),
            last=tuple(self.last),
            settings=self.settings,
            updating=self.updating,
        )

    # Fetches

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
                    self._plan_gather(unit, states.tier, stay.first, earliest, lead)
                    earliest = stay.last + 1
                    final = stay.last == 2 * count - 1 - chunk.used_by[0]
                    if not (final and self._in_place(unit)):
                        self.slots[stay.last].release.append(unit)
            case _:
                pass
        match plan.activations:
            case Keep() | Recompute():
                pass
            case Swap(tier=tier) | SwapInput(tier=tier):
                served, lane = 2 * count - 1 - unit, Lane("fetch", tier)
                for slot, share in self._fetch_slots(served, unit + 1, plan.schedule.swap_lead):
                    move = Move(
                        kind="swap in", unit=unit, slot=served, lane=lane, bytes=None, share=share
                    )
                    self.fetches.append((slot, served, move))
            case _:
                assert_never(plan.activations)

    def _plan_gather(
        self, unit: int, tier: TierName, served: int, earliest: int, lead: float
    ) -> None:
        sizes = self.chunks[unit].parameter_pieces or (self.chunks[unit].parameter_bytes,)
        for slot, share in self._fetch_slots(served, earliest, lead):
            held = pieces_in(sizes, share)
            if not held:
                continue
            move = Move(
                kind="gather",
                unit=unit,
                slot=served,
                lane=Lane("fetch", tier),
                bytes=sum(sizes[held.start : held.stop]),
                share=share,
            )
            self.fetches.append((slot, served, move))

    def _fetch_slots(
        self, served: int, earliest: int, lead: float
    ) -> list[tuple[int, tuple[float, float]]]:
        """The slots that submit a fetch, with the share of its bytes that each one submits."""
        whole, cut = shares(lead)
        early, late = max(earliest, served - whole - 1), max(earliest, served - whole)
        if not cut or early == late:
            return [(late, (0.0, 1.0))]
        return [(early, (0.0, cut)), (late, (cut, 1.0))]

    def _add_fetch(self, move: Move) -> int:
        if move.kind == "swap in":
            move = move._replace(after=tuple(self.swapped_out[move.unit]))
        index = self._add(move)
        self.slots[move.slot].ready.append(index)
        return index

    def _add(self, move: Move) -> int:
        self.moves.append(move)
        return len(self.moves) - 1

    # What leaves after a slot

    def _add_finish(self, index: int, slot: Slot) -> None:
        """The moves that carry away what the slot produced."""
        unit, plan = slot.unit, self.units[slot.unit]
        if slot.forward:
            match plan.activations:
                case Keep() | Recompute():
                    pass
                case Swap(tier=tier) | SwapInput(tier=tier):
                    self._add_swap_out(index, slot, tier)
                case _:
                    assert_never(plan.activations)
            return
        chunk = self.chunks[unit]
        if not chunk.used_by or not chunk.num_parameters or isinstance(plan.states, Persistent):
            return
        drain = plan.schedule.update_drain
        home = gradient_home(plan.states, self.settings)
        in_backward = self.updating and self.settings.updates == "in backward"
        match home:
            case "in place":
                if in_backward:
                    writes = self._add_updates(index, unit, slot.finish, plan.states.tier, ())
                    self._drain_in_place(unit, index, writes, drain)
            case "device":
                pass
            case "host" | "disk":
                spills = self._add_spills(index, slot, home)
                if in_backward:
                    self._add_updates(index, unit, slot.finish, plan.states.tier, spills)
            case _:
                assert_never(home)

    def _add_last(self, unit: int) -> None:
        """The update of a chunk that waited for the end of backward."""
        plan, chunk = self.units[unit], self.chunks[unit]
        if not chunk.used_by or not chunk.num_parameters or isinstance(plan.states, Persistent):
            return
        index = 2 * len(self.units) - 1 - unit
        self._add_updates(index, unit, self.last, plan.states.tier, ())

    def _add_swap_out(self, index: int, slot: Slot, tier: TierName) -> None:
        unit, schedule = slot.unit, self.units[slot.unit].schedule
        served = 2 * len(self.units) - 1 - unit
        # What comes back needs its room again: the way out ends before that.
        first_in = self._fetch_slots(served, unit + 1, schedule.swap_lead)[0][0]
        latest = first_in - index - 1
        drain = schedule.swap_drain
        drain = latest if drain is None else min(drain, latest)
        moves: list[int] = []
        for slots, share in _drain_shares(drain):
            move = Move(
                kind="swap out",
                unit=unit,
                slot=index,
                lane=Lane("spill", tier),
                bytes=None,
                share=share,
            )
            moves.append(self._add(move))
            self._drain(moves[-1], index, slots)
        slot.finish += moves
        self.swapped_out[unit] = moves

    def _add_spills(self, index: int, slot: Slot, home: Literal["host", "disk"]) -> tuple[int, ...]:
        """The way of a chunk's gradients to where they wait; returns the moves."""
        unit, chunk = slot.unit, self.chunks[slot.unit]
        sizes = chunk.gradient_pieces or (chunk.gradient_bytes,)
        spills: list[int] = []
        for slots, share in _drain_shares(self.units[unit].schedule.update_drain):
            held = pieces_in(sizes, share)
            if not held:
                continue
            # On a machine with a disk tier, the way down to the host is the host tier's link.
            move = Move(
                kind="spill gradients",
                unit=unit,
                slot=index,
                lane=Lane("spill", home),
                bytes=sum(sizes[held.start : held.stop]),
                share=share,
            )
            spills.append(self._add(move))
            self._drain(spills[-1], index, slots)
        slot.finish += spills
        if self.settings.micro_batches > 1:
            add = Move(
                kind="add gradients",
                unit=unit,
                slot=index,
                lane=Lane("update", "host"),
                bytes=0,
                stop=chunk.num_parameters,
                after=tuple(spills),
            )
            spills = [self._add(add)]
            slot.finish += spills
        return tuple(spills)

    def _add_updates(
        self, index: int, unit: int, into: list[int], tier: TierName, gradients: tuple[int, ...]
    ) -> list[int]:
        """Reads, steps and writes a chunk's states piece by piece; returns the ends of pieces.

        `gradients` are the moves that bring them to the optimizer.
        """
        chunk, states = self.chunks[unit], self.units[unit].states
        assert not isinstance(states, Persistent)
        home = gradient_home(states, self.settings)
        on_disk = tier == "disk"
        ends: list[int] = []
        for start, stop in self._update_ranges(chunk, on_disk=on_disk):
            state_bytes = chunk.state_bytes * stop // chunk.num_parameters
            state_bytes -= chunk.state_bytes * start // chunk.num_parameters
            # Trainable parameters are as many bytes as their gradients.
            parameter_bytes = chunk.gradient_bytes * stop // chunk.num_parameters
            parameter_bytes -= chunk.gradient_bytes * start // chunk.num_parameters
            after = gradients
            if on_disk:
                read = state_bytes
                if home != "in place":
                    read += parameter_bytes
                if home == "disk":
                    read += parameter_bytes  # the gradients
                # The staging buffer is free again when the piece that had it is written.
                ring_is_full = len(self.written) >= STAGING_PIECES
                free = (self.written[-STAGING_PIECES],) if ring_is_full else ()
                move = Move(
                    kind="read states",
                    unit=unit,
                    slot=index,
                    lane=Lane("read", tier),
                    bytes=read,
                    start=start,
                    stop=stop,
                    after=free,
                )
                after = (*gradients, self._add(move))
                into.append(after[-1])
            move = Move(
                kind="update",
                unit=unit,
                slot=index,
                lane=Lane("update", tier),
                bytes=0,
                start=start,
                stop=stop,
                after=after,
            )
            ends.append(self._add(move))
            into.append(ends[-1])
            if on_disk:
                move = Move(
                    kind="write states",
                    unit=unit,
                    slot=index,
                    lane=Lane("write", tier),
                    bytes=state_bytes + parameter_bytes,
                    start=start,
                    stop=stop,
                    after=(ends[-1],),
                    share=written_share(chunk, start, stop) if home == "in place" else (0.0, 0.0),
                )
                ends[-1] = self._add(move)
                self.written.append(ends[-1])
                into.append(ends[-1])
        return ends

    def _update_ranges(self, chunk: ChunkSize, *, on_disk: bool) -> list[tuple[int, int]]:
        pieces = num_pieces(chunk, self.settings.piece_bytes) if on_disk else 1
        bounds = [chunk.num_parameters * n // pieces for n in range(pieces + 1)]
        return list(pairwise(bounds))

    def _drain_in_place(
        self, unit: int, index: int, writes: Sequence[int], drain: float | None
    ) -> None:
        """Parameters and gradients leave with the writes that cover them."""
        sizes = self.chunks[unit].parameter_pieces or (self.chunks[unit].parameter_bytes,)
        for slots, (_, past) in _drain_shares(drain):
            gone = len(pieces_in(sizes, (0.0, past)))
            covering = (n for n in writes if len(self._written(n, sizes)) >= gone)
            if gone:
                self._drain(next(covering), index, slots)

    def _written(self, number: int, sizes: Sequence[int]) -> range:
        """The pieces that have left when a "write states" has ended."""
        return pieces_in(sizes, (0.0, self.moves[number].share[1]))

    def _in_place(self, unit: int) -> bool:
        """Whether the chunk's parameters wait on the device for their update."""
        states = self.units[unit].states
        return (
            not isinstance(states, Persistent)
            and gradient_home(states, self.settings) == "in place"
            and self.chunks[unit].num_parameters > 0
            and self.updating
        )

    def _drain(self, move: int, produced: int, drain: int | None) -> None:
        if drain is None:
            return
        slot = produced + drain + 1
        if slot < len(self.slots):
            self.slots[slot].drained.append(move)


def _drain_shares(drain: float | None) -> list[tuple[int | None, tuple[float, float]]]:
    """The drains of what leaves first and of the rest, in whole slots, with their shares."""
    if drain is None:
        return [(None, (0.0, 1.0))]
    whole, rest = shares(drain)
    if not rest:
        return [(whole, (0.0, 1.0))]
    return [(whole, (0.0, 1.0 - rest)), (whole + 1, (1.0 - rest, 1.0))]
