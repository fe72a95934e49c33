"""`optimizer_cost`: bytes that an optimizer takes to step on a model's parameters, by trial.

An elementwise step takes the same part of any gradient, which is measured on one (`workspace`). Of
other optimizers, and of those with several rules (Muon for matrices, AdamW for vectors), steps are
measured on the model's shapes (`workspace_by_rule`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from protrain_plan.models.building import parameter_dtype
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory, works_in_place
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import PIECE_ALIGNMENT
from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.profile import (
    DType,
    OptimizerCost,
    Precision,
    Unit,
    Workload,
)
from protrain_runtime.contract.units import four_digits
from protrain_runtime.devices.device import HOST
from protrain_runtime.devices.memory_meter import MemoryMeter, storage_bytes
from protrain_runtime.states.compositions import tensors_in
from protrain_runtime.states.stepping import OptimizerFactory
from protrain_runtime.states.update_rules import UpdateRules, smaller


class Workspace(NamedTuple):
    """The fields of `OptimizerCost` of these names.

    workspace_fraction  of a step on one parameter after another, over the bytes of its gradient
    at_once             it grows with the number of parameters
    workspace_bytes     of a step on all of the model's parameters; 0: the fraction says all
    """

    workspace_fraction: float = 0.0
    at_once: bool = False
    workspace_bytes: int = 0


def optimizer_cost(
    model: nn.Module, workload: Workload, name: str, *, device: torch.device | None, sparse: bool
) -> OptimizerCost:
    """The cost of a step on the model's parameters, without speeds.

    Steps run on `device`; None: here, for a device of the workload's type. `sparse`: some gradients
    are.
    """
    rules = UpdateRules(optimizer_factory(name, workload.precision))
    trained = [p for p in model.parameters() if p.requires_grad]
    on_card = device is None and is_accelerator(workload.device)
    elementwise = workspace(
        # On cards those kernels work in place, as fused ones do.
        DEFAULT_OPTIMIZER if on_card and works_in_place(name) else name,
        workload.dtype,
        workload.precision,
        device=device or HOST,
        beside={p.dtype for p in trained},
        sparse=sparse,
        strided=not all(p.is_contiguous() for p in trained),
        on_card=on_card,
    )
    shapes = Counter((p.dtype, p.shape) for p in trained)
    by_rule = workspace_by_rule(rules, shapes, device=device)
    # Of a step that always has all parameters, the bytes of all are measured.
    together = bool(shapes) and all(rules.of(*kind).together for kind in shapes)
    at_once = elementwise.at_once and not together
    # Masters have room for the gradients of a whole chunk: theirs grows with the chunk.
    known = not at_once and workload.precision != "master"
    fraction = max(elementwise.workspace_fraction, by_rule.workspace_fraction)
    return OptimizerCost(
        name=name,
        host_parameters_per_s=0.0,
        device_parameters_per_s=0.0,
        workspace_fraction=four_digits(fraction),
        workspace_bytes=by_rule.workspace_bytes if known else 0,
        at_once=at_once,
        **cuts_of(model, rules),
    )


def cuts_of(model: nn.Module, rules: UpdateRules) -> dict[str, int]:
    """`OptimizerCost.block` and `.cut_elements` for the model's trainable parameters."""
    found = [rules.of(p.dtype, p.shape) for p in model.parameters() if p.requires_grad]
    return {
        "block": 0 if any(rule.reason for rule in found) else max(rule.block for rule in found),
        "cut_elements": max([PIECE_ALIGNMENT, *(rule.shift for rule in found)]),
    }


def told_of_steps(
    units: Iterable[Unit], workload: Workload, cost: OptimizerCost
) -> tuple[Unit, ...]:
    """The units with `largest_gradient_bytes`, if the optimizer's step needs memory by them."""
    by_largest = cost.workspace_fraction and not cost.at_once and workload.precision != "master"
    if by_largest:
        return tuple(units)
    return tuple(replace(unit, largest_gradient_bytes=0) for unit in units)


# --- steps that are measured ----------------------------------------------------------------------


def _measured(
    make: OptimizerFactory,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor],
    device: torch.device,
) -> tuple[int, int, int]:
    """Bytes that a first step and a second one take at most, and those of the states they make.

    The first of the parameters have these gradients.
    """
    optimizer = make([{"params": list(parameters)}])
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = gradient
    taken: list[int] = []
    for _ in range(2):
        with MemoryMeter(device) as meter:
            meter.mark("step")
            optimizer.step()
        taken.append(meter.segments[0].peak_bytes - meter.segments[0].start_bytes)
    first, second = taken
    return first, second, storage_bytes(tensors_in(optimizer.state))


