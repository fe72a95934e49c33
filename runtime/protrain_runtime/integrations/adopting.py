"""What the integrations share: loops are compared with the plan, and optimizers follow it."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.records import read_plan
from protrain_plan.records.plan import Persistent, Plan
from protrain_plan.records.profile import DType
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.preparation import Check, prepare


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
    check: Check | None = None,
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
        check=check,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How errors name a framework and its settings."""

    name: str
    accumulating: str  # the setting of micro-batches per update
    casting: Mapping[DType | None, str]  # what computes under autocast in a dtype, or without it


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How the framework trains."""

    micro_batches: int  # per update
    clips: bool  # the norm of all gradients is taken before an update
    autocast: DType | None
    compiles: bool
    num_ranks: int


def check_loop(
    plan: Plan, settings: LoopSettings, framework: Framework, *, source: str | None
) -> None:
    """ProtrainError where the framework would not do what the plan counts on."""
    name = framework.name
    if settings.num_ranks != plan.num_devices:
        planned_for = "one" if plan.num_devices == 1 else str(plan.num_devices)
        ranks = "rank" if settings.num_ranks == 1 else "ranks"
        raise ProtrainError(
            f"{name} trains on {settings.num_ranks} {ranks}, and the plan is for {planned_for}",
            source=source,
            key="num_devices",
            fix=f"plan with --num-devices {settings.num_ranks}, or launch {plan.num_devices}",
        )
    if settings.compiles:
        raise ProtrainError(
            f"{name} compiles the model, and a plan counts what PyTorch keeps without compiling",
            source=source,
            fix=f"let {name} not compile; compile each block by itself before it gets the model:"
            " for block in ...: block.compile()",
        )
    workload = plan.workload
    planned = workload.dtype if workload.precision == "autocast" else None
    if settings.autocast != planned:
        options = f"--dtype {settings.autocast} --precision autocast"
        profiled = f"profile with {options}" if settings.autocast else "profile without autocast"
        raise ProtrainError(
            f"the plan is for training {_under(planned)}, and {name} trains"
            f" {_under(settings.autocast)}",
            source=source,
            key="workload.precision",
            fix=f"{framework.casting[planned]}, or {profiled} and plan anew",
        )
    after_backward = plan.updates == "after backward"
    offloads = any(not isinstance(unit.states, Persistent) for unit in plan.units)
    if settings.clips and offloads and not after_backward:
        raise ProtrainError(
            f"{name} takes the norm of all gradients before an update, and this plan updates"
            " during backward",
            source=source,
            key="updates",
            fix="plan with --clip",
        )
    # With updates after backward a plan for several micro-batches has room for any number; several
    # ranks have to know which one is the last, whose gradients they sum.
    any_number = after_backward and plan.micro_batches > 1 and plan.num_devices == 1
    if settings.micro_batches != plan.micro_batches and not any_number:
        raise ProtrainError(
            f"the plan is for {plan.micro_batches} micro-batches per update, and {name} runs"
            f" {settings.micro_batches}",
            source=source,
            key="micro_batches",
            fix=f"plan with --accumulate {settings.micro_batches}, or set"
            f" {framework.accumulating}={plan.micro_batches}",
        )


def _under(dtype: DType | None) -> str:
    return f"under autocast to {dtype}" if dtype else "without autocast"
