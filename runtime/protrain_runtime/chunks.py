"""Chunks: the model states of a unit that move together.

A chunk's parameters lie one after the other in a buffer while they are on the device, and in the
same order in the chunk's store; its optimizer states follow there, one region per state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from protrain_plan.program import PIECE_ALIGNMENT, ChunkSize
from protrain_runtime.stores import Store
from protrain_runtime.taken import TakenGradient

ALIGNMENT = 64
"""Every parameter starts at a multiple of what the CPU allocator aligns tensors to, so that kernels
meet the alignment that they would meet without a plan."""

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where one parameter lies in its chunk."""

    name: str
    parameter: nn.Parameter
    offset: int  # bytes from the start of the chunk's buffer
    start: int  # index of its first element among the chunk's trainable elements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in storage order.  # dtype [numel]"""
        return buffer[self.offset : self.offset + self.num_bytes].view(self.dtype)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter as the model knows it.  # dtype [shape]"""
        return self.flat(buffer).as_strided(self.shape, self.stride)


def flat_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its storage, without a copy.  # [numel]"""
    return tensor.as_strided((tensor.numel(),), (1,))


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if it covers its storage densely, else those of a contiguous copy."""
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim))
    expected = 1
    for dim in order:
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= tensor.shape[dim]
    return tensor.stride()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """One elementwise optimizer state, such as exp_avg, in the chunk's store."""

    key: str
    dtype: torch.dtype
    offset: int  # bytes from the start of the store


@dataclass(slots=True)
class Chunk:
    """The states first used in one unit. Without a store, its placement is persistent."""

    unit: int
    slices: tuple[Slice, ...]
    used_by: tuple[int, ...]
    buffer_bytes: int
    store: Store | None = None
    offset: int = 0  # of the parameters in the store
    states: tuple[StateLayout, ...] = ()
    buffer: torch.Tensor | None = None  # uint8 [buffer_bytes] while on the device
    hollow: bool = False  # the parameters have their shapes and hold nothing
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    # What the optimizer keeps per parameter that is not elementwise (AdamW's step), by name.
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    updated: set[str] = field(default_factory=set[str])  # parameters that have states

    @property
    def num_trainable(self) -> int:
        return sum(part.numel for part in self.slices if part.trainable)

    @property
    def gradient_bytes(self) -> int:
        return sum(part.num_bytes for part in self.slices if part.trainable)

    def size(self, state_bytes_per_parameter: Mapping[torch.dtype, int]) -> ChunkSize:
        """The sizes from which a programme is compiled."""
        return ChunkSize(
            parameter_bytes=self.buffer_bytes,
            gradient_bytes=self.gradient_bytes,
            state_bytes=sum(
                part.numel * state_bytes_per_parameter[part.dtype]
                for part in self.slices
                if part.trainable
            ),
            num_parameters=self.num_trainable,
            used_by=self.used_by,
        )

    def cut(self, element: int) -> int:
        """Where a piece that should end before `element` ends, within its parameter."""
        for part in self.slices:
            if part.trainable and part.start <= element < part.start + part.numel:
                inside = (element - part.start) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
                return part.start + inside
        return element

    def bind(self) -> None:
        """Let the parameters be views of the buffer."""
        assert self.buffer is not None
        for part in self.slices:
            part.parameter.data = part.view(self.buffer)
        self.hollow = False

    def unbind(self) -> None:
        """Leave parameters of the right shape that hold nothing.

        An expanded single element keeps shape, dtype and device, which autograd checks gradients
        against, at no memory.
        """
        for part in self.slices:
            hollow = torch.empty((), dtype=part.dtype, device=part.parameter.device)
            part.parameter.data = hollow.expand(part.shape)
        self.hollow = True

    def take_gradients(self) -> None:
        """Move the gradients from the parameters to the chunk."""
        for part in self.slices:
            gradient = part.parameter.grad
            if gradient is not None:
                self.gradients[part.name] = gradient
                part.parameter.grad = TakenGradient.standing_for(gradient)

    def clear_gradients(self) -> None:
        """Forget the gradients, and what stands for those that were taken."""
        self.gradients.clear()
        self.drop_taken()

    def drop_taken(self) -> None:
        """Leave no gradient where one was taken."""
        for part in self.slices:
            if isinstance(part.parameter.grad, TakenGradient):
                part.parameter.grad = None


def make_chunk(
    unit: int, parameters: Sequence[tuple[str, nn.Parameter]], used_by: tuple[int, ...]
) -> Chunk:
    """Lay `parameters` out one after the other."""
    slices: list[Slice] = []
    offset = start = 0
    for name, parameter in parameters:
        part = Slice(
            name=name,
            parameter=parameter,
            offset=offset,
            start=start,
            shape=parameter.shape,
            stride=dense_strides(parameter),
            dtype=parameter.dtype,
            trainable=parameter.requires_grad,
        )
        slices.append(part)
        offset += -(-part.num_bytes // ALIGNMENT) * ALIGNMENT
        start += part.numel if part.trainable else 0
    return Chunk(unit, tuple(slices), used_by, offset)


def offload(
    chunk: Chunk,
    store: Store,
    state_dtypes: Mapping[torch.dtype, Mapping[str, torch.dtype]],
) -> None:
    """Copy the parameters to `store`, and reserve room for them and their states there.

    `state_dtypes` gives, for each dtype of parameters, the elementwise states and their dtypes.
    The parameters themselves stay as they are until `unbind`.
    """
    offset = store.reserve(chunk.buffer_bytes)
    layouts: list[StateLayout] = []
    dtypes = {part.dtype for part in chunk.slices if part.trainable}
    assert len(dtypes) <= 1, "a chunk's trainable parameters share one dtype"
    for dtype in dtypes:
        for key, state_dtype in state_dtypes[dtype].items():
            place = store.reserve(chunk.num_trainable * state_dtype.itemsize)
            layouts.append(StateLayout(key=key, dtype=state_dtype, offset=place))
    for part in chunk.slices:
        source = part.parameter.detach()
        if source.stride() != part.stride:
            source = torch.empty_strided(part.shape, part.stride, dtype=part.dtype).copy_(source)
        store.write(offset + part.offset, flat_storage_order(source).view(torch.uint8))
    chunk.store, chunk.offset, chunk.states = store, offset, tuple(layouts)
