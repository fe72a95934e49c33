"""The catalogue of small models: what people do and what a profile of one step may not see.

A row says how a model is built, and whether it trains under every plan like plain PyTorch or is
refused in clear words; `judging` asks all of that at once.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from protrain_runtime.contract.records.profile import Workload
from tests.support.peaks import SLACK_BYTES

WIDTH, BATCH, SEQUENCE, VOCABULARY = 32, 4, 40, 48
"""A hidden state is 20 KiB: above what a swap leaves on the device."""

WORKLOAD = Workload(
    model="", model_config="", batch_size=1, seq_len=1, dtype="float32", device="cpu", seed=0
)
Make = Callable[[], nn.Module]


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def batch_of(step: int) -> Batch:
    return {"tokens": tokens_of(step), "step": step}


@dataclass(frozen=True)
class Hostile:
    """How a model is built, and what may become of it.

    refusal     words of the refusal, as a regular expression; "": it trains
    gives_up    the step that no profile saw, and that a plan with units to follow refuses
    trains      whether it may also train, under plans that do not meet what is refused
    once        why blocks of its have the form `keep` alone; None where that is not asked
    stays       why states of its stay on the device; None where that is not asked
    over        bytes that slots may take beyond the prediction
    above       bytes that a predicted peak may stand above the measured one; None: any
    above_slots the same of every slot
    optimizer   whose states the profile counts; `factory` where its own would not take the model
    before      the model that is profiled, where it has changed since
    """

    make: Make
    refusal: str = ""
    gives_up: int | None = None
    trains: bool = False
    once: str | None = None
    stays: str | None = None
    over: int = 0
    above: int | None = None
    above_slots: int | None = None
    optimizer: str = "adamw"
    factory: Callable[..., torch.optim.Optimizer] | None = None
    batch: Callable[[int], Batch] = batch_of
    workload: Workload = WORKLOAD
    seed: int = 0
    before: Make | None = None

    def build(self) -> nn.Module:
        """The same model every time, in train mode."""
        with seeded(self.seed):
            return self.make().train()


# --- what most of them share ----------------------------------------------------------------------


class Block(nn.Module):
    """A residual around two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def activated(self, hidden: Tensor) -> Tensor:
        return F.gelu(self.inner(self.norm(hidden)))

    def computed(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.outer(self.activated(hidden))
        return out

    def halved(self, hidden: Tensor) -> Tensor:
        """The same, without an operator that saves the hidden state."""
        out: Tensor = self.outer(F.gelu(self.inner(hidden * 0.5)))
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.computed(hidden)


class Chain(nn.Module):
    """Layers one after the other, and the mean of the squares of what the last one gives."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


class Does(Block):
    """Its forward is a function of it and of its arguments; attributes are made with it."""

    def __init__(self, run: Callable[..., Any], **attributes: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run
        for name, make in attributes.items():
            setattr(self, name, make())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def does(run: Callable[..., Any], **attributes: Callable[[], Any]) -> Make:
    return partial(Does, run, **attributes)


Through = Callable[[Any, Tensor, int], Tensor]
Loss = Callable[[Any, Tensor, Tensor], Tensor]


def in_order(stack: "Stack", hidden: Tensor, step: int) -> Tensor:
    for block in stack.blocks:
        hidden = block(hidden)
    return hidden


def next_token(stack: "Stack", hidden: Tensor, tokens: Tensor) -> Tensor:
    logits = stack.head(hidden)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Stack(nn.Module):
    """Blocks between an embedding and a head; `run` says how they follow each other."""

    def __init__(
        self,
        block: Make | Sequence[Make] = Block,
        depth: int = 4,
        *,
        run: Through = in_order,
        ends: Loss = next_token,
        sparse: bool = False,
        **attributes: Callable[[], Any],
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        blocks = block if isinstance(block, Sequence) else [block] * depth
        self.blocks = nn.ModuleList(make() for make in blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.run, self.ends = run, ends
        for name, make in attributes.items():
            setattr(self, name, make())

    def through(self, hidden: Tensor, step: int) -> Tensor:
        return self.run(self, hidden, step)

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return self.ends(self, hidden, tokens)

    def forward(self, tokens: Tensor, step: int) -> Any:
        return self.loss(self.through(self.embedding(tokens), step), tokens)


def stack(block: Make | Sequence[Make] = Block, depth: int = 4, **settings: Any) -> Make:
    return partial(Stack, block, depth, **settings)


def chosen(order: Callable[[int], Iterable[int]], *, outside: bool = False) -> Through:
    """The step says which blocks run; `outside`: with residuals around them."""

    def run(stack: Stack, hidden: Tensor, step: int) -> Tensor:
        for number in order(step):
            given = hidden
            hidden = stack.blocks[number](given)
            hidden = given + hidden if outside else hidden
        return hidden

    return run


def called(call: Callable[[Any, Tensor], Tensor]) -> Through:
    """The model calls its blocks in a way of its own."""

    def run(stack: Stack, hidden: Tensor, step: int) -> Tensor:
        for block in stack.blocks:
            hidden = call(block, hidden)
        return hidden

    return run


def halved_weight(block: Any, hidden: Tensor) -> Any:
    halved = {"outer.weight": 0.5 * block.outer.weight}
    return torch.func.functional_call(block, halved, (hidden,))


def all_with(make: Callable[[Any, Tensor], Any]) -> Through:
    """Every block gets what is made once of the hidden state."""

    def run(stack: Stack, hidden: Tensor, step: int) -> Tensor:
        more = make(stack, hidden)
        for block in stack.blocks:
            hidden = block(hidden, more)
        return hidden

    return run


# --- 1. parameters that other units read ----------------------------------------------------------


def norm_penalty(stack: Stack, hidden: Tensor, tokens: Tensor) -> Tensor:
    penalty = torch.stack([parameter.norm() for parameter in stack.parameters()]).sum()
    return next_token(stack, hidden, tokens) + 1e-3 * penalty


def logged_norms(stack: Stack, hidden: Tensor, tokens: Tensor) -> Tensor:
    """A training script prints them, computed in forward without a graph."""
    loss = next_token(stack, hidden, tokens)
    with torch.no_grad():
        norms: list[float] = [parameter.norm().item() for parameter in stack.parameters()]
    return loss * (1 + 1e-3 * sum(norms))


def reads_others(block: Any, hidden: Tensor) -> Tensor:
    """Its forward reads a weight of another block, which it does not own."""
    for other in block.others:  # no module list: not its own
        hidden = hidden + 0.1 * F.linear(F.gelu(hidden), other.inner.weight[:WIDTH])
    return hidden + Block.computed(block, hidden)


def reads_blocks(ahead: int) -> nn.Module:
    """Every block reads a weight of the one `ahead` of it, or behind where that is negative."""
    model = Stack(does(reads_others, others=list))
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):
        if 0 <= number + ahead < len(blocks):
            block.others = [blocks[number + ahead]]
    return model


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


def tied(make: Make) -> nn.Module:
    model: Any = make()
    model.blocks[2].inner.weight = model.blocks[1].inner.weight
    return model  # type: ignore[no-any-return]


def one_storage() -> nn.Module:
    model = Stack(depth=3)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    places = flat.split([parameter.numel() for parameter in model.parameters()])
    for parameter, place in zip(model.parameters(), places, strict=True):
        parameter.data = place.view(parameter.shape)
    return model


def shared_memory() -> nn.Module:
    """The second block's norm is a part of the first block's bias."""
    model: Any = Stack(depth=3)
    model.blocks[1].norm.bias.data = model.blocks[0].outer.bias.data
    return model  # type: ignore[no-any-return]


class Aliasing(Block):
    """An attribute is a view of the first layer's weight, whose gradient it does not ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = self.inner.weight.detach()[:WIDTH]

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + 0.1 * F.linear(hidden, self.alias))


