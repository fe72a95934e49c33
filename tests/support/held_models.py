"""Models that hold more than autograd saves, and models that are more than a chain of blocks."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.building import seeded

WIDTH, BATCH, SEQUENCE, VOCABULARY = 32, 4, 64, 64
"""A hidden state is 32 KiB: above what a swap leaves on the device."""


class Block(nn.Module):
    """A feed-forward with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, sequence, width], twice
        out: Tensor = hidden + self.down(self.inner(hidden))
        return out

    def inner(self, hidden: Tensor) -> Tensor:
        return F.gelu(self.up(self.norm(hidden)))


class Stack(nn.Module):
    """Blocks between an embedding and a head; returns the loss."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, sequence] -> []
        return self.loss(self.hidden(self.embedding(tokens)), tokens)

    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def stack_of(kind: type[nn.Module]) -> type[Stack]:
    return type(f"StackOf{kind.__name__}", (Stack,), {"block": kind})


def made(kind: type[nn.Module]) -> nn.Module:
    with seeded(0):
        return kind().train()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


# --- held besides what autograd saves -------------------------------------------------------------


class _Sine(torch.autograd.Function):
    """Keeps its input on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out: Tensor = gradient * ctx.x.cos()
        return out


class _Exponential(torch.autograd.Function):
    """Keeps its output on the context, and saves its input as it should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kept = {"output": [x.tanh()]}
        out: Tensor = x + ctx.kept["output"][0]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = gradient * (2 - ctx.kept["output"][0].square() + 0 * x)
        return out


class OnContext(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        out: Tensor = _Sine.apply(super().inner(hidden))  # type: ignore[no-untyped-call]
        return out


class OnContextToo(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        out: Tensor = _Exponential.apply(super().inner(hidden))  # type: ignore[no-untyped-call]
        return out


class InputOnContext(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        sine: Tensor = _Sine.apply(hidden)  # type: ignore[no-untyped-call]
        return super().forward(sine)


class InAttribute(Block):
    last: Tensor

    def inner(self, hidden: Tensor) -> Tensor:
        self.last = super().inner(hidden)
        return self.last


class InContainer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: deque[Tensor] = deque(maxlen=2)

    def inner(self, hidden: Tensor) -> Tensor:
        inner = super().inner(hidden)
        self.seen.append(inner.detach())
        return inner


class AllHidden(Stack):
    """As `output_hidden_states` does."""

    def forward(self, tokens: Tensor) -> Any:
        states = [self.embedding(tokens)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"loss": self.loss(states[-1], tokens), "hidden_states": states}


class Named(Stack):
    """Every hidden state has a name in the model's frame."""

    def hidden(self, hidden: Tensor) -> Tensor:
        first = self.blocks[0](hidden)
        second = self.blocks[1](first)
        third = self.blocks[2](second)
        fourth = self.blocks[3](third)
        fifth: Tensor = self.blocks[4](fourth)
        return fifth


# --- kept from one step to the next ---------------------------------------------------------------


class Remembering(Block):
    """As Transformer-XL: what the last forward gave is an input of this one."""

    memory: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        past = torch.zeros_like(hidden) if self.memory is None else self.memory
        out = super().forward(hidden + 0.1 * past)
        self.memory = out.detach()
        return out


class Caching(Stack):
    cache: tuple[Tensor, ...] = ()

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.cache = (hidden.detach(), tokens)
        return super().loss(hidden, tokens)


class Averaging(Stack):
    """A buffer is replaced in every forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(BATCH, SEQUENCE, WIDTH))

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach()
        return super().loss(hidden + 0.01 * self.mean, tokens)


class Hoarding(Stack):
    """Keeps more after every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Tensor] = []

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.log.append(hidden.detach())
        return super().loss(hidden, tokens)


# --- more than a chain ----------------------------------------------------------------------------


