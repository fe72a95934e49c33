"""Training on several ranks equals DistributedDataParallel on the same batches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.records.plan import (
    Buffer,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Schedule,
    StateTier,
    UnitPlan,
)
from protrain_runtime import prepare
from tests.ranks_cases import run_ranks
from tests.runtime_cases import (
    ADAMW,
    Factory,
    Outcome,
    batch,
    build,
    copied,
    decided,
    described,
    differences,
    plan_for,
)

STEPS = 5


def train(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    count: int,
    *,
    clip: bool = False,
) -> list[Tensor]:
    """Losses (and norms) of a plain training loop on this rank's batches."""
    torch.manual_seed(1 + rank)
    seen: list[Tensor] = []
    for number in range(STEPS):
        loss = loss_of(call_model(model, batch(name, number * count + rank)))
        loss.backward()
        seen.append(loss.detach())
        if clip:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).detach())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def ddp(name: str, rank: int, count: int, factory: Factory, *, clip: bool = False) -> Outcome:
    """What DistributedDataParallel computes."""
    model = DistributedDataParallel(build(name))
    optimizer = factory(list(model.parameters()))
    losses = train(name, model, optimizer, rank, count, clip=clip)
    module = model.module
    return Outcome(losses, copied(module.state_dict()), copied(optimizer.state_dict()))


def planned(
    name: str,
    plan: Plan,
    spill: Path,
    rank: int,
    count: int,
    factory: Factory,
    *,
    clip: bool = False,
) -> Outcome:
    # Rank 0's weights are everybody's, as with DistributedDataParallel.
    model = build(name, seed=0 if rank == 0 else 5)
    folder = spill / str(rank)
    folder.mkdir(exist_ok=True)
    model, optimizer = prepare(
        model, plan, optimizer=factory, spill_directory=folder, wait_limit_s=60
    )
    losses = train(name, model, optimizer, rank, count, clip=clip)
    return Outcome(losses, copied(model.state_dict()), copied(optimizer.state_dict()))


def found_differences(
    rank: int,
    count: int,
    name: str,
    plans: Sequence[Plan],
    spill: Path,
    factory: Factory,
    clip: bool,
) -> list[list[str]]:
    """By plan, where its training differs from DistributedDataParallel's in a bit."""
    expected = ddp(name, rank, count, factory, clip=clip)
    found: list[list[str]] = []
    for plan in plans:
        own = planned(name, plan, spill, rank, count, factory, clip=clip)
        found.append(
            [
                *differences(own.losses, expected.losses, "loss"),
                *differences(own.parameters, expected.parameters, "parameters"),
                *differences(own.optimizer, expected.optimizer, "optimizer"),
            ]
        )
    return found


def several(name: str, units: Sequence[UnitPlan], count: int, **options: Any) -> Plan:
    return replace(plan_for(build(name), units), num_devices=count, **options)


def alternating(name: str, *places: Placement, **schedule: Any) -> tuple[UnitPlan, ...]:
    """The placements in turn."""
    lead = {"forward_lead": 1, "backward_lead": 1, **schedule}
    return tuple(
        replace(unit, states=places[index % len(places)], schedule=Schedule(**lead))
        for index, unit in enumerate(described(name))
    )


TIERS: tuple[StateTier, ...] = ("device", "host", "disk")
PLACES: tuple[Placement, ...] = (
    Persistent(),
    *(Offload(tier=tier) for tier in TIERS),
    *(Buffer(tier=tier) for tier in TIERS),
)


def test_two_ranks_match_ddp_bitwise_in_every_placement(tmp_path: Path) -> None:
    name = "llama"
    plans = [several(name, decided(described(name), Keep(), place), 2) for place in PLACES]
    for found in run_ranks(found_differences, 2, tmp_path, name, plans, tmp_path, ADAMW, False):
        assert found == [[]] * len(PLACES)
