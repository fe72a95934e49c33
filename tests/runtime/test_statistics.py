"""Blocks whose forward writes buffers: recomputation leaves what plain training leaves.

The oracle is plain PyTorch: buffers, losses, gradients and parameters, bit by bit.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover, undisturbed
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.plan import (
    Activations,
    Offload,
    Persistent,
    Placement,
    Recompute,
    SwapInput,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Unit
from protrain_runtime.devices.memory_meter import MemoryMeter
from tests.support.runtime_cases import decided, plan_for

NUM_STEPS = 5
NormMaker = Callable[[int], nn.Module]


class Normed(nn.Module):
    """A residual convolution with a norm over the batch."""

    def __init__(self, norm: NormMaker) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = norm(8)
        self.mix = nn.Conv2d(8, 8, 1)

    def forward(self, images: Tensor) -> Tensor:
        mixed: Tensor = self.mix(torch.relu(self.norm(self.convolution(images))))
        return images + mixed


class Counting(nn.Module):
    """A norm that counts its calls, and computes with the count."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return images * self.weight[:, None, None] / self.calls


class Replacing(Counting):
    """The same with a new buffer at every call."""

    def forward(self, images: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return images * self.weight[:, None, None] / self.calls


class Network(nn.Module):
    def __init__(self, norm: NormMaker = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Normed(norm) for _ in range(3)))
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), labels)


def made(norm: NormMaker = nn.BatchNorm2d) -> Network:
    torch.manual_seed(0)
    return Network(norm).train()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(4, 3, 16, 16, generator=generator)
    return images, torch.randint(10, (4,), generator=generator)


def measured(model: Network) -> list[Unit]:
    with undisturbed(model):
        anatomy = analyze_units(model, batch(0), discover(model, batch(0)))
        return measure_bytes(model, batch(0), anatomy, MemoryMeter).units


def described(model: Network) -> tuple[UnitPlan, ...]:
    with undisturbed(model):
        found = discover(model, batch(0))
        return tuple(analyze_units(model, batch(0), found, forms=("keep", "full")).plans)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The losses of all steps."""
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_like_plain(
    norm: NormMaker, activations: Activations, states: Placement, directory: Path
) -> None:
    factory = partial(torch.optim.AdamW, lr=1e-2)
    plain, planned = made(norm), made(norm)
    expected = train(plain, factory(plain.parameters()))
    units = decided(described(planned), activations, states)
    _, optimizer = prepare(
        planned, plan_for(planned, units), optimizer=factory, spill_directory=directory
    )
    found = train(planned, optimizer)
    restore(planned)
    assert all(map(torch.equal, found, expected))
    names = [name for name, _ in plain.named_buffers()]
    assert len(names) == 9  # of three norms: mean, variance, count
    assert [name for name, _ in planned.named_buffers()] == names
    state = planned.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d,
        partial(nn.BatchNorm2d, momentum=None),
        partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
    ],
    ids=["batch", "cumulative", "instance"],
)
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (Recompute(), Persistent()),
        (Recompute(form="lite"), Persistent()),
        (SwapInput(tier="disk"), Offload(tier="disk")),
    ],
    ids=["full", "lite", "swapped"],
)
def test_running_statistics_count_every_batch_once(
    norm: NormMaker, activations: Activations, states: Placement, tmp_path: Path
) -> None:
    assert_like_plain(norm, activations, states, tmp_path)


def test_a_block_with_running_statistics_may_be_recomputed() -> None:
    units = measured(made())
    assert [len(unit.forms) > 1 for unit in units if unit.kind == "block"] == [True] * 3


@pytest.mark.parametrize("norm", [Counting, Replacing])
def test_a_block_that_writes_other_buffers_keeps_what_it_saves(norm: NormMaker) -> None:
    model = made(norm)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    units = measured(model)
    assert [f.form for unit in units for f in unit.forms] == ["keep"] * len(units)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
