"""Parameters that no chunk can hold, refused by name."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.states.quantized import refuse_quantized


def refuse_parameters(model: nn.Module, *, source: str) -> None:
    """ProtrainError where there is nothing to train, or a parameter is no plain tensor."""
    refuse_quantized(model, source=source)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ProtrainError(
            "the model has no trainable parameters: there is no step to plan",
            source=source,
            fix="require gradients of some",
        )
    parameter: Any  # of classes that mypy thinks cannot exist
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            problem = f"is a {type(parameter).__name__}, which is made of tensors of its own"
            fix = "plan the model before its parameters are wrapped, distributed or quantised"
        elif not issubclass(type(parameter), nn.Parameter | FakeTensor):
            problem, fix = f"is a {type(parameter).__name__}", "make it a torch.nn.Parameter"
        elif parameter.layout != torch.strided:
            problem, fix = f"is sparse ({parameter.layout})", "make it dense"
        elif parameter.is_quantized:
            problem, fix = "is quantised", "plan the model before its parameters are quantised"
        elif torch._debug_has_internal_overlap(parameter) == 1:
            problem, fix = "has elements that share memory", "make it contiguous"
        else:
            continue
        raise ProtrainError(
            f"the parameter '{name}' {problem}: a chunk is made of plain tensors",
            source=source,
            fix=fix,
        )
