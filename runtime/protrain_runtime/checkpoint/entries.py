"""Tensors of a checkpoint: their elements' places in its files, and their way to a model.

A part is a range of a tensor's elements. One device writes whole tensors, each rank of several its
ranges, and any number of ranks reads what it needs. Elements are row-major, except for sharded
parameters that are stored in another order.
"""

import os
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import torch
from msgspec import Meta

from protrain_runtime.checkpoint.files import (
    DTYPES,
    MAX_JSON_BYTES,
    Sums,
    damaged,
    opened,
    parsed,
    shown,
)
from protrain_runtime.contract.program.program import SAVING_BYTES
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.states.values import Fill, Held, Target, order_of, part_of

_MAX_DIMENSIONS = 64  # PyTorch's limit
_MAX_NUMBER = 2**60  # of elements and of bytes

Number = Annotated[int, Meta(ge=0, le=_MAX_NUMBER)]
Sizes = Annotated[list[Number], Meta(max_length=_MAX_DIMENSIONS)]


class PartRow(msgspec.Struct, frozen=True):
    """A part of a tensor in a file: its first element, and the whole tensor's dimensions."""

    first: Number
    shape: Sizes
    order: Sizes


class FileRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of a checkpoint: bytes, CRC-32 of its header and of the file, parts."""

    num_bytes: Number
    header: Number
    checksum: Number
    parts: dict[str, PartRow] = {}


class _Listed(msgspec.Struct, frozen=True):
    """A tensor in the header of a file."""

    dtype: str
    shape: Sizes
    data_offsets: tuple[Number, Number]  # after the header


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Consecutive elements of a tensor in a file; ordered by place."""

    path: Path
    start: int  # bytes from the start of the file
    first: int  # of the tensor's elements
    count: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    order: tuple[int, ...]  # its dimensions, outermost first
    parts: tuple[Part, ...]


def entries_in(path: Path, file: BinaryIO, row: FileRow | None) -> list[Entry]:
    """Tensors of a safetensors file, or parts, contiguous; ProtrainError if not as in its row."""
    size, length = os.fstat(file.fileno()).st_size, file.read(8)
    if row is not None and size != row.num_bytes:
        problem = "is cut off" if size < row.num_bytes else "extends past its end"
        problem = f"the file {problem}: it has {size} bytes instead of {row.num_bytes}"
        raise damaged(path, problem)
    num_bytes = int.from_bytes(length, "little")
    text = file.read(min(num_bytes, size, MAX_JSON_BYTES))  # a read allocates its full size
    if row is not None and zlib.crc32(length + text) != row.header:
        raise damaged(path, "the header is damaged")
    begin = end = len(length + text)
    found: list[Entry] = []
    try:
        header = parsed(text, dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        listed = {name: parsed(bytes(raw), _Listed) for name, raw in header.items()}
        for name, tensor in sorted(listed.items(), key=lambda item: item[1].data_offsets):
            if tensor.dtype not in DTYPES:
                problem = f"{shown(name)} has the dtype {shown(tensor.dtype)}, which is not known"
                raise damaged(path, problem)
            dtype, count = DTYPES[tensor.dtype], _shape(tensor.shape).numel()
            first, last = (begin + offset for offset in tensor.data_offsets)
            if first != end or last - first != count * dtype.itemsize:
                raise ValueError(f"{shown(name)} has other bytes than its shape and place take")
            end = last
            whole = PartRow(0, tensor.shape, list(range(len(tensor.shape))))
            part = whole if row is None else row.parts.get(name, whole)
            place = Part(path, first, part.first, count)
            found.append(Entry(name, dtype, _shape(part.shape), tuple(part.order), (place,)))
        if end != size or begin != 8 + num_bytes:
            raise ValueError("its tensors do not cover it")
    except ValueError as error:
        raise damaged(path, f"not a safetensors file: {error}") from None
    return found


def _shape(sizes: Sequence[int]) -> torch.Size:
    """A shape within PyTorch's range; ValueError for others."""
    if prod(max(size, 1) for size in sizes) > _MAX_NUMBER:  # strides are products
        raise ValueError("a tensor has too many elements")
    return torch.Size(sizes)


def joined(pieces: Sequence[Entry]) -> Entry:
    """The tensor of these parts; ValueError if they do not make it up."""
    first = pieces[0]
    what = f"{shown(first.name)} has"
    parts = sorted(chain.from_iterable(piece.parts for piece in pieces), key=lambda p: p.first)
    end = 0
    for part in parts:
        if part.first != end or (part.count == 0 and len(parts) > 1):
            raise ValueError(f"{what} parts that overlap, or leave gaps")
        end += part.count
    kinds = {(piece.dtype, piece.shape, piece.order) for piece in pieces}
    if len(kinds) > 1 or end != first.shape.numel():
        raise ValueError(f"{what} parts that do not make it up")
    if sorted(first.order) != list(range(len(first.shape))):
        raise ValueError(f"{what} no order of dimensions")
    return replace(first, parts=tuple(parts))


def fill_values(targets: Sequence[tuple[Entry, Target]], sums: Sums | None = None) -> None:
    """Read entries into values, cast to each value's dtype, and note the ranges read in `sums`."""
    for entry, value in sorted(targets, key=lambda target: target[0].parts[0]):
        order, (first, count) = order_of(value), part_of(value)
        if entry.order == order:
            fill = _reader(entry, first, count, sums)
            value.copy_from(
                fill if entry.dtype == value.dtype else partial(_cast, fill, entry, value)
            )
            continue
        flat = torch.empty(entry.shape.numel(), dtype=entry.dtype)
        Held(flat).copy_from(_reader(entry, 0, flat.numel(), sums))
        dims = range(len(order))
        whole = flat.view([entry.shape[dim] for dim in entry.order])
        whole = whole.permute([entry.order.index(dim) for dim in dims])
        mine = whole.permute(order).reshape(-1)[first : first + count].to(value.dtype)
        value.copy_from(_from(mine.view(torch.uint8)))


def _cast(fill: Fill, entry: Entry, value: Target, target: torch.Tensor) -> None:
    """Fill a buffer with the entry's numbers, cast to the value's dtype."""
    for numbers in target.view(value.dtype).split(SAVING_BYTES // entry.dtype.itemsize):
        read = torch.empty(numbers.numel(), dtype=entry.dtype)
        fill(read.view(torch.uint8))
        numbers.copy_(read)


def _from(flat: torch.Tensor) -> Fill:
    """Fills buffers in turn from these bytes."""
    done = 0

    def fill(target: torch.Tensor) -> None:
        nonlocal done
        target.copy_(flat[done : done + target.numel()])
        done += target.numel()

    return fill


def _reader(entry: Entry, first: int, count: int, sums: Sums | None) -> Fill:
    """Fills buffers with a tensor's elements first:first + count, part by part."""
    left: deque[tuple[Path, int, int]] = deque()  # bytes of files: from, to
    size = entry.dtype.itemsize
    for part in entry.parts:
        begin, end = max(first, part.first), min(first + count, part.first + part.count)
        if begin < end:
            start = part.start - part.first * size
            left.append((part.path, start + begin * size, start + end * size))

    def fill(target: torch.Tensor) -> None:
        view = memory_of(target)
        while view:
            path, start, end = left.popleft()
            piece = view[: min(end - start, SAVING_BYTES)]
            with opened(path) as file:
                file.seek(start)
                if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                    raise damaged(path, "the file is cut off")
            if sums is not None:
                sums.add(path.name, start, piece)
            view, start = view[len(piece) :], start + len(piece)
            if start < end:
                left.appendleft((path, start, end))

    return fill
