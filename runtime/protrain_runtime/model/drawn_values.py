"""A new model's values on their way to their planned tiers."""

import torch
from torch import nn

from protrain_runtime.model.prepared import Prepared, offloaded_parameters
from protrain_runtime.states.chunks import write_values
from protrain_runtime.states.values import unpacked_values


class DrawnValues:
    """The values that a model's constructor drew, by parameter; each is dropped after use."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self._values = values

    def facts(self) -> str:
        """The same text on all ranks: all take rank 0's values."""
        return "drawn"

    def fill(self, model: nn.Module, prepared: Prepared) -> None:
        """Copy every value to its place; ranks get rank 0's."""
        ranks, offloaded = prepared.ranks, offloaded_parameters(prepared)
        packed = {name: unpacked for _, name, unpacked in unpacked_values(model, offloaded)}
        for name, parameter in model.named_parameters():
            if name not in self._values:
                continue
            values = self._values.pop(name).to(parameter.device)
            if ranks is not None:
                ranks.broadcast([values])
            if name in packed and values.is_floating_point():
                packed[name].pack(values.contiguous())
            elif name in offloaded:
                write_values(*offloaded[name], values)
            else:
                parameter.data.copy_(values)
