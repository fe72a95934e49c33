"""What each move of a programme does: the work for its lane, and what stands until it has ended.

[Note: who frees what]
Buffers are allocated and freed by the thread that computes, at slot boundaries only. A lane's work
borrows the tensors that it reads or fills: `start` is called when the move enters its lane, and
`end` when the engine has seen its end or has told compute to wait for it. On CUDA that order makes
the caching allocator safe: a buffer is freed after compute was ordered behind the copy out of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never
from weakref import ref

import torch

from protrain_plan.program import STAGING_PIECES, Move, Program, updated_in_place
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import Buffer, Offload, UnitPlan
from protrain_runtime.activations import SwappedStorage
from protrain_runtime.chunks import Chunk, OptimizerFactory, flat_storage_order
from protrain_runtime.lanes import Backend
from protrain_runtime.pieces import Piece
from protrain_runtime.stores import HostStore, Store

Options = Mapping[str, Mapping[str, Any]]
"""Hyperparameters by parameter name."""

Work = Callable[[], None]


class Moves:
    """The data side of a programme: chunks, swapped activations, optimizer pieces.

    `options` returns the hyperparameters that hold now.
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
    ) -> None:
        self._program, self._plans, self._chunks = program, plans, chunks
        self._backend, self._swap_stores = backend, swap_stores
        self._factory, self._options = factory, options
        reads = [n for n, move in enumerate(program.moves) if move.kind == "read states"]
        self._ring_place = {number: place % STAGING_PIECES for place, number in enumerate(reads)}
        self._ring: list[torch.Tensor] = []
        self._swap_offsets: dict[tuple[int, int], tuple[int, int]] = {}
        self._host_gradients: dict[int, torch.Tensor] = {}  # unit -> uint8 [gradient bytes]
        self._host_parameters: dict[int, torch.Tensor] = {}  # unit -> uint8 [buffer bytes]
        self.clear()

    def clear(self) -> None:
        """Forget the current step."""
        self.swapped: dict[int, list[ref[SwappedStorage]]] = {}  # what a unit's forward left
        self._held: dict[int, list[torch.Tensor]] = {}
        self._leaving: dict[int, list[SwappedStorage]] = {}
        self._arriving: dict[int, list[SwappedStorage]] = {}
        self._pieces: dict[tuple[int, int], Piece] = {}

    def make_staging(self) -> None:
        """Allocate the staging buffers, once there are optimizer states to read.

        Called between steps: a step reads all states or none.
        """
        if self._ring or not any(chunk.updated for chunk in self._chunks):
            return
        largest = 0
        for number in self._ring_place:
            move = self._program.moves[number]
            chunk = self._chunks[move.unit]
            count = chunk.cut(move.stop) - chunk.cut(move.start)
            largest = max(largest, count * sum(s.dtype.itemsize for s in chunk.states))
        for _ in range(min(STAGING_PIECES, len(self._ring_place))):
            self._ring.append(self._backend.empty_host(largest))

    @property
    def host_bytes(self) -> int:
        """Host memory for what an optimizer there works on: gradients, and parameters from disk."""
        arenas = (*self._host_gradients.values(), *self._host_parameters.values())
        return sum(arena.numel() for arena in arenas)

    def in_place(self, chunk: Chunk) -> bool:
        """Whether the chunk's buffer waits on the device for its update."""
        states = self._plans[chunk.unit].states
        return isinstance(states, Offload | Buffer) and updated_in_place(
            states, "cuda" if self._backend.is_cuda else "cpu"
        )

    def start(self, number: int) -> Work:
        """The move's work; what it needs is allocated now."""
        move = self._program.moves[number]
        chunk = self._chunks[move.unit]
        match move.kind:
            case "gather":
                return self._gather(chunk)
            case "swap out":
                return self._swap_out(number, move)
            case "swap in":
                return self._swap_in(move)
            case "spill gradients":
                return self._spill_gradients(number, chunk)
            case "read states":
                return self._read_states(number, move, chunk)
            case "update":
                return self._update(move, chunk)
            case "write states":
                return self._write_states(move, chunk)
            case _:
                assert_never(move.kind)

    def arrive(self, number: int) -> None:
        """A fetch has ended and its slot begins: give what it brought to the model."""
        move = self._program.moves[number]
        if move.kind == "gather":
            self._chunks[move.unit].bind()
        else:
            # From here on the saved tensors alone own what came back.
            self._arriving.pop(move.unit, None)

    def end(self, number: int) -> None:
        """The move has ended: free what stood for it."""
        self._held.pop(number, None)
        for storage in self._leaving.pop(number, ()):
            storage.source = None
        move = self._program.moves[number]
        chunk = self._chunks[move.unit]
        if move.kind == "write states" and move.stop == chunk.num_trainable:
            chunk.gradients.clear()
            self._host_parameters.pop(move.unit, None)
            if self.in_place(chunk):
                self.release(chunk)

    def release(self, chunk: Chunk) -> None:
        """Take the chunk's buffer off the device."""
        chunk.unbind()
        chunk.buffer = None

    def _gather(self, chunk: Chunk) -> Work:
        store = chunk.store
        assert store is not None
        buffer = chunk.buffer = self._backend.empty(chunk.buffer_bytes)
        return lambda: store.read(chunk.offset, buffer)

    def _swap_out(self, number: int, move: Move) -> Work:
        storages = [storage for weak in self.swapped.get(move.unit, ()) if (storage := weak())]
        self._leaving[number] = storages
        store = self._swap_store(move)
        for place, storage in enumerate(storages):
            storage.offset = self._swap_offset(move.unit, place, storage.num_bytes, store)

        def work() -> None:
            for storage in storages:
                assert storage.source is not None
                store.write(storage.offset, storage.source)

        return work

    def _swap_in(self, move: Move) -> Work:
        storages = [storage for weak in self.swapped.pop(move.unit, ()) if (storage := weak())]
        for storage in storages:
            storage.restored = self._backend.empty(storage.num_bytes)
        self._arriving[move.unit] = storages
        store = self._swap_store(move)
        pairs = [(storage.offset, storage.restored) for storage in storages]

        def work() -> None:
            for offset, restored in pairs:
                assert restored is not None
                store.read(offset, restored)

        return work

    def _swap_store(self, move: Move) -> Store:
        assert move.lane.tier is not None
        return self._swap_stores[move.lane.tier]

    def _swap_offset(self, unit: int, place: int, num_bytes: int, store: Store) -> int:
        """Where a unit's n-th storage goes: the same place every step while sizes stay."""
        known = self._swap_offsets.get((unit, place))
        if known is None or known[1] < num_bytes:
            known = (store.reserve(num_bytes), num_bytes)
            self._swap_offsets[unit, place] = known
        return known[0]

    def _spill_gradients(self, number: int, chunk: Chunk) -> Work:
        if chunk.unit not in self._host_gradients:
            self._host_gradients[chunk.unit] = self._backend.empty_host(chunk.gradient_bytes)
        arena = self._host_gradients[chunk.unit]
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 0
        for part in chunk.slices:
            if part.trainable and part.name in chunk.gradients:
                target = arena[offset : offset + part.num_bytes].view(part.dtype)
                gradient = dense(chunk.gradients[part.name], part.stride)
                pairs.append((target, flat_storage_order(gradient)))
                chunk.gradients[part.name] = target
            offset += part.num_bytes if part.trainable else 0
        self._held[number] = [source for _, source in pairs]

        def work() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        return work

    def _read_states(self, number: int, move: Move, chunk: Chunk) -> Work:
        piece = self._pieces[move.unit, move.start] = Piece(
            chunk, chunk.cut(move.start), chunk.cut(move.stop)
        )
        ring = self._ring[self._ring_place[number]] if self._ring else None
        if self.in_place(chunk) or move.start > 0:
            return lambda: piece.read(ring)
        # The optimizer runs on the host, and the chunk's parameters are fetched with its states.
        store = chunk.store
        assert store is not None
        parameters = self._backend.empty_host(chunk.buffer_bytes)
        self._host_parameters[chunk.unit] = parameters

        def work() -> None:
            store.read(chunk.offset, parameters)
            piece.read(ring)

        return work

    def _update(self, move: Move, chunk: Chunk) -> Work:
        on_host = isinstance(chunk.store, HostStore)
        if on_host:
            piece = Piece(chunk, move.start, move.stop)
        else:
            piece = self._pieces[move.unit, move.start]
        parameters, options = self._parameters(chunk), self._options()
        gradients = {
            part.name: flat_storage_order(dense(gradient, part.stride))
            for part in chunk.slices
            if (gradient := chunk.gradients.get(part.name)) is not None
        }

        def work() -> None:
            if on_host and chunk.updated:
                piece.view_states()
            piece.update(self._factory, options, parameters, gradients)
            if on_host:
                piece.write(parameters, write_parameters=False)
                chunk.gradients.clear()

        return work

    def _write_states(self, move: Move, chunk: Chunk) -> Work:
        piece = self._pieces.pop((move.unit, move.start))
        parameters = self._parameters(chunk)
        return lambda: piece.write(parameters, write_parameters=True)

    def _parameters(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes where its optimizer runs.  # uint8 [buffer_bytes]"""
        if isinstance(chunk.store, HostStore):
            return chunk.store.view(chunk.offset, chunk.buffer_bytes)
        if self.in_place(chunk):
            assert chunk.buffer is not None
            return chunk.buffer
        return self._host_parameters[chunk.unit]


def dense(gradient: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The gradient with the parameter's own strides; a copy only where they differ."""
    if gradient.dim() == 1 and gradient.stride() == (1,):
        return gradient  # flat already
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(
        gradient.shape, stride, dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
