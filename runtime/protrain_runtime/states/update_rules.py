"""Update rules: what an optimizer's step on a parameter keeps, and where the parameter may be cut.

An optimizer is of one of four kinds for a parameter, each a value of `UpdateRule`:

    elementwise   block 1: every element's update depends on that element alone
    of blocks     block N: it depends on the N elements of its block, such as states of 8 bits
    of the whole  block 0: the parameter and its states stay together, as Adafactor's
    of all        `together`: a step has to have all parameters, as with a norm of all gradients

`UpdateRules.of` decides, from steps on small parameters (`trials`): so it knows any class of
`torch.optim` and of a user's. What steps do not show is in the table `known_optimizers.KNOWN`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from math import lcm, prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.program.program import PIECE_ALIGNMENT, in_blocks
from protrain_runtime.devices.fake import FakeMode
from protrain_runtime.states.compositions import Composition, is_composed, tensors_in
from protrain_runtime.states.known_optimizers import known
from protrain_runtime.states.stepping import (
    MASTERS_OF,
    NAMES,
    OptimizerFactory,
    attributes_of,
    groups_of,
    refuse_closures,
)
from protrain_runtime.states.trials import (
    DRAWS,
    ElementRange,
    Training,
    gradients_of,
    trying,
    values_of,
    why_together,
)


@dataclass(frozen=True, slots=True)
class StateRule:
    """A state with one value per `per` elements in order; flat unless `per` is 1."""

    dtype: torch.dtype
    per: int = 1

    def count(self, elements: int) -> int:
        """Number of values for the elements."""
        return -(-elements // self.per)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """The states that an optimizer keeps of one parameter, and where it may be cut.

    states   by key, those that lie in a chunk's store, are staged with the parameter, and are cut
             where that is
    scalars  bytes of each of the others, such as AdamW's step, which stay in the process
    block    elements: ranges of the parameter begin at multiples of it. 0: a range is updated
             otherwise than within the whole, so that the parameter and its states stay together
    least    elements that a range has at least: the optimizer keeps other states of less
    reason   why it cannot be cut; empty: it can
    together a step has all parameters at once: none may be updated apart from the others
    whole    bytes of each state but scalars, where it cannot be cut
    compiled its step is compiled for each length: ranges are of COMPILED_SPAN elements
    """

    states: Mapping[str, StateRule] = field(default_factory=dict[str, StateRule])
    scalars: tuple[int, ...] = ()
    block: int = 1
    least: int = 1
    reason: str = ""
    together: bool = False
    whole: tuple[int, ...] = ()
    compiled: bool = False

    def staying(self, reason: str, elements: int, *, together: bool = False) -> "UpdateRule":
        """The rule of an uncut parameter of `elements`, with the same states."""
        return UpdateRule(
            scalars=self.scalars,
            block=0,
            reason=reason,
            together=together,
            whole=self.state_sizes(elements),
        )

    @property
    def unit(self) -> int:
        """Ranges begin at multiples of this number of elements."""
        return _unit(self.block, self.least)

    @property
    def shift(self) -> int:
        """Elements by which a cut may come early."""
        return self.unit + (self.least if self.least > 1 else 0) if self.block else 0

    def state_sizes(self, elements: int) -> tuple[int, ...]:
        """Bytes of each state, except scalars, of a parameter of `elements`."""
        states = self.states.values()
        return (*self.whole, *(each.count(elements) * each.dtype.itemsize for each in states))

    def state_bytes(self, elements: int) -> int:
        """Bytes of all states, except scalars."""
        return sum(self.state_sizes(elements))

    @property
    def element_bytes(self) -> float:
        """Mean bytes of states per element of a large parameter."""
        return sum(state.dtype.itemsize / state.per for state in self.states.values())

    def scalar_bytes(self, *, block: int = 1) -> int:
        """Bytes of one parameter's scalars, each in whole blocks of `block` bytes."""
        return sum(in_blocks(num_bytes, block) for num_bytes in self.scalars)


COMPILED_SPAN = 2**20
"""Elements of a range that a compiled step works on, so that few lengths are compiled: this one for
all parameters, and what is left of each at its end (docs/decisions/optimizer.md)."""

