"""A training loop of one's own under a plan: what `prepare` changes is four lines.

protrain profile tiny-llama --batch-size 4 --seq-len 64 -o profile.yaml
protrain plan profile.yaml --device-memory 450MiB -o plan.yaml
python examples/train.py plan.yaml
"""

import sys
from functools import partial

import torch

import protrain_runtime
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.sources import load_source


def main(plan: str, num_steps: int = 5) -> None:
    """Train the preset `tiny-llama` on text that ships with Python."""
    source = load_source("tiny-llama")
    model = source.build(seed=0)
    batches = source.batches(batch_size=4, seq_len=64)

    model, optimizer = protrain_runtime.prepare(
        model, plan, optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=num_steps)

    for step, batch in zip(range(num_steps), batches, strict=False):
        loss = loss_of(call_model(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step}: loss {loss.item():.4f}")

    torch.save(model.state_dict(), "tiny-llama.pt")  # the model's own names and shapes


if __name__ == "__main__":
    main(sys.argv[1])
