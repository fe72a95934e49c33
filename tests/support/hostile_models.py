"""Small models that do what people do and what a profile of one step may not see, by class.

Each either trains under every plan like plain PyTorch, or is refused in clear words.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import T5Config, T5ForConditionalGeneration

from protrain_plan.models.batches import Batch
from protrain_plan.models.building import seeded

WIDTH, BATCH, SEQUENCE, VOCABULARY = 32, 4, 40, 48
"""A hidden state is 20 KiB: above what a swap leaves on the device."""


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """How a model is built, and what may become of it.

    refusal     words of a refusal that is right, as a regular expression; "" where none is
    trains      whether training like plain PyTorch is right
    gives_up    the step that is refused when it comes, where a plan has units to follow
    optimizer   whose states the profile counts; `factory` where its own would not take the model
    """

    make: Callable[[], nn.Module]
    refusal: str = ""
    trains: bool = True
    gives_up: int | None = None
    optimizer: str = "adamw"
    factory: Callable[..., torch.optim.Optimizer] | None = None

    def batch(self, step: int) -> Batch:
        return batch_of(step)

    def build(self) -> nn.Module:
        with seeded(0):
            return self.make().train()


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "tokens": torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator),
        "step": step,
    }


# --- what most of them share ----------------------------------------------------------------------


class Block(nn.Module):
    """A residual around two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def computed(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.outer(F.gelu(self.inner(self.norm(hidden))))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.computed(hidden)


class Stack(nn.Module):
    """Blocks between an embedding and a head; subclasses say how they follow each other."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(hidden)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        return self.loss(self.through(self.embedding(tokens), step), tokens)


def of_blocks(block: Callable[[], nn.Module], depth: int = 4) -> Callable[[], nn.Module]:
    return partial(Stack, block, depth)


# --- 1. parameters that other units read ----------------------------------------------------------


class NormPenalty(Stack):
    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        penalty = torch.stack([parameter.norm() for parameter in self.parameters()]).sum()
        return super().loss(hidden, tokens) + 1e-3 * penalty


class LoggedNorms(Stack):
    """What a training script prints, computed in forward without a graph."""

    norms: list[float]

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        loss = super().forward(tokens, step)
        with torch.no_grad():
            self.norms = [parameter.norm().item() for parameter in self.parameters()]
        return loss * (1 + 1e-3 * sum(self.norms))


class ReadsOther(Block):
    """Its forward reads a weight of another block, which it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Block] = []  # no module list: not its own

    def forward(self, hidden: Tensor) -> Tensor:
        for other in self.others:
            hidden = hidden + 0.1 * F.linear(F.gelu(hidden), other.inner.weight[:WIDTH])
        return super().forward(hidden)


class ReadsBlocks(Stack):
    """Every block reads a weight of the one `ahead` of it, or behind where that is negative."""

    def __init__(self, ahead: int) -> None:
        super().__init__(ReadsOther)
        blocks = [block for block in self.blocks if isinstance(block, ReadsOther)]
        for number, block in enumerate(blocks):
            if 0 <= number + ahead < len(blocks):
                block.others = [blocks[number + ahead]]


class MovingTarget(Stack):
    """A copy of the blocks follows them, and the loss compares what both give (BYOL)."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.target = deepcopy(self.blocks).requires_grad_(False)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.blocks.parameters(), strict=True)
            for target, online in pairs:
                target.lerp_(online, 0.1)
            aim = hidden.detach()
            for block in self.target:
                aim = block(aim)
        return super().through(hidden, step) + 0.1 * aim


class TiedMiddle(Stack):
    def __init__(self) -> None:
        super().__init__()
        first, second = self.blocks[1], self.blocks[2]
        assert isinstance(first, Block) and isinstance(second, Block)
        second.inner.weight = first.inner.weight


# --- 2. control flow ------------------------------------------------------------------------------


class LayerDrop(Stack):
    """Blocks that are left out at random."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            if not self.training or self.draw() < 0.6:
                hidden = block(hidden)
        return hidden


