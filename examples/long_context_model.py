"""A small language model for long texts: a token attends to its own window and the one before.

For `protrain profile examples/long_context_model.py:factory`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

TOKENS, VOCABULARY = 131_072, 16_384
WIDTH, HEADS, BLOCKS, WINDOW = 64, 2, 2, 256


class Attention(nn.Module):
    """Causal attention to the last `WINDOW` tokens; zeros are before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, length, WIDTH], twice
        batch, length, _ = hidden.shape
        split = (batch, length // WINDOW, WINDOW, 3, HEADS, WIDTH // HEADS)
        query, key, value = self.qkv(hidden).view(split).permute(3, 0, 1, 4, 2, 5)
        key, value = (torch.cat([before(one), one], -2).flatten(0, 1) for one in (key, value))
        place, seen = torch.arange(WINDOW)[:, None], torch.arange(2 * WINDOW)
        mask = (seen > place) & (seen <= place + WINDOW)
        found = F.scaled_dot_product_attention(query.flatten(0, 1), key, value, attn_mask=mask)
        mixed: Tensor = self.out(found.transpose(1, 2).reshape(batch, length, WIDTH))
        return mixed


def before(windows: Tensor) -> Tensor:  # [batch, windows, ...], twice
    """The window before each."""
    return torch.cat([torch.zeros_like(windows[:, :1]), windows[:, :-1]], 1)


class Mlp(nn.Module):
    """A gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, length, WIDTH], twice
        inner: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return inner


class Block(nn.Module):
    """Attention and a feed-forward, each with its norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, length, WIDTH], twice
        hidden = hidden + self.attention(self.norms[0](hidden))
        found: Tensor = hidden + self.mlp(self.norms[1](hidden))
        return found


class Model(nn.Module):
    """Embedding, blocks and a head over the whole vocabulary; returns the loss.

    With `checkpointing` its blocks are recomputed by `torch.utils.checkpoint`.
    """

    checkpointing = False

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, length + 1] -> []
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            if self.checkpointing:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Texts:
    """Batches of one text of random tokens, the same ones whenever they are asked for."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(self.vocabulary, (1, self.length + 1), generator=generator)


def factory() -> tuple[Model, Texts]:
    """The model and its texts of 131,072 tokens."""
    return Model(VOCABULARY), Texts(TOKENS, VOCABULARY)


def short_factory() -> tuple[Model, Texts]:
    """The same for texts of 4,096 tokens, with a smaller vocabulary: to try things."""
    return Model(VOCABULARY // 4), Texts(TOKENS // 32, VOCABULARY // 4)
