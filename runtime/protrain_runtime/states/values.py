"""Where a tensor's values lie, and its bytes as they come and go: a piece at a time.

Bytes are in row-major order, whatever the tensor's strides are. What is not row-major passes
through a copy of that one tensor.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import SAVING_BYTES, in_blocks
from protrain_runtime.devices.stores import Store
from protrain_runtime.states.chunks import (
    Chunk,
    Slice,
    StateLayout,
    flat_storage_order,
    write_values,
)
from protrain_runtime.states.quantized import STATE, of_eight_bits, packed_layers, scales_of

Write = Callable[[torch.Tensor], object]
"""Takes bytes that come next: a contiguous uint8 tensor in host memory, good during the call."""

Fill = Callable[[torch.Tensor], None]
"""Fills a contiguous uint8 tensor in host memory with the bytes that come next."""


class Value(Protocol):
    """A tensor's values, in memory or in a store."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    def copy_to(self, write: Write) -> None:
        """Hand out its bytes, in order."""
        ...

    def copy_from(self, fill: Fill) -> None:
        """Take new values: as many bytes as it has, in order."""
        ...


def num_bytes(value: Value) -> int:
    """The bytes of a value."""
    return value.shape.numel() * value.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor in memory, on the host or the device."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def copy_to(self, write: Write) -> None:
        flat = _bytes_of(self.tensor.detach().contiguous())
        if flat.device.type == "cpu":
            write(flat)  # its own memory, no copy
            return
        for start in range(0, flat.numel(), SAVING_BYTES):
            write(flat[start : start + SAVING_BYTES].cpu())

    def copy_from(self, fill: Fill) -> None:
        own = self.tensor.detach()
        target = own
        if not own.is_contiguous():
            target = torch.empty_like(own, memory_format=torch.contiguous_format)
        flat = _bytes_of(target)
        if flat.device.type == "cpu" and flat.numel():
            fill(flat)
        elif flat.numel():
            for start, piece in _pieces(flat.numel()):
                fill(piece)
                flat[start : start + piece.numel()].copy_(piece)
        if target is not own:
            own.copy_(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A dense tensor in a store, in the order of its strides.

    `twin` is where it stands once more: what no update changes is the same in both copies of a
    chunk that is updated speculatively.
    """

    store: Store
    offset: int  # bytes from the start of the store
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    twin: int | None = None

    def copy_to(self, write: Write) -> None:
        if not self._row_major:
            whole = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
            self.store.read(self.offset, _bytes_of(whole))
            Held(whole).copy_to(write)
            return
        for start, piece in _pieces(num_bytes(self)):
            self.store.read(self.offset + start, piece)
            write(piece)

    def copy_from(self, fill: Fill) -> None:
        if not self._row_major:
            whole = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
            Held(whole).copy_from(fill)
            self._write(0, _bytes_of(whole))
            return
        for start, piece in _pieces(num_bytes(self)):
            fill(piece)
            self._write(start, piece)

    def _write(self, start: int, values: torch.Tensor) -> None:
        for place in (self.offset, self.twin):
            if place is not None:
                self.store.write(place + start, values)

    @property
    def _row_major(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


def _pieces(size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Where each piece of so many bytes starts, and the one host buffer that they all use."""
    buffer = torch.empty(min(SAVING_BYTES, size), dtype=torch.uint8)
    for start in range(0, size, SAVING_BYTES):
        yield start, buffer[: size - start]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory.  # uint8 [bytes]"""
    return flat_storage_order(tensor).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Local:
    """The elements first:first + count, in the order of storage, from `offset` on in a store."""

    store: Store
    offset: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A tensor of which every rank has a part, and this one `local`.

    All ranks hand it out together, each takes its part by itself.
    """

    dtype: torch.dtype
    shape: torch.Size
    local: Local | None
    gather: Callable[[], torch.Tensor]
    keep: Callable[[torch.Tensor], None]

    def copy_to(self, write: Write) -> None:
        Held(self.gather()).copy_to(write)

    def copy_from(self, fill: Fill) -> None:
        whole = torch.empty(self.shape, dtype=self.dtype)
        Held(whole).copy_from(fill)
        self.keep(whole)


_SETTINGS_BYTES = 256
"""A multiple of which settings take, filled up with spaces: a number in them may be longer in
another model of the same shapes."""

_OFFSET = "nested_offset"


@dataclass(frozen=True, slots=True)
class PackedSettings:
    """What bitsandbytes writes of a packed weight as JSON: its shape and kind, and one number.

    The number is the mean that was taken from the scales before these were quantised. Taking new
    values takes that; ProtrainError where all else is not as the layer has it.
    """

    name: str
    state: Any  # bitsandbytes' QuantState

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self._text())])

    def copy_to(self, write: Write) -> None:
        write(torch.tensor(list(self._text()), dtype=torch.uint8))

    def copy_from(self, fill: Fill) -> None:
        content = torch.empty(self.shape, dtype=torch.uint8)
        fill(content)
        own = self._settings()
        try:
            found = json.loads(bytes(content.tolist()))
            offset = float(found.pop(_OFFSET, own.pop(_OFFSET, 0.0)))
            own.pop(_OFFSET, None)
            same = found == json.loads(json.dumps(own))
        except (ValueError, AttributeError, TypeError):
            same = False
        if not same:
            raise ProtrainError(
                f"the checkpoint's {self.name} is not of such a layer as the model's",
                fix="load it into the model that it was saved from",
            )
        if self.state.offset is not None:
            self.state.offset.fill_(offset)

    def _settings(self) -> dict[str, Any]:
        plain: dict[str, Any] = self.state.as_dict(packed=False)
        return {key: value for key, value in plain.items() if not torch.is_tensor(value)}

    def _text(self) -> bytes:
        text = json.dumps(self._settings()).encode()
        return text.ljust(in_blocks(len(text), _SETTINGS_BYTES))


@dataclass(frozen=True, slots=True)
class RowFormat:
    """`weight_format`, which bitsandbytes writes beside int8 weights: 0, they lie in rows.

    Earlier versions had others. ProtrainError where a checkpoint has one.
    """

    name: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def shape(self) -> torch.Size:
        return torch.Size([])

    def copy_to(self, write: Write) -> None:
        write(torch.zeros(1, dtype=torch.uint8))

    def copy_from(self, fill: Fill) -> None:
        content = torch.empty(1, dtype=torch.uint8)
        fill(content)
        if content.item() != 0:
            raise ProtrainError(
                f"the checkpoint's {self.name} is {content.item()}: its weights do not lie in rows",
                fix="save it with bitsandbytes 0.45 or later",
            )


def scale_values(model: nn.Module) -> Iterator[tuple[str, Value]]:
    """What belongs to packed weights besides their bytes, in bitsandbytes' names and order."""
    for layer_name, layer in packed_layers(model):
        if of_eight_bits(layer):
            for path, tensor in scales_of(layer).items():
                yield f"{layer_name}.{path}".removeprefix("."), Held(tensor)
            name = f"{layer_name}.weight_format".removeprefix(".")
            yield name, RowFormat(name)
            continue
        state: Any = getattr(layer.weight, STATE)
        prefix = f"{layer_name}.weight" if layer_name else "weight"
        held = {"absmax": state.absmax, "quant_map": state.code}
        if state.nested:
            held |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
        for key, tensor in held.items():
            yield f"{prefix}.{key}", Held(tensor)
        name = f"{prefix}.quant_state.bitsandbytes__{state.quant_type}"
        yield name, PackedSettings(name, state)


def stored_value(chunk: Chunk, part: Slice, layout: StateLayout | None = None) -> Stored | Shared:
    """An offloaded parameter, or one of its elementwise optimizer states."""
    store, sharding = chunk.store, chunk.sharding
    assert store is not None
    dtype = part.dtype if layout is None else layout.dtype
    if sharding is None:
        shape, stride = part.shape, part.stride
        if layout is not None and layout.rule.per > 1:
            shape, stride = torch.Size([layout.rule.count(part.numel)]), (1,)
        return Stored(
            store=store,
            offset=chunk.place(part, layout),
            dtype=dtype,
            shape=shape,
            stride=stride,
            twin=chunk.spare.place(part) if chunk.spare and not part.trainable else None,
        )
    local, mine = None, sharding.part_of(part.name)
    if mine is not None:
        local = Local(store, chunk.own.place(mine, layout), mine.first, mine.numel)
    return Shared(
        dtype=dtype,
        shape=part.shape,
        local=local,
        gather=lambda: sharding.gather(chunk, part, layout),
        keep=lambda whole: write_values(chunk, part, whole, layout),
    )


def stored_states(chunk: Chunk, part: Slice) -> dict[str, Stored | Shared]:
    """An offloaded parameter's elementwise optimizer states, by key."""
    states = chunk.own.current.of(part)
    return {layout.key: stored_value(chunk, part, layout) for layout in states}
