"""A model as people write them without `nn.Linear`: functional operators on bare parameters."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 256


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


class FunctionalBlock(nn.Module):
    """Attention and a feed-forward on bare parameters, with residuals.

    `ends_in_relu`: the output is what relu saves for its own backward.
    """

    def __init__(self, width: int, *, ends_in_relu: bool = False) -> None:
        super().__init__()
        self.ends_in_relu = ends_in_relu
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.qkv = weight(3 * width, width)
        self.out = weight(width, width)
        self.up = weight(2 * width, width)
        self.up_bias = nn.Parameter(torch.zeros(2 * width))
        self.down = weight(width, 2 * width)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, sequence, width], twice
        width = hidden.shape[-1]
        normed = F.layer_norm(hidden, (width,), self.scale, self.shift)
        query, key, value = F.linear(normed, self.qkv).chunk(3, dim=-1)
        scores = (query @ key.transpose(-1, -2)) / math.sqrt(width)
        hidden = hidden + F.linear(scores.softmax(-1) @ value, self.out)
        inner = F.gelu(F.linear(hidden, self.up, self.up_bias))
        hidden = hidden + F.linear(inner, self.down)
        return F.relu(hidden) if self.ends_in_relu else hidden


class FeedForwardBlock(nn.Module):
    """No attention, and products that are written to in place: the last is what the block gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate = weight(2 * width, width)
        self.up = weight(2 * width, width)
        self.down = weight(width, 2 * width)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, sequence, width], twice
        normed = F.rms_norm(hidden, (hidden.shape[-1],), self.scale)
        gate = F.linear(normed, self.gate).mul_(0.5)
        inner = F.gelu(gate) * F.linear(normed, self.up)
        return F.linear(inner, self.down).add_(hidden).relu_()


class FunctionalStack(nn.Module):
    def __init__(
        self,
        *,
        width: int = 96,
        num_blocks: int = 4,
        ends_in_relu: bool = False,
        attends: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = weight(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            FunctionalBlock(width, ends_in_relu=ends_in_relu)
            if attends
            else FeedForwardBlock(width)
            for _ in range(num_blocks)
        )
        self.head = weight(VOCABULARY, width)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, sequence] -> []
        hidden = F.embedding(tokens, self.embedding)
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(hidden, self.head)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class RandomTokens:
    """Batches that are the same every time they are asked for, without end."""

    def __iter__(self) -> Iterator[Tensor]:
        step = 0
        while True:
            generator = torch.Generator().manual_seed(step)
            yield torch.randint(VOCABULARY, (4, 64), generator=generator)
            step += 1


def factory() -> tuple[nn.Module, Iterable[Tensor]]:
    """For `protrain profile functional_model:factory`."""
    return FunctionalStack(), RandomTokens()


def relu_factory() -> tuple[nn.Module, Iterable[Tensor]]:
    """The variant whose units save their own output."""
    return FunctionalStack(ends_in_relu=True), RandomTokens()
