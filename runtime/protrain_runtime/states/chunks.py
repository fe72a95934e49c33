"""Chunks: the model states of a unit that move together.

A chunk's parameters lie in order in its store, then its optimizer states, one region per state. On
the device each group of parameters (see `program.grouped`) has its own buffer with the same layout:
groups come and go one by one.

In a sharded chunk, each group's buffer has trainable parameters first, then frozen ones; each
region is padded to equal ranges for all ranks (see `program.shard_bytes`). A rank's ranges are a
chunk of their own: flat parts of parameters in storage order. With a common copy, the frozen region
is whole, unpadded and unsharded, in memory that the ranks of a node share.

[Note: views for good] On an accelerator, parameters stay views of one buffer per group, whose
memory is freed when the group leaves and allocated when it comes, as in FSDP2. The tensors that
autograd saves of them are known: any other holder of a leaving buffer is the model's, and would
read freed memory. Such a buffer is left to its holder, and the chunk gets new ones from the next
step on; likewise in a first step, which records reads in backward before a chunk's slot has begun.
Forwards without a graph get new buffers, as code may keep their outputs.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import nn

from protrain_runtime.contract.program.program import PIECE_ALIGNMENT, ChunkSize, pieces_in
from protrain_runtime.devices.device import HOST, HOST_ALIGNMENT_BYTES
from protrain_runtime.devices.lanes import num_holders
from protrain_runtime.devices.stores import Store
from protrain_runtime.states.stand_ins import (
    ConsumedGradient,
    Elsewhere,
    GradientInStore,
    OffloadedGradient,
    UsedGradient,
    come_back,
    plainly,
    send_away,
)
from protrain_runtime.states.update_rules import StateRule, UpdateRule, UpdateRules

if TYPE_CHECKING:
    from protrain_runtime.states.sharing import Sharding

ALIGNMENT = HOST_ALIGNMENT_BYTES
"""Every parameter starts at a multiple of what the CPU allocator aligns tensors to, so that kernels
meet the alignment that they would meet without a plan (accelerators: `devices.alignment`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The place of a parameter in its chunk."""

    name: str
    parameter: nn.Parameter
    offset: int  # bytes from the start of the chunk's parameters in the store
    group: int
    inside: int  # bytes from the start of the group's buffer
    start: int  # its first element's index among the chunk's trainable elements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    first: int = 0  # of a rank's part of a parameter: its first element
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", self.shape.numel())

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def rule(self, rules: UpdateRules) -> UpdateRule:
        """The rules' answer for the parameter; for a rank's part, that of the whole parameter."""
        in_order = self.stride == torch.empty(self.shape, device="meta").stride()
        return rules.of(self.dtype, self.shape, in_order=in_order, parameter=self.parameter)

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in storage order, in its group's buffer.  # dtype [numel]"""
        return buffer[self.inside : self.inside + self.num_bytes].view(self.dtype)

    def shaped(self, own: torch.Tensor) -> torch.Tensor:
        """These bytes as the parameter, or a gradient of it, as the model sees it.  # [shape]"""
        return own.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Group:
    """Whole parameters that are fetched and evicted together."""

    offset: int  # bytes from the start of the chunk's parameters in the store
    num_bytes: int
    slices: tuple[Slice, ...]
    gradient_bytes: int  # with padding, if sharded


def flat_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in storage order, without a copy.  # [numel]"""
    return tensor.as_strided((tensor.numel(),), (1,))


def dense(values: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with a parameter's strides; copied only if they differ."""
    if (values.dim() == 1 and values.stride() == (1,)) or values.stride() == stride:
        return values  # already flat, or in the parameter's layout
    return torch.empty_strided(
        values.shape, stride, dtype=values.dtype, device=values.device
    ).copy_(values)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if it covers its storage densely, else those of a contiguous copy."""
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim))
    expected = 1
    for dim in order:
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= tensor.shape[dim]
    return tensor.stride()


StateKind = tuple[str, StateRule]
"""An optimizer state's key and layout rule: one region of a chunk's store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """One optimizer state of a chunk's parameters: a region of the store."""

    key: str
    rule: StateRule
    offset: int  # bytes from the start of the store
    starts: Mapping[str, int]  # by parameter: its first value's index in the region

    @property
    def kind(self) -> StateKind:
        """A key of the state within the chunk, equal in both copies."""
        return self.key, self.rule

    @property
    def dtype(self) -> torch.dtype:
        return self.rule.dtype

    def value(self, name: str, element: int) -> int:
        """The index in the region of the value for an element of a parameter."""
        return self.starts[name] + element // self.rule.per

    def place(self, name: str, element: int = 0) -> int:
        """The offset of that value: bytes from the start of the store."""
        return self.offset + self.value(name, element) * self.dtype.itemsize


class Cut(NamedTuple):
    """Allowed cuts of a parameter: multiples of `unit`, `least` from its ends; steps of `most`."""

    unit: int = PIECE_ALIGNMENT
    least: int = 1
    most: int = sys.maxsize

    def before(self, element: int, count: int) -> int:
        """The last allowed cut up to `element` in a parameter of `count`; 0: none."""
        place = min(element, count - self.least) // self.unit * self.unit
        return place if place >= self.least else 0


@dataclass(slots=True)
class Copy:
    """A chunk's parameters and optimizer states in its store.

    offset   of the parameters: bytes from the start of the store
    scalars  what the optimizer keeps per parameter that is not elementwise (AdamW's step), by name
    updated  parameters that have states
    """

    offset: int = 0
    states: tuple[StateLayout, ...] = ()
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    updated: set[str] = field(default_factory=set[str])

    def place(self, part: Slice, layout: StateLayout | None = None) -> int:
        """The offset of a parameter or of one of its states: bytes from the start of the store."""
        return self.offset + part.offset if layout is None else layout.place(part.name)

    def of(self, part: Slice) -> list[StateLayout]:
        """The states of a parameter."""
        return [layout for layout in self.states if part.name in layout.starts]


SavedViews = list[ref[torch.Tensor]]


class Lasting(NamedTuple):
    """The reused buffer of a group: see [Note: views for good]."""

    buffer: torch.Tensor  # uint8 [group's bytes]
    storage: torch.UntypedStorage
    elements: dict[torch.dtype, torch.Tensor]  # the same bytes


@dataclass(slots=True)
class Chunk:
    """The states first used in one unit. Without a store, its placement is persistent.

    With `sharding`, this is the chunk on the device, and `own` this rank's shard in the store. A
    speculatively updated chunk has a second copy of its states, `spare`: an update reads the
    current copy and writes all of the spare one; `exchange` swaps them.
    """

    unit: int
    groups: tuple[Group, ...]
    used_by: tuple[int, ...]
    slices: tuple[Slice, ...] = field(init=False)  # of all groups
    parameters: list[nn.Parameter] = field(init=False)
    every_group: range = field(init=False)
    group_bytes: tuple[int, ...] = field(init=False)
    parameter_bytes: int = field(init=False)  # with padding between parameters
    gradient_bytes: int = field(init=False)
    store: Store | None = None
    current: Copy = field(default_factory=Copy)
    spare: Copy | None = None
    # Gradients used by a speculative update, by name; None: it did not run, or its inputs changed.
    speculated: dict[str, GradientInStore] | None = None
    # Groups on the device or on their way there, by number.  # uint8 [group's bytes]
    buffers: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    # Groups whose parameters have their shapes and no memory.
    hollow: set[int] = field(default_factory=set[int])
    # See [Note: views for good]: whether buffers are reused, these buffers, the groups whose
    # parameters view them, and each buffer's holders at its arrival: parameters and cached updates.
    lasts: bool = False
    lasting: dict[int, Lasting] = field(default_factory=dict[int, Lasting])
    viewing: set[int] = field(default_factory=set[int])
    holders: dict[int, int] = field(default_factory=dict[int, int])
    # By group, the views of its reused buffer that autograd saved: each holds it once.
    saved: dict[int, SavedViews] = field(default_factory=dict[int, SavedViews])
    # By group, its parameters and their places while off the device.
    places: dict[int, list[tuple[nn.Parameter, Elsewhere]]] = field(
        default_factory=dict[int, list[tuple[nn.Parameter, Elsewhere]]]
    )
    # The parameters' versions at arrival on the device; writes increase them.
    versions: dict[str, int] = field(default_factory=dict[str, int])
    # Gradients by parameter: on the device, taken for their moves; and in the store below.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    offloaded_gradients: dict[str, GradientInStore] = field(
        default_factory=dict[str, GradientInStore]
    )
    # `.grad` after earlier micro-batches, set aside while one runs.
    hidden: dict[str, ConsumedGradient] = field(default_factory=dict[str, ConsumedGradient])
    gradient_store: Store | None = None
    gradient_offset: int = 0
    # Values of a persistent chunk's parameters, set aside after their update.
    aside: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    sharding: "Sharding | None" = None
    element_bytes: int = 0  # of trainable elements, if sharded
    # Allowed cuts of parameters by their optimizer; default: any PIECE_ALIGNMENT elements.
    rules: dict[str, UpdateRule] = field(default_factory=dict[str, UpdateRule])
    # Called when code reads an offloaded parameter: fetches the chunk, or raises.
    bring: "Callable[[Chunk, str], None]" = field(default=lambda _, name: refuse_reading(name))
    # Called before values are read for a copy: raises unless all are of one step.
    settle: Callable[[str], None] = field(default=lambda _: None)

    def __post_init__(self) -> None:
        self.slices = tuple(part for group in self.groups for part in group.slices)
        self.parameters = [part.parameter for part in self.slices]
        self.every_group = range(len(self.groups))
        self.group_bytes = tuple(group.num_bytes for group in self.groups)
        self.parameter_bytes = sum(self.group_bytes)
        self.gradient_bytes = sum(group.gradient_bytes for group in self.groups)

    @property
    def own(self) -> "Chunk":
        """The chunk whose states are in the store."""
        return self if self.sharding is None else self.sharding.own

    def has_states(self, name: str) -> bool:
        """Whether a parameter has optimizer states here: updated and, if sharded, on this rank."""
        if name not in self.current.updated:
            return False
        return self.sharding is None or self.sharding.part_of(name) is not None

    def exchange(self) -> None:
        """Make the copy that the update wrote the current one."""
        assert self.spare is not None
        self.current, self.spare = self.spare, self.current
        self.speculated = None

    @property
    def num_trainable(self) -> int:
        """Trainable elements, with padding if sharded."""
        if self.element_bytes:
            return self.gradient_bytes // self.element_bytes
        return sum(part.numel for part in self.slices if part.trainable)

    def size(self, rules: UpdateRules) -> ChunkSize:
        """The sizes for compiling a program."""
        several = len(self.groups) > 1
        trainable = [(part, part.rule(rules)) for part in self.slices if part.trainable]
        state_bytes = sum(rule.state_bytes(part.numel) for part, rule in trainable)
        uneven = 0
        if self.element_bytes and trainable:  # with padding
            _, rule = trainable[0]
            state_bytes = rule.state_bytes(self.num_trainable)
        elif (
            not any(rule.reason for _, rule in trainable)
            and len({frozenset(rule.states.items()) for _, rule in trainable}) > 1
        ):
            # Pieces have equal elements: one may consist of those with the most bytes each.
            most = max(trainable, key=lambda one: one[0].numel)[1].element_bytes
            beyond = (rule.state_bytes(part.numel) - most * part.numel for part, rule in trainable)
            uneven = ceil(sum(more for more in beyond if more > 0))
        return ChunkSize(
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            state_bytes=state_bytes,
            uneven_state_bytes=uneven,
            largest_gradient_bytes=max((part.num_bytes for part, _ in trainable), default=0),
            num_parameters=self.num_trainable,
            used_by=self.used_by,
            parameter_pieces=tuple(group.num_bytes for group in self.groups) if several else (),
            gradient_pieces=tuple(group.gradient_bytes for group in self.groups) if several else (),
        )

    def join_groups(self) -> None:
        """Merge all groups into one."""
        slices = tuple(replace(part, group=0, inside=part.offset) for part in self.slices)
        self.groups = (Group(0, self.parameter_bytes, slices, self.gradient_bytes),)
        self.hollow = {0} if self.hollow else set()
        self.__post_init__()
        self.places.clear()

    def groups_in(self, share: tuple[float, float]) -> range:
        """The groups in a share of the parameters' bytes."""
        return pieces_in(self.group_bytes, share)

    def gradient_groups_in(self, share: tuple[float, float]) -> range:
        """The groups in a share of the gradients' bytes."""
        return pieces_in(tuple([group.gradient_bytes for group in self.groups]), share)

    def cut(self, element: int) -> int:
        """The end of a piece that should end before `element`, within its parameter."""
        for part in self.slices:
            if part.trainable and part.start <= element < part.start + part.numel:
                return part.start + self.cut_of(part).before(element - part.start, part.numel)
        return element

    def cut_of(self, part: Slice) -> "Cut":
        """Allowed starts of a parameter's ranges; none if its optimizer cannot cut it."""
        rule = self.rules.get(part.name)
        if rule is None:
            return Cut()
        if rule.reason:
            return Cut(least=sys.maxsize)
        return Cut(rule.unit, rule.least, rule.unit if rule.compiled else sys.maxsize)

    def room(
        self, number: int, empty: Callable[[int], torch.Tensor], *, lent: bool = False
    ) -> torch.Tensor:
        """A buffer for a group's arrival; `lent`: not for a step.  # uint8"""
        size = self.groups[number].num_bytes
        known = None if lent else self.lasting.get(number)
        if known is not None:
            buffer = known.buffer
            known.storage.resize_(size)
        else:
            buffer = empty(size)
            if self.lasts and not lent:
                self.lasting[number] = Lasting(buffer, buffer.untyped_storage(), {})
        self.buffers[number] = buffer
        return buffer

    def last(self, *, lasts: bool) -> None:
        """Reuse buffers from now on, or stop: present buffers go to their holders."""
        self.lasts = lasts
        self.lasting.clear()
        self.viewing.clear()
        self.saved.clear()

    def end_step(self) -> None:
        """Drop saved views that autograd released, and buffers no longer reused."""
        if self.lasting and not self.lasts:
            self.last(lasts=False)
        for views in self.saved.values():
            views[:] = [view for view in views if view() is not None]

    def bind(self, groups: Iterable[int]) -> None:
        """Make the parameters of these groups views of their buffers."""
        for number in groups:
            buffer, lasting = self.buffers[number], self.lasting.get(number)
            lasts = lasting is not None and buffer is lasting.buffer
            if not (lasts and number in self.viewing):
                self._view(number, buffer, lasting.elements if lasting and lasts else {})
            elif number in self.hollow:
                come_back(*[parameter for parameter, _ in self.places[number]])
                for part in self.groups[number].slices:
                    self.versions[part.name] = part.parameter._version
            else:
                continue
            if lasting is not None and lasts:
                self.viewing.add(number)
                self.holders[number] = self._holders(number, lasting)
            self.hollow.discard(number)

    def _view(
        self, number: int, buffer: torch.Tensor, typed: dict[torch.dtype, torch.Tensor]
    ) -> None:
        self.viewing.discard(number)
        with torch.inference_mode(mode=False):  # usable by autograd, even in a forward without it
            for part in self.groups[number].slices:
                come_back(part.parameter)
                size = part.dtype.itemsize
                if (elements := typed.get(part.dtype)) is None:
                    elements = buffer[: buffer.numel() // size * size].view(part.dtype)
                    typed[part.dtype] = elements
                place = part.inside // size
                part.parameter.data = elements.as_strided(part.shape, part.stride, place)
                self.versions[part.name] = part.parameter._version

    def _holders(self, number: int, lasting: Lasting) -> int:
        """The holders of a reused buffer, other than saved tensors."""
        saved = [view for view in self.saved.get(number, ()) if view() is not None]
        return num_holders(lasting.storage) - len(saved)

    def unbind(self, groups: Iterable[int]) -> None:
        """Leave the groups' parameters with shapes but without memory (`away`)."""
        for number in set(groups) - self.hollow:
            if (places := self.places.get(number)) is None:
                places = self.places[number] = [
                    (part.parameter, self._place(part)) for part in self.groups[number].slices
                ]
            send_away(*places, stay=number in self.viewing)
            self.hollow.add(number)

    def _place(self, part: Slice) -> Elsewhere:
        return Elsewhere(
            name=part.name,
            stride=part.stride,
            bring=lambda name: self.bring(self, name),
            values=partial(self._copy, part),
        )

    def release(self, groups: Collection[int], *, looks: bool = False) -> list[torch.Tensor]:
        """Take these groups' buffers; returns ones not reused, and `looks` for other holders."""
        released: list[torch.Tensor] = []
        for number in groups:
            self.unbind((number,))
            buffer, lasting = self.buffers.pop(number, None), self.lasting.get(number)
            if buffer is None:
                continue
            if lasting is None or buffer is not lasting.buffer:
                released.append(buffer)
            elif looks and self._holders(number, lasting) > self.holders.get(number, sys.maxsize):
                released.append(buffer)
                del self.lasting[number]
                self.viewing.discard(number)
                self.lasts = False
            else:
                lasting.storage.resize_(0)
        return released

    def _copy(self, part: Slice) -> torch.Tensor:
        """An offloaded parameter's values, copied to its device.  # part.dtype [part.shape]"""
        self.settle("the model was copied")
        if part.name in self.aside:
            return self.aside[part.name].clone()
        return read_values(self, part, device=part.parameter.device)

    def put_aside(self) -> None:
        """Hide parameters that backward has updated, until `put_back`."""
        for part in self.slices:
            if part.trainable:
                self.aside[part.name] = part.parameter.data
                place = self._place(part)
                place.stride = part.parameter.stride()
                place.bring = partial(refuse_reading, why=_READ_EARLY)
                send_away((part.parameter, place))

    def put_back(self) -> None:
        """Restore the parameters of `put_aside`."""
        for part in self.slices:
            if (values := self.aside.pop(part.name, None)) is not None:
                come_back(part.parameter)
                part.parameter.data = values

    def take_gradients(self) -> None:
        """Move gradients from the parameters to the chunk; RuntimeError for a sparse one."""
        with plainly():
            for part in self.slices:
                gradient = part.parameter.grad
                if gradient is None or isinstance(gradient, ConsumedGradient):
                    continue
                if gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"the gradient of {part.name} is sparse, and this plan takes it from the"
                        " device: profile and plan this model again, which keeps its states there"
                    )
                if gradient.is_conj() or gradient.is_neg():
                    gradient = gradient.resolve_conj().resolve_neg()
                self.gradients[part.name] = gradient
                kind = gradient.dtype, gradient.device, gradient.shape
                part.parameter.grad = ConsumedGradient.of_kind(*kind)

    def place_gradient(self, part: Slice, norm: torch.Tensor | None = None) -> GradientInStore:
        """Record that a gradient waits at its place in the gradient store."""
        assert self.gradient_store is not None
        stored = self.offloaded_gradients[part.name] = GradientInStore(
            store=self.gradient_store,
            offset=self.gradient_offset + part.start * part.dtype.itemsize,
            shape=part.shape,
            stride=part.stride,
            dtype=part.dtype,
            device=part.parameter.device,
            norm=norm,
        )
        return stored

    def store_replaced(self) -> None:
        """Store gradients that code has assigned in place of waiting ones."""
        if self.gradient_store is None or self.sharding is not None:
            return
        for part in self.slices:
            if (gradient := self.gradients.pop(part.name, None)) is not None:
                values = flat_storage_order(dense(gradient, part.stride))
                stored = self.place_gradient(part)
                stored.store.write(stored.offset, values.view(torch.uint8))

    def forget_dropped(self) -> None:
        """Drop waiting gradients without stand-ins (`zero_grad`); write back changes to others."""
        for stored in self.offloaded_gradients.values():
            stored.take_back()
        with plainly():
            for part in self.slices if self.offloaded_gradients else ():
                if not isinstance(part.parameter.grad, ConsumedGradient):
                    self.offloaded_gradients.pop(part.name, None)

    def hide_consumed(self) -> None:
        """Hide consumed gradients, so that autograd does not add to them, until `show_consumed`."""
        with plainly():
            for part in self.consumed:
                gradient = part.parameter.grad
                assert isinstance(gradient, ConsumedGradient)
                if not isinstance(gradient, UsedGradient):
                    self.hidden[part.name] = gradient
                    part.parameter.grad = None

    def show_consumed(self) -> None:
        """Restore hidden gradients, except where another came."""
        for part in self.slices if self.hidden else ():
            if part.name in self.hidden and part.parameter.grad is None:
                part.parameter.grad = self.hidden[part.name]
        self.hidden.clear()

    def clear_gradients(self, *, in_use: bool = False) -> None:
        """Drop gradients, except those `in_use` by an update, and their stand-ins."""
        if not in_use:
            self.gradients.clear()
        self.offloaded_gradients.clear()
        self.speculated = None
        self.hidden.clear()

    def drop_consumed(self) -> list[tuple[nn.Parameter, ConsumedGradient]]:
        """Set consumed gradients to None; returns the parameters with their `UsedGradient`s."""
        found: list[tuple[nn.Parameter, ConsumedGradient]] = []
        with plainly():
            for part in self.slices:
                parameter = part.parameter
                if isinstance(parameter.grad, ConsumedGradient):
                    parameter.grad = None
                    kind = part.dtype, parameter.device, part.shape
                    found.append((parameter, UsedGradient.of_kind(*kind)))
        return found

    @property
    def consumed(self) -> list[Slice]:
        """Slices with a stand-in for a gradient."""
        with plainly():
            grads = [part.parameter.grad for part in self.slices]
        pairs = zip(self.slices, grads, strict=True)
        return [part for part, grad in pairs if isinstance(grad, ConsumedGradient)]

    def refuse_written(self, *, forward: bool = True) -> None:
        """RuntimeError if a pass wrote to parameters that are about to be evicted."""
        for part in self.slices if len(self.hollow) < len(self.groups) else ():
            version = part.parameter._version
            if part.group not in self.hollow and version != self.versions.get(part.name, version):
                fix = "Profile the model as it runs now, which keeps it on the device"
                if not forward:
                    fix = "Leave updates to the optimizer that prepare() returned"
                raise RuntimeError(
                    f"the {'forward' if forward else 'backward'} wrote to {part.name!r}, and the"
                    f" plan keeps that below the device: what was written would be lost. {fix}"
                )


def bring_foreign(chunks: Iterable[Chunk]) -> None:
    """Give parameters the gradients of others that code has assigned to them, as tensors.

    A stand-in in another parameter's `.grad` refers to its own place: all are read before any
    write.
    """
    with plainly():
        found = [(chunk, part, part.parameter.grad) for chunk in chunks for part in chunk.slices]
    foreign = [
        (part.parameter, gradient.clone())
        for chunk, part, gradient in found
        if isinstance(gradient, OffloadedGradient)
        and gradient.stored is not chunk.offloaded_gradients.get(part.name)
    ]
    for parameter, values in foreign:
        parameter.grad = values


_READ_AWAY = (
    "the values of {!r} are not on the device: the plan keeps them below it, or shared among the"
    " devices, between its uses. Read them inside `with protrain_runtime.full_parameters(model):`,"
    " and write them with modify=True there. For gradients of some parameters (inputs=,"
    " torch.autograd.grad) call loss.backward(), with requires_grad_(False) on the others before"
    " the forward; optimizers besides that of prepare() become groups of it (param_groups=)"
)
_READ_EARLY = (
    "{!r} was read between its backward and optimizer.step(): this plan has updated it in backward."
    " Read it before backward() or after the step, or plan with --clip: updates then come after"
    " backward"
)


def refuse_reading(name: str, *, why: str = _READ_AWAY) -> NoReturn:
    """RuntimeError that explains how to read an offloaded parameter."""
    raise RuntimeError(why.format(name))


def read_values(
    chunk: Chunk, part: Slice, layout: StateLayout | None = None, *, device: torch.device = HOST
) -> torch.Tensor:
    """Read a parameter or state to the host or a device, with all ranks that share it."""
    assert chunk.store is not None
    if chunk.sharding is not None:
        what, ranks = "parameters" if layout is None else "optimizer states", chunk.sharding.ranks
        # Gathered values are on the host before the ranks go on, or a failure is reported.
        with ranks.meeting.reporting(f"a gather of {what}", final=True):
            whole = chunk.sharding.gather(chunk, part, layout).cpu()
        # A copy: on a CPU `whole` is a view of the whole gather.
        return flat_storage_order(whole).to(device, copy=True).as_strided(part.shape, part.stride)
    dtype = part.dtype if layout is None else layout.dtype
    count = part.numel if layout is None else layout.rule.count(part.numel)
    flat = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device)
    chunk.store.read(chunk.current.place(part, layout), flat)
    if count != part.numel:
        return flat.view(dtype)
    return flat.view(dtype).as_strided(part.shape, part.stride)


