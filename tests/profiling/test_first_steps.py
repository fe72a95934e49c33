"""Optimizers whose steps differ: an SVD every few steps, in seconds and in bytes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain_plan.commands.training import train
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import plan as solve
from protrain_plan.profiling.first_steps import first_steps
from protrain_plan.records import dumps_profile, loads_profile
from protrain_plan.records.plan import STEPPED, Budgets, Persistent, Recompute
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import promised_bytes
from tests.support.peaks import SLACK_BYTES, bytes_of_others
from tests.support.runtime_cases import (
    decided,
    described_by,
    plan_of,
    profiled_here,
    step_seconds_of,
)

LOW_RANK = "tests.support.low_rank:LowRank"
SHAPES = Counter({(torch.float32, torch.Size([n, 64])): n // 96 for n in (96, 192)})


@pytest.mark.parametrize("every", [2, 5, 200])
def test_how_often_a_slow_step_comes_is_seen_without_being_told(every: int) -> None:
    seen = first_steps(f"{LOW_RANK}(every={every})", SHAPES, precision="pure")
    assert seen.every == every
    assert seen.more_s == 0  # no device was there to time it


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon", f"{LOW_RANK}(every=1)"])
def test_steps_that_only_make_states_at_first_are_alike(optimizer: str) -> None:
    seen = first_steps(optimizer, SHAPES, precision="pure", device=torch.device("cpu"))
    assert (seen.more_s, seen.every) == (0, 0)
