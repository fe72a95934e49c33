"""Random models, trained under random plans and plainly."""

import random
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import nn

from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Plan, Updates
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
from tests.support.runtime_cases import Subject, delays, mixed, one_group, plan_for, speculative
from tests.support.scenario import Looking, Loop, Scenario, restored

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


def subject(shape: Shape) -> Subject:
    return RandomSubject(partial(random_model, shape), random_batch)


class RandomSubject(Subject):
    """A random model, whose weights have a seed of their own."""

    def build(self, seed: int = 0) -> nn.Module:
        return self.make()


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
        found = plan_for(model, units, piece_bytes=pieces)
        found = with_settings(found, micro_batches=micro_batches, updates=updates)
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
