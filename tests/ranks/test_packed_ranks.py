"""Adapters beside weights of 4 and 8 bits on two ranks: bytes are shared, scales are rank 0's."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
from tests.support.ranks_loops import compared_and_resumed
from tests.support.runtime_cases import Subject, decided, plan_for

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


def compared(rank: int, count: int, plans: Sequence[Plan], folder: Path) -> list[list[str]]:
    return compared_and_resumed(SUBJECT, adapters, ADAMW, rank, count, plans, folder)


@pytest.mark.nightly  # by day packed weights on one device, and other weights among ranks
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
