"""Training that goes on where it was killed: run it, press Ctrl-C or kill it, run it again.

protrain profile examples/resume.py:factory -o profile.yaml
protrain plan profile.yaml --max-slowdown 2 -o plan.yaml
python examples/resume.py plan.yaml saved
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import protrain_runtime

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


def make_batches() -> Iterator[dict[str, Tensor]]:
    """Consecutive bytes of a text that ships with Python, without end."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    window = BATCH_SIZE * SEQ_LEN
    batches = text[: len(text) // window * window].view(-1, BATCH_SIZE, SEQ_LEN)
    return cycle({"input_ids": batch, "labels": batch} for batch in batches)


def factory() -> tuple[nn.Module, Iterator[dict[str, Tensor]]]:
    """The factory for `protrain profile`: the model and its batches, as `main` makes them."""
    return make_model(), make_batches()


def main(plan: str, directory: Path, num_steps: int = 40, save_every: int = 10) -> None:
    """Train, saving to `directory`; continue from there where it holds a checkpoint."""
    torch.manual_seed(0)
    model, batches = factory()

    model, optimizer = protrain_runtime.prepare(
        model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=num_steps)

    first = 0
    # The index is written last: where it is, a whole checkpoint is.
    if (directory / "model.safetensors.index.json").exists():
        extra = protrain_runtime.load(model, optimizer, directory)
        schedule.load_state_dict(extra["schedule"])
        first = extra["step"]

    for step, batch in enumerate(islice(batches, first, num_steps), start=first):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if (step + 1) % save_every == 0:
            extra = {"step": step + 1, "schedule": schedule.state_dict()}
            protrain_runtime.save(model, optimizer, directory, extra=extra)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
