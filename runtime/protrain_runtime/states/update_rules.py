"""Update rules: what an optimizer's step on a parameter keeps, and where the parameter may be cut.

An entry for an optimizer is one line in `protrain_plan.models.optimizers.OPTIMIZERS`: what it keeps
is not written down, but seen in a step on a small parameter, which tells it of any class of
`torch.optim` and of a user's.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.program.program import PIECE_ALIGNMENT, in_blocks

OptimizerFactory = Callable[[Iterable[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What an optimizer keeps of one parameter of a dtype.

    states   the elementwise ones by key: a value for every element, so that they lie in a chunk's
             store beside the parameters, are staged with them, and are cut where these are
    scalars  bytes of each of the others, such as AdamW's step, which stay in the process
    """

    states: Mapping[str, torch.dtype]
    scalars: tuple[int, ...]

    @staticmethod
    def of(
        factory: OptimizerFactory,
        dtype: torch.dtype = torch.float32,
        options: Mapping[str, Any] | None = None,
    ) -> "UpdateRule":
        """That of parameters of `dtype` in a group with these options."""
        dummy = nn.Parameter(torch.zeros(2, dtype=dtype))
        dummy.grad = torch.zeros(2, dtype=dtype)
        optimizer = factory([{**(options or {}), "params": [dummy]}])
        optimizer.step()
        kept = {k: v for k, v in optimizer.state[dummy].items() if isinstance(v, torch.Tensor)}
        return UpdateRule(
            {key: value.dtype for key, value in kept.items() if value.shape == dummy.shape},
            tuple(value.nbytes for value in kept.values() if value.shape != dummy.shape),
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of the elementwise states of one element."""
        return sum(dtype.itemsize for dtype in self.states.values())

    def scalar_bytes(self, *, block: int = 1) -> int:
        """Bytes of the other states of one parameter, each in whole blocks of `block` bytes."""
        return sum(in_blocks(num_bytes, block) for num_bytes in self.scalars)


def check_elementwise(factory: OptimizerFactory, dtype: torch.dtype) -> None:
    """ProtrainError where a step on a matrix is another than steps on its rows, or these fail."""
    values = torch.linspace(-1, 1, 4 * PIECE_ALIGNMENT).reshape(4, PIECE_ALIGNMENT).to(dtype)
    whole = _stepped(factory, values)
    try:
        rows = [_stepped(factory, row) for row in values]
    except ValueError as error:
        raise _not_elementwise(whole, str(error)) from error
    parts = [[row.param_groups[0]["params"][0] for row in rows]]
    wholes = [whole.param_groups[0]["params"][0]]
    state = whole.state[wholes[0]]
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            wholes.append(value)
            parts.append([row.state[row.param_groups[0]["params"][0]].get(key) for row in rows])
    for one, several in zip(wholes, parts, strict=True):
        if any(part is None for part in several) or not torch.equal(one, torch.stack(several)):
            raise _not_elementwise(whole, "one element's update depends on others")


def _stepped(factory: OptimizerFactory, values: torch.Tensor) -> torch.optim.Optimizer:
    """The optimizer of one parameter, after a step."""
    parameter = nn.Parameter(values.clone())
    parameter.grad = values.flip(-1) + 0.25
    optimizer = factory([{"params": [parameter]}])
    optimizer.step()
    return optimizer


def _not_elementwise(optimizer: torch.optim.Optimizer, problem: str) -> ProtrainError:
    return ProtrainError(
        f"{type(optimizer).__name__} cannot update a parameter in pieces: {problem}",
        fix="an elementwise optimizer, such as AdamW or SGD; or a plan whose states stay on the"
        " device",
    )
