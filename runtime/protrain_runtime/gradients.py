"""Where the gradients of offloaded chunks go: down to where they wait, to those before them."""

from collections.abc import Callable, Sequence

import torch

from protrain_plan.program import ARRIVING_GRADIENTS, Move, Program
from protrain_runtime.chunks import Chunk, flat_storage_order
from protrain_runtime.lanes import Backend
from protrain_runtime.waiting import Waiting, WaitingGradient, scaled


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
        self._rooms: list[torch.Tensor] = []  # uint8 [the most that arrives at once]
        # By unit: to what, what is added, and by what the sum so far is multiplied first.
        self._arrived: dict[int, list[tuple[Waiting, torch.Tensor, list[torch.Tensor]]]] = {}

    @property
    def rooms(self) -> Sequence[torch.Tensor]:
        """The buffers in which gradients arrive that are added to others."""
        return self._rooms

    def make_rooms(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the buffers, once."""
        if self._rooms or not self._place:
            return
        largest = max(chunks[unit].gradient_bytes for unit in self._place)
        self._rooms = [self._backend.empty_host(largest) for _ in range(ARRIVING_GRADIENTS)]

    def spill(self, move: Move, chunk: Chunk) -> tuple[Callable[[], None], list[torch.Tensor]]:
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
            waiting = chunk.waiting.get(part.name)
            if waiting is None:
                waiting = chunk.waiting[part.name] = Waiting(
                    store=store,
                    offset=chunk.gradient_offset + start,
                    shape=part.shape,
                    stride=part.stride,
                    dtype=part.dtype,
                    device=part.parameter.device,
                    norm=norm,
                )
                writes.append((waiting.offset, source))
            else:
                room = self._rooms[self._place[move.unit]][start : start + source.numel()]
                copies.append((room, source))
                self._arrived.setdefault(move.unit, []).append((waiting, room, waiting.factors))
                waiting.factors = []
            if self._after_backward:
                part.parameter.grad = WaitingGradient.of(waiting)

        def work() -> None:
            for offset, source in writes:
                store.start_write(offset, source)
            for room, source in copies:
                room.copy_(source, non_blocking=True)

        return work, [source for _, source in (*writes, *copies)]

    def add(self, move: Move) -> Callable[[], None]:
        """Add what arrived to what was there."""
        arrived = self._arrived.pop(move.unit, [])

        def work() -> None:
            for waiting, room, factors in arrived:
                total = waiting.in_host(0, waiting.shape.numel())
                scaled(total, factors).add_(room.view(waiting.dtype))

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
