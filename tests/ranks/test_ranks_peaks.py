"""Predicted bytes of every rank against measured ones, slot by slot."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import protrain_runtime
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_runtime import prepare
from protrain_runtime.contract.errors import OutOfMemoryError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import gap_bytes, promised_bytes, slot_name
from protrain_runtime.contract.records import read_profile
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    DeviceGroup,
    Placement,
    Plan,
    Reductions,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.diagnostics.out_of_memory import explain_memory
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.model.prepared import engine_of
from tests.support.estimates import batches_of, model_of
from tests.support.fuzzed_modules import fuzzed, source
from tests.support.judging import is_refusal, profiled
from tests.support.peaks import (
    SLACK_BYTES,
    assert_disk_within,
    bytes_of_others,
    profile_file,
    without_freedom,
)
from tests.support.ranks_cases import end_ranks, run_ranks
from tests.support.runtime_cases import (
    activation_decisions,
    copied,
    decided,
    described_by,
    differences,
    mixed,
    open_to,
    plan_for_profile,
    random_schedule,
)
from tests.support.trained import train

PIECE_BYTES = 1 << 15
NUM_STEPS = 3  # the last one is measured


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return read_profile(profile_file(tmp_path_factory, "tiny-llama"))


def measured(rank: int, _: int, plans: Sequence[Plan], spill: Path) -> list[tuple[list[int], int]]:
    found: list[tuple[list[int], int]] = []
    for plan in plans:
        others = bytes_of_others()
        run = train(plan, num_steps=NUM_STEPS, plain=False, spill_directory=spill, rank=rank)
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
    reductions: Reductions = "in the last micro-batch",
    every_slot: bool = True,
    peaks: bool = True,
) -> None:
    """No slot takes more than predicted; `peaks` and slots take as much, where that is asked.

    As much but for gaps between parameters, of which there are `gap_bytes` at most.
    """
    slack = SLACK_BYTES + gap_bytes(profile.tensors)
    plans = [
        plan_for_profile(
            profile,
            units,
            piece_bytes=PIECE_BYTES,
            updates=updates,
            micro_batches=micro_batches,
            reductions=reductions,
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
    """The message where a rank asks for more than any machine has, in a backward."""
    workload = plan.workload
    source = load_source(workload.model, model_config=workload.model_config)
    model = model_of(source, dtype="float32", seed=0)
    batches = batches_of(
        source, batch_size=workload.batch_size, seq_len=workload.seq_len, dtype="float32", seed=rank
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


@pytest.mark.nightly  # by day on one device, in `test_limits`
def test_memory_that_runs_out_on_a_rank_is_explained(profile: Profile, tmp_path: Path) -> None:
    units = decided(described_by(profile), KEEP, Placement(tier="device"))
    plan = plan_for_profile(profile, units, num_devices=2)
    planned = promised_bytes(plan, profile)[len(units) + 1]
    for said in run_ranks(explained, 2, tmp_path, plan, profile):
        assert said.startswith(f"out of memory in {slot_name(plan, len(units) + 1)}: ")
        besides = plan.prediction.peak_bytes.context + plan.prediction.peak_bytes.host
        assert re.search(rf"in all +{re.escape(format_bytes(planned + besides))} +", said)


PLACES: tuple[Placement, ...] = (
    PERSISTENT,
    Placement(tier="device"),
    Placement(tier="device", keep_gathered=True),
    Placement(tier="disk"),
    Placement(tier="disk", keep_gathered=True),
)


def placed(units: tuple[UnitPlan, ...]) -> list[tuple[UnitPlan, ...]]:
    return [without_freedom(decided(units, KEEP, place)) for place in PLACES]


def at_random(units: tuple[UnitPlan, ...]) -> list[tuple[UnitPlan, ...]]:
    """Decisions and drains at random: the promise is for the slowest lanes."""
    found = [decided(units, RECOMPUTE, PLACES[1])]
    for seed in range(2):
        rng = random.Random(seed)
        found.append(
            tuple(
                replace(
                    unit,
                    activations=rng.choice(activation_decisions("disk"))
                    if unit.kind == "block"
                    else KEEP,
                    states=rng.choice(PLACES),
                    schedule=random_schedule(rng),
                )
                for unit in units
            )
        )
    return found


LATE: Updates = "after backward"
PEAKS: dict[str, Any] = {"every_slot": False}
BOUNDS: dict[str, Any] = {"every_slot": False, "peaks": False}
SHARDS: dict[str, Any] = {"reductions": "in every micro-batch"}
CASES: dict[str, tuple[str, Callable[..., list[tuple[UnitPlan, ...]]], dict[str, Any]]] = {
    # The other placements are those of the four ranks.
    "two ranks": ("tiny-llama", lambda units: placed(units)[:4:3], {}),
    "four ranks": ("tiny-llama", placed, {"count": 4, "num_replicas": 2}),
    # Its gradient grows from the head's backward to the embedding's, beside what is added up: the
    # bound counts more than stands at once, some 100 KB of 21 MB here.
    "tied": ("tiny-gpt2", placed, BOUNDS),
    "tied, 3": ("tiny-gpt2", placed, {"micro_batches": 3, **BOUNDS}),
    # Between the first and the last one, the gradients of all parameters stand whole.
    "three": ("tiny-llama", placed, {"micro_batches": 3, **PEAKS}),
    "three, late": ("tiny-llama", placed, {"micro_batches": 3, "updates": LATE, **PEAKS}),
    # So does a shard of them, and the gradients of one chunk while they are reduced.
    "three, in shards": ("tiny-llama", placed, {"micro_batches": 3, **SHARDS, **PEAKS}),
    "two, in shards": (
        "tiny-llama",
        lambda n: placed(n)[1:4:2],
        {"micro_batches": 2, **SHARDS, **PEAKS},
    ),
    "tied, in shards": ("tiny-gpt2", placed, {"micro_batches": 2, **SHARDS, **BOUNDS}),
    "late, in shards": (
        "tiny-llama",
        placed,
        {"micro_batches": 3, "updates": LATE, **SHARDS, **PEAKS},
    ),
    "at random, in shards": ("tiny-llama", at_random, {"micro_batches": 2, **SHARDS, **BOUNDS}),
    "at random": ("tiny-llama", at_random, BOUNDS),
    "at random, 2": ("tiny-llama", at_random, {"micro_batches": 2, **BOUNDS}),
    "at random, late": ("tiny-llama", at_random, {"updates": LATE, **BOUNDS}),
}


@pytest.mark.nightly("two ranks", "two, in shards")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("two ranks", "two, in shards") else pytest.mark.slow)
        for n in CASES
    ],
)
def test_measured_bytes_of_ranks_are_those_predicted(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    model, decide, options = CASES[name]
    profile = read_profile(profile_file(tmp_path_factory, model))
    assert_within_the_promise(profile, decide(described_by(profile)), tmp_path, **options)


def test_gaps_between_parameters_are_counted() -> None:
    lines = (
        "model.layers.0-29.norm.weight 100 float32 trainable",  # 400 bytes: 112 to the next 256
        "model.embed.weight 64x64 bfloat16 trainable",
        "model.layers.0-3.bias 3 bfloat16 frozen",  # 6 bytes: 250
        "model.inv_freq 5 float32 buffer",
    )
    assert gap_bytes(lines) == 3 * (30 * 112 + 4 * 250) + 16 * (30 + 1 + 4)


# --- random models under random plans: bits of averaged gradients, and bytes ----------------------


STEPS = 4
"""The last one is measured."""
REFUSED = "refused"


def _plan(profile: Profile, seed: int) -> Plan:
    rng = random.Random(seed)
    updates, micro_batches = rng.choice(("in backward", "after backward")), rng.choice((1, 2))
    drawn = mixed(described_by(profile), rng, "host", "disk", stepped=False)
    units = zip(open_to(profile, without_freedom(drawn)), profile.units, strict=True)
    return plan_for_profile(
        profile,
        [
            replace(plan, states=PERSISTENT if unit.stays else replace(plan.states, on_disk=0))
            for plan, unit in units
        ],
        piece_bytes=1 << 15,
        updates=updates,
        micro_batches=micro_batches,
        num_devices=2,
    )


def _average(model: nn.Module) -> None:
    """Average gradients over the ranks: of a parameter that has one anywhere, on all."""
    for parameter in (p for p in model.parameters() if p.requires_grad):
        count = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(count)
        if count > 0:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = (own.to_dense() if own.is_sparse else own) / 2
            dist.all_reduce(parameter.grad)


def _trained(rank: int, seed: int, plan: Plan, folder: Path | None) -> tuple[Any, tuple[int, ...]]:
    """Losses, parameters and the optimizer's states, by a plan in a folder or without one."""
    subject = fuzzed(seed)
    factory = subject.factory or optimizer_factory(subject.optimizer)
    model, others = subject.build(), bytes_of_others()
    optimizer: torch.optim.Optimizer
    if folder is not None:
        model, optimizer = prepare(model, plan, optimizer=factory, spill_directory=folder)
    else:
        optimizer = factory(p for p in model.parameters() if p.requires_grad)
    for seeds in (torch.manual_seed, random.seed, np.random.seed):
        seeds(1 + rank)
    losses: list[float] = []
    slot_bytes: tuple[int, ...] = ()
    count = plan.settings.micro_batches

    def step(number: int, observe: Any) -> None:
        for micro in range(count):
            if folder is None and micro == 0:
                for buffer in model.buffers():
                    dist.broadcast(buffer, 0)
            batch = subject.batch(2 * (number * count + micro) + rank)
            loss = loss_of(call_model(model, batch))
            (loss / count).backward()
            losses.append(loss.item())
            del loss
        if folder is None:
            _average(model)
        if observe is not None:
            observe("update")
        optimizer.step()
        optimizer.zero_grad()

    for number in range(STEPS):
        if folder is not None and number == STEPS - 1:
            slot_bytes = measure_step(model, partial(step, number), besides_bytes=others).slot_bytes
        else:
            step(number, None)
    return [losses, *map(copied, (model.state_dict(), optimizer.state_dict()))], slot_bytes


