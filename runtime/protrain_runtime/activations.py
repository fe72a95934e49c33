"""Saved tensors: what autograd keeps for backward, kept in another form.

`SavedTensors` is the pair of hooks that is active while a unit's forward runs. What it is handed
falls into three kinds:

- a tensor that lies in a chunk's buffers is saved as a place in that chunk (`InChunk`) and rebuilt
  when the chunk is back, so that the buffers can go in between;
- where the unit swaps, a tensor that belongs to the unit alone is saved as a place in a swapped
  storage (`InSwapped`), each storage once, however many tensors share it;
- everything else is saved as it is.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from protrain_plan.records.profile import RecomputedForm
from protrain_runtime.chunks import Chunk
from protrain_runtime.draws import Draws
from protrain_runtime.replaying import replayed
from protrain_runtime.statistics import unchanged, with_running_statistics

MIN_SWAP_BYTES = 16 * 1024
"""Storages below this stay: a transfer's fixed cost outweighs them, and they add up to nothing."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage, in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "Geometry":
        offset = int(tensor.storage_offset())
        return Geometry(tensor.dtype, tensor.shape, tensor.stride(), offset)

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """The tensor again, in a storage given as uint8 [bytes]."""
        usable = storage.numel() // self.dtype.itemsize * self.dtype.itemsize
        typed = storage[:usable].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, self.offset)


class SwappedStorage:
    """One storage that leaves the device and comes back.

    `source` holds the bytes on the device until the way out has ended; `restored` holds them from
    the start of the way back. The saved tensors own the record, so that `restored` is freed when
    autograd has used the last of them, as it would free the storage itself.
    """

    __slots__ = ("__weakref__", "num_bytes", "offset", "restored", "source")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.source: torch.Tensor | None = as_bytes(storage)
        self.num_bytes = storage.nbytes()
        self.offset = -1  # in the tier's store
        self.restored: torch.Tensor | None = None

    def held_elsewhere(self) -> bool:
        """Whether anybody holds the storage besides `source`."""
        assert self.source is not None
        return num_holders(self.source.untyped_storage()) > 1

    def bytes(self) -> torch.Tensor:
        """The bytes from where they are now: back already, or not gone yet."""
        held = self.restored if self.restored is not None else self.source
        if held is None:
            raise RuntimeError("a swapped activation was asked for before it came back")
        return held


def num_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors hold a storage, besides the object that is asked about."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor over a whole storage.  # uint8 [bytes]"""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True, slots=True)
class InChunk:
    """A saved tensor that is a view of a chunk's parameters, in the buffer of one group."""

    chunk: Chunk
    group: int
    geometry: Geometry

    def tensor(self) -> torch.Tensor:
        assert self.group in self.chunk.buffers, "a chunk is gathered before its backward slot"
        return self.geometry.view(self.chunk.buffers[self.group])


@dataclass(frozen=True, slots=True)
class InSwapped:
    """A saved tensor that is a view of a swapped storage."""

    storage: SwappedStorage
    geometry: Geometry

    def tensor(self) -> torch.Tensor:
        return self.geometry.view(self.storage.bytes())


Saved = torch.Tensor | InChunk | InSwapped


class SavedTensors:
    """The hooks for one unit's forward.

    `chunks` are the offloaded chunks that the unit reads. If `swaps`, storages that belong to the
    unit are collected in `swapped`; `foreign` are the storages that do not (data pointers of the
    model's parameters and buffers, and of inputs that other units use as well). `own` are inputs
    that nobody else will hold, once the caller's frame has let go of them.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        swaps: bool,
        foreign: frozenset[int],
        own: Set[int] = frozenset(),
    ) -> None:
        self._buffers = {
            buffer.untyped_storage().data_ptr(): (chunk, group)
            for chunk in chunks
            for group, buffer in chunk.buffers.items()
        }
        self._swaps, self._foreign, self._own = swaps, foreign, own
        self._by_pointer: dict[int, SwappedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def swapped(self, *, outputs: frozenset[int]) -> list[SwappedStorage]:
        """The storages to take away, first saved first; the caller gives them up again.

        Those of the unit's `outputs` stay, which the next unit has, and those that somebody holds
        besides autograd, such as an attribute: a swap would free nothing.
        """
        storages: list[SwappedStorage] = []
        for pointer, storage in self._by_pointer.items():
            held = pointer not in self._own and storage.held_elsewhere()
            if pointer in outputs or held:
                # Served from where it is, as an unswapped saved tensor would be.
                storage.restored, storage.source = storage.source, None
            else:
                storages.append(storage)
        self._by_pointer.clear()
        return storages

    def _pack(self, tensor: torch.Tensor) -> Saved:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        place = self._buffers.get(pointer)
        if place is not None:
            return InChunk(*place, Geometry.of(tensor))
        if not self._swaps or pointer in self._foreign or storage.nbytes() < MIN_SWAP_BYTES:
            # The tensor itself would hold the graph that holds it.
            return tensor.detach()
        swapped = self._by_pointer.get(pointer)
        if swapped is None:
            swapped = self._by_pointer[pointer] = SwappedStorage(storage)
        return InSwapped(swapped, Geometry.of(tensor))


def _unpack(saved: Saved) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.tensor()


def recomputed(
    forward: Callable[..., object],
    form: RecomputedForm,
    *,
    module: nn.Module,
) -> Callable[..., object]:
    """`forward`, the code of `module`, keeping what `form` keeps and running once more in backward.

    Random states and autocast are those of the first run (torch.utils.checkpoint and `Draws`).
    Tensors in keyword arguments are handed over like positional ones, so that every input is seen
    by the saved-tensor hooks around it. Running statistics are written in the first run alone.
    """
    statistics = with_running_statistics(module)

    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        names = tuple(kwargs)
        draws = Draws(module)
        has_run = False

        def call(*flat: object) -> object:
            nonlocal has_run
            split = len(flat) - len(names)
            with ExitStack() as stack:
                stack.enter_context(draws.again() if has_run else draws.first())
                if has_run and statistics:
                    stack.enter_context(unchanged(statistics))
                has_run = True
                return forward(*flat[:split], **dict(zip(names, flat[split:], strict=True)))

        if form != "full":
            return replayed(call, *args, *kwargs.values(), form=form)
        result: object = checkpoint(call, *args, *kwargs.values(), use_reentrant=False)
        return result

    return run
