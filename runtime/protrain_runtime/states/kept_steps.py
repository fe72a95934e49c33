"""Optimizers of a piece's ranges, and their reuse in the next step.

An optimizer of the user's class is made over a range's elements, gradients and states, which takes
several times as long as its step. If all of these stay in place from step to step, the optimizer is
reused with the current options. PyTorch's fused Adam and AdamW are called directly, as kernels over
lists.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from protrain_runtime.devices.stores import Store
from protrain_runtime.states.chunks import Copy, Slice
from protrain_runtime.states.known_optimizers import known
from protrain_runtime.states.stand_ins import GradientInStore, scaled
from protrain_runtime.states.stepping import (
    NAMES,
    OF_PLANS,
    OptimizerFactory,
    by_value,
    groups_of,
)
from protrain_runtime.states.trials import is_equal

Options = Mapping[str, Mapping[str, Any]]
"""Hyperparameters by parameter name; one object per group."""


class Span(NamedTuple):
    """The elements of a parameter from `low` to `high`."""

    part: Slice
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """Elements that an optimizer steps on as one tensor.

    name     the parameter's
    ends     they are the parameter's last: its scalars are this optimizer's
    staged   the states that it was given, by key: none before the first step
    waits    the gradient has waited below the device
    """

    parameter: nn.Parameter  # [elements]
    name: str
    span: Span
    ends: bool
    staged: Mapping[str, torch.Tensor] | None
    waits: bool

    def in_place(self, state: Mapping[str, Any]) -> bool:
        """Whether the optimizer left its states in place."""
        return self.staged is not None and all(
            isinstance(found := state.get(key), torch.Tensor)
            and found.data_ptr() == values.data_ptr()
            and found.shape == values.shape
            for key, values in self.staged.items()
        )


class FusedAdam:
    """PyTorch's fused step of an Adam or AdamW group, on lists made once."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], states: Mapping[Any, dict[str, Any]]
    ) -> None:
        self._parameters = parameters
        self._states = [states[parameter] for parameter in parameters]
        self._values = [parameter.detach() for parameter in parameters]
        self._averages = [
            [state[key] for state in self._states if key in state]
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        ]

    def begin(self, options: Mapping[str, Any]) -> None:
        """Take this step's options, gradients and counters."""
        self._options = options
        self.gradients: Any = [parameter.grad for parameter in self._parameters]
        self._counters = [state["step"] for state in self._states]

    def step(self) -> None:
        """Step once, as the optimizer's own `step` does."""
        options = self._options
        beta1, beta2 = options["betas"]
        firsts, seconds, largest = self._averages
        torch._foreach_add_(self._counters, 1)
        decoupled = options["decoupled_weight_decay"]
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kernel(
            self._values,
            self.gradients,
            firsts,
            seconds,
            largest,
            self._counters,
            amsgrad=options["amsgrad"],
            lr=options["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
        )

    @staticmethod
    def takes(options: Mapping[str, Any]) -> bool:
        """Whether a step with these options is only that kernel."""
        beta1, beta2 = options["betas"]
        for given in (options["lr"], beta1, beta2):
            if type(given) is torch.Tensor or type(given) is bool:
                return False
        return options["fused"] is True and not options["differentiable"]


_LENGTH = len(OF_PLANS)


@dataclass(slots=True)
class Range:
    """Elements that one optimizer steps on, perhaps in a thread of its own.

    heads    a parameter of each group, which has the group's options
    leads    by shadow, the one of its group
    usual    the groups have these options, and no others
    factors  by which gradients are multiplied in this step
    kernels  what takes the place of its step, by group
    """

    worker: torch.optim.Optimizer
    shadows: Sequence[Shadow]
    heads: Sequence[str]
    leads: Sequence[str]
    usual: bool
    factors: list[tuple[torch.Tensor, Sequence[torch.Tensor]]]
    kernels: Sequence[FusedAdam] = ()

    @staticmethod
    def of(factory: OptimizerFactory, shadows: Sequence[Shadow], options: Options) -> "Range":
        """Make an optimizer without states."""
        members = [(each.parameter, each.name, options[each.name]) for each in shadows]
        worker = factory(groups_of(members))
        heads: dict[int, str] = {}  # by the options, in the order of their groups
        leads = [heads.setdefault(id(options[each.name]), each.name) for each in shadows]
        usual = len(heads) == len(worker.param_groups) and all(
            group.keys() - {"params"} == options[name].keys()
            and all(
                is_equal(group[key], value) for key, value in options[name].items() if key != NAMES
            )
            for group, name in zip(worker.param_groups, heads.values(), strict=True)
        )
        return Range(worker, shadows, [*heads.values()], leads, usual, [])

    def step(self) -> None:
        """Step the optimizer once."""
        for elements, factors in self.factors:
            scaled(elements, factors)
        for kernel in self.kernels:
            kernel.step()
        if not self.kernels:
            self.worker.step()

    def states(self) -> list[dict[str, Any]]:
        """Return the optimizer's states, by shadow."""
        return [self.worker.state[shadow.parameter] for shadow in self.shadows]


class _Source(NamedTuple):
    """A part of a piece, as each step has to find it for the optimizers that are kept.

    base     its scalars; None: it had no gradient
    at_hand  its gradient is there; else it is in the `store` at an offset, or nowhere
    """

    part: Slice
    base: Mapping[str, Any] | None
    at_hand: bool
    store: Store | None
    offset: int


class KeptRanges:
    """The optimizers of a piece, for steps with all tensors in place.

    `parts` are the piece's, and `copy` has their states; `run` runs a task per range of `ranges`.
    `read` and `write` bring and take back everything else.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        run: Callable[[Sequence[Callable[[], None]]], None],
        *,
        parts: Sequence[Span],
        copy: Copy,
        waiting: Mapping[str, GradientInStore],
        read: Callable[[], None],
        write: Callable[[], None],
    ) -> None:
        self.ranges, self.read, self.write = ranges, read, write
        self._run, self._copy = run, copy
        self._steps = [each.step for each in ranges]
        shadows = [shadow for each in ranges for shadow in each.shadows]
        waits = {shadow.name: shadow.waits for shadow in shadows}
        self._sources: list[_Source] = []
        for part, _, _ in parts:
            name = part.name
            base = copy.scalars[name] if name in waits else None
            stored = waiting[name] if waits.get(name) else None
            place = (None, 0) if stored is None else (stored.store, stored.offset)
            self._sources.append(_Source(part, base, waits.get(name) is False, *place))
        for each in ranges:  # by kernels that do all of the optimizer's work
            groups, states = each.worker.param_groups, each.worker.state
            if known(type(each.worker)).is_kernel and all(map(FusedAdam.takes, groups)):
                each.kernels = [FusedAdam(group["params"], states) for group in groups]
        self._end()

    def begin(
        self,
        options: Options,
        waiting: Mapping[str, GradientInStore],
        gradients: Mapping[str, torch.Tensor],
    ) -> bool:
        """Take this step's inputs; False if it needs other optimizers. Hot: avoid calls."""
        scalars, updated = self._copy.scalars, self._copy.updated
        for part, base, at_hand, store, offset in self._sources:
            name = part.name
            if base is not None and (name not in updated or scalars[name] is not base):
                return False  # code loaded or changed them
            if (name in gradients) is not at_hand or (
                not at_hand and (name in waiting) is (store is None)
            ):
                return False
            if store is not None:
                stored = waiting[name]
                if stored.store is not store or stored.offset != offset or stored.count is not None:
                    return False
            for key in part.parameter.__dict__:
                if key[:_LENGTH] != OF_PLANS:
                    return False
        for each in self.ranges:
            each.factors = []
            for shadow, head in zip(each.shadows, each.leads, strict=True):
                if options[shadow.name] is not options[head]:
                    return False  # a parameter changed its group
                if not shadow.waits:
                    shadow.parameter.grad = gradients[shadow.name]
                elif factors := waiting[shadow.name].factors:
                    elements = shadow.parameter.grad
                    assert elements is not None
                    each.factors.append((elements, [f.to(elements.device) for f in factors]))
                if not shadow.ends:
                    own = by_value(scalars[shadow.name])
                    each.worker.state[shadow.parameter].update(own)
            for kernel, name in zip(each.kernels, each.heads, strict=True) if each.kernels else ():
                if not kernel.takes(options[name]):
                    return False
                kernel.begin(options[name])
            if not each.kernels:
                for group, name in zip(each.worker.param_groups, each.heads, strict=True):
                    group.update({k: v for k, v in by_value(options[name]).items() if k != NAMES})
        return True

    def step(self) -> bool:
        """Step once; False if an optimizer replaced its states' tensors."""
        self._run(self._steps)
        in_place = True
        for each in self.ranges:
            for shadow in () if each.kernels else each.shadows:
                state = each.worker.state[shadow.parameter]
                scalars = self._copy.scalars[shadow.name]
                known_keys = {*scalars, *(shadow.staged or ())}
                if not shadow.in_place(state) or state.keys() != known_keys:
                    in_place = False
                elif shadow.ends:  # non-tensor scalars are not written in place
                    scalars.update({key: state[key] for key in scalars})
        self._end()
        return in_place

    def _end(self) -> None:
        """Drop references that change with each step: their owner frees them."""
        for each in self.ranges:
            for shadow in each.shadows:
                if not shadow.waits:
                    shadow.parameter.grad = None
            for kernel in each.kernels:
                kernel.gradients = []
