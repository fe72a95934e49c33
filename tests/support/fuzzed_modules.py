"""Random modules as source text, drawn from a seed: what people write, put together at random.

Most of what is drawn is ordinary, so that a model holds few of the things that a profile of one
step may not see. The text is what is printed where a model goes wrong.
"""

import random
import re
import sys
from functools import cache
from types import ModuleType

from tests.support.hostile_models import VOCABULARY, WIDTH, Hostile

_HEAD = f"""\
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY = {WIDTH}, {VOCABULARY}


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = torch.tanh(x)
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - ctx.y * ctx.y)
"""


_ATTRIBUTES = {
    "calls": "0",
    "n": "nn.LayerNorm(WIDTH)",
    "up": "nn.Linear(WIDTH, WIDTH)",
    "w": "nn.Linear(WIDTH, 2 * WIDTH)",
    "qkv": "nn.Linear(WIDTH, 3 * WIDTH)",
    "s": "nn.Parameter(torch.ones(WIDTH))",
    "b": "nn.Parameter(torch.zeros(WIDTH))",
    "c": "nn.Conv1d(WIDTH, WIDTH, 3, padding=1)",
    "mix": "nn.Linear(3 * WIDTH, WIDTH)",
    "bn": "nn.BatchNorm1d(WIDTH)",
    "mean": "nn.Buffer(torch.zeros(WIDTH))",
    **dict.fromkeys(("mask", "before", "seen"), "None"),
    "draws": "random.Random(1)",
}
"""Attributes that pieces of a block's forward read, each by a number of its own."""


def _numbered(piece: str, number: int) -> tuple[list[str], str]:
    """Lines of `__init__` and of forward."""
    init = [
        f"self.{name}{number} = {made}"
        for name, made in _ATTRIBUTES.items()
        if re.search(rf"self\.{name}\b", piece)
    ]
    return init, re.sub(rf"self\.({'|'.join(_ATTRIBUTES)})\b", rf"self.\g<1>{number}", piece)


_PIECES = (
    # what every model is made of
    (12, "x = x + self.up(F.gelu(self.n(x)))"),
    (6, "a, b = self.w(x).chunk(2, dim=-1)\nx = x + a * torch.sigmoid(b)"),
    (4, "q, k, v = self.qkv(x).chunk(3, dim=-1)\nx = x + F.scaled_dot_product_attention(q, k, v)"),
    (3, "x = x * self.s + self.b"),
    (3, "x = F.dropout(x, 0.1, self.training)"),
    (2, "x = x + self.c(x.transpose(1, 2)).transpose(1, 2)"),
    (2, "for _ in range(2):\n    x = x + F.silu(self.up(x))"),
    (2, "x = x + self.mix(torch.cat([x, x * 2, x.roll(1, 1)], dim=-1))"),
    (2, "x = x + self.up(x).to(torch.bfloat16).float()"),
    (2, "more = more + x.mean(dim=1, keepdim=True)"),
    (2, "x = x + 0.1 * more"),
    (2, "x = x + checkpoint(self.up, x, use_reentrant=False)"),
    (2, "x = x + Saves.apply(self.up(x))"),
    # in place
    (2, "t = self.up(x)\nt.mul_(0.5).relu_()\nx = x + t"),
    (1, "t = self.up(x)\nt[..., :8] += 1\nx = x + t"),
    (1, "x = x.add_(self.up(F.relu(x)))"),
    (1, "x.mul_(0.9)"),
    (1, "x = x.masked_fill_(x.detach() > 2, 0.0)"),
    # what is kept from one forward to the next
    (2, "x = x + self.bn(x.transpose(1, 2)).transpose(1, 2)"),
    (1, "self.mean.lerp_(x.detach().mean((0, 1)), 0.1)\nx = x - self.mean"),
    (1, "if self.mask is None:\n    self.mask = torch.ones(x.shape[1], 1)\nx = x * self.mask"),
    (
        1,
        "before = x if self.before is None else self.before\nself.before = x.detach()\n"
        "x = x + 0.1 * before",
    ),
    (1, "self.seen = x.detach()"),
    (1, "self.calls += 1\nif self.calls % 2:\n    x = x + self.up(x)"),
    # at random
    (2, "x = x + 0.1 * torch.randn_like(x)"),
    (1, "x = x * (0.5 + random.random())"),
    (1, "x = x * float(0.5 + np.random.rand())"),
    (1, "x = x * (0.5 + self.draws.random())"),
    (1, "if torch.rand(()).item() < 0.5:\n    x = x + self.up(x)"),
    (1, "if random.random() < 0.5:\n    x = x + self.up(x)"),
    # what has no gradient, and what saved-tensor hooks do not see
    (1, "with torch.no_grad():\n    t = self.up(x)\nx = x + 0.1 * t"),
    (1, "x = x + 0.1 * self.up(x.detach())"),
    (1, "x = x + Keeps.apply(self.up(x))"),
    (
        1,
        "with torch.enable_grad():\n    t = x.detach().requires_grad_()\n"
        "    (t,) = torch.autograd.grad(self.up(t).square().mean(), t)\nx = x + t",
    ),
)
"""Lines of a block's forward, with how often they come: `x` is the hidden state, [batch, sequence,
width], and `more` a tensor that rides along."""


