"""Moving averages of planned models, beside PyTorch's own of plain ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import protrain_runtime
from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import MovingAverage, prepare, restore
from protrain_runtime.contract.records.plan import Offload, Persistent, Placement, Recompute
from tests.support.runtime_cases import ADAMW, batch, build, decided, described, plan_for
from tests.support.thinning import thinned

NAME = "llama"
AVERAGES: dict[str, Callable[[], Callable[..., None]]] = {
    "exponential": lambda: get_ema_multi_avg_fn(0.9),
    "equal": get_swa_multi_avg_fn,
}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss_of(call_model(model, batch(NAME, number))).backward()
    optimizer.step()


def loss(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(call_model(model, batch(NAME, 9)))


def same(found: dict[str, torch.Tensor], averaged: AveragedModel) -> bool:
    expected = averaged.module.state_dict()
    return all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("kind", "states"),
    thinned(tuple(AVERAGES), (Offload(tier="disk"), Offload(tier="host"), Persistent()), every=2),
)
def test_averages_equal_averaged_model_bitwise(
    kind: str, states: Placement, tmp_path: Path
) -> None:
    plain = build(NAME)
    plain_optimizer = ADAMW(plain.parameters())
    averaged = AveragedModel(plain, multi_avg_fn=AVERAGES[kind]())
    model = build(NAME)
    plan = plan_for(model, decided(described(NAME), Recompute(), states))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    average = MovingAverage(model, AVERAGES[kind]())
    for number in range(3):
        trained(plain, plain_optimizer, number)
        averaged.update_parameters(plain)
        trained(model, optimizer, number)
        average.update()
    saved = average.state_dict()
    assert same(saved["parameters"], averaged)
    with average.applied():
        assert torch.equal(loss(model), loss(averaged.module))
        with pytest.raises(RuntimeError, match=r"inside MovingAverage\.applied"):
            trained(model, optimizer, 3)
    assert torch.equal(loss(model), loss(plain))

    resumed = MovingAverage(model, AVERAGES[kind]())
    resumed.load_state_dict(saved)
    trained(plain, plain_optimizer, 3)
    averaged.update_parameters(plain)
    trained(model, optimizer, 3)
    resumed.update()
    assert same(resumed.state_dict()["parameters"], averaged)
    restore(model)
    with pytest.raises(RuntimeError, match="after restore"):
        resumed.update()


def test_an_average_says_what_it_takes(tmp_path: Path) -> None:
    model = build(NAME)
    plan = plan_for(model, decided(described(NAME), Recompute(), Offload(tier="disk")))
    model, _ = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    gathered = protrain_runtime.full_parameters(model)
    assert MovingAverage(model).num_bytes == gathered.num_bytes
    assert gathered.num_bytes >= sum(p.nbytes for p in model.parameters())
