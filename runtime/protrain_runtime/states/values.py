"""Places of a tensor's values, and transfers of its bytes piece by piece.

Bytes are row-major for any strides; a tensor that is not row-major passes through a copy.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import SAVING_BYTES, in_blocks
from protrain_runtime.devices.stores import Store, in_rows
from protrain_runtime.states.chunks import (
    Chunk,
    Slice,
    StateLayout,
    flat_storage_order,
    place_of,
    write_values,
)
from protrain_runtime.states.quantized import (
    PACKED_FROM,
    ROW_SCALES,
    STATE,
    of_eight_bits,
    packed_layers,
    packed_like,
    scales_of,
    state_scales,
)

Write = Callable[[torch.Tensor], object]
"""Takes the next bytes: a contiguous uint8 host tensor, valid during the call."""

Fill = Callable[[torch.Tensor], None]
"""Fills a contiguous uint8 host tensor with the next bytes."""


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
            write(flat)  # its own memory, not a copy
            return
        for start in range(0, flat.numel(), SAVING_BYTES):
            write(flat[start : start + SAVING_BYTES].cpu())

    def copy_from(self, fill: Fill) -> None:
        with in_rows(self.tensor) as flat:
            if flat.device.type == "cpu" and flat.numel():
                fill(flat)
                return
            for start, piece in _pieces(flat.numel()):
                fill(piece)
                flat[start : start + piece.numel()].copy_(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A dense tensor in a store, in the order of its strides.

    `part` is this rank's first element and number of elements, if sharded; only these are
    transferred, in stored order. `twin` is the tensor's second place: values that no update changes
    are equal in both copies of a speculatively updated chunk.
    """

    store: Store
    offset: int  # bytes from the start of the store
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    part: tuple[int, int] | None = None
    twin: int | None = None

    def copy_to(self, write: Write) -> None:
        if not self._as_stored:
            whole = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
            self.store.read(self.offset, _bytes_of(whole))
            Held(whole).copy_to(write)
            return
        for start, piece in _pieces(part_bytes(self)):
            self.store.read(self.offset + start, piece)
            write(piece)

    def copy_from(self, fill: Fill) -> None:
        if not self._as_stored:
            whole = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
            Held(whole).copy_from(fill)
            self._write(0, _bytes_of(whole))
            return
        for start, piece in _pieces(part_bytes(self)):
            fill(piece)
            self._write(start, piece)

    def _write(self, start: int, values: torch.Tensor) -> None:
        for place in (self.offset, self.twin):
            if place is not None:
                self.store.write(place + start, values)

    @property
    def _as_stored(self) -> bool:
        return self.part is not None or is_row_major(self.shape, self.stride)


