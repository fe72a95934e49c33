"""Frameworks train a model that goes from a folder straight into its plan, bit by bit as ever."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from protrain_runtime import without_parameters
from protrain_runtime.integrations import accelerate as in_accelerate
from protrain_runtime.integrations import transformers as in_transformers
from protrain_runtime.model.prepared import engine_of, parameter_values
from tests.support.integration_cases import plan, rows
from tests.support.runtime_cases import build

NAME = "llama-tied"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The values of a model that no constructor here draws."""
    folder = tmp_path_factory.mktemp("weights")
    build(NAME, seed=5).save_pretrained(folder, max_shard_size="100KB")  # type: ignore[operator]
    return folder


def absent() -> nn.Module:
    with without_parameters():
        model = build(NAME)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def in_a_trainer(model: nn.Module, weights: Path | None, folder: Path) -> nn.Module:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model, args, train_dataset=rows(24, seed=0))
    if weights is not None:
        in_transformers.use_plan(trainer, plan(NAME), weights=weights, spill_directory=folder)
    trainer.train()
    made: nn.Module = trainer.model
    return made


def in_a_loop(model: nn.Module, weights: Path | None, folder: Path) -> nn.Module:
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if weights is not None:
        optimizer = in_accelerate.use_plan(
            accelerator, model, optimizer, plan(NAME), weights=weights, spill_directory=folder
        )
    loader = DataLoader(rows(12, seed=0), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def in_lightning(model: nn.Module, weights: Path | None, folder: Path) -> nn.Module:
    pytest.importorskip("lightning", reason="PyTorch Lightning is not installed")
    from lightning.pytorch import Trainer as LightningTrainer

    from protrain_runtime.integrations.lightning import UsePlan
    from tests.support.lightning_module import Module

    module = Module(NAME)
    module.model = model
    callbacks = [UsePlan(plan(NAME), weights=weights, spill_directory=folder)] if weights else []
    trainer = LightningTrainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=callbacks,
        default_root_dir=folder,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows(12, seed=0), batch_size=4))
    return module.model


@pytest.mark.nightly("in_a_trainer")
@pytest.mark.parametrize("train", [in_a_trainer, in_a_loop, in_lightning])
def test_weights_go_straight_into_the_plan_in_one_line(
    train: Callable[[nn.Module, Path | None, Path], nn.Module], folder: Path, tmp_path: Path
) -> None:
    found = train(absent(), folder, tmp_path)
    expected = train(build(NAME, seed=5), None, tmp_path)
    assert engine_of(found) is not None
    values = dict(parameter_values(found))
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter), name
