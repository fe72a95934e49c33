"""Buffers that are handed on: for equal sizes, and never what somebody still looks into."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.building import seeded
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime import prepare
from protrain_runtime.contract.records.plan import Keep, Offload, Placement, Schedule, UnitPlan
from protrain_runtime.devices.lanes import Backend, Buffers
from protrain_runtime.model.prepared import parameter_values
from tests.support.runtime_cases import ADAMW, decision_name, plan_for


def buffers() -> Buffers:
    return Buffers(Backend(torch.device("cpu")))


def test_what_leaves_serves_a_fetch_of_its_size() -> None:
    pool = buffers()
    small, large = pool.new(64), pool.new(128)
    places = small.data_ptr(), large.data_ptr()
    pool.give_up([small, large])
    del small, large
    assert pool.new(128).data_ptr() == places[1]
    assert pool.new(64).data_ptr() == places[0]


def test_what_a_view_looks_into_is_left_to_the_view() -> None:
    pool = buffers()
    buffer = pool.new(64)
    view = buffer[8:16].fill_(7)
    pool.give_up([buffer])
    del buffer
    other = pool.new(64).fill_(1)
    assert not other.eq(7).any()
    assert view.eq(7).all()


def test_what_no_fetch_of_the_boundary_takes_is_freed() -> None:
    pool = buffers()
    given = [pool.new(64), pool.new(64), pool.new(128)]
    alive = [weakref.ref(buffer) for buffer in given]
    pool.give_up(given)
    del given
    pool.keep_for([64, 256])
    assert [buffer() is not None for buffer in alive] == [True, False, False]


class Carrying(nn.Module):
    """Layers that hand a view of a parameter on, which the next one multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, hidden: Tensor) -> Tensor:
        """The loss, from hidden [batch, 64]."""
        carried = torch.ones(64)
        for layer in self.layers:
            hidden, carried = layer(hidden, carried)
        return (hidden * carried).square().mean()


class Layer(nn.Module):
    """See `Carrying`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.scale = nn.Parameter(torch.randn(2, 64))

    def forward(self, hidden: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden state, and a row of this layer's `scale`."""
        return torch.tanh(hidden @ self.weight) * carried * self.scale[0], self.scale[1]


@pytest.mark.parametrize(
    "states", [Offload(tier="disk"), Offload(tier="disk", keep_gathered=True)], ids=decision_name
)
def test_a_view_of_a_parameter_that_is_handed_on_stays_what_it_was(
    states: Placement, tmp_path: Path
) -> None:
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    def made() -> nn.Module:
        with seeded(0):
            return Carrying().train()

    model = made()
    units = tuple(
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            activations=Keep(),
            states=states,
            parameters=() if unit.kind == "block" else unit.parameters,
            schedule=Schedule(forward_lead=1, backward_lead=1, update_drain=0),
        )
        for unit in discover(model, data)
    )
    model, planned = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    plainly = made()
    plain = ADAMW(plainly.parameters())
    for _ in range(3):
        losses = [model(data), plainly(data)]
        for loss, optimizer in zip(losses, (planned, plain), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)
    values = dict(parameter_values(model))
    assert all(torch.equal(values[name], p) for name, p in plainly.named_parameters())
