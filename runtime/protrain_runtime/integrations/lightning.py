"""Plans in PyTorch Lightning: a callback.

    trainer = lightning.Trainer(callbacks=[UsePlan("plan.yaml")])
    trainer.fit(module, loader)

The plan is for the `LightningModule`'s network (`module.model`, or another attribute); optimizer
and scheduler are those of `configure_optimizers`.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import DType
from protrain_runtime.integrations.adopting import Framework, check_loop, follow, loaded
from protrain_runtime.preparation import Check

LIGHTNING = Framework(
    name="Lightning",
    accumulating="accumulate_grad_batches",
    casting={
        None: 'Trainer(precision="32-true")',
        "bfloat16": 'Trainer(precision="bf16-mixed")',
        "float16": 'Trainer(precision="16-mixed")',
    },
)
_AUTOCAST: dict[str, DType] = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}


class PlannedRanks(DDPStrategy):
    """The strategy of several ranks: their processes and samplers; the plan sums gradients.

    trainer = lightning.Trainer(strategy=PlannedRanks(), callbacks=[UsePlan("plan.yaml")])
    """

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class UsePlan(Callback):
    """Makes `fit` train the module's network at `attribute` under a plan."""

    def __init__(
        self,
        plan: Plan | Path | str,
        *,
        attribute: str = "model",
        weights: Path | str | None = None,
        spill_directory: Path | str | None = None,
        check: Check | None = None,
    ) -> None:
        self._plan, self._source = loaded(plan)
        self._attribute = attribute
        self._options = {"weights": weights, "spill_directory": spill_directory, "check": check}
        self._num_updates = 0  # when gradients were last dropped

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the trainer's settings before anything is built."""
        if stage != "fit":
            return
        clips = bool(trainer.gradient_clip_val)
        if clips and trainer.gradient_clip_algorithm == "value":
            raise ProtrainError(
                "Lightning clips gradients by value, and those that wait below the device are"
                " clipped by their norm alone",
                source=self._source,
                fix='Trainer(gradient_clip_algorithm="norm")',
            )
        if trainer.world_size > 1 and not isinstance(trainer.strategy, PlannedRanks):
            raise ProtrainError(
                f"{type(trainer.strategy).__name__} would sum gradients, as the plan does",
                source=self._source,
                fix="Trainer(strategy=protrain_runtime.integrations.lightning.PlannedRanks())",
            )
        averages = (StochasticWeightAveraging, WeightAveraging)
        away = any(not unit.states.is_persistent for unit in self._plan.units)
        if away and any(isinstance(each, averages) for each in trainer.callbacks):
            raise ProtrainError(
                "Lightning's callbacks average all parameters on the device, and the plan keeps"
                " some below it",
                source=self._source,
                fix=f"protrain_runtime.MovingAverage(module.{self._attribute}), made in"
                " on_train_start, and its update() in on_train_batch_end",
            )
        check_loop(
            self._plan,
            LIGHTNING,
            source=self._source,
            micro_batches=trainer.accumulate_grad_batches,
            clips=clips,
            autocast=_AUTOCAST.get(trainer.precision),
            compiles=hasattr(self._network(pl_module), "_orig_mod"),
            num_ranks=trainer.world_size,
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the plan: the network is on its device, the optimizer has not stepped."""
        if len(trainer.optimizers) != 1:
            raise ProtrainError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers, and a plan"
                " is for one",
                source=self._source,
                fix="return a single optimizer, with parameter groups, from configure_optimizers",
            )
        network, optimizer = self._network(pl_module), trainer.optimizers[0]
        trainer.optimizers = [follow(network, self._plan, optimizer, **self._options)]

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Count updates from here: training may resume from a checkpoint."""
        self._num_updates = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Drop gradients once used: Lightning would hold them through the next forward."""
        if trainer.global_step != self._num_updates:
            self._num_updates = trainer.global_step
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()

    def _network(self, pl_module: LightningModule) -> nn.Module:
        network = getattr(pl_module, self._attribute, None)
        if not isinstance(network, nn.Module):
            raise ProtrainError(
                f"{type(pl_module).__name__} has no module {self._attribute!r} to plan",
                source=self._source,
                fix="UsePlan(plan, attribute=...) says which attribute holds the network",
            )
        return network