class StochasticDepth(Block):
    """Gives back its input at random."""

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and torch.rand(()).item() < 0.4:
            return hidden
        return super().forward(hidden)


class Chosen(Stack):
    """The step says which blocks run, in which order."""

    def __init__(self, order: Callable[[int], Sequence[int]]) -> None:
        super().__init__()
        self.order = order

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for number in self.order(step):
            hidden = self.blocks[number](hidden)
        return hidden


class Shared(Stack):
    """One block, called several times (ALBERT), before two of its own."""

    def __init__(self, times: Callable[[int], int]) -> None:
        super().__init__(depth=3)
        self.shared, self.times = Block(), times

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for _ in range(self.times(step)):
            hidden = self.shared(hidden)
        return super().through(hidden, step)


class CountsSteps(Stack):
    """The number of calls, a plain attribute, says how deep the model is."""

    calls = 0

    def through(self, hidden: Tensor, step: int) -> Tensor:
        self.calls += 1
        for block in self.blocks[: 2 + self.calls % 3]:
            hidden = block(hidden)
        return hidden


def drawn_by_torch() -> float:
    return torch.rand(()).item()


def swapped_at_two(step: int) -> Sequence[int]:
    return (0, 2, 1, 3) if step == 2 else (0, 1, 2, 3)


def twice_at_two(step: int) -> Sequence[int]:
    return (0, 1, 1, 2, 3) if step == 2 else (0, 1, 2, 3)


def early_exit(step: int) -> Sequence[int]:
    return (0, 1) if step % 2 else (0, 1, 2, 3)


def without_last(step: int) -> Sequence[int]:
    return (0, 1, 2) if step % 2 else (0, 1, 2, 3)


def without_first(step: int) -> Sequence[int]:
    return (1, 2, 3) if step % 2 else (0, 1, 2, 3)


def branches(step: int) -> Sequence[int]:
    return (0, 1) if step % 2 else (2, 3)


def late_comer(step: int) -> Sequence[int]:
    """A block that does not run in the first steps, of which one is profiled."""
    return (0, 1, 2, 3) if step >= 4 else (0, 1, 3)


# --- 3. in place ----------------------------------------------------------------------------------


