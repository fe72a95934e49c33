"""Predicted bytes of every rank against measured ones, slot by slot."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import protrain_runtime
from protrain_plan.commands.training import train
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_runtime.contract.errors import OutOfMemoryError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import gap_bytes, promised_bytes, slot_name
from protrain_runtime.contract.records import read_profile
from protrain_runtime.contract.records.plan import (
    DeviceGroup,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.diagnostics.out_of_memory import explain_memory
from protrain_runtime.model.prepared import engine_of
from tests.support.peaks import assert_disk_within, bytes_of_others, profile_file
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.runtime_cases import (
    activation_decisions,
    decided,
    described_by,
    plan_of,
    random_schedule,
)

PIECE_BYTES = 1 << 15
SLACK_BYTES = 4096  # as on one device
NUM_STEPS = 3  # the last one is measured


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return read_profile(profile_file(tmp_path_factory, "tiny-llama"))


def measured(rank: int, _: int, plans: Sequence[Plan], spill: Path) -> list[tuple[list[int], int]]:
    """By plan, the bytes on the device in every slot, and on disk."""
    found: list[tuple[list[int], int]] = []
    for plan in plans:
        others = bytes_of_others()
        run = train(
            plan, num_steps=NUM_STEPS, plain=False, text=None, spill_directory=spill, rank=rank
        )
        assert run.measured_peak_bytes is not None
        slots = [size - others for size in run.slot_bytes]
        found.append((slots, run.measured_peak_bytes.disk))
    return found


def assert_within_the_promise(
    profile: Profile,
    cases: Sequence[tuple[UnitPlan, ...]],
    folder: Path,
    *,
    count: int = 2,
    num_replicas: int = 1,
    updates: Updates = "in backward",
    micro_batches: int = 1,
    every_slot: bool = True,
    peaks: bool = True,
) -> None:
    """No slot takes more than predicted; `peaks` and slots take as much, where that is asked.

    As much but for gaps between parameters, of which there are `gap_bytes` at most.
    """
    slack = SLACK_BYTES + gap_bytes(profile.tensors)
    plans = [
        with_settings(
            plan_of(
                units,
                fingerprint=profile.model_fingerprint,
                workload=profile.workload,
                piece_bytes=PIECE_BYTES,
            ),
            updates=updates,
            micro_batches=micro_batches,
            group=DeviceGroup(num_devices=count, num_replicas=num_replicas),
        )
        for units in cases
    ]
    for by_plan in run_ranks(measured, count, folder, plans, folder):
        for plan, (slots, disk) in zip(plans, by_plan, strict=True):
            units = plan.units
            predicted = promised_bytes(plan, profile)
            pairs = list(zip(predicted, slots, strict=True))
            over = [(n, have - most) for n, (most, have) in enumerate(pairs) if have > most]
            assert over == [], [unit.states for unit in units]
            if peaks:
                assert max(predicted) - max(slots) <= slack
            if every_slot:
                loose = [(n, most - have) for n, (most, have) in enumerate(pairs)]
                # An embedding's backward takes little besides what is copied when it has ended.
                ends = 2 * len(units) - 1
                loose = [(n, a) for n, a in loose if n != ends and a > slack]
                assert loose == [], [unit.states for unit in units]
            promised = program_of(plan, profile).tier_bytes("disk")
            assert_disk_within(promised, disk, num_slots=len(slots))


def explained(rank: int, _: int, plan: Plan, profile: Profile) -> str:
    """What is said where a rank asks for more than any machine has, in a backward."""
    workload = plan.workload
    source = load_source(workload.model, model_config=workload.model_config)
    model = source.build(dtype="float32", seed=0)
    batches = source.batches(
        batch_size=workload.batch_size, seq_len=workload.seq_len, dtype="float32", seed=rank
    )
    model, _optimizer = protrain_runtime.prepare(model, plan, optimizer=optimizer_factory("adamw"))
    loss = loss_of(call_model(model, next(batches)))

    def ask(what: str) -> None:
        if what == f"slot {len(plan.units) + 1}":
            torch.empty(1 << 50)

    engine = engine_of(model)
    assert engine is not None
    engine.observer = ask
    try:
        with explain_memory(model, lambda: profile):
            loss.backward()
    except OutOfMemoryError as error:
        return str(error)
    return ""


def test_memory_that_runs_out_on_a_rank_is_explained(profile: Profile, tmp_path: Path) -> None:
    units = decided(described_by(profile), Keep(), Offload(tier="device"))
    made = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    plan = replace(made, settings=replace(made.settings, group=replace(made.group, num_devices=2)))
    planned = promised_bytes(plan, profile)[len(units) + 1]
    for said in run_ranks(explained, 2, tmp_path, plan, profile):
        assert said.startswith(f"out of memory in {slot_name(plan, len(units) + 1)}: ")
        besides = plan.prediction.peak_bytes.context + plan.prediction.peak_bytes.host
        assert re.search(rf"in all +{re.escape(format_bytes(planned + besides))} +", said)


PLACES: tuple[Placement, ...] = (
    Persistent(),
    Offload(tier="device"),
    Offload(tier="device", keep_gathered=True),
    Offload(tier="disk"),
    Offload(tier="disk", keep_gathered=True),
)


def without_freedom(units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    """The units with every byte gone before the next slot: what stands depends on no clock."""
    return tuple(
        replace(unit, schedule=replace(unit.schedule, swap_drain=0, update_drain=0))
        for unit in units
    )


def test_measured_bytes_of_two_ranks_match_predicted_in_every_slot(
    profile: Profile, tmp_path: Path
) -> None:
    """The other placements are those of the four ranks below."""
    units = described_by(profile)
    cases = [without_freedom(decided(units, Keep(), place)) for place in PLACES[:4:3]]
    assert_within_the_promise(profile, cases, tmp_path)


@pytest.mark.slow
def test_measured_peaks_of_four_ranks_match_predicted(profile: Profile, tmp_path: Path) -> None:
    units = described_by(profile)
    cases = [without_freedom(decided(units, Keep(), place)) for place in PLACES]
    assert_within_the_promise(profile, cases, tmp_path, count=4, num_replicas=2)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_measured_bytes_of_a_tied_model_never_exceed_predicted(
    micro_batches: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Its gradient grows from the head's backward to the embedding's, beside what is added up.

    The bound counts more than stands at once: some 100 KB of 21 MB here.
    """
    profile = read_profile(profile_file(tmp_path_factory, "tiny-gpt2"))
    assert len(profile.units[0].used_by) == 2
    cases = [without_freedom(decided(described_by(profile), Keep(), place)) for place in PLACES]
    assert_within_the_promise(
        profile, cases, tmp_path, micro_batches=micro_batches, every_slot=False, peaks=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("updates", ["in backward", "after backward"])
def test_measured_peaks_with_micro_batches_match_predicted(
    profile: Profile, updates: Updates, tmp_path: Path
) -> None:
    """Three: between the first and the last one, the gradients of all parameters stand whole."""
    units = described_by(profile)
    cases = [without_freedom(decided(units, Keep(), place)) for place in PLACES]
    assert_within_the_promise(
        profile, cases, tmp_path, updates=updates, micro_batches=3, every_slot=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("updates", "micro_batches"), [("after backward", 1), ("in backward", 2), ("in backward", 1)]
)
def test_measured_bytes_of_two_ranks_never_exceed_predicted(
    profile: Profile, updates: Updates, micro_batches: int, tmp_path: Path
) -> None:
    """Decisions and drains at random: the promise is for the slowest lanes."""
    cases = [decided(described_by(profile), Recompute(), PLACES[1])]
    for seed in range(2):
        rng = random.Random(seed)
        cases.append(
            tuple(
                replace(
                    unit,
                    activations=rng.choice(activation_decisions("disk"))
                    if unit.kind == "block"
                    else Keep(),
                    states=rng.choice(PLACES),
                    schedule=random_schedule(rng),
                )
                for unit in described_by(profile)
            )
        )
    assert_within_the_promise(
        profile,
        cases,
        tmp_path,
        updates=updates,
        micro_batches=micro_batches,
        every_slot=False,
        peaks=False,
    )


def test_gaps_between_parameters_are_counted() -> None:
    lines = (
        "model.layers.0-29.norm.weight 100 float32 trainable",  # 400 bytes: 112 to the next 256
        "model.embed.weight 64x64 bfloat16 trainable",
        "model.layers.0-3.bias 3 bfloat16 frozen",  # 6 bytes: 250
        "model.inv_freq 5 float32 buffer",
    )
    assert gap_bytes(lines) == 3 * (30 * 112 + 4 * 250) + 16 * (30 + 1 + 4)
