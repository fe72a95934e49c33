"""`torch.compile` with an activation memory budget: the partitioner recomputes to stay below it."""

import shutil
from functools import partial
from importlib.util import find_spec

import torch
import torch._functorch.config
from torch import nn

from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, optimizer_of
from protrain_runtime.contract.records.hardware import is_accelerator

_COMPILED = ("cpu", "cuda", "xpu")
"""Types of devices that PyTorch's own compiler, Inductor, writes code for."""


def _set_up(model: nn.Module, work: Work, *, budget: float) -> Training:
    torch._functorch.config.activation_memory_budget = budget
    model.compile()  # in place: names of parameters stay
    return training(model, optimizer_of(work)(model.parameters()))


def _missing(work: Work) -> str | None:
    if work.device not in _COMPILED:
        return f"torch.compile makes no code for devices of type '{work.device}'"
    if is_accelerator(work.device) and find_spec("triton") is None:
        return "torch.compile needs the package triton on accelerators"
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "torch.compile needs a C++ compiler"
    return None


BUDGETED = tuple(
    Adapter(
        name=f"torch-budget-{budget}",
        settings=f"torch.compile of the model, activation_memory_budget={budget}",
        set_up=partial(_set_up, budget=budget),
        missing=_missing,
    )
    for budget in (0.5, 0.1)
)
