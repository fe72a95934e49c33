"""What int8 copies do to gradients of what is not linear: a bias of second order, as derived."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from protrain_runtime.activations import compressed
from protrain_runtime.activations.compressed import quantized
from protrain_runtime.activations.forms import in_form
from tests.support.compressing import scales_of, seeded

NUM_SEEDS = 400

Expected = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of inputs and the gradient above: the bias of their gradient, and a bound on it."""


def variances_of(values: Tensor) -> Tensor:
    """Of the errors of a tensor's int8 copy: f (1 - f) scale^2, f an element's fraction."""
    flat = values.detach().flatten()
    scales = scales_of(quantized(flat), flat.numel())
    fractions = (flat.double() / scales) % 1
    return (fractions * (1 - fractions) * scales.square()).view(values.shape)


def bound_of(values: Tensor) -> Tensor:
    """The most that such a variance can be."""
    flat = values.detach().flatten()
    return (scales_of(quantized(flat), flat.numel()).square() / 4).view(values.shape)


def of_silu(hidden: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Backward multiplies by silu'(x), whose second derivative is silu's third."""
    points = torch.linspace(-12, 12, 24001, dtype=torch.float64)

    def third(at: Tensor) -> Tensor:
        sigma = at.sigmoid()
        first = sigma * (1 - sigma)
        second = first * (1 - 2 * sigma)
        return 3 * second + at * first * (1 - 6 * first)

    bias = third(hidden.double()) * above * variances_of(hidden) / 2
    return bias, third(points).abs().max() * above.abs() * bound_of(hidden) / 2


def of_softmax(hidden: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """What is saved is the output y. Of y_i g_i - y_i sum_j y_j g_j, y_i^2 g_i alone is curved."""
    output = hidden.softmax(-1)
    return -variances_of(output) * above, bound_of(output) * above.abs()


def of_layer_norm(hidden: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """As the softmax's, of the normalised input: times 1 / std^3 and 1 / features."""
    steepness = hidden.double().var(-1, correction=0, keepdim=True) ** -1.5 / hidden.shape[-1]
    bias = -variances_of(hidden) * above * steepness
    return bias, bound_of(hidden) * above.abs() * steepness


@pytest.mark.parametrize(
    ("module", "expected", "coarser"),
    [
        (nn.SiLU(), of_silu, 1),
        (nn.Softmax(-1), of_softmax, 16),
        (nn.LayerNorm(64, eps=0.0, elementwise_affine=False), of_layer_norm, 16),
    ],
    ids=["silu", "softmax", "layer norm"],
)
def test_the_bias_of_what_is_not_linear_is_the_one_of_second_order(
    module: nn.Module, expected: Expected, coarser: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taylor: half the second derivative of the backward times the variance of the copy.

    That of a softmax or a norm is lost in the noise, whose square is as large as it: with scales
    that are 16 times as large it is 16 times as large beside it.
    """
    monkeypatch.setattr(compressed, "_STEP", coarser * compressed._STEP)
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(64, 64, generator=generator)).requires_grad_()
    above = torch.randn(64, 64, generator=generator)
    [exact] = torch.autograd.grad(module(hidden * 1), hidden, above)
    mean, square = torch.zeros(64, 64).double(), torch.zeros(64, 64).double()
    for seed in range(NUM_SEEDS):
        with seeded(seed):
            output = in_form("int8", module.forward, module)(hidden * 1)
        assert isinstance(output, Tensor)
        [found] = torch.autograd.grad(output, hidden, above)
        error = (found - exact).double()
        mean += error / NUM_SEEDS
        square += error.square() / NUM_SEEDS
    bias, most = expected(hidden.detach(), above)
    assert (bias.abs() <= most + 1e-12).all()
    noise = square / NUM_SEEDS  # the mean's variance
    assert mean.square().sum() <= 1.5 * noise.sum() + most.square().sum()
    # The mean of errors is what was derived and no other: a line through both has the slope 1.
    slope = (mean * bias).sum() / bias.square().sum()
    spread = (noise * bias.square()).sum().sqrt() / bias.square().sum()
    assert abs(slope - 1) <= 4 * spread
    assert spread < 0.2  # else the slope would say nothing
