"""Calls of `F.cross_entropy` that a form of the last part may compute in tiles."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, nll_loss

from protrain_runtime.activations.late_values import with_values

REDUCTIONS = {"mean": 1, "sum": 2}  # as `at::Reduction` counts


class LossCall(NamedTuple):
    """The arguments of `F.cross_entropy`, by its names."""

    input: Tensor
    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def is_over_rows(self, logits: Tensor) -> bool:
        """Whether it is a mean or a sum over rows of these logits [rows, classes], in a graph."""
        plain = self.weight is None and self.size_average is None and self.reduce is None
        return (
            plain
            and not self.label_smoothing
            and self.reduction in REDUCTIONS
            and torch.is_grad_enabled()
            and logits.dim() == 2
            and logits.numel() > 0
            and self.target.dtype == torch.int64
            and self.target.shape == logits.shape[:1]
            and self.target.device == logits.device
        )

    def plainly(self) -> Tensor:
        """What `F.cross_entropy` computes of them, with values in place of those that wait."""
        options = self._asdict()
        tensors = options.pop("input"), options.pop("target")
        loss: Tensor = with_values(cross_entropy, tensors, options)
        return loss


def computed_in(logits: Tensor) -> torch.dtype | None:
    """The dtype that plain PyTorch computes the loss in; None where it takes two of them.

    Autocast says it of an operator when that is called.
    """
    kind = logits.device.type
    if not torch.is_autocast_enabled(kind):
        return logits.dtype
    tried = log_softmax(torch.zeros((1, 1), dtype=logits.dtype, device=logits.device), 1)
    target = torch.zeros(1, dtype=torch.int64, device=logits.device)
    return tried.dtype if nll_loss(tried, target).dtype == tried.dtype else None


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Where operators on such a tensor run in the dtypes that they are given."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
