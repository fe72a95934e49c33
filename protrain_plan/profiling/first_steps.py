"""Workspace of optimizers of whole matrices, and of those that step on parameters by several rules.

Some steps alone do an SVD of gradients, and take workspace that others do not. How often such a
step comes is the user's affair, but the first one is always of that kind: there is nothing to
project with before it. So a first step is compared with the one after it: where it calls other
operators than to make states, steps differ.

A step's code has names for what it took for one parameter while it works on the next. The same rule
gives them to the next one's; another rule (AdamW for vectors, after Muon for matrices) does not, so
that what each rule has left stands beside the workspace of every other, in whichever order
parameters come.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from protrain_runtime.devices.device import HOST
from protrain_runtime.devices.memory_meter import MemoryMeter, storage_bytes
from protrain_runtime.states.stepping import OptimizerFactory
from protrain_runtime.states.update_rules import UpdateRules, smaller, tensors_in

Kind = tuple[torch.dtype, torch.Size]
Shapes = Counter[Kind]
"""How many trainable parameters of each kind a model has."""

_LARGE, _SMALL = 2**16, 2**14  # elements of a matrix of which bytes, and operators, are seen
_MAKERS = (
    *("new_", "zeros", "ones", "empty", "full", "rand"),
    *("clone", "copy", "_to_copy", "detach", "lift"),
)
"""How names of operators begin that make a state, or copy one."""
_VIEWS = {"t", "transpose", "permute", "view", "_unsafe_view", "reshape", "alias"}
"""Names of operators that only look at a matrix from another side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """Workspace of steps.

    workspace_bytes  of a step on one parameter after the other, besides its operands, at most
    fraction         the same, over the bytes of the parameter's gradient
    together         every step has all parameters
    """

    workspace_bytes: int = 0
    fraction: float = 0.0
    together: bool = False


def first_steps(
    rules: UpdateRules, shapes: Shapes, *, device: torch.device | None = None
) -> FirstSteps:
    """Findings in first steps of an optimizer that updates some parameters whole, or by rules.

    On `device`, of the model's own shapes where steps differ; otherwise, and without a device, of
    smaller ones, whose bytes are taken to grow with the matrix. Nothing of other optimizers.
    """
    whole = {kind for kind in shapes if rules.of(*kind).reason}
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        by_rule = _by_rule(rules.factory, shapes)
        if not whole and len(by_rule) < 2:
            return FirstSteps()
        return _seen(rules, shapes, by_rule, whole, device)


def _by_rule(make: OptimizerFactory, shapes: Shapes) -> list[list[Kind]]:
    """The kinds of parameters on which a step calls the same operators, largest first."""
    found = defaultdict[frozenset[tuple[str, int]], list[Kind]](list)
    for dtype, shape in sorted(shapes, key=lambda kind: -kind[1].numel()):
        stepper = _Stepper(make, [(dtype, smaller(shape, _SMALL))], HOST)
        stepper.step()
        called = _operators(stepper)
        found[frozenset(called.items())].append((dtype, shape))
    return list(found.values())


def _seen(
    rules: UpdateRules,
    shapes: Shapes,
    by_rule: Sequence[Sequence[Kind]],
    whole: Set[Kind],
    device: Any,
) -> FirstSteps:
    make, own = rules.factory, dict[Kind, int]()
    differs = {
        kind: kind in whole and _differs(make, kind[0], smaller(kind[1], _SMALL))
        for kinds in by_rule
        for kind in kinds
    }
    for kind, is_slow in differs.items():
        dtype, shape = kind
        few = smaller(shape, _LARGE)
        # The first step's bytes, or those of the one after it.
        taken = _taken(make, [(dtype, few)], HOST)[0 if is_slow else 1]
        own[kind] = round(taken * shape.numel() / few.numel())
        if is_slow and device is not None:
            own[kind] = _taken(make, [kind], device)[0]
    most, fraction = 0, 0.0
    beside = [_beside(make, shapes, kinds, differs) for kinds in by_rule]
    for number, kinds in enumerate(by_rule):
        left = 0
        for other, before in enumerate(by_rule):
            if other == number:
                continue
            # Of other rules, the kinds that are largest tell; what piles up does for all.
            pairs = [(a, b) for a in before[:_MOST_KINDS] for b in kinds[:_MOST_KINDS]]
            found = max(_left(make, a, b, first=differs[a]) for a, b in pairs)
            left += found + beside[other].piled
        besides = beside[number]
        top = max(besides.whole, max(own[kind] for kind in kinds) + max(besides.each.values()))
        most = max(most, left + top)
        if len(by_rule) == 1 and not besides.piled:
            of_kinds = ((own[kind] + besides.each[kind]) / _gradient_bytes(kind) for kind in kinds)
            fraction = max(fraction, *of_kinds)
        else:
            fraction = max(fraction, (left + top) / max(map(_gradient_bytes, shapes)))
    together = all(rules.of(*kind).together for kind in shapes)
    return FirstSteps(workspace_bytes=most, fraction=fraction, together=together)


@dataclass(frozen=True, slots=True)
class _Besides:
    """Bytes that a rule leaves of parameters beside its workspace of the next.

    each   of one parameter, by kind
    piled  of all of them, where what a step takes grows with each; else 0
    whole  the step's workspace at its most, in that case
    """

    each: dict[Kind, int]
    piled: int
    whole: int