class Dense(Stack):
    """Every block reads what all before it gave."""

    class Reader(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.up = nn.Linear(count * WIDTH, 2 * WIDTH)
            self.down = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, *states: Tensor) -> Tensor:
            out: Tensor = self.down(F.gelu(self.up(torch.cat(states, -1))))
            return out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dense.Reader(count + 1) for count in range(5))

    def hidden(self, hidden: Tensor) -> Tensor:
        states = [hidden]
        for block in self.blocks:
            states.append(block(*states))
        return states[-1]


class UNet(Stack):
    """The way up reads what the way down gave, last first."""

    class Up(Block):
        def __init__(self) -> None:
            super().__init__()
            self.merge = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, hidden: Tensor, skip: Tensor | None = None) -> Tensor:
            assert skip is not None
            return super().forward(self.merge(torch.cat((hidden, skip), -1)))

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(UNet.Up() for _ in self.blocks)

    def hidden(self, hidden: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for block in self.blocks:
            skips.append(hidden)
            hidden = block(hidden)
        for up in self.ups:
            hidden = up(hidden, skips.pop())
        return hidden


class Biased(Stack):
    """All blocks add one bias that has parameters, as T5's do."""

    class Attention(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
            query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
            scores = query @ key.transpose(-1, -2) + bias
            return super().forward(hidden + scores.softmax(-1) @ value)

    block = Attention

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Embedding(2 * SEQUENCE, 1)

    def hidden(self, hidden: Tensor) -> Tensor:
        place = torch.arange(SEQUENCE)
        bias = self.distances(place[:, None] - place[None] + SEQUENCE).squeeze(-1)
        for block in self.blocks:
            hidden = block(hidden, bias)
        return hidden


class Messages(Stack):
    """Nodes and edges of a graph; the last block's edges are nobody's."""

    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message = nn.Linear(3 * WIDTH, WIDTH)
            self.node = nn.Linear(2 * WIDTH, WIDTH)
            self.edge = nn.Linear(3 * WIDTH, WIDTH)

        def forward(
            self, nodes: Tensor, edges: Tensor, ends: tuple[Tensor, Tensor]
        ) -> tuple[Tensor, Tensor]:
            source, target = ends
            joined = torch.cat((nodes[source], nodes[target], edges), -1)
            sums = torch.zeros_like(nodes).index_add(0, target, F.relu(self.message(joined)))
            moved = nodes + torch.tanh(self.node(torch.cat((nodes, sums), -1)))
            joined = torch.cat((nodes[source], nodes[target], edges), -1)
            return moved, edges + self.edge(joined)

    block = Passing

    def hidden(self, hidden: Tensor) -> Tensor:
        nodes = hidden.flatten(0, 1)
        count = nodes.shape[0]
        source = torch.arange(2 * count) % count
        ends, edges = (source, (7 * source + 3) % count), torch.ones(2 * count, WIDTH)
        for block in self.blocks:
            nodes, edges = block(nodes, edges, ends)
        return nodes.view(hidden.shape)


class Far(Stack):
    """Blocks of two outputs: one for the next block, one for the block after the next."""

    class Two(Block):
        def forward(self, hidden: Tensor, far: Tensor | None = None) -> Any:
            inner = self.inner(hidden)
            out = hidden + self.down(inner)
            return (out if far is None else out * far.sigmoid()), 2 * inner[..., :WIDTH]

    block = Two

    def hidden(self, hidden: Tensor) -> Tensor:
        far: list[Tensor | None] = [None, None]
        for block in self.blocks:
            hidden, other = block(hidden, far.pop(0))
            far.append(other)
        return hidden + sum(one for one in far if one is not None)


class Again(Stack):
    """The embedding is added again after every other block."""

    def hidden(self, hidden: Tensor) -> Tensor:
        first = hidden
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            hidden = hidden + first if number % 2 else hidden
        return hidden


HELD: tuple[type[nn.Module], ...] = (
    stack_of(OnContext),
    stack_of(OnContextToo),
    stack_of(InputOnContext),
    stack_of(InAttribute),
    stack_of(InContainer),
    AllHidden,
    Named,
)
KEPT: tuple[type[nn.Module], ...] = (stack_of(Remembering), Caching, Averaging)
LINKED: tuple[type[nn.Module], ...] = (Messages, Dense, UNet, Biased, Far, Again)
