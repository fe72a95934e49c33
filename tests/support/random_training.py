"""Random models, trained under random plans and plainly."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Updates
from tests.support.plan_settings import with_settings
from tests.support.random_models import (
    Between,
    BlockKind,
    Extra,
    Shape,
    Tie,
    random_batch,
    random_model,
)
from tests.support.runtime_cases import (
    ADAMW,
    Outcome,
    assert_bitwise,
    attached,
    delays,
    differences,
    mixed,
    on_device,
    outcome,
    plan_for,
    speculative,
    units_of,
)

NUM_STEPS = 3

KINDS: tuple[BlockKind, ...] = get_args(BlockKind)
BETWEEN: tuple[Between, ...] = ("nothing", *get_args(Between))
EXTRA: tuple[Extra, ...] = get_args(Extra)
TIES: tuple[Tie, ...] = get_args(Tie)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    count = draw(st.integers(2, 5))
    return Shape(
        blocks=tuple(draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))),
        between=tuple(draw(st.lists(st.sampled_from(BETWEEN), min_size=count, max_size=count))),
        extra=draw(st.sampled_from(EXTRA)),
        skip=draw(st.booleans()),
        tuples=draw(st.booleans()),
        aside=draw(st.booleans()),
        tie=draw(st.sampled_from(TIES)),
        unused=draw(st.booleans()),
        frozen=draw(st.sampled_from((0, 0, 2, 3, 5))),
        dropout=draw(st.sampled_from((0.0, 0.1))),
    )


Looking = type[torch.no_grad | torch.inference_mode]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A few steps of a plain loop, with dropout from a known state.

    `looks`: how the model is evaluated before each backward, and after each step.
    """

    micro_batches: int = 1
    looks: tuple[Looking | None, Looking | None] = (None, None)

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
        torch.manual_seed(1)
        losses: list[Tensor] = []
        for number in range(NUM_STEPS * self.micro_batches):
            loss = loss_of(call_model(model, random_batch(number)))
            losses += looked(model, number + 100, self.looks[0])
            loss.backward()
            losses.append(loss.detach())
            if (number + 1) % self.micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
                losses += looked(model, number + 200, self.looks[1])
        return outcome(model, optimizer, losses)


def looked(model: nn.Module, number: int, looking: Looking | None) -> list[Tensor]:
    """The loss without a graph, if it is looked at."""
    if looking is None:
        return []
    with looking():
        return [loss_of(call_model(model, random_batch(number)))]


def assert_trains_like_plain(shape: Shape, seed: int, folder: Path) -> None:
    """All of the plan is drawn from the seed."""
    rng = random.Random(seed)
    tiers: tuple[TierName, ...] = rng.choice((("disk",), ("host",), ("disk", "host")))
    micro_batches = rng.choice((1, 1, 2))
    looking: list[Looking | None] = [None, torch.no_grad, torch.inference_mode]
    loop = Loop(micro_batches=micro_batches, looks=(rng.choice(looking), rng.choice(looking)))
    model = random_model(shape)
    expected = loop.train(model, ADAMW(model.parameters()))
    model = random_model(shape)
    with on_device("cpu"):
        found = units_of(random_model(shape), random_batch(0))
    updates: Updates = rng.choice(("in backward", "after backward"))
    alone = updates == "in backward" and micro_batches == 1
    units = mixed(found, rng, *tiers, stepped=alone)
    plan = with_settings(
        plan_for(model, units, piece_bytes=rng.choice((1_000, 20_000, 10**9))),
        micro_batches=micro_batches,
        updates=updates,
    )
    if updates == "after backward" and micro_batches == 1 and rng.random() < 0.5:
        plan = speculative(plan)
    before = attached(model)
    model, optimizer = prepare(
        model,
        plan,
        optimizer=ADAMW,
        param_groups=[{"params": list(model.parameters())}],
        spill_directory=folder,
        lane_delay=delays(seed) if rng.random() < 0.5 else None,
    )
    assert_bitwise(loop.train(model, optimizer), expected)
    restore(model)
    assert attached(model) == before
    assert list(differences(model.state_dict(), expected.parameters, "restored")) == []


# Every example is a training run: what shrinking would take is better spent on other examples.
steady = settings(
    suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate]
)
