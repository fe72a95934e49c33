"""Compile a plan's decisions to its program: moves, lanes and order."""

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.effects import (
    BoundProgram,
    Implications,
    StateOption,
    placed,
)
from protrain_runtime.contract.program.program import (
    ARRIVING_GRADIENTS,
    COLLECT,
    MAX_PIECES_OF_STATES,
    STAGING_PIECES,
    ChunkSize,
    Lane,
    Move,
    Program,
    Slot,
    parts,
    pieces_in,
    reads_gradients,
    residencies,
    shares,
    written_share,
)
from protrain_runtime.contract.program.requirements import check_step
from protrain_runtime.contract.records.hardware import DeviceKind
from protrain_runtime.contract.records.plan import Plan, StepSettings, UnitPlan
from protrain_runtime.contract.records.profile import Profile


def compile_plan(
    units: Sequence[UnitPlan],
    chunks: Sequence[ChunkSize],
    settings: StepSettings,
    *,
    device: DeviceKind,
    updating: bool = True,
    clipped: bool = False,
) -> Program:
    """The program of `units` for chunks of the runtime's sizes.

    Without `updating`, of an earlier micro-batch; with `clipped`, of a step that repeats its
    speculative updates. ProtrainError if it has too many pieces of states, or updates an incomplete
    gradient.
    """
    states = [
        placed(index, unit.states, chunk, len(units), settings, device)
        for index, (unit, chunk) in enumerate(zip(units, chunks, strict=True))
    ]
    swaps = [(0,)] * len(units)
    compiler = _Compiler(
        units, chunks, states, swaps, settings, device=device, updating=updating, clipped=clipped
    )
    return compiler.compile()


def bind(
    units: Sequence[UnitPlan],
    implications: Implications,
    *,
    updating: bool = True,
    clipped: bool = False,
) -> BoundProgram:
    """The program of `units` for a profile; otherwise as `compile_plan`."""
    activations = [implications.activations(n, unit.activations) for n, unit in enumerate(units)]
    states = [implications.states(n, unit.states) for n, unit in enumerate(units)]
    swaps = [option.swap_in.pieces if option.swap_in else () for option in activations]
    compiler = _Compiler(
        units,
        implications.chunks,
        states,
        swaps,
        implications.settings,
        device=implications.device,
        updating=updating,
        clipped=clipped,
    )
    program = compiler.compile()
    return BoundProgram(
        **{part.name: getattr(program, part.name) for part in fields(Program)},
        units=tuple(units),
        implications=implications,
        activations=tuple(activations),
        states=tuple(states),
    )


def program_of(plan: Plan, profile: Profile, *, clipped: bool = False) -> BoundProgram:
    """The program of a plan and its profile; `clipped`: it repeats speculative updates."""
    return bind(plan.units, Implications(profile, plan.settings), clipped=clipped)


class _Piece(NamedTuple):
    """A piece of an update: its parameters, bytes read and written; see `Move.share`."""

    start: int
    stop: int
    read: int
    write: int
    share: tuple[float, float]


