"""A forward without a graph: parameters of each unit are fetched for it and evicted after it.

It may run between a training forward and that forward's backward, as in losses that compare a model
with itself without adapters. Chunks on the device, or on their way there, stay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protrain_runtime.devices.stores import DeviceStore
from protrain_runtime.engine.moves import Moves
from protrain_runtime.states.chunks import Chunk


@dataclass(eq=False)
class EvaluationPass:
    """One forward without a graph; `arrived` waits for groups, `collect` runs collectives."""

    chunks: Sequence[Chunk]
    moves: Moves
    arrived: Callable[[Chunk], None]
    collect: Callable[[str, Callable[[], None]], None]
    # By unit, groups lent to this forward: fetched for it, and found unbound.
    _lent: dict[int, tuple[list[int], list[int]]] = field(
        default_factory=dict[int, tuple[list[int], list[int]]], init=False
    )

    def enter(self, unit: int) -> None:
        """Fetch the unit's parameters, and evict those of earlier units only."""
        for chunk in self.chunks:
            if unit in chunk.used_by:
                self.lend(chunk)
            elif chunk.unit in self._lent:
                chunk.refuse_written()
                self._take_back(chunk)

    def end(self, *, check: bool = True) -> None:
        """Return the chunks to their state before. Without `check`, writes are ignored."""
        for chunk in self.chunks if check else ():
            if chunk.unit in self._lent:
                chunk.refuse_written()
        for chunk in self.chunks:
            self._take_back(chunk)

    def lend(self, chunk: Chunk) -> None:
        """Bring a chunk until a unit begins that does not read it."""
        if chunk.unit in self._lent:
            return
        self.arrived(chunk)
        brought = [group for group in chunk.every_group if group not in chunk.buffers]
        found = [group for group in chunk.hollow if group in chunk.buffers]
        self._lent[chunk.unit] = brought, found
        if brought and not isinstance(chunk.store, DeviceStore):
            self.moves.fetch(chunk, brought, lent=True)()
        unbound = sorted((*brought, *found))
        if unbound and chunk.sharding is not None:
            # A chunk found may be this rank's shard alone, and all of it may be gathered twice.
            work = self.moves.all_gather(chunk, unbound, lent=True)
            self.collect(f"all-gather {chunk.unit}", work)
        chunk.bind(unbound)

    def _take_back(self, chunk: Chunk) -> None:
        brought, found = self._lent.pop(chunk.unit, ((), ()))
        chunk.release(brought)
        chunk.unbind(found)
