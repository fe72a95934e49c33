"""Plain PyTorch."""

from torch import nn

from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, optimizer_of


def _set_up(model: nn.Module, work: Work) -> Training:
    return training(model, optimizer_of(work)(model.parameters()))


PLAIN = Adapter(name="plain", settings="PyTorch as it is", set_up=_set_up)
