"""Files of checkpoints as they are read and written: regular ones, their checksums, safetensors.

The sums are CRC-32, as `zlib` computes it. They find damage: any change within 32 bits that follow
each other, and any other with a chance of one in 2**32 to miss it. They are no protection against
people, who can change the sums as well.

Of safetensors eight bytes say how long the header is (little-endian); the header, in JSON, says
each tensor's dtype, shape and range of bytes; then come the bytes, row-major and without gaps. The
package of that name wants every tensor of a file in memory at once, so it is not used here.
"""

import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import SAVING_BYTES
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.states.values import Value, num_bytes

SUMS = "checksums.json"
MAX_JSON_BYTES = 100_000_000  # what the format of safetensors allows a header
_MAX_JSON_NODES = 20_000_000  # of two million tensors, and of the sums of a terabyte
_KEY = "protrain_checksum"
_SEAL = re.compile(rb'"protrain_checksum": "([0-9a-f]{8})"')
_UNSEALED = b'"protrain_checksum": "00000000"'
_MAX_THREADS = 4  # reading and summing go on beside each other; more only compete for the disk
_BUFFER_BYTES = SAVING_BYTES // _MAX_THREADS
_MAX_SHOWN = 200  # characters of a name


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file that follow those of the range before."""

    what: str  # the tensor that lies there; "the header" and the like for what is none
    num_bytes: int
    checksum: int


Sums = Mapping[str, Sequence[Range]]
"""The ranges of each file, from its first byte to its last."""


class Summed:
    """A file that is written from front to back, and summed as it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.ranges: list[Range] = []
        # What torch.distributed.checkpoint asks of a file besides.
        self.tell = file.tell
        self.flush = file.flush
        self.fileno = file.fileno
        self.close = file.close

    def begin(self, what: str) -> None:
        """Say what the bytes are that follow."""
        self.ranges.append(Range(what, 0, 0))

    def write(self, data: bytes | memoryview) -> int:
        """Write and sum bytes; returns how many."""
        view = memoryview(data).cast("B")
        last = self.ranges.pop()
        checksum = last.checksum
        for start in range(0, len(view), _BUFFER_BYTES):  # written while caches have it
            piece = view[start : start + _BUFFER_BYTES]
            checksum = zlib.crc32(piece, checksum)
            self._file.write(piece)
        self.ranges.append(Range(last.what, last.num_bytes + len(view), checksum))
        return len(view)


@contextmanager
def new_file(path: Path, first: str) -> Iterator[Summed]:
    """A file that was not there, on the disk when this ends; what it has `first` is begun.

    OSError where the disk refuses.
    """
    with path.open("xb") as file:
        summed = Summed(file)
        summed.begin(first)
        yield summed
        file.flush()
        os.fsync(file.fileno())


# --- regular files, and JSON in them --------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. ProtrainError where it cannot be read, or is a pipe or a device."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            # A pipe that took the file's place meanwhile lets nobody wait.
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise damaged(path, f"cannot be read: {reason}") from None
    raise damaged(path, "this is no regular file")


def read_regular(path: Path, *, max_bytes: int = sys.maxsize) -> bytes:
    """The whole of a file. ProtrainError as `open_regular`, or where it is larger."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise damaged(path, f"the file has {size} bytes: more than {max_bytes} are not read")
        try:
            return file.read(size + 1)
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or "it does not fit in memory"
            raise damaged(path, f"cannot be read: {reason}") from None


def parse_json(text: bytes) -> Any:
    """What a JSON text says, whose keys are unique and text. ValueError where it is none."""
    if sum(map(text.count, (b",", b"[", b"{", b":"))) > _MAX_JSON_NODES:
        raise ValueError(f"it has more than {_MAX_JSON_NODES} keys and values")
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    "".join(found).encode()  # raises for halves of characters, which nobody can print
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def shown(name: str) -> str:
    """A name from a file as printable text."""
    name = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "..."
    return name if name.isprintable() else ascii(name)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as people and lists of tensors call it: `float32`."""
    return str(dtype).removeprefix("torch.")


