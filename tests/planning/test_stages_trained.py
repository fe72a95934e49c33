"""Two stages of a plan train in PyTorch's own schedules: bits, peaks, and a hard limit."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.pipeline import (
    MIB,
    besides_bytes,
    compared,
    llama,
    planned,
    question_of,
    same,
    way_of,
)
from benchmarks.pipeline_runs import Trained, Way, train
from examples.train_stages import Stage
from protrain_plan.planning.search.improving import Effort
from protrain_plan.planning.stages.answer import StagesQuestion, plan_stages
from protrain_runtime.contract.records.plan import Plan
from tests.support.ranks_cases import run_ranks

SPECIMEN, BUDGET = llama(64, 4, 64), 438 * MIB


@cache
def asked(schedule: str, micro_batches: int) -> tuple[StagesQuestion, Plan]:
    """Two stages where one has no plan."""
    question = question_of(SPECIMEN, BUDGET, micro_batches)
    return question, planned(question, schedule)


def counted(rank: int, count: int, way: Way) -> Trained:
    """Train as one of `count` stages, with bytes of tensors counted."""
    return train(way, rank, counted=True)


def plainly(way: Way, folder: Path) -> Trained:
    """The model's own forward in one process, with losses divided before they are added."""
    whole = Way(specimen=way.specimen, micro_batches=way.micro_batches)
    trained: Trained = run_ranks(counted, 1, folder, whole)[0]
    return trained


@pytest.mark.nightly("1F1B-4", "1F1B-6")
@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [
        ("1F1B", 4),
        ("1F1B", 6),
        *(pytest.param("eager 1F1B", n, marks=pytest.mark.slow) for n in (4, 6)),
    ],
)
def test_stages_train_with_the_bits_of_one_process_within_their_peaks(
    schedule: str, micro_batches: int, tmp_path: Path
) -> None:
    question, plan = asked(schedule, micro_batches)
    (profile,), way = question.profiles.values(), way_of(plan, SPECIMEN)
    assert plan_stages(question, effort=Effort()).single is None
    assert plan.pipeline
    assert 0 < len(way.recomputed) < 4
    stages = run_ranks(counted, 2, tmp_path, way)
    assert all(len(one.parameters) > 10 for one in stages)
    assert same(plainly(way, tmp_path), stages)
    for number, (stage, one) in enumerate(zip(plan.pipeline.stages, stages, strict=True)):
        peak = stage.peak_bytes.device
        assert 0.98 * peak < one.tensor_bytes <= peak + besides_bytes(plan, profile, number)


@pytest.mark.nightly
@pytest.mark.parametrize(("micro_batches", "equal"), [(4, True), (6, False)])
def test_pytorchs_default_divides_sums_of_gradients_and_rounds(
    micro_batches: int, equal: bool, tmp_path: Path
) -> None:
    _, plan = asked("1F1B", micro_batches)
    by_default = replace(way_of(plan, SPECIMEN), scale_grads=True)
    first, last = run_ranks(counted, 2, tmp_path, by_default)
    plain = plainly(by_default, tmp_path).parameters
    parameters = first.parameters | last.parameters
    assert all(torch.equal(one, parameters[name]) for name, one in plain.items()) == equal


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_dropout"])
def test_what_would_not_be_exact_is_refused(key: str) -> None:
    config = SimpleNamespace(**{"tie_word_embeddings": False, key: 0.1})
    with pytest.raises(ValueError, match=r"tied embeddings|dropout draws"):
        Stage(SimpleNamespace(config=config), ["model.layers.1"], 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_under_the_budget_as_a_limit_one_process_dies_and_two_stages_train() -> None:
    found = compared("1F1B", 6)
    assert found["equal"] == [True, True]
    assert {stage["limited"] for stage in found["stages"]} == {"trained"}
    assert (found["plain"], found["plain_recomputed"]) == ("out of memory", "out of memory")
    for stage in found["stages"]:
        assert stage["measured"] <= stage["predicted"] + stage["besides"]