class AddsToInput(Block):
    """The residual is the input itself; nothing had saved it."""

    def computed(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.outer(F.gelu(self.inner(hidden * 0.5)))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += self.computed(hidden)
        return hidden


class ScalesInput(AddsToInput):
    """Its input is another one when it is computed again."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden.mul_(0.9)
        return hidden + self.computed(hidden)


class WritesView(AddsToInput):
    def forward(self, hidden: Tensor) -> Tensor:
        out = self.computed(hidden)
        out[:, 0] += hidden[:, 0].mean()
        out[..., : WIDTH // 2].mul_(0.5)
        return out


class Between(Stack):
    """The model itself writes what a block gave, before the next one takes it."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__(NoResidual)
        self.write = write

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            given = hidden * 0.5
            hidden = block(given)
            self.write(hidden, given)
        return hidden


class NoResidual(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.computed(hidden)


class RunningSum(Stack):
    """One tensor goes through the whole model, and every block's result is added to it."""

    def __init__(self) -> None:
        super().__init__(NoNorm)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            hidden += block(hidden)
        return hidden


class NoNorm(AddsToInput):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.computed(hidden)


def add_given(hidden: Tensor, given: Tensor) -> None:
    hidden.add_(given)


def activate(hidden: Tensor, given: Tensor) -> None:
    F.relu(hidden, inplace=True)


def mask(hidden: Tensor, given: Tensor) -> None:
    hidden.masked_fill_(given.detach() > 0.5, 0.0)


# --- 4. peaks -------------------------------------------------------------------------------------


class DenseBlock(nn.Module):
    """Reads all that came before (DenseNet)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.mix = nn.Linear(count * WIDTH, WIDTH)
        self.body = Block()

    def forward(self, before: list[Tensor]) -> Tensor:
        out: Tensor = self.body(F.gelu(self.mix(torch.cat(before, dim=-1))))
        return out


class Dense(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DenseBlock(count) for count in range(1, 5))

    def through(self, hidden: Tensor, step: int) -> Tensor:
        before = [hidden]
        for block in self.blocks:
            before.append(block(before))
        return before[-1]


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.body = Block()

    def forward(self, hidden: Tensor, skip: Tensor) -> Tensor:
        out: Tensor = self.body(self.mix(torch.cat([hidden, skip], dim=-1)))
        return out


class UNet(Stack):
    """What every encoder gives waits for a decoder, the last for the first."""

    def __init__(self) -> None:
        super().__init__(depth=3)
        self.decoders = nn.ModuleList(Decoding() for _ in range(3))

    def through(self, hidden: Tensor, step: int) -> Tensor:
        skips: list[Tensor] = []
        for block in self.blocks:
            hidden = block(hidden)
            skips.append(hidden)
            hidden = F.avg_pool1d(hidden.transpose(1, 2), 2).transpose(1, 2)
        for decoder in self.decoders:
            skip = skips.pop()
            hidden = hidden.repeat_interleave(2, dim=1)[:, : skip.shape[1]]
            hidden = decoder(hidden, skip)
        return hidden


class Messages(nn.Module):
    """Nodes and edges of a graph, each made of the others and of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(3 * WIDTH, WIDTH)
        self.node = nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self, nodes: Tensor, edges: Tensor, source: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        both = torch.cat([nodes[:, source], nodes[:, target], edges], dim=-1)
        edges = edges + F.silu(self.edge(both))
        arrived = torch.zeros_like(nodes).index_add(1, target, edges)
        return nodes + F.silu(self.node(torch.cat([nodes, arrived], dim=-1))), edges


class Graph(Stack):
    def __init__(self) -> None:
        super().__init__(Messages)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        source = torch.arange(3 * SEQUENCE) % SEQUENCE
        target = (source * 7 + 3) % SEQUENCE
        edges = hidden[:, source] - hidden[:, target]
        for block in self.blocks:
            hidden, edges = block(hidden, edges, source, target)
        return hidden + edges.mean()


class BiasedAttention(nn.Module):
    """The first one makes the bias of all (T5), of how far positions are from each other."""

    def __init__(self, *, makes_bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Embedding(2 * SEQUENCE, 4) if makes_bias else None

    def forward(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            at = torch.arange(SEQUENCE)
            bias = self.bias(at[None] - at[:, None] + SEQUENCE).permute(2, 0, 1)
        heads = self.attend(self.norm(hidden)).unflatten(-1, (3, 4, WIDTH // 4))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) + bias).softmax(dim=-1)
        return hidden + (weights @ value).transpose(1, 2).flatten(2), bias


class Relative(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BiasedAttention(makes_bias=number == 0) for number in range(4))

    def through(self, hidden: Tensor, step: int) -> Tensor:
        bias = None
        for block in self.blocks:
            hidden, bias = block(hidden, bias)
        return hidden


class EndsInNorm(Block):
    """Keeps nothing of what it gives; who reads that keeps it."""

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.norm(hidden)
        return out * 1.5


class ReadBetween(Stack):
    """Equal blocks in a row, after one of which the model computes something."""

    def __init__(self) -> None:
        super().__init__(EndsInNorm, depth=5)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number == 2:
                hidden = hidden * self.scale
        return hidden


class FirstToLast(Stack):
    """What the first of equal blocks gave is added after the last."""

    def __init__(self) -> None:
        super().__init__(EndsInNorm, depth=5)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        first: Tensor = self.blocks[0](hidden)
        hidden = first
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden + first


class KeepsOnContext(torch.autograd.Function):
    """Tensors that saved-tensor hooks do not see."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.hidden, ctx.gate = hidden, torch.sigmoid(hidden)
        gate: Tensor = ctx.gate
        return hidden * gate

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gate: Tensor = ctx.gate
        through: Tensor = gradient * (gate + ctx.hidden * gate * (1 - gate))
        return through


class OnContext(Block):
    def computed(self, hidden: Tensor) -> Tensor:
        inner: Tensor = KeepsOnContext.apply(self.inner(self.norm(hidden)))  # type: ignore[no-untyped-call]
        out: Tensor = self.outer(inner)
        return out


class OwnCheckpoint(torch.autograd.Function):
    """Computes a function again in backward, as people wrote before PyTorch did it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run, ctx.hidden = run, hidden
        with torch.no_grad():
            return run(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            hidden = ctx.hidden.detach().requires_grad_()
            torch.autograd.backward(ctx.run(hidden), gradient)
        found: Tensor | None = hidden.grad
        return found, None


class Checkpointed(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = OwnCheckpoint.apply(hidden, super().forward)  # type: ignore[no-untyped-call]
        return out


class Remembers(Block):
    """What it was given last time is read this time (Transformer-XL)."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        before = hidden if self.memory is None else torch.cat([self.memory, hidden], dim=1)
        self.memory = hidden.detach()
        scores = hidden @ before.transpose(1, 2) / WIDTH
        return super().forward(hidden + 0.1 * scores.softmax(dim=-1) @ before)


class KeepsOutput(Block):
    """An attribute holds the output, with its graph, up to the next forward."""

    last: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        self.last = super().forward(hidden)
        return self.last


class GrowingCache(Block):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.history.append(hidden.detach())
        return super().forward(hidden + 0.1 * torch.stack(self.history).mean(dim=0))


# --- 5. randomness --------------------------------------------------------------------------------


class Scaled(Block):
    """What the block computes is scaled by a number that is drawn when it runs."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.draw() * self.computed(hidden)


def drawn_by_python() -> float:
    return random.random()


def drawn_by_numpy() -> float:
    return float(np.random.rand())


class NumpyMask(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(*hidden.shape) > 0.1)
        return hidden + self.computed(hidden) * mask


class OwnPython(Block):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(7)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.random.random() * self.computed(hidden)


class OwnNumpy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(7)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + float(self.random.random()) * self.computed(hidden)


class OwnTorch(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, hidden: Tensor) -> Tensor:
        noise = torch.rand(hidden.shape, generator=self.generator)
        return hidden + noise * self.computed(hidden)


class HelperDraws(Block):
    """The generator belongs to an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.augmentation = Augmentation()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.augmentation.factor() * self.computed(hidden)


class Augmentation:
    def __init__(self) -> None:
        self._random = random.Random(3)

    def factor(self) -> float:
        return self._random.uniform(0.5, 1.5)


# --- 6. what profile takes ------------------------------------------------------------------------


class Spectral(Block):
    """A weight of complex numbers, in the frequencies (FNO)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(SEQUENCE // 2 + 1, WIDTH, dtype=torch.cfloat))

    def forward(self, hidden: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(hidden, dim=1) * self.weight
        return super().forward(hidden + torch.fft.irfft(frequencies, n=SEQUENCE, dim=1))


class Options(NamedTuple):
    scale: float
    parts: list[int]


class TakesAll(Block):
    """Arguments that no dictionary takes as a key, and a result of several kinds."""

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        options: dict[str, list[int]],
        *,
        parts: slice,
        more: Options,
        names: set[str],
    ) -> dict[str, object]:
        out = super().forward(hidden)
        scale = more.scale * len(names) / len(options["sizes"])
        return {"hidden": out + scale * out[..., parts].mean(), "names": names, "number": 3}


class Arguments(Stack):
    def __init__(self) -> None:
        super().__init__(TakesAll)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            result = block(
                hidden,
                {"sizes": [1, 2]},
                parts=slice(0, 8),
                more=Options(0.5, [1]),
                names={"a", "b"},
            )
            hidden = result["hidden"]
        return hidden


class TakesObject(Block):
    """What it takes and gives are attributes of an object of a class of the user's own."""

    def forward(self, state: "State") -> "State":  # type: ignore[override]
        return State(super().forward(state.hidden) + state.shift, state.shift)


class State:
    def __init__(self, hidden: Tensor, shift: Tensor) -> None:
        self.hidden, self.shift = hidden, shift


class Objects(Stack):
    def __init__(self) -> None:
        super().__init__(TakesObject)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        state = State(hidden, hidden.mean(dim=1, keepdim=True))
        for block in self.blocks:
            state = block(state)
        return state.hidden


class GradientInBlock(Block):
    """A gradient inside the block's own forward, of a graph of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            energy = self.inner(leaf).square().mean()
            (force,) = torch.autograd.grad(energy, leaf)
        return super().forward(hidden + force)


class Forces(Stack):
    """The loss has the gradient of an energy by what the blocks were given (of molecules)."""

    def through(self, hidden: Tensor, step: int) -> Tensor:
        given = hidden
        out = super().through(given, step)
        (force,) = torch.autograd.grad(out.square().mean(), given, create_graph=True)
        return out + force


class GradientOfWeights(Stack):
    """An inner step on a block's weights, as meta-learning takes it."""

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        inner = super().loss(hidden, tokens)
        weight = self.head.weight
        (gradient,) = torch.autograd.grad(inner, weight, create_graph=True)
        logits = F.linear(hidden, weight - 0.1 * gradient)
        return inner + F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class SparseTable(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)


class SparseNeighbours(Stack):
    """Blocks share a sparse matrix of who is next to whom."""

    def __init__(self) -> None:
        super().__init__(Aggregates)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        at = torch.arange(SEQUENCE)
        places = torch.stack([at, (at + 1) % SEQUENCE])
        near = torch.sparse_coo_tensor(places, torch.ones(SEQUENCE), (SEQUENCE, SEQUENCE))
        for block in self.blocks:
            hidden = block(hidden, near)
        return hidden


class Aggregates(Block):
    def forward(self, hidden: Tensor, near: Tensor) -> Tensor:  # type: ignore[override]
        flat = hidden.transpose(0, 1).flatten(1)
        moved = torch.sparse.mm(near, flat).unflatten(1, (BATCH, WIDTH)).transpose(0, 1)
        return hidden + self.computed(moved)


# --- 7. the model's own checkpoints ---------------------------------------------------------------

Call = Callable[..., Any]  # torch.utils.checkpoint.checkpoint, with its settings


class OwnCheckpoints(Stack):
    """Blocks inside of checkpoints, as `run` calls them."""

    def __init__(
        self,
        run: Callable[[Sequence[nn.Module], Tensor, Call], Tensor],
        block: Callable[[], nn.Module] = Block,
        *,
        frozen: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(block)
        self.embedding.requires_grad_(not frozen)
        self.run = run
        self.checkpoint: Call = partial(checkpoint, **settings)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        return self.run(list(self.blocks), hidden, self.checkpoint)


class TiedCheckpoints(OwnCheckpoints):
    def __init__(self, **settings: Any) -> None:
        super().__init__(each, Block, **settings)
        self.blocks[2].inner.weight = self.blocks[1].inner.weight  # type: ignore[union-attr]


class CheckpointedHead(OwnCheckpoints):
    """The loss is in one, too."""

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        hidden = self.through(self.embedding(tokens), step)
        out: Tensor = self.checkpoint(self.loss, hidden, tokens)
        return out


class CheckpointInBlock(Block):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.checkpoint: Call = partial(checkpoint, **settings)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.checkpoint(self.computed, hidden)
        return out


class ThreeUses(Block):
    """Its input's gradient is a sum of three, whose order depends on where it is added up."""

    def forward(self, hidden: Tensor) -> Tensor:
        given = F.dropout(hidden, 0.2, self.training)
        return self.computed(hidden) * torch.tanh(hidden) + given


class NormedByBatch(NoResidual):
    def __init__(self) -> None:
        super().__init__()
        self.by_batch = nn.BatchNorm1d(SEQUENCE)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.by_batch(super().forward(hidden))
        return out


class Noted(Block):
    """Its auxiliary loss is an attribute."""

    noted: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        out = super().forward(hidden)
        self.noted = out.square().mean()
        return out


class NotedInCheckpoints(OwnCheckpoints):
    def __init__(self, **settings: Any) -> None:
        super().__init__(each, Noted, **settings)

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        noted = [block.noted for block in self.blocks if isinstance(block, Noted)]
        return super().loss(hidden, tokens) + 0.1 * torch.stack(noted).sum()


class Counting(Block):
    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden)


class CheckpointsOfItsOwn(OwnCheckpoints):
    """Blocks in a function that somebody copied from PyTorch."""

    def through(self, hidden: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            hidden = OwnCheckpoint.apply(hidden, block)  # type: ignore[no-untyped-call]
        return hidden


class SwitchedOn(nn.Module):
    """A model of transformers with its checkpoints; decoder layers read the encoder's output."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 3, "num_heads": 4}
        config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, use_cache=False, **sizes)
        self.inner = T5ForConditionalGeneration(config)
        self.inner.gradient_checkpointing_enable(settings)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        loss: Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


def each(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    for block in blocks:
        hidden = call(block, hidden)
    return hidden


def with_residuals(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    for block in blocks:
        hidden = hidden + call(lambda given, block=block: block(given), hidden)
    return hidden


def by_name(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    for block in blocks:
        hidden = call(block, hidden=hidden)
    return hidden


def in_pairs(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    """Two blocks at a time, with what runs beside them, in a function that gives more than one."""

    def pair(first: nn.Module, second: nn.Module, own: Tensor, scale: float) -> tuple[Tensor, None]:
        return second(first(own * scale)) + own, None

    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        hidden = hidden + call(pair, first, second, hidden, 0.5)[0]
    return hidden


def in_each_other(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    inner = partial(each, blocks[1:3], call=call)
    return each(blocks[3:], call(inner, call(partial(blocks[0]), hidden)), call)


def in_segments(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    settings = call.keywords  # type: ignore[attr-defined]
    out: Tensor = checkpoint_sequential(blocks, 2, hidden, **settings)
    return out


def only_some(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    for number, block in enumerate(blocks):
        hidden = call(block, hidden) if number % 2 else block(hidden)
    return hidden


def under_autocast(blocks: Sequence[nn.Module], hidden: Tensor, call: Call) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return each(blocks, hidden, call)


def own_checkpoints() -> Iterator[tuple[str, Hostile]]:
    """Every way to call blocks in checkpoints, reentrant and not, and what cannot be kept."""
    for reentrant in (False, True):
        how = f"checkpoints: {'reentrant' if reentrant else 'hooks'}"
        made = partial(OwnCheckpoints, use_reentrant=reentrant)
        runs = (each, with_residuals, in_pairs, in_each_other, in_segments, only_some)
        for run in (*runs, under_autocast, *(() if reentrant else (by_name,))):
            name = f"{how}, {run.__name__.replace('_', ' ')}"
            yield name, Hostile(make=partial(made, run, ThreeUses))
        yield f"{how}, frozen", Hostile(make=partial(made, each, frozen=True))
        yield f"{how}, head", Hostile(make=partial(CheckpointedHead, each, use_reentrant=reentrant))
        yield f"{how}, switched on", Hostile(make=partial(SwitchedOn, use_reentrant=reentrant))
        inside = partial(CheckpointInBlock, use_reentrant=reentrant)
        yield f"{how}, in and around blocks", Hostile(make=partial(made, each, inside))
        refused: dict[str, Callable[[], nn.Module]] = {
            "random numbers": partial(made, each, ThreeUses, preserve_rng_state=False),
            "Python's": partial(made, each, partial(Scaled, drawn_by_python)),
            "generator of its own": partial(made, each, OwnTorch),
            "BatchNorm1d": partial(made, each, NormedByBatch),
            "attribute 'calls'": partial(made, each, Counting),
        }
        if reentrant:
            refused["attribute 'noted'"] = partial(NotedInCheckpoints, use_reentrant=True)
            refused["parameter is shared"] = partial(TiedCheckpoints, use_reentrant=True)
        else:
            yield f"{how}, noted", Hostile(make=partial(NotedInCheckpoints, use_reentrant=False))
            yield f"{how}, tied", Hostile(make=partial(TiedCheckpoints, use_reentrant=False))
        for why, make in refused.items():
            words = rf"checkpoint.*{why}"
            yield f"{how}, {why}", Hostile(make=make, refusal=words, trains=False)
    yield (
        "checkpoints: of its own",
        Hostile(make=partial(CheckpointsOfItsOwn, each), refusal="in backward", trains=False),
    )


# --- 8. several dtypes ----------------------------------------------------------------------------


class Mixed(Stack):
    """Modules in dtypes of their own, which take what they are given in these."""

    def __init__(
        self, base: torch.dtype, other: torch.dtype, *names: str, frozen: bool = False
    ) -> None:
        super().__init__()
        self.to(base).requires_grad_(not frozen)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((WIDTH,), 1.1, dtype=other))
        for path, module in self.named_modules():
            if path.rpartition(".")[2] in names:
                module.to(other).requires_grad_(True)
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.register_forward_pre_hook(in_own_dtype)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        return super().through((hidden * self.scale).to(hidden.dtype), step)


def in_own_dtype(module: nn.Linear | nn.LayerNorm, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0].to(module.weight.dtype),)


def several_dtypes() -> Iterator[tuple[str, Hostile]]:
    narrow, single, double = torch.bfloat16, torch.float32, torch.float64
    mixed = {
        "norms": partial(Mixed, narrow, single, "norm"),
        "embedding": partial(Mixed, narrow, single, "embedding"),
        "head": partial(Mixed, narrow, single, "head"),
        "part of a block": partial(Mixed, narrow, double, "inner"),
        "frozen base": partial(Mixed, narrow, single, "inner", frozen=True),
        "buffer": partial(Mixed, single, double),
        "half": partial(Mixed, torch.float16, single, "head"),
    }
    for name, make in mixed.items():
        yield f"dtypes: {name}", Hostile(make=make, refusal=r"trainable.*several dtypes")


def mixed_factory() -> tuple[nn.Module, list[Batch]]:
    """Float32 norms in a bfloat16 model."""
    return HOSTILE["dtypes: norms"].make(), [batch_of(step) for step in range(4)]


# --- all of them ----------------------------------------------------------------------------------

_ORDER = r"block|unit|forward|skipped|order"
_IN_PLACE = r"in[ -]place|wr[io]t"
_RANDOM = r"random|generator"
_GRAD = r"autograd\.grad|second|twice|graph|backward"

HOSTILE: dict[str, Hostile] = {
    # 1
    "parameters: norm penalty": Hostile(make=NormPenalty),
    "parameters: logged norms": Hostile(make=LoggedNorms),
    "parameters: the next block's": Hostile(make=partial(ReadsBlocks, 1)),
    "parameters: the first block's later": Hostile(make=partial(ReadsBlocks, -2)),
    "parameters: moving target": Hostile(
        make=MovingTarget, refusal=r"written|changed|updated|full_parameters|more than once"
    ),
    "parameters: tied in the middle": Hostile(make=TiedMiddle),
    # 2
    "flow: layer drop, torch": Hostile(make=partial(LayerDrop, drawn_by_torch), refusal=_ORDER),
    "flow: layer drop, python": Hostile(make=partial(LayerDrop, drawn_by_python), refusal=_ORDER),
    "flow: stochastic depth": Hostile(make=of_blocks(StochasticDepth), refusal=_ORDER),
    "flow: early exit": Hostile(make=partial(Chosen, early_exit), refusal=_ORDER),
    "flow: last block skipped": Hostile(make=partial(Chosen, without_last), refusal=_ORDER),
    "flow: first block skipped": Hostile(make=partial(Chosen, without_first), refusal=_ORDER),
    "flow: reordered once": Hostile(
        make=partial(Chosen, swapped_at_two), refusal=_ORDER, gives_up=2
    ),
    "flow: twice once": Hostile(make=partial(Chosen, twice_at_two), refusal=_ORDER, gives_up=2),
    "flow: one block shared": Hostile(make=partial(Shared, lambda _: 3)),
    "flow: branches take turns": Hostile(make=partial(Chosen, branches), refusal=_ORDER),
    "flow: a block that comes late": Hostile(make=partial(Chosen, late_comer), refusal=_ORDER),
    "flow: calls are counted": Hostile(make=CountsSteps, refusal=_ORDER),
    # 3
    "in place: residual in the block": Hostile(make=of_blocks(AddsToInput), refusal=_IN_PLACE),
    "in place: input scaled": Hostile(make=of_blocks(ScalesInput), refusal=_IN_PLACE),
    "in place: view of the output": Hostile(make=of_blocks(WritesView), refusal=_IN_PLACE),
    "in place: residual in the model": Hostile(make=partial(Between, add_given), refusal=_IN_PLACE),
    "in place: activation": Hostile(make=partial(Between, activate), refusal=_IN_PLACE),
    "in place: mask": Hostile(make=partial(Between, mask), refusal=_IN_PLACE),
    "in place: one running sum": Hostile(make=RunningSum, refusal=_IN_PLACE),
    # 4
    "peaks: dense": Hostile(make=Dense),
    "peaks: u-net": Hostile(make=UNet),
    "peaks: messages": Hostile(make=Graph),
    "peaks: relative bias": Hostile(make=Relative),
    "peaks: read between equal blocks": Hostile(make=ReadBetween),
    "peaks: first to last of equal blocks": Hostile(make=FirstToLast),
    "peaks: kept on ctx": Hostile(make=of_blocks(OnContext)),
    "peaks: own checkpoint": Hostile(make=of_blocks(Checkpointed), refusal=_GRAD),
    "peaks: memory of a block": Hostile(make=of_blocks(Remembers), refusal=r"keeps|attribute"),
    "peaks: output kept": Hostile(make=of_blocks(KeepsOutput), refusal=r"keeps|attribute"),
    "peaks: growing cache": Hostile(
        make=of_blocks(GrowingCache), refusal=r"grow|more|keeps", trains=False
    ),
    # 5
    "random: python": Hostile(make=of_blocks(partial(Scaled, drawn_by_python)), refusal=_RANDOM),
    "random: numpy": Hostile(make=of_blocks(partial(Scaled, drawn_by_numpy)), refusal=_RANDOM),
    "random: numpy's mask": Hostile(make=of_blocks(NumpyMask), refusal=_RANDOM),
    "random: own python": Hostile(make=of_blocks(OwnPython), refusal=_RANDOM),
    "random: own numpy": Hostile(make=of_blocks(OwnNumpy), refusal=_RANDOM),
    "random: own torch": Hostile(make=of_blocks(OwnTorch), refusal=_RANDOM),
    "random: a helper's": Hostile(make=of_blocks(HelperDraws), refusal=_RANDOM),
    # 6
    "takes: complex": Hostile(
        make=of_blocks(Spectral),
        refusal=r"complex",
        factory=partial(torch.optim.AdamW, lr=3e-4, foreach=False),
    ),
    "takes: arguments of all kinds": Hostile(make=Arguments),
    "takes: objects": Hostile(make=Objects, refusal=r"argument|tensor|object|State"),
    "takes: a gradient in a block": Hostile(make=of_blocks(GradientInBlock), refusal=_GRAD),
    "takes: forces": Hostile(make=Forces, refusal=_GRAD),
    "takes: gradient of weights": Hostile(make=GradientOfWeights, refusal=_GRAD),
    "takes: sparse gradient": Hostile(
        make=SparseTable,
        refusal=r"sparse",
        optimizer="sgd",
        factory=partial(torch.optim.SGD, lr=0.1, foreach=False),
    ),
    "takes: sparse matrix": Hostile(make=SparseNeighbours, refusal=r"sparse"),
    # 7
    **dict(own_checkpoints()),
    # 8
    **dict(several_dtypes()),
}
