"""The plain training step that most peers share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from benchmarks.peers.work import Training
from protrain_plan.models.batches import Batch, call_model, loss_of


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    around: Callable[[], AbstractContextManager[object, bool | None]] = nullcontext,
) -> Training:
    """Forward (inside `around`), backward, step, zero_grad."""

    def step(batch: Batch) -> float:
        with around():
            loss = loss_of(call_model(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Training(step=step)
