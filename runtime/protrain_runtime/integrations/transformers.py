"""Plans in Hugging Face's `Trainer` and its subclasses: one line before `train`.

    trainer = Trainer(model, args, train_dataset=...)
    use_plan(trainer, "plan.yaml")
    trainer.train()

The plan is attached in `create_optimizer`, which `transformers` documents for overriding. It runs
after the model is on its device and before it is wrapped. On several ranks the model stays
unwrapped, and all ranks save together.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.integrations.accelerate import autocast_of, compiles, leave_to_the_plan
from protrain_runtime.integrations.adopting import Framework, check_loop, follow, loaded
from protrain_runtime.preparation import Check

TRAINER = Framework(
    name="the Trainer",
    accumulating="gradient_accumulation_steps",
    casting={None: "set neither bf16 nor fp16", "bfloat16": "bf16=True", "float16": "fp16=True"},
)


def use_plan(
    trainer: Trainer,
    plan: Plan | Path | str,
    *,
    weights: Path | str | None = None,
    spill_directory: Path | str | None = None,
    check: Check | None = None,
) -> None:
    """Make `trainer` train under `plan`, from its next `train()` on.

    The trainer's optimizer (`optim`, `learning_rate`, ... or `optimizers=`), scheduler,
    accumulation, clipping, evaluation and checkpoints work as usual. It takes the norm of the
    gradients in every step, so the plan needs `--clip`. Activation checkpointing is switched off,
    with a warning: the plan decides. `weights`, `spill_directory` and `check` are `prepare`'s; with
    weights the model was built in `without_parameters()`. Raises ProtrainError if the trainer does
    not train as planned; `train()` raises it if the model or the optimizer cannot follow the plan.
    """
    record, source = loaded(plan)
    args, accelerator = trainer.args, trainer.accelerator
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ProtrainError(
                f"the Trainer would change the model's dtype for evaluation ({name}=True), and"
                " parameters that are offloaded keep theirs",
                source=source,
                fix=f"{name}=False",
            )
    check_loop(
        record,
        TRAINER,
        source=source,
        micro_batches=args.gradient_accumulation_steps,
        clips=True,  # it logs the gradients' norm, even without clipping
        autocast=autocast_of(accelerator),
        compiles=compiles(accelerator),
        num_ranks=accelerator.num_processes * max(1, args.n_gpu),
    )
    # The second is the name before transformers 5.2x; both exist for a while.
    names = ("activation_checkpointing", "gradient_checkpointing")
    if any(getattr(args, name, False) for name in names):
        for name in names:
            setattr(args, name, False)
        warnings.warn(
            "activation_checkpointing=True was switched off: the plan says what every block"
            " recomputes",
            stacklevel=2,
        )
    create, following = trainer.create_optimizer, None

    def create_optimizer(model: nn.Module | None = None) -> torch.optim.Optimizer:
        nonlocal following
        create(model)
        if trainer.model is not following:  # a later train() gets another one from model_init
            leave_to_the_plan(trainer.accelerator, record)
            if record.group.num_devices > 1:
                _save_together(trainer)
            trainer.optimizer = follow(
                trainer.model,
                record,
                trainer.optimizer,
                weights=weights,
                spill_directory=spill_directory,
                check=check,
            )
            following = trainer.model
        optimizer: torch.optim.Optimizer = trainer.optimizer
        return optimizer

    trainer.create_optimizer = create_optimizer


def _save_together(trainer: Trainer) -> None:
    """Make all ranks join rank 0's saves: each has a part of the data."""
    save, save_optimizer = trainer._save, trainer._save_optimizer_and_scheduler

    def save_model(output_dir: str | None = None, state_dict: Any = None) -> None:
        save(output_dir, trainer.model.state_dict() if state_dict is None else state_dict)

    def save_states(output_dir: str) -> None:
        if not trainer.args.should_save:
            trainer.optimizer.state_dict()
        save_optimizer(output_dir)

    trainer._save, trainer._save_optimizer_and_scheduler = save_model, save_states