MANY = 16
"""Parameters beside which one more shows whether a step's workspace grows with each: that of fewer,
copies of all gradients, say, may be less than a step on one of them takes afterwards."""


def workspace(
    optimizer: str,
    dtype: DType,
    precision: Precision,
    *,
    device: torch.device = HOST,
    beside: Set[torch.dtype] = frozenset(),
    sparse: bool = False,
    strided: bool = False,
    on_card: bool = False,
) -> Workspace:
    """A step's workspace, as a fraction of the gradient's bytes.

    The most of several: parameters have the workload's dtype, and those `beside` it; `sparse` where
    some gradients are, `strided` where some are dense and not contiguous, such as in channels-last
    order: fused kernels of a CPU copy those. `on_card`: as on an accelerator, where PyTorch takes
    `foreach` by default.
    """
    stored = parameter_dtype(dtype, precision)
    dtypes = sorted({stored, *beside}, key=str)
    factory = optimizer_factory(optimizer, precision)

    def make(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        made = factory(groups)
        for group in made.param_groups if on_card else ():
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        return made

    cases = [(each, False, False) for each in dtypes]
    cases += [(stored, True, False)] * sparse + [(stored, False, True)] * strided
    most, at_once = 0.0, False
    for each, is_sparse, is_strided in cases:
        # Of a large parameter and two: a loop still has a name for what the last one took.
        extra: list[float] = []
        for rows, count in ((2**14, 1), (2**14, 2), (2**8, MANY), (2**8, MANY + 1)):
            large = [torch.zeros(rows, 2**6, dtype=each) for _ in range(count)]
            large = [values.t() for values in large] if is_strided else large
            small = [torch.zeros(64, dtype=one) for one in dtypes if one != each]
            every = [nn.Parameter(values.to(device)) for values in (*large, *small)]
            gradients = [_gradient_of(parameter, sparse=is_sparse) for parameter in every[:count]]
            _, taken, _ = _measured(make, every, gradients, device)
            extra.append(taken / storage_bytes(gradients[:1]))
        together = extra[3] - extra[2] > _GROWTH
        most = max(most, extra[0] if together else max(extra[:2]))
        at_once = at_once or together
    return Workspace(workspace_fraction=four_digits(most), at_once=at_once)


_GROWTH = 0.1
"""Least part of a gradient that one more of many parameters adds to what a step takes at once."""


def refuse_sparse(names: Set[str], optimizer: str, workload: Workload) -> None:
    """ProtrainError where the optimizer takes no sparse gradients, and these parameters have some.

    Asked is the optimizer itself.
    """
    if not names:
        return
    stored = parameter_dtype(workload.dtype, workload.precision)
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=stored))
    parameter.grad = _gradient_of(parameter, sparse=True)
    stepper = optimizer_factory(optimizer, workload.precision)([parameter])
    try:
        stepper.step()
    except RuntimeError as error:
        raise ProtrainError(
            f"the gradient of '{min(names)}' is sparse, and the optimizer {optimizer} takes none:"
            f" {error}",
            source=workload.model,
            key="optimizer",
            fix="give the embedding dense gradients (sparse=False), or --optimizer sgd",
        ) from error


def _gradient_of(parameter: nn.Parameter, *, sparse: bool) -> torch.Tensor:
    """Zeros; sparse ones name every row, the last one first, and are not coalesced."""
    zeros = torch.zeros_like(parameter)
    if not sparse:
        return zeros
    rows = torch.arange(len(zeros) - 1, -1, -1, device=zeros.device)[None]
    return torch.sparse_coo_tensor(rows, zeros, zeros.shape)


# --- rules of a step ------------------------------------------------------------------------------

Kind = tuple[torch.dtype, torch.Size]

_LARGE, _SMALL = 2**16, 2**14
"""Elements of a parameter of which bytes are measured, and of one of many, or of which operators
are seen. What a step takes is taken to grow with the parameter."""

_GRAIN = 256
"""Bytes that do not count as growth: numbers of each parameter."""


