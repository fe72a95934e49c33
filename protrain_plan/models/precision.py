"""How the dtype of a workload becomes dtypes of parameters and of computation."""

import functools
from typing import assert_never

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.models.building import TORCH_DTYPES
from protrain_plan.records.profile import DType, Precision


def parameter_dtype(dtype: DType, precision: Precision) -> torch.dtype:
    """What the model's parameters are stored in; ProtrainError where the two do not go together."""
    match precision:
        case "pure":
            return TORCH_DTYPES[dtype]
        case "autocast":
            _check_narrow(dtype, precision, "float32 parameters are cast to a narrower one")
            return torch.float32
        case "master":
            _check_narrow(dtype, precision, "float32 copies stand for parameters of a narrower one")
            return TORCH_DTYPES[dtype]
        case _:
            assert_never(precision)


def stepped_dtype(dtype: DType, precision: Precision) -> DType:
    """What the optimizer steps on."""
    return dtype if precision == "pure" else "float32"


def _check_narrow(dtype: DType, precision: Precision, reason: str) -> None:
    if dtype == "float32":
        raise ProtrainError(
            f"{precision} needs the dtype bfloat16 or float16, got float32: {reason}",
            key="precision",
            fix="--dtype bfloat16, or --precision pure",
        )


def computing_in(model: nn.Module, dtype: DType, precision: Precision) -> nn.Module:
    """The model, with its forward under autocast where the precision says so.

    Autocast belongs to the model, so that whoever calls it computes the same. Its cache of cast
    weights is off: it would keep a copy of every parameter until the forward ends, also of those
    that have left the device, and a recomputed block would not get it back.
    """
    if precision != "autocast":
        return model
    forward, narrow = model.forward, TORCH_DTYPES[dtype]

    @functools.wraps(forward)
    def under_autocast(*args: object, **kwargs: object) -> object:
        # Asked when it runs: a model may be built without memory for its parameters.
        device_type = next(p.device.type for p in model.parameters() if not p.is_meta)
        with torch.autocast(device_type, dtype=narrow, cache_enabled=False):
            return forward(*args, **kwargs)

    model.forward = under_autocast
    return model
