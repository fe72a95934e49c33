"""A Hugging Face model's cache of keys and values, useless in a training step.

Configurations enable it by default. Each block then writes its keys and values to an object that
all blocks get and the model returns: a plan can neither move these tensors nor rerun such a block.
Without the cache a forward computes the same, and its `past_key_values` are None.

Forwards without gradients keep it for decoding; so do calls with `use_cache=True`.
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
    """Switch caches off; if the model also `evaluates`, only in forwards with gradients.

    Warns if they were on, unless `stacklevel` is None. Returns the undo.
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
    """Configurations, nested ones included, that enable a cache; each once."""
    names = {kind.__name__.casefold() for kind in type(config).__mro__}
    if "pretrainedconfig" not in names or id(config) in seen:
        return
    seen.add(id(config))
    if getattr(config, _SWITCH, False) is True:
        yield config
    for inner in list(vars(config).values()):
        yield from _caching(inner, seen)
