"""A Hugging Face model's cache of keys and values, which has no use in a training step.

Configurations have it on by default. Each block then writes its keys and values to an object that
all blocks get, and that the model returns: a plan cannot move what lies there, nor run such a block
once more. Without it a forward computes the same, and its `past_key_values` are None.

Forwards without gradients keep their cache, because decoding needs it. So do those that are called
with `use_cache=True`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

_SWITCH = "use_cache"


def switch_off_caches(
    model: nn.Module, *, evaluates: bool = False, stacklevel: int | None = 1
) -> Callable[[], None]:
    """Switch caches off; where the model also `evaluates`, only in its forwards with gradients.

    With a warning if they were on, unless `stacklevel` is None. Returns the undo.
    """
    seen: set[int] = set()
    found = (module.__dict__.get("config") for module in model.modules())
    configs = [each for config in found for each in _caching(config, seen)]
    if configs and stacklevel is not None:
        warnings.warn(
            "config.use_cache is off in forwards with gradients while the model is profiled or"
            " follows a plan: training has no use for a cache of keys and values",
            stacklevel=stacklevel,
        )

    def switch(*, on: bool) -> None:
        for config in configs:
            setattr(config, _SWITCH, on)

    if not configs or not evaluates:
        switch(on=False)
        return lambda: switch(on=True)
    undo = ExitStack()
    for hook in (
        model.register_forward_pre_hook(lambda *_: switch(on=not torch.is_grad_enabled())),
        model.register_forward_hook(lambda *_: switch(on=True), always_call=True),
    ):
        undo.callback(hook.remove)
    return undo.close


def _caching(config: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the configuration and those in it, each once, that switch a cache on."""
    names = {kind.__name__.casefold() for kind in type(config).__mro__}
    if "pretrainedconfig" not in names or id(config) in seen:
        return
    seen.add(id(config))
    if getattr(config, _SWITCH, False) is True:
        yield config
    for inner in list(vars(config).values()):
        yield from _caching(inner, seen)