_BETWEEN = (
    (16, ""),
    (2, "x = F.silu(x)"),
    (2, "x = F.dropout(x, 0.1, self.training)"),
    (1, "x = x * self.scale"),
    (1, "x.mul_(0.9)"),
    (1, "x = F.relu(x, inplace=True)"),
    (1, "x.add_(first)"),
    (1, "x = x + first"),
    (1, "self.hidden = x.detach()"),
    (1, "penalty = penalty + self.blocks[0].own.square().mean()"),
    (1, "penalty = penalty + sum(p.norm() for p in self.parameters()) * 1e-3"),
    (1, "penalty = penalty + x.square().mean()"),
    # heads on the way, and hidden states that are compared at the end
    (1, "penalty = penalty + self.aux(x).logsumexp(-1).mean() * 0.01"),
    (1, "penalty = penalty + self.aux(first).logsumexp(-1).mean() * 0.01"),
    (1, "penalty = penalty + F.mse_loss(self.side(x), self.side(first).detach())"),
    (1, "sides.append(self.side(x))"),
    (1, "x = x + 0.1 * self.aux(x.mean(dim=1))[:, None, :WIDTH]"),
)  # fmt: skip

_AROUND = (
    (20, "{call}"),
    (1, "for _ in range(2):\n    {call}"),
    (1, "if step % 2 == 0:\n    {call}"),
    (1, "if step < 4:\n    {call}"),
    (1, "if not self.training or random.random() < 0.7:\n    {call}"),
    (1, "if torch.rand(()).item() < 0.7:\n    {call}"),
)
"""Code around the call of a block."""

_OUTSIDE = (
    (12, ""),
    (3, "x = y + x"),
    (1, "x = y + self.scale * x"),
    (1, "x = y * torch.sigmoid(x)"),
    (1, "x = y + F.dropout(x, 0.1, self.training)"),
    (1, "x = y.lerp(x, 0.5) + first"),
    (1, "x = x.scatter_add(1, order.expand_as(x), y)"),
)
"""Residuals, gates and skips that the loop over the blocks has, of all of a model; y is a block's
input."""

_CALLED = (
    (8, "{block}"),
    (1, "partial(checkpoint, {block}, use_reentrant=False)"),
    (1, "partial(checkpoint, {block}, use_reentrant=True)"),
)
"""Callables in a block's place, in all of a model."""

_STYLES: dict[str, tuple[str, str, str, str]] = {
    # signature of the block, what it unpacks, what it returns, how it is called
    "tensors": ("x, more", "", "x, more", "x, more = {block}(x, more)"),
    "one": ("x, more=None", "more = x.mean(dim=1, keepdim=True)", "x", "x = {block}(x)"),
    "tuple": ("state", "x, more = state", "(x, more)", "x, more = {block}((x, more))"),
    "dict": (
        "state",
        'x, (more,) = state["x"], state["more"]',
        '{"x": x, "more": [more]}',
        'found = {block}({"x": x, "more": [more]})\nx, more = found["x"], found["more"][0]',
    ),
    "keywords": (
        "*, x, rest, sizes, flag=True",
        'more = rest["more"]',
        '[x, {"more": more, "sizes": sizes}]',
        'x, rest = {block}(x=x, rest={"more": more}, sizes=[1, 2], flag=True)\nmore = rest["more"]',
    ),
    "object": (
        "given",
        "x, more = given.x, given.more",
        "SimpleNamespace(x=x, more=more)",
        "given = {block}(SimpleNamespace(x=x, more=more))\nx, more = given.x, given.more",
    ),
}

_RESULTS = ("loss", '{"loss": loss, "hidden": x}', "(loss, x)", "SimpleNamespace(loss=loss, x=x)")


def source(seed: int) -> str:
    """The text of a module with a class `Model`."""
    rng = random.Random(seed)
    style = rng.choice(list(_STYLES))
    kinds = rng.choice((1, 1, 2))
    classes = [_block(rng, f"Block{kind}", style) for kind in range(kinds)]
    called = _chosen(random.Random(-1 - seed), _CALLED)
    return "\n\n".join([_HEAD, *classes, _model(rng, kinds, style, called)])


