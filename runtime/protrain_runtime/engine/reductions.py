"""Gradients that ranks reduce: the work of the reductions, and the owners of the sums.

The arithmetic is DistributedDataParallel's: every rank multiplies its gradients by 1 / ranks, then
they are added. Gradients of a persistent chunk are reduced in place, those of shared chunks are
copied at the end of their slot to buffers cut into the ranks' ranges, group by group. A missing
gradient counts as zeros if another rank has one. If every micro-batch is reduced, its sums are
added to this rank's shard of earlier ones, as in FSDP2. The shard stays on the device until the
last one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from protrain_runtime.contract.program.program import Move, Program, gradient_home
from protrain_runtime.contract.records.plan import Placement
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.stores import DeviceStore, Store, copies, do_all
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.chunks import Chunk, Slice, dense, flat_storage_order
from protrain_runtime.states.stand_ins import (
    ConsumedGradient,
    GradientInStore,
    OffloadedGradient,
    scaled,
)

Work = Callable[[], None]
"""The work of a lane for a move."""


@dataclass(slots=True)
class _Sum:
    """A sum in flight: flat buffers, ranks with each gradient, sums `before` of micro-batches."""

    buffers: dict[int, torch.Tensor]
    parts: list[Slice]
    present: list[bool]  # by part: whether this rank has the gradient
    counts: torch.Tensor  # int32 [parts]
    before: dict[str, GradientInStore] = field(default_factory=dict[str, GradientInStore])

    def missing(self) -> list[Slice]:
        """The parts without a gradient on any rank."""
        if all(self.present):
            return []  # no device read, which the host would wait for
        return [p for p, n in zip(self.parts, self.counts.tolist(), strict=True) if not n]


@dataclass(eq=False)
class Reductions:
    """The sums of a program that runs on several ranks."""

    program: Program
    ranks: Ranks
    backend: Backend
    _sums: dict[int, _Sum] = field(default_factory=dict[int, _Sum], init=False)
    # Of persistent chunks: given to parameters last.
    _whole: list[_Sum] = field(default_factory=list[_Sum], init=False)
    # By unit and group: this rank's shard of a sum, on its way to its optimizer.
    _leaving: dict[tuple[int, int], torch.Tensor] = field(
        default_factory=dict[tuple[int, int], torch.Tensor], init=False
    )
    # Likewise for sums of earlier micro-batches.
    _added: dict[tuple[int, int], torch.Tensor] = field(
        default_factory=dict[tuple[int, int], torch.Tensor], init=False
    )

    def clear(self) -> None:
        """Forget the sums of an abandoned step."""
        self._sums.clear()
        self._whole.clear()
        self._leaving.clear()

    def all_reduce(self, number: int, chunk: Chunk) -> Work:
        """Reduce a persistent chunk's gradients; `end` gives them to the parameters."""
        parts = [part for part in chunk.slices if part.trainable]
        present = [part.name in chunk.gradients for part in parts]
        gradients: dict[int, torch.Tensor] = {}
        for index, part in enumerate(parts):
            gradient = chunk.gradients.pop(part.name, None)
            if gradient is None:
                flat = self.backend.empty(part.num_bytes).view(part.dtype).zero_()
            else:
                flat = flat_storage_order(dense(gradient, part.stride))
                flat.mul_(1.0 / self.ranks.count)
            gradients[index] = flat
        total = self._sums[number] = _Sum(gradients, parts, present, self._counts(present))
        summed = (total.counts, *gradients.values())
        return partial(do_all, [partial(self.ranks.all_reduce, each) for each in summed])

    def _counts(self, present: Sequence[bool]) -> torch.Tensor:
        # Not from a list: the host would wait for its copy.
        counts = torch.ones(len(present), dtype=torch.int32, device=self.backend.device)
        for index in (index for index, there in enumerate(present) if not there):
            counts[index].zero_()
        return counts

    def _collect(self, chunk: Chunk, groups: range) -> _Sum:
        """Copy gradients to reduction buffers, and free them."""
        buffers: dict[int, torch.Tensor] = {}
        parts: list[Slice] = []
        present: list[bool] = []
        for number in groups:
            group = chunk.groups[number]
            trainable = [part for part in group.slices if part.trainable]
            if not trainable:
                continue
            buffer = self.backend.empty(group.gradient_bytes)
            for part in trainable:
                gradient = chunk.gradients.pop(part.name, None)
                if gradient is None:
                    part.flat(buffer).zero_()
                else:
                    source = flat_storage_order(dense(gradient, part.stride))
                    torch.mul(source, 1.0 / self.ranks.count, out=part.flat(buffer))
                parts.append(part)
                present.append(gradient is not None or part.name in chunk.offloaded_gradients)
            buffers[number] = buffer.view(trainable[0].dtype)
        return _Sum(buffers, parts, present, self._counts(present))

    def end(self, move: Move, number: int, chunk: Chunk) -> None:
        """The sum is complete; a persistent chunk's waits for `give`."""
        total = self._sums.pop(number)
        if move.kind == "all-reduce":
            self._whole.append(total)
            return
        for part in total.missing():
            chunk.offloaded_gradients.pop(part.name, None)
            part.parameter.grad = None

    def give(self) -> None:
        """Give parameters their sums at the end of backward; RuntimeError if one has more by now.

        A unit that read a parameter in no profiled step may have run after the sum.
        """
        for total in self._whole:
            missing = total.missing()
            for index, part in enumerate(total.parts):
                if not isinstance(part.parameter.grad, ConsumedGradient | None):
                    raise RuntimeError(
                        f"a gradient of {part.name!r} came after the ranks had added it up: it was"
                        " used outside of the units that read it when the model was profiled."
                        " Profile the model as it runs now"
                    )
                own = total.buffers[index].as_strided(part.shape, part.stride)
                part.parameter.grad = None if part in missing else own
        self._whole.clear()

    def reduce_scatter(
        self, number: int, move: Move, chunk: Chunk, states: Placement, *, updating: bool
    ) -> Work:
        """Reduce a share of a chunk's gradients to this rank's shard."""
        assert not states.is_persistent and chunk.sharding is not None
        own, settings, ranks = chunk.own, self.program.settings, self.ranks
        total = self._collect(chunk, chunk.gradient_groups_in(move.share))
        self._sums[number] = total
        spills = updating and gradient_home(states, settings, self.program.device) == "host"
        before = total.before = dict(chunk.offloaded_gradients)
        held = DeviceStore(self.backend)
        shards: dict[int, torch.Tensor] = {}
        adding: set[int] = set()  # groups
        places: dict[int, tuple[Store, int]] = {}
        for group in total.buffers:
            start, num_bytes = chunk.sharding.gradient_range(group)
            shard = self._added.pop((move.unit, group), None)
            if shard is None:
                shard = self.backend.empty(num_bytes)
            else:
                adding.add(group)
            shards[group] = shard
            if not updating:
                self._added[move.unit, group] = shard
            if spills:
                assert own.gradient_store is not None
                places[group] = own.gradient_store, own.gradient_offset + start
                self._leaving[move.unit, group] = shard
            else:
                places[group] = held, held.hold(shard)
        norms = None
        if settings.updates == "after backward" and total.parts:
            dtype = total.parts[0].dtype
            norms = torch.zeros(len(total.parts), dtype=dtype, device=self.backend.device)
        mine = {part.name: part for part in own.slices}
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
                summed, shard = ranks.reduce_scatter(buffer), shards[group]
                if group not in adding:
                    shard.view(buffer.dtype).copy_(summed)
                    continue
                for part in own.groups[group].slices:
                    if part.trainable:
                        values = part.flat(summed.view(torch.uint8))
                        if (stored := before.get(part.name)) is None:
                            part.flat(shard).copy_(values)
                        else:
                            scaled(part.flat(shard), stored.factors).add_(values)
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
        """Copy a share of the sum to its optimizer's device; returns the work and its inputs."""
        own = chunk.own
        store, sharding = own.gradient_store, chunk.sharding
        assert store is not None and sharding is not None
        writes: list[tuple[int, torch.Tensor]] = []
        for group in chunk.gradient_groups_in(move.share):
            shard = self._leaving.pop((move.unit, group), None)
            if shard is not None:
                writes.append((own.gradient_offset + sharding.gradient_range(group)[0], shard))
        return copies(store, writes, writes=True), [shard for _, shard in writes]
