"""A model under a plan keeps its parameters: replacements and conversions are refused.

`model.to(...)` is refused before any change. Changes that cannot be observed (`module.weight =
...`, `requires_grad_()`) are refused at the next training step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from protrain_runtime.states.chunks import Chunk
from protrain_runtime.states.stand_ins import plainly

_FIX = ": a script calls restore(model) before such changes; profile, plan and prepare after them"
_BY = ", by a script or by the model's own code, and the plan is for what there was"
"""The author of the change is unknown."""


def refuse_conversion(
    module: nn.Module, convert: Callable[[torch.Tensor], Any], recurse: bool = True
) -> nn.Module:
    """The `_apply` of a module whose `.to`, `.half` and the like raise if they change a tensor."""
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    for dtype, device, dim in {(t.dtype, t.device, t.dim()) for t in tensors}:
        # Two elements per dimension: the memory format is unambiguous.
        probe = torch.ones((2,) * dim, dtype=dtype, device=device)
        if not _is_alike(convert(probe), probe):
            raise RuntimeError(
                "the model follows a plan, and this would convert or move its tensors" + _FIX
            )
    return module


def _is_alike(converted: Any, probe: torch.Tensor) -> bool:
    """Whether a conversion returns the tensor, or an indistinguishable copy.

    There is one host, whatever its number: `.to("cpu:0")` copies what is on `cpu`.
    """
    on_host = probe.device.type == "cpu"
    if on_host and (probe.is_shared() or probe.is_pinned()):
        return False
    if converted is probe:
        return True
    return (
        type(converted) is torch.Tensor
        and converted.dtype == probe.dtype
        and (converted.device == probe.device or (on_host and converted.device.type == "cpu"))
        and converted.layout == probe.layout
        and converted.stride() == probe.stride()
        and not (on_host and (converted.is_shared() or converted.is_pinned()))
        and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (converted, probe)))
    )


class UnchangedModel:
    """Compares the model's parameters with the planned ones."""

    def __init__(self, model: nn.Module, chunks: Sequence[Chunk]) -> None:
        parts = {part.parameter: part for chunk in chunks for part in chunk.slices}
        self._places = [
            (module._parameters, name, parts[parameter])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter in parts
        ]
        self._modules = [
            (module._modules, name, child, f"{path}.{name}".lstrip("."))
            for path, module in model.named_modules()
            for name, child in module._modules.items()
        ]

    def check(self) -> None:
        """RuntimeError if a module or parameter was replaced, or changed its kind."""
        for modules, name, child, path in self._modules:
            if modules.get(name) is not child:
                raise RuntimeError(f"{path!r} was replaced{_BY}{_FIX}")
        with plainly():
            for parameters, name, part in self._places:
                parameter = parameters.get(name)
                if parameter is not part.parameter:
                    what = "was replaced"
                elif parameter.dtype is not part.dtype or parameter.shape != part.shape:
                    what = f"was made {tuple(parameter.shape)}, {parameter.dtype}"
                elif parameter.requires_grad and not part.trainable:
                    what = "was made to require a gradient"
                else:
                    continue
                raise RuntimeError(f"{part.name!r} {what}{_BY}{_FIX}")
