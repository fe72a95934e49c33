"""Offloading of chunks: room for parameters, states and gradients in stores, and the first copy."""

from protrain_runtime.contract.program.program import ChunkSize, disk_pieces
from protrain_runtime.devices.stores import SplitStore, Store
from protrain_runtime.states.chunks import Chunk, Copy, StateKind, StateLayout, write_values
from protrain_runtime.states.stand_ins import AwayParameter
from protrain_runtime.states.update_rules import UpdateRules


def offload(
    chunk: Chunk,
    store: Store,
    rules: UpdateRules,
    *,
    gradient_store: Store | None = None,
    speculate: bool = False,
    on_disk: int = 0,
) -> None:
    """Copy the parameters to `store`, and reserve their and their states' places there.

    Of frozen parameters, `on_disk` sixteenths go to the disk of a split store. Gradients get places
    in `gradient_store`. If sharded, only this rank's shard. With `speculate`, a second copy gets
    places. The parameters stay in place until `unbind`.
    """
    own = chunk.own
    dtypes = {part.dtype for part in chunk.slices if part.trainable}
    assert len(dtypes) <= 1, "a chunk's trainable parameters share one dtype"
    for part in chunk.slices:
        if part.trainable:
            chunk.rules[part.name] = part.rule(rules)
    own.rules = chunk.rules
    kinds = _state_kinds(chunk)
    for copy in (own.current, *([Copy()] if speculate else [])):
        copy.offset = (
            store.reserve_ranges(_ranges(own, chunk.size(rules), on_disk))
            if isinstance(store, SplitStore)
            else store.reserve(own.parameter_bytes)
        )
        copy.states = tuple(
            StateLayout(
                key=key, rule=rule, offset=store.reserve(count * rule.dtype.itemsize), starts=starts
            )
            for (key, rule), (starts, count) in kinds.items()
        )
        own.spare = None if copy is own.current else copy
    chunk.store = own.store = store
    for part in chunk.slices:
        if not isinstance(part.parameter, AwayParameter):  # values come later
            write_values(chunk, part, part.parameter)
    if gradient_store is not None:
        own.gradient_store = gradient_store
        own.gradient_offset = gradient_store.reserve(own.gradient_bytes)


def _ranges(chunk: Chunk, size: ChunkSize, on_disk: int) -> list[tuple[int, bool]]:
    """The ranges of a chunk's parameters: bytes, and whether on disk."""
    found: list[tuple[int, bool]] = []
    for group, left in zip(chunk.groups, disk_pieces(size, on_disk), strict=True):
        ends = [part.inside for part in group.slices[1:]]
        for part, end in zip(group.slices, (*ends, group.num_bytes), strict=True):
            near = part.num_bytes if part.trainable else 0  # the gap after it may be on disk
            far = min(left, end - part.inside - near)
            left -= far
            found += [(near, False), (far, True), (end - part.inside - near - far, False)]
    return [one for one in found if one[0]]


def _state_kinds(chunk: Chunk) -> dict[StateKind, tuple[dict[str, int], int]]:
    """A chunk's kinds of states: each parameter's first value, and the number of values."""
    kinds: dict[StateKind, tuple[dict[str, int], int]] = {}
    trainable = [part for part in chunk.slices if part.trainable]
    if chunk.sharding is not None:
        # All of one kind; padding has values, too. A parameter without elements on this rank is
        # asked for its states all the same.
        starts = {part.name: 0 for part in trainable}
        starts |= {part.name: part.start for part in chunk.own.slices if part.trainable}
        own = (starts, chunk.own.num_trainable)
        return {kind: own for part in trainable for kind in chunk.rules[part.name].states.items()}
    for part in trainable:
        for kind in chunk.rules[part.name].states.items():
            starts, count = kinds.get(kind, ({}, 0))
            starts[part.name] = count
            kinds[kind] = starts, count + kind[1].count(part.numel)
    return kinds
