"""Update rules: what an optimizer's step on a parameter keeps, and where the parameter may be cut.

An entry for an optimizer is one line in `protrain_plan.models.optimizers.OPTIMIZERS`: what it keeps
is not written down, but seen in a step on a small parameter, which tells it of any class of
`torch.optim` and of a user's.
"""

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm, prod
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from protrain_plan.errors import ProtrainError, cut
from protrain_plan.program.program import PIECE_ALIGNMENT, in_blocks
from protrain_runtime.states.compositions import Composition, is_composed, taken_apart

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]

MASTERS_OF = "masters_of"
"""The attribute in which a factory of optimizers with master weights has the user's factory."""


@dataclass(frozen=True, slots=True)
class StateRule:
    """A state tensor that lies beside its parameter: one value for each `per` elements, in order.

    Of 1: the tensor has the parameter's shape. Of more: it is flat, such as a scale per block.
    """

    dtype: torch.dtype
    per: int = 1

    def count(self, elements: int) -> int:
        """Values for so many elements."""
        return -(-elements // self.per)

    def num_bytes(self, elements: int) -> int:
        """Bytes of the values for so many elements."""
        return self.count(elements) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """What an optimizer keeps of one parameter, and where it may be cut.

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

    @property
    def unit(self) -> int:
        """Ranges begin at multiples of so many elements: none is too small."""
        return _unit(self.block, self.least)

    @property
    def shift(self) -> int:
        """Elements by which a cut may be earlier than it should be."""
        return self.unit + (self.least if self.least > 1 else 0) if self.block else 0

    def state_sizes(self, elements: int) -> tuple[int, ...]:
        """Bytes of each state of a parameter of so many elements, scalars apart."""
        return (*self.whole, *(state.num_bytes(elements) for state in self.states.values()))

    def state_bytes(self, elements: int) -> int:
        """Bytes of all of them."""
        return sum(self.state_sizes(elements))

    @property
    def element_bytes(self) -> float:
        """Bytes of the states of one element, in the mean of a large parameter."""
        return sum(state.dtype.itemsize / state.per for state in self.states.values())

    def scalar_bytes(self, *, block: int = 1) -> int:
        """Bytes of the other states of one parameter, each in whole blocks of `block` bytes."""
        return sum(in_blocks(num_bytes, block) for num_bytes in self.scalars)


COMPILED_SPAN = 2**20
"""Elements of a range that a compiled step works on, so that few lengths are compiled: this one for
all parameters, and what is left of each at its end (docs/decisions/optimizer.md)."""

_ANY = torch.Size([64, 256])
"""A matrix that is large enough for whatever an optimizer does with large ones."""


class UpdateRules:
    """The rules of an optimizer for parameters of any dtype and shape.

    Each is seen in steps that the optimizer does on a parameter of that shape, or of a smaller one
    with as many dimensions: what it keeps may depend on how many elements there are, and on how
    many dimensions. `factory` makes the optimizer. `groups` are the options of the groups that a
    parameter may be in, and `members` says in which one it is, where that is known. What may be cut
    has to have the same states in all of them.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]] = ({},),
        members: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        self.factory, self._groups, self._members = factory, groups, members or {}
        self._known: dict[tuple[torch.dtype, torch.Size, bool, int | None], UpdateRule] = {}
        self._least: list[_Tried] = [{} for _ in groups]
        self._apart: dict[tuple[torch.dtype, int, bool], str] = {}
        self._outside = _Outside(factory)
        self._masters_of: OptimizerFactory | None = getattr(factory, MASTERS_OF, None)
        self._compiles: bool | None = None

    def of(
        self,
        dtype: torch.dtype,
        shape: torch.Size = _ANY,
        *,
        in_order: bool = True,
        parameter: nn.Parameter | None = None,
    ) -> UpdateRule:
        """That of a parameter; not `in_order`: its elements do not lie in that of its dimensions.

        ProtrainError where groups differ in it, or the optimizer takes no such parameter.
        """
        own = None if parameter is None else self._members.get(parameter)
        place = (dtype, shape, in_order, own)
        if place in self._known:
            return self._known[place]
        with self._trying():
            reason = self._why_together(dtype, shape, own, cut=False) if self._masters_of else ""
            found = self._found(dtype, shape, own)
        if any(rule.states != found[0].states for rule in found):
            raise ProtrainError(
                "the parameter groups' options give them different optimizer states",
                fix="give all groups the same options of this kind, such as amsgrad",
            )
        rule = max(found, key=lambda one: (bool(one.reason), one.block, one.least))
        if rule.reason == DRAWS:
            reason = DRAWS  # in another order it would draw others
        with self._trying():
            reason = reason or self._why_together(dtype, shape, own, cut=not rule.reason)
        if reason:
            whole = rule.whole or rule.state_sizes(shape.numel())
            rule = UpdateRule(
                scalars=rule.scalars, block=0, reason=reason, together=True, whole=whole
            )
        elif not in_order and any(state.per > 1 for state in rule.states.values()):
            rule = UpdateRule(
                scalars=rule.scalars,
                block=0,
                reason="its blocks are of other elements than lie beside each other",
                whole=rule.state_sizes(shape.numel()),
            )
        self._known[place] = rule
        return rule

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Trials are on tensors of their own, whatever is around, and leave nothing behind."""
        # Random numbers are drawn again, and what a step counts outside of its optimizer (in its
        # class, in its module) begins where it was.
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), self._outside:
            yield

    def _why_together(
        self, dtype: torch.dtype, shape: torch.Size, own: int | None, *, cut: bool
    ) -> str:
        """Why parameters of a kind cannot be updated apart from others; empty: they can.

        Asked once for all with as many dimensions. `cut`: in pieces, too.
        """
        place = (dtype, len(shape), cut)
        if place not in self._apart:
            first = self._groups[own or 0]
            groups = [first, *(one for one in self._groups if one is not first)][:_MOST_GROUPS]
            self._apart[place] = self._tried(dtype, smaller(shape, _SMALL), groups, cut=cut)
        return self._apart[place]

    def _tried(
        self,
        dtype: torch.dtype,
        shape: torch.Size,
        groups: Sequence[Mapping[str, Any]],
        *,
        cut: bool,
    ) -> str:
        """Why steps of a plan are others than plain PyTorch's, on parameters of several shapes."""
        factory, masters = self.factory, self._masters_of is not None
        if self._masters_of is not None:
            factory = self._masters_of
            dtype = torch.promote_types(dtype, torch.float32)
        try:
            found = _why_together(
                factory, groups, dtype, shape, self._outside, pieces=cut and not masters
            )
        except _NoStepError:
            found = _why_together(
                factory, groups[:1], dtype, shape, self._outside, pieces=cut and not masters
            )
        if masters and (found.reason or found.writes):
            kept = "its step keeps values in its groups"
            raise ProtrainError(
                "the optimizer cannot step on master weights, some parameters at a time:"
                f" {found.reason or kept}",
                key="optimizer",
                fix="--precision pure or autocast; or an optimizer that looks at one parameter at a"
                " time, such as AdamW or SGD",
            )
        return found.reason

    def compiled(self, dtype: torch.dtype) -> bool:
        """Whether a step goes through `torch.compile`."""
        if self._compiles is None:
            with self._trying():
                trial = _Trial(self.factory, dtype, self._groups[0], {}, compiled=False)
                self._compiles = trial.calls_compiler()
        return self._compiles

    def _found(self, dtype: torch.dtype, shape: torch.Size, own: int | None) -> list[UpdateRule]:
        """The rules of the groups that a parameter may be in: its own one first, if it is known."""
        compiled = self.compiled(dtype)
        trials = [
            _Trial(self.factory, dtype, one, tried, compiled=compiled)
            for one, tried in zip(self._groups, self._least, strict=True)
        ]
        if own is None:
            return [trial.rule(shape) for trial in trials]
        found = [trials.pop(own).rule(shape)]
        for trial in trials if not found[0].reason else ():
            with suppress(ProtrainError):  # another group's options may be for other shapes alone
                rule = trial.rule(shape)
                found += [] if rule.reason else [rule]
        return found

    def refuse_whole(self, name: str, rule: UpdateRule) -> None:
        """ProtrainError where a parameter of this rule cannot be updated in pieces."""
        if rule.reason:
            raise ProtrainError(
                f"the optimizer cannot update {name!r} in pieces: {rule.reason}",
                key="optimizer",
                fix="an elementwise optimizer, such as AdamW or SGD; or a plan whose states stay"
                " on the device",
            )


