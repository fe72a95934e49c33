"""Equality up to rounding: gradients beside those of plain PyTorch and of float64."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

in_every_precision = pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "autocast"],
)


def assert_as_near(
    found: Mapping[str, Tensor], plain: Mapping[str, Tensor], true: Mapping[str, Tensor]
) -> None:
    """Sums in another order than plain PyTorch's have other errors, of the same size.

    `true` are the gradients of the same model in float64.
    """
    assert found.keys() == plain.keys() == true.keys()
    for key, exact in true.items():
        error = (found[key].double() - exact).norm()
        least = (plain[key].double() - exact).norm()
        assert error <= 1.5 * least + 1e-6 * exact.norm(), key
