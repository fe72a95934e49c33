"""Files of a checkpoint: regular ones, written whole with their checksums, and compared with them.

The sums are CRC-32, as `zlib` computes it. They find damage: any change within 32 bits that follow
each other, and any other with a chance of one in 2**32 to miss it. They are no protection against
people, who can change the sums as well.

A safetensors file has eight bytes that say how long its header is (little-endian); the header, in
JSON, with each tensor's dtype, shape and range of bytes; and the bytes, row-major and without gaps.
The package of that name wants all tensors of a file in memory to write it, so it only reads here.
"""

import json
import os
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, NamedTuple

import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import SAVING_BYTES
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.states.values import Source, part_of

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
"""The dtypes that safetensors have, and that we use."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_JSON_BYTES = 2**28
_MAX_JSON_NODES = 20_000_000  # of two million tensors
_MAX_THREADS = 4  # reading and summing go on beside each other; more only compete for the disk
_BUFFER_BYTES = SAVING_BYTES // _MAX_THREADS
_MAX_SHOWN = 200  # characters of a name


class Range(NamedTuple):
    """Bytes of a file that have a checksum."""

    what: str  # the tensor that lies there, or "the header"
    start: int
    num_bytes: int
    checksum: int


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file of tensors, and where each of them starts, in the file's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    # Wide elements first: readers that map the file want each tensor aligned to its elements.
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


def write_tensors(path: Path, values: Mapping[str, Source]) -> list[Range]:
    """Write a file to the disk; returns the ranges of its header and tensors."""
    tensors: dict[str, tuple[torch.dtype, Sequence[int]]] = {}
    for name, value in values.items():
        _, count = part_of(value)
        whole = count == value.shape.numel()
        tensors[name] = value.dtype, value.shape if whole else [count]
    begin, starts = header_of(tensors)
    with path.open("xb") as file:
        checksum = 0

        def summed(data: memoryview) -> None:
            nonlocal checksum
            for start in range(0, len(data), _BUFFER_BYTES):  # written while caches have it
                piece = data[start : start + _BUFFER_BYTES]
                checksum = zlib.crc32(piece, checksum)
                file.write(piece)

        summed(memoryview(begin))
        ranges = [Range("the header", 0, file.tell(), checksum)]
        for name, start in starts.items():
            checksum = 0
            values[name].copy_to(lambda piece: summed(memory_of(piece)))
            ranges.append(Range(name, start, file.tell() - start, checksum))
        file.flush()
        os.fsync(file.fileno())
    return ranges


def damaged(path: Path, problem: str) -> ProtrainError:
    """A file of a checkpoint that cannot be used."""
    return ProtrainError(problem, source=str(path), fix="load another checkpoint")


def shown(name: str) -> str:
    """A name from a file as printable text."""
    name = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "..."
    return name if name.isprintable() else ascii(name)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; ProtrainError where there is none."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise damaged(path, "this is no regular file")
        # A pipe that took the file's place meanwhile lets nobody wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            yield file
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise damaged(path, f"cannot be read: {reason}") from None


def read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A file's text, and the object that it is in JSON. ProtrainError where it is none."""
    with opened(path) as file:
        text = file.read(_at_most(file, MAX_JSON_BYTES + 1))
    try:
        found = parsed_json(path, text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise damaged(path, "this is no index of safetensors files")
    return text, found


def _at_most(file: BinaryIO, num_bytes: int) -> int:
    """Bytes that can be read of a file, of so many: a read takes room for all that it asks for."""
    return min(num_bytes, os.fstat(file.fileno()).st_size)


def read_header(file: BinaryIO) -> bytes:
    """The JSON at the start of a safetensors file, or what there is of it."""
    num_bytes = int.from_bytes(file.read(8), "little")
    return file.read(_at_most(file, min(num_bytes, MAX_JSON_BYTES + 1)))


def parsed_json(path: Path, text: bytes) -> Any:
    """JSON in a file; ValueError or RecursionError where it is none, ProtrainError for twins."""
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"the file has more than {MAX_JSON_BYTES} bytes")
    if sum(map(text.count, (b",", b"[", b"{", b":"))) > _MAX_JSON_NODES:
        raise ValueError(f"it has more than {_MAX_JSON_NODES} keys and values")
    unique = partial(_unique, path)
    return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=_no_number)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise damaged(path, f"the key {shown(twice)} is there twice")
    "".join(found).encode()  # raises for halves of characters, which nobody can print
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def verify(files: Mapping[Path, Sequence[Range]], where: Callable[[str], str]) -> None:
    """Read the files, several at a time, and compare. ProtrainError with the file and the tensor.

    `where` says more of a tensor, such as the unit that it belongs to. All threads together take
    SAVING_BYTES of buffers. Where the process's data are limited there is one thread: the stacks of
    others would count.
    """
    stop = Event()

    def check(path: Path) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        with opened(path) as file:
            for range_ in files[path]:
                left, checksum = range_.num_bytes, 0
                while left and (count := file.readinto(buffer[: min(left, len(buffer))])):  # type: ignore[attr-defined]
                    checksum = zlib.crc32(buffer[:count], checksum)
                    left -= count
                    if stop.is_set():
                        return
                if left or checksum != range_.checksum:
                    raise damaged(path, f"{where(range_.what)} is damaged")

    num_threads = min(len(files), _MAX_THREADS if _threads_are_free() else 1)
    if num_threads <= 1:
        for path in files:
            check(path)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for _ in pool.map(check, files):
                pass  # it raises what the first file that differs did
        finally:  # of an interruption, too
            stop.set()
            pool.shutdown(cancel_futures=True)


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


def _threads_are_free() -> bool:
    """Whether the stacks of threads count for nothing: the process's data have no limit."""
    if not sys.platform.startswith("linux"):
        return True
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return all(limit == resource.RLIM_INFINITY for limit in limits)
