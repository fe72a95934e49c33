"""Sharded chunks: the regions of their buffers, each rank's part, and common copies."""

from dataclasses import dataclass

import torch

from protrain_runtime.devices.stores import Store
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.chunks import Chunk, Place, Slice, StateLayout


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a group's buffer that all ranks share, and a rank's range in its own.

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
class CommonCopy:
    """A chunk's whole frozen parameters in memory that the ranks of a node share.

    All ranks read all of it, each writes its part of every parameter: `index` of `count`. Regions
    are the groups' buffers' regions; `own` is each one's start in the copy, and there is one shard.
    """

    index: int
    count: int
    regions: tuple[Region, ...]
    store: Store | None = None
    offset: int = 0  # bytes from the start of the store

    @property
    def num_bytes(self) -> int:
        return sum(region.shard for region in self.regions)

    def place(self, group: int, inside: int) -> int:
        """The store offset of a byte of a group's buffer."""
        region = self.regions[group]
        return self.offset + region.own + inside - region.start

    def part_of(self, part: Slice) -> Place:
        """The elements of a parameter that this rank writes."""
        assert self.store is not None
        first, past = (part.numel * n // self.count for n in (self.index, self.index + 1))
        offset = self.place(part.group, part.inside + first * part.dtype.itemsize)
        return Place(self.store, offset, first, past - first)


@dataclass(slots=True)
class Sharding:
    """A chunk's sharding: regions by group, and this rank's part as a chunk."""

    ranks: Ranks
    regions: tuple[tuple[Region, ...], ...]
    own: Chunk
    common: CommonCopy | None = None

    def gradient_range(self, group: int) -> tuple[int, int]:
        """This rank's gradients of a group: start and size in bytes."""
        before = sum(each.gradient_bytes for each in self.own.groups[:group])
        return before, self.own.groups[group].gradient_bytes

    def part_of(self, name: str) -> Slice | None:
        """Return this rank's part of a parameter."""
        return next((part for part in self.own.slices if part.name == name), None)

    def gather(self, chunk: Chunk, part: Slice, layout: StateLayout | None = None) -> torch.Tensor:
        """A whole parameter or state from the ranks' stores, on its device.  # [part.shape]

        Collective. The result may be a view of more.
        """
        own, ranks, device = self.own, self.ranks, part.parameter.device
        if self.common is not None and not part.trainable:
            assert self.common.store is not None
            flat = torch.empty(part.num_bytes, dtype=torch.uint8, device=device)
            self.common.store.read(self.common.place(part.group, part.inside), flat)
            return part.shaped(flat)
        assert own.store is not None
        if layout is None:
            num_bytes = chunk.groups[part.group].num_bytes
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            for region in self.regions[part.group]:
                mine = region.of(buffer, ranks.shard)
                own.store.read(
                    own.current.offset + own.groups[part.group].offset + region.own, mine
                )
                ranks.all_gather(region.whole(buffer, ranks.num_shards), mine)
            return part.shaped(part.flat(buffer))
        start, size = (count // part.dtype.itemsize for count in self.gradient_range(part.group))
        width = layout.dtype.itemsize
        whole = torch.empty(ranks.num_shards * size * width, dtype=torch.uint8, device=device)
        mine = whole[ranks.shard * size * width : (ranks.shard + 1) * size * width]
        own.store.read(layout.offset + start * width, mine)
        ranks.all_gather(whole, mine)
        first = part.inside // part.dtype.itemsize
        elements = whole.view(layout.dtype)[first : first + part.numel]
        return elements.as_strided(part.shape, part.stride)
