"""A spill file: one unnamed file, bypassing the page cache if possible.

Transfers through the page cache are fast while they fit into free memory, and as slow as the disk
beyond. Direct I/O (O_DIRECT) always has the disk's speed, and takes no memory unknown to a plan.

[Note: whole blocks and their edges] Direct I/O moves whole blocks of the file, at addresses that
the device can read. A chunk's range may begin and end anywhere, so its first and last block may be
shared. To write such an *edge* the block is read, changed and written back, one thread at a time.
The rest moves in requests of up to REQUEST_BYTES, several at a time: to and from the caller's
memory if its address allows, else through an aligned staging buffer. A reader of one part of a
block gets its own bytes before and after another part's write.
"""

import ctypes
import errno
import mmap
import os
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
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
from protrain_runtime.devices.lanes import started_pool

_PAGE = mmap.PAGESIZE


class Alignment(NamedTuple):
    """The needs of direct I/O: memory alignment, and the file's block size, in bytes.

    Powers of two. A block is the file system's, even if the device would take smaller ones: parts
    of its blocks are written one at a time.
    """

    memory: int
    block: int


class SpillFile:
    """An unnamed file in `directory`: no directory entry, and it ends with the process.

    `direct`: the page cache is bypassed; otherwise `reason` says why: by request (`cached`), or the
    system's answer. Any thread may read and write; ranges in use at the same time do not overlap,
    or are only read. OSError if the system refuses.
    """

    def __init__(self, directory: Path, *, cached: bool = False) -> None:
        self._file: FileIO = tempfile.TemporaryFile(  # noqa: SIM115 - ours until `close`
            dir=directory, prefix="protrain-spill-", buffering=0
        )
        self.num_bytes = 0  # reserved
        self.alignment = Alignment(1, 1)
        self.reason = "the plan counts it as memory" if cached else self._open_direct()
        self._requests: _Requests | None = None
        if self.direct:
            edges = _Edges(self.alignment.block, self._pread, self._pwrite)
            self._requests = _Requests(edges)

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return not self.reason

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def _open_direct(self) -> str:
        """Reopen the file for direct I/O; returns the reason if impossible."""
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
        """Reserve `num_bytes` more, in blocks of their own (`file_bytes`); returns the offset."""
        start, block = self.num_bytes, self.alignment.block
        if not num_bytes:
            return start
        end = start + file_bytes(num_bytes, block)
        try:
            os.posix_fallocate(self.fileno(), start, end - start)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            # Without file allocation the C library writes single bytes, which direct I/O refuses: a
            # full disk then fails at the write.
            self._file.truncate(end)
        self.num_bytes = end
        return start + region_begin(num_bytes, block)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill `target`.  # uint8"""
        requests, block = self._requests, self.alignment.block
        if requests is None or not target:
            self._pread(offset, target)
            return

        def fill(start: int, stop: int) -> None:
            """Read a range: directly, or as whole blocks through staging."""
            part = target[start - offset : stop - offset]
            if self._suits(start, stop, part):
                self._pread(start, part)
                return
            low, high = start // block * block, in_blocks(stop, block)
            with requests.staging() as room:
                self._pread(low, room[: high - low])
                _copy(part, room[start - low : stop - low])

        requests.run(fill, self._cuts(offset, offset + len(target), target))

    def write(self, offset: int, source: memoryview) -> None:
        """Write `source`.  # uint8"""
        requests, block, end = self._requests, self.alignment.block, offset + len(source)
        if requests is None or not source:
            self._pwrite(offset, source)
            return
        low, high = in_blocks(offset, block), end // block * block
        if high < low:  # inside one block
            requests.edges.change(offset, source)
            return
        if offset < low:
            requests.edges.change(offset, source[: low - offset])
        if high < end:
            requests.edges.change(high, source[high - offset :])
        requests.edges.forget(low // block, high // block)

        def bring(start: int, stop: int) -> None:
            part = source[start - offset : stop - offset]
            if self._suits(start, stop, part):
                self._pwrite(start, part)
                return
            with requests.staging() as room:
                _copy(room, part)
                self._pwrite(start, room[: stop - start])

        requests.run(bring, list(_spans(low, high)))

    def close(self) -> None:
        """Free the file; transfers have ended before."""
        if self._requests is not None:
            self._requests.close()
        self._file.close()

    def _cuts(self, offset: int, end: int, target: memoryview) -> list[tuple[int, int]]:
        """The ranges to read: separate edges only if the middle needs no staging."""
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
        """The bytes done: a truncated request continues at a whole block."""
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
    """Changes parts of blocks one at a time; caches EDGE_BYTES of the last for the next change."""

    def __init__(
        self,
        block: int,
        pread: Callable[[int, memoryview], None],
        pwrite: Callable[[int, memoryview], None],
    ) -> None:
        self._block, self._pread, self._pwrite = block, pread, pwrite
        self._memory = memoryview(mmap.mmap(-1, EDGE_BYTES))
        # By cache slot, the cached block's number; -1: empty. Each block has one slot and evicts
        # the block there.
        self._kept = [-1] * (EDGE_BYTES // block)
        self._lock = threading.Lock()

    def change(self, offset: int, source: memoryview) -> None:
        """Change a range inside one block, on disk."""
        number, start = divmod(offset, self._block)
        place = number % len(self._kept)
        held = self._memory[place * self._block :][: self._block]
        with self._lock:
            known = self._kept[place] == number
            self._kept[place] = -1  # may differ from the file until written
            if not known:
                self._pread(number * self._block, held)
            held[start : start + len(source)] = source
            self._pwrite(number * self._block, held)
            self._kept[place] = number

    def forget(self, first: int, past: int) -> None:
        """Drop blocks that are about to be written whole."""
        with self._lock:
            for place, number in enumerate(self._kept):
                if first <= number < past:
                    self._kept[place] = -1


class _Requests:
    """Runs several requests at a time, on the caller's thread and free helpers."""

    def __init__(self, edges: _Edges) -> None:
        self.edges = edges
        self._helpers: ThreadPoolExecutor | None = None
        self._start = threading.Lock()
        self._rooms: SimpleQueue[memoryview] = SimpleQueue()
        memory = memoryview(mmap.mmap(-1, NUM_REQUESTS * REQUEST_BYTES))
        for start in range(0, len(memory), REQUEST_BYTES):
            self._rooms.put(memory[start : start + REQUEST_BYTES])

    @contextmanager
    def staging(self) -> Iterator[memoryview]:
        """An aligned buffer of REQUEST_BYTES inside; waits until one is free."""
        room = self._rooms.get()
        try:
            yield room
        finally:
            self._rooms.put(room)

    def run(self, work: Callable[[int, int], None], spans: list[tuple[int, int]]) -> None:
        """Run `work` on every range; raises an error when all started ones have ended."""
        if len(spans) < NUM_REQUESTS:
            for start, stop in spans:
                work(start, stop)
            return
        left = iter(spans)

        def take_part() -> None:
            try:
                for start, stop in left:  # each thread takes the next range
                    work(start, stop)
            except BaseException:
                deque(left, maxlen=0)  # a failure skips the rest
                raise

        with self._start:
            if self._helpers is None:
                count, size = NUM_REQUESTS - 1, _HELPER_STACK_BYTES
                self._helpers = started_pool(count, "file", stack_bytes=size)
        others = [self._helpers.submit(take_part) for _ in range(NUM_REQUESTS - 1)]
        try:
            take_part()
        finally:
            wait(began := [each for each in others if not each.cancel()])
        for each in began:
            each.result()

    def close(self) -> None:
        """End the helpers."""
        if self._helpers is not None:
            self._helpers.shutdown()


_HELPER_STACK_BYTES = 2**18


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy `source`'s bytes without the GIL: slices would block other threads."""
    ctypes.memmove(_address(target), _address(source), len(source))


# Linux's statx (Linux 6.1): the kernel's `struct statx` and its STATX_DIOALIGN.
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_STATX_BYTES, _MASK_AT, _DIO_AT = 256, 0, 0x98


def _alignment(descriptor: int) -> Alignment:
    """The alignment from the system, or a page and a block; OSError if none."""
    size = os.fstat(descriptor).st_blksize  # a network file system may report 1 MiB, or an odd size
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
