"""Stores: where bytes live below the device. One address space of bytes per store.

Host memory is a set of buffers (pinned where there is a device to copy to). Disk is one unnamed
file.
"""

import ctypes
import errno
import os
import threading
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import FILE_BYTES, PASSAGE_BYTES
from protrain_runtime.contract.records.plan import StateTier
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.spill_file import SpillFile

Pairs = Sequence[tuple[int, torch.Tensor]]
"""Offsets in a store, and tensors beside it: uint8, contiguous, on the device or the host."""


MANY_VIEWS = 10_000
"""Views of a store that are kept at most."""


class HostStore:
    """A tier in host memory. Every reservation is a buffer of exactly its size.

    [Note: reads and writes of a store]
    Reads and writes may overlap if their ranges do not. `read` and `write` have ended when they
    return. A lane uses `start_read` and `start_write`: what the hardware can do by itself is only
    submitted to the current stream, and the lane's ticket tells its end. Until then nobody may free
    either side, or look at the host's.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._starts: list[int] = []  # of the buffers, ascending
        self._buffers: list[torch.Tensor] = []  # uint8 [bytes]
        self._views: dict[tuple[int, int], torch.Tensor] = {}  # by offset and bytes
        self.num_bytes = 0  # how far the store reaches

    def reserve(self, num_bytes: int) -> int:
        """Room for `num_bytes` more; returns its offset. ProtrainError where there is none."""
        return self.hold(self._empty(num_bytes))

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return self._backend.empty_host(num_bytes)

    def hold(self, buffer: torch.Tensor) -> int:
        """Take a buffer that there is as a reservation; returns its offset.  # uint8 [bytes]"""
        offset = self.num_bytes
        self._starts.append(offset)
        self._buffers.append(buffer)
        self.num_bytes += buffer.numel()
        return offset

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The bytes in place, for whoever changes none, or is inside `in_place`.  # uint8"""
        index = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[index]
        return self._buffers[index][start : start + num_bytes]

    def views(self, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """`view` of offsets and bytes that are mostly the same in every step."""
        if len(self._views) > MANY_VIEWS:  # of batches that differ
            self._views = {}
        known = self._views
        if new := [place for place in places if place not in known]:
            with torch.inference_mode(mode=False):  # who writes to it may be in none
                known.update((place, self.view(*place)) for place in new)
        return [known[place] for place in places]

    def in_place(self, offset: int, num_bytes: int) -> AbstractContextManager[torch.Tensor]:
        """The bytes for the host to change where they are.  # uint8 [num_bytes]"""
        return nullcontext(self.view(offset, num_bytes))

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy `source` (uint8, contiguous, on the device or the host) to the store."""
        # A copy from here may be on its way still, of an evaluation that nobody has looked at: the
        # device's own copies queue behind it, the host's would not.
        if devices.on_host(source.device):
            self._backend.synchronize()
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
        """Free everything. What is in flight has ended before."""
        self._backend.synchronize()  # pages are not unpinned under a copy
        self._starts.clear()
        self._buffers.clear()
        self._views.clear()


class DeviceStore(HostStore):
    """Shards on the device itself. Every reservation is a buffer of exactly its size."""

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return self._backend.empty(num_bytes)


class CommonStore(HostStore):
    """Host memory that `count` processes share, in one file without a name.

    Nothing in it changes but by `write`, which goes through the file: who reads has waited for who
    writes. It is not checked.
    """

    def __init__(self, backend: Backend, descriptor: int, num_bytes: int, count: int) -> None:
        super().__init__(backend)
        self._descriptor = descriptor
        self.part_bytes = -(-num_bytes // count)  # of this process
        self.hold(backend.map_common(descriptor, num_bytes))

    def write(self, offset: int, source: torch.Tensor) -> None:
        values = memory_of(source.cpu())
        while values:
            written = os.pwrite(self._descriptor, values, offset)
            offset, values = offset + written, values[written:]

    def close(self) -> None:
        if self._buffers:
            os.close(self._descriptor)
        super().close()


class DiskStore:
    """A tier in one unnamed file in `directory`: see `spill_file.py`.

    See [Note: reads and writes of a store]. Between the file and an accelerator bytes pass through
    pinned memory of the calling thread. `cached`: through the page cache, which the plan counts.
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
        """Bytes of the file on the disk."""
        return self._file.num_bytes

    @property
    def buffered(self) -> str:
        """Why bytes go through the page cache; empty where they do not."""
        return self._file.reason

    @property
    def host_bytes(self) -> int:
        """Pinned, staging and edge bytes beside an accelerator; 0 on a CPU."""
        if self._backend is None or self._backend.on_host:
            return 0
        return self._passing_bytes + (FILE_BYTES if self._file.direct else 0)

    def reserve(self, num_bytes: int) -> int:
        try:
            return self._file.reserve(num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise self._failed("given room", error) from error
            raise ProtrainError(
                f"no room for {format_bytes(num_bytes)} of spilled bytes: {error.strerror}",
                source=str(self._directory),
                fix="free some space there, or name another spill directory",
            ) from error

    def write(self, offset: int, source: torch.Tensor) -> None:
        if source.device.type == "cpu":
            self._write(offset, source)
        else:
            self._passage.down(offset, source, self._write)

    def read(self, offset: int, target: torch.Tensor) -> None:
        if target.device.type == "cpu":
            self._read(offset, target)
        else:
            self._passage.up(offset, target, self._read)

    start_write, start_read = write, read  # files are the thread's own work

    @property
    def _passage(self) -> "_Passage":
        if not hasattr(self._own, "passage"):
            assert self._backend is not None, "only an accelerator's bytes pass through"
            self._own.passage = _Passage(self._backend)
            self._passing_bytes += PASSAGE_BYTES
        passage: _Passage = self._own.passage
        return passage

    def _write(self, offset: int, source: torch.Tensor) -> None:
        try:
            self._file.write(offset, memory_of(source))
        except OSError as error:
            raise self._failed("written", error) from error

    def _read(self, offset: int, target: torch.Tensor) -> None:
        try:
            self._file.read(offset, memory_of(target))
        except OSError as error:
            raise self._failed("read back", error) from error

    def close(self) -> None:
        with suppress(OSError):  # of bytes that nobody reads any more
            self._file.close()

    def _failed(self, what: str, error: OSError) -> ProtrainError:
        return ProtrainError(
            f"spilled bytes cannot be {what}: {error.strerror or error}",
            source=str(self._directory),
            fix="see whether its disk is full or faulty; train on from a checkpoint",
        )


class _Passage:
    """Two halves of pinned memory: while the file has one, the device copies the other.

    Bytes are cut where their offsets are multiples of a half, and lie in one as they do in the
    file: so blocks of the file are blocks of memory, which direct I/O asks for.
    """

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        half = PASSAGE_BYTES // 2
        whole = backend.empty_host(PASSAGE_BYTES)
        self._whole = whole  # pinned while it lives
        self._halves = (whole[:half], whole[half:])

    def down(
        self, offset: int, source: torch.Tensor, write: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Copy from the device, in the current stream, and hand every part to `write`."""
        pending: tuple[int, torch.Tensor, torch.Event] | None = None
        for start, half in self._parts(offset, source.numel()):
            begin = start - offset
            half.copy_(source[begin : begin + half.numel()], non_blocking=True)
            arrived = devices.record_event(self._device)
            if pending is not None:
                pending[2].synchronize()
                write(*pending[:2])
            pending = start, half, arrived
        if pending is not None:
            pending[2].synchronize()
            write(*pending[:2])

    def up(
        self, offset: int, target: torch.Tensor, read: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Let `read` fill every part, and copy it to the device in the current stream."""
        gone: list[torch.Event] = []
        for start, half in self._parts(offset, target.numel()):
            if len(gone) > 1:
                gone[-2].synchronize()  # the half is the device's until then
            read(start, half)
            begin = start - offset
            target[begin : begin + half.numel()].copy_(half, non_blocking=True)
            gone.append(devices.record_event(self._device))
        for event in gone[-2:]:
            event.synchronize()

    def _parts(self, offset: int, num_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Where each part begins in the file, and its room; halves by turns."""
        size, end, number = PASSAGE_BYTES // 2, offset + num_bytes, 0
        while offset < end:
            place = offset % size
            part = min(size - place, end - offset)
            yield offset, self._halves[number % 2][place : place + part]
            offset, number = offset + part, number + 1


Store = HostStore | DiskStore
"""Where a tier's bytes lie, at offsets."""


def copies(store: Store, pairs: Pairs, *, writes: bool) -> Callable[[], None]:
    """Make a function that starts the same reads, or writes, at each call."""
    if type(store) is HostStore and pairs:  # others look at the bytes, one pair after the other
        beside = [tensor for _, tensor in pairs]
        inside = store.views([(offset, tensor.nbytes) for offset, tensor in pairs])
        filled, taken = (inside, beside) if writes else (beside, inside)
        return partial(torch._foreach_copy_, filled, taken, non_blocking=True)
    start = store.start_write if writes else store.start_read

    def each() -> None:
        for offset, tensor in pairs:
            start(offset, tensor)

    return each


Describe = Callable[[Store, int, int], str]
"""Words for what lies between two offsets of a store."""


class CheckedHostStore(HostStore):
    """Host memory that is checked: its lanes are threads, whatever the hardware could do."""

    def __init__(self, backend: Backend, describe: Describe) -> None:
        super().__init__(backend)
        self._sums = BlockSums(
            self._look, partial(describe, self), "in host memory", "the machine's memory"
        )

    def reserve(self, num_bytes: int) -> int:
        offset = super().reserve(num_bytes)
        self.view(offset, num_bytes).zero_()
        self._sums.reserve(offset, num_bytes)
        return offset

    def start_write(self, offset: int, source: torch.Tensor) -> None:
        # Blocking: what is summed next has arrived.
        self._sums.write(offset, source, lambda at, part: self.view(at, part.numel()).copy_(part))

    def start_read(self, offset: int, target: torch.Tensor) -> None:
        self._sums.check(offset, target.numel())
        super().start_read(offset, target)

    def write(self, offset: int, source: torch.Tensor) -> None:
        if devices.on_host(source.device):
            self._backend.synchronize()  # as without sums
        self.start_write(offset, source)

    def read(self, offset: int, target: torch.Tensor) -> None:
        self._sums.check(offset, target.numel())
        super().read(offset, target)

    @contextmanager
    def in_place(self, offset: int, num_bytes: int) -> Iterator[torch.Tensor]:
        with self._sums.changed_in_place(offset, num_bytes):
            yield self.view(offset, num_bytes)

    def _look(self, start: int, stop: int) -> memoryview:
        return memory_of(self.view(start, stop - start))


class CheckedDiskStore(DiskStore):
    """The spill file, checked."""

    def __init__(
        self, directory: Path, backend: Backend | None, describe: Describe, *, cached: bool = False
    ) -> None:
        super().__init__(directory, backend, cached=cached)
        self._sums = BlockSums(
            self._look,
            partial(describe, self),
            "on disk",
            "the disk and the machine's memory",
            source=str(directory),
        )

    def reserve(self, num_bytes: int) -> int:
        offset = super().reserve(num_bytes)
        self._sums.reserve(offset, num_bytes)
        return offset

    def _write(self, offset: int, source: torch.Tensor) -> None:
        self._sums.write(offset, source, super()._write)

    def _read(self, offset: int, target: torch.Tensor) -> None:
        super()._read(offset, target)
        self._sums.check(offset, target.numel(), memory_of(target))

    def _look(self, start: int, stop: int) -> memoryview:
        held = torch.empty(stop - start, dtype=torch.uint8)
        super()._read(start, held)
        return memory_of(held)


TIERS: dict[StateTier, Callable[[Backend, Path, bool, Describe | None], Store]] = {
    "device": lambda backend, *_: DeviceStore(backend),
    "host": lambda backend, _, __, describe: (
        CheckedHostStore(backend, describe) if describe else HostStore(backend)
    ),
    "disk": lambda backend, directory, cached, describe: (
        CheckedDiskStore(directory, backend, describe, cached=cached)
        if describe
        else DiskStore(directory, backend, cached=cached)
    ),
}
"""A factory of a tier's store, one that checks its bytes where it is given what names them: a new
tier is one entry."""


class Stores:
    """One store per tier, opened when first asked for; `describe` names bytes in errors."""

    def __init__(
        self, backend: Backend, directory: Path, *, checked: bool = False, cached: bool = False
    ) -> None:
        self._backend, self.checked = backend, checked
        self._directory, self._cached = directory, cached
        self._stores: dict[StateTier, Store] = {}
        self._common: CommonStore | None = None
        self.describe: Describe = lambda *_: "the model's"

    def get(self, tier: StateTier) -> Store:
        if tier not in self._stores:
            # `describe` is set once there is something to describe: it is looked up when called.
            describe = (lambda *where: self.describe(*where)) if self.checked else None
            open_tier = TIERS[tier]
            self._stores[tier] = open_tier(self._backend, self._directory, self._cached, describe)
        return self._stores[tier]

    def share(self, descriptor: int, num_bytes: int, count: int) -> CommonStore:
        """Open the memory of a file that `count` processes share."""
        self._common = CommonStore(self._backend, descriptor, num_bytes, count)
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


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 CPU tensor, which it keeps alive."""
    assert tensor.is_contiguous() and tensor.dtype == torch.uint8
    if tensor.numel() == 0:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


# --- checksums of what is spilled, for `prepare(..., check="spills")` -----------------------------

# [Note: who holds a region's lock]
# Ranges that are read and written at once do not overlap, but the blocks at their ends may be the
# same ones. Whoever looks at a part of a block, or changes bytes in place, holds the lock of the
# region meanwhile. Whole blocks belong to one range, and need none.

BLOCK_BYTES = 2**16
"""A sum's four bytes are 1/16,384 of it. Half the size costs as much again in calls of `crc32`; a
write of a few bytes has to look at all of a block."""


class _Region(NamedTuple):
    """A reservation; its first block has number `first`."""

    start: int
    num_bytes: int
    first: int
    lock: AbstractContextManager[object]


class _Block(NamedTuple):
    number: int
    start: int
    stop: int


class _Part(NamedTuple):
    """A range that is whole blocks, or lies in one block and is not all of it."""

    start: int
    stop: int
    blocks: list[_Block]
    whole: bool
    lock: AbstractContextManager[object]


class BlockSums:
    """CRC-32 of every block of BLOCK_BYTES of a store, of what was reserved at once.

    They are computed as bytes are written and compared as they are read, by the thread that writes
    or reads. A write to a part of a block compares the rest of it first, so that no damage is
    summed up as if it had been written; a read of a part looks at the whole block. What the host's
    optimizer changes in place is compared before, and summed anew after it.

    `look` has the store's bytes between two offsets, `describe` what lies there in words. Errors
    for bytes that differ say `where` they are, and what is `suspect`.
    """

    def __init__(
        self,
        look: Callable[[int, int], memoryview],
        describe: Callable[[int, int], str],
        where: str,
        suspect: str,
        *,
        source: str | None = None,
    ) -> None:
        self._look, self._describe = look, describe
        self._where, self._suspect, self._source = where, suspect, source
        self._regions: list[_Region] = []
        self._sums = array("I")
        self._lost: set[int] = set()  # blocks of which a write has failed

    def reserve(self, start: int, num_bytes: int) -> None:
        """Room for zeros, behind all that there is."""
        first = len(self._sums)
        self._regions.append(_Region(start, num_bytes, first, RLock()))
        full, rest = divmod(num_bytes, BLOCK_BYTES)
        self._sums.extend(array("I", [_ZEROS]) * full)
        if rest:
            self._sums.append(zlib.crc32(bytes(rest)))

    def check(self, start: int, num_bytes: int, copied: memoryview | None = None) -> None:
        """Compare a range, or its copy: of a part of a block, a new copy is made."""
        for part in self._parts(start, num_bytes):
            with part.lock:
                for block in part.blocks:
                    if copied is not None and part.whole:
                        self._compare(block, copied[block.start - start : block.stop - start])
                        continue
                    found = self._look(block.start, block.stop)
                    self._compare(block, found)
                    if copied is not None:
                        here = found[part.start - block.start : part.stop - block.start]
                        copied[part.start - start : part.stop - start] = here

    def write(
        self, start: int, source: torch.Tensor, put: Callable[[int, torch.Tensor], object]
    ) -> None:
        """Let `put` write a range in parts, and sum it, from the `source` where the host has it."""
        held = memory_of(source) if devices.on_host(source.device) else None
        for part in self._parts(start, source.numel()):
            with part.lock:
                beside = memoryview(b"")
                if not part.whole:
                    beside = self._look(part.blocks[0].start, part.blocks[0].stop)
                    if part.blocks[0].number not in self._lost:
                        self._compare(part.blocks[0], beside)
                try:
                    put(part.start, source[part.start - start : part.stop - start])
                except BaseException:
                    self._lost.update(block.number for block in part.blocks)
                    raise
                for block in part.blocks:
                    if held is None:
                        found = zlib.crc32(self._look(block.start, block.stop))
                    elif part.whole:
                        found = zlib.crc32(held[block.start - start : block.stop - start])
                    else:
                        found = zlib.crc32(beside[: part.start - block.start])
                        found = zlib.crc32(held[part.start - start : part.stop - start], found)
                        found = zlib.crc32(beside[part.stop - block.start :], found)
                    self._set(block, found)

    @contextmanager
    def changed_in_place(self, start: int, num_bytes: int) -> Iterator[None]:
        """Compare a range and, when it has been changed, sum it anew."""
        if not num_bytes:
            yield
            return
        with self._region(start).lock:
            self.check(start, num_bytes)
            try:
                yield
            finally:
                for block in self._blocks(start, num_bytes):
                    self._set(block, zlib.crc32(self._look(block.start, block.stop)))

    def _set(self, block: _Block, found: int) -> None:
        self._sums[block.number] = found
        self._lost.discard(block.number)

    def _compare(self, block: _Block, found: memoryview) -> None:
        if block.number in self._lost:
            problem = "were not written to their end"
        elif zlib.crc32(found) != self._sums[block.number]:
            problem = "are not those that were written"
        else:
            return
        raise ProtrainError(
            f"spilled bytes {self._where} {problem}: {self._describe(block.start, block.stop)}",
            source=self._source,
            fix=f"have {self._suspect} tested; train on from a checkpoint",
        )

    def _parts(self, start: int, num_bytes: int) -> Iterator[_Part]:
        blocks = self._blocks(start, num_bytes)
        stop = start + num_bytes
        whole = [block for block in blocks if start <= block.start and block.stop <= stop]
        for block in blocks[:1] + blocks[1:][-1:]:
            if block not in whole[:1] + whole[-1:]:
                part = max(start, block.start), min(stop, block.stop)
                yield _Part(*part, [block], False, self._region(start).lock)
        if whole:
            yield _Part(whole[0].start, whole[-1].stop, whole, True, nullcontext())

    def _blocks(self, start: int, num_bytes: int) -> list[_Block]:
        if not num_bytes:
            return []
        region = self._region(start)
        low = (start - region.start) // BLOCK_BYTES
        high = -(-(start - region.start + num_bytes) // BLOCK_BYTES)
        end = region.start + region.num_bytes
        starts = range(region.start + low * BLOCK_BYTES, end, BLOCK_BYTES)[: high - low]
        return [
            _Block(region.first + low + place, begin, min(begin + BLOCK_BYTES, end))
            for place, begin in enumerate(starts)
        ]

    def _region(self, offset: int) -> _Region:
        return self._regions[bisect_right(self._regions, offset, key=lambda r: r.start) - 1]


_ZEROS = zlib.crc32(bytes(BLOCK_BYTES))