def _beside(
    make: OptimizerFactory, shapes: Shapes, kinds: Sequence[Kind], differs: Mapping[Kind, bool]
) -> _Besides:
    if sum(shapes[kind] for kind in kinds) < 2:
        return _Besides(dict.fromkeys(kinds, 0), 0, 0)
    each, piled, base = dict[Kind, int](), 0, 0
    for kind in kinds:
        each[kind], further, most = _left_alike(make, kind, first=differs[kind])
        # Names of the last parameter are given to the next: one more would add nothing.
        if further > _GRAIN:
            piled += further * shapes[kind]
            base = max(base, most - MANY * further)
    return _Besides(each, piled, piled + base if piled else 0)


_GRAIN = 256
"""Bytes that do not count as growth: numbers of each parameter."""


def _gradient_bytes(kind: Kind) -> int:
    dtype, shape = kind
    return shape.numel() * dtype.itemsize


_MOST_KINDS = 3
"""Shapes of a rule that are tried beside those of another."""


def _left(make: OptimizerFactory, one: Kind, other: Kind, *, first: bool) -> int:
    """Bytes that a step on a parameter leaves while the step on another one runs, at most.

    States that the first step makes are none.
    """
    (dtype, shape), small = one, smaller(one[1], _LARGE)
    stepper = _Stepper(make, [(dtype, small), (other[0], smaller(other[1], _SMALL))], HOST)
    if not first:
        stepper.step()
    mode = _Beside(stepper)
    with mode:
        stepper.step()
    left = max(mode.left, default=0) - (mode.bytes_of_first(stepper.states(0)) if first else 0)
    return max(0, round(left * shape.numel() / small.numel()))


def _left_alike(make: OptimizerFactory, kind: Kind, *, first: bool) -> tuple[int, int, int]:
    """Bytes that a step takes more with a second parameter of a kind, and with one beside MANY.

    Then those that it takes with MANY. States that the first step makes are none.
    """
    dtype, shape = kind
    step, found = 0 if first else 1, list[tuple[int, int]]()
    for few, number in ((smaller(shape, _LARGE), 1), (smaller(shape, _SMALL), MANY)):
        before, after = (_taken(make, [(dtype, few)] * n, HOST)[step] for n in (number, number + 1))
        states = 0
        if first:
            stepper = _Stepper(make, [(dtype, few)], HOST)
            stepper.step()
            states = storage_bytes(stepper.states(0))
        scale = shape.numel() / few.numel()
        more, all_of = max(0, after - before - states), before - number * states
        found.append((round(more * scale), round(all_of * scale)))
    (second, _), (further, most) = found
    return second, further, most


MANY = 16
"""Parameters beside which one more shows whether a step's workspace grows with each: that of fewer,
copies of all gradients, say, may be less than a step on one of them takes afterwards."""


class _Beside(TorchDispatchMode):
    """Bytes that a step on two parameters has made for the first one, and still has.

    After every operator, from where it turns to the second one.
    """

    def __init__(self, stepper: "_Stepper") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left: list[int] = []
        self._made: list[tuple[int, StorageWeakRef, int, bool]] = []
        ours = [
            [parameter, *tensors_in([parameter.grad]), *stepper.states(number)]
            for number, parameter in enumerate(stepper.parameters)
        ]
        self._operands = {t.untyped_storage()._cdata for each in ours for t in each}
        self._second = {t.untyped_storage()._cdata for t in ours[1]}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        turned = bool(self.left) or any(t.untyped_storage()._cdata in self._second for t in given)
        result = func(*args, **(kwargs or {}))
        alive = {key for key, memory, *_ in self._made if not memory.expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._operands | alive:
                    entry = storage._cdata, StorageWeakRef(storage), storage.nbytes(), turned
                    self._made.append(entry)
                    alive.add(storage._cdata)
        self._made = [entry for entry in self._made if not entry[1].expired()]
        if turned:
            self.left.append(sum(e[2] for e in self._made if not e[3]))
        return result

    def bytes_of_first(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of what was made for the first parameter, of these tensors."""
        kept = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(e[2] for e in self._made if e[0] in kept and not e[3])


class _Stepper:
    """An optimizer of a parameter of each kind, with gradients as if by chance."""

    def __init__(self, make: OptimizerFactory, kinds: Sequence[Kind], device: Any) -> None:
        chance = torch.Generator().manual_seed(0)
        self.parameters = [
            nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for dtype, shape in kinds
        ]
        for each in self.parameters:
            each.grad = torch.randn(each.shape, generator=chance).to(device, each.dtype)
        self.optimizer = make([{"params": self.parameters}])

    def step(self) -> None:
        self.optimizer.step()

    def states(self, number: int) -> list[torch.Tensor]:
        """The tensors of a parameter's state."""
        return tensors_in(dict(self.optimizer.state.get(self.parameters[number], {})))


def _taken(make: OptimizerFactory, kinds: Sequence[Kind], device: Any) -> tuple[int, int]:
    """Bytes that the first step and the second one take on these parameters, at most.

    The first one makes the states, which count: a slow step later on may make them anew.
    """
    optimizer = _Stepper(make, kinds, device).optimizer
    return step_bytes(optimizer, device), step_bytes(optimizer, device)


def step_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes that a step of an optimizer takes, at most."""
    with MemoryMeter(device) as meter:
        meter.mark("step")
        optimizer.step()
    segment = meter.segments[0]
    return segment.peak_bytes - segment.start_bytes


class _Operators(TorchDispatchMode):
    """Counts the operators that work on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))
        if name not in _VIEWS and not name.startswith(_MAKERS) and tensors:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def _operators(stepper: _Stepper) -> Counter[str]:
    mode = _Operators()
    with mode:
        stepper.step()
    return mode.found


def _differs(make: OptimizerFactory, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a first step calls operators that the second one does not call, or less often."""
    stepper = _Stepper(make, [(dtype, shape)], HOST)
    return bool(_operators(stepper) - _operators(stepper))
