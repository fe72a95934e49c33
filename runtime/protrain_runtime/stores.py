"""Stores: where bytes live below the device. One address space of bytes per store.

Host memory is a set of buffers (pinned where there is a device to copy to). Disk is one unnamed
file: it has no directory entry, so the operating system frees it when the process ends, however
it ends.
"""

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import Protocol, assert_never

import torch

from protrain_plan.errors import ProtrainError
from protrain_plan.records.plan import StateTier
from protrain_plan.units import format_bytes
from protrain_runtime.lanes import Backend


class Store(Protocol):
    """Bytes at offsets. Reads and writes run on a lane and may overlap if their ranges do not."""

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

    def close(self) -> None:
        """Free everything."""
        ...


class HostStore:
    """A tier in host memory. Every reservation is a buffer of exactly its size."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[int, torch.Tensor] = {}  # offset -> uint8 [bytes]
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> int:
        offset = self.num_bytes
        self._buffers[offset] = self._empty(num_bytes)
        self.num_bytes += num_bytes
        return offset

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return self._backend.empty_host(num_bytes)

    def hold(self, buffer: torch.Tensor) -> int:
        """Take a buffer that there is as a reservation; returns its offset.  # uint8 [bytes]"""
        offset = self.num_bytes
        self._buffers[offset] = buffer
        self.num_bytes += buffer.numel()
        return offset

    def view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The bytes in place, for an optimizer that runs on the host.  # uint8 [num_bytes]"""
        start = max(start for start in self._buffers if start <= offset)
        return self._buffers[start][offset - start : offset - start + num_bytes]

    def write(self, offset: int, source: torch.Tensor) -> None:
        self.view(offset, source.numel()).copy_(source, non_blocking=True)

    def read(self, offset: int, target: torch.Tensor) -> None:
        target.copy_(self.view(offset, target.numel()), non_blocking=True)

    def close(self) -> None:
        self._buffers.clear()


class DeviceStore(HostStore):
    """Shards on the device itself. Every reservation is a buffer of exactly its size."""

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return self._backend.empty(num_bytes)


class DiskStore:
    """A tier in one unnamed file in `directory`, read and written through the page cache."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_bytes = 0
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
        view = memory_of(source.cpu())
        while view:
            try:
                written = os.pwrite(self._file.fileno(), view, offset)
            except OSError as error:
                raise self._failed("written", error.strerror) from error
            view, offset = view[written:], offset + written

    def read(self, offset: int, target: torch.Tensor) -> None:
        staging = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        view = memory_of(staging)
        while view:
            try:
                count = os.preadv(self._file.fileno(), [view], offset)
            except OSError as error:
                raise self._failed("read back", error.strerror) from error
            if count == 0:
                raise self._failed("read back", "the file is shorter than what was written to it")
            view, offset = view[count:], offset + count
        if staging is not target:
            target.copy_(staging)

    def close(self) -> None:
        self._file.close()

    def _failed(self, what: str, reason: str | None) -> ProtrainError:
        return ProtrainError(
            f"spilled bytes cannot be {what}: {reason}",
            source=str(self._directory),
            fix="see whether its disk is full or faulty; train on from a checkpoint",
        )


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
                return DiskStore(self._directory)
            case _:
                assert_never(tier)

    @property
    def host_bytes(self) -> int:
        return self._stores["host"].num_bytes if "host" in self._stores else 0

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
