"""What the integrations share: an optimizer that there is becomes a planned one."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.records import read_plan
from protrain_plan.records.plan import Plan
from protrain_runtime.optimizer import PlannedOptimizer
from protrain_runtime.preparation import prepare


def loaded(plan: Plan | Path | str) -> tuple[Plan, str | None]:
    """The plan, and the file that it came from."""
    if isinstance(plan, Plan):
        return plan, None
    return read_plan(Path(plan)), str(plan)


def follow(
    model: nn.Module,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    *,
    spill_directory: Path | str | None = None,
) -> PlannedOptimizer:
    """`prepare`, with an optimizer that was made already and has made no step.

    Its class, its groups and its options are used; schedulers that were made for it act on the
    planned optimizer, whose groups it shares.
    Raises ProtrainError, and leaves the model as it was, where `prepare` does, where the optimizer
    has states or parameters of others, and where the model is compiled.
    """
    _check_optimizer(model, optimizer)
    if hasattr(model, "_orig_mod"):
        raise ProtrainError(
            "the model is compiled, and a plan acts between the blocks of one that is not",
            fix="compile each block by itself: for block in ...: block.compile()",
        )
    _, planned = prepare(
        model,
        plan,
        optimizer=_Like(optimizer),
        param_groups=optimizer.param_groups,
        spill_directory=spill_directory,
    )
    optimizer.param_groups = planned.param_groups
    return planned


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if optimizer.state:
        raise ProtrainError(
            f"{name} has states before the plan is attached: they would stay on the device",
            fix="attach the plan before the first step (Adagrad, which makes its states when it is"
            " constructed, cannot follow one)",
        )
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ProtrainError(
            f"{name} has {foreign} parameters that are not of the model that follows the plan",
            fix="profile and plan the module that holds all of them",
        )


class _Like:
    """Makes optimizers like one that there is: that one itself, where its own groups are given.

    So schedulers that were made for it see its steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        accepted = inspect.signature(type(optimizer)).parameters
        self._options = {k: v for k, v in optimizer.defaults.items() if k in accepted}

    def __call__(self, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
        given, own = list(groups), self._optimizer.param_groups
        if [id(group["params"]) for group in given] == [id(group["params"]) for group in own]:
            return self._optimizer
        return type(self._optimizer)(given, **self._options)
