"""Chunks: the model states of a unit that move together.

A chunk's parameters lie one after the other in the chunk's store; its optimizer states follow
there, one region per state. On the device each group of parameters (see `program.grouped`) has a
buffer of its own, in the same layout, so that groups can come and go one after the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from protrain_plan.program import PIECE_ALIGNMENT, ChunkSize, grouped, pieces_in
from protrain_runtime.devices import HOST_ALIGNMENT_BYTES
from protrain_runtime.stores import Store
from protrain_runtime.taken import TakenGradient, single
from protrain_runtime.waiting import Waiting

if TYPE_CHECKING:
    from protrain_runtime.sharding import Sharding

ALIGNMENT = HOST_ALIGNMENT_BYTES
"""Every parameter starts at a multiple of what the CPU allocator aligns tensors to, so that kernels
meet the alignment that they would meet without a plan (accelerators: `devices.alignment`)."""

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where one parameter lies in its chunk."""

    name: str
    parameter: nn.Parameter
    offset: int  # bytes from the start of the chunk's parameters in the store
    group: int
    inside: int  # bytes from the start of the group's buffer
    start: int  # index of its first element among the chunk's trainable elements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    first: int = 0  # of a rank's part of a parameter: the element at which it begins

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in storage order, in its group's buffer.  # dtype [numel]"""
        return buffer[self.inside : self.inside + self.num_bytes].view(self.dtype)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter as the model knows it, in its group's buffer.  # dtype [shape]"""
        return self.flat(buffer).as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Whole parameters that come to the device and leave it together."""

    offset: int  # bytes from the start of the chunk's parameters in the store
    num_bytes: int
    slices: tuple[Slice, ...]
    padding: int = 0  # bytes besides the trainable parameters' own, where ranks share a group

    @property
    def gradient_bytes(self) -> int:
        return self.padding + sum(part.num_bytes for part in self.slices if part.trainable)


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
    """The states first used in one unit. Without a store, its placement is persistent.

    With `sharding`, this is what stands on the device, and `own` what this rank has in the store.
    """

    unit: int
    slices: tuple[Slice, ...]
    groups: tuple[Group, ...]  # the same slices
    used_by: tuple[int, ...]
    store: Store | None = None
    offset: int = 0  # of the parameters in the store
    states: tuple[StateLayout, ...] = ()
    # The groups on the device, or on their way there, by number.  # uint8 [group's bytes]
    buffers: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    # The groups whose parameters have their shapes and hold nothing.
    hollow: set[int] = field(default_factory=set[int])
    # Gradients by parameter: on the device, taken for their moves, and in the store below it.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    waiting: dict[str, Waiting] = field(default_factory=dict[str, Waiting])
    # What stands for them in `.grad`, set aside while a micro-batch runs.
    hidden: dict[str, TakenGradient] = field(default_factory=dict[str, TakenGradient])
    gradient_store: Store | None = None
    gradient_offset: int = 0
    # What the optimizer keeps per parameter that is not elementwise (AdamW's step), by name.
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    updated: set[str] = field(default_factory=set[str])  # parameters that have states
    sharding: "Sharding | None" = None
    element_bytes: int = 0  # of trainable elements, where ranks share them

    @property
    def own(self) -> "Chunk":
        """The chunk whose states are in the store."""
        return self if self.sharding is None else self.sharding.own

    def has_states(self, name: str) -> bool:
        """Whether a parameter has optimizer states here: updated, and of ranks, this one's too."""
        if name not in self.updated:
            return False
        return self.sharding is None or self.sharding.part_of(name) is not None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [part.parameter for part in self.slices]

    @property
    def num_trainable(self) -> int:
        """Trainable elements; of a shared chunk, with the padding between them."""
        if self.element_bytes:
            return self.gradient_bytes // self.element_bytes
        return sum(part.numel for part in self.slices if part.trainable)

    @property
    def parameter_bytes(self) -> int:
        """With the padding between parameters."""
        return sum(group.num_bytes for group in self.groups)

    @property
    def gradient_bytes(self) -> int:
        return sum(group.gradient_bytes for group in self.groups)

    @property
    def every_group(self) -> range:
        return range(len(self.groups))

    def size(self, state_bytes_per_parameter: Mapping[torch.dtype, int]) -> ChunkSize:
        """The sizes from which a programme is compiled."""
        several = len(self.groups) > 1
        return ChunkSize(
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            state_bytes=self._state_bytes(state_bytes_per_parameter),
            num_parameters=self.num_trainable,
            used_by=self.used_by,
            parameter_pieces=self._parameter_pieces if several else (),
            gradient_pieces=self._gradient_pieces if several else (),
        )

    def _state_bytes(self, per_parameter: Mapping[torch.dtype, int]) -> int:
        trainable = [part for part in self.slices if part.trainable]
        if len({part.dtype for part in trainable}) == 1:
            return self.num_trainable * per_parameter[trainable[0].dtype]
        return sum(part.numel * per_parameter[part.dtype] for part in trainable)

    @property
    def _parameter_pieces(self) -> tuple[int, ...]:
        return tuple(group.num_bytes for group in self.groups)

    @property
    def _gradient_pieces(self) -> tuple[int, ...]:
        return tuple(group.gradient_bytes for group in self.groups)

    def groups_in(self, share: tuple[float, float]) -> range:
        """The groups in a share of the parameters' bytes."""
        return pieces_in(self._parameter_pieces, share)

    def gradient_groups_in(self, share: tuple[float, float]) -> range:
        """The groups in a share of the gradients' bytes."""
        return pieces_in(self._gradient_pieces, share)

    def cut(self, element: int) -> int:
        """Where a piece that should end before `element` ends, within its parameter."""
        for part in self.slices:
            if part.trainable and part.start <= element < part.start + part.numel:
                inside = (element - part.start) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
                return part.start + inside
        return element

    def bind(self, groups: Iterable[int]) -> None:
        """Let the parameters of these groups be views of their buffers."""
        with torch.inference_mode(mode=False):  # a parameter's, also where a forward is without
            for number in groups:
                for part in self.groups[number].slices:
                    part.parameter.data = part.view(self.buffers[number])
                self.hollow.discard(number)

    def unbind(self, groups: Iterable[int]) -> None:
        """Leave parameters of the right shape that hold nothing.

        An expanded single element keeps shape, dtype and device, which autograd checks gradients
        against, at no memory.
        """
        for number in groups:
            for part in self.groups[number].slices:
                hollow = single(part.dtype, part.parameter.device)
                with torch.inference_mode(mode=False):
                    part.parameter.data = hollow.expand(part.shape)
            self.hollow.add(number)

    def release(self, groups: Iterable[int]) -> list[torch.Tensor]:
        """Take the buffers of these groups from the model; they are the caller's to free."""
        released: list[torch.Tensor] = []
        for number in groups:
            self.unbind((number,))
            buffer = self.buffers.pop(number, None)
            if buffer is not None:
                released.append(buffer)
        return released

    def take_gradients(self) -> None:
        """Move the gradients from the parameters to the chunk; RuntimeError where one is sparse."""
        for part in self.slices:
            gradient = part.parameter.grad
            if gradient is not None and not isinstance(gradient, TakenGradient):
                if gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of {part.name} is sparse, and this plan takes it from the"
                        " device: profile and plan this model again, which lets its states stay"
                    )
                self.gradients[part.name] = gradient.resolve_conj().resolve_neg()
                part.parameter.grad = TakenGradient.standing_for(gradient)

    def forget_dropped(self) -> None:
        """Forget waiting gradients whose stand-ins the training loop has removed (`zero_grad`)."""
        for part in self.slices:
            if not isinstance(part.parameter.grad, TakenGradient):
                self.waiting.pop(part.name, None)

    def hide_taken(self) -> None:
        """Leave no gradient where one was taken, for autograd to add to, until `show_taken`."""
        for part in self.slices:
            if isinstance(part.parameter.grad, TakenGradient):
                self.hidden[part.name] = part.parameter.grad
                part.parameter.grad = None

    def show_taken(self) -> None:
        """Let what was hidden stand again where no other gradient came."""
        for part in self.slices:
            if part.name in self.hidden and part.parameter.grad is None:
                part.parameter.grad = self.hidden[part.name]
        self.hidden.clear()

    def clear_gradients(self) -> None:
        """Forget the gradients, and what stands for those that were taken."""
        self.gradients.clear()
        self.waiting.clear()
        self.hidden.clear()
        self.drop_taken()

    def drop_taken(self) -> None:
        """Leave no gradient where one was taken."""
        for part in self.slices:
            if isinstance(part.parameter.grad, TakenGradient):
                part.parameter.grad = None


