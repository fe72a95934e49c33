"""Batches larger than those that were profiled are refused, whoever makes them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.estimated import estimate
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.plan import Offload, Recompute
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.diagnostics.matching import with_batch_sizes
from tests.support.runtime_cases import ADAMW, decided, described_by, plan_of

FACTORY = "tests.support.functional_model:relu_factory"


def test_a_factorys_larger_batch_is_refused_and_a_smaller_one_trains(tmp_path: Path) -> None:
    source = load_source(FACTORY)
    profile = estimate(
        source, hardware=load_hardware("cpu"), batch_size=1, seq_len=1, dtype="float32"
    )
    assert profile.workload.inputs == ("tokens 4x64",)
    units = decided(described_by(profile), Recompute(), Offload(tier="disk"))
    plan = plan_of(units, fingerprint=profile.model_fingerprint, workload=profile.workload)
    model, optimizer = prepare(source.build(), plan, optimizer=ADAMW, spill_directory=tmp_path)
    for sizes in [(4, 64), (1, 64), (4, 8)]:
        loss = model(torch.zeros(sizes, dtype=torch.int64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for sizes in [(5, 8), (1, 65)]:
        tokens = torch.zeros(sizes, dtype=torch.int64)
        with pytest.raises(RuntimeError) as caught:
            model(tokens=tokens)
        assert str(caught.value) == (
            f"the batch has {sizes[0]} x {sizes[1]} in 'tokens', and the plan was made for at most"
            " 4 x 64: it would take more memory than planned. Profile and plan the largest batch"
        )
        with torch.no_grad():
            model(tokens)
    restore(model)
    model(torch.zeros((5, 8), dtype=torch.int64))  # plain again


class Several(nn.Module):
    """Inputs of every kind: by position, by name, nested, no tensor, a single number."""

    def forward(self, image: object, *more: object, scale: object = None, **rest: object) -> None:
        """Nothing is computed."""


def test_inputs_are_known_by_argument() -> None:
    workload = Workload(
        model="a.b:c", model_config="", batch_size=1, seq_len=1, dtype="float32", device="cpu",
        seed=0,
    )  # fmt: skip
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