_SMALL, _LARGE = 2**14, 2**16
"""Elements of a parameter that is cut for a trial, and of one whose states are looked at, about: a
larger one is tried in a smaller shape. Of so few that are cut, operators compute all in one thread,
whose vectors a cut at a multiple of PIECE_ALIGNMENT leaves as they are."""

DEPENDS = "one element's update depends on others"
DRAWS = "its step draws random numbers"

_Tried = dict[tuple[torch.dtype, torch.Size, bool], tuple[int, str]]
"""By dtype, shape, and whether there are cuts: the least elements of a range, or why none are."""


class _Trial:
    """Steps of an optimizer on parameters of a dtype, in a group with these options.

    What it keeps is seen in steps that run operator by operator, also where it compiles them; where
    a parameter may be cut, in steps as they are in training. Compiling takes seconds for each
    length, so that of a `compiled` step a matrix of the same kind stands for all large ones.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        dtype: torch.dtype,
        options: Mapping[str, Any],
        tried: _Tried,
        *,
        compiled: bool,
    ) -> None:
        self._factory, self._dtype, self._options = factory, dtype, options
        self._tried, self._compiled = tried, compiled
        self._states: dict[torch.Size, Mapping[str, Any]] = {}
        self._draws = False

    def calls_compiler(self) -> bool:
        """Whether a step calls what `torch.compile` made."""
        calls: list[object] = []

        def backend(graph: Any, _: object) -> Any:
            calls.append(graph)
            return graph.forward

        try:
            with torch.compiler.set_stance("default", force_backend=backend):
                stepped = self._optimizer([_values(torch.Size([2, 2]), self._dtype)])
                self._step(stepped, [_values(torch.Size([2, 2]), self._dtype).flip(-1)])
        except Exception:  # noqa: BLE001 (the user's class; `_state` says what it does not take)
            return bool(calls)
        return bool(calls)

    @property
    def class_name(self) -> str:
        return type(self._optimizer([torch.zeros(2, 2, dtype=self._dtype)])).__name__

    def rule(self, shape: torch.Size) -> UpdateRule:
        """The rule of parameters of a shape."""
        tried = smaller(shape, _LARGE)
        found = self._kept(tried)
        if found.reason:
            return self._whole(shape, found.reason)
        block = lcm(*(state.per for state in found.states.values())) if found.states else 1
        cuts = not self._compiled or shape.numel() >= 2 * COMPILED_SPAN
        if not cuts and len(shape) == 1:
            return self._of_spans(found, block, 1)  # all of it, as it is
        few = smaller(shape, _SMALL)
        if self._compiled and len(shape) == 2 and self._kept(_ANY).states == found.states:
            few = _ANY
        if few != tried and self._kept(few).states != found.states:
            few = tried  # so few elements have other states
        place = (self._dtype, few, cuts)
        if place not in self._tried or not self._compiled:
            self._tried[place] = self._least(few, block, to_scale=few != shape, cuts=cuts)
        least, reason = self._tried[place]
        if reason and few != tried and not self._compiled:
            # Too few, perhaps, for two ranges of the least.
            least, reason = self._least(tried, block, to_scale=tried != shape, cuts=cuts)
        if reason:
            return self._whole(shape, reason)
        return self._of_spans(found, block, least)

    def _of_spans(self, found: UpdateRule, block: int, least: int) -> UpdateRule:
        if self._compiled:
            least = max(least, COMPILED_SPAN)
        return replace(found, block=block, least=least, compiled=self._compiled)

    def _kept(self, shape: torch.Size) -> UpdateRule:
        """What it keeps of a parameter of just this shape: with a reason, if that has no order."""
        kept = self._state(shape)
        if self._draws:
            return UpdateRule(reason=DRAWS)
        states: dict[str, StateRule] = {}
        scalars: list[int] = []
        for key, value in kept.items():
            if isinstance(value, Composition):
                continue
            if not isinstance(value, torch.Tensor):
                if tensors_in(value):
                    return UpdateRule(reason=f"it keeps tensors in {key!r}, a {_kind(value)}")
            elif is_composed(value):
                return UpdateRule(reason=f"its {key!r} is a {_kind(value)}")
            elif value.shape == shape:
                states[key] = StateRule(value.dtype)
            elif value.numel() <= 1:
                scalars.append(value.nbytes)
            elif (per := self._per(key, shape)) is None:
                return UpdateRule(reason=f"its {key!r} is of the whole parameter")
            elif per:
                states[key] = StateRule(value.dtype, per)
            else:
                scalars.append(value.nbytes)  # a table, say
        return UpdateRule(states=states, scalars=tuple(scalars))

    def _per(self, key: str, shape: torch.Size) -> int | None:
        """Of how many elements in a row a state has a value each; 0: it is the same for any shape.

        None where neither is so.
        """
        rows, *others = (2 ** (size.bit_length() - 1) for size in shape)
        while rows * prod(others) < shape.numel():  # of fewer it may keep other states
            rows *= 2
        counts: list[tuple[int, int]] = []  # elements, values
        for tried in (shape, torch.Size([rows, *others]), torch.Size([2 * rows, *others])):
            value = self._state(tried).get(key)
            if not isinstance(value, torch.Tensor) or value.dim() != 1:
                return None
            counts.append((tried.numel(), value.numel()))
        if len({values for _, values in counts}) == 1:
            return 0
        elements, values = counts[-1]
        per = elements // values
        return per if all(-(-n // per) == values for n, values in counts) else None

    def _least(
        self, shape: torch.Size, block: int, *, to_scale: bool, cuts: bool
    ) -> tuple[int, str]:
        """The least elements of a range that is updated as within the whole; or why there is none.

        Ranges begin at multiples of `block` and of PIECE_ALIGNMENT. `to_scale`: the parameter is
        larger. Without `cuts` there is one range, all of it.
        """
        count = shape.numel()
        try:
            whole = self._trained(shape)
            flat = torch.Size([count])
            kept = self._kept(flat).states
            least = 1
            while True:
                first = _unit(block, least)
                last = (count - least) // first * first
                ends = sorted({0, *(end for end in (first, last) if least <= end < count), count})
                if last < first or not cuts:
                    ends = [0, count]  # it is never cut
                spans = [*pairwise(ends)]
                lengths = {past - start for start, past in spans}
                if (
                    not (len(ends) == 2 and to_scale and least > 1 and cuts)
                    and all(self._kept(torch.Size([one])).states == kept for one in lengths)
                    and all(self._remade(shape, torch.Size([one])) for one in lengths)
                    and self._trained(shape, spans).same_as(whole)
                ):
                    return least, ""
                if len(ends) == 2:
                    return 0, DEPENDS
                least = 2 * first if least > 1 else first
        except Exception as error:  # noqa: BLE001 (the user's class meets a flat parameter)
            of_step = error.__cause__ or error
            return 0, f"of a range of it, {_kind(of_step)}: {cut(str(of_step))}"

    def _remade(self, shape: torch.Size, other: torch.Size) -> bool:
        """Whether states made of others are of one shape as they are of another."""
        found, others = self._state(shape), self._state(other)
        return all(
            how.reshaped(other) == others.get(key)
            for key, how in found.items()
            if isinstance(how, Composition)
        )

    def _whole(self, shape: torch.Size, reason: str) -> UpdateRule:
        """The rule of parameters that cannot be cut, with the bytes of all states."""
        tried = smaller(shape, _LARGE)
        sizes = _sizes(self._state(tried))
        if tried != shape:
            alike = self._without_values(tried) == sizes
            known = self._without_values(shape) if alike else None
            sizes = known or self._grown(smaller(shape, _SMALL), shape)
        return UpdateRule(
            scalars=tuple(size for number, size in sizes if number <= 1),
            block=0,
            reason=reason,
            whole=tuple(number * size for number, size in sizes if number > 1),
        )

    def _without_values(self, shape: torch.Size) -> list[tuple[int, int]] | None:
        """Elements and bytes of an element of each state, from a step on fake tensors.

        A smaller shape tells less: which side of a matrix is projected may depend on which one is
        longer, and a rank on how long that is. A value that the step reads is taken to be one.
        None where there is no such step.
        """
        try:
            # Operator by operator, as `_state` has it.
            eager = torch.compiler.set_stance("force_eager")
            with eager, FakeTensorMode(), _Ones():  # type: ignore[no-untyped-call]
                stepped = self._optimizer([torch.empty(shape, dtype=self._dtype)])
                (parameter,) = stepped.param_groups[0]["params"]
                self._step(stepped, [torch.empty(shape, dtype=self._dtype)])
                return _sizes(taken_apart(stepped.state[parameter]))
        except Exception:  # noqa: BLE001 (the user's class meets tensors without values)
            return None

    def _grown(self, small: torch.Size, shape: torch.Size) -> list[tuple[int, int]]:
        """Elements and bytes of an element of each state, from those of a small parameter.

        A state grows in proportion with a dimension, or not at all: seen in steps on parameters
        that are twice as large in one dimension. ProtrainError where it grows otherwise.
        """
        found = _sizes(self._state(small))
        numbers = [number for number, _ in found]
        for place, size in enumerate(small):
            twice = torch.Size([*small[:place], 2 * size, *small[place + 1 :]])
            larger = [number for number, _ in _sizes(self._state(twice))]
            ratios = [a / b for a, (b, _) in zip(larger, found, strict=False)]
            if len(larger) != len(found) or any(ratio not in (1, 2) for ratio in ratios):
                raise ProtrainError(
                    f"the states of {self.class_name} for a parameter of shape {list(shape)} are"
                    " not known: they grow in no proportion to it",
                    key="optimizer",
                )
            for number, ratio in enumerate(ratios):
                if ratio == 2:
                    numbers[number] = numbers[number] * shape[place] // size
        return [(number, width) for number, (_, width) in zip(numbers, found, strict=True)]

    def _state(self, shape: torch.Size) -> Mapping[str, Any]:
        """What a step leaves for a parameter of a shape; ProtrainError where there is no step."""
        if shape in self._states:
            return self._states[shape]
        try:
            with torch.compiler.set_stance("force_eager"):
                stepped = self._optimizer([_values(shape, self._dtype)])
                (parameter,) = stepped.param_groups[0]["params"]
                # Itself: where tensors are fake, the functions that ask it say nothing.
                generator = torch.default_generator
                before = generator.get_state()
                self._step(stepped, [_values(shape, self._dtype).flip(-1)])
            self._draws = self._draws or not torch.equal(before, generator.get_state())
        except Exception as error:
            raise ProtrainError(
                f"the optimizer takes no step on a parameter of shape {list(shape)}:"
                f" {_kind(error)}: {cut(str(error))}",
                key="optimizer",
            ) from error
        self._states[shape] = taken_apart(stepped.state[parameter])
        return self._states[shape]

    def _trained(self, shape: torch.Size, spans: Sequence[tuple[int, int]] = ()) -> "_Training":
        """A parameter after a few steps on all of it, or on each of its ranges."""
        calls = _Calls(pieces=[[_Range(0, *span)] for span in spans])
        training = _Training(self._factory, [self._options], [_values(shape, self._dtype)], calls)
        for step in range(_FEW):
            training.step(_gradients(training.parameters, step))
        return training

    def _optimizer(self, values: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        parameters = [nn.Parameter(one) for one in values]
        return in_train_mode(self._factory([{**self._options, "params": parameters}]))

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


class _Ones(TorchDispatchMode):
    """Where fake tensors are asked for a value: one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            (tensor,) = args
            return 1.0 if tensor.is_floating_point() else tensor.dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