DEPENDS = "one element's update depends on others"

_ANY = torch.Size([64, 256])
"""A matrix large enough for an optimizer's treatment of large ones."""

_SMALL = 2**14
"""Elements of a parameter in a trial, about: a larger one is tried in a smaller shape. Of so few,
operators compute all in one thread, whose vectors a cut at a multiple of PIECE_ALIGNMENT leaves as
they are."""

_MOST_ATTRIBUTES = 8
"""Most distinct attributes of parameters to try."""

_MOST_GROUPS = 3
"""Most groups of options in a trial of several parameters."""

_FEW_STEPS = 4
"""Steps of a trial that only compares ranges of a parameter."""


@dataclass(eq=False)
class UpdateRules:
    """The rules of an optimizer for parameters of any dtype and shape.

    Each is observed in steps on a parameter of that shape, or of a smaller one with as many
    dimensions: a parameter may be cut if steps on ranges give the bits of steps on the whole.
    `factory` makes the optimizer. `groups` are the groups' options, and `members` maps parameters
    to groups (default: the first). A parameter that may be cut has the same states in all groups.
    Parameters in trials have `attributes`; None: each parameter's own.
    """

    factory: OptimizerFactory
    groups: Sequence[Mapping[str, Any]] = ({},)
    members: Mapping[nn.Parameter, int] = field(default_factory=dict[nn.Parameter, int])
    attributes: Mapping[str, Any] | None = None
    # By parameters' attributes.
    _others: dict[str, "UpdateRules"] = field(default_factory=dict[str, "UpdateRules"], init=False)
    # Results of trials; those of several parameters hold for all shapes of as many dimensions.
    _rules: dict[tuple[torch.dtype, torch.Size, bool, int], UpdateRule] = field(
        default_factory=dict[tuple[torch.dtype, torch.Size, bool, int], UpdateRule], init=False
    )
    _of_group: dict[tuple[torch.dtype, int], "_Trial"] = field(
        default_factory=dict[tuple[torch.dtype, int], "_Trial"], init=False
    )
    _apart: dict[tuple[torch.dtype, int, bool], str] = field(
        default_factory=dict[tuple[torch.dtype, int, bool], str], init=False
    )
    _compiles: bool | None = field(default=None, init=False)

    def of(
        self,
        dtype: torch.dtype,
        shape: torch.Size = _ANY,
        *,
        in_order: bool = True,
        parameter: nn.Parameter | None = None,
    ) -> UpdateRule:
        """A parameter's rule; not `in_order`: its strides are not contiguous.

        ProtrainError if groups differ, or the optimizer refuses such parameters.
        """
        own = 0
        if parameter is not None:
            own, attributes = self.members.get(parameter, 0), attributes_of(parameter)
            key = repr(sorted(attributes.items()))
            # Attributes that differ everywhere, such as names, are not for the optimizer.
            tried = key in self._others or len(self._others) < _MOST_ATTRIBUTES
            if self.attributes is None and attributes and tried:
                if key not in self._others:
                    options = self.factory, self.groups, self.members
                    self._others[key] = UpdateRules(*options, attributes)
                return self._others[key].of(dtype, shape, in_order=in_order, parameter=parameter)
        place = dtype, shape, in_order, own
        if place not in self._rules:
            with trying(type(self._example)):
                rule = self._decided(dtype, shape, own)
            if not in_order and any(state.per > 1 for state in rule.states.values()):
                reason = "its blocks are of other elements than lie beside each other"
                rule = rule.staying(reason, shape.numel())
            self._rules[place] = rule
        return self._rules[place]

    def _decided(self, dtype: torch.dtype, shape: torch.Size, own: int) -> UpdateRule:
        """Decide by steps on one parameter of this group, then on several."""
        if self._example is not None:
            refuse_closures(self._example)
        rule = self._trial(dtype, own).rule(shape)
        others = [number for number in range(len(self.groups)) if number != own]
        for number in others if not rule.reason else ():
            try:
                other = self._trial(dtype, number).rule(shape)
            except ProtrainError:  # its options may be for other shapes only
                continue
            if not other.reason and other.states != rule.states:
                raise ProtrainError(
                    "the parameter groups' options give them different optimizer states",
                    fix="give all groups the same options of this kind, such as amsgrad",
                )
        reason = self._why_together(dtype, smaller(shape, _SMALL), own, cuts=not rule.reason)
        if rule.reason == DRAWS:
            reason = DRAWS  # in another order it would draw other numbers
        return rule.staying(reason, shape.numel(), together=True) if reason else rule

    def _why_together(self, dtype: torch.dtype, shape: torch.Size, own: int, *, cuts: bool) -> str:
        """The reason for a step on all parameters at once; empty: none.

        ProtrainError if masters cannot be updated in batches, by an optimizer each.
        """
        masters: OptimizerFactory | None = getattr(self.factory, MASTERS_OF, None)
        if masters is not None:
            dtype, cuts = torch.promote_types(dtype, torch.float32), False
        if (dtype, len(shape), cuts) not in self._apart:
            groups = [self.groups[own], *self.groups[:own], *self.groups[own + 1 :]]
            train = partial(Training, masters or self.factory, self.attributes or {})
            reason, writes = why_together(train, groups[:_MOST_GROUPS], dtype, shape, pieces=cuts)
            if masters is not None and (reason or writes):
                kept = "its step keeps values in its groups"
                raise ProtrainError(
                    "the optimizer cannot step on master weights, some parameters at a time:"
                    f" {reason or kept}",
                    key="optimizer",
                    fix="--precision pure or autocast; or an optimizer that looks at one parameter"
                    " at a time, such as AdamW or SGD",
                )
            self._apart[dtype, len(shape), cuts] = reason
        return self._apart[dtype, len(shape), cuts]

    def _trial(self, dtype: torch.dtype, number: int) -> "_Trial":
        """Trials on a parameter of group `number`."""
        if (dtype, number) not in self._of_group:
            train = partial(Training, self.factory, self.attributes or {}, [self.groups[number]])
            block, least = known(type(self._example)).blocks(self._example)
            self._of_group[dtype, number] = _Trial(
                train, dtype, (int(block), int(least)), self.compiled(dtype)
            )
        return self._of_group[dtype, number]

    @cached_property
    def _example(self) -> torch.optim.Optimizer | None:
        """One optimizer of the user's class; None if it refuses such a matrix."""
        name, *_ = self.groups[0].get(NAMES) or [""]
        with trying(object), suppress(Exception):  # trials report what it refuses
            members = [(nn.Parameter(torch.zeros(2, 2)), name, self.groups[0])]
            return getattr(self.factory, MASTERS_OF, self.factory)(groups_of(members))
        return None

    def compiled(self, dtype: torch.dtype) -> bool:
        """Whether a step calls code made by `torch.compile`."""
        if self._compiles is None:
            calls: list[object] = []

            def backend(graph: Any, _: object) -> Any:
                calls.append(graph)
                return graph.forward

            values = [values_of(torch.Size([2, 2]), dtype)]
            with (
                trying(type(self._example)),
                suppress(Exception),  # the user's class; trials report what it refuses
                torch.compiler.set_stance("default", force_backend=backend),
            ):
                training = Training(self.factory, self.attributes or {}, [self.groups[0]], values)
                training.step(gradients_of(values, 0))
            self._compiles = bool(calls)
        return self._compiles


