"""Models that hold more than autograd saves, profiled and trained under four plans."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.profiling.memory.block_classes import equal_blocks, filled, stubs_in_place
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover, undisturbed
from protrain_plan.profiling.structure.rerun import run_once
from protrain_runtime import prepare, restore
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Persistent,
    Recompute,
    Swap,
    SwapInput,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import OptimizerCost, Profile, Workload
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer
from protrain_runtime.model.prepared import below_device
from tests.support import held_models
from tests.support.held_models import (
    Stack,
    batch,
    made,
)
from tests.support.peaks import bytes_of_others
from tests.support.programs import compile_units
from tests.support.runtime_cases import (
    ADAMW,
    decided,
    described_by,
    differences,
    mixed,
    outcome,
    plan_of,
)

NUM_STEPS = 3
PIECE_BYTES = 1 << 16


def profiled(kind: type[nn.Module]) -> Profile:
    """Its bytes, counted as a measured profile counts them; seconds do not matter here."""
    model, first = made(kind), batch(0)
    with undisturbed(model):
        found = discover(model, first)
        once = run_once(model, found, first)
        block_classes = equal_blocks(model, found, first, alone=once)
        with stubs_in_place(found, block_classes):
            structure = analyze_units(model, first, found, once=once)
            counted = measure_bytes(model, first, structure, MemoryMeter)
    return Profile(
        workload=Workload(
            model=kind.__name__,
            model_config="",
            batch_size=held_models.BATCH,
            seq_len=held_models.SEQUENCE,
            dtype="float32",
            device="cpu",
            seed=0,
        ),
        hardware=load_hardware("cpu"),
        method="measured",
        model_fingerprint=model_fingerprint(model),
        optimizer=OptimizerCost(
            name="adamw",
            host_parameters_per_s=1e8,
            device_parameters_per_s=1e8,
            workspace_fraction=0.0,
        ),
        base_bytes=structure.base_bytes + counted.left_bytes,
        units=tuple(filled(counted.units, block_classes)),
    )


def takable(units: Sequence[UnitPlan], profile: Profile) -> tuple[UnitPlan, ...]:
    """The units, with `keep` where the profile says that a block cannot do as decided.

    What leaves has left before the next slot, so that what stands depends on no clock.
    """
    plans: list[UnitPlan] = []
    for plan, unit in zip(units, profile.units, strict=True):
        form = getattr(plan.activations, "form", "keep")
        costs = [cost for cost in unit.forms if cost.form == form]
        swaps = isinstance(plan.activations, Swap | SwapInput)
        can = costs and not (swaps and not costs[0].swappable_bytes)
        activations = plan.activations if can or unit.kind == "part" else Keep()
        schedule = replace(plan.schedule, swap_drain=0, update_drain=0)
        plans.append(replace(plan, activations=activations, schedule=schedule))
    return tuple(plans)


def four_plans(profile: Profile) -> Iterator[tuple[UnitPlan, ...]]:
    units, disk = described_by(profile), Offload(tier="disk")
    yield decided(units, Keep(), Persistent())
    yield decided(units, Swap(tier="disk"), disk)
    yield decided(units, Recompute(), disk)
    yield mixed(units, random.Random(2), "disk")


Training = tuple[nn.Module, torch.optim.Optimizer, list[Tensor], Callable[[Observer], None]]


def trained(
    kind: type[nn.Module], profile: Profile | None, units: Sequence[UnitPlan], spill: Path
) -> Training:
    """Some steps of a loop that has a name for its last loss; without a profile, plainly."""
    model = made(kind)
    optimizer = ADAMW(model.parameters())
    if profile is not None:
        plan = plan_of(
            units,
            fingerprint=profile.model_fingerprint,
            workload=profile.workload,
            piece_bytes=PIECE_BYTES,
        )
        model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=spill)
    losses: list[Tensor] = []
    loss: Tensor | None = None

    def step(observe: Observer) -> None:
        nonlocal loss
        loss = loss_of(call_model(model, batch(len(losses))))
        loss.backward()
        observe("update")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    return model, optimizer, losses, step


def assert_within(kind: type[nn.Module], spill: Path, *, slack: int) -> None:
    """Bitwise, and in no slot above what is predicted; at the peak at most `slack` below it."""
    model, optimizer, losses, step = trained(kind, None, (), spill)
    for _ in range(NUM_STEPS):
        step(lambda _: None)
    expected = outcome(model, optimizer, losses)
    profile = profiled(kind)
    del model, optimizer, losses, step
    for decisions in four_plans(profile):
        units = takable(decisions, profile)
        program = compile_units(units, profile, piece_bytes=PIECE_BYTES)
        predicted = [slot.total for slot in device_bytes(program)]
        others = bytes_of_others()
        model, optimizer, losses, step = trained(kind, profile, units, spill)
        for _ in range(NUM_STEPS - 1):
            step(lambda _: None)
        found = measure_step(model, step, besides_bytes=others)
        if len(found.slot_bytes) > 1:
            slots = zip(found.slot_bytes, predicted, strict=True)
            assert [n for n, (seen, most) in enumerate(slots) if seen > most] == []
            assert below_device(model)[1] == program.tier_bytes("disk")
        assert 0 <= max(predicted) - found.device_bytes <= slack
        restore(model)
        parameters = dict(model.named_parameters())
        for name, value in expected.parameters.items():
            if name in parameters:
                assert torch.equal(parameters[name], value), name
        assert list(differences(losses, expected.losses, "loss")) == []
        del model, optimizer, losses, step


ABOVE_BYTES = {
    "StackOfOnContext": 330_000,
    "StackOfOnContextToo": 330_000,
    "StackOfInputOnContext": 330_000,
    "Messages": 100_000,
    "Dense": 300_000,
    "UNet": 40_000,
    "Biased": 40_000,
    "Far": 40_000,
}
"""What predictions may stand above the truth where something ends within a step that is counted in
all of it: the last loss's contexts, which go when there is a new one; shared inputs."""


class DataSet:
    """Batches of a data set that stays in memory."""

    def __init__(self) -> None:
        self.tokens = torch.stack([batch(step) for step in range(50)])

    def __iter__(self) -> Iterator[Tensor]:
        return (tokens.clone() for tokens in self.tokens)


def with_data() -> tuple[nn.Module, DataSet]:
    """For `protrain profile`."""
    return made(Stack), DataSet()
