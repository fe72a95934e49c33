"""Forwards without a graph: what each unit reads is brought, and taken away after it.

One may run between a training forward and that forward's backward, as losses do that compare a
model with itself without its adapters. It finds some chunks on the device, and some on their way
there: those it leaves as they were.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from protrain_runtime.chunks import Chunk
from protrain_runtime.moves import Moves
from protrain_runtime.stores import DeviceStore


class _Lent(NamedTuple):
    """Groups of a chunk that the model has for this forward: brought for it, and found unbound."""

    brought: list[int]
    found: list[int]


def refuse_written(chunk: Chunk) -> None:
    """RuntimeError where a forward wrote to parameters that are about to be taken away."""
    if name := chunk.written:
        raise RuntimeError(
            f"the forward wrote to {name!r}, and the plan keeps that below the device: what was"
            " written would be lost. Profile the model as it runs now, which keeps it on the device"
        )


class Evaluation:
    """One forward without a graph over the offloaded `chunks`.

    `arrived` waits for a chunk's groups that are on their way; `collect` runs a collective.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        moves: Moves,
        *,
        arrived: Callable[[Chunk], None],
        collect: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._chunks, self._moves = chunks, moves
        self._arrived, self._collect = arrived, collect
        self._lent: dict[int, _Lent] = {}  # by unit

    def enter(self, unit: int) -> None:
        """Bring what the unit reads, and take away what only the units before it read."""
        for chunk in self._chunks:
            if unit in chunk.used_by:
                self.lend(chunk)
            elif chunk.unit in self._lent:
                refuse_written(chunk)
                self._take_back(chunk)

    def end(self, *, check: bool = True) -> None:
        """Leave the chunks as they were. Without `check`, whatever was written to them."""
        for chunk in self._chunks if check else ():
            if chunk.unit in self._lent:
                refuse_written(chunk)
        for chunk in self._chunks:
            self._take_back(chunk)

    def lend(self, chunk: Chunk) -> None:
        """Bring a chunk until a unit begins that does not read it."""
        if chunk.unit in self._lent:
            return
        self._arrived(chunk)
        brought = [group for group in chunk.every_group if group not in chunk.buffers]
        found = [group for group in chunk.hollow if group in chunk.buffers]
        self._lent[chunk.unit] = _Lent(brought, found)
        if brought and not isinstance(chunk.store, DeviceStore):
            self._moves.gather(chunk, brought)()
        unbound = sorted((*brought, *found))
        if unbound and chunk.sharding is not None:
            # What was found may be this rank's part alone, and all of it may be gathered twice.
            self._collect(f"all-gather {chunk.unit}", self._moves.all_gather(chunk, unbound))
        chunk.bind(unbound)

    def _take_back(self, chunk: Chunk) -> None:
        lent = self._lent.pop(chunk.unit, None)
        if lent is not None:
            chunk.release(lent.brought)
            chunk.unbind(lent.found)
