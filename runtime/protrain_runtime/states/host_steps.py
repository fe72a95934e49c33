"""Plain training with host updates of some parameters, as in plans on accelerators.

An optimizer's CPU kernels round differently from an accelerator's. A plain run that is compared
with a plan bit by bit updates the same parameters on the host.
"""

from collections.abc import Collection, Iterable
from functools import partialmethod
from typing import Any

import torch
from torch import nn

from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.states.chunk_layouts import unit_parameters
from protrain_runtime.states.stepping import OptimizerFactory


class HostSteps(torch.optim.Optimizer):
    """An optimizer that updates parameters in place, and those `on_host` on the host."""

    def __init__(
        self,
        parameters: Iterable[Any],
        factory: OptimizerFactory,
        on_host: Collection[nn.Parameter],
    ) -> None:
        super().__init__(parameters, {})
        self._copies = {
            parameter: nn.Parameter(parameter.detach().cpu(), parameter.requires_grad)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter in on_host
        }
        here = [p for group in self.param_groups for p in group["params"] if p not in on_host]
        self._parts: list[torch.optim.Optimizer] = []
        for stepped in (dict(zip(here, here, strict=True)), self._copies):
            groups = [
                {**group, "params": [stepped[p] for p in group["params"] if p in stepped]}
                for group in self.param_groups
            ]
            if stepped:
                self._parts.append(factory(groups))
        for part in self._parts:
            self._take_options(part)

    def _take_options(self, part: torch.optim.Optimizer) -> None:
        for mine, theirs in zip(self.param_groups, part.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; those on the host are copied back last."""
        assert closure is None, "a plan's steps take closures themselves"
        for parameter, copy in self._copies.items():
            copy.grad = None if parameter.grad is None else parameter.grad.cpu()
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]
        for part in self._parts:
            for group, values in zip(part.param_groups, options, strict=True):
                group.update(values)
            part.step()
            self._take_options(part)
        for parameter, copy in self._copies.items():
            parameter.copy_(copy)
            copy.grad = None

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        for part in self._parts:
            getattr(part, mode)()
        for parameter, copy in self._copies.items():
            parameter.copy_(copy)

    # For optimizers with modes.
    train, eval = partialmethod(_switch, "train"), partialmethod(_switch, "eval")


def stepping_as(plan: Plan, model: nn.Module, factory: OptimizerFactory) -> OptimizerFactory:
    """A factory of optimizers with the plan's host updates."""
    there = {unit.name for unit in plan.host_updated}
    if not there:
        return factory
    chunks = zip(plan.units, unit_parameters(model, plan.units), strict=True)
    on_host = {p for unit, chunk in chunks if unit.name in there for _, p in chunk}
    return lambda groups: HostSteps(groups, factory, on_host)
