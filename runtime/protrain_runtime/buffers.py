"""Device buffers, handed from what leaves at a slot's boundary to what is fetched there.

On a CPU a fresh buffer costs a page fault per page, in the lane that fills it first: reading a
chunk from the page cache runs at a third of its speed then (docs/decisions.md, *Buffers are handed
on*). Blocks are alike, so a chunk that leaves after a slot has buffers of just the sizes that the
fetch at the next slot's start asks for. Nothing stands longer than it would without this: what no
fetch of that boundary takes is freed before the boundary ends.
"""

from collections import Counter
from collections.abc import Iterable

import torch

from protrain_runtime.lanes import Backend


class Buffers:
    """Makes buffers on the device; those given up at a boundary serve first.

    An accelerator's allocator keeps freed blocks by itself.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._spare: list[torch.Tensor] = []

    def new(self, num_bytes: int) -> torch.Tensor:
        """A buffer of that size, with any content.  # uint8 [num_bytes]"""
        for place, buffer in enumerate(self._spare):
            if buffer.numel() == num_bytes:
                return self._spare.pop(place)
        return self._backend.empty(num_bytes)

    def give_up(self, buffers: Iterable[torch.Tensor]) -> None:
        """Let these serve again, but for those that somebody else still looks into."""
        if self._backend.on_host:
            self._spare += [buffer for buffer in buffers if not is_held(buffer)]

    def keep_for(self, sizes: Iterable[int]) -> None:
        """Free what is spare beyond a buffer for each of `sizes`."""
        wanted, kept = Counter(sizes), list[torch.Tensor]()
        for buffer in self._spare:
            if wanted[buffer.numel()]:
                wanted[buffer.numel()] -= 1
                kept.append(buffer)
        self._spare = kept


def is_held(buffer: torch.Tensor) -> bool:
    """Whether another tensor has the buffer's storage: a model may hand a parameter's view on."""
    return _holders(buffer) != _ONE_HOLDER


def _holders(buffer: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count


_ONE_HOLDER = _holders(torch.empty(1))
