"""Small models of random make: what people write that no published architecture has at once.

A `Shape` says all of it, so that a failing example is one line that builds the model again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.building import seeded
from tests.support.runtime_cases import device, moved_to_device

WIDTH, BATCH, SEQUENCE, VOCABULARY = 32, 4, 40, 48
"""A hidden state is 20 KiB: above what a swap leaves on the device."""

BlockKind = Literal["linear", "attention", "convolution", "batch norm", "in place", "functional"]
Between = Literal["nothing", "function", "in place", "parameter", "dropout"]
Extra = Literal["none", "every block", "last block"]
Tie = Literal["none", "head", "blocks", "both"]


@dataclass(frozen=True)
class Shape:
    """A stack of blocks between an embedding and a head.

    blocks      their kinds, in order
    between     what the model itself computes after each block
    extra       who reads the model's second input, by keyword
    skip        a later part reads what the first block gave, besides the block after it
    tuples      blocks take and give a tuple of the hidden state and something that rides along
    aside       another block is computed after the first, and nobody uses its result
    tie         the head shares the embedding's weight; the first and last block share one weight
    unused      parameters that no forward reads: of the model and of each block
    frozen      every n-th parameter is frozen; 0 for none
    dropout     its probability in blocks
    """

    blocks: tuple[BlockKind, ...]
    between: tuple[Between, ...]
    extra: Extra = "none"
    skip: bool = False
    tuples: bool = False
    aside: bool = False
    tie: Tie = "none"
    unused: bool = False
    frozen: int = 0
    dropout: float = 0.0


class Block(nn.Module):
    """One of the kinds, with a residual."""

    def __init__(self, kind: BlockKind, shape: Shape) -> None:
        super().__init__()
        self.kind, self.shape = kind, shape
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        match kind:
            case "attention":
                self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
            case "convolution":
                self.convolve = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
            case "batch norm":
                self.batch_norm = nn.BatchNorm1d(WIDTH)
            case "functional":
                self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH).t())  # not row-major
            case _:
                pass
        self.spare = nn.Parameter(torch.ones(5)) if shape.unused else None

    def forward(self, given: object, extra: Tensor | None = None) -> object:
        hidden, *rest = given if isinstance(given, tuple) else (given,)
        assert isinstance(hidden, Tensor)
        out = hidden + self._computed(self.norm(hidden))
        if extra is not None:
            out = out * extra
        out = F.dropout(out, self.shape.dropout, self.training)
        return (out, *rest) if isinstance(given, tuple) else out

    def _computed(self, hidden: Tensor) -> Tensor:  # [batch, sequence, width], twice
        inner: Tensor = self.inner(hidden)
        match self.kind:
            case "linear":
                return F.gelu(inner)
            case "attention":
                query, key, value = self.attend(hidden).chunk(3, dim=-1)
                return inner + F.scaled_dot_product_attention(query, key, value)
            case "convolution":
                convolved: Tensor = self.convolve(inner.transpose(1, 2))
                return convolved.transpose(1, 2).relu()
            case "batch norm":
                normed: Tensor = self.batch_norm(inner.transpose(1, 2))
                return normed.transpose(1, 2)
            case "in place":
                return inner.mul_(0.5).relu_()
            case "functional":
                return torch.tanh(F.linear(inner, self.scale)) * inner


class Model(nn.Module):
    """The stack; returns the loss beside what a loop may look at."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, shape) for kind in shape.blocks)
        self.aside = Block("linear", shape) if shape.aside else None
        self.scales = nn.ParameterList(
            torch.ones(WIDTH) if between == "parameter" else torch.ones(0)
            for between in shape.between
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if shape.tie in ("head", "both"):
            self.head.weight = self.embedding.weight
        if shape.tie in ("blocks", "both"):
            first, last = self.blocks[0], self.blocks[-1]
            assert isinstance(first, Block) and isinstance(last, Block)
            last.inner.weight = first.inner.weight
        self.spare = nn.Parameter(torch.ones(7)) if shape.unused else None

    def forward(self, tokens: Tensor, *, gate: Tensor) -> Mapping[str, Tensor]:
        shape = self.shape
        hidden: Tensor = self.embedding(tokens)
        riding = hidden.mean()
        first: Tensor | None = None
        for number, block in enumerate(self.blocks):
            last = number + 1 == len(self.blocks)
            wanted = shape.extra == "every block" or (shape.extra == "last block" and last)
            given: object = (hidden, riding) if shape.tuples else hidden
            result = block(given, extra=gate) if wanted else block(given)
            hidden = result[0] if isinstance(result, tuple) else result
            first = hidden if first is None else first
            if self.aside is not None and number == 0:
                self.aside(hidden)
            match shape.between[number]:
                case "nothing":
                    pass
                case "function":
                    hidden = F.silu(hidden)
                case "in place":
                    hidden.mul_(0.5).add_(0.1)
                case "parameter":
                    hidden = hidden * self.scales[number]
                case "dropout":
                    hidden = F.dropout(hidden, 0.1, self.training)
        if shape.skip and first is not None:
            hidden = hidden + first
        logits = self.head(hidden)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "riding": riding}


def random_model(shape: Shape, *, seed: int = 0) -> nn.Module:
    with seeded(seed):
        model = Model(shape).train()
    for number, parameter in enumerate(model.parameters()):
        if shape.frozen and number % shape.frozen == 0:
            parameter.requires_grad_(False)
    return model.to(device())


def random_batch(step: int) -> Mapping[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    made: Mapping[str, Tensor] = moved_to_device(
        {
            "tokens": torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator),
            "gate": torch.rand(BATCH, SEQUENCE, 1, generator=generator),
        }
    )
    return made
