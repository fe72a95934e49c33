"""Files of tensors in the format of safetensors, written and read a piece at a time.

Eight bytes say how long the header is (little-endian); the header, in JSON, says each tensor's
dtype, shape and range of bytes; then come the bytes, row-major and without gaps. The package of
that name wants every tensor of a file in memory at once, so it is not used here.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from protrain_plan.errors import ProtrainError
from protrain_plan.program.program import SAVING_BYTES
from protrain_runtime.checkpoint.checksums import (
    MAX_JSON_BYTES,
    Range,
    damaged,
    new_file,
    open_regular,
    parse_json,
    shown,
    threads_are_free,
)
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.states.values import Value, num_bytes

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
    return found if ranges is None else _with_sums(path, found, ranges, 8 + length)


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


def _with_sums(
    path: Path, found: Mapping[str, Entry], ranges: Sequence[Range], start: int
) -> dict[str, Entry]:
    """The entries with their checksums, which lie in the order of the file."""
    told = [(_HEADER, start)] + [(name, _size(entry)) for name, entry in found.items()]
    if told != [(range_.what, range_.num_bytes) for range_ in ranges]:
        raise damaged(path, "the file is another than the one whose checksums were written")
    sums = {range_.what: range_.checksum for range_ in ranges[1:]}
    return {name: replace(entry, checksum=sums[name]) for name, entry in found.items()}


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
        with ExitStack() as opened:
            path, file = None, None
            for entry, value in sorted(targets, key=lambda pair: (pair[0].path, pair[0].start)):
                if file is None or entry.path != path:
                    opened.close()
                    path, file = entry.path, opened.enter_context(open_regular(entry.path))
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
