"""The moves of a program: work for their lanes, and buffers held until they end.

[Note: who frees what] The compute thread allocates and frees buffers, at slot boundaries only. A
lane's work borrows the tensors that it reads or fills: `start` is called when the move enters its
lane, `end` when the engine has seen its end or has made compute wait for it. On an accelerator this
order makes the caching allocator safe, which reuses blocks at once in compute's stream: a buffer is
freed after compute was ordered behind the copy out of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, assert_never
from weakref import ref

import torch

from protrain_runtime.activations.saved_tensors import SwappedStorage
from protrain_runtime.contract.program.program import (
    ARRIVING_GRADIENTS,
    STAGING_PIECES,
    Move,
    Program,
    gradient_home,
    grouped,
    pieces_in,
    reads_gradients,
)
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import StateTier, UnitPlan
from protrain_runtime.devices.lanes import Backend, Buffers
from protrain_runtime.devices.stores import (
    DeviceStore,
    HostStore,
    SplitStore,
    Store,
    copies,
    do_all,
)
from protrain_runtime.engine.reductions import Reductions, Work
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.chunks import Chunk, Slice, dense, flat_storage_order
from protrain_runtime.states.kept_steps import Options
from protrain_runtime.states.stand_ins import (
    GradientInStore,
    OffloadedGradient,
    scaled,
)
from protrain_runtime.states.stepping import OptimizerFactory
from protrain_runtime.states.updates import Piece, UpdateTeam

_Arrived = tuple[GradientInStore, torch.Tensor, list[torch.Tensor]]


class _Place(NamedTuple):
    """Where a gradient goes in every step: `target` are its bytes in host memory.  # [shape]"""

    part: Slice
    stored: GradientInStore
    target: torch.Tensor


def _as_kept(chunk: Chunk, places: Sequence[_Place]) -> list[torch.Tensor]:
    """The gradients for these places; empty unless all are present with matching strides."""
    gradients: list[torch.Tensor] = []
    for place in places:
        gradient = chunk.gradients.get(place.part.name)
        if gradient is None or gradient.stride() != place.part.stride:
            return []
        gradients.append(gradient)
    for part, stored, _ in places:
        del chunk.gradients[part.name]
        stored.arrived = False
        chunk.offloaded_gradients[part.name] = stored
    return gradients


