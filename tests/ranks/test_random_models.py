"""Random models on two ranks under random plans: bits of averaged gradients, and bytes."""

import random
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

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_runtime import prepare
from protrain_runtime.contract.program.memory import promised_bytes
from protrain_runtime.contract.records.plan import PERSISTENT, DeviceGroup, Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.diagnostics.recording import measure_step
from tests.support.fuzzed_modules import fuzzed, source
from tests.support.judging import is_refusal, profiled
from tests.support.peaks import bytes_of_others, without_freedom
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import end_ranks
from tests.support.runtime_cases import (
    copied,
    described_by,
    differences,
    mixed,
    open_to,
    plan_of,
)

STEPS = 4
"""The last one is measured."""
REFUSED = "refused"


def _plan(profile: Profile, seed: int) -> Plan:
    rng = random.Random(seed)
    updates, micro_batches = rng.choice(("in backward", "after backward")), rng.choice((1, 2))
    drawn = mixed(described_by(profile), rng, "host", "disk", stepped=False)
    units = zip(open_to(profile, without_freedom(drawn)), profile.units, strict=True)
    made = plan_of(
        [
            replace(plan, states=PERSISTENT if unit.stays else replace(plan.states, on_disk=0))
            for plan, unit in units
        ],
        fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        piece_bytes=1 << 15,
    )
    return with_settings(
        made, updates=updates, micro_batches=micro_batches, group=DeviceGroup(num_devices=2)
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