# --- sealed texts, and files of sums --------------------------------------------------------------


def seal(content: Mapping[str, Any]) -> bytes:
    """The content as JSON text; "" under the key `protrain_checksum`, at any depth, is its sum."""
    text = json.dumps(content, indent=2).encode() + b"\n"
    text = text.replace(f'"{_KEY}": ""'.encode(), _UNSEALED)
    return text.replace(_UNSEALED, f'"{_KEY}": "{zlib.crc32(text):08x}"'.encode())


def is_sealed(text: bytes) -> bool:
    """Whether a text of `seal` is as it was written."""
    found = _SEAL.findall(text)
    return len(found) == 1 and zlib.crc32(_SEAL.sub(_UNSEALED, text)) == int(found[0], 16)


def write_sums(folder: Path, sums: Sums) -> str:
    """Write the sums of a folder's files beside them; returns their own sum.

    OSError where the disk refuses.
    """
    files = {
        file: [[range_.what, range_.num_bytes, range_.checksum] for range_ in ranges]
        for file, ranges in sums.items()
    }
    text = json.dumps(files, separators=(",", ":")).encode()
    with new_file(folder / SUMS, SUMS) as file:
        file.write(text)
    return f"{zlib.crc32(text):08x}"


def read_sums(folder: Path, checksum: str) -> Sums:
    """The sums of a folder's files. ProtrainError where they are missing or damaged."""
    path = folder / SUMS
    text = read_regular(path, max_bytes=MAX_JSON_BYTES)
    if f"{zlib.crc32(text):08x}" != checksum:
        raise damaged(path, "the file is damaged: its checksum is another")
    try:
        files = parse_json(text)
        return {file: [_range(*parts) for parts in ranges] for file, ranges in files.items()}
    except (ValueError, TypeError, AttributeError):  # written so, and not by us
        raise damaged(path, "these are no checksums") from None


def _range(what: object, num_bytes: object, checksum: object) -> Range:
    if not isinstance(what, str) or type(num_bytes) is not int or type(checksum) is not int:
        raise TypeError
    return Range(what, num_bytes, checksum)


def check_sum(path: Path, content: bytes, sums: Sums) -> None:
    """Compare a file that was read at once with its sums. ProtrainError where it differs."""
    if path.name not in sums:
        raise damaged(path, f"{SUMS} does not have it")
    start = 0
    for range_ in sums[path.name]:
        part = content[start : start + range_.num_bytes]
        start += range_.num_bytes
        if len(part) != range_.num_bytes or zlib.crc32(part) != range_.checksum:
            raise damaged(path, "the file is damaged")
    if start != len(content):
        raise damaged(path, "the file goes on behind its end")


def verify(
    folder: Path,
    sums: Sums,
    *,
    where: Callable[[str], str] = shown,
    needed: Callable[[str], bool] = lambda _: True,
) -> None:
    """Read the files, several at a time, and compare. ProtrainError with the file and the tensor.

    `where` says more of a tensor, such as the unit that it belongs to; `needed`, whether it is to
    be compared. All threads together take SAVING_BYTES of buffers. Where the process's data are
    limited there is one thread: the stacks of others would count.
    """
    stop = Event()

    def check(name: str) -> None:
        path, buffer = folder / name, memoryview(bytearray(_BUFFER_BYTES))
        with open_regular(path) as file:
            try:
                for range_ in sums[name]:
                    if not needed(range_.what):
                        file.seek(range_.num_bytes, os.SEEK_CUR)
                        continue
                    left, checksum = range_.num_bytes, 0
                    while left and (count := file.readinto(buffer[: min(left, len(buffer))])):  # type: ignore[attr-defined]
                        checksum = zlib.crc32(buffer[:count], checksum)
                        left -= count
                        if stop.is_set():
                            return
                    if left:
                        raise damaged(path, f"the file is cut off in {where(range_.what)}")
                    if checksum != range_.checksum:
                        raise damaged(path, f"{where(range_.what)} is damaged")
                goes_on = file.read(1)
            except OSError as error:
                raise damaged(path, f"cannot be read: {error.strerror}") from None
        if goes_on:
            raise damaged(path, "the file goes on behind its end")

    num_threads = min(len(sums), _MAX_THREADS if threads_are_free() else 1)
    if num_threads <= 1:
        for name in sorted(sums):
            check(name)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for _ in pool.map(check, sorted(sums)):
                pass  # it raises what the first file that differs did
        finally:  # of an interruption, too
            stop.set()
            pool.shutdown(cancel_futures=True)


