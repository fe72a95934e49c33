"""Optimizers whose steps differ: an SVD every few steps, in seconds and in bytes."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain_plan.commands.training import train
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import plan as solve
from protrain_plan.profiling.first_steps import first_steps
from protrain_runtime.contract.program.memory import promised_bytes
from protrain_runtime.contract.records import dumps_profile, loads_profile
from protrain_runtime.contract.records.plan import STEPPED, Budgets, Persistent, Recompute
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.peaks import SLACK_BYTES, bytes_of_others
from tests.support.runtime_cases import (
    decided,
    described_by,
    plan_of,
    profiled_here,
)

LOW_RANK = "tests.support.low_rank:LowRank"
SHAPES = Counter({(torch.float32, torch.Size([n, 64])): n // 96 for n in (96, 192)})


@pytest.mark.parametrize("every", [2, 5, 200])
def test_how_often_a_slow_step_comes_is_seen_without_being_told(every: int) -> None:
    seen = first_steps(UpdateRules(optimizer_factory(f"{LOW_RANK}(every={every})")), SHAPES)
    assert seen.every == every
    assert seen.more_s == 0  # no device was there to time it


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon", f"{LOW_RANK}(every=1)"])
def test_steps_that_only_make_states_at_first_are_alike(optimizer: str) -> None:
    seen = first_steps(
        UpdateRules(optimizer_factory(optimizer)), SHAPES, device=torch.device("cpu")
    )
    assert (seen.more_s, seen.every) == (0, 0)


EVERY, NUM_STEPS = 3, 4
"""The last step, which is measured, is a slow one; of two steps it is a usual one."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    others = bytes_of_others()  # are what a script's data would be
    name = f"{LOW_RANK}(every={EVERY},times=8)"
    found = profiled_here("tiny-llama", tmp_path_factory.mktemp("spill"), optimizer=name)
    return replace(found, base_bytes=found.base_bytes - others)


@pytest.mark.parametrize("states", [Persistent(), STEPPED], ids=["after", "in backward"])
def test_slow_steps_train_as_plain_torch_within_what_was_predicted(
    profile: Profile, states: Persistent, tmp_path: Path
) -> None:
    units = decided(described_by(profile), Recompute(), states)
    made = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    plan = replace(made, optimizer=profile.optimizer.name)
    most = promised_bytes(plan, profile)
    above = []
    for num_steps in (NUM_STEPS, 2):
        others = bytes_of_others()
        run = train(plan, num_steps=num_steps, plain=False, text=None, spill_directory=tmp_path)
        slots = [size - others for size in run.slot_bytes]
        assert all(size <= bound for size, bound in zip(slots, most, strict=True))
        above.append([bound - size for size, bound in zip(slots, most, strict=True)])
        plainly = train(
            plan, num_steps=num_steps, plain=True, text=None, spill_directory=None, measured=False
        )
        assert (run.losses, run.parameters_sha256) == (plainly.losses, plainly.parameters_sha256)
    # Exact but where the optimizer steps: a usual step takes less of what a slow one may take.
    slow, usual = above
    workspace = profile.optimizer.workspace_bytes
    assert min(slow) <= SLACK_BYTES
    assert max(slow) <= workspace
    assert max(b - a for a, b in zip(slow, usual, strict=True)) > workspace / 4


def test_a_plan_says_how_long_a_slow_step_takes(profile: Profile) -> None:
    """By the time that its update takes more, in proportion to what persists."""
    cost = profile.optimizer
    assert cost.slow_every == EVERY
    assert 0 < cost.slow_parameters_per_s < cost.device_parameters_per_s
    assert loads_profile(dumps_profile(profile)) == profile
    solved = solve(profile, Budgets(device=2**33, host=2**33, disk=2**33))
    assert isinstance(solved, Solved)
    prediction = solved.plan.prediction
    alike = replace(cost, slow_parameters_per_s=0.0, slow_every=0)
    other = solve(replace(profile, optimizer=alike), solved.plan.budgets)
    assert isinstance(other, Solved)
    assert other.plan.prediction.slow_step_seconds == 0
    assert other.plan.prediction.step_seconds == prediction.step_seconds
    assert prediction.slow_every == EVERY
    trained = sum(unit.num_parameters for unit in profile.units)
    more = trained / cost.slow_parameters_per_s - trained / cost.device_parameters_per_s
    found = prediction.slow_step_seconds - prediction.step_seconds
    assert found == pytest.approx(more, rel=1e-6)
