"""Chunks: the model states of a unit that move together.

A chunk's parameters lie one after the other in the chunk's store; its optimizer states follow
there, one region per state. On the device each group of parameters (see `program.grouped`) has a
buffer of its own, in the same layout, so that groups can come and go one after the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from protrain_plan.program.program import PIECE_ALIGNMENT, ChunkSize, grouped, pieces_in
from protrain_runtime.devices.device import HOST_ALIGNMENT_BYTES
from protrain_runtime.devices.stores import Store
from protrain_runtime.states.stand_ins import (
    ConsumedGradient,
    Elsewhere,
    GradientInStore,
    UsedGradient,
    come_back,
    send_away,
)
from protrain_runtime.states.update_rules import UpdateRule

if TYPE_CHECKING:
    from protrain_runtime.states.layout import Sharding

ALIGNMENT = HOST_ALIGNMENT_BYTES
"""Every parameter starts at a multiple of what the CPU allocator aligns tensors to, so that kernels
meet the alignment that they would meet without a plan (accelerators: `devices.alignment`)."""


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


def in_order_of(part: "Slice", values: torch.Tensor) -> torch.Tensor:
    """A parameter's elements in the order of its storage; a copy if they lie in another.  # [numel]

    `values` is a tensor of its shape, of any dtype and strides.
    """
    source = values.detach().resolve_conj().resolve_neg()
    if source.stride() != part.stride:
        source = torch.empty_strided(
            part.shape, part.stride, dtype=values.dtype, device=values.device
        ).copy_(source)
    return flat_storage_order(source)


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

    def place(self, element: int) -> int:
        """Where the value of one of the chunk's trainable elements is: bytes from the start."""
        return self.offset + element * self.dtype.itemsize


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
    # The parameters' versions when they came to the device, which writes count up.
    versions: dict[str, int] = field(default_factory=dict[str, int])
    # Gradients by parameter: on the device, taken for their moves, and in the store below it.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    offloaded_gradients: dict[str, GradientInStore] = field(
        default_factory=dict[str, GradientInStore]
    )
    # What stands for them in `.grad`, set aside while a micro-batch runs.
    hidden: dict[str, ConsumedGradient] = field(default_factory=dict[str, ConsumedGradient])
    gradient_store: Store | None = None
    gradient_offset: int = 0
    # What the optimizer keeps per parameter that is not elementwise (AdamW's step), by name.
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    updated: set[str] = field(default_factory=set[str])  # parameters that have states
    sharding: "Sharding | None" = None
    element_bytes: int = 0  # of trainable elements, where ranks share them
    # Called where code reads a parameter that is away: it brings the chunk, or raises.
    bring: "Callable[[Chunk, str], None]" = field(default=lambda _, name: refuse_reading(name))
    # Called before values are read for a copy: it raises where they are not those of one step.
    settle: Callable[[str], None] = field(default=lambda _: None)

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
            parameter_pieces=tuple(group.num_bytes for group in self.groups) if several else (),
            gradient_pieces=tuple(group.gradient_bytes for group in self.groups) if several else (),
        )

    def _state_bytes(self, per_parameter: Mapping[torch.dtype, int]) -> int:
        trainable = [part for part in self.slices if part.trainable]
        if len({part.dtype for part in trainable}) == 1:
            return self.num_trainable * per_parameter[trainable[0].dtype]
        return sum(part.numel * per_parameter[part.dtype] for part in trainable)

    def groups_in(self, share: tuple[float, float]) -> range:
        """The groups in a share of the parameters' bytes."""
        return pieces_in([group.num_bytes for group in self.groups], share)

    def gradient_groups_in(self, share: tuple[float, float]) -> range:
        """The groups in a share of the gradients' bytes."""
        return pieces_in([group.gradient_bytes for group in self.groups], share)

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
                    come_back(part.parameter)
                    part.parameter.data = part.view(self.buffers[number])
                    self.versions[part.name] = part.parameter._version
                self.hollow.discard(number)

    def unbind(self, groups: Iterable[int]) -> None:
        """Leave parameters of the right shape that hold nothing (`away`)."""
        for number in set(groups) - self.hollow:
            for part in self.groups[number].slices:
                send_away(part.parameter, partial(self._elsewhere, part))
            self.hollow.add(number)

    def _elsewhere(self, part: Slice, kind: type[nn.Parameter]) -> Elsewhere:
        return Elsewhere(
            name=part.name,
            stride=part.stride,
            bring=lambda name: self.bring(self, name),
            values=partial(self._copy, part),
            kind=kind,
        )

    def _copy(self, part: Slice) -> torch.Tensor:
        """An offloaded parameter's values on its device.  # part.dtype [part.shape]"""
        self.settle("the model was copied")
        return read_parameter(self, part).to(part.parameter.device)

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
            if gradient is not None and not isinstance(gradient, ConsumedGradient):
                if gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of {part.name} is sparse, and this plan takes it from the"
                        " device: profile and plan this model again, which lets its states stay"
                    )
                self.gradients[part.name] = gradient.resolve_conj().resolve_neg()
                part.parameter.grad = ConsumedGradient.standing_for(gradient)

    def forget_dropped(self) -> None:
        """Forget waiting gradients whose stand-ins the training loop has removed (`zero_grad`)."""
        for part in self.slices:
            if not isinstance(part.parameter.grad, ConsumedGradient):
                self.offloaded_gradients.pop(part.name, None)

    def hide_consumed(self) -> None:
        """Leave no gradient where one was taken, for autograd to add to, until `show_consumed`."""
        for part in self.slices:
            gradient = part.parameter.grad
            if isinstance(gradient, ConsumedGradient) and not isinstance(gradient, UsedGradient):
                self.hidden[part.name] = gradient
                part.parameter.grad = None

    def show_consumed(self) -> None:
        """Let what was hidden stand again where no other gradient came."""
        for part in self.slices:
            if part.name in self.hidden and part.parameter.grad is None:
                part.parameter.grad = self.hidden[part.name]
        self.hidden.clear()

    def clear_gradients(self) -> None:
        """Forget the gradients, and what stands for those that were taken."""
        self.gradients.clear()
        self.offloaded_gradients.clear()
        self.hidden.clear()
        self.drop_consumed()

    def drop_consumed(self) -> list[nn.Parameter]:
        """Leave no gradient where one was taken; returns the parameters that had one."""
        consumed = [part.parameter for part in self.consumed]
        for parameter in consumed:
            parameter.grad = None
        return consumed

    @property
    def consumed(self) -> list[Slice]:
        """Where a stand-in is in place of the gradient."""
        return [part for part in self.slices if isinstance(part.parameter.grad, ConsumedGradient)]

    @property
    def written(self) -> str | None:
        """A parameter that was written to since it came to the device."""
        here = (part for part in self.slices if part.group not in self.hollow)
        for part in here:
            if part.parameter._version != self.versions.get(part.name, part.parameter._version):
                return part.name
        return None

    @property
    def used(self) -> list[str]:
        """The parameters whose gradient the last step has used, and nobody has zeroed."""
        return [p.name for p in self.slices if isinstance(p.parameter.grad, UsedGradient)]


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


