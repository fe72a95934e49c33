"""Adapters beside weights of 4 and 8 bits on two ranks: bytes are shared, scales are rank 0's."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_runtime import load, prepare, restore, save
from protrain_runtime.contract.records.plan import DeviceGroup, Offload, Persistent, Plan, Recompute
from tests.support import quantized_models
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.runtime_cases import copied, decided, differences, plan_for, units_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
STEPS = 4


def built(seed: int) -> nn.Module:
    with seeded(seed):
        return quantized_models.mixed_factory()[0].to("cpu").train()


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, first: int = 0
) -> list[float]:
    """Losses of the rank's batches: each has its own."""
    batch = quantized_models.batches()[rank]
    losses: list[float] = []
    for _ in range(first, STEPS):
        loss = loss_of(call_model(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(rank: int, count: int, plans: Sequence[Plan], folder: Path) -> list[list[str]]:
    """By plan, where its training differs from DistributedDataParallel's."""
    plain = DistributedDataParallel(built(seed=0))
    losses = trained(plain, ADAMW([p for p in plain.parameters() if p.requires_grad]), rank)
    expected = copied(plain.module.state_dict())
    found: list[list[str]] = []
    spill = folder / str(rank)
    spill.mkdir(exist_ok=True)
    for number, plan in enumerate(plans):
        # Another base on the other rank: all of them are to have the first one's.
        model, optimizer = prepare(
            built(seed=5 * rank), plan, optimizer=ADAMW, spill_directory=spill, wait_limit_s=60
        )
        if number == len(plans) - 1:  # the last one from a checkpoint, half way
            half = trained(model, optimizer, rank, first=STEPS // 2)
            save(model, optimizer, folder / "saved")
            restore(model)
            model, optimizer = prepare(
                built(seed=7), plan, optimizer=ADAMW, spill_directory=spill, wait_limit_s=60
            )
            load(model, optimizer, folder / "saved")
            own = half + trained(model, optimizer, rank, first=STEPS // 2)
        else:
            own = trained(model, optimizer, rank)
        differing = list(differences(own, losses, "losses"))
        differing += differences(copied(model.state_dict()), expected, "state")
        restore(model)
        differing += differences(copied(model.state_dict()), expected, "restored")
        found.append(differing)
    return found


def test_two_ranks_match_ddp_bitwise(tmp_path: Path) -> None:
    model = built(seed=0)
    units = units_of(model, quantized_models.batches()[0])
    places = (Offload(tier="device"), Persistent(), Offload(tier="host"), Offload(tier="disk"))
    in_turn = tuple(
        replace(unit, states=places[number % len(places)]) for number, unit in enumerate(units)
    )
    plans = [
        with_settings(plan_for(model, decisions), group=DeviceGroup(num_devices=2))
        for decisions in (decided(units, Recompute(), Offload(tier="device")), in_turn)
    ]
    for found in run_ranks(compared, 2, tmp_path, plans, tmp_path):
        assert found == [[]] * len(plans)
