"""`torch.autograd.graph.save_on_cpu`: all saved tensors go to host memory."""

from functools import partial

import torch
from torch import nn

from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, optimizer_of
from protrain_runtime.contract.records.hardware import is_accelerator


def _set_up(model: nn.Module, work: Work) -> Training:
    around = partial(torch.autograd.graph.save_on_cpu, pin_memory=is_accelerator(work.device))
    return training(model, optimizer_of(work)(model.parameters()), around=around)


SAVED_ON_CPU = Adapter(
    name="save-on-cpu",
    settings="torch.autograd.graph.save_on_cpu around forward, pin_memory on accelerators",
    set_up=_set_up,
    on_a_cpu="moves nothing: what is saved is in host memory already; this is plain PyTorch",
)
