"""Whether a framework's settings are those that a plan was made for."""

from collections.abc import Mapping
from dataclasses import dataclass

from protrain_plan.errors import ProtrainError
from protrain_plan.records.plan import Persistent, Plan
from protrain_plan.records.profile import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """How errors name a framework and its settings."""

    name: str
    accumulating: str  # the setting of micro-batches per update
    casting: Mapping[DType | None, str]  # what computes under autocast in a dtype, or without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the framework trains."""

    micro_batches: int  # per update
    clips: bool  # the norm of all gradients is taken before an update
    autocast: DType | None
    compiles: bool
    num_ranks: int


def check_settings(
    plan: Plan, settings: Settings, framework: Framework, *, source: str | None
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
