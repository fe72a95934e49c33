"""Many architectures through the profiler and the runtime: units, exact training, peaks that hold.

The oracle of training is plain PyTorch, of bytes the step that ran.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import ZOO, Specimen
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.optimizers import OPTIMIZERS, optimizer_factory
from protrain_plan.profiling.measured import workspace
from protrain_plan.profiling.memory import passes
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover, undisturbed
from protrain_runtime import prepare
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.forms import FORMS, allowed_forms
from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Recompute,
    Swap,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Form, OptimizerCost, Profile
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer
from tests.support.peaks import bytes_of_others, without_freedom
from tests.support.planning_cases import cpu
from tests.support.programs import compile_units
from tests.support.runtime_cases import (
    copied,
    decided,
    described_by,
    differences,
    mixed,
    open_to,
    plan_of,
)
from tests.support.thinning import thinned

PIECE_BYTES = 1 << 15
NUM_STEPS = 2
ROUTED = ("mixtral", "qwen3-moe")
"""Their bytes depend on which tokens an expert gets, and so on the step."""
Decide = Callable[[tuple[UnitPlan, ...]], tuple[UnitPlan, ...]]


@dataclass
class Trained:
    losses: list[Tensor]
    parameters: dict[str, Tensor]
    optimizer: object
    random_state: Tensor


def train(
    specimen: Specimen,
    follow: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]],
    *,
    measured: list[tuple[int, ...]] | None = None,
) -> Trained:
    """Steps of the specimen; `measured` gets the bytes of the last one's slots."""
    others = bytes_of_others() if measured is not None else 0
    model, batches = specimen.make()
    model, optimizer = follow(model)
    torch.manual_seed(1)
    losses: list[Tensor] = []

    def step(batch: Batch, observe: Observer) -> None:
        loss = loss_of(call_model(model, batch))
        loss.backward()
        observe("update")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for number in range(NUM_STEPS):
        batch = next(batches)
        if measured is not None and number == NUM_STEPS - 1:
            memory = measure_step(model, partial(step, batch))
            measured.append(tuple(size - others for size in memory.slot_bytes))
        else:
            step(batch, lambda _: None)
    return Trained(
        losses, copied(model.state_dict()), copied(optimizer.state_dict()), torch.get_rng_state()
    )


def plainly(optimizer: str) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
    factory = optimizer_factory(optimizer)
    return lambda model: (model, factory(p for p in model.parameters() if p.requires_grad))


@cache
def plain(name: str, optimizer: str = "adamw") -> Trained:
    return train(ZOO[name], plainly(optimizer))


@cache
def profiled(name: str, optimizer: str, forms: tuple[Form, ...]) -> Profile:
    """What the specimen's units hold, on a machine whose speeds do not matter."""
    specimen = ZOO[name]
    model, batches = specimen.make()
    batch = next(batches)
    with undisturbed(model):
        passes.training_step(model, batch)
        passes.drop_gradients(model)
        anatomy = analyze_units(
            model,
            batch,
            discover(model, batch),
            forms=forms,
            optimizer=optimizer,
            precision=specimen.precision,
        )
        units = measure_bytes(
            model,
            batch,
            anatomy,
            lambda: MemoryMeter("cpu"),
        ).units
    return Profile(
        workload=specimen.workload,
        hardware=cpu(),
        method="measured",
        model_fingerprint=model_fingerprint(model),
        optimizer=OptimizerCost(
            name=optimizer,
            host_parameters_per_s=1e9,
            device_parameters_per_s=1e9,
            **workspace(optimizer, "float32", "pure"),
        ),
        base_bytes=anatomy.base_bytes,
        units=tuple(units),
    )


def assert_trains_like_plain(
    name: str,
    decide: Decide,
    spill: Path,
    *,
    optimizer: str = "adamw",
    forms: tuple[Form, ...] = ("keep", "full"),
) -> None:
    """Bitwise, and in no slot with more bytes than were predicted."""
    profile = profiled(name, optimizer, forms)
    units = open_to(profile, decide(described_by(profile)))
    plan = plan_of(
        units,
        fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        piece_bytes=PIECE_BYTES,
    )
    slots: list[tuple[int, ...]] = []
    found = train(
        ZOO[name],
        lambda model: prepare(
            model, plan, optimizer=optimizer_factory(optimizer), spill_directory=spill
        ),
        measured=slots,
    )
    expected = plain(name, optimizer)
    assert list(differences(found.losses, expected.losses, "loss")) == []
    assert list(differences(found.parameters, expected.parameters, "parameters")) == []
    assert list(differences(found.optimizer, expected.optimizer, "optimizer")) == []
    assert torch.equal(found.random_state, expected.random_state)
    if name in ROUTED:
        return
    program = compile_units(units, profile, piece_bytes=PIECE_BYTES)
    predicted = [slot.total for slot in device_bytes(program)]
    found_slots = enumerate(zip(slots[0], predicted, strict=True))
    assert [(slot, seen - most) for slot, (seen, most) in found_slots if seen > most] == []


def recomputed_and_offloaded(units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    return without_freedom(decided(units, Recompute(), Offload(tier="disk")))


def swapped_and_buffered(units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    return without_freedom(
        decided(units, Swap(tier="disk"), Offload(tier="disk", keep_gathered=True))
    )


def mixed_at_random(units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    return without_freedom(mixed(units, random.Random(3), "disk"))


@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_in_one_unit(name: str) -> None:
    model, batches = ZOO[name].make()
    units = discover(model, next(batches))
    found = [parameter for unit in units for parameter in unit.parameters]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    assert (units[0].kind, units[-1].kind) == ("part", "part")
    blocks = [unit for unit in units if unit.kind == "block"]
    assert len(blocks) >= 3
    inside = sum(p.numel() for unit in blocks if unit.module for p in unit.module.parameters())
    assert inside > 0


@pytest.mark.parametrize("name", thinned(tuple(ZOO), every=8))
def test_recomputed_and_offloaded_like_plain(name: str, tmp_path: Path) -> None:
    assert_trains_like_plain(name, recomputed_and_offloaded, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_swapped_and_buffered_like_plain(name: str, tmp_path: Path) -> None:
    assert_trains_like_plain(name, swapped_and_buffered, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_mixed_decisions_like_plain(name: str, tmp_path: Path) -> None:
    forms = tuple(form for form in allowed_forms(()) if FORMS[form].of == "blocks")
    assert_trains_like_plain(name, mixed_at_random, tmp_path, forms=forms)


@pytest.mark.parametrize("form", ["keep", "full"])
def test_a_block_that_the_loss_does_not_depend_on_keeps_what_it_saves(
    form: Form, tmp_path: Path
) -> None:
    """LLaVA's last image layer, which is dropped when the forward has ended.

    Whatever the others' forms, their bytes are what was predicted.
    """
    unused = "model.vision_tower.encoder.layers.2"
    profile = profiled("llava", "adamw", ("keep", "full"))
    kept = [unit.name for unit in profile.units if unit.kind == "block" and len(unit.forms) == 1]
    assert kept == [unused]

    def one_form(units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
        activations = Keep() if form == "keep" else Recompute()
        return without_freedom(decided(units, activations, Offload(tier="disk")))

    assert_trains_like_plain("llava", one_form, tmp_path)


@pytest.mark.parametrize("optimizer", thinned(tuple(OPTIMIZERS)))
def test_every_optimizer_like_plain(optimizer: str, tmp_path: Path) -> None:
    assert_trains_like_plain("pyramid", recomputed_and_offloaded, tmp_path, optimizer=optimizer)
