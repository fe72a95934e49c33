"""DeepSpeed: ZeRO-Offload (stage 2) and ZeRO-3 with parameters in host memory, on one rank."""

import importlib
import os
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from benchmarks.peers.checkpointed import checkpoint_every_block
from benchmarks.peers.work import Adapter, Training, Work
from protrain_plan.models.batches import Batch, call_model, loss_of

_RENDEZVOUS = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}


def config_of(work: Work, *, stage: int) -> dict[str, Any]:
    """The configuration of DeepSpeed's offloading tutorials, AdamW as in every other cell."""
    pinned = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": pinned,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage == 3:
        zero["offload_param"] = pinned
    return {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": work.dtype == "bfloat16"},
        "zero_optimization": zero,
        # Its own default has no weight decay; these are PyTorch's defaults.
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "steps_per_print": 10**9,
    }


def _set_up(model: nn.Module, work: Work, *, stage: int) -> Training:
    os.environ.update(_RENDEZVOUS)
    deepspeed = importlib.import_module("deepspeed")
    checkpoint_every_block(model)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(work, stage=stage)
    )

    def step(batch: Batch) -> float:
        loss = loss_of(call_model(engine, batch))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Training(step=step, close=engine.destroy)


def _missing(work: Work) -> str | None:
    if find_spec("deepspeed") is None:
        return "the package deepspeed is not installed"
    return None if work.device == "cuda" else "compared on CUDA only"


DEEPSPEED = tuple(
    Adapter(
        name=name,
        settings=f"ZeRO stage {stage}, {what} in pinned host memory, DeepSpeedCPUAdam,"
        " checkpointing",
        set_up=partial(_set_up, stage=stage),
        missing=_missing,
        home="host",
    )
    for name, stage, what in (
        ("deepspeed-zero2-offload", 2, "optimizer states"),
        ("deepspeed-zero3-offload", 3, "parameters and optimizer states"),
    )
)
