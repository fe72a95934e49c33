"""Training that goes on where it was killed: run it, press Ctrl-C or kill it, run it again.

protrain profile tiny-llama --batch-size 4 --seq-len 64 -o profile.yaml
protrain plan profile.yaml --device-memory 450MiB -o plan.yaml
python examples/resume.py plan.yaml saved
"""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch

import protrain_runtime
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.sources import load_source
from protrain_runtime.checkpoints import INDEX


def main(plan: str, directory: Path, num_steps: int = 40, save_every: int = 10) -> None:
    """Train the preset `tiny-llama`, saving to `directory`."""
    source = load_source("tiny-llama")
    model = source.build(seed=0)
    batches = source.batches(batch_size=4, seq_len=64)

    model, optimizer = protrain_runtime.prepare(
        model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=num_steps)

    first = 0
    if (directory / INDEX).exists():
        extra = protrain_runtime.load(model, optimizer, directory)
        schedule.load_state_dict(extra["schedule"])
        first = extra["step"]

    for step, batch in enumerate(islice(batches, first, num_steps), start=first):
        loss = loss_of(call_model(model, batch))
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
