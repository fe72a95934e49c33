"""Small models of random make, trained under random plans and plainly.

They are what people write that no published architecture has at once. A `Shape` says all of one,
so that a failing example is one line that builds the model again.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.batches import Batch
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Plan, Updates
from tests.support.hostile_models import BATCH, SEQUENCE, WIDTH, Stack, tokens_of
from tests.support.runtime_cases import Subject, delays, mixed, one_group, plan_for, speculative
from tests.support.scenario import Looking, Loop, Scenario, restored

NUM_STEPS = 3

BlockKind = Literal["linear", "attention", "convolution", "batch norm", "in place", "functional"]
Between = Literal["nothing", "function", "in place", "parameter", "dropout"]
Extra = Literal["none", "every block", "last block"]
Tie = Literal["none", "head", "blocks", "both"]


@dataclass(frozen=True)
class Shape:
    """A stack of blocks between an embedding and a head.

    blocks      their kinds, in order, and what the model itself computes after each
    extra       who reads the model's second input, by keyword
    skip        a later part reads what the first block gave, besides the block after it
    tuples      blocks take and give a tuple of the hidden state and something that rides along
    aside       another block is computed after the first, and nobody uses its result
    tie         the head shares the embedding's weight; the first and last block share one weight
    unused      parameters that no forward reads: of the model and of each block
    frozen      every n-th parameter is frozen; 0 for none
    dropout     its probability in blocks
    """

    blocks: tuple[tuple[BlockKind, Between], ...]
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


class Model(Stack):
    """The stack; returns the loss beside what a loop may look at."""

    def __init__(self, shape: Shape) -> None:
        super().__init__([partial(Block, kind, shape) for kind, _ in shape.blocks])
        self.shape = shape
        self.aside = Block("linear", shape) if shape.aside else None
        self.scales = nn.ParameterList(
            torch.ones(WIDTH if between == "parameter" else 0) for _, between in shape.blocks
        )
        if shape.tie in ("head", "both"):
            self.head.weight = self.embedding.weight
        if shape.tie in ("blocks", "both"):
            first, last = self.blocks[0], self.blocks[-1]
            assert isinstance(first, Block) and isinstance(last, Block)
            last.inner.weight = first.inner.weight
        self.spare = nn.Parameter(torch.ones(7)) if shape.unused else None
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(not shape.frozen or number % shape.frozen > 0)

    def forward(self, tokens: Tensor, *, gate: Tensor) -> Mapping[str, Tensor]:  # type: ignore[override]
        shape = self.shape
        hidden: Tensor = self.embedding(tokens)
        riding = hidden.mean()
        first: Tensor | None = None
        for number, (block, (_, between)) in enumerate(zip(self.blocks, shape.blocks, strict=True)):
            last = number + 1 == len(self.blocks)
            wanted = shape.extra == "every block" or (shape.extra == "last block" and last)
            given: object = (hidden, riding) if shape.tuples else hidden
            result = block(given, extra=gate) if wanted else block(given)
            hidden = result[0] if isinstance(result, tuple) else result
            first = hidden if first is None else first
            if self.aside is not None and number == 0:
                self.aside(hidden)
            match between:
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
        return {"loss": self.loss(hidden, tokens), "riding": riding}


def subject(shape: Shape) -> Subject:
    return Subject(partial(Model, shape), batch_of)


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    return {
        "tokens": tokens_of(step),
        "gate": torch.rand(BATCH, SEQUENCE, 1, generator=generator),
    }


kinds = st.sampled_from(get_args(BlockKind))
between = st.sampled_from(("nothing", *get_args(Between)))
shapes = st.builds(
    Shape,
    blocks=st.lists(st.tuples(kinds, between), min_size=2, max_size=5).map(tuple),
    frozen=st.sampled_from((0, 0, 2, 3, 5)),
    dropout=st.sampled_from((0.0, 0.1)),
    **dict.fromkeys(("extra", "skip", "tuples", "aside", "tie", "unused"), ...),  # of its type
)


def assert_trains_like_plain(shape: Shape, seed: int, folder: Path) -> None:
    """All of the plan is drawn from the seed."""
    rng = random.Random(seed)
    tiers: tuple[TierName, ...] = rng.choice((("disk",), ("host",), ("disk", "host")))
    micro_batches = rng.choice((1, 1, 2))
    looking: list[Looking | None] = [None, torch.no_grad, torch.inference_mode]
    looks = (rng.choice(looking), rng.choice(looking))
    updates: Updates = rng.choice(("in backward", "after backward"))
    alone = updates == "in backward" and micro_batches == 1
    own = subject(shape)
    units = mixed(own.units(), rng, *tiers, stepped=alone)
    pieces = rng.choice((1_000, 20_000, 10**9))
    ahead = updates == "after backward" and micro_batches == 1 and rng.random() < 0.5

    def plan(model: nn.Module) -> Plan:
        settings = {"piece_bytes": pieces, "micro_batches": micro_batches, "updates": updates}
        found = plan_for(model, units, **settings)
        return speculative(found) if ahead else found

    Scenario(
        model=own,
        plan=plan,
        script=Loop(num_steps=NUM_STEPS, micro_batches=micro_batches, looks=looks),
        groups=one_group,
        options={"lane_delay": delays(seed) if rng.random() < 0.5 else None},
    ).assert_like_plain(folder, restored)


# Every example is a training run: what shrinking would take is better spent on other examples.
steady = settings(
    suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate]
)
