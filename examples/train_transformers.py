"""Hugging Face's Trainer under a plan: what a plan changes is one line, `use_plan`.

protrain profile examples/train_transformers.py:factory -o profile.yaml
protrain plan profile.yaml --max-slowdown 2 --clip -o plan.yaml
python examples/train_transformers.py plan.yaml
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from protrain_runtime.integrations.transformers import use_plan

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
    """The factory for `protrain profile`: model and batches, as the Trainer will make them."""
    return make_model(), DataLoader(make_rows(), batch_size=BATCH_SIZE)


def main(plan: str, output: str = "trained") -> None:
    args = TrainingArguments(
        output_dir=output,
        max_steps=5,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(make_model(), args, train_dataset=make_rows())
    use_plan(trainer, plan)
    trainer.train()
    trainer.save_model()  # the model's own names and shapes


if __name__ == "__main__":
    main(*sys.argv[1:])
