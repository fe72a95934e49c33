"""Gradient checkpointing that a Hugging Face model does by itself.

A plan decides which blocks are recomputed. A model that recomputes all of them besides would do it
twice, and a profile of it could not say what keeping activations costs.
"""

import warnings
from collections.abc import Callable

from torch import nn

_ATTRIBUTE = "gradient_checkpointing"
"""What `gradient_checkpointing_enable()` sets on the modules that recompute."""


def switch_off_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Switch it off, with one warning if it was on; returns what switches it on again."""
    recomputing = [m for m in model.modules() if getattr(m, _ATTRIBUTE, False) is True]
    if recomputing:
        warnings.warn(
            "the model's own gradient checkpointing is switched off while it is profiled or follows"
            " a plan: the plan decides which blocks are recomputed",
            stacklevel=3,
        )

    def switch(*, on: bool) -> None:
        for module in recomputing:
            setattr(module, _ATTRIBUTE, on)

    switch(on=False)
    return lambda: switch(on=True)
