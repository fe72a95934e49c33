"""Blocks whose forward cannot run a second time with the same result, found by running it twice.

Recomputation runs a block's forward once more in backward, on the same inputs and with the same
random numbers. What else a forward reads or writes is no part of that: buffers and attributes that
it changes, inputs that it or somebody after it writes to, closures, globals, the clock.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from protrain_plan.models.batches import Batch, call_model
from protrain_plan.profiling.attributes import snapshot
from protrain_runtime import devices
from protrain_runtime.compiled import code_of, replace_code
from protrain_runtime.draws import Draws
from protrain_runtime.statistics import (
    other_buffers,
    unchanged,
    with_running_statistics,
    written_buffers,
)
from protrain_runtime.trees import taken_apart, tensors_in

Versions = list[tuple[torch.Tensor, int]]


def run_once(model: nn.Module, modules: Sequence[nn.Module | None], batch: Batch) -> dict[int, str]:
    """The blocks that cannot run twice, each with the reason, from one forward of the model.

    Fake tensors have no values: what a second run would give is not looked at then.
    """
    reasons: dict[int, str] = {}
    inputs: dict[int, Versions] = {}
    with ExitStack() as stack:
        for unit, module in enumerate(modules):
            if module is not None:
                watch = partial(_twice, unit, module, code_of(module), reasons, inputs)
                stack.callback(replace_code(module, watch))
        call_model(model, batch)
    for unit, versions in inputs.items():
        if _written(versions):
            reasons.setdefault(unit, "an input of its forward is written to after it has run")
    return reasons


def _twice(
    unit: int,
    module: nn.Module,
    forward: Callable[..., Any],
    reasons: dict[int, str],
    inputs: dict[int, Versions],
    /,
    *args: object,
    **kwargs: object,
) -> object:
    """Run a block's forward, and once more; what the first run gave goes on."""
    given = tensors_in((args, kwargs))
    before = inputs[unit] = [(t, t._version) for t in given if not t.is_inference()]
    buffers, held = other_buffers(module), snapshot(module)
    draws = Draws(module)
    tensors, again = taken_apart((args, kwargs))  # what the first run writes into is not seen
    with _first(draws, module) as states:
        result: object = forward(*args, **kwargs)
    names = written_buffers(buffers, other_buffers(module))
    changed = _changed(held, snapshot(module))
    if names:
        reasons[unit] = f"its forward writes its buffer {names[0]!r}"
    elif changed:
        reasons[unit] = f"its forward changes its attribute {changed[0]!r}"
    elif _written(before):
        reasons[unit] = "its forward writes an input in place"
    elif not any(isinstance(tensor, FakeTensor) for tensor in module.parameters()):
        second: object = None
        with suppress(Exception), _second(draws, module, states):  # any code of the model runs here
            own_args, own_kwargs = again(tensors)
            second = forward(*own_args, **own_kwargs)
        if not _same(result, second):
            reasons[unit] = "its forward gave another result when it ran again on the same inputs"
        elif _written(before):
            reasons[unit] = "its forward writes an input in place when it runs again"
    return result


@contextmanager
def _first(draws: Draws, module: nn.Module) -> Iterator[list[tuple[torch.device, torch.Tensor]]]:
    """Around the first run: PyTorch's random states before it."""
    where = {devices.HOST, *(parameter.device for parameter in module.parameters())}
    states = [(device, devices.random_state(device)) for device in where if device.type != "meta"]
    with draws.first():
        yield states


@contextmanager
def _second(
    draws: Draws, module: nn.Module, states: Sequence[tuple[torch.device, torch.Tensor]]
) -> Iterator[None]:
    """Around the second run: all random states are those of the first, and put back afterwards."""
    present = [(device, devices.random_state(device)) for device, _ in states]
    for device, state in states:
        devices.set_random_state(device, state)
    try:
        with draws.again(), unchanged(with_running_statistics(module)):
            yield
    finally:
        for device, state in present:
            devices.set_random_state(device, state)


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The attributes that were changed, made or dropped."""
    return [
        name
        for name in {**before, **after}
        if name not in before or name not in after or before[name] != after[name]
    ]


def _written(versions: Versions) -> bool:
    return any(tensor._version != version for tensor, version in versions)


def _same(one: object, other: object) -> bool:
    """Whether two results hold the same bits."""
    first, second = tensors_in(one), tensors_in(other)
    return len(first) == len(second) and all(map(_equal, first, second))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with torch.no_grad():
        return bool(torch.all((one == other) | ((one != one) & (other != other))))
