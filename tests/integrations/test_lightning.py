"""Lightning under a plan equals Lightning, bit by bit. Skipped where `lightning` is not there."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from protrain_runtime import MovingAverage, restore
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.model.prepared import engine_of
from tests.support.integration_cases import CLIPPED, plan, rows, without_overrides
from tests.support.messages import Speaker
from tests.support.runtime_cases import assert_bitwise, differences, outcome

pytest.importorskip("lightning", reason="PyTorch Lightning is not installed: pip install lightning")

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging

from protrain_runtime.integrations.lightning import UsePlan
from tests.support.lightning_module import Module


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without Lightning's greetings and tips."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class TwoOptimizers(Module):
    automatic_optimization = False  # Lightning takes several there alone

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()][:2]


class Losses(Module):
    """Its network goes by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.network = self.model
        del self.model

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        return loss

    def validation_step(self, *_: Any) -> None:
        pass


class Compiled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model)  # type: ignore[assignment]


def fit(
    planned: Plan | None,
    folder: Path,
    *,
    epochs: int = 1,
    checkpoint: Path | None = None,
    module: Module | None = None,
    attribute: str = "model",
    **settings: Any,
) -> tuple[Module, Trainer]:
    given: Any = {"attribute": attribute, "spill_directory": folder, "check": "bitwise"}
    callbacks = [] if planned is None else [UsePlan(planned, **given)]
    made = module or Module()
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"val_check_interval": 2} | settings),
    )
    trainer.fit(
        made,
        DataLoader(rows(24, seed=0), batch_size=4),
        DataLoader(rows(4, seed=1), batch_size=4),
        ckpt_path=checkpoint,
        weights_only=False,
    )
    return made, trainer


def assert_same_fit(found: tuple[Module, Trainer], expected: tuple[Module, Trainer]) -> None:
    (module, trainer), (plain, plain_trainer) = found, expected
    assert_bitwise(
        outcome(module.model, trainer.optimizers[0], module.seen),
        outcome(plain.model, plain_trainer.optimizers[0], plain.seen),
    )


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"clips": False}),
    "accumulated": ({"accumulate_grad_batches": 2}, {"micro_batches": 2, "clips": False}),
    "accumulated, a rest": ({"accumulate_grad_batches": 4}, {"micro_batches": 4}),
    "clipped": ({"gradient_clip_val": CLIPPED}, {}),
    "8 bits": ({"gradient_clip_val": CLIPPED}, {}),
    "autocast": (
        {"precision": "bf16-mixed", "gradient_clip_val": CLIPPED, "accumulate_grad_batches": 2},
        {"precision": "autocast", "micro_batches": 2},
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_lightning_under_a_plan_equals_lightning_bitwise(name: str, tmp_path: Path) -> None:
    settings, planned = CASES[name]
    with without_overrides() if name == "8 bits" else nullcontext():
        # With autocast, Lightning clips no fused optimizer's.
        make = partial(Module, fused=name != "autocast", bits=8 if name == "8 bits" else 32)
        expected = fit(None, tmp_path, module=make(), **settings)
        found = fit(plan("gpt2", **planned), tmp_path, module=make(), **settings)
        assert engine_of(found[0].model) is not None
        assert_same_fit(found, expected)
        restore(found[0].model)
        assert_same_fit(found, expected)


def resumed(first: Plan | None, second: Plan | None, folder: Path) -> tuple[Module, Trainer]:
    """An epoch from the start, and another from the checkpoint after it.

    Without dropout: Lightning's checkpoints do not hold the random state.
    """
    file = folder / "half.ckpt"
    half, trainer = fit(first, folder, module=Module("llama-tied"))
    trainer.save_checkpoint(file)
    saved = torch.load(file, weights_only=False)["state_dict"]
    assert list(differences(saved, half.state_dict(), "saved")) == []
    module = Module("llama-tied", seed=1)
    module.seen = half.seen
    return fit(second, folder, epochs=2, checkpoint=file, module=module)


@pytest.mark.nightly
def test_lightnings_checkpoints_resume_bitwise_with_and_without_a_plan(tmp_path: Path) -> None:
    made = plan("llama-tied")
    expected = resumed(None, None, tmp_path)
    assert_same_fit(resumed(made, None, tmp_path), expected)
    assert_same_fit(resumed(None, made, tmp_path), expected)


@pytest.mark.nightly
def test_gradients_are_gone_when_a_batch_has_ended(tmp_path: Path) -> None:
    """Lightning itself holds the last update's through the next forward."""
    seen: list[int] = []

    class Watching(Module):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(sum(p.grad is not None for p in self.parameters()))

    fit(plan("gpt2"), tmp_path, module=Watching())
    assert seen == [0] * 6


class Averaged(Module):
    def configure_callbacks(self) -> Any:
        return EMAWeightAveraging()


class AveragedBelow(Module):
    def on_train_start(self) -> None:
        self.average = MovingAverage(self.model)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()


class OneOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [parameter]} for parameter in self.parameters()], lr=0.1)


NORM: dict[str, Any] = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}
ROUNDED: dict[str, Any] = {"precision": "bf16-mixed"}
TWICE: dict[str, Any] = {"accumulate_grad_batches": 2}
OF_AUTOCAST: dict[str, Any] = {"precision": "autocast"}
Given = tuple[dict[str, Any], dict[str, Any]]
"""Settings of `fit`, and what a plan is for."""

WRONG: dict[str, tuple[Given, Given]] = {
    "clips": ((NORM, {"clips": False}), (NORM, {})),
    "clips by value": ((NORM | {"gradient_clip_algorithm": "value"}, {}), (NORM, {})),
    "accumulates: plan": ((TWICE, {}), (TWICE, {"micro_batches": 2})),
    "accumulates: set": ((TWICE, {}), ({"accumulate_grad_batches": 1}, {})),
    "casts: set": ((ROUNDED, {}), ({"precision": "32-true"}, {})),
    "casts: profile": ((ROUNDED, {}), (ROUNDED, OF_AUTOCAST)),
    "does not cast: set": (({}, OF_AUTOCAST), (ROUNDED, OF_AUTOCAST)),
    "two optimizers": (({"module": TwoOptimizers}, {}), ({"module": OneOptimizer}, {})),
    "another attribute": (
        ({"module": Losses}, {}),
        ({"module": Losses, "attribute": "network"}, {}),
    ),
    "averages": (({"module": Averaged}, {}), ({"module": AveragedBelow}, {})),
    "compiles": (({"module": Compiled}, {}), ({"module": Module}, {})),
}


@pytest.mark.nightly(but=("does not cast: set",))
@pytest.mark.parametrize(("wrong", "followed"), WRONG.values(), ids=WRONG)
def test_lightning_trains_when_the_message_is_followed(
    wrong: Given, followed: Given, tmp_path: Path, assert_says: Speaker
) -> None:
    """Bits under such settings are compared above."""

    def fitted(given: Given) -> None:
        settings, made_for = given
        given_module = {"module": settings.get("module", Module)()}
        fit(plan("gpt2", **made_for), tmp_path, limit_train_batches=2, **(settings | given_module))

    assert_says.refused(fitted, wrong)
    fitted(followed)
