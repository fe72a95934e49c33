"""A model for Lightning, which has to be there."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR

from tests.support.integration_cases import eight_bits
from tests.support.runtime_cases import build


class Module(LightningModule):
    """A language model as Lightning's documentation would write it."""

    def __init__(
        self, name: str = "gpt2", *, seed: int = 0, fused: bool = True, bits: int = 32
    ) -> None:
        super().__init__()
        self.model = build(name, seed=seed)
        self.fused, self.bits = fused, bits
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.seen.append(self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        if self.bits == 8:
            optimizer = eight_bits(self.parameters())
        else:
            optimizer = torch.optim.AdamW(
                self.parameters(), lr=1e-3, fused=self.fused, foreach=False
            )
        schedule = LinearLR(optimizer, 0.1, total_iters=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