def adds_second(share: float = 1.0) -> Through:
    """Blocks of two outputs, of which the second is added, too."""

    def run(stack: Stack, hidden: Tensor, step: int) -> Tensor:
        for block in stack.blocks:
            hidden, other = block(hidden)
            hidden = hidden + share * other
        return hidden

    return run


# --- 2. control flow ------------------------------------------------------------------------------


def by_torch() -> float:
    return torch.rand(()).item()


def drops(draw: Callable[[], float], *, outside: bool = False) -> Through:
    return chosen(lambda _: (number for number in range(4) if draw() < 0.6), outside=outside)


def called_thrice(stack: Any, hidden: Tensor, step: int) -> Tensor:
    """One block, called several times (ALBERT), before two of its own."""
    for _ in range(3):
        hidden = stack.shared(hidden)
    return in_order(stack, hidden, step)


def counts_steps(stack: Any, hidden: Tensor, step: int) -> Tensor:
    """The number of calls, a plain attribute, says how deep the model is."""
    stack.calls += 1
    return chosen(lambda _: range(2 + stack.calls % 3))(stack, hidden, step)


def turned(stack: Any, hidden: Tensor, step: int) -> Tensor:
    stack.calls += 1
    return chosen(lambda _: ((n + stack.calls) % 4 for n in range(4)))(stack, hidden, step)


def growing(stack: Any, hidden: Tensor, step: int) -> Tensor:
    """Every step computes more than the one before."""
    stack.calls += 1
    hidden = in_order(stack, hidden, step)
    return hidden + torch.stack([hidden * 0.1 for _ in range(stack.calls)]).sum(0)


def routed(block: Any, hidden: Tensor) -> Tensor:
    """Each token to two of four experts, by its values."""
    tokens = hidden.flatten(0, 1)
    weights, found = block.router(tokens).softmax(-1).topk(2, -1)
    out = torch.zeros_like(tokens)
    for number, expert in enumerate(block.experts):
        rows, places = torch.where(found == number)
        if len(rows):
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
    return hidden + out.view(hidden.shape)


def masked(block: Any, hidden: Tensor) -> Tensor:
    """Computes on the tokens with a positive sum alone."""
    mask = hidden.detach().sum(-1) > 0
    return hidden + torch.zeros_like(hidden).index_put((mask,), block.computed(hidden[mask]))


def distinct(block: Any, hidden: Tensor) -> Tensor:
    """Computes once for all tokens with the same rounded sum."""
    tokens = hidden.flatten(0, 1)
    kinds, which = torch.unique(tokens.detach().sum(-1).round(), return_inverse=True)
    means = tokens.new_zeros(len(kinds), WIDTH).index_add(0, which, tokens)
    out: Tensor = hidden + block.computed(means)[which].view(hidden.shape)
    return out


def counts_forwards(block: Any, hidden: Tensor) -> Tensor:
    """Every third forward does more."""
    block.calls += 1
    hidden = hidden + block.computed(hidden)
    return hidden if block.calls % 3 else hidden + block.computed(hidden)


def tosses(block: Any, hidden: Tensor) -> Tensor:
    """One forward in three does more, by chance."""
    hidden = hidden + block.computed(hidden)
    return hidden if random.random() < 0.6 else hidden + block.computed(hidden)


ROUTED = does(
    routed,
    router=partial(nn.Linear, WIDTH, 4),
    experts=lambda: nn.ModuleList(Block() for _ in range(4)),
)


# --- 3. in place ----------------------------------------------------------------------------------


def adds_to_input(block: Block, hidden: Tensor) -> Tensor:
    """The residual is the input itself; nothing had saved it."""
    hidden += block.halved(hidden)
    return hidden


def scales_input(block: Block, hidden: Tensor) -> Tensor:
    """Its input is another one when it is computed again."""
    hidden.mul_(0.9)
    return hidden + block.halved(hidden)


