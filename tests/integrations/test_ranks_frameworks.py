"""Frameworks under their launchers, on two ranks: what they compute without a plan."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

from protrain_runtime.contract.records.plan import PERSISTENT, Placement, Plan
from protrain_runtime.integrations import accelerate, transformers
from protrain_runtime.integrations.lightning import PlannedRanks, UsePlan
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.ranks_loops import Loop, in_turn, leaves, several
from tests.support.runtime_cases import ADAMW, build, copied, differences

PLACES: tuple[Placement, ...] = (
    Placement(tier="disk"),
    PERSISTENT,
    Placement(tier="device"),
    Placement(tier="host", keep_gathered=True),
)
LOOP = Loop("llama", double=True)
ROUNDING = 1e-11  # in float64: of one norm, which all of them clip to or log


class Texts(Dataset[dict[str, Tensor]]):
    """32 sequences of 16 tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone()}


def plan(**options: Any) -> Plan:
    own = {"updates": "after backward", **options}
    return several(LOOP, in_turn(LOOP.name, *PLACES), 2, **own)


def far(found: Any, expected: Any) -> list[float]:
    """The distances above rounding."""
    pairs = zip(leaves(found), leaves(expected), strict=True)
    distances = [((one - other).abs().max() / other.abs().max()).item() for one, other in pairs]
    return [distance for distance in distances if distance > ROUNDING]


def with_accelerate(rank: int, count: int) -> list[float]:
    states = []
    for planned in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        assert accelerator.num_processes == count
        model: nn.Module = build(LOOP.name).double()
        optimizer: torch.optim.Optimizer = ADAMW(list(model.parameters()))
        if planned:
            optimizer = accelerate.use_plan(accelerator, model, optimizer, plan(micro_batches=2))
        loader = DataLoader(Texts(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        states.append(copied(accelerator.get_state_dict(model)))
    return far(states[1], states[0])


@pytest.mark.slow
def test_accelerate_trains_as_it_does_without_a_plan(tmp_path: Path) -> None:
    assert run_ranks(with_accelerate, 2, tmp_path) == [[], []]


def with_trainer(rank: int, count: int, folder: Path) -> list[list[float]]:
    states = []
    for kind in ("plain", "planned", "resumed"):
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        arguments = TrainingArguments(
            output_dir=str(folder / ("plain" if kind == "plain" else "planned")),
            use_cpu=True,
            max_steps=4,
            per_device_train_batch_size=4,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(build(LOOP.name).double(), arguments, train_dataset=Texts())
        if kind != "plain":
            transformers.use_plan(trainer, plan())
        resumed = folder / "planned" / "checkpoint-2"
        trainer.train(resume_from_checkpoint=str(resumed) if kind == "resumed" else None)
        model = trainer.accelerator.unwrap_model(trainer.model)
        states.append(copied(model.state_dict()))
    return [far(states[1], states[0]), far(states[2], states[0])]


@pytest.mark.slow
def test_the_trainer_trains_saves_and_resumes_as_it_does_without_a_plan(tmp_path: Path) -> None:
    assert run_ranks(with_trainer, 2, tmp_path, tmp_path) == [[[], []], [[], []]]


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build(LOOP.name).double()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ADAMW(list(self.parameters()))


def with_lightning(rank: int, count: int) -> list[str]:
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # so that Lightning starts no processes itself
    states = []
    for planned in (False, True):
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=count,
            strategy=PlannedRanks() if planned else "ddp",
            callbacks=[UsePlan(with_settings(plan(), updates="in backward"))] if planned else [],
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(Texts(), batch_size=4))
        states.append(copied(module.model.state_dict()))
    return list(differences(states[1], states[0], ""))


@pytest.mark.slow
def test_lightning_trains_as_it_does_without_a_plan_bitwise(tmp_path: Path) -> None:
    assert run_ranks(with_lightning, 2, tmp_path) == [[], []]
