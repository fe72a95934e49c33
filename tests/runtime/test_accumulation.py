"""Micro-batches: what may happen between them, and loops of other lengths than planned."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Keep, Offload, UnitPlan, Updates
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    BATCH,
    SEQUENCE,
    assert_bitwise,
    batch,
    build,
    copied,
    decided,
    described,
    device,
    differences,
    mixed,
    outcome,
    plan_for,
)
from tests.support.thinning import thinned

NAME = "llama-tied"
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


def prepared(
    spill: Path,
    *,
    micro_batches: int = 2,
    updates: Updates = "in backward",
    tier: TierName = "disk",
    units: Sequence[UnitPlan] | None = None,
    lane_delay: Callable[[], float] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(NAME)
    if units is None:
        units = mixed(described(NAME), random.Random(5), tier, stepped=False)
        units = (replace(units[0], states=Offload(tier=tier)), *units[1:])
    plan = with_settings(plan_for(model, units), micro_batches=micro_batches, updates=updates)
    return prepare(model, plan, optimizer=ADAMW, spill_directory=spill, lane_delay=lane_delay)


def backward(model: nn.Module, number: int) -> Tensor:
    loss = loss_of(call_model(model, batch(NAME, number)))
    loss.backward()
    return loss.detach()


def assert_same(loop: Loop, spill: Path, **plan: Any) -> None:
    """The loop, plainly and under a plan."""
    reference = build(NAME)
    plainly = ADAMW(reference.parameters())
    expected = outcome(reference, plainly, loop(reference, plainly))
    model, optimizer = prepared(spill, **plan)
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)


@every_device
@pytest.mark.parametrize(
    ("updates", "tier"), thinned(["in backward", "after backward"], ["disk", "host"], every=2)
)
def test_evaluation_and_checkpoints_between_micro_batches_change_nothing(
    tier: TierName, updates: Updates, tmp_path: Path
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(6):
            seen.append(backward(model, number))
            if number % 2 == 0 or updates == "after backward":
                with torch.no_grad():
                    seen.append(loss_of(call_model(model, batch(NAME, 100 + number))))
                seen += copied(list(model.state_dict().values()))
                optimizer.state_dict()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    assert_same(loop, tmp_path, tier=tier, updates=updates)


@every_device
@pytest.mark.parametrize(
    ("drop", "updates", "tier"),
    thinned(
        ["optimizer.zero_grad", "model.zero_grad"],
        ["in backward", "after backward"],
        ["disk", "host"],
        every=2,
    ),
)
def test_dropped_micro_batches_change_nothing(
    tier: TierName, updates: Updates, drop: str, tmp_path: Path
) -> None:
    """`zero_grad` gives a sum up, and the next micro-batch is a step's first."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(2):
            backward(model, 50 + number)
            (optimizer if drop == "optimizer.zero_grad" else model).zero_grad()
            seen += [backward(model, 2 * number), backward(model, 2 * number + 1)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_same(loop, tmp_path, tier=tier, updates=updates)


def slow_additions() -> float:
    """Seconds before each item of a lane: gradients arrive long before those before are added."""
    return 0.01 if threading.current_thread().name.startswith("protrain update") else 0


def test_gradients_wait_for_a_free_buffer_before_they_arrive_to_be_added(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen = [backward(model, 0), backward(model, 1)]
        optimizer.step()
        return seen

    units = decided(described(NAME), Keep(), Offload(tier="host"))
    assert_same(loop, tmp_path, units=units, lane_delay=slow_additions)


class InterruptedBlockError(Exception):
    pass


def interrupt(*_: object) -> None:
    raise InterruptedBlockError


@every_device
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("updates", ["in backward", "after backward"])
def test_an_exception_in_forward_costs_that_micro_batch_alone(
    tier: TierName, updates: Updates, tmp_path: Path
) -> None:
    """Sums of the micro-batches before it stay."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(4):
            if number % 2:
                block = model.get_submodule("model.layers.2.mlp")
                handle = block.register_forward_pre_hook(interrupt)
                with pytest.raises(InterruptedBlockError):
                    backward(model, number)
                handle.remove()
            seen.append(backward(model, number))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    assert_same(loop, tmp_path, tier=tier, updates=updates)


@every_device
@pytest.mark.parametrize(("micro_batches", "tier"), thinned([1, 2], ["disk", "host"], every=2))
def test_an_exception_in_backward_costs_that_step_alone_where_updates_come_after(
    tier: TierName, micro_batches: int, tmp_path: Path
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(3):
            handle = model.get_submodule("model.layers.1.mlp").register_full_backward_hook(
                interrupt
            )
            loss = loss_of(call_model(model, batch(NAME, number)))
            with pytest.raises(InterruptedBlockError):
                loss.backward()
            handle.remove()
            optimizer.zero_grad()
            seen += [backward(model, number + n) for n in range(micro_batches)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_same(loop, tmp_path, tier=tier, updates="after backward", micro_batches=micro_batches)


@every_device
@pytest.mark.parametrize(("count", "tier"), thinned([1, 3], ["disk", "host"], every=2))
def test_any_number_of_micro_batches_adds_up_where_updates_come_after(
    tier: TierName, count: int, tmp_path: Path
) -> None:
    """As an epoch's last step, which has fewer."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen = []
        for step in range(3):
            seen += [backward(model, 10 * step + number) for number in range(count)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert_same(loop, tmp_path, tier=tier, updates="after backward")


@every_device
def test_sums_that_are_clipped_between_micro_batches_are_those_of_plain_pytorch(
    tmp_path: Path,
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen = []
        for number in range(6):
            seen.append(backward(model, number))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    units = decided(described(NAME), Keep(), Offload(tier="host"))
    assert_same(loop, tmp_path, units=units, updates="after backward")


@every_device
def test_a_step_after_fewer_micro_batches_than_planned_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model, optimizer = prepared(tmp_path, micro_batches=4)
    before = copied(model.state_dict())
    backward(model, 0)
    backward(model, 1)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert_says(caught.value)
    assert list(differences(model.state_dict(), before, "parameters")) == []
    backward(model, 2)
    backward(model, 3)
    optimizer.step()


def test_more_micro_batches_than_planned_are_refused(tmp_path: Path, assert_says: Speaker) -> None:
    model, optimizer = prepared(tmp_path)
    backward(model, 0)
    backward(model, 1)
    with pytest.raises(RuntimeError) as caught:
        backward(model, 2)
    assert_says(caught.value)
    optimizer.step()


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_a_second_backward_without_room_for_its_gradients_is_refused(
    tier: TierName,
    tmp_path: Path,
    assert_says: Speaker,
) -> None:
    model, optimizer = prepared(tmp_path, micro_batches=1, updates="after backward", tier=tier)
    backward(model, 0)
    with pytest.raises(RuntimeError) as caught:
        backward(model, 1)
    assert_says(caught.value)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)


@every_device
def test_a_backward_through_another_forward_than_the_last_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model, optimizer = prepared(tmp_path, micro_batches=1)
    first = loss_of(call_model(model, batch(NAME, 0)))
    second = loss_of(call_model(model, batch(NAME, 1)))
    with pytest.raises(RuntimeError) as caught:
        first.backward()
    assert_says(caught.value)
    second.backward()
    optimizer.step()


def test_a_second_backward_through_one_forward_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    units = decided(described(NAME), Keep(), Offload(tier="disk"))
    model, optimizer = prepared(tmp_path, micro_batches=1, units=units)
    loss = loss_of(call_model(model, batch(NAME, 0)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert_says(caught.value)
    optimizer.step()


@every_device
@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_restore_gives_waiting_gradients_back(
    tier: TierName, micro_batches: int, tmp_path: Path
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen = [backward(model, 0)]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if "_protrain_prepared" in model.__dict__:
            restore(model)
        optimizer.step()
        return seen

    assert_same(loop, tmp_path, tier=tier, updates="after backward", micro_batches=micro_batches)


@every_device
def test_a_smaller_batch_trains_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    model = build(NAME)
    plan = plan_for(model, mixed(described(NAME), random.Random(5), "disk", stepped=False))
    plan = replace(plan, workload=replace(plan.workload, model_config="{}"))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    for sizes in [(BATCH, SEQUENCE), (1, SEQUENCE), (BATCH, 8)]:
        tokens = torch.zeros(sizes, dtype=torch.int64, device=device())
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for sizes in [(BATCH + 1, 8), (1, SEQUENCE + 1)]:
        tokens = torch.zeros(sizes, dtype=torch.int64, device=device())
        with pytest.raises(RuntimeError) as caught:
            model(input_ids=tokens, labels=tokens)
        assert str(caught.value) == (
            f"the batch is {sizes[0]} x {sizes[1]} tokens, and the plan was made for at most"
            f" {BATCH} x {SEQUENCE}: it would take more memory than planned. Profile and plan the"
            " largest batch"
        )
        with torch.no_grad():
            model(input_ids=tokens)