def workspace_by_rule(
    rules: UpdateRules, shapes: Counter[Kind], *, device: torch.device | None = None
) -> Workspace:
    """Bytes of a step on parameters of these shapes, of which there are so many.

    Nothing of optimizers that update all parameters by one rule and in pieces. A rule is known by
    the operators that its steps call.

    Some steps alone do an SVD of gradients. How often such a step comes is the user's affair, but
    the first one is always of that kind: there is nothing to project with before it. Where a first
    step calls other operators than to make states, its bytes count, and so do its states, which a
    slow step later on may make anew; on `device` those of the model's own shapes.

    A step's code has names for what it took for one parameter while it works on the next. The same
    rule gives them to the next one's; another rule does not. So the workspaces of rules add up.
    """
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        by_rule = defaultdict[frozenset[tuple[str, int]], list[tuple[Kind, bool]]](list)
        for kind in sorted(shapes, key=lambda kind: -kind[1].numel()):
            first, second = _operators(rules.factory, kind)
            slow = bool(rules.of(*kind).reason) and bool(first - second)
            by_rule[frozenset(second.items())].append((kind, slow))
        if len(by_rule) < 2 and not any(rules.of(*kind).reason for kind in shapes):
            return Workspace()
        fractions, left, further, piles = [0.0], 0, 0, False
        for kinds in by_rule.values():
            several = sum(shapes[kind] for kind, _ in kinds) > 1
            found = [(kind, _of_kind(rules.factory, kind, slow, device)) for kind, slow in kinds]
            own = max(one.alone for _, one in found)
            most = own + max(one.second for _, one in found) * several
            piled = sum(one.further * shapes[kind] for kind, one in found) * several
            if piled:
                # Names of the last parameter are given to the next: one more would add nothing.
                most = max(most, piled + max(one.fixed for _, one in found if one.further))
                own, piles = most, True
            left += own
            further = max(further, most - own)
            fractions += [
                (one.alone + one.second * several) / _gradient_bytes(kind) for kind, one in found
            ]
    total = left + further
    if len(by_rule) > 1 or piles:  # whose bytes are of no single parameter
        fractions = [total / max(map(_gradient_bytes, shapes))]
    return Workspace(workspace_fraction=max(fractions), workspace_bytes=total)


def _gradient_bytes(kind: Kind) -> int:
    dtype, shape = kind
    return shape.numel() * dtype.itemsize


class _OfKind(NamedTuple):
    """Bytes that a step takes on parameters of one kind.

    alone    on one of them
    second   more with another one
    further  more with each one beside MANY; 0 where that is next to nothing
    fixed    with MANY, without those
    """

    alone: int
    second: int
    further: int
    fixed: int


def _of_kind(
    make: OptimizerFactory, kind: Kind, slow: bool, device: torch.device | None
) -> _OfKind:
    """Measure steps on one, two and many; `slow`: first steps, whose states count for one alone."""
    dtype, shape = kind

    def taken(shape: torch.Size, count: int, where: torch.device = HOST) -> tuple[int, int]:
        """The step's bytes, and those of the states that it makes."""
        parameters = [
            nn.Parameter(torch.zeros(shape, dtype=dtype, device=where)) for _ in range(count)
        ]
        first, second, states = _measured(make, parameters, _by_chance(parameters), where)
        return (first, states) if slow else (second, 0)

    large, small = smaller(shape, _LARGE), smaller(shape, _SMALL)
    (one, of_one), (two, of_two) = taken(large, 1), taken(large, 2)
    (many, of_many), (more, of_more) = taken(small, MANY), taken(small, MANY + 1)
    scale, of_small = shape.numel() / large.numel(), shape.numel() / small.numel()
    further = round(max(0, (more - of_more) - (many - of_many)) * of_small)
    further = further if further > _GRAIN else 0
    return _OfKind(
        alone=round(one * scale) if not slow or device is None else taken(shape, 1, device)[0],
        second=round(max(0, (two - of_two) - (one - of_one)) * scale),
        further=further,
        fixed=round((many - of_many) * of_small) - MANY * further,
    )


def _by_chance(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Gradients as if by chance, the same in every call."""
    chance = torch.Generator().manual_seed(0)
    return [
        torch.randn(each.shape, generator=chance).to(each.device, each.dtype) for each in parameters
    ]


_MAKERS = (
    *("new_", "zeros", "ones", "empty", "full", "rand"),
    *("clone", "copy", "_to_copy", "detach", "lift"),
)
"""Prefixes of the names of operators that make or copy a state."""
_VIEWS = {"t", "transpose", "permute", "view", "_unsafe_view", "reshape", "alias"}
"""Names of operators that only look at a matrix from another side."""


class _Operators(TorchDispatchMode):
    """Counts the operators that work on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))
        if name not in _VIEWS and not name.startswith(_MAKERS) and tensors:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def _operators(make: OptimizerFactory, kind: Kind) -> list[Counter[str]]:
    """The operators that a first step and a second one call on a small parameter of this kind."""
    dtype, shape = kind
    parameter = nn.Parameter(torch.zeros(smaller(shape, _SMALL), dtype=dtype))
    (parameter.grad,) = _by_chance([parameter])
    optimizer = make([{"params": [parameter]}])
    found: list[Counter[str]] = []
    for _ in range(2):
        with _Operators() as mode:
            optimizer.step()
        found.append(mode.found)
    return found
