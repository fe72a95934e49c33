"""Saved tensors: what autograd keeps for backward, kept in another form.

`SavedTensors` is the pair of hooks that is active while a unit's forward runs. What it is handed
falls into three kinds:

- a tensor that lies in a chunk's buffers is saved as a place in that chunk and rebuilt when the
  chunk is back, so that the buffers can go in between; where these last, as a view that the chunk
  knows of;
- where the unit swaps, a tensor that belongs to the unit alone is saved as a place in a swapped
  storage, each storage once, however many tensors share it;
- everything else is saved as it is.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from protrain_runtime.devices.lanes import num_holders
from protrain_runtime.states.chunks import Chunk, SavedViews

MIN_SWAP_BYTES = 16 * 1024
"""Storages below this stay: a transfer's fixed cost outweighs them, and they add up to nothing."""


Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]
"""The place of a tensor in its storage: dtype, shape, stride and offset in elements, and whether it
is conjugated or negated, since autograd saves lazy conjugates, too."""


class SwappedStorage:
    """One storage that leaves the device and comes back.

    `source` holds the bytes on the device until the way out has ended; `restored` holds them from
    the start of the way back. The saved tensors own the record, so that `restored` is freed when
    autograd has used the last of them, as it would free the storage itself.
    """

    __slots__ = ("__weakref__", "_saved", "_version", "num_bytes", "offset", "restored", "source")

    def __init__(self, storage: torch.UntypedStorage, saved: torch.Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.source: torch.Tensor | None = whole  # uint8 [bytes]
        # Counts the writes to what was saved, as autograd does where no hooks take it.
        self._saved: torch.Tensor | None = saved.detach()
        self._version = saved._version
        self.num_bytes = storage.nbytes()
        self.offset = -1  # in the tier's store
        self.restored: torch.Tensor | None = None

    def leave(self) -> None:
        """The way out has ended: the bytes are in the store, as they were saved."""
        self._check()
        self.source = self._saved = None

    def stay(self) -> None:
        """Serve the bytes from where they are, as an unswapped saved tensor would be."""
        self.restored, self.source = self.source, None

    def _check(self) -> None:
        if self._saved is not None and self._saved._version != self._version:
            raise RuntimeError(
                "an activation was written in place after it was saved for backward, and the plan"
                " swaps it: write to a clone() of it"
            )

    def held_elsewhere(self) -> bool:
        """Whether anybody holds the storage besides this record."""
        assert self.source is not None
        return num_holders(self.source.untyped_storage()) > 2  # `source` and `_saved`

    def bytes(self) -> torch.Tensor:
        """The bytes from where they are now: back already, or not gone yet."""
        self._check()
        held = self.restored if self.restored is not None else self.source
        if held is None:
            raise RuntimeError("a swapped activation was asked for before it came back")
        return held


_storage_of: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

ByPointer = dict[int, ref[SwappedStorage]]
"""By data pointer; the saved tensors own the records."""


@dataclass(slots=True)
class Begun:
    """Whether a unit's backward slot has begun; `begin` is called before, to begin it."""

    begin: Callable[[], None]
    begun: bool = False


Place = tuple["SwappedStorage | tuple[Chunk, int]", "Geometry | torch.Tensor"]
"""The saved form of a tensor: its swapped storage, or a chunk and one of its groups, and how it
lies there. It owns the record of a swapped storage. Of a buffer that lasts, it has the view itself.
"""


def _unpacking(slot: Begun) -> Callable[[Any], torch.Tensor]:
    """The hook that gives a saved tensor again; it begins `slot` where that has not begun."""

    def unpack(saved: torch.Tensor | Place) -> torch.Tensor:
        if not isinstance(saved, tuple):
            return saved
        place, lies = saved
        if not slot.begun:
            slot.begin()
        if isinstance(place, SwappedStorage):
            storage = place.bytes()
        else:
            chunk, group = place
            if group not in chunk.buffers:
                raise RuntimeError(
                    "backward read parameters when the slot of the unit that had saved them was"
                    " over: profile the model as it runs now"
                )
            storage = chunk.buffers[group]
        if not isinstance(lies, tuple):
            return lies
        dtype, shape, stride, offset, is_conj, is_neg = lies
        if beyond := storage.numel() % dtype.itemsize:
            storage = storage[:-beyond]
        found = storage.view(dtype).as_strided(shape, stride, offset)
        if is_conj:
            found = found.conj()
        return torch._neg_view(found) if is_neg else found

    return unpack


class SavedTensors:
    """The hooks for one unit's forward.

    `chunks` are the offloaded chunks that the unit reads. If `swaps`, storages that belong to the
    unit are collected in `swapped`; `foreign` are the storages that do not (data pointers of the
    model's parameters, and of inputs that other units use as well). `own` are inputs without other
    holders once the caller's frame has released them. `handed_on` are those that the unit before
    would swap and has handed on: a block that returns its input. They leave with this unit, for
    both. `slot` is asked before backward reads what has left: it begins then, at the latest. (What
    a unit computes beside what it hands on may come before it in backward.)
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        swaps: bool,
        foreign: frozenset[int],
        own: Set[int] = frozenset(),
        handed_on: "ByPointer | None" = None,
        slot: Begun,
    ) -> None:
        self._slot = slot
        # By the storage of a buffer: its place, and the views that are saved of one that lasts.
        self._buffers: dict[int, tuple[tuple[Chunk, int], SavedViews | None]] = {}
        for chunk in chunks:
            for group, buffer in chunk.buffers.items():
                lasts = group in chunk.viewing
                views = chunk.saved.setdefault(group, []) if lasts else None
                self._buffers[_storage_of(buffer)] = (chunk, group), views
        self.swaps, self._foreign, self._own = swaps, foreign, own
        self._before: ByPointer = {} if handed_on is None else handed_on
        self.handed_on: ByPointer = {}
        # What autograd releases within the forward (the graph of what is detached) is gone here,
        # too: it does not leave, and nothing holds it until the unit ends.
        self._by_pointer: ByPointer = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpacking(slot))

    def __enter__(self) -> None:
        self._open = True
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._open = False
            self._hooks.__exit__()

    def swapped(self, *, outputs: frozenset[int]) -> list[SwappedStorage]:
        """The storages that only autograd holds, other than `outputs`."""
        storages: list[SwappedStorage] = []
        for pointer, reference in self._by_pointer.items():
            if (storage := reference()) is None:
                continue
            if pointer in outputs:
                storage.stay()
                self.handed_on[pointer] = reference
            elif pointer not in self._own and storage.held_elsewhere():
                storage.stay()
            else:
                storages.append(storage)
        self._by_pointer.clear()
        return storages

    # It runs for every tensor that every block saves, as `_unpacking` does: each call is felt.
    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | Place":
        if tensor.layout != torch.strided:
            return tensor.detach()  # a sparse one is of several tensors
        place: SwappedStorage | tuple[Chunk, int] | None
        held = self._buffers.get(_storage_of(tensor)) if self._buffers else None
        if held is not None:
            place, views = held
            if views is not None:
                # Asked of its class, since parameters have an `isinstance` of their own.
                if issubclass(type(tensor), nn.Parameter):
                    return tensor
                view = tensor.detach()
                views.append(ref(view))
                return place, view
        elif not self.swaps or (place := self._swapped_place(tensor)) is None:
            return tensor.detach()  # the tensor itself would hold the graph that holds it
        return place, (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _swapped_place(self, tensor: torch.Tensor) -> SwappedStorage | None:
        """The record of a tensor's storage, made where it is new; None where it stays."""
        storage = tensor.untyped_storage()
        try:
            pointer = storage.data_ptr()
        except RuntimeError:  # a tangent of zeros (forward AD), which has no memory
            return None
        if pointer in self._foreign or storage.nbytes() < MIN_SWAP_BYTES:
            return None
        known = self._by_pointer.get(pointer)
        swapped = None if known is None else known()
        if swapped is None:
            known = self._before.pop(pointer, None)
            swapped = None if known is None else known()
            if swapped is None:
                swapped = SwappedStorage(storage, tensor)
            else:
                swapped.restored, swapped.source = None, swapped.restored  # it goes with this unit
            self._by_pointer[pointer] = ref(swapped)
        return swapped
