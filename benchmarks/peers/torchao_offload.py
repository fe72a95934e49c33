"""torchao's `CPUOffloadOptimizer`: optimizer states and gradients in host memory."""

import importlib
from importlib.util import find_spec

from torch import nn

from benchmarks.peers.checkpointed import checkpoint_every_block
from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, optimizer_of


def _set_up(model: nn.Module, work: Work) -> Training:
    optim = importlib.import_module("torchao.optim")
    checkpoint_every_block(model)
    # It calls what it is given with the groups alone, so our factory with float32 masters fits:
    # its own AdamW would keep the states in the parameters' bfloat16.
    optimizer = optim.CPUOffloadOptimizer(
        model.parameters(), optimizer_of(work), offload_gradients=True
    )
    return training(model, optimizer)


def _missing(work: Work) -> str | None:
    if find_spec("torchao") is None:
        return "the package torchao is not installed"
    return (
        None if work.device in ("cuda", "xpu") else "CPUOffloadOptimizer runs on CUDA and XPU only"
    )


TORCHAO_OFFLOAD = Adapter(
    name="torchao-offload",
    settings="CPUOffloadOptimizer(offload_gradients=True), float32 masters, checkpointing",
    set_up=_set_up,
    missing=_missing,
)
