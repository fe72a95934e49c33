"""Workspace of optimizers of whole matrices, some of whose steps alone do an SVD of gradients.

Such a step takes workspace that others do not. How often it comes is the user's affair, but the
first one is always of that kind: there is nothing to project with before it. So a first step is
compared with the one after it: where it calls other operators than to make states, steps differ.
"""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """Workspace of steps.

    workspace_bytes  of a step on one parameter after the other, besides its operands, at most
    fraction         the same, over the bytes of the parameter's gradient
    """

    workspace_bytes: int = 0
    fraction: float = 0.0


def first_steps(
    rules: UpdateRules, shapes: Shapes, *, device: torch.device | None = None
) -> FirstSteps:
    """Findings in first steps of an optimizer that updates some parameters whole.

    On `device`, of the model's own shapes where steps differ; otherwise, and without a device, of
    smaller ones, whose bytes are taken to grow with the matrix. Nothing of other optimizers.
    """
    whole = {kind for kind in shapes if rules.of(*kind).reason}
    if not whole:
        return FirstSteps()
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        return _seen(rules.factory, shapes, whole, device)


def _seen(make: OptimizerFactory, shapes: Shapes, whole: Set[Kind], device: Any) -> FirstSteps:
    own, left_over, fraction = 0, 0, 0.0
    for dtype, shape in shapes:
        differs = (dtype, shape) in whole and _differs(make, dtype, smaller(shape, _SMALL))
        few = smaller(shape, _LARGE)
        alone, beside = (_taken(make, dtype, few, number, HOST) for number in (1, 2))
        kind = 0 if differs else 1  # the first step's bytes, or those of the one after it
        left = max(0, beside[kind] - alone[kind])
        scale = shape.numel() / few.numel()
        taken = round(alone[kind] * scale)
        if differs and device is not None:
            taken = _taken(make, dtype, shape, 1, device)[0]
        own, left_over = max(own, taken), max(left_over, round(left * scale))
        gradient_bytes = shape.numel() * dtype.itemsize
        fraction = max(fraction, (taken + left * scale) / gradient_bytes)
    return FirstSteps(workspace_bytes=own + left_over, fraction=fraction)


class _Stepper:
    """An optimizer of some parameters of one shape, with gradients as if by chance."""

    def __init__(
        self,
        make: OptimizerFactory,
        dtype: torch.dtype,
        shape: torch.Size,
        number: int,
        device: Any,
    ) -> None:
        chance = torch.Generator().manual_seed(0)
        self.parameters = [
            nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(number)
        ]
        for each in self.parameters:
            each.grad = torch.randn(shape, generator=chance).to(device, dtype)
        self.optimizer = make([{"params": self.parameters}])

    def step(self) -> None:
        self.optimizer.step()

    def state_bytes(self) -> int:
        """The first parameter's."""
        return storage_bytes(tensors_in(dict(self.optimizer.state[self.parameters[0]])))


def _taken(
    make: OptimizerFactory, dtype: torch.dtype, shape: torch.Size, number: int, device: Any
) -> tuple[int, int]:
    """Bytes that the first step and the second one take on so many parameters, at most.

    The first one makes the states. Those of the last parameter count, for a slow step later on may
    make them anew; those of the ones before it do not.
    """
    stepper, found = _Stepper(make, dtype, shape, number, device), list[int]()
    for _ in range(2):
        with MemoryMeter(device) as meter:
            meter.mark("step")
            stepper.step()
        segment = meter.segments[0]
        found.append(segment.peak_bytes - segment.start_bytes)
    return max(0, found[0] - (number - 1) * stepper.state_bytes()), found[1]


class _Operators(TorchDispatchMode):
    """Counts the operators that work on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not name.startswith(_MAKERS) and _tensors(args):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[Any]) -> bool:
    return any(
        isinstance(one, torch.Tensor) or (isinstance(one, list | tuple) and _tensors(one))
        for one in values
    )


def _operators(stepper: _Stepper) -> Counter[str]:
    mode = _Operators()
    with mode:
        stepper.step()
    return mode.found


def _differs(make: OptimizerFactory, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a first step calls operators that the second one does not call, or less often."""
    stepper = _Stepper(make, dtype, shape, 1, HOST)
    return bool(_operators(stepper) - _operators(stepper))
