"""Plans in training loops with Hugging Face Accelerate: one line before `accelerator.prepare`.

    optimizer = use_plan(accelerator, model, optimizer, "plan.yaml")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Only documented attributes of `accelerate` are read: `device`, `mixed_precision`, `num_processes`,
`gradient_accumulation_steps`, `autocast_handler`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, DynamoBackend
from torch import nn

from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import DType
from protrain_runtime.integrations.adopting import Framework, check_loop, follow, loaded
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.preparation import Check

ACCELERATE = Framework(
    name="Accelerate",
    accumulating="gradient_accumulation_steps",
    casting={
        None: 'Accelerator(mixed_precision="no")',
        "bfloat16": 'Accelerator(mixed_precision="bf16")',
        "float16": 'Accelerator(mixed_precision="fp16")',
    },
)


def use_plan(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | Path | str,
    *,
    weights: Path | str | None = None,
    spill_directory: Path | str | None = None,
    check: Check | None = None,
) -> PlannedOptimizer:
    """Make `model` follow `plan`, in place; returns the optimizer that replaces `optimizer`.

    Model and optimizer are not yet prepared by `accelerator.prepare`; schedulers of `optimizer`
    stay valid. `accelerator.accumulate`, `clip_grad_norm_` (under a plan with `--clip`),
    `save_state` and `load_state` work as usual. `weights`, `spill_directory` and `check` are
    `prepare`'s; with weights the model was built in `without_parameters()`. Raises ProtrainError if
    the accelerator does not train as planned, and as `prepare` does.
    """
    record, source = loaded(plan)
    check_loop(
        record,
        ACCELERATE,
        source=source,
        micro_batches=accelerator.gradient_accumulation_steps,
        clips=False,  # clipping shows when it happens
        autocast=autocast_of(accelerator),
        compiles=compiles(accelerator),
        num_ranks=accelerator.num_processes,
    )
    leave_to_the_plan(accelerator, record)
    model.to(accelerator.device)
    return follow(
        model, record, optimizer, weights=weights, spill_directory=spill_directory, check=check
    )


def autocast_of(accelerator: Accelerator) -> DType | None:
    """The autocast dtype of models prepared by the accelerator."""
    found: dict[str, DType] = {"bf16": "bfloat16", "fp16": "float16"}
    return found.get(accelerator.mixed_precision)


def compiles(accelerator: Accelerator) -> bool:
    """Whether `accelerator.prepare` compiles models."""
    return bool(accelerator.state.dynamo_plugin.backend != DynamoBackend.NO)


def leave_to_the_plan(accelerator: Accelerator, plan: Plan) -> None:
    """Keep `accelerator` from breaking the plan by cached casts or wrapped models."""
    handler = accelerator.autocast_handler or AutocastKwargs()
    # The cache of cast weights would keep a copy of every parameter.
    accelerator.autocast_handler = replace(handler, cache_enabled=False)
    if plan.group.num_devices > 1:
        # The plan sums gradients; its model needs only `prepare`'s evaluation mode.
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
