"""Stores: bytes below the device, in one address space per store.

Host memory is a set of buffers (pinned beside a device to copy to). Disk is one unnamed file.
"""

import ctypes
import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import FILE_BYTES, PASSAGE_BYTES
from protrain_runtime.contract.records.plan import StateTier
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.spill_file import SpillFile

Pairs = Sequence[tuple[int, torch.Tensor]]
"""Offsets in a store, and tensors to copy: uint8, contiguous, on the device or the host."""


MANY_VIEWS = 10_000
"""Most cached views of a store."""


@dataclass(eq=False)
class HostStore:
    """A tier in host memory. Every reservation is a buffer of exactly its size.

    [Note: reads and writes of a store] Reads and writes may overlap if their ranges do not. `read`
    and `write` return when done. Lanes use `start_read` and `start_write`, which only submit
    hardware copies to the current stream; the lane's ticket signals their end. Until then neither
    side may be freed, nor the host's be read.
    """

    backend: Backend
    _starts: list[int] = field(default_factory=list[int], init=False)  # of the buffers, ascending
    # uint8 [bytes]
    _buffers: list[torch.Tensor] = field(default_factory=list[torch.Tensor], init=False)
    # By offset and bytes.
    _views: dict[tuple[int, int], torch.Tensor] = field(
        default_factory=dict[tuple[int, int], torch.Tensor], init=False
    )
    num_bytes: int = field(default=0, init=False)  # the store's end

    def reserve(self, num_bytes: int) -> int:
        """Reserve `num_bytes` more; returns the offset. ProtrainError if there is no room."""
        return self.hold(self.backend.empty_host(num_bytes))

    def hold(self, buffer: torch.Tensor) -> int:
        """Take an existing buffer as a reservation; returns its offset.  # uint8 [bytes]"""
        offset = self.num_bytes
        self._starts.append(offset)
        self._buffers.append(buffer)
        self.num_bytes += buffer.numel()
        return offset

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The bytes in place.  # uint8 [num_bytes]"""
        index = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[index]
        return self._buffers[index][start : start + num_bytes]

    def views(self, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """`view` of offsets and bytes that mostly repeat in every step."""
        if len(self._views) > MANY_VIEWS:  # from varying batches
            self._views = {}
        known = self._views
        if new := [place for place in places if place not in known]:
            with torch.inference_mode(mode=False):  # writers may be outside inference mode
                known.update((place, self.view(*place)) for place in new)
        return [known[place] for place in places]

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy `source` (uint8, contiguous, on the device or the host) to the store."""
        # A copy from here may still run, for an evaluation whose output was not read: the device's
        # own copies queue behind it, the host's would not.
        if devices.on_host(source.device):
            devices.synchronize(self.backend.device)
        self.view(offset, source.numel()).copy_(source)

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fill `target` (uint8, contiguous, on the device or the host) from the store."""
        target.copy_(self.view(offset, target.numel()))

    def start_write(self, offset: int, source: torch.Tensor) -> None:
        """`write`, on the current stream."""
        self.view(offset, source.numel()).copy_(source, non_blocking=True)

    def start_read(self, offset: int, target: torch.Tensor) -> None:
        """`read`, on the current stream."""
        target.copy_(self.view(offset, target.numel()), non_blocking=True)

    def close(self) -> None:
        """Free everything; transfers have ended before."""
        devices.synchronize(self.backend.device)  # pages stay pinned during copies
        self._starts.clear()
        self._buffers.clear()
        self._views.clear()


class DeviceStore(HostStore):
    """Shards on the device itself. Every reservation is a buffer of exactly its size."""

    def reserve(self, num_bytes: int) -> int:
        return self.hold(self.backend.empty(num_bytes))


@dataclass(eq=False)
class CommonStore(HostStore):
    """Host memory that `count` processes share, in an unnamed file; only `write` changes it."""

    descriptor: int
    part_bytes: int  # this process's

    def write(self, offset: int, source: torch.Tensor) -> None:
        values = memory_of(source.cpu())
        while values:
            written = os.pwrite(self.descriptor, values, offset)
            offset, values = offset + written, values[written:]

    def close(self) -> None:
        if self._buffers:
            os.close(self.descriptor)
        super().close()


class DiskStore:
    """A tier in one unnamed file in `directory`: see `spill_file.py`.

    See [Note: reads and writes of a store]. Bytes between the file and an accelerator pass through
    the calling thread's pinned memory. `cached`: through the page cache, which the plan counts.
    """

    def __init__(
        self, directory: Path, backend: Backend | None = None, *, cached: bool = False
    ) -> None:
        self._directory, self._backend = directory, backend
        self._own = threading.local()
        self._passing_bytes = 0  # of all threads' passages
        try:
            self._file = SpillFile(directory, cached=cached)
        except OSError as error:
            raise ProtrainError(
                f"cannot write spill files: {error.strerror or error}",
                source=str(directory),
                fix="name a directory with spill_directory= (or --spill-directory)",
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of the file on disk."""
        return self._file.num_bytes

    @property
    def buffered(self) -> str:
        """The reason to use the page cache; empty: it is bypassed."""
        return self._file.reason

    @property
    def host_bytes(self) -> int:
        """Pinned, staging and edge bytes beside an accelerator; 0 on a CPU."""
        if self._backend is None or self._backend.on_host:
            return 0
        return self._passing_bytes + (FILE_BYTES if self._file.direct else 0)

    def reserve(self, num_bytes: int) -> int:
        with self._failing("given room"):
            try:
                return self._file.reserve(num_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    raise
                raise ProtrainError(
                    f"no room for {format_bytes(num_bytes)} of spilled bytes: {error.strerror}",
                    source=str(self._directory),
                    fix="free some space there, or name another spill directory",
                ) from error

    def write(self, offset: int, source: torch.Tensor) -> None:
        with self._failing("written"):
            if source.device.type == "cpu":
                self._file.write(offset, memory_of(source))
            else:
                self._passage.down(offset, source, self._file)

    def read(self, offset: int, target: torch.Tensor) -> None:
        with self._failing("read back"):
            if target.device.type == "cpu":
                self._file.read(offset, memory_of(target))
            else:
                self._passage.up(offset, target, self._file)

    start_write, start_read = write, read  # file transfers run on the thread itself

    @property
    def _passage(self) -> "_Passage":
        if not hasattr(self._own, "passage"):
            assert self._backend is not None, "only an accelerator's bytes pass through"
            self._own.passage = _Passage(self._backend)
            self._passing_bytes += PASSAGE_BYTES
        passage: _Passage = self._own.passage
        return passage

    def close(self) -> None:
        with suppress(OSError):  # its bytes are no longer needed
            self._file.close()

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ProtrainError(
                f"spilled bytes cannot be {what}: {error.strerror or error}",
                source=str(self._directory),
                fix="see whether its disk is full or faulty; train on from a checkpoint",
            ) from error


class _Passage:
    """Two halves of pinned memory: the file uses one while the device copies the other.

    Bytes are cut at offsets that are multiples of a half, and keep their place in it: blocks of the
    file are blocks of memory, as direct I/O requires.
    """

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        half = PASSAGE_BYTES // 2
        whole = backend.empty_host(PASSAGE_BYTES)
        self._whole = whole  # pinned while it lives
        self._halves = (whole[:half], whole[half:])

    def down(self, offset: int, source: torch.Tensor, file: SpillFile) -> None:
        """Copy from the device, on the current stream, and write every part."""
        pending: tuple[int, memoryview, torch.Event] | None = None
        for start, half in self._parts(offset, source.numel()):
            begin = start - offset
            half.copy_(source[begin : begin + half.numel()], non_blocking=True)
            arrived = devices.record_event(self._device)
            if pending is not None:
                pending[2].synchronize()
                file.write(*pending[:2])
            pending = start, memory_of(half), arrived
        if pending is not None:
            pending[2].synchronize()
            file.write(*pending[:2])

    def up(self, offset: int, target: torch.Tensor, file: SpillFile) -> None:
        """Read every part, and copy it to the device on the current stream."""
        gone: list[torch.Event] = []
        for start, half in self._parts(offset, target.numel()):
            if len(gone) > 1:
                gone[-2].synchronize()  # until then the device uses the half
            file.read(start, memory_of(half))
            begin = start - offset
            target[begin : begin + half.numel()].copy_(half, non_blocking=True)
            gone.append(devices.record_event(self._device))
        for event in gone[-2:]:
            event.synchronize()

    def _parts(self, offset: int, num_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Each part's offset in the file, and its buffer; halves alternate."""
        size, end, number = PASSAGE_BYTES // 2, offset + num_bytes, 0
        while offset < end:
            place = offset % size
            part = min(size - place, end - offset)
            yield offset, self._halves[number % 2][place : place + part]
            offset, number = offset + part, number + 1


Store = HostStore | DiskStore
"""A tier's bytes, at offsets."""


def copies(store: Store, pairs: Pairs, *, writes: bool) -> Callable[[], None]:
    """A function that starts the same reads or writes at each call."""
    if type(store) is HostStore and pairs:  # others inspect the bytes pair by pair
        beside = [tensor for _, tensor in pairs]
        inside = store.views([(offset, tensor.nbytes) for offset, tensor in pairs])
        filled, taken = (inside, beside) if writes else (beside, inside)
        return partial(torch._foreach_copy_, filled, taken, non_blocking=True)
    start = store.start_write if writes else store.start_read
    return partial(do_all, [partial(start, *pair) for pair in pairs])


def do_all(works: Sequence[Callable[[], None]]) -> None:
    """Do works one by one."""
    for work in works:
        work()


@dataclass(eq=False)
class SplitStore(HostStore):
    """Host memory and disk as one store: updates use host memory, `reads` both."""

    near: Store
    far: Store
    # By range: stores, and offsets there.
    _places: list[tuple[Store, int]] = field(default_factory=list[tuple[Store, int]], init=False)

    def reserve(self, num_bytes: int) -> int:
        return self.reserve_ranges([(num_bytes, False)])

    def reserve_ranges(self, ranges: Sequence[tuple[int, bool]]) -> int:
        """Reserve consecutive ranges by bytes and whether on disk; returns the first's offset."""
        first = self.num_bytes
        sizes = [sum(size for size, far in ranges if far == on_disk) for on_disk in (False, True)]
        stores = self.near, self.far
        offsets = [store.reserve(s) if s else 0 for store, s in zip(stores, sizes, strict=True)]
        before: bool | None = None
        for size, far in ranges:
            if far != before:  # neighbours in the same store are one range
                self._starts.append(self.num_bytes)
                self._places.append((stores[far], offsets[far]))
            before = far
            offsets[far] += size
            self.num_bytes += size
        return first

    def divided(self, pairs: Pairs) -> dict[Store, list[tuple[int, torch.Tensor]]]:
        """The bytes by store, at their offsets there."""
        found: dict[Store, list[tuple[int, torch.Tensor]]] = {}
        for offset, tensor in pairs:
            done, index = 0, bisect_right(self._starts, offset) - 1
            while done < tensor.numel():
                store, place = self._places[index]
                inside = offset + done - self._starts[index]
                index += 1
                end = self._starts[index] if index < len(self._starts) else self.num_bytes
                part = tensor[done : end - offset]
                found.setdefault(store, []).append((place + inside, part))
                done += part.numel()
        return found

    def reads(self, pairs: Pairs, tier: StateTier | None) -> Callable[[], None]:
        """A function that starts these reads, from one tier; None: from all."""
        works = [
            copies(store, own, writes=False)
            for store, own in self.divided(pairs).items()
            if tier in (None, "disk" if store is self.far else "host")
        ]
        return partial(do_all, works)

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        store, place = self._places[index := bisect_right(self._starts, offset) - 1]
        assert isinstance(store, HostStore), "what an optimizer works on is in host memory"
        return store.view(place + offset - self._starts[index], num_bytes)

    def write(self, offset: int, source: torch.Tensor) -> None:
        for store, pairs in self.divided([(offset, source)]).items():
            for place, part in pairs:
                store.write(place, part)

    def read(self, offset: int, target: torch.Tensor) -> None:
        for store, pairs in self.divided([(offset, target)]).items():
            for place, part in pairs:
                store.read(place, part)


TIERS: dict[StateTier, Callable[[Backend, Path, bool], Store]] = {
    "device": lambda backend, *_: DeviceStore(backend),
    "host": lambda backend, *_: HostStore(backend),
    "disk": lambda backend, directory, cached: DiskStore(directory, backend, cached=cached),
}
"""A factory per tier: a new tier is one entry."""


@dataclass(eq=False)
class Stores:
    """One store per tier, opened at first use."""

    backend: Backend
    directory: Path
    cached: bool = False
    _stores: dict[StateTier, Store] = field(default_factory=dict[StateTier, Store], init=False)
    _common: CommonStore | None = field(default=None, init=False)

    def get(self, tier: StateTier) -> Store:
        if tier not in self._stores:
            self._stores[tier] = TIERS[tier](self.backend, self.directory, self.cached)
        return self._stores[tier]

    @cached_property
    def split(self) -> SplitStore:
        """Host memory and disk as one store."""
        return SplitStore(self.backend, self.get("host"), self.get("disk"))

    def share(self, descriptor: int, num_bytes: int, count: int) -> CommonStore:
        """Map the memory of a file that `count` processes share."""
        self._common = CommonStore(self.backend, descriptor, -(-num_bytes // count))
        self._common.hold(self.backend.map_common(descriptor, num_bytes))
        return self._common

    @property
    def host_bytes(self) -> int:
        """Host bytes of the host tier, of a part of what is shared, and of passages to disk."""
        tier = self._stores["host"].num_bytes if "host" in self._stores else 0
        tier += self._common.part_bytes if self._common else 0
        disk = self._stores.get("disk")
        return tier + (disk.host_bytes if isinstance(disk, DiskStore) else 0)

    @property
    def disk_bytes(self) -> int:
        return self._stores["disk"].num_bytes if "disk" in self._stores else 0

    def close(self) -> None:
        for store in (*self._stores.values(), *([self._common] if self._common else [])):
            store.close()


@contextmanager
def in_rows(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's bytes, row-major; writes inside reach the tensor.  # uint8"""
    own = tensor.detach()
    dense = own.contiguous()
    yield dense.view(-1).view(torch.uint8)
    if dense is not own:
        own.copy_(dense)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 CPU tensor, kept alive by it."""
    assert tensor.is_contiguous() and tensor.dtype == torch.uint8
    if tensor.numel() == 0:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
