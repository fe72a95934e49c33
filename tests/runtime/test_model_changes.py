"""A plan that meets another model or larger batches says what changed; the edit is the oracle."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import with_batch_sizes
from protrain_plan.models.sources import load_source
from protrain_runtime import restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.plan import KEEP, RECOMPUTE, Placement, Plan
from protrain_runtime.diagnostics.matching import model_changes, model_tensors
from tests.support.estimates import estimate, model_of
from tests.support.hostile_models import WORKLOAD
from tests.support.messages import Speaker
from tests.support.runtime_cases import (
    MODELS,
    build,
    decided,
    described,
    described_by,
    plan_for,
    plan_for_profile,
)
from tests.support.scenario import Scenario, refusal

NAME = "llama-tied"


def planned() -> Plan:
    model = build(NAME)
    plan = plan_for(model, decided(described(NAME), KEEP, Placement(tier="disk")))
    return replace(plan, tensors=model_tensors(model))


def refused(model: nn.Module, plan: Plan, folder: Path) -> str:
    asked = Scenario(plan=lambda _: plan)
    return str(refusal(partial(asked.prepared, model, folder), ProtrainError))


def wider(model: Any) -> None:
    for layer in (0, 1, 3):
        model.model.layers[layer].mlp.up_proj = nn.Linear(96, 192, bias=False)


def half(model: Any) -> None:
    model.model.layers.bfloat16()


EDITS: tuple[Callable[[Any], object], ...] = (
    lambda model: model.model.layers[2].register_parameter("extra", nn.Parameter(torch.zeros(8))),
    wider,
    lambda model: setattr(model.lm_head, "weight", nn.Parameter(torch.zeros(256, 96))),
    lambda model: model.model.layers[1].self_attn.requires_grad_(False),
    half,
    lambda model: operator.delitem(model.model.layers, slice(2, None)),
    lambda model: setattr(model.model.layers[3].mlp, "act_fn", nn.GELU()),
)


def test_a_changed_model_is_told_by_what_was_changed(tmp_path: Path, assert_says: Speaker) -> None:
    plan = planned()
    for edit in EDITS:
        model = build(NAME)
        edit(model)
        assert_says(refused(model, plan, tmp_path))
        assert "forward" not in model.__dict__


def test_plans_without_tensors_name_fingerprints(tmp_path: Path) -> None:
    plan, model = replace(planned(), tensors=()), build(NAME)
    half(model)
    assert refused(model, plan, tmp_path).startswith(
        "model_fingerprint: the plan was made for another model: its fingerprint is sha256:"
    )


@pytest.mark.nightly(but=("llama", "t5", "functional-no-attention"))
@pytest.mark.parametrize("name", MODELS)
def test_lines_name_every_tensor_and_travel_with_the_plan(name: str) -> None:
    model = build(name)
    lines = model_tensors(model)
    assert len(lines) < 30
    plan = replace(plan_for(model, described(name)), tensors=lines)
    assert loads_plan(dumps_plan(plan)) == plan
    assert model_changes(lines, model, plan.units) == []
    assert model_tensors(build(name)) == lines


def test_experts_in_layers_are_one_line() -> None:
    experts = nn.ModuleList(nn.ModuleList(nn.Linear(2, 3) for _ in range(4)) for _ in range(12))
    assert model_tensors(experts) == (
        "0-11.0-3.weight 3x2 float32 trainable",
        "0-11.0-3.bias 3 float32 trainable",
    )


def test_a_line_stands_for_no_more_names_than_a_reader_unfolds() -> None:
    with torch.device("meta"):
        experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(128)) for _ in range(9)
        )
    lines = model_tensors(experts)
    assert [line.partition(" ")[0] for line in lines] == ["0-6.0-127.weight", "7-8.0-127.weight"]
    assert model_changes(lines, experts, ()) == []


def test_lines_that_somebody_edited_do_not_fill_the_memory() -> None:
    model = nn.Linear(1, 1)
    lines = ["layers.0-999999999.weight 1x1 float32 trainable", "0-99999.0-99999.bias 1", "", "x"]
    assert model_changes(lines, model, ()) == [
        "in no planned unit: 4 -> 2 parameters;"
        " layers.0-999999999.weight: missing (1x1 float32 trainable);"
        " 0-99999.0-99999.bias: missing (1); , x: missing ();"
        " weight: new (1x1 float32 trainable); bias: new (1 float32 trainable)"
    ]


# --- larger batches than those that were profiled -------------------------------------------------


@pytest.mark.nightly
def test_a_factorys_larger_batch_is_refused_and_a_smaller_one_trains(
    tmp_path: Path, assert_says: Speaker
) -> None:
    source = load_source("tests.support.functional_model:relu_factory")
    profile = estimate(
        source, hardware=load_hardware("cpu"), batch_size=1, seq_len=1, dtype="float32"
    )
    assert profile.workload.inputs == ("tokens 4x64",)
    units = decided(described_by(profile), RECOMPUTE, Placement(tier="disk"))
    plan = plan_for_profile(profile, units)
    run = Scenario(plan=lambda _: plan).prepared(model_of(source), tmp_path)
    for sizes in [(4, 64), (1, 64), (4, 8)]:
        run.model(torch.zeros(sizes, dtype=torch.int64)).backward()
        run.update()
    for sizes in [(5, 8), (1, 65)]:
        tokens = torch.zeros(sizes, dtype=torch.int64)
        assert_says(refusal(partial(run.model, tokens=tokens)))
        with torch.no_grad():
            run.model(tokens)
    restore(run.model)(torch.zeros((5, 8), dtype=torch.int64))  # plain again


class Several(nn.Module):
    """Inputs of every kind: by position, by name, nested, no tensor, a single number."""

    def forward(self, image: object, *more: object, scale: object = None, **rest: object) -> None:
        """Nothing is computed."""


def test_inputs_are_known_by_argument() -> None:
    workload = replace(WORKLOAD, model="a.b:c")
    pair, single = torch.zeros(2, 3), torch.zeros(())
    given = {"image": [pair, {"mask": torch.zeros(7)}], "scale": single, "deep": pair, "flag": True}
    assert with_batch_sizes(workload, Several(), given).inputs == (
        "image[0] 2x3",
        "image[1]['mask'] 7",
        "rest['deep'] 2x3",
    )
    assert with_batch_sizes(workload, Several(), (pair, pair)).inputs == (
        "image 2x3",
        "more[0] 2x3",
    )
    assert with_batch_sizes(workload, Several(), pair).inputs == ("image 2x3",)
