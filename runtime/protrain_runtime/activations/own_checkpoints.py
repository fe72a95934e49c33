"""A model's own `torch.utils.checkpoint` around blocks: the plan decides instead.

PyTorch runs a checkpointed function without activations, and again in backward. A plan has slots
for blocks that run once, and decides itself what is kept: the function runs once, as if called
directly (`replaced`). Checkpoints inside a block or a part stay the model's.

Gradients have the same bits as with the checkpoint. Non-reentrant graphs are the same. In reentrant
ones, gradients from inside are summed before they are added to an input's gradients from outside
(`_apart`), and a function without an input that requires gradients gives its parameters none.
Effects that occur twice under PyTorch and once under a plan are refused.

`switch_off_checkpointing` turns off a Hugging Face model's switch for its checkpoints.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint as pytorch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from protrain_runtime.activations.recompute import Draws, with_running_statistics
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.devices import device as devices

OTHER_ORDER = (
    "a parameter is shared with others, {!r}, and reentrant checkpoints add up such gradients in"
    " another order"
)

Decides = Callable[[object], bool]
"""Whether to replace a checkpoint around this function."""


class _Here(threading.local):
    """The state of this thread."""

    decides: Decides | None = None  # None: PyTorch's checkpoints
    inside: tuple[bool, ...] = ()  # whether each running replaced function is reentrant


_HERE = _Here()
_OLD, _NEW = (f"_checkpoint_without_reentrant_generator{suffix}" for suffix in ("", "_impl"))
_CALLED = _NEW if hasattr(pytorch, _NEW) else _OLD  # by `checkpoint`: the new one since 2.14
_GENERATOR: Callable[..., Any] = getattr(pytorch, _CALLED)
_REENTRANT = pytorch.CheckpointFunction


@contextmanager
def replaced(decides: Decides) -> Iterator[None]:
    """Replace the checkpoints that `decides` selects, in this thread."""
    # Importers hold `checkpoint` itself, which looks these up in each call.
    setattr(pytorch, _CALLED, _without_reentrance)
    _REENTRANT.apply = _reentrant  # type: ignore[method-assign]
    before, _HERE.decides = _HERE.decides, decides
    try:
        yield
    finally:
        _HERE.decides = before


def inside() -> tuple[bool, ...]:
    """Whether each running replaced function is reentrant, outermost first."""
    return _HERE.inside


def _is_replaced(function: object) -> bool:
    decides = _HERE.decides
    return decides is not None and torch.is_grad_enabled() and decides(function)


def _without_reentrance(function: object, *args: Any, **kwargs: Any) -> Any:
    if not _is_replaced(function):
        return _GENERATOR(function, *args, **kwargs)
    preserve: bool = kwargs["preserve_rng_state"] if _CALLED == _NEW else args[0]
    return _once(preserve, reentrant=False)


def _reentrant(function: Callable[..., object], preserve: bool, *args: object) -> object:
    if not _is_replaced(function):
        apply: Callable[..., object] = super(_REENTRANT, _REENTRANT).apply
        return apply(function, preserve, *args)
    if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        pytorch.check_backward_validity(args)  # warns
        with torch.no_grad():
            return function(*args)
    run = _once(preserve, reentrant=True)
    next(run)
    result = function(*map(_apart, args))
    next(run, None)
    return result


def _apart(value: object) -> object:
    return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value


def _once(preserve: bool, *, reentrant: bool) -> Iterator[None]:
    """Code before and after the function, as a generator that yields once."""
    before = b"" if preserve else _random_state()
    draws = Draws(())
    outside, _HERE.inside = _HERE.inside, (*_HERE.inside, reentrant)
    try:
        with draws.first():
            yield
    finally:
        _HERE.inside = outside
    if draws.any:
        refuse("code", "it draws from Python's or NumPy's generator")
    if not preserve and _random_state() != before:
        refuse("code", "it draws random numbers with preserve_rng_state=False")


def _random_state() -> bytes:
    """PyTorch's random states as Python bytes, without tensors."""
    with _disable_current_modes():
        states = [torch.get_rng_state(), *devices.all_random_states()[1]]
        return b"".join(state.numpy().tobytes() for state in states)


def refuse_around(model: nn.Module, block: nn.Module) -> None:
    """Refuse a block in a replaced function that would train differently without its checkpoint."""
    kind = type(block).__name__
    for norm in with_running_statistics(block):
        if norm.training:
            refuse(kind, f"{type(norm).__name__} counts the batch in its running statistics twice")
    if any(inside()):
        own, modules = set(block.parameters()), set(block.modules())
        for path, module in model.named_modules():
            if module not in modules and not own.isdisjoint(module._parameters.values()):
                refuse(kind, OTHER_ORDER.format(path))


def refuse(what: str, why: str) -> NoReturn:
    """Refuse a checkpoint around `what`, whose results would differ under a plan."""
    raise ProtrainError(
        f"the model calls torch.utils.checkpoint around {what}, which PyTorch then runs once more"
        f" in backward. A plan decides about that itself, and the results would differ: {why}",
        fix="call it without checkpoint(): the plan decides which blocks are recomputed",
    )


_ATTRIBUTE = "gradient_checkpointing"
"""The attribute that `gradient_checkpointing_enable()` sets on modules that recompute."""
_FUNCTION = "_gradient_checkpointing_func"
"""The checkpoint function with its settings, left there by that call."""
_ASKING = "_require_grads_hook"
"""The handle that the same function leaves on a model whose embeddings' outputs ask for gradients
from then on, for the sake of reentrant recomputation. Where embeddings are frozen, a plan knows
nothing of these outputs and their gradients."""


def switch_off_checkpointing(model: nn.Module, *, stacklevel: int = 1) -> Callable[[], None]:
    """Switch checkpoints off, with a warning if they were on; returns the undo."""
    recomputing = [m for m in model.modules() if getattr(m, _ATTRIBUTE, False) is True]
    asking = [m for m in model.modules() if _ASKING in vars(m)] if recomputing else []
    if recomputing:
        warnings.warn(
            "the model's own gradient checkpointing is switched off while it is profiled or follows"
            " a plan: the plan decides which blocks are recomputed",
            stacklevel=stacklevel,
        )

    def switch(*, on: bool) -> None:
        for module in recomputing:
            setattr(module, _ATTRIBUTE, on)
        for owner in asking:
            getattr(owner, f"{'enable' if on else 'disable'}_input_require_grads")()

    undo = ExitStack()
    undo.callback(switch, on=True)
    for module in recomputing:
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).mro()):
            settings = getattr(getattr(module, _FUNCTION, None), "keywords", {})
            if settings.get("use_reentrant"):
                handle = module.register_forward_pre_hook(
                    lambda _, given: tuple(map(_apart, given))
                )
                undo.callback(handle.remove)
    switch(on=False)
    return undo.close