def threads_are_free() -> bool:
    """Whether the stacks of threads count for nothing: the process's data have no limit."""
    if not sys.platform.startswith("linux"):
        return True
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return all(limit == resource.RLIM_INFINITY for limit in limits)


def damaged(path: Path, problem: str) -> ProtrainError:
    """A file of a checkpoint that cannot be used."""
    return ProtrainError(problem, source=str(path), fix="load another checkpoint")


_DTYPES = {
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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_DIMENSIONS = 64  # PyTorch's operators take no more
_MAX_NUMBER = 2**63 - 1  # what PyTorch counts elements and bytes with
_HEADER = "the header"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int  # bytes from the start of the file
    key: str = ""  # its name in the file, or in a checkpoint of several ranks
    checksum: int | None = None  # of its bytes, where it is known


def write_tensors(path: Path, values: Mapping[str, Value]) -> Sequence[Range]:
    """Write a file that is on the disk when this returns; returns its checksums.

    OSError where the disk refuses, ProtrainError for a dtype that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    # Wide elements first: readers that map the file want each tensor aligned to its elements.
    order = sorted(values, key=lambda name: -values[name].dtype.itemsize)
    for name in order:
        value = values[name]
        if value.dtype not in _NAMES:
            raise ProtrainError(f"safetensors have no dtype {value.dtype}", key=name)
        end = position + num_bytes(value)
        header[name] = {
            "dtype": _NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path, _HEADER) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.begin(name)
            values[name].copy_to(lambda piece: file.write(memory_of(piece)))
    return file.ranges


def read_entries(path: Path, ranges: Sequence[Range] | None = None) -> dict[str, Entry]:
    """The tensors in a file, by name. ProtrainError where the file is missing, damaged or cut.

    `ranges` are the file's checksums, which then have to be of these tensors.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 + length:
                problem = f"the file is cut off: it has {size} bytes, and none of its data"
                raise damaged(path, problem)
            if length > MAX_JSON_BYTES:
                raise _strange(path, f"its header has {length} bytes")
            text = file.read(length)
        except OSError as error:
            raise damaged(path, f"cannot be read: {error.strerror}") from None
    try:
        if not text.startswith(b"{"):
            raise ValueError("its header is no object")
        described: dict[str, Any] = parse_json(text)
    except ValueError as error:
        reason = "its header is no JSON" if isinstance(error, UnicodeError) else str(error)
        raise _strange(path, reason) from None
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _strange(path, "its __metadata__ is no map of texts")
    found = {name: _entry(path, name, 8 + length, entry) for name, entry in described.items()}
    end = 8 + length
    for name, entry in sorted(found.items(), key=lambda item: (item[1].start, _size(item[1]))):
        if entry.start != end:
            raise _strange(path, f"{shown(name)} begins at byte {entry.start}, not at {end}")
        end += _size(entry)
    if size < end:
        raise damaged(path, f"the file is cut off: it has {size} bytes, and its header says {end}")
    if size > end:
        raise damaged(path, "the file goes on behind its end")
    if ranges is None:
        return found
    told = [(_HEADER, 8 + length)] + [(name, _size(entry)) for name, entry in found.items()]
    if told != [(range_.what, range_.num_bytes) for range_ in ranges]:
        raise damaged(path, "the file is another than the one whose checksums were written")
    sums = {range_.what: range_.checksum for range_ in ranges[1:]}
    return {name: replace(entry, checksum=sums[name]) for name, entry in found.items()}


def _entry(path: Path, name: str, start: int, described: object) -> Entry:
    """What a header says of one tensor. ProtrainError where that cannot be."""
    match described:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [first, stop]}:
            pass
        case _:
            raise _strange(path, f"{shown(name)} lacks its dtype, shape or data_offsets")
    if dtype not in _DTYPES:
        raise _strange(path, f"{shown(name)} has the dtype {shown(dtype)}, which is not known here")
    if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in shape):
        raise _strange(path, f"the shape of {shown(name)} is none")
    itemsize = _DTYPES[dtype].itemsize
    # Of an empty tensor too: its strides are products of the others.
    if len(shape) > _MAX_DIMENSIONS or prod(max(n, 1) for n in shape) > _MAX_NUMBER // itemsize:
        raise _strange(path, f"the shape of {shown(name)} is too large")
    if type(first) is not int or type(stop) is not int or not 0 <= first <= stop <= _MAX_NUMBER:
        raise _strange(path, f"the data_offsets of {shown(name)} are none")
    takes = prod(shape) * itemsize
    if stop - first != takes:
        problem = f"{shown(name)} has {stop - first} bytes, and its shape takes {takes}"
        raise _strange(path, problem)
    return Entry(
        path=path, dtype=_DTYPES[dtype], shape=torch.Size(shape), start=start + first, key=name
    )


