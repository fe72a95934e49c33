"""How a chunk is cut among ranks: where its parameters lie, and which ranges one rank has.

Each group's buffer has its trainable parameters first, then the frozen ones; either region is
padded to the same range for every rank (see `program.shard_bytes`). A rank keeps its ranges as a
chunk of its own: parts of parameters, flat, in the order of their storage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from protrain_plan.program import SHARD_ALIGNMENT, grouped, shard_bytes
from protrain_runtime.chunks import (
    Chunk,
    Group,
    Slice,
    StateLayout,
    aligned_bytes,
    dense_strides,
    in_order_of,
)
from protrain_runtime.ranks import Ranks
from protrain_runtime.stores import Store


@dataclass(frozen=True, slots=True)
class Region:
    """What all ranks have of a group's buffer, and where a rank's range of it lies in its own.

    start  bytes from the start of the group's buffer
    own    bytes from the start of the rank's buffer of the group
    shard  bytes of the rank's range
    """

    start: int
    own: int
    shard: int

    def whole(self, buffer: torch.Tensor, num_shards: int) -> torch.Tensor:
        """The region in a group's buffer.  # uint8 [num_shards * shard]"""
        return buffer[self.start : self.start + num_shards * self.shard]

    def of(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's range in a group's buffer.  # uint8 [shard]"""
        start = self.start + rank * self.shard
        return buffer[start : start + self.shard]


@dataclass(slots=True)
class Sharding:
    """How a chunk is shared: by group its regions, and what this rank has, as a chunk."""

    ranks: Ranks
    regions: tuple[tuple[Region, ...], ...]
    own: Chunk

    def gradient_range(self, group: int) -> tuple[int, int]:
        """The bytes of this rank's gradients of a group: where they start, and how many."""
        before = sum(each.gradient_bytes for each in self.own.groups[:group])
        return before, self.own.groups[group].gradient_bytes

    def part_of(self, name: str) -> Slice | None:
        """What this rank has of a parameter."""
        return next((part for part in self.own.slices if part.name == name), None)

    def gather(self, chunk: Chunk, number: int) -> torch.Tensor:
        """A group's parameters as they are in the ranks' stores; all ranks call.  # uint8"""
        own, group = self.own, self.own.groups[number]
        assert own.store is not None
        device = chunk.slices[0].parameter.device
        buffer = torch.empty(chunk.groups[number].num_bytes, dtype=torch.uint8, device=device)
        for region in self.regions[number]:
            mine = region.of(buffer, self.ranks.shard)
            own.store.read(own.offset + group.offset + region.own, mine)
            self.ranks.all_gather(region.whole(buffer, self.ranks.num_shards), mine)
        return buffer

    def gather_state(self, layout: StateLayout, part: Slice) -> torch.Tensor:
        """One whole state of one parameter; all ranks call.  # layout.dtype [part.shape]"""
        own = self.own
        assert own.store is not None
        start, size = (count // part.dtype.itemsize for count in self.gradient_range(part.group))
        width = layout.dtype.itemsize
        device = part.parameter.device
        whole = torch.empty(self.ranks.num_shards * size * width, dtype=torch.uint8, device=device)
        mine = whole[self.ranks.shard * size * width : (self.ranks.shard + 1) * size * width]
        own.store.read(layout.offset + start * width, mine)
        self.ranks.all_gather(whole, mine)
        first = part.inside // part.dtype.itemsize
        return whole.view(layout.dtype)[first : first + part.numel].as_strided(
            part.shape, part.stride, first
        )

    def keep(self, part: Slice, values: torch.Tensor) -> None:
        """Write this rank's elements of a whole parameter.  # part.dtype [part.shape]"""
        own = self.own
        assert own.store is not None
        for mine in own.slices:
            if mine.name == part.name:
                flat = in_order_of(part, values)[mine.first : mine.first + mine.numel]
                own.store.write(own.offset + mine.offset, flat.contiguous().view(torch.uint8))

    def keep_state(self, layout: StateLayout, part: Slice, values: torch.Tensor) -> None:
        """Write this rank's elements of a parameter's whole state.  # any dtype [part.shape]"""
        own = self.own
        assert own.store is not None
        for mine in own.slices:
            if mine.name == part.name:
                flat = in_order_of(part, values)[mine.first : mine.first + mine.numel].to(
                    layout.dtype
                )
                place = layout.offset + mine.start * layout.dtype.itemsize
                own.store.write(place, flat.contiguous().view(torch.uint8))


def make_sharded_chunk(
    unit: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    used_by: tuple[int, ...],
    ranks: Ranks,
) -> Chunk:
    """The chunk as it stands on the device; `chunk.sharding.own` is what this rank has of it."""
    groups: list[Group] = []
    own_groups: list[Group] = []
    regions: list[tuple[Region, ...]] = []
    offset = own_offset = start = own_start = 0
    for members in grouped([aligned_bytes(parameter) for _, parameter in parameters]):
        held = parameters[members.start : members.stop]
        slices: list[Slice] = []
        own: list[Slice] = []
        of_group: list[Region] = []
        inside = inside_own = trainable_bytes = own_trainable_bytes = 0
        for trainable in (True, False):
            mine = [pair for pair in held if pair[1].requires_grad == trainable]
            begin = inside
            for name, parameter in mine:
                part = Slice(
                    name=name,
                    parameter=parameter,
                    offset=offset + inside,
                    group=len(groups),
                    inside=inside,
                    start=start + inside // parameter.itemsize if trainable else 0,
                    shape=parameter.shape,
                    stride=dense_strides(parameter),
                    dtype=parameter.dtype,
                    trainable=trainable,
                )
                slices.append(part)
                inside += -(-part.num_bytes // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
            region = Region(begin, inside_own, shard_bytes(inside - begin, ranks.num_shards))
            for part in slices:
                if part.trainable == trainable:
                    own += _own_part(part, region, ranks.shard, own_offset, own_start)
            inside = begin + ranks.num_shards * region.shard
            inside_own += region.shard
            if trainable:
                trainable_bytes, own_trainable_bytes = inside, region.shard
            if region.shard:
                of_group.append(region)
        groups.append(_group(offset, inside, slices, trainable_bytes))
        own_groups.append(_group(own_offset, inside_own, own, own_trainable_bytes))
        regions.append(tuple(of_group))
        width = next((part.dtype.itemsize for part in slices if part.trainable), 1)
        offset, own_offset = offset + inside, own_offset + inside_own
        start, own_start = (
            start + trainable_bytes // width,
            own_start + own_trainable_bytes // width,
        )
    whole = Chunk(unit, _slices(groups), tuple(groups), used_by)
    shard = Chunk(unit, _slices(own_groups), tuple(own_groups), used_by)
    widths = [part.dtype.itemsize for part in whole.slices if part.trainable]
    whole.element_bytes = shard.element_bytes = widths[0] if widths else 0
    # One optimizer, one set of notes about it.
    shard.waiting, shard.updated, shard.scalars = whole.waiting, whole.updated, whole.scalars
    whole.sharding = Sharding(ranks, tuple(regions), shard)
    return whole


def _own_part(
    part: Slice, region: Region, rank: int, own_offset: int, own_start: int
) -> list[Slice]:
    """What a rank has of a parameter, as a flat one; empty where it has nothing."""
    low, high = rank * region.shard, (rank + 1) * region.shard
    begin = part.inside - region.start
    first, last = max(begin, low), min(begin + part.num_bytes, high)
    if first >= last:
        return []
    size = part.dtype.itemsize
    inside = region.own + first - low
    return [
        replace(
            part,
            offset=own_offset + inside,
            inside=inside,
            start=own_start + (first - low) // size if part.trainable else 0,
            shape=torch.Size([(last - first) // size]),
            stride=(1,),
            first=(first - begin) // size,
        )
    ]


def _group(offset: int, num_bytes: int, slices: Sequence[Slice], trainable_bytes: int) -> Group:
    trainable = sum(part.num_bytes for part in slices if part.trainable)
    return Group(
        offset=offset,
        num_bytes=num_bytes,
        slices=tuple(slices),
        padding=trainable_bytes - trainable,
    )


def _slices(groups: Sequence[Group]) -> tuple[Slice, ...]:
    return tuple(part for group in groups for part in group.slices)


def offload_shard(
    chunk: Chunk, store: Store, state_dtypes: Mapping[torch.dtype, Mapping[str, torch.dtype]]
) -> None:
    """What `chunks.offload` does, for this rank's part of a chunk."""
    assert chunk.sharding is not None
    own = chunk.own
    offset = store.reserve(own.parameter_bytes)
    layouts: list[StateLayout] = []
    dtypes = {part.dtype for part in chunk.slices if part.trainable}
    assert len(dtypes) <= 1, "a chunk's trainable parameters share one dtype"
    for dtype in dtypes:
        for key, state_dtype in state_dtypes[dtype].items():
            place = store.reserve(own.num_trainable * state_dtype.itemsize)
            layouts.append(StateLayout(key=key, dtype=state_dtype, offset=place))
    chunk.store = own.store = store
    own.offset, own.states = offset, tuple(layouts)
    for part in chunk.slices:
        chunk.sharding.keep(part, part.parameter)