def refuse_reading(name: str) -> None:
    """RuntimeError that names the way to a parameter that is away."""
    raise RuntimeError(
        f"the values of {name!r} are not on the device: the plan keeps them below it, or shared"
        " among the devices, between its uses. Read or write them inside"
        " `with protrain_runtime.full_parameters(model):`"
    )


def read_parameter(chunk: Chunk, part: Slice) -> torch.Tensor:
    """An offloaded parameter's values, from its store.  # part.dtype [part.shape], on the host

    Of what ranks share, all of them ask for it.
    """
    assert chunk.store is not None
    if chunk.sharding is not None:
        with chunk.sharding.gathering("a gather of parameters"):
            buffer = chunk.sharding.gather(chunk, part.group)
            return part.flat(buffer).clone().as_strided(part.shape, part.stride).cpu()
    return _read(chunk.store, chunk.offset + part.offset, part, part.dtype)


def write_parameter(chunk: Chunk, part: Slice, values: torch.Tensor) -> None:
    """Let the store have these values of an offloaded parameter.  # part.dtype [part.shape]

    Of what ranks share, each writes its own elements.
    """
    own = chunk.own
    _write(chunk, part, values, part.dtype, lambda mine: own.offset + mine.offset)


def read_state(chunk: Chunk, layout: StateLayout, part: Slice) -> torch.Tensor:
    """One state of one parameter, from the store.  # layout.dtype [shape], on the host

    Of what ranks share, all of them ask for it.
    """
    assert chunk.store is not None
    if chunk.sharding is not None:
        with chunk.sharding.gathering("a gather of optimizer states"):
            state = chunk.sharding.fetch_state(layout, part).cpu()
        return flat_storage_order(state).clone().as_strided(part.shape, part.stride)
    return _read(chunk.store, layout.place(part.start), part, layout.dtype)


def write_state(chunk: Chunk, layout: StateLayout, part: Slice, values: torch.Tensor) -> None:
    """Let the store have these values of a parameter's state.  # any dtype [part.shape]"""
    _write(chunk, part, values, layout.dtype, lambda mine: layout.place(mine.start))


def _read(store: Store, place: int, part: Slice, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.empty(part.numel * dtype.itemsize, dtype=torch.uint8)
    store.read(place, flat)
    return flat.view(dtype).as_strided(part.shape, part.stride)


def _write(
    chunk: Chunk,
    part: Slice,
    values: torch.Tensor,
    dtype: torch.dtype,
    place: Callable[[Slice], int],
) -> None:
    """Write what this device has of a whole tensor; `place` says where in the store it goes."""
    assert chunk.store is not None
    mine = part if chunk.sharding is None else chunk.sharding.part_of(part.name)
    if mine is not None:
        flat = in_order_of(part, values)[mine.first : mine.first + mine.numel].to(dtype)
        chunk.store.write(place(mine), flat.contiguous().view(torch.uint8))


def aligned_bytes(tensor: torch.Tensor, alignment: int = ALIGNMENT) -> int:
    """Bytes from a parameter's start to the next one's."""
    return -(-tensor.numel() * tensor.itemsize // alignment) * alignment


def offload(
    chunk: Chunk,
    store: Store,
    rules: Mapping[torch.dtype, UpdateRule],
) -> None:
    """Copy the parameters to `store`, and reserve room for them and their states there.

    Of what ranks share, this rank's part. `rules` are those of each dtype of parameters. The
    parameters themselves stay as they are until `unbind`.
    """
    own = chunk.own
    own.offset = store.reserve(own.parameter_bytes)
    layouts: list[StateLayout] = []
    dtypes = {part.dtype for part in chunk.slices if part.trainable}
    assert len(dtypes) <= 1, "a chunk's trainable parameters share one dtype"
    for dtype in dtypes:
        for key, state_dtype in rules[dtype].states.items():
            place = store.reserve(own.num_trainable * state_dtype.itemsize)
            layouts.append(StateLayout(key=key, dtype=state_dtype, offset=place))
    chunk.store = own.store = store
    own.states = tuple(layouts)
    for part in chunk.slices:
        write_parameter(chunk, part, part.parameter)