def _chosen(rng: random.Random, choices: tuple[tuple[int, str], ...]) -> str:
    return rng.choices([text for _, text in choices], [weight for weight, _ in choices])[0]


def _indented(text: str, depth: int) -> str:
    return "".join(f"{'    ' * depth}{line}\n" for line in text.splitlines() if line)


def _block(rng: random.Random, name: str, style: str) -> str:
    arguments, unpack, result, _ = _STYLES[style]
    weights, texts = zip(*_PIECES, strict=True)
    pieces = rng.choices(texts, weights, k=rng.randint(1, 4))
    numbered = [_numbered(piece, number) for number, piece in enumerate(pieces)]
    init = [line for lines, _ in numbered for line in lines]
    forward = [piece for _, piece in numbered]
    shared = rng.random() < 0.15
    init += ["self.own = nn.Parameter(torch.ones(WIDTH))", "self.norm = nn.LayerNorm(WIDTH)"]
    forward += ["x = x + 0.1 * F.linear(x, self.shared)"] if shared else []
    if rng.random() < 0.08:
        forward.insert(0, f"if torch.rand(()).item() < 0.3:\n    return {result}")
    forward.append("x = self.norm(x) * self.own")
    return (
        f"class {name}(nn.Module):\n"
        "    def __init__(self, shared):\n"
        "        super().__init__()\n"
        + ("        self.shared = shared\n" if shared else "")
        + _indented("\n".join(init), 2)
        + f"\n    def forward(self, {arguments}):\n"
        + _indented("\n".join([unpack, *forward, f"return {result}"]), 2)
    )


def _model(rng: random.Random, kinds: int, style: str, called: str) -> str:
    call = _STYLES[style][3].replace("{block}", called)
    outside = _chosen(rng, _OUTSIDE)
    count = rng.randint(5, 9) if outside else rng.randint(2, 5)
    blocks = ", ".join(f"Block{rng.randrange(kinds)}(shared)" for _ in range(count))
    init = [
        "self.embedding = nn.Embedding(VOCABULARY, WIDTH)",
        "shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)",
        f"self.blocks = nn.ModuleList([{blocks}])",
        "self.scale = nn.Parameter(torch.ones(WIDTH))",
        "self.aux, self.side = nn.Linear(WIDTH, 700), nn.Linear(WIDTH, 300)",
        "self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)",
    ]
    if rng.random() < 0.2:
        init.append("self.head.weight = self.embedding.weight")
    if rng.random() < 0.1:
        init.append("self.blocks[-1].norm = self.blocks[0].norm")
    if rng.random() < 0.2:
        every = rng.randint(2, 5)
        init += [f"for p in list(self.parameters())[::{every}]:", "    p.requires_grad_(False)"]
    order = list(range(count))
    if rng.random() < 0.1:
        order.insert(rng.randrange(count), rng.randrange(count))
    forward = [
        "x = self.embedding(tokens)",
        "more, penalty, first, sides = x.mean(dim=1, keepdim=True), 0.0, x, []",
        "order = torch.arange(x.shape[1]).flip(0)[None, :, None]" if outside else "",
    ]
    for place, number in enumerate(order):
        run = call.replace("{block}", f"self.blocks[{number}]")
        run = f"y = x\n{run}\n{outside}" if outside else run
        around, _, rest = _chosen(rng, _AROUND).partition("{call}")
        depth = 1 if around.strip() else 0
        forward.append(around.rstrip() + ("\n" if depth else "") + _indented(run, depth) + rest)
        forward.append("first = x" if place == 0 and rng.random() < 0.5 else "")
        forward.append(_chosen(rng, _BETWEEN))
    loss = "F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + penalty"
    forward.append("penalty = penalty + sum(side.square().mean() for side in sides)")
    forward += ["logits = self.head(x)", f"loss = {loss}", f"return {rng.choice(_RESULTS)}"]
    return (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        + _indented("\n".join(init), 2)
        + "\n    def forward(self, tokens, step):\n"
        + _indented("\n".join(forward), 2)
    )


@cache
def _module(seed: int) -> ModuleType:
    module = ModuleType(f"fuzzed_{seed}")
    sys.modules[module.__name__] = module
    exec(compile(source(seed), f"<seed {seed}>", "exec"), module.__dict__)  # noqa: S102 (our text)
    return module


def fuzzed(seed: int) -> Hostile:
    return Hostile(lambda: _module(seed).Model(), seed=seed)