class GradientMoves:
    """The work of "spill gradients" and "add gradients".

    A gradient goes to its place in the chunk's gradient store. If an earlier micro-batch's is
    there, it goes to a buffer and is added, as in autograd: a parameter's first gradient is copied,
    in any micro-batch.
    """

    def __init__(self, program: Program, backend: Backend) -> None:
        self._backend = backend
        settings = program.settings
        self._after_backward = settings.updates == "after backward"
        # A gradient of a single micro-batch is complete when it leaves: its norm is final.
        self._norms = self._after_backward and settings.micro_batches == 1
        adding = [move.unit for move in program.moves if move.kind == "add gradients"]
        self._place = {unit: place % ARRIVING_GRADIENTS for place, unit in enumerate(adding)}
        # Buffers for gradients that are added to others.  # uint8 [the most at once]
        self.rooms: list[torch.Tensor] = []
        # By unit: the target, the gradient to add, and the factor of the sum so far.
        self._arrived = defaultdict[int, list[_Arrived]](list)
        # By unit and share: places of every step, if gradients cannot be observed on their way.
        self._keeps = not self._after_backward and settings.micro_batches == 1
        self._kept: dict[tuple[int, tuple[float, float]], list[_Place]] = {}

    def make_rooms(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the buffers, once."""
        if self.rooms or not self._place:
            return
        largest = max(chunks[unit].gradient_bytes for unit in self._place)
        self.rooms = [self._backend.empty_host(largest) for _ in range(ARRIVING_GRADIENTS)]

    def spill(self, move: Move, chunk: Chunk) -> tuple[Work, list[torch.Tensor]]:
        """Copy a share of the chunk's gradients to its tier; returns the work and its inputs."""
        store = chunk.gradient_store
        assert store is not None
        kept = self._kept.get((move.unit, move.share))
        if kept is not None and (gradients := _as_kept(chunk, kept)):
            targets = [place.target for place in kept]
            return partial(torch._foreach_copy_, targets, gradients, non_blocking=True), gradients
        writes: list[tuple[int, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        leaving = chunk.gradient_groups_in(move.share)
        parts = [s for s in chunk.slices if s.group in leaving and s.name in chunk.gradients]
        norms: Sequence[torch.Tensor | None] = [None] * len(parts)
        if self._norms and parts:  # as `clip_grad_norm_` needs them; of one dtype
            norms = torch._foreach_norm([chunk.gradients[part.name] for part in parts])
        for part, norm in zip(parts, norms, strict=True):
            gradient = chunk.gradients.pop(part.name)
            source = flat_storage_order(dense(gradient, part.stride)).view(torch.uint8)
            start = part.start * part.dtype.itemsize
            stored = chunk.offloaded_gradients.get(part.name)
            if stored is None:
                stored = chunk.place_gradient(part, norm)
                writes.append((stored.offset, source))
            else:
                room = self.rooms[self._place[move.unit]][start : start + source.numel()]
                copies.append((room, source))
                self._arrived[move.unit].append((stored, room, stored.factors))
                stored.factors = []
            stored.arrived = False
            if self._after_backward:
                part.parameter.grad = OffloadedGradient.of(stored)

        trained = [s for s in chunk.slices if s.group in leaving and s.trainable]
        if self._keeps and type(store) is HostStore and len(parts) == len(trained):
            self._kept[move.unit, move.share] = [
                _Place(part, stored, part.shaped(store.view(stored.offset, part.num_bytes)))
                for part in parts
                for stored in (chunk.offloaded_gradients[part.name],)
            ]

        def work() -> None:
            for offset, source in writes:
                store.start_write(offset, source)
            for room, source in copies:
                room.copy_(source, non_blocking=True)

        return work, [source for _, source in (*writes, *copies)]

    def add(self, move: Move) -> Work:
        """Add arrived gradients to earlier ones."""
        arrived = self._arrived.pop(move.unit, [])

        def work() -> None:
            for stored, room, factors in arrived:
                assert isinstance(stored.store, HostStore)
                total = stored.store.view(stored.offset, stored.num_bytes)
                scaled(total.view(stored.dtype), factors).add_(room.view(stored.dtype))

        return work

    def clear(self) -> None:
        """Forget the arrivals of an abandoned step."""
        self._arrived.clear()


class SwappedUnit:
    """Storages that a unit's forward saved for a swap, by group; held weakly."""

    def __init__(self, storages: Sequence[SwappedStorage]) -> None:
        ranges = grouped([storage.num_bytes for storage in storages])
        groups = [storages[each.start : each.stop] for each in ranges]
        self._groups = [[ref(storage) for storage in group] for group in groups]
        self._group_bytes = tuple(sum(storage.num_bytes for storage in group) for group in groups)

    def in_share(self, share: tuple[float, float]) -> Iterator[SwappedStorage]:
        """The live storages in a share of the bytes."""
        for number in pieces_in(self._group_bytes, share):
            for reference in self._groups[number]:
                if (storage := reference()) is not None:
                    yield storage


class Moves:
    """The data side of a program: chunks, swapped activations, optimizer pieces.

    `program` ends with an update and has every kind of move; `clear` sets the current one.
    `options` returns the current hyperparameters. `team` updates beside compute.
    """

    def __init__(
        self,
        program: Program,
        plans: Sequence[UnitPlan],
        chunks: Sequence[Chunk],
        *,
        backend: Backend,
        swap_stores: Mapping[TierName, Store],
        factory: OptimizerFactory,
        options: Callable[[], Options],
        ranks: Ranks | None = None,
        team: UpdateTeam,
    ) -> None:
        self._team, self.update_threads = team, team.inside
        self.plans, self.chunks, self.ranks = plans, chunks, ranks
        self.backend, self._swap_stores = backend, swap_stores
        self.buffers = Buffers(backend)
        self._factory, self._options = factory, options
        # Moves that read states, by number, and their staging buffers, used in turn: for updates on
        # the host, and on the device.
        self._reads: dict[bool, dict[int, Move]] = {False: {}, True: {}}
        self._rings: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        self._places: dict[int, int] = {}
        for number, move in enumerate(program.moves):
            if move.kind == "read states":
                reads = self._reads[plans[move.unit].states.update_on_device]
                self._places[number] = len(reads) % STAGING_PIECES
                reads[number] = move
        # By unit: offsets and bytes of its swap regions.
        self._swap_regions: dict[int, list[tuple[int, int]]] = {}
        # By writing move: the piece and inputs of an update on a stream, until it ends. Some run on
        # into the program's next run.
        self._working: dict[int, tuple[Piece, object]] = {}
        # By unit and range: pieces of every step.
        self._kept: dict[tuple[int, int, int], Piece] = {}
        self._gradients = GradientMoves(program, backend)
        self._reductions = None if ranks is None else Reductions(program, ranks, backend)
        self.clear(program)

    def clear(self, program: Program) -> None:
        """Forget the program that ran, and run the moves of this one."""
        self.program = program
        self.buffers.keep_for(())
        self._gradients.clear()
        if self._reductions is not None:
            self._reductions.clear()
        self._swapped: dict[int, SwappedUnit] = {}  # saved by a unit's forward
        # By move: buffers held until it ends.
        self._held: dict[int, list[torch.Tensor]] = {}
        self._leaving: dict[int, list[SwappedStorage]] = {}
        self._arriving: dict[int, list[SwappedStorage]] = {}
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._chosen: Options | None = None  # this run's hyperparameters

    @property
    def may_make_staging(self) -> bool:
        """Whether states are read and staging buffers are missing."""
        return any(reads and not self._rings[there] for there, reads in self._reads.items())

    def make_staging(self) -> None:
        """Allocate staging buffers between steps, once there are states or parameters to read."""
        self._gradients.make_rooms(self.chunks)
        for on_device, reads in self._reads.items():
            owns = [self.chunks[move.unit].own for move in reads.values()]
            wanted = any(own.current.updated or self._read_with_states(own)[0] for own in owns)
            if self._rings[on_device] or not wanted:
                continue
            largest = 0
            for move, own in zip(reads.values(), owns, strict=True):
                piece = Piece(own, own.cut(move.start), own.cut(move.stop))
                parameters, gradients = self._read_with_states(own)
                num_bytes = piece.ring_bytes(parameters=parameters, gradients=gradients)
                largest = max(largest, num_bytes)
            empty = self.backend.empty if on_device else self.backend.empty_host
            count = min(STAGING_PIECES, len(reads))
            self._rings[on_device] = [empty(largest) for _ in range(count)]

    def in_transit(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors in flight, and the buffers that others pass through."""
        moving = [tensor for held in self._held.values() for tensor in held]
        for storages in (*self._leaving.values(), *self._arriving.values()):
            moving += [t for s in storages for t in (s.source, s.restored) if t is not None]
        return moving, [*self._rings[False], *self._rings[True], *self._gradients.rooms]

    @property
    def host_bytes(self) -> int:
        """Host bytes in flight to an optimizer there; on a CPU they count as the device's."""
        if self.backend.on_host:
            return 0
        return sum(one.numel() for one in (*self._rings[False], *self._gradients.rooms))

    def _read_with_states(self, chunk: Chunk) -> tuple[bool, bool]:
        """Whether an update reads parameters and gradients along with the states."""
        states = self.plans[chunk.unit].states
        assert not states.is_persistent
        step = self.program.settings, self.program.device
        return gradient_home(states, *step) != "in place", reads_gradients(states, *step)

    def start(self, number: int) -> Work:
        """The move's work; allocates its buffers now."""
        move = self.program.moves[number]
        chunk = self.chunks[move.unit]
        match move.kind:
            case "fetch":
                return self.fetch(chunk, chunk.groups_in(move.share), tier=move.lane.tier)
            case "all-gather":
                return self.all_gather(chunk, chunk.groups_in(move.share))
            case "all-reduce" | "reduce-scatter":
                assert self._reductions is not None
                if move.kind == "all-reduce":
                    return self._reductions.all_reduce(number, chunk)
                states, updating = self.plans[chunk.unit].states, self.program.updating
                return self._reductions.reduce_scatter(
                    number, move, chunk, states, updating=updating
                )
            case "swap out" | "swap in":
                assert move.lane.tier is not None and move.lane.tier != "device"
                store = self._swap_stores[move.lane.tier]
                storages = list(self._swapped[move.unit].in_share(move.share))
                if move.kind == "swap out":
                    self._leaving[number] = storages
                    going = [(s.offset, s.source) for s in storages if s.source is not None]
                    return copies(store, going, writes=True)
                self._arriving[number] = storages
                for storage in storages:
                    storage.restored = self.buffers.new(storage.num_bytes)
                coming = [(s.offset, s.restored) for s in storages if s.restored is not None]
                return copies(store, coming, writes=False)
            case "spill gradients":
                spills = self._gradients if self._reductions is None else self._reductions
                work, self._held[number] = spills.spill(move, chunk)
                return work
            case "add gradients":
                return self._gradients.add(move)
            case "read states":
                return self._read_states(number, move, chunk.own)
            case "update":
                return self._update(move, chunk.own)
            case "write states":
                piece = self._pieces.pop((move.unit, move.start))
                self._working[number] = piece, piece.waiting
                return lambda: piece.write(parameters=True)
            case _:
                assert_never(move.kind)

    def arrive(self, number: int) -> None:
        """Give a fetch's result to the model, at the start of its slot."""
        move = self.program.moves[number]
        chunk = self.chunks[move.unit]
        if move.kind in ("fetch", "all-gather"):
            regions = chunk.sharding.regions if chunk.sharding is not None else None
            # If ranks have shards of a group, the gather completes it.
            gathered = move.kind == "all-gather"
            groups = chunk.groups_in(move.share)
            chunk.bind(n for n in groups if gathered or not (regions and regions[n]))
        elif move.kind == "swap in":
            # From here on only the saved tensors own the fetched storages.
            self._arriving.pop(number, None)

    def end(self, number: int) -> None:
        """Free a finished move's buffers."""
        self._held.pop(number, None)
        self._working.pop(number, None)
        for storage in self._leaving.pop(number, ()):
            storage.leave()
        move = self.program.moves[number]
        chunk = self.chunks[move.unit]
        if self._reductions is not None:
            if move.kind in ("all-reduce", "reduce-scatter"):
                self._reductions.end(move, number, chunk)
            elif move.kind == "write states" and move.stop == chunk.own.num_trainable:
                # The last piece has used the sum of its gradients.
                chunk.offloaded_gradients.clear()
        elif move.kind == "write states":
            # Updated in place, with no later piece: these groups' last bytes are written.
            gone = chunk.groups_in(move.share)
            self.buffers.give_up(chunk.release(gone))
            for part in chunk.slices:
                if part.group in gone:
                    chunk.gradients.pop(part.name, None)

    def give_sums(self) -> None:
        """Give parameters the reduced gradients of this backward."""
        if self._reductions is not None:
            self._reductions.give()

    def pass_boundary(self, fetches: Iterable[int]) -> None:
        """Free buffers of earlier evictions, except those that these next fetches reuse."""
        if not self.backend.on_host:
            return
        sizes: list[int] = []
        taken: set[tuple[int, tuple[float, float]]] = set()
        for move in (self.program.moves[number] for number in fetches):
            if move.kind == "swap in":
                swapped = self._swapped[move.unit].in_share(move.share)
                sizes += [storage.num_bytes for storage in swapped]
            elif (move.unit, move.share) not in taken:  # several moves fill the same buffers
                taken.add((move.unit, move.share))
                groups = self.chunks[move.unit].groups
                chosen = self.chunks[move.unit].groups_in(move.share)
                sizes += [groups[group].num_bytes for group in chosen]
        self.buffers.keep_for(sizes)

    def fetch(
        self,
        chunk: Chunk,
        groups: Iterable[int],
        *,
        tier: StateTier | None = None,
        lent: bool = False,
    ) -> Work:
        """Fetch groups of a chunk, one read per group, rank's range or copy.

        Of a split store, only the `tier`'s part; None: all. `lent`: outside the program's steps.
        """
        store, sharding = chunk.store, chunk.sharding
        assert store is not None
        numbers = list(groups)
        known = chunk.buffers if isinstance(store, SplitStore) else {}
        buffers = [
            known[number] if number in known else chunk.room(number, self.buffers.new, lent=lent)
            for number in numbers
        ]
        offset = chunk.own.current.offset
        offsets = [offset + chunk.own.groups[number].offset for number in numbers]
        if sharding is None:
            pairs = list(zip(offsets, buffers, strict=True))
            if isinstance(store, SplitStore):
                return store.reads(pairs, tier)
            return copies(store, pairs, writes=False)
        own: list[tuple[int, torch.Tensor]] = []
        shared: list[tuple[int, torch.Tensor]] = []
        for number, start, buffer in zip(numbers, offsets, buffers, strict=True):
            regions, shard = sharding.regions[number], sharding.ranks.shard
            own += [(start + region.own, region.of(buffer, shard)) for region in regions]
            if sharding.common is not None:
                region = sharding.common.regions[number]
                place = sharding.common.place(number, region.start)
                shared.append((place, region.whole(buffer, 1)))
        reads = [copies(store, own, writes=False)]
        if sharding.common is not None:
            assert sharding.common.store is not None
            reads.append(copies(sharding.common.store, shared, writes=False))
        return partial(do_all, reads)

    def all_gather(self, chunk: Chunk, groups: Iterable[int], *, lent: bool = False) -> Work:
        """Gather the other ranks' ranges of groups; it reads shards on the device itself."""
        sharding, own = chunk.sharding, chunk.own
        assert sharding is not None
        ranks = sharding.ranks
        gathers: list[Work] = []
        for number in groups:
            if (buffer := chunk.buffers.get(number)) is None:
                buffer = chunk.room(number, self.buffers.new, lent=lent)
            for region in sharding.regions[number]:
                mine = region.of(buffer, ranks.shard)
                if isinstance(own.store, DeviceStore):
                    place = own.current.offset + own.groups[number].offset + region.own
                    mine = own.store.view(place, region.shard)
                whole = region.whole(buffer, ranks.num_shards)
                gathers.append(partial(ranks.all_gather, whole, mine))
        return partial(do_all, gathers)

    def update_shards(self) -> None:
        """Update this rank's shards on the device, on the compute thread."""
        for own in (chunk.own for chunk in self.chunks if isinstance(chunk.store, DeviceStore)):
            piece = Piece(own, 0, own.num_trainable, own.offloaded_gradients)
            piece.view_store()
            piece.update(self._factory, self._options(), {})
            piece.write(parameters=False)

    def take_swapped(self, unit: int, storages: Sequence[SwappedStorage]) -> None:
        """Assign a unit's saved storages to its regions of the store."""
        self._swapped[unit] = SwappedUnit(storages)
        if not storages:
            return
        activations = self.plans[unit].activations
        assert activations.tier
        store = self._swap_stores[activations.tier]
        if unit not in self._swap_regions:
            needed = sum(storage.num_bytes for storage in storages)
            self._swap_regions[unit] = [(store.reserve(needed), needed)]
        regions = self._swap_regions[unit]
        used = [0] * len(regions)
        for storage in storages:
            size = storage.num_bytes
            fits = (n for n, (_, room) in enumerate(regions) if used[n] + size <= room)
            place = next(fits, None)
            if place is None:
                place = len(regions)
                regions.append((store.reserve(size), size))
                used.append(0)
            storage.offset = regions[place][0] + used[place]
            used[place] += size

    def _read_states(self, number: int, move: Move, chunk: Chunk) -> Work:
        parameters, gradients = self._read_with_states(chunk)
        cuts = chunk.cut(move.start), chunk.cut(move.stop)
        moves = not parameters and not chunk.lasts
        piece = self._piece(chunk, *cuts, moves=moves)
        if chunk.spare is not None:
            # A later factor may or may not be seen: the update is then repeated with gradients read
            # again.
            chunk.speculated = dict(piece.waiting)
        self._pieces[move.unit, move.start] = piece
        if not parameters:
            piece.view_device()
        ring = self._rings[self.plans[move.unit].states.update_on_device]
        if not ring:
            return lambda: None  # before the first step there is nothing to read
        buffer = ring[self._places[number]]
        return lambda: piece.read(buffer, parameters=parameters, gradients=gradients)

    def _piece(self, chunk: Chunk, start: int, stop: int, *, moves: bool) -> Piece:
        """A range of a chunk with its gradients: the same in each step of most chunks.

        `moves`: where its optimizer runs, parameters move in each step: nothing is cached.
        """
        place = chunk.unit, start, stop
        piece = None if moves else self._kept.get(place)
        if piece is None:
            self._kept.pop(place, None)  # it has views of a former long-lived buffer
            states = self.plans[chunk.unit].states
            assert not states.is_persistent
            home = gradient_home(states, self.program.settings, self.program.device)
            # A sum on the device moves in each step; a cached piece would keep it alive.
            sums = self._reductions is not None and home == "device"
            piece = Piece(
                chunk,
                start,
                stop,
                apart=chunk.spare is not None,
                keeps=chunk.spare is None and not sums and not moves,
            )
            if piece.keeps:
                self._kept[place] = piece
        piece.waiting = dict(chunk.offloaded_gradients)
        return piece

    def _update(self, move: Move, chunk: Chunk) -> Work:
        states = self.plans[move.unit].states
        on_device, stands = states.update_on_device, not states.staged
        if stands:
            piece = self._piece(chunk, move.start, move.stop, moves=False)
        else:
            piece = self._pieces[move.unit, move.start]
        if self._chosen is None:
            self._chosen = self._options()
        options = self._chosen
        gradients: dict[str, torch.Tensor] = {}
        for part, low, high in piece.parts:
            gradient = chunk.gradients.get(part.name)
            if gradient is not None:
                # Cached: a parameter in several pieces is copied once at most.
                if gradient.stride() != part.stride:
                    gradient = chunk.gradients[part.name] = dense(gradient, part.stride)
                flat = gradient.as_strided((part.numel,), (1,))
                gradients[part.name] = flat if high - low == part.numel else flat[low:high]

        team = None if on_device and not self.backend.on_host else self._team

        def work() -> None:
            if stands and piece.kept is None:
                piece.view_store()
            piece.update(self._factory, options, gradients, team)
            if on_device:
                piece.write_made()
            if stands:
                piece.write(parameters=False)

        return work