def _wrong(rank: int, _: int, seed: int, plan: Plan, promised: tuple[int, ...]) -> list[str]:
    expected, _none = _trained(rank, seed, plan, None)
    with TemporaryDirectory() as folder:
        try:
            found, slot_bytes = _trained(rank, seed, plan, Path(folder))
        except Exception as error:
            if is_refusal(error):
                return [REFUSED]
            raise
    slots = enumerate(zip(slot_bytes, promised, strict=True))
    above = [
        f"slot {slot}: {seen - said} bytes above" for slot, (seen, said) in slots if seen > said
    ]
    return [*differences(found, expected, "training"), *above]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_ranks_train_as_averaged_gradients_do_or_are_refused(seed: int, tmp_path: Path) -> None:
    subject = fuzzed(seed)
    try:
        loss_of(call_model(subject.build(), subject.batch(0))).backward()
    except RuntimeError:
        return  # plain PyTorch does not train this module
    try:
        profile = profiled(subject, tmp_path)
    except Exception as error:
        if not is_refusal(error):
            raise
        return
    for draw in range(3):
        plan = _plan(profile, 100 * seed + draw)
        ended = end_ranks(_wrong, 2, tmp_path, seed, plan, promised_bytes(plan, profile))
        if all(end.result != [REFUSED] for end in ended):  # else the other one may lose its peer
            assert [(end.error, end.result) for end in ended] == [("", [])] * 2, source(seed)
