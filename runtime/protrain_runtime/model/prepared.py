"""What a prepared model carries with it, and how it is given back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from protrain_plan.records.plan import Plan
from protrain_runtime.devices.turns import Turns
from protrain_runtime.engine.engine import Engine
from protrain_runtime.model.copies import Undo, offloaded_parameters
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.ranks.group import CHECKPOINT_LIMIT_S, Ranks
from protrain_runtime.states.chunks import Chunk, read_parameter
from protrain_runtime.states.unchanged_model import UnchangedModel

ATTRIBUTE = "_protrain_prepared"
"""Where a prepared model keeps its `Prepared`: on itself, so that both are freed together."""


@dataclass(slots=True)
class Prepared:
    """What `prepare` attached to a model."""

    engine: Engine | None
    chunks: Sequence[Chunk]
    optimizer: PlannedOptimizer
    undo: Undo
    plan: Plan
    below: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ranks: Ranks | None = None
    unchanged: UnchangedModel | None = None


def prepared_of(model: nn.Module) -> Prepared | None:
    """What `prepare` attached to a model; None where it follows no plan."""
    prepared: Prepared | None = model.__dict__.get(ATTRIBUTE)
    return prepared


def together(model: nn.Module, what: str) -> AbstractContextManager[None]:
    """A call for all ranks that share the model: it ends well on all of them, or they all raise."""
    prepared = prepared_of(model)
    if prepared is None or prepared.ranks is None:
        return nullcontext()
    return prepared.ranks.telling(what, limit_s=CHECKPOINT_LIMIT_S)


def meet(model: nn.Module, what: str) -> None:
    """Inside `together`: all ranks have come here, and whatever failed before has ended it."""
    prepared = prepared_of(model)
    if prepared is not None and prepared.ranks is not None:
        prepared.ranks.meet(what, limit_s=CHECKPOINT_LIMIT_S)


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that a model runs under; None without a plan, or where it keeps everything."""
    prepared = prepared_of(model)
    return prepared.engine if prepared else None


def turns_of(model: nn.Module) -> Turns | None:
    """Who may use a model; None where its engine has no say."""
    engine = engine_of(model)
    return engine.turns if engine else None


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model follows; None without one."""
    prepared = prepared_of(model)
    return prepared.plan if prepared else None


def below_device(model: nn.Module) -> tuple[int, int]:
    """Bytes that a model holds in host memory and on disk because of its plan."""
    prepared = prepared_of(model)
    return prepared.below() if prepared else (0, 0)


def parameter_values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters by name with their values, an offloaded one at a time.

    Works for models that follow no plan, too.
    """
    prepared = prepared_of(model)
    if prepared and prepared.engine:
        prepared.engine.settle("parameters were read")
    offloaded = offloaded_parameters(prepared.chunks if prepared else ())
    for name, parameter in model.named_parameters():
        if name in offloaded:
            yield name, read_parameter(*offloaded[name])
        else:
            yield name, parameter.detach()


def restore(model: nn.Module) -> nn.Module:
    """Give the plain model back, with its current parameters; its optimizer goes on plainly.

    A model that follows no plan is given back as it is.
    """
    prepared = prepared_of(model)
    if prepared is None:
        return model
    with together(model, "restore()"):
        if prepared.engine is not None:
            prepared.engine.settle("restore() was called")
            prepared.engine.outside("restore() was called")
    return restore_as_is(model)


def restore_as_is(model: nn.Module) -> nn.Module:
    """`restore`, also where an update was cut short: for steps that change no parameter."""
    prepared: Prepared = model.__dict__[ATTRIBUTE]
    for chunk in prepared.chunks if prepared.engine is not None else ():
        chunk.forget_dropped()
        for part in chunk.slices:
            if part.name in chunk.offloaded_gradients:  # they wait below the device
                part.parameter.grad = chunk.offloaded_gradients[part.name].whole()
        chunk.clear_gradients()
    del model.__dict__[ATTRIBUTE]
    try:
        prepared.optimizer.give_back()
    finally:
        undo_all(prepared.undo)
    return model


def undo_all(undo: Undo) -> None:
    """Undo the last first, and all of them: what one cannot bring back does not stay open."""
    with ExitStack() as stack:
        for each in undo:
            stack.callback(each)
        undo.clear()
