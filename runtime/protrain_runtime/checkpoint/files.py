"""Files of a checkpoint: safetensors, written piece by piece, verified by checksums.

The sums are CRC-32, as in `zlib`. They find damage: any change within 32 consecutive bits, and any
other except with a chance of one in 2**32. They do not protect against people, who can change the
sums as well.

A safetensors file has eight bytes with its header's length (little-endian); the header, in JSON,
with each tensor's dtype, shape and range of bytes; and the bytes, row-major and without gaps. The
package of that name needs all tensors of a file in memory to write it, and is not used here.
"""

import json
import os
import resource
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import SAVING_BYTES
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.states.values import Source

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of safetensors that we use."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_JSON_BYTES = 2**28
_MAX_JSON_NODES = 20_000_000  # of two million tensors
_MAX_THREADS = 4  # reading and summing overlap; more threads only compete for the disk
_BUFFER_BYTES = SAVING_BYTES // _MAX_THREADS
_MAX_SHOWN = 200  # characters of a name

T = TypeVar("T")


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
) -> tuple[bytes, dict[str, int]]:
    """The header of a file of tensors, and each tensor's start, in file order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    # Wide elements first: readers that map the file need aligned tensors.
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        if dtype not in NAMES:
            raise ProtrainError(f"safetensors have no dtype {dtype}", key=name)
        starts[name], end = position, position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": [*shape], "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: len(begin) + start for name, start in starts.items()}


def write_values(path: Path, values: Iterable[tuple[int, Source]], checksum: int = 0) -> int:
    """Write values at their offsets and flush to disk; returns the CRC-32, after `checksum`."""
    with path.open("r+b") as file:

        def write(piece: torch.Tensor) -> None:
            nonlocal checksum
            data = memory_of(piece)
            for start in range(0, len(data), _BUFFER_BYTES):  # written while cached
                part = data[start : start + _BUFFER_BYTES]
                checksum = zlib.crc32(part, checksum)
                file.write(part)

        for start, value in values:
            file.seek(start)
            value.copy_to(write)
        file.flush()
        os.fsync(file.fileno())
    return checksum


def damaged(path: Path, problem: str) -> ProtrainError:
    """The error for an unusable file of a checkpoint."""
    return ProtrainError(problem, source=str(path), fix="load another checkpoint")


def shown(name: str) -> str:
    """A name from a file as printable text."""
    name = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "..."
    return name if name.isprintable() else ascii(name)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; ProtrainError if there is none."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise damaged(path, "not a regular file")
        # A pipe that replaced the file meanwhile must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            yield file
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise damaged(path, f"cannot be read: {reason}") from None


def parsed(text: bytes, kind: type[T]) -> T:
    """JSON as a type; ValueError if it is not JSON, or would fill the memory."""
    if sum(map(text.count, (b",", b"[", b"{", b":"))) > _MAX_JSON_NODES:
        raise ValueError(f"it has more than {_MAX_JSON_NODES} keys and values")
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


Ranges = dict[str, list[tuple[int, int, int]]]
"""Ranges of files, by name: first byte, past, CRC-32."""


class Sums:
    """The CRC-32 of ranges read from `files`."""

    def __init__(self, files: Iterable[str]) -> None:
        self.ranges: Ranges = {file: [] for file in files}

    def add(self, file: str, start: int, data: memoryview) -> None:
        """Add bytes of a file; contiguous ones extend the last range."""
        if file not in self.ranges:
            return
        ranges, begin, checksum = self.ranges[file], start, 0
        if ranges and ranges[-1][1] == start:
            begin, _, checksum = ranges.pop()
        ranges.append((begin, start + len(data), zlib.crc32(data, checksum)))


def verify(checksums: Mapping[Path, int], read: Sequence[Ranges] = ()) -> None:
    """Verify files, several at a time; ProtrainError for a wrong checksum.

    Sums of `read` ranges are reused, the rest is read here. All threads together take SAVING_BYTES
    of buffers. If the process's data are limited there is one thread: the stacks of others would
    count.
    """

    def check(path: Path) -> None:
        """Sum a file's ranges and the gaps between them."""
        known = [one for ranges in read for one in ranges.get(path.name, ())]
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        checksum = end = 0
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            for start, past, range_sum in [*sorted(known), (size, size, 0)]:
                if start < end:  # ranks may have read the same or overlapping ranges
                    continue
                file.seek(end)
                while end < start and (count := file.readinto(buffer[: start - end])):  # type: ignore[attr-defined]
                    checksum, end = zlib.crc32(buffer[:count], checksum), end + count
                checksum, end = joined_sums(checksum, range_sum, past - start), past
        if checksum != checksums[path]:
            raise damaged(path, "the file is damaged: its checksum does not match")

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        for path in checksums:
            check(path)
        return
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        list(pool.map(check, checksums))  # raises the first failing file's error


def joined_sums(first: int, second: int, num_bytes: int) -> int:
    """The CRC-32 of bytes with the sum `first` and, behind them, `num_bytes` with `second`.

    As zlib's crc32_combine: bytes behind multiply a sum by x**8 each, modulo CRC-32's polynomial.
    """
    power, factor = 1 << 23, 1 << 31  # x**8, 1: the highest bit is that of x**0
    while num_bytes:
        if num_bytes & 1:
            factor = _product(power, factor)
        power, num_bytes = _product(power, power), num_bytes >> 1
    return _product(factor, first) ^ second


def _product(first: int, second: int) -> int:
    """The product of two polynomials modulo CRC-32's."""
    found = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            found ^= second
        second = second >> 1 ^ (0xEDB88320 if second & 1 else 0)
    return found
