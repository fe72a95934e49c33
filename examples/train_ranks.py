"""A training loop of several devices under one plan, with checkpoints that any number continues.

protrain profile examples/train_ranks.py:factory --interconnect cpu -o profile.yaml
protrain plan profile.yaml --num-devices 2 -o plan.yaml
torchrun --nproc-per-node 2 examples/train_ranks.py plan.yaml saved
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
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


def main(plan: str, directory: str, num_steps: int = 5) -> None:
    """Train for `num_steps` more steps, from the checkpoint in `directory` where there is one."""
    dist.init_process_group()
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model, batches = factory()  # all ranks get rank 0's parameters

    model, optimizer = protrain_runtime.prepare(
        model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True)
    )
    done = 0
    if Path(directory).exists():
        done = protrain_runtime.load(model, optimizer, directory)["step"]

    # Batch n is rank n's, for n from 0 to the number of ranks; then the next of each.
    own = islice(batches, done * count + rank, None, count)
    for step, batch in zip(range(done, done + num_steps), own, strict=False):
        loss = model(**batch).loss
        loss.backward()  # when it returns, gradients are means over the ranks
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    protrain_runtime.save(model, optimizer, directory, extra={"step": done + num_steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
