"""Trials of an optimizer: plain PyTorch's steps against a plan's, bit for bit.

Plain PyTorch calls the optimizer once a step, with all parameters. A plan calls it for some
parameters after others, on optimizers made for pieces of a chunk, on threads, more often and in
another order. Training is the same only if a parameter's step depends on that parameter alone.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.states.compositions import Composition, taken_apart, tensors_in
from protrain_runtime.states.stepping import (
    NAMES,
    OptimizerFactory,
    groups_of,
    in_train_mode,
    is_plain,
    options_of,
    own_attributes,
    step_alone,
)

DRAWS = "its step draws random numbers"
TOGETHER = "a step on all parameters is another than steps on each of them"
CHANGES = "the same steps give other bits when they are repeated"

_SCALES = (1.0, 1e-4, 1e4, 1e-2, 1e2, 1e-3, 1e4, 1.0)
"""Gradient scales of trial steps: on both sides of a step's clipping threshold."""

_LARGE_STATE, _SCALARS = 2048, 64
"""Most elements beside states: of tables, and of growth per parameter."""


class ElementRange(NamedTuple):
    """A range of one of several tensors, flat for a step on it."""

    tensor: int
    start: int
    stop: int


class Training:
    """An optimizer's steps on parameters of its own, called as by PyTorch or as by a plan.

    `groups` are options; parameters are dealt to the groups in turn. All parameters have the
    `attributes`, which an optimizer may read. Plain PyTorch calls the optimizer once per step. A
    plan calls one made for each of `pieces`, ranges of parameters (offloaded chunks); then the
    optimizer itself for each of `alone`, parameters by number (updates in backward), and for the
    rest, if any.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        attributes: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        values: Sequence[torch.Tensor],
        *,
        pieces: Sequence[Sequence[ElementRange]] = (),
        alone: Sequence[Sequence[int]] = (),
    ) -> None:
        self._factory, self._attributes = factory, attributes
        self._pieces, self._alone = pieces, alone
        self.parameters = [nn.Parameter(one.clone()) for one in values]
        members: list[tuple[nn.Parameter, str, Mapping[str, Any]]] = []
        for number, parameter in enumerate(self.parameters):
            vars(parameter).update(attributes)
            turn, group = divmod(number, len(groups))
            names = groups[group].get(NAMES) or [""]
            members.append((parameter, names[turn % len(names)], groups[group]))
        self.optimizer = in_train_mode(factory(groups_of(members)))
        # The constructor may have put them in groups of its own.
        self._places = {
            parameter: (number, name)
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter, name in zip(
                group["params"], group.get(NAMES) or repeat(""), strict=False
            )
        }
        self._states: dict[ElementRange, dict[str, Any]] = {}
        self._begun = options_of(self.optimizer)
        # The generator itself: with fake tensors, the functions that read it fail silently.
        self._random = torch.default_generator.get_state()
        self._held: list[int] = []  # bytes of all its tensors, after every step
        self.beside = 0  # elements of its tensors outside parameters' states

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One step; None for a parameter without a gradient."""
        options = options_of(self.optimizer)
        rest = dict(enumerate(gradients))
        for piece in self._pieces:
            spans = [span for span in piece if rest[span.tensor] is not None]
            if spans:
                self._on_piece(spans, options, gradients)
        for span in (span for piece in self._pieces for span in piece):
            rest[span.tensor] = None
        for numbers in self._alone:
            own = {number: rest.pop(number) for number in numbers}
            self._give(own)
            step_alone(self.optimizer, {self.parameters[number] for number in own}, options)
            self._give(dict.fromkeys(own))
        self._give(rest)
        self.optimizer.step()
        self._give(dict.fromkeys(rest))
        # The optimizer's tensors.
        optimizer = self.optimizer
        held = _storages([own_attributes(optimizer), optimizer.state, optimizer.param_groups])
        states = _storages([optimizer.state.get(one) for one in self.parameters])
        for key in _storages(self.parameters):
            held.pop(key, None)
        self._held.append(sum(one.untyped_storage().nbytes() for one in held.values()))
        self.beside = sum(one.numel() for key, one in held.items() if key not in states)

    def _give(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        for number, gradient in gradients.items():
            self.parameters[number].grad = None if gradient is None else gradient.clone()

    def _on_piece(
        self,
        spans: Sequence[ElementRange],
        options: Sequence[Mapping[str, Any]],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Step on these ranges with an optimizer made for them."""
        members: list[tuple[nn.Parameter, str, Mapping[str, Any]]] = []
        for number, first, past in spans:
            whole, gradient = self.parameters[number], gradients[number]
            assert gradient is not None
            shadow = nn.Parameter(whole.detach().flatten()[first:past])
            vars(shadow).update(self._attributes)
            shadow.grad = gradient.flatten()[first:past].clone()
            group, name = self._places[whole]
            members.append((shadow, name, options[group]))
        worker = self._factory(groups_of(members))
        for (shadow, *_), span in zip(members, spans, strict=True):
            if span in self._states:
                worker.state[shadow] = self._states[span]
        worker.step()
        self._states |= {
            span: worker.state[shadow] for (shadow, *_), span in zip(members, spans, strict=True)
        }

    def states_of(self, number: int) -> dict[str, Any]:
        """A parameter's states, taken apart."""
        return taken_apart(self.optimizer.state[self.parameters[number]])

    @property
    def draws(self) -> bool:
        """Whether steps have drawn random numbers."""
        return not torch.equal(self._random, torch.default_generator.get_state())

    @property
    def wrote(self) -> bool:
        """Whether steps changed or added group options."""
        return not is_equal(self._begun, options_of(self.optimizer))

    def refuse_more(self, most_beside: int) -> None:
        """ProtrainError where the optimizer keeps more than its first step made, or beside."""
        if self._held[-1] > self._held[0]:
            problem, fix = (
                "keeps more tensors after later steps than after its first one",
                "an optimizer whose first step makes all of its states",
            )
        elif self.beside > most_beside:
            problem, fix = (
                "keeps tensors in its attributes, its groups, or a state that is no parameter's",
                "keep them in self.state[parameter]",
            )
        else:
            return
        raise ProtrainError(
            f"{type(self.optimizer).__name__} {problem}: no plan has counted that",
            key="optimizer",
            fix=fix,
        )

    def same_as(self, whole: "Training") -> bool:
        """Whether plain steps give the same result: bit for bit, in all the optimizer's values."""
        if not is_equal(self.parameters, whole.parameters):
            return False
        for number, parameter in enumerate(whole.parameters):
            spans = sorted(span for span in self._states if span.tensor == number)
            own = [self._states[span] for span in spans] or [
                self.optimizer.state.get(self.parameters[number], {})
            ]
            if not _alike(whole.optimizer.state.get(parameter, {}), own):
                return False
        if not is_equal(options_of(self.optimizer), options_of(whole.optimizer)):
            return False
        # Numbers may be counters; a value set once by a first call is a flag.
        mine, its = (
            [one for one in tree_leaves(own_attributes(each)) if type(one) in (int, float)]
            for each in (self.optimizer, whole.optimizer)
        )
        return bool(mine == its)


def _alike(whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the ranges' states, joined, equal the whole parameter's."""
    states = [taken_apart(one) for one in parts]
    own = taken_apart(whole)
    if any(own.keys() != each.keys() for each in states):
        return False
    for key, one in own.items():
        several = [each[key] for each in states]
        if isinstance(one, Composition) or all(is_equal(one, each) for each in several):
            continue
        if not (isinstance(one, torch.Tensor) and all(each.numel() for each in several)):
            return False
        if not is_equal(one.flatten(), torch.cat([each.flatten() for each in several])):
            return False
    return True


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The bits of floating-point values, compared in place of NaNs."""


def is_equal(one: Any, other: Any) -> bool:
    """Whether two state values are equal: tensors bit for bit, objects by contents."""
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
    return len(leaves) == len(more) and all(map(is_equal, leaves, more))


def _storages(values: object) -> dict[int, torch.Tensor]:
    """The largest tensor per storage in containers and objects, except modules."""
    found: dict[int, torch.Tensor] = {}
    for one in tensors_in(values, modules=False):
        key = one.untyped_storage()._cdata
        found[key] = max(found.get(key, one), one, key=torch.Tensor.numel)
    return found


# --- what all parameters have to do with one ------------------------------------------------------


def why_together(
    train: Callable[..., Training],
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    shape: torch.Size,
    *,
    pieces: bool,
) -> tuple[str, bool]:
    """The reason to update all parameters together, if any; and whether a step writes its groups.

    In backward, chunk by chunk, and with `pieces` in these: with other objects, in another order,
    more often. ProtrainError if the optimizer keeps more than its first step shows.
    """
    alike = [values_of(shape, dtype) * (number + 1) for number in range(3)]
    others = [values_of(torch.Size(size), dtype) for size in ([48, 64], [64])]
    in_backward: list[dict[str, Any]] = [{"alone": [[2], [1], [0]]}]
    if pieces:
        every = [ElementRange(number, 0, shape.numel()) for number in range(3)]
        in_backward.append({"pieces": [every[2:], every[:2]]})
    usual = list(range(len(_SCALES)))
    # A parameter without a gradient, and one with a NaN or infinite gradient.
    missing, infinite = [0, 1, -1, 2, 3], [0, 2, -2, 1]
    trials = [(alike, usual, in_backward), (alike, missing, in_backward)]
    trials.append((alike, infinite, in_backward))
    trials.append((alike + others, usual, [{"alone": [[4, 3], [2], [1]]}]))
    writes, most_beside = False, _LARGE_STATE
    for values, steps, plans in trials:
        try:
            whole, counts = _trained(train, groups, values, steps, {})
        except Exception as error:  # noqa: BLE001 (the user's class)
            if values is not alike or steps is not usual:
                continue  # the optimizer rejects such steps
            if len(groups) > 1:  # perhaps also other groups' options for this shape
                return why_together(train, groups[:1], dtype, shape, pieces=pieces)
            raised = f"{type(error).__name__}: {cut(str(error))}"
            return f"it takes no step on several parameters: {raised}", writes
        if whole.draws:
            return DRAWS, False
        if counts:
            return f"its step changes {counts!r} of its class or its module", False
        if steps is usual:  # growth with more parameters
            whole.refuse_more(most_beside)
            most_beside, writes = min(most_beside, whole.beside + _SCALARS), whole.wrote
        for calls in plans:
            try:
                parts, _ = _trained(train, groups, values, steps, calls)
            except Exception as error:  # noqa: BLE001 (the user's class)
                raised = f"{type(error).__name__}: {cut(str(error))}"
                return f"a step on some parameters alone is refused: {raised}", writes
            if not parts.same_as(whole):
                again, _ = _trained(train, groups, values, steps, {})
                return TOGETHER if again.same_as(whole) else CHANGES, writes
    return "", writes


def _trained(
    train: Callable[..., Training],
    groups: Sequence[Mapping[str, Any]],
    values: Sequence[torch.Tensor],
    steps: Sequence[int],
    calls: Mapping[str, Any],
) -> tuple[Training, str]:
    """Take steps (-1: no gradient, -2: infinite); and a name outside of the optimizer that counts.

    Operator by operator, also where steps are compiled: what is looked at stays the same.
    """
    with torch.compiler.set_stance("force_eager"):
        training = train(groups, values, **calls)
        outside: list[Mapping[tuple[Any, str], Any]] = []
        for number, step in enumerate(steps):
            gradients: list[torch.Tensor | None] = [*gradients_of(values, max(step, 0))]
            if step == -1:
                gradients[1] = None
            elif step == -2 and gradients[0] is not None:
                gradients[0].view(-1)[0] = torch.inf
            training.step(gradients)
            if number in (0, len(steps) - 1):
                outside.append(_outside(type(training.optimizer)))
    first, last = outside
    changed = (key for key, value in last.items() if not is_equal(first.get(key), value))
    return training, next(changed, (None, ""))[1]


def gradients_of(values: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """The gradients of a trial step, of different sizes between parameters and steps."""
    found: list[torch.Tensor] = []
    for number, one in enumerate(values):
        narrow = not one.is_complex() and torch.finfo(one.dtype).max < 1e6
        scale = min(_SCALES[step], 1e2) if narrow else _SCALES[step]
        turned = (values_of(one.shape, one.dtype) + step / 4).flatten().flip(0).reshape(one.shape)
        found.append(turned * (scale * (number + 1)))
    return found


def values_of(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Distinct numbers on both sides of zero."""
    return torch.linspace(-1, 1, shape.numel()).reshape(shape).to(dtype)


# --- what a step counts outside of its optimizer --------------------------------------------------

_OF_NOBODY = ("torch", "builtins", "abc", "typing")
"""Packages whose classes have no counters that a step depends on."""


def _outside(kind: type) -> dict[tuple[Any, str], Any]:
    """Copies of plain values in an optimizer's classes and their modules, by place and name."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _OF_NOBODY]
    modules = [sys.modules.get(name) for name in dict.fromkeys(each.__module__ for each in own)]
    return {
        (place, name): copy.deepcopy(value)
        for place in (*own, *modules)
        for name, value in [*getattr(place, "__dict__", {}).items()]
        if not name.startswith("__") and _counts(value)
    }


def _counts(value: object) -> bool:
    """Whether a value may be a counter: a number, a container of such, a small tensor; no flag."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.is_leaf and value.numel() <= _SCALARS
    return type(value) in (int, float, list, dict) and is_plain(value)


@contextmanager
def trying(kind: type) -> Iterator[None]:
    """Run trials on tensors of their own, and restore random and outer state.

    The random generator and counters outside the optimizer are reset.
    """
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        before = _outside(kind)
        try:
            yield
        finally:
            now = _outside(kind)
            for place, value in before.items():
                if not is_equal(now.get(place), value):
                    _put_back(*place, value)


def _put_back(place: Any, name: str, value: Any) -> None:
    """Restore an attribute in place: code may hold other references to the object."""
    own = vars(place).get(name)
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            own.copy_(value)
    elif isinstance(own, list):
        own[:] = value
    elif isinstance(own, dict):
        own.clear()
        own.update(value)
    else:
        setattr(place, name, value)
