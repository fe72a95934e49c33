"""Stores: where bytes live below the device. One address space of bytes per store.

Host memory is a set of buffers (pinned where there is a device to copy to). Disk is one unnamed
file: it has no directory entry, so the operating system frees it when the process ends, however
it ends.
"""

import ctypes
import errno
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, assert_never

import torch

from protrain_plan.errors import ProtrainError
from protrain_plan.program import PASSAGE_BYTES
from protrain_plan.records.plan import StateTier
from protrain_plan.units import format_bytes
from protrain_runtime import devices
from protrain_runtime.lanes import Backend


class Store(Protocol):
    """Bytes at offsets. Reads and writes may overlap if their ranges do not.

    `read` and `write` have ended when they return. A lane uses `start_read` and `start_write`: what
    the hardware can do by itself is only submitted to the current stream, and the lane's ticket
    tells its end. Until then nobody may free either side, or look at the host's.
    """

    num_bytes: int  # how far the store reaches

    def reserve(self, num_bytes: int) -> int:
        """Room for `num_bytes` more; returns its offset. ProtrainError where there is none."""
        ...

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy `source` (uint8, contiguous, on the device or the host) to the store."""
        ...

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fill `target` (uint8, contiguous, on the device or the host) from the store."""
        ...

    def start_write(self, offset: int, source: torch.Tensor) -> None:
        """`write`, on the current stream."""
        ...

    def start_read(self, offset: int, target: torch.Tensor) -> None:
        """`read`, on the current stream."""
        ...

    def close(self) -> None:
        """Free everything. What is in flight has ended before."""
        ...


class HostStore:
    """A tier in host memory. Every reservation is a buffer of exactly its size."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._starts: list[int] = []  # of the buffers, ascending
        self._buffers: list[torch.Tensor] = []  # uint8 [bytes]
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> int:
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
        """The bytes in place, for an optimizer that runs on the host.  # uint8 [num_bytes]"""
        index = bisect_right(self._starts, offset) - 1
        start = offset - self._starts[index]
        return self._buffers[index][start : start + num_bytes]

    def write(self, offset: int, source: torch.Tensor) -> None:
        # A copy from here may be on its way still, of an evaluation that nobody has looked at: the
        # device's own copies queue behind it, the host's would not.
        if devices.on_host(source.device):
            self._backend.synchronize()
        self.view(offset, source.numel()).copy_(source)

    def read(self, offset: int, target: torch.Tensor) -> None:
        target.copy_(self.view(offset, target.numel()))

    def start_write(self, offset: int, source: torch.Tensor) -> None:
        self.view(offset, source.numel()).copy_(source, non_blocking=True)

    def start_read(self, offset: int, target: torch.Tensor) -> None:
        target.copy_(self.view(offset, target.numel()), non_blocking=True)

    def close(self) -> None:
        self._backend.synchronize()  # pages are not unpinned under a copy
        self._starts.clear()
        self._buffers.clear()


class DeviceStore(HostStore):
    """Shards on the device itself. Every reservation is a buffer of exactly its size."""

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return self._backend.empty(num_bytes)


