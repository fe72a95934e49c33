"""Tensors of a checkpoint: where their elements lie in its files, and how they reach a model.

A part is a range of a tensor's elements. One device writes whole tensors, each of several ranks the
ranges that it has, and any other reads what it needs of them. Elements are in row-major order, but
for parameters that ranks share and that lie in another order in their stores.
"""

import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from protrain_runtime.checkpoint.files import (
    DTYPES,
    NAMES,
    damaged,
    joined_sums,
    opened,
    shown,
)
from protrain_runtime.contract.program.program import SAVING_BYTES
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.states.values import Fill, Held, Source, Value, order_of, part_of

_MAX_DIMENSIONS = 64  # PyTorch's operators take no more
_MAX_NUMBER = 2**60  # of elements and of bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a tensor that follow each other, in a file."""

    path: Path
    start: int  # bytes from the start of the file
    first: int  # of the tensor's elements
    count: int
    checksum: int | None  # None in files of others

    @property
    def place(self) -> tuple[Path, int]:
        return self.path, self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    order: tuple[int, ...]  # its dimensions, from the outermost on
    parts: tuple[Part, ...]


def described(value: Source) -> dict[str, Any]:
    """A tensor as an index has it, without its parts."""
    order = list(order_of(value))
    found = {"dtype": NAMES[value.dtype], "shape": list(value.shape)}
    return found if order == sorted(order) else {**found, "order": order}


def parsed(name: str, listed: Any, folder: Path, headers: Mapping[str, Any]) -> Entry:
    """A tensor of an index, in files of a folder. ValueError where that cannot be."""
    match listed:
        case {"dtype": str(dtype), "shape": list(shape), "parts": list(rows), **more}:
            order: Any = more.get("order", list(range(len(shape))))
        case _:
            raise ValueError("lacks its dtype, shape or parts")
    if dtype not in DTYPES or not are_numbers(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("has no dtype and shape that are known")
    if prod(max(size, 1) for size in shape) > _MAX_NUMBER:  # its strides are products
        raise ValueError("has too many elements")
    if not are_numbers(order) or sorted(order) != list(range(len(shape))):
        raise ValueError("has no order of dimensions")
    parts: list[Part] = []
    for row in rows:
        match row:
            case [str(file), *numbers] if file in headers and are_numbers(numbers, 4):
                parts.append(Part(folder / file, *numbers))
            case _:
                raise ValueError("has a malformed part")
    parts.sort(key=lambda part: part.first)
    end = 0
    for part in parts:
        if part.first != end or (part.count == 0 and len(parts) > 1):
            raise ValueError("has parts that overlap, or leave gaps")
        end += part.count
    if not parts or end != prod(shape):
        raise ValueError("has parts that do not cover it")
    return Entry(name, DTYPES[dtype], torch.Size(shape), tuple(order), tuple(parts))


def are_numbers(values: Any, count: int | None = None) -> bool:
    """Whether it is a list of so many whole numbers, which PyTorch can count with."""
    return (
        isinstance(values, list)
        and all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in values)
        and count in (None, len(values))
    )


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The CRC-32 of some bytes of a part, of which this rank reads no others."""

    name: str  # of the tensor
    part: Part
    start: int  # bytes from the start of the part
    num_bytes: int
    checksum: int


def compare_sums(sums: Iterable[PartialSum]) -> None:
    """Compare parts with what ranks have read of them together. ProtrainError for another one."""
    by_part: dict[Part, dict[int, PartialSum]] = {}
    for each in sums:
        by_part.setdefault(each.part, {})[each.start] = each  # replicas read the same
    for part, ranges in by_part.items():
        checksum = 0
        for _, each in sorted(ranges.items()):
            checksum = joined_sums(checksum, each.checksum, each.num_bytes)
        if checksum != part.checksum:
            raise damaged(part.path, f"{shown(next(iter(ranges.values())).name)} is damaged")


def fill_values(
    targets: Sequence[tuple[Entry, Value]], sums: list[PartialSum] | None = None
) -> None:
    """Read entries into values, compared; after a ProtrainError some values are new.

    Of another dtype than its entry's a value gets the numbers cast. What is read of parts with a
    checksum, but not all of them, goes to `sums`.
    """
    for entry, value in sorted(targets, key=lambda target: target[0].parts[0].place):
        order, (first, count) = order_of(value), part_of(value)
        if entry.order == order:
            fill = _Reader(entry, first, count, sums).fill
            value.copy_from(fill if entry.dtype == value.dtype else _cast(fill, entry, value))
            continue
        flat = torch.empty(entry.shape.numel(), dtype=entry.dtype)
        Held(flat).copy_from(_Reader(entry, 0, flat.numel()).fill)
        dims = range(len(order))
        whole = flat.view([entry.shape[dim] for dim in entry.order])
        whole = whole.permute([entry.order.index(dim) for dim in dims])
        mine = whole.permute(order).reshape(-1)[first : first + count].to(value.dtype)
        value.copy_from(_from(mine.view(torch.uint8)))


def _cast(fill: Fill, entry: Entry, value: Value) -> Fill:
    """Fills buffers with numbers of the value's dtype, made of the entry's."""

    def cast(target: torch.Tensor) -> None:
        for numbers in target.view(value.dtype).split(SAVING_BYTES // entry.dtype.itemsize):
            read = torch.empty(numbers.numel(), dtype=entry.dtype)
            fill(read.view(torch.uint8))
            numbers.copy_(read)

    return cast


def _from(flat: torch.Tensor) -> Fill:
    """Fills one buffer after the other with these bytes."""
    done = 0

    def fill(target: torch.Tensor) -> None:
        nonlocal done
        target.copy_(flat[done : done + target.numel()])
        done += target.numel()

    return fill


class _Reader:
    """Hands out the bytes of a tensor's elements first:first + count, part after part."""

    def __init__(
        self, entry: Entry, first: int, count: int, sums: list[PartialSum] | None = None
    ) -> None:
        self._name, self._sum, self._sums = entry.name, 0, sums
        self._left: deque[tuple[Part, int, int]] = deque()  # bytes of parts: from, to
        size = entry.dtype.itemsize
        for part in entry.parts:
            begin, end = max(first, part.first), min(first + count, part.first + part.count)
            if begin < end:
                self._left.append((part, (begin - part.first) * size, (end - part.first) * size))
        self._begun = self._left[0][1] if self._left else 0
        self._size = size

    def fill(self, target: torch.Tensor) -> None:
        view = memory_of(target)
        while view:
            part, start, end = self._left.popleft()
            piece = view[: min(end - start, SAVING_BYTES)]
            with opened(part.path) as file:
                file.seek(part.start + start)
                if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                    raise damaged(part.path, "the file is cut off")
            self._sum = zlib.crc32(piece, self._sum)
            view, start = view[len(piece) :], start + len(piece)
            if start < end:
                self._left.appendleft((part, start, end))
                continue
            self._compare(part, end)

    def _compare(self, part: Part, end: int) -> None:
        """Compare a part that was read up to a byte, or note the sum of some of it."""
        begun, checksum = self._begun, self._sum
        self._begun, self._sum = 0, 0
        if part.checksum is None:
            return
        if end - begun < part.count * self._size:
            if self._sums is not None:
                self._sums.append(PartialSum(self._name, part, begun, end - begun, checksum))
        elif checksum != part.checksum:
            raise damaged(part.path, f"{shown(self._name)} is damaged")
