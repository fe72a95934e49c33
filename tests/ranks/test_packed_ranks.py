"""Adapters beside weights of 4 and 8 bits on two ranks: bytes are shared, scales are rank 0's."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_runtime import restore
from protrain_runtime.contract.records.plan import (
    PERSISTENT,
    RECOMPUTE,
    DeviceGroup,
    Placement,
    Plan,
)
from tests.support import quantized_models
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.ranks_loops import RanksRun, differing, in_ddp, played, resume, under_plan
from tests.support.runtime_cases import Subject, copied, decided, differences, plan_for
from tests.support.scenario import Loop, Run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, fused=True)
SUBJECT = Subject(
    lambda: quantized_models.mixed_factory()[0].to("cpu"),
    lambda number: quantized_models.batches()[number % 2],
)


def adapters(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def given(plan: Plan, _: nn.Module) -> Plan:
    return plan


def resumed_half_way(again: Callable[..., RanksRun], folder: Path, run: Run, step: int) -> None:
    if step == 2:
        resume(run, partial(again, seed=7), "files into another plan", folder)


def compared(rank: int, count: int, plans: Sequence[Plan], folder: Path) -> list[list[str]]:
    """By plan, where its training differs from DistributedDataParallel's."""
    plain = in_ddp(SUBJECT, rank, count, ADAMW, groups=adapters)
    expected = played(plain, Loop(num_steps=4))
    found: list[list[str]] = []
    spill = folder / str(rank)
    spill.mkdir(exist_ok=True)
    for plan in plans:
        made = partial(under_plan, SUBJECT, rank, count, partial(given, plan), folder=spill)
        again = partial(made, groups=adapters, optimizer=ADAMW)
        resumed = partial(resumed_half_way, again, folder) if plan is plans[-1] else None
        run = again()
        outcome = played(run, Loop(num_steps=4, before=resumed))
        restore(run.model)
        restored = differences(copied(run.model.state_dict()), expected.parameters, "restored")
        found.append([*differing(outcome, expected, 0), *restored])
    return found


def test_two_ranks_match_ddp_bitwise(tmp_path: Path) -> None:
    units = SUBJECT.units()
    places = (Placement(tier="device"), PERSISTENT, Placement(tier="host"), Placement(tier="disk"))
    in_turn = tuple(
        replace(unit, states=places[number % len(places)]) for number, unit in enumerate(units)
    )
    plans = [
        with_settings(plan_for(SUBJECT.build(), units), group=DeviceGroup(num_devices=2))
        for units in (decided(units, RECOMPUTE, Placement(tier="device")), in_turn)
    ]
    for found in run_ranks(compared, 2, tmp_path, plans, tmp_path):
        assert found == [[]] * len(plans)