def is_row_major(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a dense tensor's elements lie in the order of their indices."""
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


@dataclass(frozen=True, slots=True)
class Copied:
    """A snapshot of values in host memory."""

    dtype: torch.dtype
    shape: torch.Size
    part: tuple[int, int]
    order: tuple[int, ...]
    content: torch.Tensor  # uint8 [bytes]

    @classmethod
    def of(cls, value: "Source") -> "Copied":
        """Copy the value's present contents."""
        content, left = torch.empty(part_bytes(value), dtype=torch.uint8), part_bytes(value)

        def write(piece: torch.Tensor) -> None:
            nonlocal left
            content[content.numel() - left :][: piece.numel()].copy_(piece)
            left -= piece.numel()

        value.copy_to(write)
        return cls(value.dtype, value.shape, part_of(value), order_of(value), content)

    def copy_to(self, write: Write) -> None:
        write(self.content)


def _pieces(size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The start of each piece, and the one host buffer for all."""
    buffer = torch.empty(min(SAVING_BYTES, size), dtype=torch.uint8)
    for start in range(0, size, SAVING_BYTES):
        yield start, buffer[: size - start]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory.  # uint8 [bytes]"""
    return flat_storage_order(tensor).view(torch.uint8)


_SETTINGS_BYTES = 256
"""A multiple of which settings take, filled up with spaces: a number in them may be longer in
another model of the same shapes."""

_OFFSET = "nested_offset"


@dataclass(frozen=True, slots=True)
class Noted:
    """A few bytes that say how a weight is packed; `take` gets those of a checkpoint."""

    content: bytes
    shape: torch.Size
    take: Callable[[bytes], None]
    dtype: torch.dtype = torch.uint8

    def copy_to(self, write: Write) -> None:
        write(torch.tensor(list(self.content), dtype=torch.uint8))

    def copy_from(self, fill: Fill) -> None:
        content = torch.empty(len(self.content), dtype=torch.uint8)
        fill(content)
        self.take(bytes(content.tolist()))


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The numbers for a layer's packed weight: read whole, packed on its compute device.

    `place` moves the packed bytes to their planned tier; scales stay beside the layer.
    """

    layer: Any
    dtype: torch.dtype
    shape: torch.Size
    place: Callable[[torch.Tensor], object]

    def copy_from(self, fill: Fill) -> None:
        numbers = torch.empty(self.shape, dtype=self.dtype)
        Held(numbers).copy_from(fill)
        self.pack(numbers)

    def pack(self, numbers: torch.Tensor) -> None:
        """Pack numbers of the weight's shape, place them, and set the layer's scales."""
        weight, eight = self.layer.weight, of_eight_bits(self.layer)
        made = packed_like(weight, numbers.to(weight.device), eight=eight)
        found = {ROW_SCALES: getattr(made, ROW_SCALES)} if eight else state_scales(made.quant_state)
        for path, scale in scales_of(self.layer).items():
            scale.copy_(found[path])
        self.place(made.data)


Value = Held | Stored | Noted
"""A tensor's values, in memory or in a store."""

Source = Value | Copied
"""Values that are read: `copy_to` passes all bytes to `write`, in order."""

Target = Value | Unpacked
"""Values that are set: `copy_from` takes all bytes from `fill`, in order."""


def num_bytes(value: Source | Target) -> int:
    """The bytes of a value."""
    return value.shape.numel() * value.dtype.itemsize


def part_of(value: Source | Target) -> tuple[int, int]:
    """The first element, and the number, transferred with a value."""
    part = value.part if isinstance(value, Stored | Copied) else None
    return part or (0, value.shape.numel())


def part_bytes(value: Source) -> int:
    """The bytes transferred with a value."""
    return part_of(value)[1] * value.dtype.itemsize


def order_of(value: Source | Target) -> tuple[int, ...]:
    """The order of dimensions, outermost first, in which a value's elements are transferred."""
    if isinstance(value, Copied):
        return value.order
    dims = tuple(range(len(value.shape)))
    if isinstance(value, Stored) and value.part and not is_row_major(value.shape, value.stride):
        return tuple(sorted(dims, key=lambda dim: -value.stride[dim]))
    return dims


def _take_settings(name: str, state: Any, own: Mapping[str, Any], content: bytes) -> None:
    """Compare a packed weight's settings with a checkpoint's, and set the scales' mean from it."""
    try:
        found = json.loads(content)
        offset = float(found.pop(_OFFSET, own.get(_OFFSET, 0.0)))
        plain = {key: value for key, value in own.items() if key != _OFFSET}
        same = found == json.loads(json.dumps(plain))
    except (ValueError, AttributeError, TypeError):
        same = False
    if not same:
        raise ProtrainError(
            f"the checkpoint's {name} is not of such a layer as the model's",
            fix="load it into the model that it was saved from",
        )
    if state.offset is not None:
        state.offset.fill_(offset)


def _take_row_format(name: str, content: bytes) -> None:
    if content != b"\0":
        raise ProtrainError(
            f"the checkpoint's {name} is {content[0]}: its weights do not lie in rows",
            fix="save it with bitsandbytes 0.45 or later",
        )


def scales_beside(layer_name: str, layer: Any) -> Iterator[tuple[str, Value]]:
    """A packed weight's tensors besides its bytes, in bitsandbytes' names and order."""
    if of_eight_bits(layer):
        for path, tensor in scales_of(layer).items():
            yield f"{layer_name}.{path}".removeprefix("."), Held(tensor)
        name = f"{layer_name}.weight_format".removeprefix(".")
        yield name, Noted(b"\0", torch.Size([]), partial(_take_row_format, name))
        return
    state: Any = getattr(layer.weight, STATE)
    prefix = f"{layer_name}.weight" if layer_name else "weight"
    held = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        held |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
    for key, tensor in held.items():
        yield f"{prefix}.{key}", Held(tensor)
    name = f"{prefix}.quant_state.bitsandbytes__{state.quant_type}"
    plain: dict[str, Any] = state.as_dict(packed=False)
    settings = {key: value for key, value in plain.items() if not torch.is_tensor(value)}
    text = json.dumps(settings).encode()
    text = text.ljust(in_blocks(len(text), _SETTINGS_BYTES))
    take = partial(_take_settings, name, state, settings)
    yield name, Noted(text, torch.Size([len(text)]), take)


def unpacked_values(
    model: nn.Module, offloaded: Mapping[str, tuple[Chunk, Slice]]
) -> Iterator[tuple[str, str, Unpacked]]:
    """By layer with a packed weight: its name, the weight's first name, and its `Unpacked`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for layer_name, layer in packed_layers(model):
        name, state = names[layer.weight], getattr(layer.weight, STATE, None)
        if name in offloaded:
            place: Callable[[torch.Tensor], object] = partial(write_values, *offloaded[name])
        else:
            place = layer.weight.data.copy_
        known: torch.dtype | None = getattr(state, "dtype", None)
        dtype = getattr(layer.weight, PACKED_FROM, known) or torch.float16
        shape = torch.Size(layer.weight.shape if state is None else state.shape)
        yield layer_name, name, Unpacked(layer, dtype, shape, place)


def stored_value(chunk: Chunk, part: Slice, layout: StateLayout | None = None) -> Stored:
    """An offloaded parameter, or one of its elementwise optimizer states."""
    own, shape, stride = chunk.own, part.shape, part.stride
    assert own.store is not None
    place, elements = place_of(chunk, part, layout), None
    if layout is not None and layout.rule.per > 1:
        shape, stride = torch.Size([layout.rule.count(part.numel)]), (1,)
    if chunk.sharding is not None and part.numel:
        elements = (place.first, place.numel) if place else (0, 0)
    twin = own.spare.place(part) if own.spare and not part.trainable else None
    return Stored(
        store=place.store if place else own.store,
        offset=place.offset if place else 0,
        dtype=part.dtype if layout is None else layout.dtype,
        shape=shape,
        stride=stride,
        part=elements,
        twin=twin,
    )


def stored_states(chunk: Chunk, part: Slice) -> dict[str, Stored]:
    """An offloaded parameter's elementwise optimizer states, by key."""
    states = chunk.own.current.of(part)
    return {layout.key: stored_value(chunk, part, layout) for layout in states}
