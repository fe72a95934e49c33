"""Compiled blocks: profiled, and run under plans with the bits of the compiled plain model."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover
from protrain_plan.records.plan import Keep, Offload, Recompute, Swap, SwapInput, UnitPlan
from protrain_runtime.activations.forms import wrap_forward
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.model.prepared import restore
from protrain_runtime.preparation import prepare
from tests.support.runtime_cases import (
    ADAMW,
    Outcome,
    assert_bitwise,
    attached,
    batch,
    build,
    decided,
    described,
    plan_for,
    train,
)
from tests.support.thinning import thinned

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
        ],
    ),
]
DECISIONS: dict[str, Any] = {
    "keep": Keep(),
    "recompute": Recompute(),
    "lite": Recompute(form="lite"),
    "swap": Swap(tier="disk"),
    "swap-input": SwapInput(tier="disk"),
}


def compiled(backend: str, *, wrapped: bool = False) -> nn.Module:
    """A Llama whose layers are compiled, in place or as modules around them."""
    torch.compiler.reset()
    model = build("llama")
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    for index, layer in enumerate(layers):
        if wrapped:
            layers[index] = torch.compile(layer, backend=backend)  # type: ignore[assignment]
        else:
            layer.compile(backend=backend)
    return model


def trained(model: nn.Module) -> Outcome:
    return train("llama", model, ADAMW(model.parameters()), num_steps=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decision", thinned(tuple(DECISIONS)))
def test_plans_of_compiled_blocks_compute_the_bits_of_the_compiled_model(
    decision: str, backend: str, tmp_path: Path
) -> None:
    plain = trained(compiled(backend))
    model = compiled(backend)
    before = attached(model)
    units = decided(described("llama"), DECISIONS[decision], Offload(tier="disk"))
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    found = train("llama", model, optimizer, num_steps=2)
    assert_bitwise(found, plain)
    restore(model)
    assert attached(model) == before


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_mlps_of_compiled_code_are_not_tiled(whole: bool) -> None:
    """Such a block is recomputed as in full: compiled code has forwards of its own."""

    def found(form: str) -> dict[str, torch.Tensor]:
        torch.compiler.reset()
        model = build("llama")
        layers = model.get_submodule("model.layers").children()
        for layer in list(layers)[:2]:
            (layer if whole else layer.get_submodule("mlp")).compile(backend="aot_eager")
            wrap_forward(layer, form)
        loss_of(call_model(model, batch("llama", 0))).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    full, tiled = found("full"), found("tiled")
    assert all(torch.equal(full[key], tiled[key]) for key in full)


def forms(model: nn.Module) -> list[tuple[str, str, tuple[str, ...]]]:
    given = batch("llama", 0)
    units = measure_bytes(
        model, given, analyze_units(model, given, discover(model, given)), MemoryMeter
    ).units
    return [(u.kind, u.name, tuple(cost.form for cost in u.forms)) for u in units]


@pytest.mark.slow  # every form of activations compiles anew
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_profile_of_compiled_blocks_has_the_units_of_the_plain_model(wrapped: bool) -> None:
    model = compiled("aot_eager", wrapped=wrapped)
    before = attached(model)
    found = forms(model)
    assert [unit[:2] for unit in found] == [
        ("part", "model.embed_tokens"),
        *(("block", f"model.layers.{number}") for number in range(4)),
        ("part", "model.norm"),
    ]
    for _, _, names in found[1:-1]:
        assert (names[0], names[-1]) == ("keep", "full")
    assert attached(model) == before


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    fix = "\n  fix: compile each block by itself: for block in ...: block.compile()"
    for path in ("", "model"):
        model = build("llama")
        plan = plan_for(model, every_unit_recomputed())
        model.get_submodule(path).compile(backend="eager")
        with pytest.raises(ProtrainError) as caught:
            prepare(model, plan, optimizer=ADAMW)
        assert str(caught.value) == (
            f"{path or 'the model'} is compiled as a whole, so that its blocks cannot be told"
            f" apart{fix}"
        )


def every_unit_recomputed() -> tuple[UnitPlan, ...]:
    return decided(described("llama"), Recompute(), Offload(tier="disk"))


WARNING = (
    "the model's own gradient checkpointing is switched off while it is profiled or follows a plan:"
    " the plan decides which blocks are recomputed"
)


def test_a_models_own_checkpointing_is_switched_off_under_a_plan(tmp_path: Path) -> None:
    plain = build("llama")
    expected = trained(plain)
    model: Any = build("llama")
    model.gradient_checkpointing_enable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare(
            model,
            plan_for(model, every_unit_recomputed()),
            optimizer=ADAMW,
            spill_directory=tmp_path,
        )
    assert [str(warning.message) for warning in caught] == [WARNING]
    assert caught[0].filename == __file__
    assert not model.is_activation_checkpointing
    restore(model)
    assert model.is_activation_checkpointing
    with pytest.warns(UserWarning, match=WARNING):
        _, optimizer = prepare(
            model,
            plan_for(model, every_unit_recomputed()),
            optimizer=ADAMW,
            spill_directory=tmp_path,
        )
    assert_bitwise(train("llama", model, optimizer, num_steps=2), expected)
