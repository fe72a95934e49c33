"""Files of tensors in the format of safetensors, written and read a piece at a time.

Eight bytes say how long the header is (little-endian); the header, in JSON, says each tensor's
dtype, shape and range of bytes; then come the bytes, row-major and without gaps. The package of
that name wants every tensor of a file in memory at once, so it is not used here.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from protrain_plan.errors import ProtrainError
from protrain_runtime.stores import memory_of
from protrain_runtime.values import Value, num_bytes

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
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int  # bytes from the start of the file
    key: str = ""  # its name, in a checkpoint of several ranks


def write_tensors(path: Path, values: Mapping[str, Value]) -> None:
    """Write a file that is on the disk when this returns.

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
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            values[name].copy_to(lambda piece: file.write(memory_of(piece)))
        file.flush()
        os.fsync(file.fileno())


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors in a file, by name. ProtrainError where the file is missing, damaged or cut."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from None
    if size < 8 + length:
        raise _unreadable(path, f"the file is cut off: it has {size} bytes, and none of its data")
    try:
        described: dict[str, Any] = json.loads(header)
        described.pop("__metadata__", None)
        found = {
            name: (
                Entry(
                    path=path,
                    dtype=_DTYPES[entry["dtype"]],
                    shape=torch.Size(entry["shape"]),
                    start=8 + length + entry["data_offsets"][0],
                ),
                8 + length + entry["data_offsets"][1],
            )
            for name, entry in described.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise _unreadable(path, "this is no safetensors file") from None
    for entry, end in found.values():
        if end - entry.start != entry.shape.numel() * entry.dtype.itemsize:
            raise _unreadable(path, "this is no safetensors file")
    expected = max((end for _, end in found.values()), default=8 + length)
    if size != expected:
        raise _unreadable(
            path, f"the file is cut off: it has {size} bytes, and its header says {expected}"
        )
    return {name: entry for name, (entry, _) in found.items()}


def fill_values(targets: list[tuple[Entry, Value]]) -> None:
    """Read each entry into its value, file by file from front to back. ProtrainError as above."""
    with ExitStack() as stack:
        path, file = None, None
        for entry, value in sorted(targets, key=lambda pair: (pair[0].path, pair[0].start)):
            if file is None or entry.path != path:
                stack.close()
                try:
                    path, file = entry.path, stack.enter_context(entry.path.open("rb"))
                except OSError as error:
                    raise _unreadable(entry.path, f"cannot be read: {error.strerror}") from None
            file.seek(entry.start)
            value.copy_from(_Reader(file, entry.path))


@dataclass(frozen=True, slots=True)
class _Reader:
    file: BinaryIO
    path: Path

    def __call__(self, target: torch.Tensor) -> None:
        view = memory_of(target)
        # A buffered reader goes on until all is there or the file ends.
        if self.file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise _unreadable(self.path, "the file is cut off")


def _unreadable(path: Path, problem: str) -> ProtrainError:
    return ProtrainError(problem, source=str(path), fix="load another checkpoint")
