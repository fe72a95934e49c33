"""A spill file: one unnamed file, read and written past the page cache wherever that can be.

What passes through the page cache is fast while it fits into memory that nobody else wants, and as
slow as the disk beyond. Direct I/O (O_DIRECT) has one speed, the disk's, and takes no memory that
a plan does not know.

[Note: whole blocks and their edges]
Direct I/O takes whole blocks of the file, at addresses that the device can read. A range of a chunk
begins and ends anywhere, so its first and last block may be others' in part. To write such an
*edge* the block is read, changed and written back, one thread at a time. What lies between moves by
requests of up to REQUEST_BYTES, several at a time: from and to the caller's own memory where its
address allows that, else through an aligned staging buffer. Who reads a part of a block while
another part is written gets its own bytes from either of the two.
"""

import ctypes
import errno
import mmap
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from protrain_runtime.contract.program.program import (
    EDGE_BYTES,
    NUM_REQUESTS,
    REQUEST_BYTES,
    file_bytes,
    in_blocks,
    region_begin,
)
from protrain_runtime.devices.lanes import started

_PAGE = mmap.PAGESIZE


class Alignment(NamedTuple):
    """The needs of direct I/O: where memory begins, and which blocks of the file move, in bytes.

    Powers of two. A block is one of the file system's where the device would take smaller ones:
    parts of its blocks are written one at a time.
    """

    memory: int
    block: int