class _Compiler:
    def __init__(
        self,
        units: Sequence[UnitPlan],
        chunks: Sequence[ChunkSize],
        states: Sequence[StateOption],
        swaps: Sequence[tuple[int, ...]],
        settings: StepSettings,
        *,
        device: DeviceKind,
        updating: bool,
        clipped: bool,
    ) -> None:
        pieces = sum(one.num_updates for one in states if one.write_bytes)
        if pieces > MAX_PIECES_OF_STATES:
            raise ProtrainError(
                f"optimizer states would move in {pieces} pieces, and {MAX_PIECES_OF_STATES} are"
                " the most",
                key="settings.piece_bytes",
                fix="larger pieces, such as of 8MiB",
            )
        check_step(units, settings)
        self.units, self.chunks, self.states, self.swaps = units, chunks, states, swaps
        self.settings, self.device = settings, device
        self.updating, self.clipped = updating, clipped
        self.in_backward = updating and settings.updates == "in backward"
        self.sharded = settings.group.num_devices > 1
        self.stay = self.sharded and not updating  # gradients add up in place
        self.end = 2 * len(units)
        self.slots = [
            Slot(unit=min(t, self.end - 1 - t), forward=t < len(units)) for t in range(self.end)
        ]
        self.moves: list[Move] = []
        self.last: list[int] = []
        self.reduced: list[int] = []
        self.fetches: list[list[Move]] = [[] for _ in self.slots]  # submitted by each slot
        # By whether the device updates: the "write states" moves so far, for the staging pool.
        self.written: dict[bool, list[int]] = {False: [], True: []}
        self.added: list[int] = []  # the "add gradients" moves so far, for the arriving buffers
        self.updates: dict[int, int] = {}  # by unit the last move of its update
        self.speculative: list[int] = []

    def compile(self) -> Program:
        for unit in range(len(self.units)):
            self._plan_fetches(unit)
        fetched: dict[tuple[int, int, float], int] = {}  # unit, slot served, start of share
        for index, slot in enumerate(self.slots):
            # The earliest needed goes first.
            for move in sorted(self.fetches[index], key=lambda fetch: fetch.slot):
                key = move.unit, move.slot, move.share[0]
                if move.kind == "all-gather" and key in fetched:
                    move = move._replace(after=(fetched[key],))
                number = self._add(move)
                if move.kind == "fetch":
                    fetched[key] = number
                self.slots[move.slot].ready.append(number)
                slot.submit.append(number)
            unit, plan = slot.unit, self.units[slot.unit]
            if not slot.forward:
                self._add_leaving(index, slot)
            elif plan.activations.tier:
                # The copy back needs its buffer again: the copy out ends before it, so no copy back
                # waits again.
                back = _fetch_slots(self.end - 1 - unit, unit + 1, plan.schedule.swap_lead)
                latest, drain = back[0][0] - index - 1, plan.schedule.swap_drain
                lane = Lane("spill", plan.activations.tier)
                for slots, share in _drain_shares(latest if drain is None else min(drain, latest)):
                    size = _share_bytes(self.swaps[unit], share)
                    self._leave(Move("swap out", unit, index, lane, size, share=share), slots)
        if self.updating:
            self._add_late_updates()
        if self.settings.overlap_steps:
            self._add_drains_before()
        return Program(
            moves=tuple(self.moves),
            slots=tuple(self.slots),
            last=tuple(self.last),
            device=self.device,
            settings=self.settings,
            updating=self.updating,
            reduced=tuple(self.reduced),
            updates=self.updates if self.settings.overlap_steps else {},
            speculative=frozenset(self.speculative),
        )

    # Fetches

    def _plan_fetches(self, unit: int) -> None:
        plan, chunk, placement = self.units[unit], self.chunks[unit], self.states[unit]
        if not plan.states.is_persistent and chunk.used_by:
            stays = residencies(plan.states, chunk.used_by, len(self.units))
            for number, stay in enumerate(stays):
                # The moves of the parameters: the rank's shard, then the rest.
                arriving = placement.arriving[number]
                served, schedule = arriving.slot, plan.schedule
                forward = served < len(self.units)
                lead = schedule.forward_lead if forward else schedule.backward_lead
                slots = _fetch_slots(served, arriving.earliest, lead)
                if placement.fetches and placement.gathers:
                    cut = parts(arriving.pieces)
                    slots = [(slot, part) for slot, share in slots for part in _within(share, cut)]
                for slot, share in slots:
                    # Whole pieces determine the shards' ends.
                    held = pieces_in(arriving.pieces, share)
                    for fetch in placement.fetched(number) if held else ():
                        size = sum(fetch.pieces[held.start : held.stop])
                        if size or not placement.from_disk:
                            lane = Lane("fetch", fetch.tier)
                            move = Move("fetch", unit, served, lane, size, share=share)
                            self.fetches[slot].append(move)
                    if held and placement.gathers:
                        size = sum(placement.gathers[number].pieces[held.start : held.stop])
                        if not size and plan.states.common_copy:
                            continue  # all of it has arrived
                        move = Move("all-gather", unit, served, COLLECT, size, share=share)
                        self.fetches[slot].append(move)
                # Chunks updated in place stay until written.
                final = stay.last == self.end - 1 - chunk.used_by[0]
                trained = self.updating and chunk.num_parameters > 0
                if not (final and trained and placement.home == "in place"):
                    self.slots[stay.last].release.append(unit)
        if plan.activations.tier:
            served, lane = self.end - 1 - unit, Lane("fetch", plan.activations.tier)
            for slot, share in _fetch_slots(served, unit + 1, plan.schedule.swap_lead):
                size = _share_bytes(self.swaps[unit], share)
                move = Move("swap in", unit, served, lane, size, share=share)
                self.fetches[slot].append(move)

    def _add(self, move: Move) -> int:
        self.moves.append(move)
        return len(self.moves) - 1

    # Evictions after a slot

    def _leave(self, move: Move, drain: int | None) -> int:
        """Submit a move after its slot; its bytes have left `drain` slots later."""
        number = self._add(move)
        self.slots[move.slot].finish.append(number)
        self._drain(number, move.slot, drain)
        return number

    def _drain(self, move: int, produced: int, drain: int | None) -> None:
        if drain is not None and produced + drain + 1 < self.end:
            self.slots[produced + drain + 1].drained.append(move)

    def _add_leaving(self, index: int, slot: Slot) -> None:
        """The moves of a chunk's gradients, and its update if in backward.

        On several devices, sums of earlier micro-batches stay: whole, or as shards to which later
        sums are added.
        """
        unit, chunk, placement = slot.unit, self.chunks[slot.unit], self.states[slot.unit]
        stays = self.stay and not (self.settings.adds_shards and placement.scattered)
        if not chunk.used_by or not chunk.num_parameters or stays:
            return
        if self.updating and placement.step_slot == index:
            slot.stepped.append(unit)
        if placement.summed_bytes:
            move = Move("all-reduce", unit, index, COLLECT, placement.summed_bytes)
            self.reduced.append(self._leave(move, None))
        drain = self.units[unit].schedule.update_drain
        arrived, longest = self._add_gradients(index, unit, drain)
        if self.updating and placement.decision.speculate:
            first = len(self.moves)
            self._add_updates(index, unit, slot.finish, arrived)
            self.speculative += range(first, len(self.moves))
            return
        late = self.units[unit].schedule.update_late
        if not self.in_backward or not placement.num_updates or late:
            return
        ends = self._add_updates(index, unit, slot.finish, arrived)
        if placement.home == "in place":
            # Parameters and gradients leave with the writes that cover them.
            sizes = chunk.each_parameters
            for slots, (_, past) in _drain_shares(drain):
                gone = len(pieces_in(sizes, (0.0, past)))
                covering = (
                    n for n in ends if len(pieces_in(sizes, (0.0, self.moves[n].share[1]))) >= gone
                )
                if gone:
                    self._drain(next(covering), index, slots)
        elif placement.home == "device":  # the shard of the gradients leaves with the last piece
            self._drain(ends[-1], index, longest)

    def _add_late_updates(self) -> None:
        """Updates after backward, in order of their next use.

        If steps do not overlap, in order of the gradients. A clipped step's repeats come last: its
        program begins like another step's.
        """
        order = list(range(len(self.units)))
        if not self.settings.overlap_steps:
            order.reverse()
        waiting = [unit for unit in order if not self.states[unit].decision.speculate]
        again = (
            [unit for unit in order if self.states[unit].decision.speculate] if self.clipped else []
        )
        for unit in (*waiting, *again):
            if not self.states[unit].num_updates:
                continue
            slot = self.end if unit in again else self.end - 1 - unit
            if not self.in_backward:
                self._add_updates(slot, unit, self.last, ())
            elif self.units[unit].schedule.update_late:
                spilled = (n for n in self.slots[slot].finish if self.moves[n].unit == unit)
                self._add_updates(slot, unit, self.slots[-1].finish, tuple(spilled))

    def _add_drains_before(self) -> None:
        """Drain in-place updates' buffers before the next step needs their memory."""
        gone = {number for slot in self.slots for number in slot.drained}
        for slot in self.slots[: len(self.units)]:
            for fetch in (self.moves[number] for number in slot.submit):
                last = self.updates.get(fetch.unit)
                if fetch.kind != "fetch" or self.states[fetch.unit].home != "in place":
                    continue
                if last is not None and last not in gone:
                    slot.drained_before.append(last)
                    gone.add(last)

    def _add_gradients(
        self, index: int, unit: int, drain: float | None
    ) -> tuple[tuple[int, ...], int | None]:
        """The way of a chunk's gradients to where they wait: its last moves, the longest drain."""
        placement = self.states[unit]
        leaving = placement.scattered or placement.gradients
        if not leaving:
            return (), 0
        # An arrival buffer is free once its previous gradients are added.
        rooms_are_full = len(self.added) >= ARRIVING_GRADIENTS
        free = (self.added[-ARRIVING_GRADIENTS],) if rooms_are_full else ()
        arrived: list[int] = []
        longest: int | None = 0
        for slots, share in _drain_shares(drain):
            held = pieces_in(leaving.pieces, share)
            if not held:
                continue
            longest, after = slots, free
            if scattered := placement.scattered:
                size = sum(scattered.pieces[held.start : held.stop])
                move = Move("reduce-scatter", unit, index, COLLECT, size, share=share)
                number = self._leave(move, slots)
                self.reduced.append(number)
                after = (number,)
            if (spilled := placement.gradients) and not self.stay:
                # With a disk tier, the host tier's link carries the copy to the host.
                size = sum(spilled.pieces[held.start : held.stop])
                lane = Lane("spill", spilled.tier)
                move = Move("spill gradients", unit, index, lane, size, after=after, share=share)
                number = self._leave(move, slots)
            arrived.append(number)
        if placement.gradients and self.settings.micro_batches > 1 and not self.sharded:
            stop, lane = self.chunks[unit].num_parameters, Lane("update", "host")
            add = Move("add gradients", unit, index, lane, stop=stop, after=tuple(arrived))
            arrived = [self._leave(add, None)]
            self.added += arrived
        return tuple(arrived), longest

    def _add_updates(
        self, index: int, unit: int, into: list[int], gradients: tuple[int, ...]
    ) -> list[int]:
        """Read, update and write a chunk's states piece by piece; returns the pieces' last moves.

        `gradients` are the moves that bring gradients to the optimizer.
        """
        placement = self.states[unit]
        lanes = placement.state_lanes
        assert placement.decision.below
        written = self.written[placement.decision.update_on_device]

        def add(move: Move) -> int:
            into.append(self._add(move))
            return into[-1]

        ends: list[int] = []
        waits: tuple[int, ...] = ()
        if reads_gradients(placement.decision, self.settings, self.device):
            waits = gradients  # which it reads, too
        in_place = placement.home == "in place"
        of_update = _pieces(
            placement.own, placement.num_updates, placement.parameters_read, in_place=in_place
        )
        for start, stop, read, write, share in of_update:
            if lanes is None:
                lane = Lane("update", placement.decision.tier)
                ends.append(add(Move("update", unit, index, lane, 0, start, stop, gradients)))
                continue
            reading, updating, writing = lanes
            # A staging buffer is free once its previous piece is written.
            ring_is_full = len(written) >= STAGING_PIECES
            free = (written[-STAGING_PIECES], *waits) if ring_is_full else waits
            came = add(Move("read states", unit, index, reading, read, start, stop, free))
            after = (*gradients, came)
            updated = add(Move("update", unit, index, updating, 0, start, stop, after))
            move = Move("write states", unit, index, writing, write, start, stop, (updated,), share)
            ends.append(add(move))
            written.append(ends[-1])
        self.updates[unit] = ends[-1]
        return ends


