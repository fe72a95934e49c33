"""The optimizers that profiles can assume, by name: elementwise ones of `torch.optim`.

Elementwise: every element's update depends on that element alone, so that a parameter can be
updated in pieces with the bits of a whole update. Muon and Adafactor, which look at rows and
columns, cannot. Adagrad is missing because it makes all its states when it is constructed, before
a plan can say where they go.
"""

import difflib
from collections.abc import Callable
from functools import partial

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from protrain_plan.errors import ProtrainError

OptimizerFactory = Callable[[ParamsT], Optimizer]

# The fused kernels need no temporaries, nor does one parameter after the other. `foreach`, the
# default on CUDA, would take a copy of all parameters that are updated at once.
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": partial(torch.optim.AdamW, lr=3e-4, fused=True),
    "adam": partial(torch.optim.Adam, lr=3e-4, fused=True),
    "adamw-amsgrad": partial(torch.optim.AdamW, lr=3e-4, amsgrad=True, fused=True),
    "adamax": partial(torch.optim.Adamax, lr=3e-4, foreach=False),
    "nadam": partial(torch.optim.NAdam, lr=3e-4, foreach=False),
    "radam": partial(torch.optim.RAdam, lr=3e-4, foreach=False),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-4, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=1e-2, fused=True),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
}
DEFAULT_OPTIMIZER = "adamw"


def optimizer_factory(name: str) -> OptimizerFactory:
    """What makes the optimizer of that name; ProtrainError, with those known, for another name."""
    try:
        return OPTIMIZERS[name]
    except KeyError:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        raise ProtrainError(
            f"expected one of {', '.join(OPTIMIZERS)}, got {name!r}",
            key="optimizer",
            fix=f"did you mean {near[0]}?" if near else None,
        ) from None