@dataclass(frozen=True, slots=True)
class _Trial:
    """Steps of an optimizer on one parameter of a dtype, in one group.

    States are observed in steps run operator by operator, even if compiled; cuts in steps as in
    training. Compiling takes seconds per length: for a `compiled` step one matrix stands for all
    large ones. `blocks` are the elements of a block, and of the smallest parameter with states in
    blocks.
    """

    train: Callable[..., Training]
    dtype: torch.dtype
    blocks: tuple[int, int]
    compiled: bool
    # By shape and cuts: the reason that steps on ranges differ, if they do.
    known: dict[tuple[torch.Size, bool], str] = field(
        default_factory=dict[tuple[torch.Size, bool], str]
    )

    def rule(self, shape: torch.Size) -> UpdateRule:
        """The rule for a shape."""
        block, least = self._blocks_for(shape)
        tried = smaller(shape, max(_SMALL, 6 * _unit(block, least)))
        found = self._kept(tried)
        reason = found.reason
        if any(block % state.per for state in found.states.values()):
            reason = "it keeps values of blocks that it does not declare"
        cuts = not self.compiled or shape.numel() >= 2 * COMPILED_SPAN
        if not reason and (cuts or len(shape) > 1):  # else it is updated in its own shape
            if self.compiled and len(shape) == 2 and self._kept(_ANY).states == found.states:
                tried = _ANY
            reason = self._differs(tried, cuts=cuts)
            if reason and tried == shape and not self._differs(tried, cuts=False):
                reason, least = "", shape.numel()  # a small one may go as it is, in one range
        if reason:  # with the bytes of all states
            tried = smaller(shape, _SMALL)
            sizes = _sizes(self._state(tried)[0])
            if tried != shape:
                alike = self._without_values(tried) == sizes
                sizes = (alike and self._without_values(shape)) or _sizes(self._state(shape)[0])
            return UpdateRule(
                scalars=tuple(size for number, size in sizes if number <= 1),
                block=0,
                reason=reason,
                whole=tuple(number * size for number, size in sizes if number > 1),
            )
        least = max(least, COMPILED_SPAN) if self.compiled else least
        return replace(found, block=block, least=least, compiled=self.compiled)

    def _blocks_for(self, shape: torch.Size) -> tuple[int, int]:
        """Elements of a block, and least of a range, for a shape."""
        return self.blocks if shape.numel() >= self.blocks[1] else (1, 1)

    def _kept(self, shape: torch.Size) -> UpdateRule:
        """The states of a parameter of this shape; with a reason if they have no order."""
        kept, draws = self._state(shape)
        if draws:
            return UpdateRule(reason=DRAWS)
        states: dict[str, StateRule] = {}
        scalars: list[int] = []
        for key, value in kept.items():
            if isinstance(value, Composition):
                continue
            if not isinstance(value, torch.Tensor):
                if tensors_in(value):
                    return UpdateRule(
                        reason=f"it keeps tensors in {key!r}, a {type(value).__name__}"
                    )
            elif is_composed(value):
                return UpdateRule(reason=f"its {key!r} is a {type(value).__name__}")
            elif value.shape == shape:
                states[key] = StateRule(value.dtype)
            elif value.numel() <= 1:
                scalars.append(value.nbytes)
            elif (per := self._per(key, shape)) is None:
                return UpdateRule(reason=f"its {key!r} is of the whole parameter")
            elif per:
                states[key] = StateRule(value.dtype, per)
            else:
                scalars.append(value.nbytes)  # such as a table
        return UpdateRule(states=states, scalars=tuple(scalars))

    def _per(self, key: str, shape: torch.Size) -> int | None:
        """Elements per value of a flat state; 0: the same for any shape; None: neither."""
        unit, counts = _unit(*self._blocks_for(shape)), list[int]()
        with suppress(ProtrainError):  # it may refuse flat parameters
            for size in (torch.Size([unit]), torch.Size([2 * unit]), shape):
                value = self._state(size)[0].get(key)
                counts.append(value.numel() if isinstance(value, torch.Tensor) else 0)
        if len(set(counts)) == 1 and len(counts) == 3:
            return 0
        if len(counts) < 3 or not counts[0] or 2 * counts[0] != counts[1]:
            return None
        per = unit // counts[0]
        return per if -(-shape.numel() // per) == counts[2] else None

    def _differs(self, shape: torch.Size, *, cuts: bool) -> str:
        """The reason that steps on ranges give other bits than on the whole; empty: they do not."""
        if (shape, cuts) in self.known:
            return self.known[shape, cuts]
        count, (block, least) = shape.numel(), self._blocks_for(shape)
        first = _unit(block, least)
        last = (count - least) // first * first
        ends = sorted({0, first, last, count}) if cuts and last >= first else [0, count]
        values = [values_of(shape, self.dtype)]
        pieces = [[ElementRange(0, *span)] for span in pairwise(ends)]
        try:
            whole, parts = self.train(values), self.train(values, pieces=pieces)
            for step in range(_FEW_STEPS):
                for training in (whole, parts):
                    training.step(gradients_of(values, step))
            alike = parts.same_as(whole)
            # Composed states must transfer between shapes.
            for key, how in self._state(shape)[0].items() if alike else ():
                for start, past in pairwise(ends) if isinstance(how, Composition) else ():
                    length = torch.Size([past - start])
                    alike = alike and how.reshaped(length) == self._state(length)[0].get(key)
            reason = "" if alike else DEPENDS
        except Exception as error:  # noqa: BLE001 (the user's class meets a flat parameter)
            of_step = error.__cause__ or error
            reason = f"of a range of it, {type(of_step).__name__}: {cut(str(of_step))}"
        self.known[shape, cuts] = reason
        return reason

    def _without_values(self, shape: torch.Size) -> list[tuple[int, int]] | None:
        """Elements and bytes of an element of each state, from a step on fake tensors.

        A smaller shape tells less: which side of a matrix is projected may depend on which one is
        longer, and a rank on how long that is. A value that the step reads is taken to be one.
        None where there is no such step.
        """
        try:
            # Operator by operator, as in `_state`.
            eager = torch.compiler.set_stance("force_eager")
            with eager, FakeMode(), _Ones():  # type: ignore[no-untyped-call]
                values = [torch.empty(shape, dtype=self.dtype)]
                training = self.train(values)
                training.step(values)
                return _sizes(training.states_of(0))
        except Exception:  # noqa: BLE001 (the user's class meets tensors without values)
            return None

    def _state(self, shape: torch.Size) -> tuple[Mapping[str, Any], bool]:
        """The states that a step makes, and whether it draws; ProtrainError if it is refused."""
        values = [values_of(shape, self.dtype)]
        try:
            with torch.compiler.set_stance("force_eager"):
                training = self.train(values)
                training.step(gradients_of(values, 0))
        except ProtrainError:
            raise
        except Exception as error:
            raise ProtrainError(
                f"the optimizer takes no step on a parameter of shape {list(shape)}:"
                f" {type(error).__name__}: {cut(str(error))}",
                key="optimizer",
                fix="one that steps on such a parameter without a closure; of SAM the base one,"
                " with perturbations in protrain_runtime.full_parameters(model, modify=True)",
            ) from error
        return training.states_of(0), training.draws


class _Ones(TorchDispatchMode):
    """Answers questions for fake tensors' values: one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            (tensor,) = args
            return 1.0 if tensor.is_floating_point() else tensor.dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


def _sizes(kept: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Elements and itemsize of each storage of the states: of a view, the whole."""
    memories = {one.untyped_storage()._cdata: one for one in tensors_in(dict(kept))}
    return [
        (one.untyped_storage().nbytes() // one.itemsize, one.itemsize) for one in memories.values()
    ]


def _unit(block: int, least: int) -> int:
    """The least common multiple of a block and PIECE_ALIGNMENT that is `least` or more."""
    return in_blocks(least, lcm(block, PIECE_ALIGNMENT))


def smaller(shape: torch.Size, most: int) -> torch.Size:
    """A shape with as many dimensions and about `most` elements, if `shape` has more.

    Dimensions that are odd, or multiples of small powers of two, stay so, large ones up to 256: an
    optimizer may ask whether its blocks divide a parameter. Less than two elements become two.
    """
    if shape.numel() < 2:
        return torch.Size([2, *[1] * (len(shape) - 1)])
    sizes = list(shape)
    while prod(sizes) > most:
        place = max(range(len(sizes)), key=lambda one: sizes[one])
        size = sizes[place]
        steps = (256,) if place == len(sizes) - 1 else (256, 16)
        shorter = (size // 2 // step * step + size % step for step in steps if size >= 2 * step)
        halved = next((one for one in shorter if 0 < one < size), size // 2)
        if halved < 2:
            break  # of many dimensions, none is large
        sizes[place] = halved
    return torch.Size(sizes)
