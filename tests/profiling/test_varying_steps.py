"""Models whose steps differ, by values, by chance or by counting: their peaks hold, or are refused.

The oracle is a measured step, slot by slot, of batches that no profile saw.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.batches import Batch
from protrain_plan.models.building import seeded
from tests.support.judging import PLANS, judged

WIDTH, BATCH, SEQUENCE, VOCABULARY = 32, 4, 64, 64


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, width], twice
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Routed(nn.Module):
    """Each token to two of four experts, by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Dense() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


class Masked(Dense):
    """Computes on the tokens with a positive sum alone."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x.detach().sum(-1) > 0
        return torch.zeros_like(x).index_put((mask,), super().forward(x[mask]))


class Distinct(Dense):
    """Computes once for all tokens with the same rounded sum."""

    def forward(self, x: Tensor) -> Tensor:
        kinds, which = torch.unique(x.detach().sum(-1).round(), return_inverse=True)
        means = x.new_zeros(len(kinds), WIDTH).index_add(0, which, x)
        return super().forward(means)[which]


class Counting(Dense):
    """Every third forward does more."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = super().forward(x)
        return x if self.count % 3 else super().forward(x)


class Tossing(Dense):
    """One forward in three does more, by chance."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if random.random() < 0.6 else super().forward(x)


BLOCKS: dict[str, type[nn.Module]] = {
    "dense": Dense,
    "routed": Routed,
    "masked": Masked,
    "distinct": Distinct,
    "counting": Counting,
    "tossing": Tossing,
}
LOOPS: dict[str, Callable[["Model", Tensor], Tensor]] = {
    "in order": lambda model, x: model.run(x, range(5)),
    "skipping": lambda model, x: model.run(x, (n for n in range(5) if random.random() < 0.7)),
    "skipping by values": lambda model, x: model.run(
        x, (n for n in range(5) if torch.rand(()).item() < 0.8)
    ),
    "shuffled": lambda model, x: model.run(x, random.sample(range(5), 5)),
    "turned": lambda model, x: model.run(x, ((n + model.count) % 5 for n in range(5))),
    "repeated": lambda model, x: model.run(x, [0, 1, 2, 3, 4, *range(random.randrange(3))]),
    "growing": lambda model, x: model.run(x, range(5)) + model.risen(x),
    "hoarding": lambda model, x: model.run(x, range(5)) + 0 * model.hoarded(x),
}
REFUSED = {
    "shuffled": "in another order from step to step",
    "turned": "in another order from step to step",
    "growing": "every step takes more than the one before",
    "hoarding": "more after every step",
}
HOARD: list[Tensor] = []


class Model(nn.Module):
    """A loop over five blocks, with the residuals outside."""

    count: int = 0

    def __init__(self, block: str, loop: str) -> None:
        super().__init__()
        HOARD.clear()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[block]() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loop = LOOPS[loop]

    def run(self, x: Tensor, order: Iterable[int]) -> Tensor:
        for number in order:
            x = x + self.blocks[number](x)
        return x

    def risen(self, x: Tensor) -> Tensor:
        return torch.stack([x * 0.1 for _ in range(self.count)]).sum(0)

    def hoarded(self, x: Tensor) -> Tensor:
        HOARD.append(x.detach())
        return HOARD[0].mean()

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, sequence] -> []
        self.count += 1
        hidden = self.loop(self, self.embedding(tokens).flatten(0, 1))
        return F.cross_entropy(self.head(hidden), tokens.flatten())


@dataclass(frozen=True)
class Subject:
    block: str
    loop: str
    optimizer: str = "adamw"
    factory: None = None
    gives_up: None = None

    def build(self) -> nn.Module:
        with seeded(0):
            return Model(self.block, self.loop).train()

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


CASES = [(block, "in order") for block in BLOCKS] + [("dense", loop) for loop in LOOPS]
CASES += [("routed", "skipping"), ("masked", "skipping by values"), ("tossing", "repeated")]
QUICK = (
    ("routed", "in order"),
    ("dense", "skipping"),
    ("dense", "turned"),
    ("dense", "growing"),
    ("dense", "hoarding"),
)


@pytest.mark.parametrize(
    ("block", "loop"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in dict.fromkeys(CASES)
    ],
)
def test_steps_that_differ_hold_no_more_than_predicted(block: str, loop: str) -> None:
    verdicts = judged(Subject, block, loop, plans=PLANS, seed=0)
    refusal = REFUSED.get(loop)
    if refusal is not None:
        (verdict,) = verdicts
        assert verdict.kind == "refused"
        assert refusal in verdict.text
        return
    kinds = {"like plain", "refused"} if loop == "repeated" else {"like plain"}
    assert {one.kind for one in verdicts} <= kinds, [one.text for one in verdicts]
