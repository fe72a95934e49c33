"""Precision and optimizers: what a workload can ask for besides its model."""

from pathlib import Path

import pytest
import torch

from benchmarks.zoo import ZOO
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.building import parameter_dtype, stepped_dtype
from protrain_plan.models.optimizers import KNOWN, OPTIMIZERS, optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.estimated import estimate
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.profile import DType, Precision
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.diagnostics.matching import model_fingerprint
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.estimates import machine
from tests.support.hostile_models import mixed_factory
from tests.support.messages import Speaker
from tests.support.runtime_cases import profiled_here

# --- precision ------------------------------------------------------------------------------------


def test_autocast_belongs_to_the_model_and_computes_what_plain_autocast_does() -> None:
    specimen = ZOO["llama-autocast"]
    model, batches = specimen.make()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    plain = specimen.source.build()
    batch = next(batches)
    loss = loss_of(call_model(model, batch))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # with its cache, as loops usually have it
        expected = loss_of(call_model(plain, batch))
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, found), (_, wanted) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert found.grad is not None, name
        assert wanted.grad is not None, name
        assert torch.equal(found.grad, wanted.grad), name
    assert not torch.equal(loss, loss_of(call_model(specimen.source.build(), batch)))


def test_dtypes_of_every_precision(assert_says: Speaker) -> None:
    cases: list[tuple[DType, Precision, torch.dtype, DType]] = [
        ("float32", "pure", torch.float32, "float32"),
        ("bfloat16", "pure", torch.bfloat16, "bfloat16"),
        ("bfloat16", "autocast", torch.float32, "float32"),
        ("float16", "master", torch.float16, "float32"),
    ]
    for dtype, precision, stored, stepped in cases:
        assert parameter_dtype(dtype, precision) == stored
        assert stepped_dtype(dtype, precision) == stepped
    with pytest.raises(ProtrainError) as caught:
        parameter_dtype("float32", "autocast")
    assert_says(caught.value)


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_a_model_of_several_dtypes_keeps_them(asked: DType, tmp_path: Path) -> None:
    """Measured and estimated, the profile is of the model that a script builds by itself."""
    source, (own, _) = load_source("tests.support.hostile_models:mixed_factory"), mixed_factory()
    expected = model_fingerprint(own), "bfloat16"
    for profile in (
        profiled_here(source.name, tmp_path, dtype=asked),
        estimate(source, hardware=machine(), batch_size=4, seq_len=40, dtype=asked),
    ):
        assert (profile.model_fingerprint, profile.workload.dtype) == expected


def test_master_weights_are_counted() -> None:
    model = load_source("tiny-llama").build(dtype="bfloat16", precision="master")
    batch = next(load_source("tiny-llama").batches(batch_size=1, seq_len=16))
    anatomy = analyze_units(model, batch, discover(model, batch), precision="master")
    units = measure_bytes(model, batch, anatomy, lambda: MemoryMeter("cpu")).units
    assert sum(unit.state_bytes for unit in units) == 12 * 375_648
    assert sum(unit.parameter_bytes for unit in units) == 2 * 375_648


# --- optimizers -----------------------------------------------------------------------------------


def test_states_of_the_optimizers() -> None:
    found = {
        name: (rule.element_bytes, rule.scalar_bytes())
        for name, factory in OPTIMIZERS.items()
        if (rule := UpdateRules(factory).of(torch.float32)).block == 1
    }
    assert found == {  # bytes per element, and per parameter besides
        "adamw": (8, 4),
        "adam": (8, 4),
        "adamw-amsgrad": (12, 4),
        "adamax": (8, 4),
        "nadam": (8, 8),
        "radam": (8, 4),
        "adadelta": (8, 4),
        "rmsprop": (4, 4),
        "sgd": (0, 0),
        "sgd-momentum": (4, 0),
    }


def test_an_unknown_optimizer_is_one_clear_error() -> None:
    with pytest.raises(ProtrainError) as caught:
        optimizer_factory("sdg")
    assert str(caught.value) == (
        f"optimizer: expected one of {', '.join(KNOWN)}, or package.module:Class, got 'sdg'"
        "\n  fix: did you mean sgd?"
    )
