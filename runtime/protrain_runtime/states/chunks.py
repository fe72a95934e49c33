"""Chunks: the model states of a unit that move together.

A chunk's parameters lie one after the other in the chunk's store; its optimizer states follow
there, one region per state. On the device each group of parameters (see `program.grouped`) has a
buffer of its own, in the same layout, so that groups can come and go one after the other.

Of a chunk that ranks share, each group's buffer has its trainable parameters first, then the frozen
ones; either region is padded to the same range for every rank (see `program.shard_bytes`). A rank
keeps its ranges as a chunk of its own: parts of parameters, flat, in the order of their storage.
With a common copy, the frozen region is whole in memory that the ranks of a node share, and nothing
of it is padded or a rank's own.

[Note: views for good] On an accelerator, parameters stay views of one buffer per group, whose
memory is freed when the group leaves and allocated when it comes, as FSDP2 does it. The tensors
that autograd saves of them are known: where another one holds a buffer that leaves, it is the
model's, and would read memory that is gone. Such a buffer is left to its holder, and the chunk gets
new ones from the next step on. So it does in a first step, which records reads in backward before a
chunk's slot has begun. Forwards without a graph have new buffers, as code may keep what they hand
out.
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
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", self.shape.numel())

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def rule(self, rules: UpdateRules) -> UpdateRule:
        """Ask the rules for the parameter's own; of a rank's part, ask the whole parameter."""
        in_order = self.stride == torch.empty(self.shape, device="meta").stride()
        return rules.of(self.dtype, self.shape, in_order=in_order, parameter=self.parameter)

    def flat(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in storage order, in its group's buffer.  # dtype [numel]"""
        return buffer[self.inside : self.inside + self.num_bytes].view(self.dtype)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter as the model knows it, in its group's buffer.  # dtype [shape]"""
        return self.shaped(buffer[self.inside : self.inside + self.num_bytes])

    def shaped(self, own: torch.Tensor) -> torch.Tensor:
        """The parameter as the model knows it, or a gradient of it, in these bytes.  # [shape]"""
        return own.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Group:
    """Whole parameters that come to the device and leave it together."""

    offset: int  # bytes from the start of the chunk's parameters in the store
    num_bytes: int
    slices: tuple[Slice, ...]
    gradient_bytes: int  # where ranks share a group, with the padding


def flat_storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its storage, without a copy.  # [numel]"""
    return tensor.as_strided((tensor.numel(),), (1,))


