"""Models whose layers run several times in a forward, as people write them and as advised."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.support.hostile_models import (
    VOCABULARY,
    WIDTH,
    Block,
    Hostile,
    Stack,
    batch_of,
    in_order,
    stack,
)


class Call(nn.Module):
    """One call of a layer that others call, too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Any:
        return self.layer(hidden)


class Depth(Stack):
    """Recurrent depth: the same layers, three times."""

    def __init__(self, *, advised: bool) -> None:
        super().__init__(depth=2)
        passes = [*self.blocks] * 3
        self.passes: Any = nn.ModuleList(map(Call, passes)) if advised else passes

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for layer in self.passes:
            hidden = layer(hidden)
        return hidden


def likelihoods(stack: Stack, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The mean log-likelihood of each sequence."""
    logits = stack.head(hidden)[:, :-1].transpose(1, 2)
    return -F.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


def pooled(stack: Stack, hidden: Tensor, tokens: Tensor) -> Tensor:
    """One embedding for each sequence."""
    found: Tensor = stack.head(hidden.mean(1))
    return found


class Pairs(nn.Module):
    """Two forwards of one model, or one on both batches together."""

    def __init__(self, ends: Callable[..., Tensor], loss: Callable[..., Tensor], *, advised: bool):
        super().__init__()
        self.model, self.loss, self.advised = Stack(depth=3, ends=ends), loss, advised

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        other = tokens.flip(1)
        if self.advised:
            return self.loss(*self.model(torch.cat([tokens, other]), step).chunk(2))
        return self.loss(self.model(tokens, step), self.model(other, step))


class Captions(nn.Module):
    """CoCa: one transformer encodes the text, and again the text with the image."""

    def __init__(self, *, advised: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.calls: Any = [self.layers, self.layers]
        if advised:
            self.calls = nn.ModuleList(nn.ModuleList(map(Call, self.layers)) for _ in range(2))

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        image = self.inlet(self.embedding(tokens.flip(1)))
        alone = self.embedding(tokens)
        for layer in self.calls[0]:
            alone = layer(alone)
        both = alone + image
        for layer in self.calls[1]:
            both = layer(both)
        caption = F.cross_entropy(self.outlet(both).flatten(0, 1), tokens.flatten() % WIDTH)
        loss: Tensor = caption + (alone.mean(1) - image.mean(1)).square().mean()
        return loss


def contrasted(query: Tensor, document: Tensor) -> Tensor:
    return F.cross_entropy(query @ document.T, torch.arange(len(query)))


def preferred(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(chosen - rejected).mean()


REPEATING: dict[str, Callable[..., nn.Module]] = {
    "bi-encoder": partial(Pairs, pooled, contrasted),
    "preferences": partial(Pairs, likelihoods, preferred),
    "captions": Captions,
    "depth": Depth,
}


def repeating(name: str, advised: bool) -> Hostile:
    return Hostile(partial(REPEATING[name], advised=advised))


def _factory(name: str) -> Callable[[], tuple[nn.Module, list[Any]]]:
    return lambda: (REPEATING[name](advised=False), [batch_of(0)])


bi_encoder, depth = _factory("bi-encoder"), _factory("depth")
"""Factories for the command line."""


def thrice(stack: Any, hidden: Tensor, step: int) -> Tensor:
    for _ in range(3):
        hidden = stack.core(hidden)
    return in_order(stack, hidden, step)


def before_core(core: Callable[[], nn.Module]) -> nn.Module:
    """Blocks that run once, after something that runs three times."""
    return stack(run=thrice, core=core)()