class Place(NamedTuple):
    """Elements of a parameter or a state in a store: all, or a rank's part."""

    store: Store
    offset: int  # bytes from the start of the store
    first: int
    numel: int


def place_of(chunk: Chunk, part: Slice, layout: StateLayout | None = None) -> Place | None:
    """The elements that this rank writes; None if it has none of the parameter."""
    own, sharding = chunk.own, chunk.sharding
    if sharding is not None and sharding.common is not None and not part.trainable:
        return sharding.common.part_of(part)
    mine = part if sharding is None else sharding.part_of(part.name)
    if mine is None:
        return None
    assert own.store is not None
    return Place(own.store, own.current.place(mine, layout), mine.first, mine.numel)


def write_values(
    chunk: Chunk, part: Slice, values: torch.Tensor, layout: StateLayout | None = None
) -> None:
    """Store values of a parameter or state, of any dtype and strides; each rank its part."""
    place = place_of(chunk, part, layout)
    if place is not None:
        dtype = part.dtype if layout is None else layout.dtype
        if layout is not None and layout.rule.per > 1:
            flat = values.detach().to(dtype)  # already in order
        else:
            source = dense(values.detach().resolve_conj().resolve_neg(), part.stride)
            flat = flat_storage_order(source)[place.first : place.first + place.numel].to(dtype)
        written = flat.contiguous().view(torch.uint8)
        place.store.write(place.offset, written)
        chunk.speculated = None
        if chunk.spare is not None and not part.trainable:  # updates do not write it there
            place.store.write(chunk.spare.place(part), written)