def dense(values: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with a parameter's own strides; a copy only where they differ."""
    if (values.dim() == 1 and values.stride() == (1,)) or values.stride() == stride:
        return values  # flat already, or as the parameter lies
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
"""An optimizer state by its key, and how its values lie: one region of a chunk's store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """One optimizer state of some of the chunk's parameters: a region in its store."""

    key: str
    rule: StateRule
    offset: int  # bytes from the start of the store
    starts: Mapping[str, int]  # by parameter: its first value, of those in the region

    @property
    def kind(self) -> StateKind:
        """A key of the state among the chunk's; the same in both copies of a chunk."""
        return self.key, self.rule

    @property
    def dtype(self) -> torch.dtype:
        return self.rule.dtype

    def value(self, name: str, element: int) -> int:
        """The number of the value for an element of a parameter, of those in the region."""
        return self.starts[name] + element // self.rule.per

    def place(self, name: str, element: int = 0) -> int:
        """Where that value is: bytes from the start of the store."""
        return self.offset + self.value(name, element) * self.dtype.itemsize


class Cut(NamedTuple):
    """Where a parameter may be cut: multiples of `unit`, `least` from its ends; steps of `most`."""

    unit: int = PIECE_ALIGNMENT
    least: int = 1
    most: int = sys.maxsize

    def before(self, element: int, count: int) -> int:
        """The last place for a cut up to `element`, of a parameter of `count`; 0: none."""
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
        """Where a parameter, or one of its states, begins: bytes from the start of the store."""
        return self.offset + part.offset if layout is None else layout.place(part.name)

    def of(self, part: Slice) -> list[StateLayout]:
        """The states that a parameter has."""
        return [layout for layout in self.states if part.name in layout.starts]


SavedViews = list[ref[torch.Tensor]]


class Lasting(NamedTuple):
    """The buffer of a group that is used again: see [Note: views for good]."""

    buffer: torch.Tensor  # uint8 [group's bytes]
    storage: torch.UntypedStorage
    elements: dict[torch.dtype, torch.Tensor]  # the same bytes


@dataclass(slots=True)
class Chunk:
    """The states first used in one unit. Without a store, its placement is persistent.

    With `sharding`, this is what stands on the device, and `own` what this rank has in the store.

    A chunk that is updated speculatively has a second copy of its states, `spare`. An update reads
    the current copy and writes all of the spare one; `exchange` makes that the current one.
    """

    unit: int
    groups: tuple[Group, ...]
    used_by: tuple[int, ...]
    slices: tuple[Slice, ...] = field(init=False)  # those of the groups
    parameters: list[nn.Parameter] = field(init=False)
    every_group: range = field(init=False)
    group_bytes: tuple[int, ...] = field(init=False)
    parameter_bytes: int = field(init=False)  # with the padding between parameters
    gradient_bytes: int = field(init=False)
    store: Store | None = None
    current: Copy = field(default_factory=Copy)
    spare: Copy | None = None
    # The gradients that a speculative update has used, by name; None: it did not run, or what it
    # read has changed.
    speculated: dict[str, GradientInStore] | None = None
    # The groups on the device, or on their way there, by number.  # uint8 [group's bytes]
    buffers: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    # The groups whose parameters have their shapes and hold nothing.
    hollow: set[int] = field(default_factory=set[int])
    # See [Note: views for good]: whether buffers are used again, these, the groups whose parameters
    # are views of them, and how many tensors held each when it came: parameters and kept updates.
    lasts: bool = False
    lasting: dict[int, Lasting] = field(default_factory=dict[int, Lasting])
    viewing: set[int] = field(default_factory=set[int])
    holders: dict[int, int] = field(default_factory=dict[int, int])
    # By group, the views of its lasting buffer that autograd has saved: each holds it once.
    saved: dict[int, SavedViews] = field(default_factory=dict[int, SavedViews])
    # By group, its parameters, and where they are while they are not on the device.
    places: dict[int, list[tuple[nn.Parameter, Elsewhere]]] = field(
        default_factory=dict[int, list[tuple[nn.Parameter, Elsewhere]]]
    )
    # The parameters' versions when they came to the device, which writes count up.
    versions: dict[str, int] = field(default_factory=dict[str, int])
    # Gradients by parameter: on the device, taken for their moves, and in the store below it.
    gradients: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    offloaded_gradients: dict[str, GradientInStore] = field(
        default_factory=dict[str, GradientInStore]
    )
    # What stood in `.grad` after the micro-batches before, set aside while one runs.
    hidden: dict[str, ConsumedGradient] = field(default_factory=dict[str, ConsumedGradient])
    gradient_store: Store | None = None
    gradient_offset: int = 0
    # The values of a persistent chunk's parameters, while these are away after their update.
    aside: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    sharding: "Sharding | None" = None
    element_bytes: int = 0  # of trainable elements, where ranks share them
    # Where the optimizer allows cuts of parameters, if not at any PIECE_ALIGNMENT elements.
    rules: dict[str, UpdateRule] = field(default_factory=dict[str, UpdateRule])
    # Called where code reads a parameter that is away: it brings the chunk, or raises.
    bring: "Callable[[Chunk, str], None]" = field(default=lambda _, name: refuse_reading(name))
    # Called before values are read for a copy: it raises where they are not those of one step.
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
        """Whether a parameter has optimizer states here: updated, and of ranks, this one's too."""
        if name not in self.current.updated:
            return False
        return self.sharding is None or self.sharding.part_of(name) is not None

    def exchange(self) -> None:
        """Make the copy that an update writes the current one."""
        assert self.spare is not None
        self.current, self.spare = self.spare, self.current
        self.speculated = None

    @property
    def num_trainable(self) -> int:
        """Trainable elements; of a shared chunk, with the padding between them."""
        if self.element_bytes:
            return self.gradient_bytes // self.element_bytes
        return sum(part.numel for part in self.slices if part.trainable)

    def size(self, rules: UpdateRules) -> ChunkSize:
        """The sizes from which a program is compiled."""
        several = len(self.groups) > 1
        trainable = [(part, part.rule(rules)) for part in self.slices if part.trainable]
        state_bytes = sum(rule.state_bytes(part.numel) for part, rule in trainable)
        uneven = 0
        if self.element_bytes and trainable:  # with the padding between them
            _, rule = trainable[0]
            state_bytes = rule.state_bytes(self.num_trainable)
        elif (
            not any(rule.reason for _, rule in trainable)
            and len({frozenset(rule.states.items()) for _, rule in trainable}) > 1
        ):
            # Pieces are even in elements: one may have all that have more bytes than most.
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
        """Move all parameters as one group."""
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
        """Where a piece that should end before `element` ends, within its parameter."""
        for part in self.slices:
            if part.trainable and part.start <= element < part.start + part.numel:
                return part.start + self.cut_of(part).before(element - part.start, part.numel)
        return element

    def cut_of(self, part: Slice) -> "Cut":
        """Where ranges of a parameter may begin; nowhere if its optimizer cannot cut it."""
        rule = self.rules.get(part.name)
        if rule is None:
            return Cut()
        if rule.reason:
            return Cut(least=sys.maxsize)
        return Cut(rule.unit, rule.least, rule.unit if rule.compiled else sys.maxsize)

    def room(
        self, number: int, empty: Callable[[int], torch.Tensor], *, lent: bool = False
    ) -> torch.Tensor:
        """A buffer for a group that comes to the device, `lent` if not for a step.  # uint8"""
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
        """Use buffers again from now on, or no more: who holds one has it then."""
        self.lasts = lasts
        self.lasting.clear()
        self.viewing.clear()
        self.saved.clear()

    def end_step(self) -> None:
        """Forget the saved views that autograd has released, and buffers that last no longer."""
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
        with torch.inference_mode(mode=False):  # a parameter's, also where a forward is without
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
        """The tensors that hold a lasting buffer, besides saved ones."""
        saved = [view for view in self.saved.get(number, ()) if view() is not None]
        return num_holders(lasting.storage) - len(saved)

    def unbind(self, groups: Iterable[int]) -> None:
        """Leave parameters of the right shape that hold nothing (`away`)."""
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
        """Take the buffers of these groups from the model: those that do not last are returned.

        With `looks`, those with other holders last no longer.
        """
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
        """The values on its device of a parameter that is away.  # part.dtype [part.shape]"""
        self.settle("the model was copied")
        if part.name in self.aside:
            return self.aside[part.name].clone()
        return read_values(self, part, device=part.parameter.device)

    def put_aside(self) -> None:
        """Send parameters that backward has updated away until `put_back`."""
        for part in self.slices:
            if part.trainable:
                self.aside[part.name] = part.parameter.data
                place = self._place(part)
                place.stride = part.parameter.stride()
                place.bring = partial(refuse_reading, why=_READ_EARLY)
                send_away((part.parameter, place))

    def put_back(self) -> None:
        """Bring back the parameters that `put_aside` sent away."""
        for part in self.slices:
            if (values := self.aside.pop(part.name, None)) is not None:
                come_back(part.parameter)
                part.parameter.data = values

    def take_gradients(self) -> None:
        """Move the gradients from the parameters to the chunk; RuntimeError where one is sparse."""
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
        """Note that a gradient waits at its place in the gradient store, where it is to be."""
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
        """Bring gradients that code has put in place of others to where those waited."""
        if self.gradient_store is None or self.sharding is not None:
            return
        for part in self.slices:
            if (gradient := self.gradients.pop(part.name, None)) is not None:
                values = flat_storage_order(dense(gradient, part.stride))
                stored = self.place_gradient(part)
                stored.store.write(stored.offset, values.view(torch.uint8))

    def forget_dropped(self) -> None:
        """Forget waiting gradients whose stand-ins the training loop has removed (`zero_grad`).

        What it has changed of the others is written back.
        """
        for stored in self.offloaded_gradients.values():
            stored.take_back()
        with plainly():
            for part in self.slices if self.offloaded_gradients else ():
                if not isinstance(part.parameter.grad, ConsumedGradient):
                    self.offloaded_gradients.pop(part.name, None)

    def hide_consumed(self) -> None:
        """Leave no gradient where one was taken, for autograd to add to, until `show_consumed`."""
        with plainly():
            for part in self.consumed:
                gradient = part.parameter.grad
                assert isinstance(gradient, ConsumedGradient)
                if not isinstance(gradient, UsedGradient):
                    self.hidden[part.name] = gradient
                    part.parameter.grad = None

    def show_consumed(self) -> None:
        """Restore hidden gradients where no other gradient came."""
        for part in self.slices if self.hidden else ():
            if part.name in self.hidden and part.parameter.grad is None:
                part.parameter.grad = self.hidden[part.name]
        self.hidden.clear()

    def clear_gradients(self, *, in_use: bool = False) -> None:
        """Forget gradients, but for those `in_use` by an update; their stand-ins are dropped."""
        if not in_use:
            self.gradients.clear()
        self.offloaded_gradients.clear()
        self.speculated = None
        self.hidden.clear()

    def drop_consumed(self) -> list[tuple[nn.Parameter, ConsumedGradient]]:
        """Leave no gradient where one was taken; returns whose it was, with what says: used."""
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
        """Where a stand-in is in place of the gradient."""
        with plainly():
            grads = [part.parameter.grad for part in self.slices]
        pairs = zip(self.slices, grads, strict=True)
        return [part for part, grad in pairs if isinstance(grad, ConsumedGradient)]

    def refuse_written(self, *, forward: bool = True) -> None:
        """RuntimeError where a pass wrote to parameters that are about to be taken away."""
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

    What stands in `.grad` of a parameter that is not its own leads to another one's place: all are
    read before any place is written.
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
    """RuntimeError that names the way to a parameter that is away."""
    raise RuntimeError(why.format(name))


def read_values(
    chunk: Chunk, part: Slice, layout: StateLayout | None = None, *, device: torch.device = HOST
) -> torch.Tensor:
    """Read a parameter or state to the host or a device, with all ranks that share it."""
    assert chunk.store is not None
    if chunk.sharding is not None:
        what, ranks = "parameters" if layout is None else "optimizer states", chunk.sharding.ranks
        # Gathered values are on the host before the ranks part, or a failure was reported.
        with ranks.meeting.reporting(f"a gather of {what}", final=True):
            whole = chunk.sharding.gather(chunk, part, layout).cpu()
        # A copy: on a CPU `whole` is a view of all that was gathered with it.
        return flat_storage_order(whole).to(device, copy=True).as_strided(part.shape, part.stride)
    dtype = part.dtype if layout is None else layout.dtype
    count = part.numel if layout is None else layout.rule.count(part.numel)
    flat = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device)
    chunk.store.read(chunk.current.place(part, layout), flat)
    if count != part.numel:
        return flat.view(dtype)
    return flat.view(dtype).as_strided(part.shape, part.stride)


class Place(NamedTuple):
    """Elements of a parameter, or of one of its states, in a store: all, or a rank's part."""

    store: Store
    offset: int  # bytes from the start of the store
    first: int
    numel: int


def place_of(chunk: Chunk, part: Slice, layout: StateLayout | None = None) -> Place | None:
    """Return the elements that this rank writes; None where it has nothing of the parameter."""
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
            flat = values.detach().to(dtype)  # in order already
        else:
            source = dense(values.detach().resolve_conj().resolve_neg(), part.stride)
            flat = flat_storage_order(source)[place.first : place.first + place.numel].to(dtype)
        written = flat.contiguous().view(torch.uint8)
        place.store.write(place.offset, written)
        chunk.speculated = None
        if chunk.spare is not None and not part.trainable:  # no update writes it there
            place.store.write(chunk.spare.place(part), written)
