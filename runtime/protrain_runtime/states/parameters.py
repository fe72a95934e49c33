"""Parameters that no chunk can hold as they are: refused by name, or left on the device."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.states.chunks import Chunk
from protrain_runtime.states.quantized import refuse_quantized
from protrain_runtime.states.stand_ins import AwayParameter


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


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans: [first, past)."""
    if tensor.numel() == 0:
        return 0, 0
    span = 1 + sum(int(n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + span * tensor.itemsize


def overlapping(chunks: Sequence[Chunk]) -> set[int]:
    """The units with parameters that share memory, with another parameter or within one."""
    found: set[int] = set()
    for members in _by_storage(chunks).values():
        reached, last = 0, -1
        for first, past, unit, parameter in sorted(members, key=lambda m: m[:3]):
            if past - first < parameter.numel() * parameter.itemsize:  # expanded
                found.add(unit)
            if first < reached:
                found |= {unit, last}
            if past > reached:
                reached, last = past, unit
    return found


def of_one_storage(chunks: Sequence[Chunk]) -> set[int]:
    """The units with parameters in a storage that holds other units' parameters, too."""
    groups = ({unit for *_, unit, _ in members} for members in _by_storage(chunks).values())
    return {unit for units in groups if len(units) > 1 for unit in units}


def _by_storage(chunks: Sequence[Chunk]) -> dict[int, list[tuple[int, int, int, nn.Parameter]]]:
    """The parameters that have elements by storage: from where, to where, of which unit."""
    found: dict[int, list[tuple[int, int, int, nn.Parameter]]] = defaultdict(list)
    for chunk in chunks:
        for part in chunk.slices:
            if part.numel and not isinstance(part.parameter, AwayParameter):
                storage = part.parameter.untyped_storage()._cdata
                found[storage].append((*extent(part.parameter), chunk.unit, part.parameter))
    return found
