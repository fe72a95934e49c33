"""Optimizers whose steps differ: the bytes of an SVD every few steps."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain_plan.commands.training import train
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.profiling.first_steps import first_steps
from protrain_runtime.contract.program.memory import promised_bytes
from protrain_runtime.contract.records.plan import STEPPED, Persistent, Recompute
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.memory_meter import MemoryMeter
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


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", f"{LOW_RANK}(every=1)"])
def test_a_first_step_that_only_makes_states_is_not_counted(optimizer: str) -> None:
    factory = optimizer_factory(optimizer)
    parameters = [torch.nn.Parameter(torch.zeros(192, 64)) for _ in range(2)]
    made = factory(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn(192, 64, generator=torch.Generator().manual_seed(0))
    made.step()
    with MemoryMeter() as meter:
        meter.mark("second step")
        made.step()
    taken = meter.segments[0].peak_bytes - meter.segments[0].start_bytes
    assert first_steps(UpdateRules(factory), SHAPES).workspace_bytes == taken


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
