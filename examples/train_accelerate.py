"""Hugging Face Accelerate under a plan: what a plan changes is one line, `use_plan`.

protrain profile examples/train_accelerate.py:factory -o profile.yaml
protrain plan profile.yaml --max-slowdown 2 --clip -o plan.yaml
python examples/train_accelerate.py plan.yaml
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from protrain_runtime.integrations.accelerate import use_plan

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
    """The factory for `protrain profile`: the model and its batches, as `main` makes them."""
    return make_model(), DataLoader(make_rows(), batch_size=BATCH_SIZE)


def main(plan: str, output: str = "trained") -> None:
    accelerator = Accelerator(cpu=True)
    model, loader = factory()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = LinearLR(optimizer, total_iters=5)
    optimizer = use_plan(accelerator, model, optimizer, plan)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for step, batch in zip(range(5), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    accelerator.save_model(model, output)  # the model's own names and shapes


if __name__ == "__main__":
    main(*sys.argv[1:])
