"""The optimizers that profiles can assume, by name: elementwise ones of `torch.optim`.

Elementwise: every element's update depends on that element alone, so that a parameter can be
updated in pieces with the bits of a whole update. Muon and Adafactor, which look at rows and
columns, cannot. Adagrad is missing because it makes all its states when it is constructed, before
a plan can say where they go.

PyTorch's fused kernels take real floating-point parameters and dense gradients alone. A model with
complex parameters gets the same optimizers unfused; plain SGD, which takes sparse gradients, is
never fused.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from protrain_plan.errors import ProtrainError
from protrain_plan.records.profile import Precision
from protrain_runtime.states.update_rules import with_master_weights

OptimizerFactory = Callable[[ParamsT], Optimizer]


def _fused(kind: Callable[..., Optimizer], **options: Any) -> OptimizerFactory:
    """What makes the optimizer fused; unfused where a parameter is complex."""

    def make(parameters: ParamsT) -> Optimizer:
        entries = [
            {**entry, "params": list(_tensors([entry]))} if isinstance(entry, dict) else entry
            for entry in parameters
        ]
        if any(tensor.is_complex() for tensor in _tensors(entries)):
            return kind(entries, **options, foreach=False)
        return kind(entries, **options, fused=True)

    return make


def _tensors(entries: Iterable[Any]) -> Iterator[Tensor]:
    """The parameters in what an optimizer takes: tensors, names with tensors, or groups."""
    for entry in entries:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, dict):
            own = entry["params"]
            yield from _tensors([own] if isinstance(own, Tensor) else own)
        else:
            yield entry[1]


# The fused kernels need no temporaries, nor does one parameter after the other. `foreach`, the
# default on CUDA, would take a copy of all parameters that are updated at once.
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": _fused(torch.optim.AdamW, lr=3e-4),
    "adam": _fused(torch.optim.Adam, lr=3e-4),
    "adamw-amsgrad": _fused(torch.optim.AdamW, lr=3e-4, amsgrad=True),
    "adamax": partial(torch.optim.Adamax, lr=3e-4, foreach=False),
    "nadam": partial(torch.optim.NAdam, lr=3e-4, foreach=False),
    "radam": partial(torch.optim.RAdam, lr=3e-4, foreach=False),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-4, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=1e-2, foreach=False),
    "sgd-momentum": _fused(torch.optim.SGD, lr=1e-2, momentum=0.9),
}
DEFAULT_OPTIMIZER = "adamw"


def optimizer_factory(name: str, precision: Precision = "pure") -> OptimizerFactory:
    """What makes the optimizer of that name, on master weights where the precision says so.

    ProtrainError, with those known, for another name.
    """
    try:
        plain = OPTIMIZERS[name]
        return with_master_weights(plain) if precision == "master" else plain
    except KeyError:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        raise ProtrainError(
            f"expected one of {', '.join(OPTIMIZERS)}, got {name!r}",
            key="optimizer",
            fix=f"did you mean {near[0]}?" if near else None,
        ) from None