@lru_cache(maxsize=10_000)
def _pieces(
    own: ChunkSize, count: int, parameters_read: int, *, in_place: bool
) -> tuple[_Piece, ...]:
    """The pieces of a chunk's update, in order. (Cached for searches.)"""
    found: list[_Piece] = []
    for start, stop in pairwise(own.num_parameters * n // count for n in range(count + 1)):
        # Trainable parameters have as many bytes as their gradients.
        states, parameters = (
            size * stop // own.num_parameters - size * start // own.num_parameters
            for size in (own.state_bytes, own.gradient_bytes)
        )
        read = states + parameters_read * parameters
        share = written_share(own, start, stop) if in_place else (0.0, 0.0)
        found.append(_Piece(start, stop, read, states + parameters, share))
    return tuple(found)


def _share_bytes(sizes: Sequence[int], share: tuple[float, float]) -> int:
    """The bytes of the pieces in a share."""
    held = pieces_in(sizes, share)
    return sum(sizes[held.start : held.stop])


def _fetch_slots(served: int, earliest: int, lead: float) -> list[tuple[int, tuple[float, float]]]:
    """The slots that submit a fetch, each with its share of the bytes."""
    whole, cut = shares(lead)
    early, late = max(earliest, served - whole - 1), max(earliest, served - whole)
    if not cut or early == late:
        return [(late, (0.0, 1.0))]
    return [(early, (0.0, cut)), (late, (cut, 1.0))]


def _within(share: tuple[float, float], cut: Sequence[float]) -> list[tuple[float, float]]:
    """The share, cut at these fractions."""
    ends = [share[0], *(end for end in cut if share[0] < end < share[1]), share[1]]
    return list(pairwise(ends))


def _drain_shares(drain: float | None) -> list[tuple[int | None, tuple[float, float]]]:
    """Whole-slot drains of the first and the remaining bytes, with their shares."""
    if drain is None:
        return [(None, (0.0, 1.0))]
    whole, rest = shares(drain)
    if not rest:
        return [(whole, (0.0, 1.0))]
    return [(whole, (0.0, 1.0 - rest)), (whole + 1, (1.0 - rest, 1.0))]
