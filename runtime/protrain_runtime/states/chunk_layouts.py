"""Makes chunks: the parameters of each unit, and their layout (see `chunks`).

Parameters that share memory cannot be separated: they stay on the device.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from protrain_runtime.contract.program.program import (
    SHARD_ALIGNMENT,
    grouped,
    in_blocks,
    shard_bytes,
)
from protrain_runtime.contract.records.plan import UnitPlan
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.chunks import ALIGNMENT, Chunk, Group, Slice, dense_strides
from protrain_runtime.states.sharing import CommonCopy, Region, Sharding
from protrain_runtime.states.stand_ins import AwayParameter


def make_chunk(
    unit: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    used_by: tuple[int, ...],
    *,
    alignment: int = ALIGNMENT,
) -> Chunk:
    """Lay `parameters` out in order, each at a multiple of `alignment` bytes."""
    groups: list[Group] = []
    offset = start = 0
    for members in grouped([in_blocks(parameter.nbytes, alignment) for _, parameter in parameters]):
        begin = offset
        slices: list[Slice] = []
        for name, parameter in parameters[members.start : members.stop]:
            part = _slice(name, parameter, (begin, offset - begin), len(groups), start)
            slices.append(part)
            offset += in_blocks(parameter.nbytes, alignment)
            start += part.numel if part.trainable else 0
        gradient_bytes = sum(part.num_bytes for part in slices if part.trainable)
        groups.append(Group(begin, offset - begin, tuple(slices), gradient_bytes))
    return Chunk(unit, tuple(groups), used_by)


def _slice(
    name: str, parameter: nn.Parameter, place: tuple[int, int], group: int, start: int
) -> Slice:
    """The slice of a parameter: in a group that begins at `place[0]`, from `place[1]` on."""
    return Slice(
        name=name,
        parameter=parameter,
        offset=sum(place),
        group=group,
        inside=place[1],
        start=start,
        shape=parameter.shape,
        stride=dense_strides(parameter),
        dtype=parameter.dtype,
        trainable=parameter.requires_grad,
    )


def make_sharded_chunk(
    unit: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    used_by: tuple[int, ...],
    ranks: Ranks,
    *,
    common_copy: bool = False,
) -> Chunk:
    """The chunk as on the device; `chunk.sharding.own` is this rank's shard."""
    groups: list[Group] = []
    own_groups: list[Group] = []
    regions: list[tuple[Region, ...]] = []
    copies: list[Region] = []
    offset = own_offset = start = own_start = 0
    for members in grouped([in_blocks(parameter.nbytes, ALIGNMENT) for _, parameter in parameters]):
        held = parameters[members.start : members.stop]
        slices: list[Slice] = []
        own: list[Slice] = []
        of_group: list[Region] = []
        inside = inside_own = trainable_bytes = own_trainable_bytes = 0
        for trainable in (True, False):
            mine = [pair for pair in held if pair[1].requires_grad == trainable]
            begin = inside
            for name, parameter in mine:
                first = start + inside // parameter.itemsize if trainable else 0
                part = _slice(name, parameter, (offset, inside), len(groups), first)
                slices.append(part)
                inside += in_blocks(part.num_bytes, SHARD_ALIGNMENT)
            if common_copy and not trainable:
                copied = sum(each.shard for each in copies)
                copies.append(Region(begin, copied, inside - begin))
                continue
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
        groups.append(Group(offset, inside, tuple(slices), trainable_bytes))
        own_groups.append(Group(own_offset, inside_own, tuple(own), own_trainable_bytes))
        regions.append(tuple(of_group))
        width = next((part.dtype.itemsize for part in slices if part.trainable), 1)
        offset, own_offset = offset + inside, own_offset + inside_own
        start += trainable_bytes // width
        own_start += own_trainable_bytes // width
    whole = Chunk(unit, tuple(groups), used_by)
    shard = Chunk(unit, tuple(own_groups), used_by)
    widths = [part.dtype.itemsize for part in whole.slices if part.trainable]
    whole.element_bytes = shard.element_bytes = widths[0] if widths else 0
    # One optimizer, one set of bookkeeping.
    shard.offloaded_gradients = whole.offloaded_gradients
    shard.current.updated, shard.current.scalars = whole.current.updated, whole.current.scalars
    frozen = any(region.shard for region in copies)
    common = CommonCopy(*ranks.in_node, tuple(copies)) if frozen else None
    whole.sharding = Sharding(ranks, tuple(regions), shard, common)
    return whole


def _own_part(
    part: Slice, region: Region, rank: int, own_offset: int, own_start: int
) -> list[Slice]:
    """A rank's flat part of a parameter; empty if it has none."""
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


def unit_parameters(
    model: nn.Module, units: Sequence[UnitPlan]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Each unit's parameters by name; tied ones by their first name."""
    by_name = dict(model.named_parameters(remove_duplicate=False))
    canonical = {parameter: name for name, parameter in model.named_parameters()}
    listed = {canonical[by_name[name]] for unit in units for name in unit.parameters}
    taken: set[str] = set()
    chunks: list[list[tuple[str, nn.Parameter]]] = []
    for unit in units:
        own = [canonical[by_name[name]] for name in unit.parameters]
        if unit.kind == "block":
            module = model.get_submodule(unit.name)
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
    """Make one chunk per unit; `ranks` shard those that are not persistent."""
    index_of = {unit.name: index for index, unit in enumerate(units)}
    chunks: list[Chunk] = []
    for index, parameters in enumerate(unit_parameters(model, units)):
        users = (index, *(index_of[name] for name in units[index].also_used_by))
        if ranks is None or units[index].states.is_persistent or not parameters:
            own = users if parameters else ()
            chunks.append(make_chunk(index, parameters, own, alignment=alignment))
        else:
            common = units[index].states.common_copy
            chunks.append(make_sharded_chunk(index, parameters, users, ranks, common_copy=common))
    return chunks


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte range of its storage that a tensor spans: [first, past)."""
    if tensor.numel() == 0:
        return 0, 0
    span = 1 + sum(int(n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + span * tensor.itemsize


ONE_STORAGE, OVERLAPPING = "parameters are views of one storage", "parameters share memory"


def sharing_memory(chunks: Sequence[Chunk]) -> dict[int, str]:
    """How units share memory: ONE_STORAGE with other units, or OVERLAPPING, with any parameter."""
    # By storage: each parameter's first byte, past, unit.
    members = defaultdict[int, list[tuple[int, int, int, nn.Parameter]]](list)
    for chunk in chunks:
        for part in chunk.slices:
            if part.numel and not isinstance(part.parameter, AwayParameter):
                storage = part.parameter.untyped_storage()._cdata
                members[storage].append((*extent(part.parameter), chunk.unit, part.parameter))
    together: set[int] = set()
    overlapping: set[int] = set()
    for of_storage in members.values():
        units = {unit for *_, unit, _ in of_storage}
        together |= units if len(units) > 1 else set()
        reached, last = 0, -1
        for first, past, unit, parameter in sorted(of_storage, key=lambda m: m[:3]):
            if past - first < parameter.numel() * parameter.itemsize:  # expanded
                overlapping.add(unit)
            if first < reached:
                overlapping |= {unit, last}
            if past > reached:
                reached, last = past, unit
    return dict.fromkeys(together, ONE_STORAGE) | dict.fromkeys(overlapping, OVERLAPPING)
