"""Several kinds of batches in one profile: the plan holds the largest of each unit.

The oracles are plain PyTorch, and bytes measured in a step of each kind.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.batches import Batch
from protrain_runtime import prepare
from protrain_runtime.contract.records.plan import RECOMPUTE, Placement
from tests.support.hostile_models import WIDTH, Block, Hostile
from tests.support.judging import PlanName, judged
from tests.support.runtime_cases import decided, plan_for, units_of

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


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_trains_like_plain_below_the_predicted_peak(name: str) -> None:
    plans: tuple[PlanName, ...] = ("kept", "recomputed", "mixed")
    found = judged(case, name, plans=plans, seed=3)
    assert [(one.kind, one.text) for one in found] == [("like plain", "")] * len(plans)


class Returning(Tower):
    """A tower with a loss to profile, whose output a loop takes."""

    def forward(self, hidden: Tensor) -> Any:
        out = super().forward(hidden)
        return {"loss": out.square().mean(), "out": out}


def adversarial(
    models: list[nn.Module], optimizers: list[torch.optim.Optimizer], *, at_once: bool
) -> list[Tensor]:
    """Steps of two models with an optimizer each, as the page says."""
    (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
    seen: list[Tensor] = []
    for step in range(4):
        fake, real = generator(drawn(step, 8))["out"], drawn(step + 99, 16)
        if at_once:
            for_real, for_fake = discriminator(torch.cat([real, fake.detach()]))["out"].chunk(2)
            (F.softplus(-for_real) + F.softplus(for_fake)).mean().backward()
        else:
            F.softplus(-discriminator(real)["out"]).mean().backward()
            F.softplus(discriminator(fake.detach())["out"]).mean().backward()
        of_discriminator.step()
        of_discriminator.zero_grad()
        loss = F.softplus(-discriminator(fake)["out"]).mean()
        loss.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(value for model in models for value in model.state_dict().values())]


@pytest.mark.parametrize("at_once", [True, False])
def test_two_models_with_a_plan_each_train_like_plain(at_once: bool, tmp_path: Path) -> None:
    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Returning(8, 16), Returning(16, 1)]

    adamw = partial(torch.optim.AdamW, lr=1e-3)
    plain = made()
    expected = adversarial(plain, [adamw(m.parameters()) for m in plain], at_once=at_once)
    models, optimizers = made(), list[torch.optim.Optimizer]()
    for index, (model, rows, width) in enumerate(zip(models, (1, 2), (8, 16), strict=True)):
        units = units_of(model, (drawn(0, width).repeat(rows, 1),))
        own = {"updates": "after backward", "micro_batches": 1 if at_once else 2} if index else {}
        plan = plan_for(model, decided(units, RECOMPUTE, Placement(tier="disk")), **own)
        models[index], optimizer = prepare(model, plan, optimizer=adamw, spill_directory=tmp_path)
        optimizers.append(optimizer)
    found = adversarial(models, optimizers, at_once=at_once)
    assert all(map(torch.equal, found, expected))