def _size(entry: Entry) -> int:
    return entry.shape.numel() * entry.dtype.itemsize


def fill_values(targets: Sequence[tuple[Entry, Value]]) -> None:
    """Read each entry into its value, file by file from front to back.

    ProtrainError as above, or where bytes are not those of their checksum: then some values are
    new ones and some are not.
    """
    with ExitStack() as stack:
        summing: Executor | None = None
        if threads_are_free() and any(entry.checksum is not None for entry, _ in targets):
            pool = ThreadPoolExecutor(1, thread_name_prefix="protrain sums")
            summing = stack.enter_context(pool)
        in_order = sorted(targets, key=lambda pair: (pair[0].path, pair[0].start))
        for path, of_file in groupby(in_order, key=lambda pair: pair[0].path):
            with open_regular(path) as file:
                for entry, value in of_file:
                    reader = _Reader(file, entry, summing)
                    try:
                        file.seek(entry.start)
                        value.copy_from(reader.fill)
                    except OSError as error:
                        raise reader.failed(f"cannot be read: {error.strerror}") from None
                    reader.compare()


class _Reader:
    """Hands out the bytes of one tensor, and sums them: beside their transfer, where it may."""

    def __init__(self, file: BinaryIO, entry: Entry, summing: Executor | None) -> None:
        self._file, self._entry, self._summing = file, entry, summing
        self._sum = 0
        self._last: Future[None] | None = None  # of the pieces that are being summed
        self._target: torch.Tensor | None = None  # theirs: freed by this thread, when they are

    def fill(self, target: torch.Tensor) -> None:
        self._wait()  # the bytes before may lie in the same memory
        self._target = target
        view = memory_of(target)
        for start in range(0, len(view), SAVING_BYTES):
            piece = view[start : start + SAVING_BYTES]
            # A buffered reader goes on until all is there or the file ends.
            if self._file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                raise self.failed("the file is cut off")
            if self._entry.checksum is None:
                continue
            if self._summing is None:
                self._add(piece)
            else:
                self._last = self._summing.submit(self._add, piece)  # one thread: in this order

    def compare(self) -> None:
        """ProtrainError where the bytes were others than those whose checksum is known."""
        self._wait()
        if self._entry.checksum is not None and self._sum != self._entry.checksum:
            raise self.failed(f"{shown(self._entry.key)} is not what it was a moment ago")

    def failed(self, problem: str) -> ProtrainError:
        return ProtrainError(
            f"{problem}: the model is loaded in part",
            source=str(self._entry.path),
            fix="load another checkpoint, the whole of it",
        )

    def _add(self, piece: memoryview) -> None:
        self._sum = zlib.crc32(piece, self._sum)
        piece.release()

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
        self._last = self._target = None


def _strange(path: Path, problem: str) -> ProtrainError:
    return damaged(path, f"this is no safetensors file: {problem}")
