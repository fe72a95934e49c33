"""Steps that overlap: updates run on into the next forward, and whoever reads waits for them.

That they train bitwise under every kind of plan is asked by test_parity_matrix, and that each wait
is needed by test_ordering.
"""

import copy
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import (
    MovingAverage,
    full_parameters,
    load,
    prepare,
    record,
    restore,
    save,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Offload, Recompute, Schedule, Updates
from protrain_runtime.devices.lanes import LaneError
from protrain_runtime.model.prepared import engine_of, parameter_values
from protrain_runtime.states.updates import Piece
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    assert_bitwise,
    batch,
    build,
    decided,
    described,
    device,
    outcome,
    plan_for,
)

NAME = "llama-tied"
AHEAD = Schedule(forward_lead=1, backward_lead=1)
LATE = Schedule(forward_lead=1, backward_lead=1, update_late=True)
Model = tuple[nn.Module, torch.optim.Optimizer]


def slow_updates() -> float:
    """Seconds before each item of a lane: updates are what a step would wait for."""
    return 0.01 if threading.current_thread().name.startswith("protrain update") else 0.0


def planned(
    folder: Path,
    schedule: Schedule = AHEAD,
    *,
    lane_delay: Callable[[], float] = slow_updates,
    **changes: Any,
) -> Model:
    model = build(NAME)
    tier: TierName = "disk" if device().type == "cpu" else "host"
    units = decided(described(NAME), Recompute(), Offload(tier=tier), schedule)
    plan = with_settings(plan_for(model, units), overlap_steps=True, **changes)
    return prepare(model, plan, optimizer=ADAMW, spill_directory=folder, lane_delay=lane_delay)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    loss = loss_of(call_model(model, batch(NAME, number)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def plainly(num_steps: int) -> tuple[Model, list[Tensor]]:
    model = build(NAME)
    optimizer = ADAMW(model.parameters())
    return (model, optimizer), [step(model, optimizer, number) for number in range(num_steps)]


def running(model: nn.Module) -> int:
    """Moves of the last step that nobody has waited for."""
    engine = engine_of(model)
    assert engine is not None
    return len(engine._carried)


@every_device
@pytest.mark.parametrize("schedule", [AHEAD, LATE], ids=["in the order of backward", "late"])
@pytest.mark.parametrize("updates", ["in backward", "after backward"])
def test_updates_run_on_and_training_is_bitwise(
    schedule: Schedule, updates: Updates, tmp_path: Path
) -> None:
    model, optimizer = planned(tmp_path, schedule, updates=updates)
    losses: list[Tensor] = []
    for number in range(4):
        losses.append(step(model, optimizer, number))
        assert running(model)
    (plain, its_optimizer), expected = plainly(4)
    assert_bitwise(outcome(model, optimizer, losses), outcome(plain, its_optimizer, expected))
    assert not running(model)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def read_state_dict(model: nn.Module, _: Any, __: Path) -> dict[str, Tensor]:
    return values(model)


def read_one_by_one(model: nn.Module, _: Any, __: Path) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in parameter_values(model)}


def read_on_the_device(model: nn.Module, _: Any, __: Path) -> dict[str, Tensor]:
    with full_parameters(model):
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def read_a_copy(model: nn.Module, _: Any, __: Path) -> dict[str, Tensor]:
    return values(copy.deepcopy(model))


def read_an_average(model: nn.Module, _: Any, __: Path) -> dict[str, Tensor]:
    average = MovingAverage(model)
    average.update()
    read: dict[str, Tensor] = average.state_dict()["parameters"]
    return {name: value.cpu() for name, value in read.items()}


def read_a_checkpoint(model: nn.Module, optimizer: Any, folder: Path) -> dict[str, Tensor]:
    save(model, optimizer, folder / "checkpoint")
    other = build(NAME, seed=3)
    load(other, ADAMW(other.parameters()), folder / "checkpoint")
    return values(other)


def read_a_restored_model(model: nn.Module, _: Any, __: Path) -> dict[str, Tensor]:
    return values(restore(model))


READERS = (
    read_state_dict,
    read_one_by_one,
    read_on_the_device,
    read_a_copy,
    read_an_average,
    read_a_checkpoint,
    read_a_restored_model,
)


@every_device
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_whoever_reads_between_steps_reads_what_is_updated(
    read: Callable[..., dict[str, Tensor]], tmp_path: Path
) -> None:
    model, optimizer = planned(tmp_path)
    step(model, optimizer, 0)
    assert running(model)
    found = read(model, optimizer, tmp_path)
    expected = values(plainly(1)[0][0])
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@every_device
def test_an_evaluation_and_the_optimizers_states_are_those_of_the_last_step(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    (plain, its_optimizer), _ = plainly(1)
    step(model, optimizer, 0)
    with torch.no_grad():
        found, expected = (
            loss_of(call_model(each, batch(NAME, 5))).item() for each in (model, plain)
        )
    assert found == expected
    step(model, optimizer, 1)
    step(plain, its_optimizer, 1)
    assert running(model)
    assert_bitwise(outcome(model, optimizer, []), outcome(plain, its_optimizer, []))


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_learning_rate_that_changes_after_a_step_is_the_next_ones(
    tensor: bool, tmp_path: Path
) -> None:
    """A tensor is changed in place, as schedulers do: what runs on has the value of its step."""

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        losses: list[Tensor] = []
        for number in range(3):
            losses.append(step(model, optimizer, number))
            for group in optimizer.param_groups:
                if tensor:
                    group["lr"].mul_(0.1)
                else:
                    group["lr"] *= 0.1
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"])
        return outcome(model, optimizer, losses)

    def factory(parameters: Any) -> torch.optim.Optimizer:
        rate: Any = torch.tensor(1e-2) if tensor else 1e-2
        return torch.optim.AdamW(parameters, lr=rate, fused=True)

    model = build(NAME)
    units = decided(described(NAME), Recompute(), Offload(tier="disk"), AHEAD)
    plan = with_settings(plan_for(model, units), overlap_steps=True)
    planned_pair = prepare(
        model, plan, optimizer=factory, spill_directory=tmp_path, lane_delay=slow_updates
    )
    found = trained(*planned_pair)
    plain = build(NAME)
    assert_bitwise(found, trained(plain, factory(plain.parameters())))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Once it is set, updates fail."""
    fails, update = threading.Event(), Piece.update

    def broken(piece: Piece, *arguments: Any) -> None:
        if fails.is_set():
            raise OSError("the memory of this machine is broken")
        update(piece, *arguments)

    monkeypatch.setattr(Piece, "update", broken)
    return fails


@pytest.mark.parametrize("use", ["forward", "state_dict"])
def test_an_update_that_fails_late_is_told_and_ends_the_training(
    use: str, failing: threading.Event, tmp_path: Path, assert_says: Speaker
) -> None:
    model, optimizer = planned(tmp_path)
    step(model, optimizer, 0)
    loss_of(call_model(model, batch(NAME, 1))).backward()
    optimizer.step()
    failing.set()  # some of the updates run on
    uses: dict[str, Callable[[], object]] = {
        "forward": lambda: call_model(model, batch(NAME, 2)),
        "state_dict": model.state_dict,
    }
    with pytest.raises(LaneError, match="the memory of this machine is broken"):
        uses[use]()
    failing.clear()
    for again in (partial(step, model, optimizer, 2), model.state_dict, partial(restore, model)):
        with pytest.raises(RuntimeError) as refused:
            again()
        assert_says(refused.value)


def test_a_forward_that_is_cut_short_leaves_whole_updates(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    step(model, optimizer, 0)
    assert running(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.get_submodule("model.layers.1").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call_model(model, batch(NAME, 1))
    handle.remove()
    assert not running(model)
    step(model, optimizer, 1)
    (plain, its_optimizer), _ = plainly(2)
    assert_bitwise(outcome(model, optimizer, []), outcome(plain, its_optimizer, []))


def test_a_recorded_step_ends_with_its_updates(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    step(model, optimizer, 0)
    assert running(model)
    with record(model) as recorder:
        step(model, optimizer, 1)
        assert not running(model)
        names = {event.name for event in recorder.recording().events}
    engine = engine_of(model)
    assert engine is not None
    program = engine.program
    assert {program.move_name(number) for number in range(len(program.moves))} <= names


def test_micro_batches_cannot_overlap(assert_says: Speaker) -> None:
    model = build(NAME)
    units = decided(described(NAME), Recompute(), Offload(tier="disk"), AHEAD)
    plan = with_settings(plan_for(model, units), overlap_steps=True, micro_batches=2)
    with pytest.raises(ProtrainError) as caught:
        prepare(model, plan, optimizer=ADAMW)
    assert_says(caught.value)
