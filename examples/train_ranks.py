"""A training loop of several devices under one plan, with checkpoints that any number continues.

protrain profile tiny-llama --batch-size 4 --seq-len 64 --interconnect cpu -o profile.yaml
protrain plan profile.yaml --num-devices 2 -o plan.yaml
torchrun --nproc-per-node 2 examples/train_ranks.py plan.yaml saved
"""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import protrain_runtime
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.sources import load_source


def main(plan: str, directory: str, num_steps: int = 5) -> None:
    """Train the preset `tiny-llama` on text that ships with Python."""
    dist.init_process_group()
    rank, count = dist.get_rank(), dist.get_world_size()
    source = load_source("tiny-llama")
    model = source.build(seed=rank)  # all ranks get rank 0's parameters
    batches = source.batches(batch_size=4, seq_len=64)

    model, optimizer = protrain_runtime.prepare(
        model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True)
    )
    done = 0
    if Path(directory).exists():
        done = protrain_runtime.load(model, optimizer, directory)["step"]

    # Batch n is rank n's, for n from 0 to the number of ranks; then the next of each.
    own = islice(batches, done * count + rank, None, count)
    for step, batch in zip(range(done, done + num_steps), own, strict=False):
        loss = loss_of(call_model(model, batch))
        loss.backward()  # when it returns, gradients are means over the ranks
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    protrain_runtime.save(model, optimizer, directory, extra={"step": done + num_steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
