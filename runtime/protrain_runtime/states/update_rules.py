"""Update rules: what an optimizer's step on a parameter keeps, and where the parameter may be cut.

An entry for an optimizer is one line in `protrain_plan.models.optimizers.OPTIMIZERS`: what it keeps
is not written down, but seen in a step on a small parameter, which tells it of any class of
`torch.optim` and of a user's.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import lcm, prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.program.program import PIECE_ALIGNMENT, in_blocks
from protrain_runtime.devices.fake import FakeMode
from protrain_runtime.states.compositions import Composition, is_composed, taken_apart
from protrain_runtime.states.stepping import (
    DRAWS,
    FEW_STEPS,
    MASTERS_OF,
    Calls,
    NoStepError,
    OptimizerFactory,
    Outside,
    Range,
    Training,
    attributes_of,
    gradients_of,
    group_of,
    in_train_mode,
    kind_of,
    refuse_closures,
    values_of,
    why_together,
    with_attributes,
)


@dataclass(frozen=True, slots=True)
class StateRule:
    """A state with a value for each `per` elements in order; flat where that is not 1."""

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
    with as many dimensions: a parameter may be cut where steps on ranges give the bits of steps on
    the whole. Ranges are of whole blocks, which optimizers of 8 bits declare (`_BLOCKS`). `factory`
    makes the optimizer. `groups` are the options of the groups that a parameter may be in, and
    `members` says in which one it is, where that is known. What may be cut has to have the same
    states in all of them.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]] = ({},),
        members: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        self.factory, self._groups, self._members = factory, groups, members or {}
        self._known: dict[tuple[torch.dtype, torch.Size, bool, int | None], UpdateRule] = {}
        self._tried_of: list[_Tried] = [{} for _ in groups]
        self._apart: dict[tuple[torch.dtype, int, bool], str] = {}
        self._outside = Outside(factory)
        self._others: dict[str, UpdateRules] = {}  # by attributes of parameters
        self._marked = False  # whether attributes are known
        self._masters_of: OptimizerFactory | None = getattr(factory, MASTERS_OF, None)
        self._compiles: bool | None = None
        self._declared: tuple[int, int] | None = None

    def of(
        self,
        dtype: torch.dtype,
        shape: torch.Size = _ANY,
        *,
        in_order: bool = True,
        parameter: nn.Parameter | None = None,
    ) -> UpdateRule:
        """A parameter's layout; not `in_order`: its elements do not lie in that of its dimensions.

        ProtrainError where groups differ in it, or the optimizer takes no such parameter.
        """
        attributes = {} if parameter is None else attributes_of(parameter)
        if attributes and not self._marked:
            return self._with(attributes).of(dtype, shape, in_order=in_order, parameter=parameter)
        own = None if parameter is None else self._members.get(parameter)
        place = (dtype, shape, in_order, own)
        if place in self._known:
            return self._known[place]
        with self._trying():
            reason = self._reason(dtype, shape, own, cut=False) if self._masters_of else ""
            found = self._found(dtype, shape, own)
        kept = [dict(rule.states) for rule in found if not rule.reason]
        if any(states != kept[0] for states in kept):
            raise ProtrainError(
                "the parameter groups' options give them different optimizer states",
                fix="give all groups the same options of this kind, such as amsgrad",
            )
        rule = max(found, key=lambda one: (bool(one.reason), one.block, one.least))
        if rule.reason == DRAWS:
            reason = DRAWS  # in another order it would draw others
        with self._trying():
            reason = reason or self._reason(dtype, shape, own, cut=not rule.reason)
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

    def _with(self, attributes: Mapping[str, Any]) -> "UpdateRules":
        """The rules of parameters that have these attributes, which the optimizer may read."""
        key = repr(sorted(attributes.items()))
        if key not in self._others:
            last = len(self._others) >= _MOST_ATTRIBUTES  # names, say, which are all different
            factory = self.factory if last else with_attributes(self.factory, attributes)
            key = "" if last else key
        if key not in self._others:
            self._others[key] = UpdateRules(factory, self._groups, self._members)
            self._others[key]._marked = True
        return self._others[key]

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Trials are on tensors of their own, whatever is around, and leave nothing behind."""
        # Random numbers are drawn again, and what a step counts outside of its optimizer (in its
        # class, in its module) begins where it was.
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), self._outside:
            yield

    def _reason(self, dtype: torch.dtype, shape: torch.Size, own: int | None, *, cut: bool) -> str:
        """Why parameters of a kind cannot be updated apart, or be `cut`; empty: they can."""
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
        masters = self._masters_of
        factory = masters or self.factory
        if masters:
            dtype = torch.promote_types(dtype, torch.float32)
        try:
            try:
                reason, writes = why_together(
                    factory, groups, dtype, shape, self._outside, pieces=cut and not masters
                )
            except NoStepError:  # other groups' options may be for other shapes alone
                reason, writes = why_together(
                    factory, groups[:1], dtype, shape, self._outside, pieces=cut and not masters
                )
        except NoStepError as error:
            return f"it takes no step on several parameters: {error}"
        if masters and (reason or writes):
            kept = "its step keeps values in its groups"
            raise ProtrainError(
                "the optimizer cannot step on master weights, some parameters at a time:"
                f" {reason or kept}",
                key="optimizer",
                fix="--precision pure or autocast; or an optimizer that looks at one parameter at a"
                " time, such as AdamW or SGD",
            )
        return reason

    def compiled(self, dtype: torch.dtype) -> bool:
        """Whether a step goes through `torch.compile`."""
        if self._compiles is None:
            with self._trying():
                trial = _Trial(self.factory, dtype, self._groups[0], {}, (1, 1), compiled=False)
                self._compiles = trial.calls_compiler()
        return self._compiles

    def _found(self, dtype: torch.dtype, shape: torch.Size, own: int | None) -> list[UpdateRule]:
        """The rules of the groups that a parameter may be in: its own one first, if it is known."""
        if self._declared is None:
            self._declared = _blocks_of(self._masters_of or self.factory, self._groups[0])
        compiled = self.compiled(dtype)
        trials = [
            _Trial(self.factory, dtype, one, tried, self._declared, compiled=compiled)
            for one, tried in zip(self._groups, self._tried_of, strict=True)
        ]
        if own is None:
            return [trial.rule(shape) for trial in trials]
        found = [trials.pop(own).rule(shape)]
        for trial in trials if not found[0].reason else ():
            with suppress(ProtrainError):  # another group's options may be for other shapes alone
                rule = trial.rule(shape)
                found += [] if rule.reason else [rule]
        return found


