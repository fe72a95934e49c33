"""What a plan is said to write to disk, against what its steps hand to the file."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.sources import load_source
from protrain_plan.simulation.wear import wear
from protrain_runtime import prepare
from protrain_runtime.contract.records import read_profile
from protrain_runtime.contract.records.plan import Keep, Offload, Persistent, Plan, Swap, Updates
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.stores import DiskStore
from tests.support.peaks import PIECE_BYTES, profile_file
from tests.support.runtime_cases import ADAMW, decided, described_by, mixed, plan_of


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return read_profile(profile_file(tmp_path_factory, "tiny-llama"))


def with_a_disk(plan: Plan) -> Plan:
    """The plan as if it had been planned: with bytes on disk, and a step of two seconds."""
    peaks = replace(plan.prediction.peak_bytes, disk=1)
    return replace(plan, prediction=replace(plan.prediction, peak_bytes=peaks, step_seconds=2.0))


def written_in_a_step(plan: Plan, spill: Path) -> int:
    """Bytes that the third step writes: the first ones make the optimizer's states."""
    source, written = load_source(plan.workload.model), 0
    model, optimizer = prepare(source.build(), plan, optimizer=ADAMW, spill_directory=spill)
    inputs = next(source.batches(batch_size=4, seq_len=64))
    usual = DiskStore._write

    def counting(store: DiskStore, offset: int, data: torch.Tensor) -> None:
        nonlocal written
        written += data.numel()
        usual(store, offset, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "_write", counting)
        for _ in range(3):
            written = 0
            for _ in range(plan.settings.micro_batches):
                loss_of(call_model(model, inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return written


CASES: list[tuple[int | None, Updates, int]] = [
    (None, "in backward", 1),
    (None, "after backward", 1),
    (None, "in backward", 3),
    (7, "in backward", 1),
    (8, "after backward", 2),
]
"""Everything on disk, or mixed decisions by a seed; when updates come; micro-batches."""


@pytest.mark.parametrize(("seed", "updates", "micro_batches"), CASES)
def test_a_step_writes_what_is_said(
    seed: int | None, updates: Updates, micro_batches: int, profile: Profile, tmp_path: Path
) -> None:
    units = described_by(profile)
    if seed is None:
        units = decided(units, Swap(tier="disk"), Offload(tier="disk"))
    else:
        alone = updates == "in backward" and micro_batches == 1
        units = mixed(units, random.Random(seed), "disk", stepped=alone)
    plan = plan_of(
        units,
        fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        piece_bytes=PIECE_BYTES,
    )
    plan = with_a_disk(
        replace(plan, settings=replace(plan.settings, updates=updates, micro_batches=micro_batches))
    )
    said = wear(plan, profile)
    assert said is not None
    assert said.step_bytes == written_in_a_step(plan, tmp_path)
    assert said.day_bytes == said.step_bytes * 43_200


def test_what_stays_in_memory_wears_nothing(profile: Profile) -> None:
    units = decided(described_by(profile), Keep(), Offload(tier="disk"))
    plan = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    none = replace(plan.prediction.peak_bytes, disk=0)
    assert (
        wear(replace(plan, prediction=replace(plan.prediction, peak_bytes=none)), profile) is None
    )


def test_what_is_on_a_disk_and_not_written_wears_nothing(profile: Profile) -> None:
    units = decided(described_by(profile), Keep(), Persistent())
    plan = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    assert wear(with_a_disk(plan), profile) is None
