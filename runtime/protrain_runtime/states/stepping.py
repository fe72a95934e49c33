"""Calls of an optimizer's step by plain PyTorch and by plans, and whether these are the same.

Plain PyTorch calls it once, with all parameters. A plan calls it for some of them after others, on
optimizers that are made for pieces of a chunk, on threads, in other numbers and another order. That
is the same training only where a parameter's step depends on the parameter alone: `why_together`
compares the two, to the bit.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from operator import methodcaller
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.states.compositions import Composition, is_composed, taken_apart

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]

DRAWS = "its step draws random numbers"

MASTERS_OF = "masters_of"
"""The attribute in which a factory of optimizers with master weights has the user's factory."""


def in_train_mode(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, in its training mode where it has modes, as schedule-free ones do."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of its groups, by value: those that change in place later do not change here."""
    return [
        {key: by_value(option) for key, option in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def by_value(option: Any) -> Any:
    """A copy of an option, or of all of a group's, that does not change with it."""
    if isinstance(option, tuple | list):  # of betas that are tensors, say
        return type(option)(map(by_value, option)) if type(option) in (tuple, list) else option
    if isinstance(option, Mapping):
        return {key: by_value(value) for key, value in option.items()}
    return option.clone() if isinstance(option, torch.Tensor) else option


OF_PLANS = "_protrain"
"""The beginning of the names of attributes that plans put on parameters."""

NAMES = "param_names"
"""The option in which PyTorch has the names of a group's parameters."""


def group_of(options: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """A group of parameters that are tried, with these options, and some of its names."""
    names = {NAMES: [*islice(cycle(options[NAMES]), len(parameters))]} if NAMES in options else {}
    return {**options, **names, "params": parameters}


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """ProtrainError where a step has to have a closure, which it calls as often as it likes."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ProtrainError(
            f"{kind_of(optimizer)} runs forward and backward several times in a step, by its"
            " closure, and a plan is for the forwards and backwards of one step",
            key="optimizer",
            fix="an optimizer whose step needs no closure, such as AdamW; or train without a plan",
        )


def like(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerFactory:
    """A factory of optimizers like one that was made already; over its own groups, that one itself.

    So schedulers that were made for it see its steps. ProtrainError where it has states, or
    parameters that are not the model's.
    """
    kind = type(optimizer)
    if optimizer.state:
        raise ProtrainError(
            f"{kind.__name__} has states before the plan is attached: they would stay on the"
            " device",
            key="optimizer",
            fix="attach the plan before the first step (Adagrad, which makes its states when it is"
            " constructed, cannot follow one)",
        )
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ProtrainError(
            f"{kind.__name__} has {foreign} parameters that are not of the model that follows the"
            " plan",
            key="optimizer",
            fix="profile and plan the module that holds all of them; for a model that prepare()"
            " makes, give it what makes the optimizer, such as partial(AdamW, lr=3e-4)",
        )
    accepted = inspect.signature(kind).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    settings = {  # in no group, such as the bits of bitsandbytes
        name: value
        for name, value in own_attributes(optimizer).items()
        if is_plain(value) or is_plain(getattr(value, "__dict__", ...))
    }

    def make(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        given, known = list(groups), optimizer.param_groups
        if [id(group["params"]) for group in given] == [id(group["params"]) for group in known]:
            return optimizer
        made: torch.optim.Optimizer = kind(given, **options)
        vars(made).update(settings)
        return made

    return make


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Attributes that code has put on a parameter, such as a learning rate; not those of plans."""
    return {key: value for key, value in vars(parameter).items() if not key.startswith(OF_PLANS)}


def with_attributes(factory: OptimizerFactory, attributes: Mapping[str, Any]) -> OptimizerFactory:
    """The same optimizers, of parameters that have these attributes."""

    def make(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        marked = list(groups)
        for parameter in (one for group in marked for one in group["params"]):
            vars(parameter).update(attributes)
        return factory(marked)

    if (inner := getattr(factory, MASTERS_OF, None)) is not None:
        setattr(make, MASTERS_OF, with_attributes(inner, attributes))
    return make


def worker_on(
    factory: OptimizerFactory, shadows: Iterable[tuple[nn.Parameter, str, Mapping[str, Any]]]
) -> torch.optim.Optimizer:
    """An optimizer over parts of parameters: each with its parameter's name and its options."""
    groups: dict[int, dict[str, Any]] = {}  # by the options that parameters share
    for shadow, name, chosen in shadows:
        if id(chosen) not in groups:
            named: dict[str, list[str]] = {NAMES: []} if NAMES in chosen else {}
            # By value: a step that writes them, as a counter in place, is to begin where others do.
            groups[id(chosen)] = {**by_value(chosen), **named, "params": []}
        group = groups[id(chosen)]
        group["params"].append(shadow)
        if NAMES in group:
            group[NAMES].append(name)
    return factory(groups.values())


def step_alone(
    optimizer: torch.optim.Optimizer, own: Set[nn.Parameter], options: Sequence[Mapping[str, Any]]
) -> None:
    """Step on these parameters alone; what is written to groups is lost, and made later."""
    groups = optimizer.param_groups
    alone: list[dict[str, Any]] = []
    for group, chosen in zip(groups, options, strict=True):
        held = [number for number, one in enumerate(group["params"]) if one in own]
        named = {NAMES: [chosen[NAMES][n] for n in held]} if NAMES in chosen else {}
        if held:
            params = [group["params"][number] for number in held]
            alone.append({**by_value(chosen), **named, "params": params})
    if not any(one.grad is not None for group in alone for one in group["params"]):
        return
    try:
        optimizer.param_groups = alone
        optimizer.step()
    finally:
        optimizer.param_groups = groups


_SCALES = (1.0, 1e-4, 1e4, 1e-2, 1e2, 1e-3, 1e4, 1.0)
"""Scales of gradients in steps that are tried: on both sides of what a step may clip."""

FEW_STEPS = 4  # steps of a trial that only looks at ranges of a parameter

_LARGE_STATE, _SCALARS = 2048, 64
"""Elements of what an optimizer may keep besides states: of tables, and for more parameters."""

TOGETHER = "a step on all parameters is another than steps on each of them"
CHANGES = "the same steps give other bits when they are repeated"


class Range(NamedTuple):
    """Elements of a parameter. A step on them has them flat."""

    parameter: int
    first: int
    past: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A plan's calls of the optimizer in a step; plain PyTorch calls it once, for all parameters.

    pieces  ranges on each of which an optimizer steps that is made for it: offloaded chunks
    alone   parameters on which the optimizer itself steps, and on no others: updates in backward

    These come one after the other, then a step of the optimizer on the rest, which may be nothing.
    """

    pieces: Sequence[Sequence[Range]] = ()
    alone: Sequence[Sequence[int]] = ()


class Training:
    """Steps of an optimizer on parameters of its own, called as by PyTorch or as by a plan."""

    def __init__(
        self,
        factory: OptimizerFactory,
        groups: Sequence[Mapping[str, Any]],
        values: Sequence[torch.Tensor],
        calls: Calls | None = None,
    ) -> None:
        self._factory, self._calls = factory, calls or Calls()
        self.parameters = [nn.Parameter(one.clone()) for one in values]
        self.optimizer = in_train_mode(
            factory(
                group_of(options, self.parameters[number :: len(groups)])  # by turns
                for number, options in enumerate(groups)
            )
        )
        self._groups = {
            one: number
            for number, group in enumerate(self.optimizer.param_groups)
            for one in group["params"]
        }
        self._states: dict[Range, dict[str, Any]] = {}
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
                self._on_piece(spans, options, gradients, methodcaller("step"))
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
        self._look()

    def _look(self) -> None:
        """Count the tensors that the optimizer keeps."""
        holders: list[Mapping[Any, Any]] = [self.optimizer.state, *self.optimizer.param_groups]
        held = _storages([own_attributes(self.optimizer), *map(dict, holders)])
        for key in _storages(self.parameters):
            held.pop(key, None)
        self._held.append(sum(one.untyped_storage().nbytes() for one in held.values()))
        states = _storages([self.optimizer.state.get(one) for one in self.parameters])
        self.beside = sum(one.numel() for key, one in held.items() if key not in states)

    @property
    def wrote(self) -> bool:
        """Whether steps have changed the options of groups, or added some."""
        now = options_of(self.optimizer)
        return not all(map(is_equal, self._begun, now))

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
            f"{kind_of(self.optimizer)} {problem}: no plan has counted that",
            key="optimizer",
            fix=fix,
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
                    self._on_piece(spans, options, None, methodcaller(mode))
            getattr(optimizer, mode)()

    def _give(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        for number, gradient in gradients.items():
            self.parameters[number].grad = None if gradient is None else gradient.clone()

    def _on_piece(
        self,
        spans: Sequence[Range],
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
            group = self._groups[whole]
            members = self.optimizer.param_groups[group]
            names = dict(zip(members["params"], members.get(NAMES, ()), strict=False))
            shadows.append((shadow, names.get(whole, ""), options[group]))
        worker = worker_on(self._factory, shadows)
        for (shadow, *_), span in zip(shadows, spans, strict=True):
            if span in self._states:
                worker.state[shadow] = self._states[span]
        use(worker)
        for (shadow, *_), span in zip(shadows, spans, strict=True):
            self._states[span] = worker.state[shadow]

    def same_as(self, whole: "Training") -> bool:
        """Whether plain steps lead where these do: to the bit, in all that the optimizer keeps."""
        if not all(map(is_equal, self.parameters, whole.parameters)):
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
        if not all(map(is_equal, options_of(self.optimizer), options_of(whole.optimizer))):
            return False
        # Numbers that count; what a first call settles once is a flag.
        mine, its = (
            [one for one in tree_leaves(own_attributes(each)) if type(one) in (int, float)]
            for each in (self.optimizer, whole.optimizer)
        )
        return bool(mine == its)


def _alike(whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the states of ranges, side by side, are those of the whole parameter."""
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


def is_equal(one: Any, other: Any) -> bool:
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
    return len(leaves) == len(more) and all(map(is_equal, leaves, more))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The bits of floating-point values, which are compared where some are no numbers."""


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Attributes of an optimizer besides those that every optimizer has."""
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


class NoStepError(Exception):
    """The optimizer takes no step on parameters of a trial."""


def why_together(
    factory: OptimizerFactory,
    groups: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
    shape: torch.Size,
    outside: "Outside",
    *,
    pieces: bool,
) -> tuple[str, bool]:
    """Why all parameters are stepped on together, if so; and whether a step writes its groups.

    In backward, chunk by chunk, and with `pieces` in these: with other objects, in another order,
    more often. ProtrainError where the optimizer keeps more than its first step shows.
    NoStepError where it takes no parameters of this shape in these groups.
    """
    alike = [values_of(shape, dtype) * (number + 1) for number in range(3)]
    others = [values_of(torch.Size(size), dtype) for size in ([48, 64], [64])]
    in_backward = [Calls(alone=[[2], [1], [0]])]
    if pieces:
        every = [Range(number, 0, shape.numel()) for number in range(3)]
        in_backward.append(Calls(pieces=[every[2:], every[:2]]))
    usual = list(range(len(_SCALES)))
    # A parameter without a gradient, and one with a gradient that is no number.
    missing, infinite = [0, 1, -1, 2, 3], [0, 2, -2, 1]
    trials = [(alike, usual, in_backward), (alike, missing, in_backward)]
    trials.append((alike, infinite, in_backward))
    trials.append((alike + others, usual, [Calls(alone=[[4, 3], [2], [1]])]))
    writes, most_beside = False, _LARGE_STATE
    for values, steps, plans in trials:
        first = values is alike and steps is usual
        try:
            whole, draws, counts = _steps(factory, groups, values, steps, Calls(), outside)
        except Exception as error:
            if first:
                raise NoStepError(f"{kind_of(error)}: {cut(str(error))}") from error
            continue  # such steps are not for this optimizer
        if draws:
            return DRAWS, False
        if counts:
            return f"its step changes {counts!r} of its class or its module", False
        if steps is usual:  # more parameters later: what is kept for them is more
            whole.refuse_more(most_beside)
            most_beside, writes = min(most_beside, whole.beside + _SCALARS), whole.wrote
        for calls in plans:
            try:
                parts, *_ = _steps(factory, groups, values, steps, calls, outside)
            except Exception as error:  # noqa: BLE001 (the user's class)
                raised = f"{kind_of(error)}: {cut(str(error))}"
                return f"a step on some parameters alone is refused: {raised}", writes
            if not parts.same_as(whole):
                again, *_ = _steps(factory, groups, values, steps, Calls(), outside)
                return TOGETHER if again.same_as(whole) else CHANGES, writes
    return "", writes


def _steps(
    factory: OptimizerFactory,
    groups: Sequence[Mapping[str, Any]],
    values: Sequence[torch.Tensor],
    steps: Sequence[int],
    calls: Calls,
    outside: "Outside",
) -> tuple[Training, bool, str]:
    """Take steps (-1: no gradient, -2: infinite); whether they drew, and a name that counted."""
    # Itself: where tensors are fake, the functions that ask it say nothing.
    generator = torch.default_generator
    # Operator by operator, also where steps are compiled: what is looked at stays the same.
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        before = generator.get_state()
        training = Training(factory, groups, values, calls)
        seen: list[dict[tuple[int, str], Any]] = []
        for number, step in enumerate(steps):
            gradients: list[torch.Tensor | None] = [*gradients_of(values, max(step, 0))]
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
    changed = [
        name
        for (place, name), value in last.items()
        if not is_equal(first.get((place, name)), value)
    ]
    return training, draws, changed[0] if changed else ""


def gradients_of(values: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """The gradients of a step of a trial, whose sizes differ between parameters and steps."""
    found: list[torch.Tensor] = []
    for number, one in enumerate(values):
        narrow = not one.is_complex() and torch.finfo(one.dtype).max < 1e6
        scale = min(_SCALES[step], 1e2) if narrow else _SCALES[step]
        turned = (values_of(one.shape, one.dtype) + step / 4).flatten().flip(0).reshape(one.shape)
        found.append(turned * (scale * (number + 1)))
    return found


class Outside:
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
            if not name.startswith("__") and _counts(value)
        }

    def __enter__(self) -> None:
        self._before.append(self.values())

    def __exit__(self, *_: object) -> None:
        before, now = self._before.pop(), self.values()
        assert self._places is not None
        for (number, name), value in before.items():
            if is_equal(now.get((number, name)), value):
                continue
            own = vars(self._places[number]).get(name)
            if isinstance(own, torch.Tensor):
                with torch.no_grad():
                    own.copy_(value)
            elif isinstance(own, list):
                own[:] = value
            elif isinstance(own, dict):
                own.clear()
                own.update(value)
            else:
                setattr(self._places[number], name, value)


def _counts(value: object) -> bool:
    """Whether a step may count in it: a number, a container of such, a small tensor; no flag."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.is_leaf and value.numel() <= _SCALARS
    return type(value) in (int, float, list, dict) and is_plain(value)


_OF_NOBODY = ("torch", "builtins", "abc", "typing")
"""Packages whose classes count nothing that a step depends on."""


def values_of(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Different numbers on both sides of zero."""
    return torch.linspace(-1, 1, shape.numel()).reshape(shape).to(dtype)


def kind_of(value: object) -> str:
    """The name of its class."""
    return type(value).__name__