class DiskStore:
    """A tier in one unnamed file in `directory`, read and written through the page cache.

    Between the file and an accelerator bytes pass through pinned memory of the calling thread.
    """

    def __init__(self, directory: Path, backend: Backend | None = None) -> None:
        self._directory, self._backend = directory, backend
        self._own = threading.local()
        self.num_bytes = 0
        self.pinned_bytes = 0  # of all threads' passages
        try:
            self._file = tempfile.TemporaryFile(dir=directory, prefix="protrain-spill-")  # noqa: SIM115 - ours until `close`
        except OSError as error:
            raise ProtrainError(
                f"cannot write spill files: {error.strerror}",
                source=str(directory),
                fix="name a directory with spill_directory= (or --spill-directory)",
            ) from error

    def reserve(self, num_bytes: int) -> int:
        offset = self.num_bytes
        try:
            if num_bytes:
                os.posix_fallocate(self._file.fileno(), offset, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise ProtrainError(
                f"no room for {format_bytes(num_bytes)} of spilled bytes: {error.strerror}",
                source=str(self._directory),
                fix="free some space there, or name another spill directory",
            ) from error
        self.num_bytes += num_bytes
        return offset

    def write(self, offset: int, source: torch.Tensor) -> None:
        if source.device.type == "cpu":
            self._write(offset, source)
        else:
            self._passage.down(source, lambda start, half: self._write(offset + start, half))

    def read(self, offset: int, target: torch.Tensor) -> None:
        if target.device.type == "cpu":
            self._read(offset, target)
        else:
            self._passage.up(target, lambda start, half: self._read(offset + start, half))

    start_write, start_read = write, read  # files are the thread's own work

    @property
    def _passage(self) -> "_Passage":
        if not hasattr(self._own, "passage"):
            assert self._backend is not None, "only an accelerator's bytes pass through"
            self._own.passage = _Passage(self._backend)
            self.pinned_bytes += PASSAGE_BYTES
        passage: _Passage = self._own.passage
        return passage

    def _write(self, offset: int, source: torch.Tensor) -> None:
        view = memory_of(source)
        while view:
            try:
                written = os.pwrite(self._file.fileno(), view, offset)
            except OSError as error:
                raise self._failed("written", error.strerror) from error
            view, offset = view[written:], offset + written

    def _read(self, offset: int, target: torch.Tensor) -> None:
        view = memory_of(target)
        while view:
            try:
                count = os.preadv(self._file.fileno(), [view], offset)
            except OSError as error:
                raise self._failed("read back", error.strerror) from error
            if count == 0:
                raise self._failed("read back", "the file is shorter than what was written to it")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        self._file.close()

    def _failed(self, what: str, reason: str | None) -> ProtrainError:
        return ProtrainError(
            f"spilled bytes cannot be {what}: {reason}",
            source=str(self._directory),
            fix="see whether its disk is full or faulty; train on from a checkpoint",
        )


class _Passage:
    """Two halves of pinned memory: while the file has one, the device copies the other."""

    def __init__(self, backend: Backend) -> None:
        self._device = backend.device
        half = PASSAGE_BYTES // 2
        whole = backend.empty_host(PASSAGE_BYTES)
        self._whole = whole  # pinned while it lives
        self._halves = (whole[:half], whole[half:])

    def down(self, source: torch.Tensor, write: Callable[[int, torch.Tensor], None]) -> None:
        """Copy from the device, in the current stream, and hand every part to `write`."""
        pending: tuple[int, torch.Tensor, torch.Event] | None = None
        for start, half in self._parts(source.numel()):
            half.copy_(source[start : start + half.numel()], non_blocking=True)
            arrived = devices.record_event(self._device)
            if pending is not None:
                pending[2].synchronize()
                write(*pending[:2])
            pending = start, half, arrived
        if pending is not None:
            pending[2].synchronize()
            write(*pending[:2])

    def up(self, target: torch.Tensor, read: Callable[[int, torch.Tensor], None]) -> None:
        """Let `read` fill every part, and copy it to the device in the current stream."""
        gone: list[torch.Event] = []
        for start, half in self._parts(target.numel()):
            if len(gone) > 1:
                gone[-2].synchronize()  # the half is the device's until then
            read(start, half)
            target[start : start + half.numel()].copy_(half, non_blocking=True)
            gone.append(devices.record_event(self._device))
        for event in gone[-2:]:
            event.synchronize()

    def _parts(self, num_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        size = PASSAGE_BYTES // 2
        for number, start in enumerate(range(0, num_bytes, size)):
            yield start, self._halves[number % 2][: num_bytes - start]


class Stores:
    """One store per tier that the plan uses, opened when first asked for."""

    def __init__(self, backend: Backend, directory: Path) -> None:
        self._backend, self._directory = backend, directory
        self._stores: dict[StateTier, Store] = {}

    def get(self, tier: StateTier) -> Store:
        if tier not in self._stores:
            self._stores[tier] = self._open(tier)
        return self._stores[tier]

    def _open(self, tier: StateTier) -> Store:
        match tier:
            case "device":
                return DeviceStore(self._backend)
            case "host":
                return HostStore(self._backend)
            case "disk":
                return DiskStore(self._directory, self._backend)
            case _:
                assert_never(tier)

    @property
    def host_bytes(self) -> int:
        """Of its tier, and of what passes through to the disk."""
        tier = self._stores["host"].num_bytes if "host" in self._stores else 0
        disk = self._stores.get("disk")
        return tier + (disk.pinned_bytes if isinstance(disk, DiskStore) else 0)

    @property
    def disk_bytes(self) -> int:
        return self._stores["disk"].num_bytes if "disk" in self._stores else 0

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 CPU tensor, which it keeps alive."""
    assert tensor.is_contiguous() and tensor.dtype == torch.uint8
    if tensor.numel() == 0:
        return memoryview(b"")
    array = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