_MOST_ATTRIBUTES = 8
"""Different attributes of parameters that are tried."""

_MOST_GROUPS = 3
"""Groups of options in one trial of several parameters."""

_SMALL = 2**14
"""Elements of a parameter in a trial, about: a larger one is tried in a smaller shape. Of so few,
operators compute all in one thread, whose vectors a cut at a multiple of PIECE_ALIGNMENT leaves as
they are."""

DEPENDS = "one element's update depends on others"

_Tried = dict[tuple[torch.dtype, torch.Size, bool], str]
"""By dtype, shape, and whether there are cuts: why steps on ranges are others; empty: they are not.
"""


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
        blocks: tuple[int, int],
        *,
        compiled: bool,
    ) -> None:
        self._factory, self._dtype, self._options = factory, dtype, options
        self._tried, self._blocks, self._compiled = tried, blocks, compiled
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
                stepped = self._optimizer([values_of(torch.Size([2, 2]), self._dtype)])
                self._step(stepped, [values_of(torch.Size([2, 2]), self._dtype).flip(-1)])
        except Exception:  # noqa: BLE001 (the user's; `_state` says what it does not take)
            pass
        return bool(calls)

    def rule(self, shape: torch.Size) -> UpdateRule:
        """The rule of parameters of a shape."""
        block, least = self._blocks_for(shape)
        tried = smaller(shape, max(_SMALL, 6 * _unit(block, least)))
        found = self._kept(tried)
        if found.reason:
            return self._whole(shape, found.reason)
        if any(block % state.per for state in found.states.values()):
            return self._whole(shape, "it keeps values of blocks that it does not declare")
        cuts = not self._compiled or shape.numel() >= 2 * COMPILED_SPAN
        if cuts or len(shape) > 1:  # else it is stepped on as it is
            if self._compiled and len(shape) == 2 and self._kept(_ANY).states == found.states:
                tried = _ANY
            reason = self._differs(tried, cuts=cuts)
            if reason and tried == shape and not self._differs(tried, cuts=False):
                reason, least = "", shape.numel()  # a small one may go as it is, in one range
            if reason:
                return self._whole(shape, reason)
        least = max(least, COMPILED_SPAN) if self._compiled else least
        return replace(found, block=block, least=least, compiled=self._compiled)

    def _blocks_for(self, shape: torch.Size) -> tuple[int, int]:
        """Elements of a block, and of a range at least, of parameters of a shape."""
        return self._blocks if shape.numel() >= self._blocks[1] else (1, 1)

    def _kept(self, shape: torch.Size) -> UpdateRule:
        """See what it keeps of a parameter of this shape: with a reason, if that has no order."""
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
                    return UpdateRule(reason=f"it keeps tensors in {key!r}, a {kind_of(value)}")
            elif is_composed(value):
                return UpdateRule(reason=f"its {key!r} is a {kind_of(value)}")
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
        """Elements for which a flat state has a value; 0: the same for any shape; None: neither."""
        unit, counts = _unit(*self._blocks_for(shape)), list[int]()
        with suppress(ProtrainError):  # it may take no flat parameter
            for size in (torch.Size([unit]), torch.Size([2 * unit]), shape):
                value = self._state(size).get(key)
                counts.append(value.numel() if isinstance(value, torch.Tensor) else 0)
        if len(set(counts)) == 1 and len(counts) == 3:
            return 0
        if len(counts) < 3 or not counts[0] or 2 * counts[0] != counts[1]:
            return None
        per = unit // counts[0]
        return per if -(-shape.numel() // per) == counts[2] else None

    def _differs(self, shape: torch.Size, *, cuts: bool) -> str:
        """The answer of `_compared`, asked once."""
        place = (self._dtype, shape, cuts)
        if place not in self._tried:
            self._tried[place] = self._compared(shape, cuts=cuts)
        return self._tried[place]

    def _compared(self, shape: torch.Size, *, cuts: bool) -> str:
        """Why steps on ranges give other bits than steps on the whole; empty: they do not."""
        count, (block, least) = shape.numel(), self._blocks_for(shape)
        first = _unit(block, least)
        last = (count - least) // first * first
        ends = sorted({0, first, last, count}) if cuts and last >= first else [0, count]
        spans = [*pairwise(ends)]
        try:
            ranges = self._trained(shape, spans)
            alike = ranges.same_as(self._trained(shape))
            for length in [torch.Size([past - start]) for start, past in spans] if alike else ():
                # States made of others are of one shape as they are of another.
                found, others = self._state(shape), self._state(length)
                composed = [one for one in found.items() if isinstance(one[1], Composition)]
                alike = alike and all(
                    how.reshaped(length) == others.get(key) for key, how in composed
                )
        except Exception as error:  # noqa: BLE001 (the user's class meets a flat parameter)
            of_step = error.__cause__ or error
            return f"of a range of it, {kind_of(of_step)}: {cut(str(of_step))}"
        return "" if alike else DEPENDS

    def _whole(self, shape: torch.Size, reason: str) -> UpdateRule:
        """The rule of parameters that cannot be cut, with the bytes of all states."""
        tried = smaller(shape, _SMALL)
        sizes = _sizes(self._state(tried))
        if tried != shape:
            alike = self._without_values(tried) == sizes
            sizes = (alike and self._without_values(shape)) or _sizes(self._state(shape))
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
            with eager, FakeMode(), _Ones():  # type: ignore[no-untyped-call]
                stepped = self._optimizer([torch.empty(shape, dtype=self._dtype)])
                (parameter,) = _parameters(stepped)
                self._step(stepped, [torch.empty(shape, dtype=self._dtype)])
                return _sizes(taken_apart(stepped.state[parameter]))
        except Exception:  # noqa: BLE001 (the user's class meets tensors without values)
            return None

    def _state(self, shape: torch.Size) -> Mapping[str, Any]:
        """Take a step on a parameter of a shape, for its states; ProtrainError if it takes none."""
        if shape in self._states:
            return self._states[shape]
        try:
            with torch.compiler.set_stance("force_eager"):
                stepped = self._optimizer([values_of(shape, self._dtype)])
                (parameter,) = _parameters(stepped)
                # Itself: where tensors are fake, the functions that ask it say nothing.
                generator = torch.default_generator
                before = generator.get_state()
                self._step(stepped, [values_of(shape, self._dtype).flip(-1)])
            self._draws = self._draws or not torch.equal(before, generator.get_state())
        except ProtrainError:
            raise
        except Exception as error:
            raise ProtrainError(
                f"the optimizer takes no step on a parameter of shape {list(shape)}:"
                f" {kind_of(error)}: {cut(str(error))}",
                key="optimizer",
            ) from error
        self._states[shape] = taken_apart(stepped.state[parameter])
        return self._states[shape]

    def _trained(self, shape: torch.Size, spans: Sequence[tuple[int, int]] = ()) -> "Training":
        """A parameter after a few steps on all of it, or on each of its ranges."""
        calls = Calls(pieces=[[Range(0, *span)] for span in spans])
        training = Training(self._factory, [self._options], [values_of(shape, self._dtype)], calls)
        for step in range(FEW_STEPS):
            training.step(gradients_of(training.parameters, step))
        return training

    def _optimizer(self, values: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        parameters = [nn.Parameter(one) for one in values]
        return in_train_mode(self._factory([group_of(self._options, parameters)]))

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(_parameters(optimizer), gradients, strict=True):
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


def _blocks_of(factory: OptimizerFactory, options: Mapping[str, Any]) -> tuple[int, int]:
    """Elements of a block that an optimizer declares, and of the smallest parameter with blocks."""
    try:
        made = factory([group_of(options, [nn.Parameter(torch.zeros(2, 2))])])
    except Exception:  # noqa: BLE001 (the user's class; a trial says what it does not take)
        return 1, 1
    refuse_closures(made)
    for kind in type(made).__mro__:
        blocks = _BLOCKS.get(kind.__module__.partition(".")[0])
        if blocks is not None:
            block, least = blocks(made)
            return int(block), int(least)
    return 1, 1


_BLOCKS: Mapping[str, Callable[[Any], tuple[float, float]]] = {
    "bitsandbytes": lambda made: (256, made.args.min_8bit_size if made.args.optim_bits == 8 else 1),
    "torchao": lambda made: (made.block_size, 4096),
}
"""By package: elements of a block, and of the smallest parameter whose states are of blocks."""

_TURN = threading.RLock()
_ALONE = ("bitsandbytes", "torchao")
"""Packages whose optimizers may not be made or step beside each other: of torchao's each changes a
setting of the compiler while it steps, and sets it back."""


def in_turn(factory: OptimizerFactory) -> OptimizerFactory:
    """The same optimizers; those that may not step beside others wait for their turn.

    ProtrainError if bitsandbytes has options for single parameters: it finds them by a parameter's
    identity and by its place among the others, which a piece of it does not have.

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
        f"{kind_of(module)}.{name}: {', '.join(f'{k}={v}' for k, v in options.items())}"
        for module, name, options in manager.module_weight_config_triple
    }
    raise ProtrainError(
        "bitsandbytes has overrides for states of single parameters"
        f" ({'; '.join(sorted(named)) or 'GlobalOptimManager.override_config'}): a plan does not"
        " count them, and a piece of a parameter would not have them",
        key="optimizer",
        fix="remove the overrides: Trainer(..., optimizers=(AdamW8bit(...), None)) instead of"
        " optim='adamw_bnb_8bit'; bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()"
        " drops those that an earlier training has left",
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer, whose constructor may put them in groups of its own."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