def _sizes(kept: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Elements and bytes of an element of each memory that states keep: of a view, the whole."""
    memories = {one.untyped_storage()._cdata: one for one in tensors_in(dict(kept))}
    return [
        (one.untyped_storage().nbytes() // one.itemsize, one.itemsize) for one in memories.values()
    ]


def _unit(block: int, least: int) -> int:
    """The least multiple of a block, and of PIECE_ALIGNMENT, that is `least` or more."""
    unit = lcm(block, PIECE_ALIGNMENT)
    return -(-least // unit) * unit


def _values(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Different numbers on both sides of zero."""
    return torch.linspace(-1, 1, shape.numel()).reshape(shape).to(dtype)


def smaller(shape: torch.Size, most: int) -> torch.Size:
    """A shape with as many dimensions and about `most` elements, if `shape` has more.

    Dimensions that are odd, or multiples of small powers of two, stay so, of large ones up to 256:
    an optimizer may ask whether its blocks divide a parameter. One with less than two elements is
    tried with two.
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
            break  # of many dimensions none is large
        sizes[place] = halved
    return torch.Size(sizes)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The plain tensors in containers, objects, and tensors that are made of others."""
    if is_composed(value):
        return [
            one for part in Composition.of(value).parts for one in tensors_in(getattr(value, part))
        ]
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        inside: Iterable[object] = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    else:
        inside = getattr(value, "__dict__", {}).values()
    return [one for each in inside for one in tensors_in(each)]


def _kind(value: object) -> str:
    return type(value).__name__


_TURN = threading.RLock()
_ALONE = ("bitsandbytes", "torchao")
"""Packages whose optimizers may not be made or step beside each other: of torchao's each changes a
setting of the compiler while it steps, and sets it back."""


def in_turn(factory: OptimizerFactory) -> OptimizerFactory:
    """The same optimizers; those that may not step beside others wait for their turn.

    ProtrainError where bitsandbytes was told of options for single parameters: it finds them by a
    parameter's identity and by its place among the others, which a piece of it does not have.

    Lanes and the thread that computes step on parameters of their own at the same time. Of 180
    short runs of bitsandbytes' AdamW8bit in three threads, 11 gave other bits; of as many that took
    turns, none.
    """

    def make(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        with _TURN:
            made = factory(groups)
        if any(kind.__module__.partition(".")[0] in _ALONE for kind in type(made).__mro__):
            _refuse_overrides(made)
            step = made.step

            def alone(*arguments: Any, **options: Any) -> Any:
                with _TURN:
                    return step(*arguments, **options)

            made.step = alone  # type: ignore[method-assign]
        return made

    return make


def _refuse_overrides(optimizer: Any) -> None:
    """ProtrainError where bitsandbytes' manager, one for all of a process, has overrides."""
    manager = getattr(optimizer, "mng", None)
    if manager is None or not (
        manager.module_weight_config_triple or manager.pid2config or manager.index2config
    ):
        return
    named = {
        f"{_kind(module)}.{name}: {', '.join(f'{k}={v}' for k, v in options.items())}"
        for module, name, options in manager.module_weight_config_triple
    }
    raise ProtrainError(
        "bitsandbytes was told to keep other states of single parameters"
        f" ({'; '.join(sorted(named)) or 'GlobalOptimManager.override_config'}): a plan does not"
        " count them, and a piece of a parameter would not have them",
        key="optimizer",
        fix="let it have no overrides: Trainer(..., optimizers=(AdamW8bit(...), None)) in place of"
        " optim='adamw_bnb_8bit'; bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()"
        " drops those that an earlier training has left",
    )


def in_train_mode(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, in its training mode where it has modes, as schedule-free ones do."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of its groups, by value: those that change in place later do not change here."""
    return [
        {key: _by_value(option) for key, option in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _by_value(option: Any) -> Any:
    if isinstance(option, tuple | list):  # of betas that are tensors, say
        return type(option)(map(_by_value, option)) if type(option) in (tuple, list) else option
    if isinstance(option, Mapping):
        return {key: _by_value(value) for key, value in option.items()}
    return option.clone() if isinstance(option, torch.Tensor) else option


_NAMES = "param_names"
"""The option in which PyTorch has the names of a group's parameters."""


def worker_on(
    factory: OptimizerFactory, shadows: Iterable[tuple[nn.Parameter, str, Mapping[str, Any]]]
) -> torch.optim.Optimizer:
    """An optimizer over parts of parameters: each with its parameter's name and its options."""
    groups: dict[int, dict[str, Any]] = {}  # by the options that parameters share
    for shadow, name, chosen in shadows:
        if id(chosen) not in groups:
            named = {_NAMES: []} if _NAMES in chosen else {}
            # By value: a step that writes them, as a counter in place, is to begin where others do.
            groups[id(chosen)] = {**_by_value(chosen), **named, "params": []}
        group = groups[id(chosen)]
        group["params"].append(shadow)
        if _NAMES in group:
            group[_NAMES].append(name)
    return factory(groups.values())


def step_alone(
    optimizer: torch.optim.Optimizer, own: Set[nn.Parameter], options: Sequence[Mapping[str, Any]]
) -> None:
    """Step on these parameters of an optimizer alone, in groups that have these options.

    What the step writes into its groups is lost: the step on the rest, later, does that once more.
    """
    groups = optimizer.param_groups
    alone: list[dict[str, Any]] = []
    for group, chosen in zip(groups, options, strict=True):
        held = [number for number, one in enumerate(group["params"]) if one in own]
        named = {_NAMES: [chosen[_NAMES][n] for n in held]} if _NAMES in chosen else {}
        if held:
            params = [group["params"][number] for number in held]
            alone.append({**_by_value(chosen), **named, "params": params})
    if not any(one.grad is not None for group in alone for one in group["params"]):
        return
    try:
        optimizer.param_groups = alone
        optimizer.step()
    finally:
        optimizer.param_groups = groups


_MOST_GROUPS = 3
"""Groups of options in one trial of several parameters."""

_SCALES = (1.0, 1e-4, 1e4, 1e-2, 1e2, 1e-3, 1e4, 1.0)
"""Of gradients in steps that are tried: on both sides of what a step may clip, or wait for."""

_FEW = 4  # steps of a trial that only looks at ranges of a parameter

_LARGE_STATE = 2048
"""Elements of what an optimizer may keep besides states: scalars and tables."""

TOGETHER = "a step on all parameters is another than steps on each of them"


class _Range(NamedTuple):
    """Elements of a parameter. A step on them has them flat."""

    parameter: int
    first: int
    past: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """How a plan calls the optimizer in a step; plain PyTorch calls it once, for all parameters.

    pieces  ranges on each of which an optimizer steps that is made for it: offloaded chunks
    alone   parameters on which the optimizer itself steps, and on no others: updates in backward

    These come one after the other, then a step of the optimizer on the rest, which may be nothing.
    """

    pieces: Sequence[Sequence[_Range]] = ()
    alone: Sequence[Sequence[int]] = ()


class _Training:
    """Steps of an optimizer on parameters of its own, called as by PyTorch or as by a plan."""

    def __init__(
        self,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]],
        values: Sequence[torch.Tensor],
        calls: _Calls | None = None,
    ) -> None:
        self._factory, self._calls = factory, calls or _Calls()
        self.parameters = [nn.Parameter(one.clone()) for one in values]
        made: list[dict[str, Any]] = []
        for number, options in enumerate(groups):  # parameters are in groups by turns
            own = self.parameters[number :: len(groups)]
            named = {_NAMES: options[_NAMES][: len(own)]} if _NAMES in options else {}
            made.append({**options, **named, "params": own})
        self.optimizer = in_train_mode(factory(made))
        self.groups = {
            one: number
            for number, group in enumerate(self.optimizer.param_groups)
            for one in group["params"]
        }
        self._states: dict[_Range, dict[str, Any]] = {}
        self._begun = options_of(self.optimizer)
        self._held: list[int] = []  # bytes of all that it keeps, after every step
        self.beside = 0  # elements of the tensors that it keeps in no parameter's state

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One step; None for a parameter that has no gradient."""
        options = options_of(self.optimizer)
        rest = dict(enumerate(gradients))
        for piece in self._calls.pieces:
            spans = [span for span in piece if rest[span.parameter] is not None]
            if spans:
                self._on_piece(spans, options, gradients, lambda worker: worker.step())
        for span in (span for piece in self._calls.pieces for span in piece):
            rest[span.parameter] = None
        for numbers in self._calls.alone:
            own = {number: rest.pop(number) for number in numbers}
            self._give(own)
            step_alone(self.optimizer, {self.parameters[number] for number in own}, options)
            self._give(dict.fromkeys(own))
        self._give(rest)
        self.optimizer.step()
        self._give(dict.fromkeys(rest))
        own = _storages(self.parameters).keys()
        kept = _storages([*_attributes(self.optimizer).values(), self.optimizer.param_groups])
        states = _storages([self.optimizer.state.get(one) for one in self.parameters])
        every = kept | states | _storages(self.optimizer.state)
        self.beside = sum(
            one.numel() for key, one in every.items() if key not in own | states.keys()
        )
        self._held.append(
            sum(one.untyped_storage().nbytes() for key, one in every.items() if key not in own)
        )

    @property
    def wrote(self) -> bool:
        """Whether steps have changed the options of groups, or added some."""
        now = options_of(self.optimizer)
        return not all(map(_equal, self._begun, now))

    def refuse_more(self, most_beside: int) -> None:
        """ProtrainError where it keeps more than what its first step made of each parameter.

        Or more than so many elements besides, which are not for parameters.
        """
        if self._held[-1] > self._held[0]:
            problem, fix = (
                "keeps more tensors after later steps than after its first one",
                "an optimizer whose first step makes all of its states",
            )
        elif self.beside > most_beside:
            problem, fix = (
                "keeps tensors in its attributes, its groups, or a state that is no parameter's",
                "let it keep them in self.state[parameter]",
            )
        else:
            return
        raise ProtrainError(
            f"{_kind(self.optimizer)} {problem}: no plan has counted that", key="optimizer", fix=fix
        )

    def switch(self) -> None:
        """Into the mode of evaluation and back, where it has modes."""
        optimizer: Any = self.optimizer
        if not (callable(getattr(optimizer, "eval", None)) and hasattr(optimizer, "train")):
            return
        for mode in ("eval", "train"):
            options = options_of(optimizer)
            for piece in self._calls.pieces:
                spans = [span for span in piece if span in self._states]
                if spans:
                    self._on_piece(
                        spans, options, None, lambda one, mode=mode: getattr(one, mode)()
                    )
            getattr(optimizer, mode)()

    def _give(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        for number, gradient in gradients.items():
            self.parameters[number].grad = None if gradient is None else gradient.clone()

    def _on_piece(
        self,
        spans: Sequence[_Range],
        options: Sequence[Mapping[str, Any]],
        gradients: Sequence[torch.Tensor | None] | None,
        use: Callable[[Any], object],
    ) -> None:
        shadows: list[tuple[nn.Parameter, str, Mapping[str, Any]]] = []
        for number, first, past in spans:
            whole = self.parameters[number]
            shadow = nn.Parameter(whole.detach().flatten()[first:past])
            gradient = None if gradients is None else gradients[number]
            if gradient is not None:
                shadow.grad = gradient.flatten()[first:past].clone()
            group = self.groups[whole]
            members = self.optimizer.param_groups[group]
            names = dict(zip(members["params"], members.get(_NAMES, ()), strict=False))
            shadows.append((shadow, names.get(whole, ""), options[group]))
        worker = worker_on(self._factory, shadows)
        for (shadow, *_), span in zip(shadows, spans, strict=True):
            if span in self._states:
                worker.state[shadow] = self._states[span]
        use(worker)
        for (shadow, *_), span in zip(shadows, spans, strict=True):
            self._states[span] = worker.state[shadow]

    def same_as(self, whole: "_Training") -> bool:
        """Whether plain steps lead where these do: to the bit, in all that the optimizer keeps."""
        if not all(map(_equal, self.parameters, whole.parameters)):
            return False
        for number, parameter in enumerate(whole.parameters):
            spans = sorted(span for span in self._states if span.parameter == number)
            own = (
                [self._states[span] for span in spans]
                if spans
                else [self.optimizer.state.get(self.parameters[number], {})]
            )
            if not _alike(whole.optimizer.state.get(parameter, {}), own):
                return False
        pairs = [
            (options_of(self.optimizer), options_of(whole.optimizer)),
            (_attributes(self.optimizer), _attributes(whole.optimizer)),
        ]
        # Numbers that count; what a first call settles once is a flag.
        plain = (
            [one for one in tree_leaves(each) if is_plain(one) and not isinstance(one, bool)]
            for pair in pairs
            for each in pair
        )
        mine, its, others, more = plain
        return mine == its and others == more


def _alike(whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the states of ranges, side by side, are those of the whole parameter.

    What is no range of it is in all of them.
    """
    states = [taken_apart(one) for one in parts]
    own = taken_apart(whole)
    if any(own.keys() != each.keys() for each in states):
        return False
    for key, one in own.items():
        several = [each[key] for each in states]
        if isinstance(one, Composition) or all(_equal(one, each) for each in several):
            continue
        if not (isinstance(one, torch.Tensor) and all(each.numel() for each in several)):
            return False
        if not _equal(one.flatten(), torch.cat([each.flatten() for each in several])):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    """Whether two values of a state are the same: tensors to the bit, objects in what they hold."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        one, other = one.detach().flatten(), other.detach().flatten()
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if torch.equal(one, other):
            return True
        return one.is_floating_point() and torch.equal(
            *(t.view(_BITS[t.itemsize]) for t in (one, other))
        )
    if isinstance(one, dict | list | tuple | set):
        leaves, more = tree_leaves(one), tree_leaves(other)
    elif (held := getattr(one, "__dict__", None)) is not None:
        leaves, more = tree_leaves(held), tree_leaves(vars(other))
    else:
        return bool(one == other or one != one)
    return len(leaves) == len(more) and all(map(_equal, leaves, more))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of floating-point values that are compared where some are no numbers."""


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What its class keeps in it besides what every optimizer has."""
    usual = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    return {name: value for name, value in vars(optimizer).items() if name not in usual}


def is_plain(value: object) -> bool:
    """Whether it is a number, a text, a dtype, None, or a container of these."""
    if isinstance(value, dict):
        return all(is_plain(one) for one in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _storages(values: object) -> dict[int, torch.Tensor]:
    """A tensor of each memory in containers and objects, the largest; each object once."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack = [values]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_composed(one):
            stack += [getattr(one, part) for part in Composition.of(one).parts]  # type: ignore[arg-type]
        elif isinstance(one, torch.Tensor):
            key = one.untyped_storage()._cdata
            found[key] = max(found.get(key, one), one, key=torch.Tensor.numel)
        elif isinstance(one, Mapping):
            stack += one.values()
        elif isinstance(one, list | tuple | set):
            stack += one
        elif not isinstance(one, type | ModuleType | nn.Module):
            stack += getattr(one, "__dict__", {}).values()
    return found


class _NoStepError(Exception):
    """The optimizer takes no step on parameters of a trial."""


class _Found(NamedTuple):
    """Why all parameters are stepped on together, if so; and whether a step writes its groups."""

    reason: str = ""
    writes: bool = False


def _why_together(
    factory: OptimizerFactory,
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    shape: torch.Size,
    outside: "_Outside",
    *,
    pieces: bool,
) -> _Found:
    """Compare steps on all parameters with steps that are called as plans call them.

    In backward, chunk by chunk, and with `pieces` in these: with other objects, in another order,
    more often. ProtrainError where the optimizer keeps more than its first step shows.
    _NoStepError where it takes no parameters of this shape in these groups.
    """
    alike = [_values(shape, dtype) * (number + 1) for number in range(3)]
    others = [_values(torch.Size(size), dtype) for size in ([48, 64], [64])]
    in_backward = [_Calls(alone=[[2], [1], [0]])]
    if pieces:
        every = [_Range(number, 0, shape.numel()) for number in range(3)]
        in_backward.append(_Calls(pieces=[every[2:], every[:2]]))
    usual = list(range(len(_SCALES)))
    # A parameter without a gradient, and one with a gradient that is no number.
    missing, infinite = [0, 1, -1, 2, 3], [0, 2, -2, 1]
    trials = [(alike, usual, in_backward), (alike, missing, in_backward)]
    trials.append((alike, infinite, in_backward))
    trials.append((alike + others, usual, [_Calls(alone=[[4, 3], [2], [1]])]))
    writes, most_beside = False, _LARGE_STATE
    for values, steps, plans in trials:
        first = values is alike and steps is usual
        try:
            whole, draws, counts = _steps(factory, groups, values, steps, _Calls(), outside)
        except Exception as error:
            if first:
                raise _NoStepError from error
            continue  # such steps are not for this optimizer
        if draws:
            return _Found(DRAWS)
        if counts:
            return _Found(f"its step changes {counts!r} of its class or its module")
        if steps is usual:  # more parameters later: what is kept for them is more
            whole.refuse_more(most_beside)
            most_beside, writes = min(most_beside, whole.beside), whole.wrote
        for calls in plans:
            try:
                parts, *_ = _steps(factory, groups, values, steps, calls, outside)
            except Exception as error:  # noqa: BLE001 (the user's class)
                raised = f"{_kind(error)}: {cut(str(error))}"
                return _Found(f"a step on some parameters alone is refused: {raised}", writes)
            if not parts.same_as(whole):
                return _Found(TOGETHER, writes)
    return _Found(writes=writes)


def _steps(
    factory: OptimizerFactory,
    groups: Sequence[Mapping[str, Any]],
    values: Sequence[torch.Tensor],
    steps: Sequence[int],
    calls: _Calls,
    outside: "_Outside",
) -> tuple[_Training, bool, str]:
    """Some steps, whether they drew random numbers, and in what name outside they counted.

    Steps below zero: -1, a parameter has no gradient; -2, one has an infinite one.
    """
    # Itself: where tensors are fake, the functions that ask it say nothing.
    generator = torch.default_generator
    # Operator by operator, also where steps are compiled: what is looked at stays the same.
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        before = generator.get_state()
        training = _Training(factory, groups, values, calls)
        seen: list[dict[tuple[int, str], Any]] = []
        for number, step in enumerate(steps):
            gradients: list[torch.Tensor | None] = [*_gradients(values, max(step, 0))]
            if step == -1:
                gradients[1] = None
            elif step == -2 and gradients[0] is not None:
                gradients[0].view(-1)[0] = torch.inf
            training.step(gradients)
            seen.append(outside.values())
            if number == 1:
                training.switch()
        draws = not torch.equal(before, generator.get_state())
    first, last = seen[0], seen[-1]
    changed = [name for (place, name), value in last.items() if first.get((place, name)) != value]
    return training, draws, changed[0] if changed else ""


def _gradients(values: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """The gradients of a step of a trial, whose sizes differ between parameters and steps."""
    found: list[torch.Tensor] = []
    for number, one in enumerate(values):
        narrow = not one.is_complex() and torch.finfo(one.dtype).max < 1e6
        scale = min(_SCALES[step], 1e2) if narrow else _SCALES[step]
        turned = (_values(one.shape, one.dtype) + step / 4).flatten().flip(0).reshape(one.shape)
        found.append(turned * (scale * (number + 1)))
    return found


class _Outside:
    """The plain values in an optimizer's classes and in their modules; entered, they are kept."""

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory = factory
        self._places: list[Any] | None = None
        self._before: list[dict[tuple[int, str], Any]] = []

    def values(self) -> dict[tuple[int, str], Any]:
        """Copies of the values that a step might count in, by place and name."""
        if self._places is None:
            self._places = []
            with suppress(Exception):  # the user's class; a trial says what it does not take
                kinds = type(self._factory([{"params": [nn.Parameter(torch.zeros(2, 2))]}])).__mro__
                own = [k for k in kinds if k.__module__.partition(".")[0] not in _OF_NOBODY]
                modules = dict.fromkeys(kind.__module__ for kind in own)
                self._places = [*own, *(sys.modules[name] for name in modules)]
        return {
            (number, name): copy.deepcopy(value)
            for number, place in enumerate(self._places)
            for name, value in [*vars(place).items()]
            if isinstance(value, int | float | list | dict) and is_plain(value)
            if not (name.startswith("__") or isinstance(value, bool))
        }

    def __enter__(self) -> None:
        self._before.append(self.values())

    def __exit__(self, *_: object) -> None:
        before, now = self._before.pop(), self.values()
        assert self._places is not None
        for (number, name), value in before.items():
            if now.get((number, name)) == value:
                continue
            own = vars(self._places[number]).get(name)
            if isinstance(own, list):
                own[:] = value
            elif isinstance(own, dict):
                own.clear()
                own.update(value)
            else:
                setattr(self._places[number], name, value)


_OF_NOBODY = ("torch", "builtins", "abc", "typing")
"""Packages whose classes count nothing that a step depends on."""
