"""From a plan's decisions to its programme: which moves, on which lanes, after what."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, assert_never

from protrain_plan.program import (
    ARRIVING_GRADIENTS,
    COLLECT,
    STAGING_PIECES,
    ChunkSize,
    Lane,
    Move,
    Program,
    Settings,
    Slot,
    gradient_home,
    num_pieces,
    padded,
    pieces_in,
    residencies,
    shard_of,
    shares,
    written_share,
)
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import (
    Buffer,
    Keep,
    Offload,
    Persistent,
    Recompute,
    StateTier,
    Swap,
    SwapInput,
    UnitPlan,
)


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
        self.sharded = settings.num_devices > 1
        # What stands on the device while a chunk is there, and what this rank has of its states.
        self.whole = [padded(chunk, settings) for chunk in chunks] if self.sharded else chunks
        self.own = [shard_of(chunk, settings) for chunk in chunks] if self.sharded else chunks
        count = len(units)
        self.slots = [
            Slot(unit=min(t, 2 * count - 1 - t), forward=t < count) for t in range(2 * count)
        ]
        self.moves: list[Move] = []
        self.last: list[int] = []
        self.reduced: list[int] = []
        self.gathered: dict[tuple[int, int, float], int] = {}  # unit, slot served, share's start
        self.fetches: list[tuple[int, int, Move]] = []  # (slot to submit in, slot served, move)
        self.written: list[int] = []  # the "write states" moves so far, for the staging pool
        self.added: list[int] = []  # the "add gradients" moves so far, for the arriving buffers

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
            reduced=tuple(self.reduced),
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
        self, unit: int, tier: StateTier, served: int, earliest: int, lead: float
    ) -> None:
        own, whole = _parameter_pieces(self.own[unit]), _parameter_pieces(self.whole[unit])
        for slot, share in self._fetch_slots(served, earliest, lead):
            held = pieces_in(whole, share)
            if not held:
                continue
            if tier != "device":
                move = Move(
                    kind="gather",
                    unit=unit,
                    slot=served,
                    lane=Lane("fetch", tier),
                    bytes=sum(own[held.start : held.stop]),
                    share=share,
                )
                self.fetches.append((slot, served, move))
            if self.sharded:
                move = Move(
                    kind="all-gather",
                    unit=unit,
                    slot=served,
                    lane=COLLECT,
                    bytes=sum(whole[held.start : held.stop]),
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
        key = move.unit, move.slot, move.share[0]
        if move.kind == "all-gather" and key in self.gathered:
            move = move._replace(after=(self.gathered[key],))
        index = self._add(move)
        if move.kind == "gather":
            self.gathered[key] = index
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
        if not chunk.used_by or not chunk.num_parameters:
            return
        if self.sharded:
            self._add_reduced(index, slot)
            return
        if isinstance(plan.states, Persistent):
            return
        drain = plan.schedule.update_drain
        home = gradient_home(plan.states, self.settings)
        in_backward = self.updating and self.settings.updates == "in backward"
        match home:
            case "in place":
                if in_backward:
                    writes = self._add_updates(index, unit, slot.finish, plan.states, ())
                    self._drain_in_place(unit, index, writes, drain)
            case "device":
                pass
            case "host" | "disk":
                spills = self._add_spills(index, slot, home)
                if in_backward:
                    self._add_updates(index, unit, slot.finish, plan.states, spills)
            case _:
                assert_never(home)

    def _add_reduced(self, index: int, slot: Slot) -> None:
        """The sum of a chunk's gradients over all ranks, and on to the optimizer.

        What the micro-batches before the last add up stays as it is on each rank.
        """
        if not self.updating:
            return
        unit, plan = slot.unit, self.units[slot.unit]
        if isinstance(plan.states, Persistent):
            num_bytes = self.chunks[unit].gradient_bytes
            move = Move(kind="all-reduce", unit=unit, slot=index, lane=COLLECT, bytes=num_bytes)
            self.reduced.append(self._add(move))
            slot.finish.append(self.reduced[-1])
            return
        whole, own = _gradient_pieces(self.whole[unit]), _gradient_pieces(self.own[unit])
        home = gradient_home(plan.states, self.settings)
        arrived: list[int] = []
        longest: int | None = 0
        for slots, share in _drain_shares(plan.schedule.update_drain):
            held = pieces_in(whole, share)
            if not held:
                continue
            move = Move(
                kind="reduce-scatter",
                unit=unit,
                slot=index,
                lane=COLLECT,
                bytes=sum(whole[held.start : held.stop]),
                share=share,
            )
            arrived.append(self._add(move))
            self.reduced.append(arrived[-1])
            slot.finish.append(arrived[-1])
            self._drain(arrived[-1], index, slots)
            longest = slots
            if home == "host":
                move = Move(
                    kind="spill gradients",
                    unit=unit,
                    slot=index,
                    lane=Lane("spill", home),
                    bytes=sum(own[held.start : held.stop]),
                    after=(arrived[-1],),
                    share=share,
                )
                arrived[-1] = self._add(move)
                slot.finish.append(arrived[-1])
                self._drain(arrived[-1], index, slots)
        if plan.states.tier != "device" and self.settings.updates == "in backward":
            ends = self._add_updates(index, unit, slot.finish, plan.states, tuple(arrived))
            if home == "device":  # the shard of the gradients has left with the last piece
                self._drain(ends[-1], index, longest)

    def _add_last(self, unit: int) -> None:
        """The update of a chunk that waited for the end of backward."""
        plan, chunk = self.units[unit], self.chunks[unit]
        if not chunk.used_by or not chunk.num_parameters or isinstance(plan.states, Persistent):
            return
        if plan.states.tier == "device":
            return
        index = 2 * len(self.units) - 1 - unit
        self._add_updates(index, unit, self.last, plan.states, ())

    def _add_swap_out(self, index: int, slot: Slot, tier: TierName) -> None:
        unit, schedule = slot.unit, self.units[slot.unit].schedule
        served = 2 * len(self.units) - 1 - unit
        # What comes back needs its room again: the way out ends before that, and no way back has to
        # wait for it once more.
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

    def _add_spills(self, index: int, slot: Slot, home: Literal["host", "disk"]) -> tuple[int, ...]:
        """The way of a chunk's gradients to where they wait; returns the moves."""
        unit, chunk = slot.unit, self.chunks[slot.unit]
        sizes = chunk.gradient_pieces or (chunk.gradient_bytes,)
        spills: list[int] = []
        # The buffer that they arrive in is free again when the gradients that had it are added.
        rooms_are_full = len(self.added) >= ARRIVING_GRADIENTS
        free = (self.added[-ARRIVING_GRADIENTS],) if rooms_are_full else ()
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
                after=free,
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
            self.added += spills
            slot.finish += spills
        return tuple(spills)

    def _add_updates(
        self,
        index: int,
        unit: int,
        into: list[int],
        states: Offload | Buffer,
        gradients: tuple[int, ...],
    ) -> list[int]:
        """Reads, steps and writes a chunk's states piece by piece; returns the ends of pieces.

        `gradients` are the moves that bring them to the optimizer.
        """
        chunk, tier = self.own[unit], states.tier
        assert tier != "device", "updated with the persistent chunks"
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


def _parameter_pieces(chunk: ChunkSize) -> tuple[int, ...]:
    return chunk.parameter_pieces or (chunk.parameter_bytes,)


def _gradient_pieces(chunk: ChunkSize) -> tuple[int, ...]:
    return chunk.gradient_pieces or (chunk.gradient_bytes,)


def _drain_shares(drain: float | None) -> list[tuple[int | None, tuple[float, float]]]:
    """The drains of what leaves first and of the rest, in whole slots, with their shares."""
    if drain is None:
        return [(None, (0.0, 1.0))]
    whole, rest = shares(drain)
    if not rest:
        return [(whole, (0.0, 1.0))]
    return [(whole, (0.0, 1.0 - rest)), (whole + 1, (1.0 - rest, 1.0))]
