"""Shared code of the integrations: checks of loops against the plan, planned optimizers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import read_plan
from protrain_runtime.contract.records.plan import PERSISTENT, Plan
from protrain_runtime.contract.records.profile import DType
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.preparation import prepare

_EACH_BLOCK = "; under a plan from protrain profile --compile each block is compiled by itself"


def loaded(plan: Plan | Path | str) -> tuple[Plan, str | None]:
    """The plan, and its file if read from one."""
    if isinstance(plan, Plan):
        return plan, None
    return read_plan(Path(plan)), str(plan)


def follow(
    model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer, **options: Any
) -> PlannedOptimizer:
    """`prepare`, with these options and an existing optimizer that has not stepped.

    Its class, groups and options are used; its schedulers act on the planned optimizer, which
    shares its groups. Raises ProtrainError, with the model unchanged, as `prepare` does, and for an
    optimizer with states or other parameters, or a compiled model.
    """
    if hasattr(model, "_orig_mod"):
        raise ProtrainError(
            "the model is compiled, and a plan acts between the blocks of one that is not",
            fix=f"leave torch.compile(model) out{_EACH_BLOCK}",
        )
    return prepare(model, plan, optimizer=optimizer, **options)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework's name and settings, for errors."""

    name: str
    accumulating: str  # the setting of micro-batches per update
    casting: Mapping[DType | None, str]  # the setting for autocast in a dtype, or without autocast


def check_loop(
    plan: Plan,
    framework: Framework,
    *,
    source: str | None,
    micro_batches: int,
    clips: bool,
    autocast: DType | None,
    compiles: bool,
    num_ranks: int,
) -> None:
    """ProtrainError if the framework would not train as planned."""
    name = framework.name
    if num_ranks != plan.group.num_devices:
        planned_for = "one" if plan.group.num_devices == 1 else str(plan.group.num_devices)
        ranks = "rank" if num_ranks == 1 else "ranks"
        raise ProtrainError(
            f"{name} trains on {num_ranks} {ranks}, and the plan is for {planned_for}",
            source=source,
            key="settings.group.num_devices",
            fix=f"plan with --num-devices {num_ranks}, or launch {plan.group.num_devices}",
        )
    if compiles:
        raise ProtrainError(
            f"{name} compiles the model, and a plan counts what PyTorch keeps without compiling",
            source=source,
            fix=f"do not compile with {name}{_EACH_BLOCK}",
        )
    workload = plan.workload
    planned = workload.dtype if workload.precision == "autocast" else None
    if autocast != planned:
        options = f"--dtype {autocast} --precision autocast"
        profiled = f"profile with {options}" if autocast else "profile without autocast"
        under, under_here = (
            f"under autocast to {dtype}" if dtype else "without autocast"
            for dtype in (planned, autocast)
        )
        raise ProtrainError(
            f"the plan is for training {under}, and {name} trains {under_here}",
            source=source,
            key="workload.precision",
            fix=f"{framework.casting[planned]}, or {profiled} and plan anew",
        )
    after_backward = plan.settings.updates == "after backward"
    in_backward = any(unit.states != PERSISTENT for unit in plan.units) and not after_backward
    if clips and in_backward:
        raise ProtrainError(
            f"{name} takes the norm of all gradients before an update, and this plan updates"
            " during backward",
            source=source,
            key="settings.updates",
            fix="plan with --clip",
        )
    # With updates after backward, a plan for several micro-batches has room for any number; several
    # ranks must know the last one, whose gradients they sum.
    for_updates = plan.settings.micro_batches
    any_number = after_backward and for_updates > 1 and plan.group.num_devices == 1
    if micro_batches != for_updates and not any_number:
        raise ProtrainError(
            f"the plan is for {for_updates} micro-batches per update, and {name} runs"
            f" {micro_batches}",
            source=source,
            key="settings.micro_batches",
            fix=f"plan with --accumulate {micro_batches}, or set"
            f" {framework.accumulating}={for_updates}",
        )