def make_chunk(
    unit: int,
    parameters: Sequence[tuple[str, nn.Parameter]],
    used_by: tuple[int, ...],
    *,
    alignment: int = ALIGNMENT,
) -> Chunk:
    """Lay `parameters` out one after the other, each from a multiple of `alignment` bytes on."""
    slices: list[Slice] = []
    groups: list[Group] = []
    offset = start = 0
    for members in grouped([aligned_bytes(parameter, alignment) for _, parameter in parameters]):
        begin = offset
        for name, parameter in parameters[members.start : members.stop]:
            part = Slice(
                name=name,
                parameter=parameter,
                offset=offset,
                group=len(groups),
                inside=offset - begin,
                start=start,
                shape=parameter.shape,
                stride=dense_strides(parameter),
                dtype=parameter.dtype,
                trainable=parameter.requires_grad,
            )
            slices.append(part)
            offset += aligned_bytes(parameter, alignment)
            start += part.numel if part.trainable else 0
        own = tuple(slices[members.start :])
        groups.append(Group(offset=begin, num_bytes=offset - begin, slices=own))
    return Chunk(unit, tuple(slices), tuple(groups), used_by)


def aligned_bytes(tensor: torch.Tensor, alignment: int = ALIGNMENT) -> int:
    """Bytes from a parameter's start to the next one's."""
    return -(-tensor.numel() * tensor.itemsize // alignment) * alignment


def offload(
    chunk: Chunk,
    store: Store,
    state_dtypes: Mapping[torch.dtype, Mapping[str, torch.dtype]],
) -> None:
    """Copy the parameters to `store`, and reserve room for them and their states there.

    `state_dtypes` gives, for each dtype of parameters, the elementwise states and their dtypes.
    The parameters themselves stay as they are until `unbind`.
    """
    offset = store.reserve(chunk.parameter_bytes)
    layouts: list[StateLayout] = []
    dtypes = {part.dtype for part in chunk.slices if part.trainable}
    assert len(dtypes) <= 1, "a chunk's trainable parameters share one dtype"
    for dtype in dtypes:
        for key, state_dtype in state_dtypes[dtype].items():
            place = store.reserve(chunk.num_trainable * state_dtype.itemsize)
            layouts.append(StateLayout(key=key, dtype=state_dtype, offset=place))
    for part in chunk.slices:
        source = part.parameter.detach().resolve_conj().resolve_neg()
        if source.stride() != part.stride:
            source = torch.empty_strided(part.shape, part.stride, dtype=part.dtype).copy_(source)
        store.write(offset + part.offset, flat_storage_order(source).view(torch.uint8))
    chunk.store, chunk.offset, chunk.states = store, offset, tuple(layouts)
