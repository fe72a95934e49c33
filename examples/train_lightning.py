"""PyTorch Lightning under a plan: what a plan changes is one line, the callback `UsePlan`.

protrain profile examples/train_lightning.py:factory -o profile.yaml
protrain plan profile.yaml --max-slowdown 2 --clip -o plan.yaml
python examples/train_lightning.py plan.yaml
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from protrain_runtime.integrations.lightning import UsePlan

BATCH_SIZE, SEQ_LEN = 4, 64


def make_model() -> nn.Module:
    """A small Llama with random weights; its tokens are bytes."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,  # a cache would hold keys and values through a training step
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def make_rows(count: int = 64) -> Any:
    """A data set: sequences of a text that ships with Python, a byte a token."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: count * SEQ_LEN].view(count, SEQ_LEN)
    return [{"input_ids": row, "labels": row} for row in rows]


def factory() -> tuple[nn.Module, Iterable[object]]:
    """The factory for `protrain profile`: the network and its batches, as `main` makes them."""
    return make_model(), DataLoader(make_rows(), batch_size=BATCH_SIZE)


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.loader = factory()

    def training_step(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def main(plan: str, output: str = "trained") -> None:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=5,
        gradient_clip_val=1.0,
        callbacks=[UsePlan(plan)],
        logger=False,
        default_root_dir=output,
    )
    module = LanguageModel()
    trainer.fit(module, module.loader)
    torch.save(module.model.state_dict(), f"{output}/model.pt")  # the model's own names


if __name__ == "__main__":
    main(*sys.argv[1:])