class SpillFile:
    """An unnamed file in `directory`: it has no directory entry, and ends with the process.

    `direct` says whether the page cache is passed by. Where it is not, `reason` says why: what was
    asked for (`cached`), or what the system answered. Any thread may read and write; ranges that
    are in use at the same time do not overlap, or are only read. OSError where the system refuses.
    """

    def __init__(self, directory: Path, *, cached: bool = False) -> None:
        self._file: FileIO = tempfile.TemporaryFile(  # noqa: SIM115 - ours until `close`
            dir=directory, prefix="protrain-spill-", buffering=0
        )
        self.num_bytes = 0  # reserved
        self.alignment = Alignment(1, 1)
        self.reason = "the plan counts it as memory" if cached else self._open_direct()
        self._requests = _Requests() if self.direct else None
        self._edges = _Edges(self.alignment.block, self._pread, self._pwrite)

    @property
    def direct(self) -> bool:
        """Whether the page cache is passed by."""
        return not self.reason

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def _open_direct(self) -> str:
        """Open the same file for direct I/O, in its place; returns why it cannot be."""
        flag = getattr(os, "O_DIRECT", None)
        if flag is None:
            return "this system has no direct I/O"
        refused = "its file system takes no direct I/O"
        try:
            direct = os.fdopen(
                os.open(f"/proc/self/fd/{self.fileno()}", os.O_RDWR | flag), "r+b", buffering=0
            )
        except OSError as error:
            return f"{refused} ({error.strerror})"
        try:
            alignment = _alignment(direct.fileno())
            os.pwrite(direct.fileno(), mmap.mmap(-1, alignment.block), 0)
            direct.truncate(0)
        except OSError as error:
            direct.close()
            if error.errno != errno.EINVAL:
                raise
            return f"{refused} ({error.strerror})"
        self._file.close()
        self._file, self.alignment = direct, alignment
        return ""

    def reserve(self, num_bytes: int) -> int:
        """Room for `num_bytes` more, in blocks of its own (`file_bytes`); returns its offset."""
        start, block = self.num_bytes, self.alignment.block
        if not num_bytes:
            return start
        end = start + file_bytes(num_bytes, block)
        try:
            os.posix_fallocate(self.fileno(), start, end - start)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            # Where files cannot be allocated the C library writes single bytes, which direct
            # I/O refuses: a disk that is full says so when it is written.
            self._file.truncate(end)
        self.num_bytes = end
        return start + region_begin(num_bytes, block)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill `target`.  # uint8"""
        if self._requests is None:
            self._pread(offset, target)
        elif target:
            self._read_blocks(self._requests, offset, target)

    def write(self, offset: int, source: memoryview) -> None:
        """Write `source`.  # uint8"""
        if self._requests is None:
            self._pwrite(offset, source)
        elif source:
            self._write_blocks(self._requests, offset, source)

    def close(self) -> None:
        """Free the file; what is in flight has ended before."""
        if self._requests is not None:
            self._requests.close()
        self._file.close()

    def _read_blocks(self, requests: "_Requests", offset: int, target: memoryview) -> None:
        block = self.alignment.block

        def fill(start: int, stop: int) -> None:
            """Read a range: straight to its place, or whole blocks to staging and from there."""
            part = target[start - offset : stop - offset]
            if self._suits(start, stop, part):
                self._pread(start, part)
                return
            low, high = start // block * block, in_blocks(stop, block)
            with requests.staging() as room:
                self._pread(low, room[: high - low])
                _copy(part, room[start - low : stop - low])

        requests.run(fill, self._cuts(offset, offset + len(target), target))

    def _write_blocks(self, requests: "_Requests", offset: int, source: memoryview) -> None:
        end, block = offset + len(source), self.alignment.block
        low, high = in_blocks(offset, block), end // block * block
        if high < low:  # inside one block
            self._edges.change(offset, source)
            return
        if offset < low:
            self._edges.change(offset, source[: low - offset])
        if high < end:
            self._edges.change(high, source[high - offset :])
        self._edges.forget(low // block, high // block)

        def bring(start: int, stop: int) -> None:
            part = source[start - offset : stop - offset]
            if self._suits(start, stop, part):
                self._pwrite(start, part)
                return
            with requests.staging() as room:
                _copy(room, part)
                self._pwrite(start, room[: stop - start])

        requests.run(bring, list(_spans(low, high)))

    def _cuts(self, offset: int, end: int, target: memoryview) -> list[tuple[int, int]]:
        """The ranges to read: edges by themselves only where what is between needs no staging."""
        block = self.alignment.block
        low, high = in_blocks(offset, block), end // block * block
        if high <= low or not self._suits(low, high, target[low - offset : high - offset]):
            return list(_spans(offset, end))
        first = [(offset, low)] * (offset < low)
        return [*first, *_spans(low, high), *[(high, end)] * (high < end)]

    def _suits(self, start: int, stop: int, part: memoryview) -> bool:
        memory, block = self.alignment
        return not (start % block or stop % block or _address(part) % memory)

    def _pread(self, offset: int, view: memoryview) -> None:
        while view:
            count = os.preadv(self.fileno(), [view], offset)
            count = self._whole(count, len(view), "the file is shorter than what was written to it")
            view, offset = view[count:], offset + count

    def _pwrite(self, offset: int, view: memoryview) -> None:
        while view:
            count = os.pwrite(self.fileno(), view, offset)
            count = self._whole(count, len(view), "the system writes nothing")
            view, offset = view[count:], offset + count

    def _whole(self, count: int, wanted: int, reason: str) -> int:
        """Return how far to go on: a request that was cut short goes on at a whole block."""
        if count < wanted:
            count = count // self.alignment.block * self.alignment.block
        if count == 0:
            raise OSError(errno.EIO, reason)
        return count


def _spans(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Requests, cut at multiples of their size in the file."""
    while low < high:
        stop = min(high, (low // REQUEST_BYTES + 1) * REQUEST_BYTES)
        yield low, stop
        low = stop


class _Edges:
    """Changes parts of blocks one at a time; keeps EDGE_BYTES of the last for the next change."""

    def __init__(
        self,
        block: int,
        pread: Callable[[int, memoryview], None],
        pwrite: Callable[[int, memoryview], None],
    ) -> None:
        self._block, self._pread, self._pwrite = block, pread, pwrite
        self._free: list[memoryview] = []
        self._kept: dict[int, memoryview] = {}  # by number of the block, first come first
        self._made = False
        self._lock = threading.Lock()

    def change(self, offset: int, source: memoryview) -> None:
        """Change a range inside one block, on the disk."""
        number, start = divmod(offset, self._block)
        with self._lock:
            # Not kept while it may differ from the file.
            known = self._kept.pop(number, None)
            held = self._room() if known is None else known
            try:
                if known is None:
                    self._pread(number * self._block, held)
                held[start : start + len(source)] = source
                self._pwrite(number * self._block, held)
            except BaseException:
                self._free.append(held)
                raise
            self._kept[number] = held

    def forget(self, first: int, past: int) -> None:
        """Blocks are about to be written whole."""
        with self._lock:
            for number in [one for one in self._kept if first <= one < past]:
                self._free.append(self._kept.pop(number))

    def _room(self) -> memoryview:
        if not self._made:
            self._made = True
            memory = memoryview(mmap.mmap(-1, EDGE_BYTES))
            starts = range(0, EDGE_BYTES, self._block)
            self._free += [memory[start : start + self._block] for start in starts]
        if not self._free:
            self._free.append(self._kept.pop(next(iter(self._kept))))
        return self._free.pop()


class _Requests:
    """Runs several requests at a time, by the caller's thread and helpers that are free."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Transfer | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._start = threading.Lock()
        self._rooms: SimpleQueue[memoryview] = SimpleQueue()
        memory = memoryview(mmap.mmap(-1, NUM_REQUESTS * REQUEST_BYTES))
        for start in range(0, len(memory), REQUEST_BYTES):
            self._rooms.put(memory[start : start + REQUEST_BYTES])

    @contextmanager
    def staging(self) -> Iterator[memoryview]:
        """An aligned buffer of REQUEST_BYTES, inside; waits until one is free."""
        room = self._rooms.get()
        try:
            yield room
        finally:
            self._rooms.put(room)

    def run(self, work: Callable[[int, int], None], spans: list[tuple[int, int]]) -> None:
        """Do `work` on every range; the first error is raised when all that began has ended."""
        if len(spans) < NUM_REQUESTS:
            for start, stop in spans:
                work(start, stop)
            return
        if not self._helpers:
            self._start_helpers()
        transfer = _Transfer(work, spans)
        for _ in self._helpers:
            self._queue.put(transfer)
        transfer.take_part()
        transfer.wait()

    def _start_helpers(self) -> None:
        with self._start:
            if self._helpers:
                return
            # The helpers know the queue alone: they end with who has the file.
            for number in range(NUM_REQUESTS - 1):
                work = partial(_help, self._queue)
                name = f"protrain file {number}"
                self._helpers.append(started(name, work, stack_bytes=_HELPER_STACK_BYTES))
                weakref.finalize(self, self._queue.put, None)

    def close(self) -> None:
        """End the helpers."""
        for _ in self._helpers:
            self._queue.put(None)
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()


def _help(queue: "SimpleQueue[_Transfer | None]") -> None:
    while (transfer := queue.get()) is not None:
        transfer.take_part()
        del transfer  # it refers to a caller's memory


_HELPER_STACK_BYTES = 2**18


class _Transfer:
    """One caller's ranges, which threads take one after the other."""

    def __init__(self, work: Callable[[int, int], None], spans: list[tuple[int, int]]) -> None:
        self._work, self._spans = work, iter(spans)
        self._lock = threading.Lock()
        self._left = len(spans)  # not ended
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def take_part(self) -> None:
        """Do what nobody has taken yet, one range at a time."""
        while True:
            with self._lock:
                span = next(self._spans, None)
                failed = self._error is not None
            if span is None:
                return
            error: BaseException | None = None
            try:
                if not failed:  # what follows a failure is left out
                    self._work(*span)
            except BaseException as raised:  # noqa: BLE001 - raised again by the caller
                error = raised
            with self._lock:
                self._error = self._error or error
                self._left -= 1
                if not self._left:
                    self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as `source` has, while other threads run: slices would hold them up."""
    ctypes.memmove(_address(target), _address(source), len(source))


# Linux's statx (Linux 6.1): the kernel's `struct statx` and its STATX_DIOALIGN.
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_STATX_BYTES, _MASK_AT, _DIO_AT = 256, 0, 0x98


def _alignment(descriptor: int) -> Alignment:
    """The alignment that the system tells, or a page and a block; OSError if none."""
    size = os.fstat(descriptor).st_blksize  # a network file system may name 1 MiB, or an odd size
    block = max(_PAGE, size) if size & (size - 1) == 0 and size <= 2**16 else _PAGE
    statx = getattr(ctypes.CDLL(None), "statx", None)
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if statx is None or statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
        return Alignment(_PAGE, block)
    (mask,) = struct.unpack_from("I", found, _MASK_AT)
    memory, offset = struct.unpack_from("II", found, _DIO_AT)
    if not mask & _STATX_DIOALIGN:
        return Alignment(_PAGE, block)
    if not offset:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return Alignment(memory, max(block, offset))
