"""protrain-plan: the model follows a plan."""

from torch import nn

import protrain_runtime
from benchmarks.peers.loop import training
from benchmarks.peers.work import Adapter, Training, Work, factory_of


def _set_up(model: nn.Module, work: Work) -> Training:
    # Under a plan of master precision, `prepare` adds the float32 copies itself.
    model, optimizer = protrain_runtime.prepare(model, work.plan, optimizer=factory_of(work))
    return training(model, optimizer)


PLANNED = Adapter(
    name="protrain-plan",
    settings="prepare() with a plan for the same limit",
    set_up=_set_up,
)
