"""Which parameters lie in which unit's chunk, where in it, and which ranges of it one rank has.

Of a chunk that ranks share, each group's buffer has its trainable parameters first, then the frozen
ones; either region is padded to the same range for every rank (see `program.shard_bytes`). A rank
keeps its ranges as a chunk of its own: parts of parameters, flat, in the order of their storage.
Parameters that no chunk can hold as they are, are refused by name, or left on the device.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain_plan.errors import ProtrainError
from protrain_plan.program.program import SHARD_ALIGNMENT, grouped, shard_bytes
from protrain_plan.records.plan import Persistent, UnitPlan
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.chunks import (
    ALIGNMENT,
    Chunk,
    Group,
    Slice,
    StateLayout,
    aligned_bytes,
    dense_strides,
    make_chunk,
)


def refuse_parameters(model: nn.Module, *, source: str) -> None:
    """ProtrainError where there is nothing to train, or a parameter is no plain tensor."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ProtrainError(
            "the model has no trainable parameters: there is no step to plan",
            source=source,
            fix="let some require gradients",
        )
    parameter: Any  # of classes that mypy thinks cannot exist
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            problem, fix = "has no shape yet", "run a batch through the model in the factory"
        elif is_traceable_wrapper_subclass(parameter):
            problem = f"is a {type(parameter).__name__}, which is made of tensors of its own"
            fix = "plan the model before its parameters are wrapped, distributed or quantised"
        elif not issubclass(type(parameter), nn.Parameter | FakeTensor):
            problem, fix = f"is a {type(parameter).__name__}", "let it be a torch.nn.Parameter"
        elif parameter.layout != torch.strided:
            problem, fix = f"is sparse ({parameter.layout})", "let it be dense"
        elif parameter.is_quantized:
            problem, fix = "is quantised", "plan the model before its parameters are quantised"
        elif torch._debug_has_internal_overlap(parameter) == 1:
            problem, fix = "has elements that share memory", "let it be contiguous"
        else:
            continue
        raise ProtrainError(
            f"the parameter '{name}' {problem}: a chunk is made of plain tensors",
            source=source,
            fix=fix,
        )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans: [first, past)."""
    if tensor.numel() == 0:
        return 0, 0
    span = 1 + sum(int(n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + span * tensor.itemsize


def overlapping(chunks: Sequence[Chunk]) -> set[int]:
    """The units with parameters that share memory, with another parameter or within one."""
    found: set[int] = set()
    for members in _by_storage(chunks).values():
        reached, last = 0, -1
        for first, past, unit, parameter in sorted(members, key=lambda m: m[:3]):
            if past - first < parameter.numel() * parameter.itemsize:  # expanded
                found.add(unit)
            if first < reached:
                found |= {unit, last}
            if past > reached:
                reached, last = past, unit
    return found


def of_one_storage(chunks: Sequence[Chunk]) -> set[int]:
    """The units with parameters in a storage that holds other units' parameters, too."""
    groups = ({unit for *_, unit, _ in members} for members in _by_storage(chunks).values())
    return {unit for units in groups if len(units) > 1 for unit in units}


def _by_storage(
    chunks: Sequence[Chunk],
) -> dict[int, list[tuple[int, int, int, nn.Parameter]]]:
    """The parameters that have elements by storage: from where, to where, of which unit."""
    found: dict[int, list[tuple[int, int, int, nn.Parameter]]] = defaultdict(list)
    for chunk in chunks:
        for part in chunk.slices:
            if part.numel:
                storage = part.parameter.untyped_storage()._cdata
                found[storage].append((*extent(part.parameter), chunk.unit, part.parameter))
    return found


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

    @contextmanager
    def gathering(self, what: str) -> Iterator[None]:
        """What is gathered is on the host at its end, or a failure was told."""
        with self.ranks.meeting.telling(what, final=True):
            yield
            self.ranks.meeting.refuse_lost()

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

    def fetch_state(self, layout: StateLayout, part: Slice) -> torch.Tensor:
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
    shard.offloaded_gradients = whole.offloaded_gradients
    shard.updated, shard.scalars = whole.updated, whole.scalars
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


def unit_parameters(
    model: nn.Module, units: Sequence[tuple[str, str, Sequence[str]]]
) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each unit's chunk, given (kind, name, listed parameters) per unit.

    A block has its module's parameters but those that another unit lists. A tied parameter goes by
    its first name in the model.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    canonical = {parameter: name for name, parameter in model.named_parameters()}
    listed = {canonical[by_name[name]] for _, _, names in units for name in names}
    taken: set[str] = set()
    chunks: list[list[tuple[str, nn.Parameter]]] = []
    for kind, unit_name, names in units:
        own = [canonical[by_name[name]] for name in names]
        if kind == "block":
            module = model.get_submodule(unit_name)
            inside = [canonical[parameter] for parameter in module.parameters()]
            own.extend(name for name in inside if name not in listed)
        fresh = [name for name in dict.fromkeys(own) if name not in taken]
        taken.update(fresh)
        chunks.append([(name, by_name[name]) for name in fresh])
    return chunks


def make_chunks(
    model: nn.Module,
    units: Sequence[UnitPlan],
    ranks: Ranks | None = None,
    *,
    alignment: int = ALIGNMENT,
) -> list[Chunk]:
    """One chunk per unit, empty where the unit has no parameters of its own.

    With `ranks`, they share those that are not persistent. Parameters start at multiples of
    `alignment` bytes.
    """
    index_of = {unit.name: index for index, unit in enumerate(units)}
    shape = [(unit.kind, unit.name, unit.parameters) for unit in units]
    chunks: list[Chunk] = []
    for index, parameters in enumerate(unit_parameters(model, shape)):
        users = (index, *(index_of[name] for name in units[index].also_used_by))
        if ranks is None or isinstance(units[index].states, Persistent) or not parameters:
            own = users if parameters else ()
            chunks.append(make_chunk(index, parameters, own, alignment=alignment))
        else:
            chunks.append(make_sharded_chunk(index, parameters, users, ranks))
    return chunks