def writes_view(block: Block, hidden: Tensor) -> Tensor:
    out = block.halved(hidden)
    out[:, 0] += hidden[:, 0].mean()
    out[..., : WIDTH // 2].mul_(0.5)
    return out


def written_between(write: Callable[[Tensor, Tensor], object]) -> Make:
    """The model itself writes what a block gave, before the next one takes it."""

    def run(stack: Stack, hidden: Tensor, step: int) -> Tensor:
        for block in stack.blocks:
            given = hidden * 0.5
            hidden = block(given)
            write(hidden, given)
        return hidden

    return stack(does(Block.computed), run=run)


def running_sum(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """One tensor goes through the whole model, and every block's result is added to it."""
    for block in stack.blocks:
        hidden += block(hidden)
    return hidden


def written_later(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """The model writes to a block's input after the block has run."""
    for block in stack.blocks:
        given = hidden * 1.0
        out = block(given)
        hidden = out + given.detach().mul_(0.5)
    return hidden


# --- 4. peaks -------------------------------------------------------------------------------------


class DenseBlock(nn.Module):
    """Reads all that came before (DenseNet)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.mix = nn.Linear(count * WIDTH, WIDTH)
        self.body = Block()

    def forward(self, *before: Tensor) -> Tensor:
        out: Tensor = self.body(F.gelu(self.mix(torch.cat(before, dim=-1))))
        return out


def dense(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    before = [hidden]
    for block in stack.blocks:
        before.append(block(*before))
    return before[-1]


def u_net(stack: Any, hidden: Tensor, step: int) -> Tensor:
    """Results of encoders wait for decoders, the last for the first."""
    skips: list[Tensor] = []
    for block in stack.blocks:
        hidden = block(hidden)
        skips.append(hidden)
        hidden = F.avg_pool1d(hidden.transpose(1, 2), 2).transpose(1, 2)
    for decoder in stack.decoders:
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


def graph(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """The last block's edges are nobody's."""
    source = torch.arange(3 * SEQUENCE) % SEQUENCE
    target = (source * 7 + 3) % SEQUENCE
    edges = hidden[:, source] - hidden[:, target]
    for block in stack.blocks:
        hidden, edges = block(hidden, edges, source, target)
    return hidden


class BiasedAttention(nn.Module):
    """One that is given no bias makes it (T5), of how far positions are from each other."""

    def __init__(self, *, makes_bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = nn.Embedding(2 * SEQUENCE, 4) if makes_bias else None

    def forward(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = bias_of(self) if bias is None else bias
        heads = self.attend(self.norm(hidden)).unflatten(-1, (3, 4, WIDTH // 4))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) + bias).softmax(dim=-1)
        return hidden + (weights @ value).transpose(1, 2).flatten(2), bias


def bias_of(module: Any) -> Tensor:
    at = torch.arange(SEQUENCE)
    bias: Tensor = module.bias(at[None] - at[:, None] + SEQUENCE).permute(2, 0, 1)
    return bias


def biased(stack: Any, hidden: Tensor, step: int) -> Tensor:
    bias = bias_of(stack) if hasattr(stack, "bias") else None
    for block in stack.blocks:
        hidden, bias = block(hidden, bias)
    return hidden


def read_between(stack: Any, hidden: Tensor, step: int) -> Tensor:
    """Equal blocks in a row, after one of which the model computes something."""
    for number, block in enumerate(stack.blocks):
        hidden = block(hidden)
        hidden = hidden * stack.scale if number == 2 else hidden
    return hidden


def first_to_last(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """The result of the first of equal blocks is added after the last."""
    first: Tensor = stack.blocks[0](hidden)
    hidden = first
    for block in stack.blocks[1:]:
        hidden = block(hidden)
    return hidden + first


def first_again(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """The embedding is added again after every other block."""
    first = hidden
    for number, block in enumerate(stack.blocks):
        hidden = block(hidden)
        hidden = hidden + first if number % 2 else hidden
    return hidden


def two_outputs(block: Block, hidden: Tensor, far: Tensor | None) -> tuple[Tensor, Tensor]:
    inner = block.activated(hidden)
    out = hidden + block.outer(inner)
    return (out if far is None else out * far.sigmoid()), 2 * inner[..., :WIDTH]


def to_the_next_but_one(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """Blocks of two outputs: one for the next block, one for the block after the next."""
    far: list[Tensor | None] = [None, None]
    for block in stack.blocks:
        hidden, other = block(hidden, far.pop(0))
        far.append(other)
    return hidden + sum(one for one in far if one is not None)


class WideHeads(Stack):
    """Heads on the way, whose backward comes before that of the hidden states which they read."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 900) for _ in range(2))

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        hidden, beside = self.embedding(tokens), torch.zeros(())
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            if number in (1, 3):
                beside = beside + self.heads[number // 2](hidden).logsumexp(-1).mean()
        return self.loss(hidden, tokens) + 0.1 * beside


class AllHidden(Stack):
    """As `output_hidden_states` does."""

    def forward(self, tokens: Tensor, step: int) -> Any:
        states = [self.embedding(tokens)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"loss": self.loss(states[-1], tokens), "hidden_states": states}


def named(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """Every hidden state has a name in the model's frame."""
    first = stack.blocks[0](hidden)
    second = stack.blocks[1](first)
    third = stack.blocks[2](second)
    fourth: Tensor = stack.blocks[3](third)
    return fourth


class KeepsOnContext(torch.autograd.Function):
    """Tensors that saved-tensor hooks do not see: its input, and what it computes inside."""

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


class KeepsOutputOnContext(torch.autograd.Function):
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


def inside(function: Any) -> Make:
    """Blocks with an autograd function between their products."""
    return does(lambda b, x: x + b.outer(function.apply(b.inner(b.norm(x)))))


def remembers_output(block: Any, hidden: Tensor) -> Tensor:
    past = torch.zeros_like(hidden) if block.memory is None else block.memory
    out = Block.forward(block, hidden + 0.1 * past)
    block.memory = out.detach()
    return out


def keeps_output(block: Any, hidden: Tensor) -> Tensor:
    """An attribute holds the output, with its graph, up to the next forward."""
    block.last = hidden + Block.computed(block, hidden)
    return block.last  # type: ignore[no-any-return]


def keeps_inner(block: Any, hidden: Tensor) -> Tensor:
    block.last = block.activated(hidden)
    return hidden + block.outer(block.last)  # type: ignore[no-any-return]


def keeps_in_container(block: Any, hidden: Tensor) -> Tensor:
    inner = block.activated(hidden)
    block.seen.append(inner.detach())
    return hidden + block.outer(inner)  # type: ignore[no-any-return]


def hoards(block: Any, hidden: Tensor) -> Tensor:
    block.history.append(hidden.detach())
    hidden = hidden + 0.1 * torch.stack(block.history).mean(dim=0)
    return hidden + Block.computed(block, hidden)


_HOARD: list[Tensor] = []


class HoardsElsewhere(Stack):
    """Keeps more after every forward, in a list of its module."""

    def __init__(self) -> None:
        super().__init__()
        _HOARD.clear()

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        _HOARD.append(hidden.detach())
        return super().loss(hidden, tokens)


def caches(stack: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    stack.cache = (hidden.detach(), tokens)
    return next_token(stack, hidden, tokens)


class Averaging(Stack):
    """A buffer is replaced in every forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(BATCH, SEQUENCE, WIDTH))

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach()
        return super().loss(hidden + 0.01 * self.mean, tokens)


class Perturbed(Stack):
    """Noise that asks for a gradient, as an attribute (adversarial training)."""

    def through(self, hidden: Tensor, step: int) -> Tensor:
        self.noise = torch.zeros_like(hidden).requires_grad_()
        return super().through(hidden + self.noise, step)


def gradients_of_states(stack: Any, hidden: Tensor, step: int) -> Tensor:
    """Hidden states keep their gradients up to the next forward."""
    stack.states = []
    for block in stack.blocks:
        hidden = block(hidden)
        if hidden.requires_grad:
            hidden.retain_grad()
        stack.states.append(hidden)
    return hidden


# --- 5. randomness, and forwards that cannot run twice --------------------------------------------


def scaled(draw: Callable[[], float]) -> Make:
    """The block scales its result by a number that is drawn when it runs."""
    return does(lambda b, x: x + draw() * b.computed(x))


def numpy_mask(block: Block, hidden: Tensor) -> Tensor:
    mask = torch.from_numpy(np.random.rand(*hidden.shape) > 0.1)
    return hidden + block.computed(hidden) * mask


def own_generators(block: Any, hidden: Tensor) -> Tensor:
    """One of each kind, in an attribute, a list and a dict."""
    scale = block.python.random() + block.numpy[0].random() + block.numpy[1].randn()
    mask = torch.rand(hidden.shape[-1], generator=block.others["torch"][0])
    return hidden + block.computed(hidden * mask) * scale  # type: ignore[no-any-return]


OWN_GENERATORS = does(
    own_generators,
    python=partial(random.Random, 1),
    numpy=lambda: [np.random.default_rng(2), np.random.RandomState(3)],
    others=lambda: {"torch": (torch.Generator().manual_seed(4),)},
)
OWN_TORCH = does(
    lambda b, x: x + torch.rand(x.shape, generator=b.generator) * b.computed(x),
    generator=lambda: torch.Generator().manual_seed(7),
)


class Augmentation:
    """An object that is no module, and has a generator."""

    def __init__(self) -> None:
        self._random = random.Random(3)

    def factor(self) -> float:
        return self._random.uniform(0.5, 1.5)


def counts(block: Any, hidden: Tensor) -> Tensor:
    block.calls += 1
    return hidden + block.computed(hidden) / block.calls  # type: ignore[no-any-return]


def lists(block: Any, hidden: Tensor) -> Tensor:
    block.seen["calls"] = [*block.seen["calls"][-2:], len(block.seen["calls"])]
    return hidden + block.computed(hidden) / len(block.seen["calls"])  # type: ignore[no-any-return]


def sums(block: Any, hidden: Tensor) -> Tensor:
    block.total += 1
    return hidden + block.computed(hidden) / block.total.item()  # type: ignore[no-any-return]


_CALLS = [0]


def reads_global(block: Block, hidden: Tensor) -> Tensor:
    _CALLS[0] += 1
    return hidden + block.computed(hidden) * (1 + _CALLS[0] % 3)


def reading_global() -> nn.Module:
    _CALLS[0] = 0
    return Stack(does(reads_global))


def scales(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """Every block reads what the model has set last."""
    for number, block in enumerate(stack.blocks):
        for each in stack.blocks:
            each.scale = 1.0 + number  # type: ignore[assignment]
        hidden = block(hidden)
    return hidden


def freezing(stack: Any, hidden: Tensor, step: int) -> Tensor:
    for block in stack.blocks:
        block.inner.weight.requires_grad = False
        hidden = block(hidden)
        block.inner.weight.requires_grad = True
    return hidden


class Collecting(Stack):
    """Forward hooks in blocks collect for the loss what their first layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        block: Any
        for block in self.blocks:
            block.inner.register_forward_hook(lambda *call: self.collected.append(call[-1]))

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        beside = torch.stack([each.square().mean() for each in self.collected]).sum()
        self.collected.clear()
        return super().loss(hidden, tokens) + beside


# --- 6. what profile takes ------------------------------------------------------------------------


def filters(block: Any, hidden: Tensor) -> Tensor:
    """A weight of complex numbers, in the frequencies (FNO), beside real ones."""
    frequencies = torch.fft.rfft(block.norm(hidden), dim=1, norm="ortho") * block.weight
    hidden = hidden + torch.fft.irfft(frequencies, n=SEQUENCE, dim=1, norm="ortho")
    return hidden + Block.computed(block, hidden)


class Spectral(nn.Module):
    """Complex parameters alone, read as they are and as conjugates, and a complex buffer."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ParameterList([0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.cfloat)])
        self.gain = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat))
        self.register_buffer("phase", torch.randn(WIDTH, dtype=torch.cfloat))

    def forward(self, hidden: Tensor) -> Tensor:
        product = (hidden * self.phase) @ self.inner[0]
        found: Tensor = hidden + (product * (product * self.gain).conj()).imag
        return found


def forward_gradients(block: Block, hidden: Tensor) -> Tensor:
    """Tangents beside values, some of them zeros without memory."""
    found: Any = torch.func.jvp(block.halved, (hidden,), (torch.ones_like(hidden),))
    values, tangents = found
    total: Tensor = hidden + values + 0.01 * tangents
    return total


def by_offset(block: Block, hidden: Tensor) -> Tensor:
    """A weight from its second row on, by the place of that in its storage."""
    rows, columns = block.inner.weight.shape
    below = torch.as_strided(block.inner.weight, (rows - 1, columns), (columns, 1), columns)
    return hidden + block.halved(hidden) * below.mean()


def by_storage(block: Block, hidden: Tensor) -> Tensor:
    """A weight from its second row on, in its storage."""
    weight = block.inner.weight.detach()
    rows, columns = weight.shape
    place = columns, (rows - 1, columns), (columns, 1)
    below = torch.empty(0).set_(weight.untyped_storage(), *place)
    return hidden + block.halved(hidden) * below.mean()


class Options(NamedTuple):
    scale: float
    parts: list[int]


def takes_all(
    block: Any,
    hidden: Tensor,
    options: dict[str, list[int]],
    *,
    parts: slice,
    more: Options,
    names: set[str],
) -> dict[str, object]:
    """Arguments that no dictionary takes as a key, and a result of several kinds."""
    out = hidden + Block.computed(block, hidden)
    scale = more.scale * len(names) / len(options["sizes"])
    return {"hidden": out + scale * out[..., parts].mean(), "names": names, "number": 3}


def gives_all(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    more = {"parts": slice(0, 8), "more": Options(0.5, [1]), "names": {"a", "b"}}
    for block in stack.blocks:
        hidden = block(hidden, {"sizes": [1, 2]}, **more)["hidden"]
    return hidden


def in_dict(block: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Writes its result into the dict that it was given, beside what cannot be hashed."""
    state["hidden"] = state["hidden"] + Block.computed(block, state["hidden"])
    state["depth"][0] += 1
    return {**state, "seen": {1, 2}, "none": None}


def dicts(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    state: dict[str, Any] = {"hidden": hidden, "depth": [0]}
    for block in stack.blocks:
        state = block(state)
    found: Tensor = state["hidden"]
    return found


class State:
    """A class of the user's own, whose attributes pytrees do not know."""

    def __init__(self, hidden: Tensor, shift: Tensor) -> None:
        self.hidden, self.shift = hidden, shift


def objects(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    state = State(hidden, hidden.mean(dim=1, keepdim=True))
    for block in stack.blocks:
        state = block(state)
    return state.hidden


def accumulates(block: Any, hidden: Tensor, state: State) -> Tensor:
    """Reads and writes a tensor of an object that it does not return."""
    state.hidden = state.hidden + hidden.mean(-1, keepdim=True)
    return (hidden + Block.computed(block, hidden)) * state.hidden.tanh()


def damps_gradient(block: Any, hidden: Tensor) -> Tensor:
    """A hook on the gradient of its input, once."""
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: 0.9 * gradient)
    return Block.forward(block, hidden)


def backward_hooks() -> nn.Module:
    model: Any = Stack()
    for block in model.blocks:
        block.register_full_backward_hook(lambda _, inputs, __: (0.9 * inputs[0],))
    return model  # type: ignore[no-any-return]


def rounding(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """Tensors are saved in half of their bytes."""
    with torch.autograd.graph.saved_tensors_hooks(Tensor.bfloat16, Tensor.float):
        return in_order(stack, hidden, step)


def gradient_inside(block: Any, hidden: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        (force,) = torch.autograd.grad(block.inner(leaf).square().mean(), leaf)
    return Block.forward(block, hidden + force)


def forces(stack: Stack, hidden: Tensor, step: int) -> Tensor:
    """The loss has the gradient of an energy by what the blocks were given (of molecules)."""
    out = in_order(stack, hidden, step)
    (force,) = torch.autograd.grad(out.square().mean(), hidden, create_graph=True)
    return out + force


def gradient_of_weights(stack: Stack, hidden: Tensor, tokens: Tensor) -> Tensor:
    """An inner step on a block's weights, as meta-learning takes it."""
    inner = next_token(stack, hidden, tokens)
    weight = stack.head.weight
    (gradient,) = torch.autograd.grad(inner, weight, create_graph=True)
    logits = F.linear(hidden, weight - 0.1 * gradient)
    return inner + F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Bags(Stack):
    """Every block adds the sum of its own table's rows."""

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, tokens)
        return self.loss(hidden, tokens)


def neighbours(stack: Stack, hidden: Tensor) -> Tensor:
    """A sparse matrix of who is next to whom."""
    at = torch.arange(SEQUENCE)
    places = torch.stack([at, (at + 1) % SEQUENCE])
    return torch.sparse_coo_tensor(places, torch.ones(SEQUENCE), (SEQUENCE, SEQUENCE))


def aggregates(block: Block, hidden: Tensor, near: Tensor) -> Tensor:
    flat = hidden.transpose(0, 1).flatten(1)
    moved = torch.sparse.mm(near, flat).unflatten(1, (BATCH, WIDTH)).transpose(0, 1)
    return hidden + block.computed(moved)


# --- 7. the model's own checkpoints ---------------------------------------------------------------

Call = Callable[..., Any]  # torch.utils.checkpoint.checkpoint, with its settings


class OwnCheckpoints(Stack):
    """Blocks inside of checkpoints, as `calls` calls them; `head`: the loss is in one, too."""

    def __init__(
        self,
        calls: Callable[[Sequence[nn.Module], Tensor, Call], Tensor],
        block: Make = Block,
        *,
        frozen: bool = False,
        head: bool = False,
        ends: Loss = next_token,
        **settings: Any,
    ) -> None:
        super().__init__(block, ends=ends)
        self.embedding.requires_grad_(not frozen)
        self.calls, self.in_head = calls, head
        self.checkpoint: Call = partial(checkpoint, **settings)

    def through(self, hidden: Tensor, step: int) -> Tensor:
        return self.calls(list(self.blocks), hidden, self.checkpoint)

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        if not self.in_head:
            return super().loss(hidden, tokens)
        out: Tensor = self.checkpoint(super().loss, hidden, tokens)
        return out


def three_uses(block: Block, hidden: Tensor) -> Tensor:
    """Its input's gradient is a sum of three, whose order depends on where it is added up."""
    given = F.dropout(hidden, 0.2, block.training)
    return block.computed(hidden) * torch.tanh(hidden) + given


def notes(block: Any, hidden: Tensor) -> Tensor:
    """Its auxiliary loss is an attribute."""
    out = Block.forward(block, hidden)
    block.noted = out.square().mean()
    return out


def reads_before(block: Any, hidden: Tensor) -> Tensor:
    """It reads an attribute that its last call has set."""
    before = 0.0 if block.before is None else block.before
    block.before = hidden.detach()
    return Block.forward(block, hidden + 0.1 * before)


def with_notes(stack: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    noted = torch.stack([block.noted for block in stack.blocks]).sum()
    return next_token(stack, hidden, tokens) + 0.1 * noted


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
        in_block = partial(checkpoint, use_reentrant=reentrant)
        runs = (each, with_residuals, in_pairs, in_each_other, in_segments, only_some)
        taken: dict[str, Make] = {
            run.__name__.replace("_", " "): partial(made, run, does(three_uses))
            for run in (*runs, under_autocast, *(() if reentrant else (by_name,)))
        } | {
            "frozen": partial(made, each, frozen=True),
            "head": partial(made, each, head=True),
            "switched on": partial(SwitchedOn, use_reentrant=reentrant),
            "in and around blocks": partial(
                made, each, does(lambda b, x, call=in_block: x + call(b.computed, x))
            ),
        }
        refused: dict[str, Make] = {
            "random numbers": partial(made, each, does(three_uses), preserve_rng_state=False),
            "Python's": partial(made, each, scaled(random.random)),
            "generator of its own": partial(made, each, OWN_TORCH),
            "BatchNorm1d": partial(
                made,
                each,
                does(
                    lambda b, x: b.by_batch(b.computed(x)),
                    by_batch=lambda: nn.BatchNorm1d(SEQUENCE),
                ),
            ),
            "attribute 'calls'": partial(made, each, does(counts, calls=int)),
            "attribute 'before'": partial(made, each, does(reads_before, before=lambda: None)),
        }
        (refused if reentrant else taken).update(
            {
                "attribute 'noted'": partial(made, each, does(notes), ends=with_notes),
                "parameter is shared": partial(tied, partial(made, each)),
            }
        )
        for name, make in taken.items():
            # A plan that keeps everything installs nothing: these run as the model has them.
            over = 19_800 if name == "in and around blocks" else 0
            yield f"{how}, {name}", Hostile(make, over=over)
        for why, make in refused.items():
            yield f"{how}, {why}", Hostile(make, rf"checkpoint.*{why}")
    copied = called(lambda block, x: OwnCheckpoint.apply(x, block))  # type: ignore[no-untyped-call]
    yield "checkpoints: of its own", Hostile(stack(run=copied), refusal="in backward")


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
        stays = (
            "trainable parameters of several dtypes" if name in ("norms", "part of a block") else ""
        )
        yield f"dtypes: {name}", Hostile(make, stays=stays)


# --- all of them ----------------------------------------------------------------------------------

_ORDER = r"block|unit|forward|skipped|order"
_TURNS = r"in another order from step to step"
_GRAD = r"autograd\.grad|second|twice|graph|backward"
_WRITES = "its forward writes an input in place"
_HOARDS = r"KiB more after every step: no plan can bound that\n  fix: keep numbers in place"
_GREW = "every step takes more than the one before"
_VIEWS = "views of parameters are attributes, or results of blocks"
_SPARSE = "sparse gradients"
_ANOTHER = "its forward gave another result when it ran again on the same inputs"
_PLACES = "parameters are read by their place in a storage (as_strided, set_)"
_COUNTER: dict[str, Any] = {"calls": int}
ENDS_IN_NORM = does(lambda b, x: b.norm(x) * 1.5)
"""Keeps nothing of what it gives; who reads that keeps it."""

HOSTILE: dict[str, Hostile] = {
    # 1
    "parameters: norm penalty": Hostile(stack(ends=norm_penalty)),
    "parameters: logged norms": Hostile(stack(ends=logged_norms)),
    "parameters: the next block's": Hostile(partial(reads_blocks, 1)),
    "parameters: the first block's later": Hostile(partial(reads_blocks, -2)),
    "parameters: given to blocks": Hostile(
        stack(
            does(lambda b, x, weight: x + b.computed(F.linear(x, weight))),
            run=all_with(lambda stack, _: stack.relative.weight),
            relative=lambda: nn.Embedding(WIDTH, WIDTH),
        )
    ),
    "parameters: moving target": Hostile(MovingTarget),
    "parameters: tied in the middle": Hostile(partial(tied, Stack)),
    "parameters: one storage": Hostile(one_storage, stays="parameters are views of one storage"),
    "parameters: shared memory": Hostile(shared_memory, stays="parameters share memory"),
    "parameters: an alias": Hostile(stack(Aliasing), stays=_VIEWS),
    "parameters: an alias handed on": Hostile(
        stack(
            does(lambda b, x: (Block.forward(b, x), b.outer.bias.expand(x.shape))),
            run=adds_second(),
        ),
        stays=_VIEWS,
    ),
    "parameters: small": Hostile(
        stack(
            does(
                lambda b, x: (x + b.computed(x)) * b.scale + b.empty.sum(),
                scale=lambda: nn.Parameter(torch.tensor(0.5)),
                empty=lambda: nn.Parameter(torch.ones(0, 3)),
            )
        ),
        stays="parameters without elements",
    ),
    # 2
    "flow: layer drop, python": Hostile(stack(run=drops(random.random))),
    "flow: layer drop, residual outside": Hostile(
        stack(does(Block.computed), run=drops(random.random, outside=True))
    ),
    "flow: layer drop, unused heads": Hostile(
        stack(run=drops(random.random), unused=lambda: nn.ModuleList([Block(), Block()]))
    ),
    "flow: stochastic depth": Hostile(
        stack(does(lambda b, x: x if by_torch() < 0.4 else x + b.computed(x)))
    ),
    "flow: early exit": Hostile(stack(run=chosen(lambda step: range(2) if step % 2 else range(4)))),
    "flow: reordered once": Hostile(
        stack(run=chosen(lambda step: (0, 2, 1, 3) if step == 2 else range(4))), _ORDER, gives_up=2
    ),
    "flow: twice once": Hostile(
        stack(run=chosen(lambda step: (0, 1, 1, 2, 3) if step == 2 else range(4))),
        _ORDER,
        gives_up=2,
    ),
    "flow: one block shared": Hostile(stack(depth=3, run=called_thrice, shared=Block)),
    "flow: a block that comes late": Hostile(
        # after the first steps, of which one is profiled
        stack(run=chosen(lambda step: range(4) if step >= 4 else (0, 1, 3))),
        _ORDER,
        trains=True,
        over=123_700,
    ),
    "flow: calls are counted": Hostile(stack(run=counts_steps, **_COUNTER)),
    "flow: turned": Hostile(stack(run=turned, **_COUNTER), _TURNS),
    "flow: growing": Hostile(stack(run=growing, **_COUNTER), _GREW),
    "flow: routed by values": Hostile(stack(ROUTED)),
    "flow: routed, layer drop": Hostile(stack(ROUTED, run=drops(random.random, outside=True))),
    "flow: masked by values": Hostile(stack(does(masked))),
    "flow: masked, layer drop": Hostile(stack(does(masked), run=drops(by_torch, outside=True))),
    "flow: distinct values": Hostile(stack(does(distinct))),
    "flow: forwards are counted": Hostile(stack(does(counts_forwards, **_COUNTER))),
    "flow: forwards by chance": Hostile(stack(does(tosses))),
    # 3
    "in place: residual in the block": Hostile(stack(does(adds_to_input))),
    "in place: input scaled": Hostile(stack(does(scales_input))),
    "in place: a copy scaled": Hostile(
        stack(
            does(lambda b, x: Block.forward(b, x.mul_(0.5).add_(0.1))),
            run=called(lambda block, x: block(x + 0.0)),
        ),
        once=_WRITES,
    ),
    "in place: view of the output": Hostile(stack(does(writes_view))),
    "in place: residual in the model": Hostile(written_between(Tensor.add_)),
    "in place: activation": Hostile(
        written_between(lambda hidden, _: F.relu(hidden, inplace=True))
    ),
    "in place: one running sum": Hostile(stack(does(Block.halved), run=running_sum)),
    "in place: an input, later": Hostile(
        stack(does(lambda b, x: x + b.computed(x.clone())), run=written_later),
        once="an input of its forward is written to after it has run",
    ),
    # 4
    "peaks: dense": Hostile(
        stack([partial(DenseBlock, count) for count in range(1, 5)], run=dense), above=140_000
    ),
    "peaks: u-net": Hostile(
        stack(
            depth=3,
            run=u_net,
            decoders=lambda: nn.ModuleList(
                does(
                    lambda b, x, skip: Block.forward(b, b.mix(torch.cat([x, skip], dim=-1))),
                    mix=partial(nn.Linear, 2 * WIDTH, WIDTH),
                )()
                for _ in range(3)
            ),
        ),
        above=40_000,
    ),
    "peaks: messages": Hostile(stack(Messages, run=graph), above=25_000),
    "peaks: relative bias": Hostile(
        stack([partial(BiasedAttention, makes_bias=n == 0) for n in range(4)], run=biased),
        above=30_000,
    ),
    "peaks: one bias for all": Hostile(
        stack(BiasedAttention, run=biased, bias=partial(nn.Embedding, 2 * SEQUENCE, 4)),
        above=30_000,
    ),
    "peaks: read between equal blocks": Hostile(
        stack(ENDS_IN_NORM, 5, run=read_between, scale=lambda: nn.Parameter(torch.ones(WIDTH)))
    ),
    "peaks: first to last of equal blocks": Hostile(stack(ENDS_IN_NORM, 5, run=first_to_last)),
    "peaks: embedding again": Hostile(stack(depth=5, run=first_again), above=SLACK_BYTES),
    "peaks: parameters of many pieces": Hostile(
        stack(
            does(
                lambda b, x: x + b.down(torch.tanh(b.up(x))),
                up=lambda: nn.Linear(WIDTH, 8192),
                down=lambda: nn.Linear(8192, WIDTH),
            ),
            3,
        )
    ),
    "peaks: two outputs": Hostile(
        stack(does(two_outputs), 5, run=to_the_next_but_one), above=20_000
    ),
    "peaks: one output twice": Hostile(
        stack(does(lambda b, x: (Block.forward(b, x),) * 2), run=adds_second(0.5))
    ),
    "peaks: transposed": Hostile(
        stack(run=called(lambda block, x: block(x.transpose(0, 1)).transpose(0, 1)))
    ),
    "peaks: all hidden states": Hostile(AllHidden, above=SLACK_BYTES),
    "peaks: named hidden states": Hostile(stack(run=named), above=SLACK_BYTES),
    "peaks: wide heads on the way": Hostile(WideHeads, above=110_000),
    "peaks: kept on ctx": Hostile(stack(inside(KeepsOnContext)), above=210_000),
    "peaks: output on ctx": Hostile(stack(inside(KeepsOutputOnContext)), above=170_000),
    "peaks: input on ctx": Hostile(
        stack(does(lambda b, x: Block.forward(b, KeepsOnContext.apply(x)))),  # type: ignore[no-untyped-call]
        above=230_000,
    ),
    "peaks: own checkpoint": Hostile(
        stack(does(lambda b, x: OwnCheckpoint.apply(x, partial(Block.forward, b))))  # type: ignore[no-untyped-call]
    ),
    "peaks: output remembered": Hostile(
        stack(does(remembers_output, memory=lambda: None)), above=75_000
    ),
    "peaks: output kept": Hostile(stack(does(keeps_output))),
    "peaks: inner kept": Hostile(stack(does(keeps_inner)), above=SLACK_BYTES),
    "peaks: inner kept in a container": Hostile(
        stack(does(keeps_in_container, seen=partial(deque, maxlen=2))), above=SLACK_BYTES
    ),
    # The tokens of the step before count beside this one's, which replace them in the forward.
    "peaks: cache of the model": Hostile(
        stack(ends=caches), above=SLACK_BYTES + 8 * BATCH * SEQUENCE
    ),
    "peaks: replaced buffer": Hostile(Averaging, above=SLACK_BYTES),
    "peaks: a leaf of its own": Hostile(Perturbed),
    "peaks: growing cache": Hostile(
        stack(does(hoards, history=list)), rf"blocks\.0\.history holds 20\.00 {_HOARDS}"
    ),
    "peaks: growing elsewhere": Hostile(
        HoardsElsewhere, rf"what its code holds besides its attributes holds 20\.00 {_HOARDS}"
    ),
    # 5
    "random: python": Hostile(stack(scaled(random.random))),
    "random: numpy's mask": Hostile(stack(does(numpy_mask))),
    "random: generators of its own": Hostile(stack(OWN_GENERATORS)),
    "random: a helper's": Hostile(
        stack(
            does(
                lambda b, x: x + b.augmentation.factor() * b.computed(x), augmentation=Augmentation
            )
        )
    ),
    "once: counts": Hostile(
        stack(does(counts, **_COUNTER)), once="its forward changes its attribute 'calls'"
    ),
    "once: lists": Hostile(
        stack(does(lists, seen=lambda: {"calls": []})),
        once="its forward changes its attribute 'seen'",
    ),
    "once: sums": Hostile(
        stack(does(sums, total=lambda: torch.zeros(()))),  # no buffer
        once="its forward changes its attribute 'total'",
    ),
    "once: reads a global": Hostile(reading_global, once=_ANOTHER),
    "once: reads what others set": Hostile(
        stack(
            does(lambda b, x: x + b.computed(x * b.scale), scale=lambda: 1.0),
            run=scales,
        ),
        once=_ANOTHER,
    ),
    "once: weights of the call": Hostile(stack(run=called(halved_weight)), once=_ANOTHER),
    "once: frozen for the call": Hostile(
        stack(run=freezing), once="requires_grad of its parameters changes after it has run"
    ),
    "once: hooks collect": Hostile(
        Collecting, once="its forward changes an attribute of a module around it"
    ),
    # 6
    "takes: complex": Hostile(
        stack(
            does(
                filters,
                weight=lambda: nn.Parameter(
                    0.1 * torch.randn(SEQUENCE // 2 + 1, WIDTH, dtype=torch.cfloat)
                ),
            )
        ),
        stays="complex parameters beside real ones",
    ),
    "takes: complex alone": Hostile(
        # Fused for real parameters, and unfused for all where one is complex: pieces would differ.
        stack(Spectral),
        stays="the optimizer steps on all parameters at once",
    ),
    "takes: forward gradients": Hostile(stack(does(forward_gradients)), stays=""),
    "takes: an offset": Hostile(stack(does(by_offset)), stays=_PLACES),
    "takes: a storage": Hostile(stack(does(by_storage)), stays=_PLACES),
    "takes: arguments of all kinds": Hostile(stack(does(takes_all), run=gives_all)),
    "takes: dicts": Hostile(stack(does(in_dict), 5, run=dicts), stays=""),
    "takes: objects": Hostile(
        stack(
            does(lambda b, s: State(s.hidden + b.computed(s.hidden) + s.shift, s.shift)),
            run=objects,
        )
    ),
    "takes: an object that is written": Hostile(
        stack(does(accumulates), run=all_with(lambda _, x: State(x.mean(-1, keepdim=True), x))),
        stays="hands tensors on in its arguments",
    ),
    "takes: hooks that round": Hostile(stack(run=rounding), "saved-tensor hooks around Block"),
    "takes: vmap": Hostile(
        stack(run=called(lambda block, x: torch.vmap(block)(x))),
        "Block inside a transform of torch.func",
    ),
    "takes: a gradient in a block": Hostile(stack(does(gradient_inside)), _GRAD),
    "takes: forces": Hostile(stack(run=forces), _GRAD),
    "takes: gradient of weights": Hostile(stack(ends=gradient_of_weights), _GRAD),
    "takes: sparse gradient": Hostile(stack(sparse=True), stays=_SPARSE, optimizer="sgd"),
    "takes: sparse bags": Hostile(
        partial(
            Bags,
            does(
                lambda b, x, tokens: Block.forward(b, x) + b.bag(tokens)[:, None],
                bag=lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, sparse=True, mode="sum"),
            ),
        ),
        stays=_SPARSE,
        optimizer="sgd",
    ),
    "takes: sparse matrix": Hostile(stack(does(aggregates), run=all_with(neighbours)), stays=""),
    # 7
    **dict(own_checkpoints()),
    # 8
    **dict(several_dtypes()),
    "takes: a hook on its input": Hostile(stack(does(damps_gradient)), once=""),
    "takes: backward hooks": Hostile(backward_hooks, once="", stays=""),
    "peaks: gradients of hidden states": Hostile(stack(run=gradients_of_states)),
}
"""The models by their names: the class of what is hostile, and the case."""


def batches() -> list[Batch]:
    return [batch_of(step) for step in range(4)]


def factory(name: str) -> Callable[[], tuple[nn.Module, list[Batch]]]:
    """A factory for `protrain profile`."""
    return lambda: (HOSTILE[name].make(), batches())


mixed_factory = factory("dtypes: norms")
complex_factory = factory("takes: complex")
complex_alone_factory = factory("takes: complex alone")
dicts_factory = factory("takes: dicts")
objects_factory = factory("takes: objects")
sparse_factory = factory("takes: sparse gradient")
