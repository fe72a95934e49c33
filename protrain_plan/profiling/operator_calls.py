"""One operator as it was called, for formulas of what it takes while it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protrain_runtime.trees import tensors_in

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class OperatorCall:
    """One operator as it was called, and what it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    num_threads: int

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def given(self) -> Tensor:
        """The first argument."""
        tensor: Tensor = self.args[0]
        return tensor

    def argument(self, position: int, name: str, default: Any) -> Any:
        """An argument that may be given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


Workspace = Callable[[OperatorCall], int]
"""Bytes beyond inputs and outputs at an operator's highest point."""


def contiguous(*tensors: Tensor) -> int:
    """What copies of those take that do not lie in a row."""
    return sum(t.numel() * t.itemsize for t in tensors if not t.is_contiguous())
