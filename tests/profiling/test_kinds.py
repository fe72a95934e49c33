"""Several kinds of batches in one profile: the plan holds the largest of each unit.

The oracles are plain PyTorch, and bytes measured in a step of each kind.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.batches import Batch
from tests.support.hostile_models import WIDTH, Block, Hostile
from tests.support.judging import PlanName, judged

ROWS = 64


class Tower(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.last(hidden)
        return out


class Gan(nn.Module):
    """A generator and a discriminator, trained in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Tower(8, 16), Tower(16, 1)

    def forward(self, noise: Tensor, real: Tensor, turn: str) -> Tensor:
        if turn == "generator":
            return F.softplus(-self.discriminator(self.generator(noise))).mean()
        with torch.no_grad():
            fake = self.generator(noise)
        for_real, for_fake = self.discriminator(torch.cat([real, fake])).chunk(2)
        return (F.softplus(-for_real) + F.softplus(for_fake)).mean()


class Tasks(nn.Module):
    """A tower for each task behind a common one; a batch says which tasks it has."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.tasks = Tower(8, WIDTH), nn.ModuleList(Tower(WIDTH, n) for n in (4, 400))

    def forward(self, noise: Tensor, tasks: tuple[int, ...]) -> Tensor:
        hidden = self.trunk(noise)
        return sum((self.tasks[task](hidden).square().mean() for task in tasks), torch.zeros(()))


class Switched(nn.Module):
    """Layers that values in the batch switch off."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(8, 4)

    def forward(self, noise: Tensor, layers: Tensor) -> Tensor:
        hidden = self.tower.first(noise)
        for on, block in zip(layers, self.tower.blocks, strict=True):
            if on:
                hidden = block(hidden)
        out: Tensor = self.tower.last(hidden).square().mean()
        return out


def drawn(step: int, width: int) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(step))


def turns(step: int, *, first: int) -> Batch:
    turn = ("generator", "discriminator")[(step + first) % 2]
    return {"noise": drawn(step, 8), "real": drawn(step + 99, 16), "turn": turn}


def in_turns(step: int, *, last: int) -> Batch:
    """A batch of both tasks first, and last one of the task that is to be measured."""
    return {"noise": drawn(step, 8), "tasks": ((step + last + 1) % 2,) if step else (0, 1)}


def switches(step: int) -> Batch:
    on = [True] * 3 if step == 0 else [step % 2 == 0, True, step % 3 == 0]
    return {"noise": drawn(step, 8), "layers": torch.tensor(on)}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "a GAN, measured in the discriminator's turn": (Gan, partial(turns, first=0)),
    "a GAN, measured in the generator's turn": (Gan, partial(turns, first=1)),
    "tasks in turns, the first measured": (Tasks, partial(in_turns, last=0)),
    "tasks in turns, the second measured": (Tasks, partial(in_turns, last=1)),
    "layers that data switch off": (Switched, switches),
}


def case(name: str) -> Hostile:
    make, batch = KINDS[name]
    return Hostile(make, batch=batch)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_trains_like_plain_below_the_predicted_peak(name: str) -> None:
    plans: tuple[PlanName, ...] = ("kept", "recomputed", "mixed")
    found = judged(case, name, plans=plans, seed=3)
    assert [(one.kind, one.text) for one in found] == [("like plain", "")] * len(plans)
