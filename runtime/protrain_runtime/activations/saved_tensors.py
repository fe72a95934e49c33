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
"""Smaller storages stay: a transfer's fixed cost outweighs them, and they add up to nothing."""


Geometry = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]
"""The place of a tensor in its storage: dtype, shape, stride and offset in elements, and whether it
is conjugated or negated, since autograd saves lazy conjugates, too."""


class SwappedStorage:
    """One storage that leaves the device and comes back.

    `source` holds the bytes on the device until the copy out has ended; `restored` holds them from
    the start of the copy back. The saved tensors own the record: `restored` is freed when autograd
    has used the last of them, as the storage itself would be.
    """

    __slots__ = ("__weakref__", "_saved", "_version", "num_bytes", "offset", "restored", "source")

    def __init__(self, storage: torch.UntypedStorage, saved: torch.Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.source: torch.Tensor | None = whole  # uint8 [bytes]
        # Counts writes to the saved tensor, as autograd does without hooks.
        self._saved: torch.Tensor | None = saved.detach()
        self._version = saved._version
        self.num_bytes = storage.nbytes()
        self.offset = -1  # in the tier's store
        self.restored: torch.Tensor | None = None

    def leave(self) -> None:
        """The copy out has ended: the store has the bytes as saved."""
        self._check()
        self.source = self._saved = None

    def stay(self) -> None:
        """Serve the bytes in place, as an unswapped saved tensor."""
        self.restored, self.source = self.source, None

    def _check(self) -> None:
        if self._saved is not None and self._saved._version != self._version:
            raise RuntimeError(
                "an activation was written in place after it was saved for backward, and the plan"
                " swaps it: write to a clone() of it"
            )

    def held_elsewhere(self) -> bool:
        """Whether the storage has other holders than this record."""
        assert self.source is not None
        return num_holders(self.source.untyped_storage()) > 2  # `source` and `_saved`

    def bytes(self) -> torch.Tensor:
        """The bytes: back already, or not gone yet."""
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
    """Whether a unit's backward slot has begun; `begin` begins it."""

    begin: Callable[[], None]
    begun: bool = False


Place = tuple["SwappedStorage | tuple[Chunk, int]", "Geometry | torch.Tensor"]
"""The saved form of a tensor: its swapped storage, or a chunk and one of its groups, and how it
lies there. It owns the record of a swapped storage. Of a buffer that lasts, it has the view itself.
"""


def _unpacking(slot: Begun) -> Callable[[Any], torch.Tensor]:
    """The hook that restores a saved tensor; it begins `slot` if needed."""

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

    `chunks` are the offloaded chunks that the unit reads. If `swaps`, the unit's own storages are
    collected in `swapped`; `foreign` are other storages (data pointers of the model's parameters,
    and of inputs that other units use as well). `own` are inputs without other holders once the
    caller's frame has released them. `handed_on` are outputs of the previous unit that it would
    swap, if a block returns its input: they leave with this unit, for both. `slot` begins before
    backward reads tensors that have left, at the latest. (Side computations of a unit may run
    before it in backward.)
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
        # By a buffer's storage: its place, and the saved views if it is reused.
        self._buffers: dict[int, tuple[tuple[Chunk, int], SavedViews | None]] = {}
        for chunk in chunks:
            for group, buffer in chunk.buffers.items():
                lasts = group in chunk.viewing
                views = chunk.saved.setdefault(group, []) if lasts else None
                self._buffers[_storage_of(buffer)] = (chunk, group), views
        self.swaps, self._foreign, self._own = swaps, foreign, own
        self._before: ByPointer = {} if handed_on is None else handed_on
        self.handed_on: ByPointer = {}
        # Tensors that autograd releases within the forward (of a detached graph) disappear here,
        # too: they are not swapped, and nothing holds them until the unit ends.
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
        """The storages that only autograd holds, except `outputs`."""
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

    # Runs for every saved tensor of every block, as `_unpacking` does: each call counts.
    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | Place":
        if tensor.layout != torch.strided:
            return tensor.detach()  # a sparse one consists of several tensors
        place: SwappedStorage | tuple[Chunk, int] | None
        held = self._buffers.get(_storage_of(tensor)) if self._buffers else None
        if held is not None:
            place, views = held
            if views is not None:
                # By class: parameters have an `isinstance` of their own.
                if issubclass(type(tensor), nn.Parameter):
                    return tensor
                view = tensor.detach()
                views.append(ref(view))
                return place, view
        elif not self.swaps or (place := self._swapped_place(tensor)) is None:
            return tensor.detach()  # the tensor itself would keep the graph alive that holds it
        return place, (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _swapped_place(self, tensor: torch.Tensor) -> SwappedStorage | None:
        """The record of a tensor's storage, made if new; None if it stays."""
        storage = tensor.untyped_storage()
        try:
            pointer = storage.data_ptr()
        except RuntimeError:  # a tangent of zeros (forward AD), without memory
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
