"""`torch.utils.checkpoint` around every block, as transformers turns it on."""

from functools import partial
from importlib import import_module

from torch import nn

from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, optimizer_of
from protrain_runtime.contract.records.hardware import is_accelerator

_ENABLE = "activation_checkpointing_enable"
_ENABLE_BEFORE = "gradient_checkpointing_enable"  # its name in earlier releases of transformers 5


def checkpoint_every_block(model: nn.Module) -> None:
    """Recompute every block of a transformers model, in the form that PyTorch recommends."""
    enable = getattr(model, _ENABLE, None) or getattr(model, _ENABLE_BEFORE)
    enable({"use_reentrant": False})


def _set_up(model: nn.Module, work: Work, *, offload: bool) -> Training:
    if offload:
        getattr(model, _ENABLE)({"use_reentrant": False}, offload=True)
    else:
        checkpoint_every_block(model)
    return training(model, optimizer_of(work)(model.parameters()))


def _missing_offload(work: Work) -> str | None:
    if not hasattr(import_module("transformers").PreTrainedModel, _ENABLE):
        return "this version of transformers cannot offload what checkpoints keep"
    return None if is_accelerator(work.device) else "a CPU has nowhere to offload to"


CHECKPOINTED = Adapter(
    name="checkpoint",
    settings="torch.utils.checkpoint around every block, use_reentrant=False",
    set_up=partial(_set_up, offload=False),
)
CHECKPOINT_OFFLOADED = Adapter(
    name="checkpoint-offload",
    settings="checkpointing by transformers, offload=True: blocks' inputs in pinned host memory",
    set_up=partial(_set_up, offload=True),
    missing=_missing_offload,
)
