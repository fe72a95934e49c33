"""Where gradients go when a unit's backward has ended: down to their stores, and over all ranks.

The arithmetic of several ranks is that of DistributedDataParallel: every rank multiplies its
gradients by one over the number of ranks, then they are added. A persistent chunk's are added where
they are. Those of shared chunks are copied, when their slot has ended, to buffers that are cut into
the ranks' ranges, group by group. What a rank has no gradient for counts as zeros, if another rank
has one.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from protrain_plan.program.program import ARRIVING_GRADIENTS, Move, Program, gradient_home
from protrain_plan.records.plan import Offload, Placement
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.stores import DeviceStore, HostStore, Store
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.chunks import Chunk, Slice, flat_storage_order
from protrain_runtime.states.stand_ins import GradientInStore, OffloadedGradient, scaled

Work = Callable[[], None]
"""What a lane runs for a move."""


_Arrived = tuple[GradientInStore, torch.Tensor, list[torch.Tensor]]


class GradientMoves:
    """The work of "spill gradients" and "add gradients".

    A gradient goes to its place in the chunk's gradient store. Where that of an earlier micro-batch
    is there already, it goes to a buffer instead and is added, as autograd would add it: the first
    one of a parameter is copied, in whichever micro-batch it comes.
    """

    def __init__(self, program: Program, backend: Backend) -> None:
        self._backend = backend
        settings = program.settings
        self._after_backward = settings.updates == "after backward"
        # What is one micro-batch's alone is whole when it leaves, and its norm is the gradient's.
        self._norms = self._after_backward and settings.micro_batches == 1
        adding = [move.unit for move in program.moves if move.kind == "add gradients"]
        self._place = {unit: place % ARRIVING_GRADIENTS for place, unit in enumerate(adding)}
        # Buffers in which gradients arrive that are added to others.  # uint8 [the most at once]
        self.rooms: list[torch.Tensor] = []
        # By unit: to what, what is added, and by what the sum so far is multiplied first.
        self._arrived = defaultdict[int, list[_Arrived]](list)

    def make_rooms(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the buffers, once."""
        if self.rooms or not self._place:
            return
        largest = max(chunks[unit].gradient_bytes for unit in self._place)
        self.rooms = [self._backend.empty_host(largest) for _ in range(ARRIVING_GRADIENTS)]

    def spill(self, move: Move, chunk: Chunk) -> tuple[Work, list[torch.Tensor]]:
        """Take a share of the chunk's gradients down; with the work, what it reads."""
        store = chunk.gradient_store
        assert store is not None
        writes: list[tuple[int, torch.Tensor]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        leaving = chunk.gradient_groups_in(move.share)
        for part in chunk.slices:
            if part.group not in leaving or part.name not in chunk.gradients:
                continue
            gradient = chunk.gradients.pop(part.name)
            norm = torch.linalg.vector_norm(gradient) if self._norms else None
            source = flat_storage_order(dense(gradient, part.stride)).view(torch.uint8)
            start = part.start * part.dtype.itemsize
            stored = chunk.offloaded_gradients.get(part.name)
            if stored is None:
                stored = chunk.offloaded_gradients[part.name] = GradientInStore(
                    store=store,
                    offset=chunk.gradient_offset + start,
                    shape=part.shape,
                    stride=part.stride,
                    dtype=part.dtype,
                    device=part.parameter.device,
                    norm=norm,
                )
                writes.append((stored.offset, source))
            else:
                room = self.rooms[self._place[move.unit]][start : start + source.numel()]
                copies.append((room, source))
                self._arrived[move.unit].append((stored, room, stored.factors))
                stored.factors = []
            if self._after_backward:
                part.parameter.grad = OffloadedGradient.of(stored)

        def work() -> None:
            for offset, source in writes:
                store.start_write(offset, source)
            for room, source in copies:
                room.copy_(source, non_blocking=True)

        return work, [source for _, source in (*writes, *copies)]

    def add(self, move: Move) -> Work:
        """Add what arrived to what was there."""
        arrived = self._arrived.pop(move.unit, [])

        def work() -> None:
            for stored, room, factors in arrived:
                assert isinstance(stored.store, HostStore)
                with stored.store.in_place(stored.offset, stored.num_bytes) as total:
                    scaled(total.view(stored.dtype), factors).add_(room.view(stored.dtype))

        return work

    def clear(self) -> None:
        """Forget what arrived in a step that was given up."""
        self._arrived.clear()


def dense(gradient: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The gradient with the parameter's own strides; a copy only where they differ."""
    if gradient.dim() == 1 and gradient.stride() == (1,):
        return gradient  # flat already
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(
        gradient.shape, stride, dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)


@dataclass(slots=True)
class _Sum:
    """What is being added up, and how many ranks have a gradient of what.

    By group the buffer of a shared chunk, by part the gradient of a persistent one; flat, and with
    the padding of a group.
    """

    buffers: dict[int, torch.Tensor]
    parts: list[Slice]
    present: list[bool]  # by part: whether this rank has a gradient
    counts: torch.Tensor  # int32 [parts]

    def absent(self) -> list[Slice]:
        """What no rank has a gradient for; looks at the device only where this one lacks some."""
        if all(self.present):
            return []
        counts = self.counts.tolist()
        return [part for part, count in zip(self.parts, counts, strict=True) if not count]


class Reductions:
    """The sums of a programme that runs on several ranks."""

    def __init__(self, program: Program, ranks: Ranks, backend: Backend) -> None:
        self._settings, self._ranks, self._backend = program.settings, ranks, backend
        self._sums: dict[int, _Sum] = {}
        # By unit and group: this rank's part of a sum, on its way to where its optimizer runs.
        self._leaving: dict[tuple[int, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Forget the sums of a step that was given up."""
        self._sums.clear()
        self._leaving.clear()

    def all_reduce(self, number: int, chunk: Chunk) -> Work:
        """Add up a persistent chunk's gradients; `end` gives them to the parameters."""
        parts = [part for part in chunk.slices if part.trainable]
        present = [part.name in chunk.gradients for part in parts]
        gradients: dict[int, torch.Tensor] = {}
        for index, part in enumerate(parts):
            gradient = chunk.gradients.pop(part.name, None)
            if gradient is None:
                flat = self._backend.empty(part.num_bytes).view(part.dtype).zero_()
            else:
                flat = flat_storage_order(dense(gradient, part.stride)).mul_(
                    1.0 / self._ranks.count
                )
            gradients[index] = flat
        total = self._sums[number] = _Sum(gradients, parts, present, self._counts(present))

        def work() -> None:
            self._ranks.all_reduce(total.counts)
            for flat in gradients.values():
                self._ranks.all_reduce(flat)

        return work

    def _counts(self, present: Sequence[bool]) -> torch.Tensor:
        # Not from a list, which the host would wait to have copied.
        counts = torch.ones(len(present), dtype=torch.int32, device=self._backend.device)
        for index in (index for index, there in enumerate(present) if not there):
            counts[index].zero_()
        return counts

    def _collect(self, chunk: Chunk, groups: range, offsets: dict[str, int]) -> _Sum:
        """Copy gradients to the buffers in which they are added, and free them.

        `offsets` say where in its group's buffer a parameter's elements begin.
        """
        buffers: dict[int, torch.Tensor] = {}
        parts: list[Slice] = []
        present: list[bool] = []
        for number in groups:
            group = chunk.groups[number]
            trainable = [part for part in group.slices if part.trainable]
            if not trainable:
                continue
            buffer = self._backend.empty(group.gradient_bytes).view(trainable[0].dtype)
            for part in trainable:
                gradient = chunk.gradients.pop(part.name, None)
                place = buffer[offsets[part.name] : offsets[part.name] + part.numel]
                if gradient is None:
                    place.zero_()
                else:
                    source = flat_storage_order(dense(gradient, part.stride))
                    torch.mul(source, 1.0 / self._ranks.count, out=place)
                parts.append(part)
                present.append(gradient is not None)
            buffers[number] = buffer
        return _Sum(buffers, parts, present, self._counts(present))

    def end(self, move: Move, number: int, chunk: Chunk) -> None:
        """The sum is there: a persistent chunk's parameters get theirs."""
        total = self._sums.pop(number)
        if move.kind == "all-reduce":
            for index, part in enumerate(total.parts):
                flat = total.buffers[index]
                part.parameter.grad = flat.as_strided(
                    part.shape, part.stride, flat.storage_offset()
                )
        for part in total.absent():
            chunk.offloaded_gradients.pop(part.name, None)
            part.parameter.grad = None

    def reduce_scatter(self, number: int, move: Move, chunk: Chunk, states: Placement) -> Work:
        """Add up a share of a chunk's gradients, of which this rank keeps its shard."""
        assert isinstance(states, Offload) and chunk.sharding is not None
        own, settings, ranks = chunk.own, self._settings, self._ranks
        offsets = {part.name: part.inside // part.dtype.itemsize for part in chunk.slices}
        total = self._collect(chunk, chunk.gradient_groups_in(move.share), offsets)
        self._sums[number] = total
        shards = {
            group: self._backend.empty(chunk.sharding.gradient_range(group)[1])
            for group in total.buffers
        }
        spills = gradient_home(states, settings) == "host"
        held = DeviceStore(self._backend)
        norms = None
        if settings.updates == "after backward" and total.parts:
            dtype = total.parts[0].dtype
            norms = torch.zeros(len(total.parts), dtype=dtype, device=self._backend.device)
        mine = {part.name: part for part in own.slices}
        places: dict[int, tuple[Store, int]] = {}
        for group, shard in shards.items():
            start, _ = chunk.sharding.gradient_range(group)
            if spills:
                assert own.gradient_store is not None
                places[group] = own.gradient_store, own.gradient_offset + start
                self._leaving[move.unit, group] = shard
            else:
                places[group] = held, held.hold(shard)
        for index, part in enumerate(total.parts):
            local = mine.get(part.name)
            store, offset = places[part.group]
            stored = chunk.offloaded_gradients[part.name] = GradientInStore(
                store=store,
                offset=offset + (0 if local is None else local.inside),
                shape=torch.Size([0]) if local is None else local.shape,
                stride=(1,),
                dtype=part.dtype,
                device=part.parameter.device,
                norm=None if norms is None else norms[index],
                shared=True,
                count=None if total.present[index] else total.counts[index],
            )
            if norms is not None:
                part.parameter.grad = OffloadedGradient.of(stored, part.shape)

        def work() -> None:
            ranks.all_reduce(total.counts)
            for group, buffer in total.buffers.items():
                ranks.reduce_scatter(buffer, shards[group].view(buffer.dtype))
            if norms is not None:
                wide = torch.promote_types(norms.dtype, torch.float32)
                squares = torch.zeros(len(total.parts), dtype=wide, device=norms.device)
                for index, part in enumerate(total.parts):
                    if part.name in mine:
                        elements = mine[part.name].flat(shards[part.group])
                        squares[index] = torch.linalg.vector_norm(elements, dtype=wide)
                ranks.sum_of_shards(squares.square_())
                norms.copy_(squares.sqrt_())

        return work

    def spill(self, move: Move, chunk: Chunk) -> tuple[Work, list[torch.Tensor]]:
        """Bring a share of the sum to where its optimizer runs; with the work, what it reads."""
        own = chunk.own
        store, sharding = own.gradient_store, chunk.sharding
        assert store is not None and sharding is not None
        writes: list[tuple[int, torch.Tensor]] = []
        for group in chunk.gradient_groups_in(move.share):
            shard = self._leaving.pop((move.unit, group), None)
            if shard is not None:
                writes.append((own.gradient_offset + sharding.gradient_range(group)[0], shard))

        def work() -> None:
            for offset, shard in writes:
                store.start_write(offset, shard)

        return work, [shard for _, shard in writes]
