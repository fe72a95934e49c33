"""Updates that run ahead of the norm: what the step makes of them, whatever happens in between."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import full_parameters, load, prepare, save
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Persistent, Placement, Plan, Schedule
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import engine_of
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    Factory,
    assert_bitwise,
    batch,
    build,
    copied,
    described,
    offloads,
    outcome,
    plan_for,
    speculative,
)
from tests.support.thinning import thinned
from tests.support.training_rows import OPTIMIZERS

NAME = "llama-tied"
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


def made_plan(model: nn.Module, tier: TierName = "disk", *, overlap: bool = True) -> Plan:
    """Every third unit's states on the device, those of the others updated speculatively."""
    ways: list[Placement] = [Persistent(), *(one for one in offloads(tier) if one.staged)]
    places = itertools.cycle(ways)
    schedule = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
    units = [replace(u, states=next(places), schedule=schedule) for u in described(NAME)]
    plan = plan_for(model, tuple(units), piece_bytes=50_000)
    return speculative(
        replace(
            plan, settings=replace(plan.settings, updates="after backward", overlap_steps=overlap)
        )
    )


def backward(model: nn.Module, number: int) -> Tensor:
    loss = loss_of(call_model(model, batch(NAME, number)))
    loss.backward()
    return loss.detach()


def watched(optimizer: torch.optim.Optimizer) -> list[bool]:
    """By step, once it was: whether what ran ahead was done again."""
    engine = cast(PlannedOptimizer, optimizer)._engine
    assert engine is not None
    steps: list[bool] = []
    begin, again = engine.begin_update, engine._again

    def told(*, same_options: bool) -> None:
        begin(same_options=same_options)
        steps.append(bool(engine._running & again))

    engine.begin_update = told  # type: ignore[method-assign]
    return steps


def assert_same(
    loop: Loop,
    spill: Path,
    tier: TierName = "disk",
    *,
    factory: Factory = ADAMW,
    overlap: bool = True,
) -> list[bool]:
    """The loop under the plan, bitwise as without; by step whether updates were done again."""
    reference = build(NAME)
    plainly = factory(reference.parameters())
    expected = outcome(reference, plainly, loop(reference, plainly))
    model = build(NAME)
    plan = made_plan(model, tier, overlap=overlap)
    model, optimizer = prepare(model, plan, optimizer=factory, spill_directory=spill)
    steps = watched(optimizer)
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)
    return steps


@pytest.mark.parametrize(
    ("tier", "overlap", "name"),
    thinned(["disk", "host"], [True, False], sorted(OPTIMIZERS), every=3),
)
def test_steps_that_are_clipped_and_others_match_plain_torch_bitwise(
    tier: TierName, overlap: bool, name: str, tmp_path: Path
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number, norm in enumerate([1e6, 0.01, 0.02, None, 1e6, 0.01]):
            seen.append(backward(model, number))
            if norm is not None:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), norm))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    steps = assert_same(loop, tmp_path, tier, factory=OPTIMIZERS[name], overlap=overlap)
    assert steps == [False, True, True, False, False, True]


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    with torch.no_grad():
        return [loss_of(call_model(model, batch(NAME, 50)))]


def save_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What is saved are the values before the update, as in plain PyTorch."""
    return [*copied(model.state_dict()).values()]


def write_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    with torch.no_grad(), full_parameters(model, modify=True):
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return []


def load_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = {name: value * 0.9 for name, value in copied(model.state_dict()).items()}
    model.load_state_dict(state)
    return []


def load_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    optimizer.load_state_dict(copied(optimizer.state_dict()))
    return []


def skip_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    optimizer.zero_grad()
    return [backward(model, 60)]


def change_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    optimizer.param_groups[0]["lr"] *= 0.7
    return []


def read_nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return []


BETWEEN: dict[Loop, bool] = {
    read_nothing: False,
    evaluate: False,
    skip_step: False,
    save_states: True,
    write_parameters: True,
    load_parameters: True,
    load_states: True,
    change_rate: True,
}
"""What may come between backward and the step; whether updates are done again then."""


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize("between", BETWEEN, ids=[each.__name__ for each in BETWEEN])
def test_what_comes_before_the_step_counts_as_in_plain_torch_bitwise(
    between: Loop, tier: TierName, tmp_path: Path
) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(3):
            seen.append(backward(model, number))
            if number == 1:
                seen += between(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return seen

    assert assert_same(loop, tmp_path, tier) == [False, BETWEEN[between], False]


def test_frozen_parameters_are_the_same_in_both_copies(tmp_path: Path) -> None:
    """They are loaded once, and read from whichever copy the last update made."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(4):
            if number == 1:
                load_parameters(model, optimizer)
            seen.append(backward(model, number))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def half(model: nn.Module) -> nn.Module:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 2 == 0)
        return model

    reference = half(build(NAME))
    plainly = ADAMW([p for p in reference.parameters() if p.requires_grad])
    expected = outcome(reference, plainly, loop(reference, plainly))
    model = half(build(NAME))
    model, optimizer = prepare(model, made_plan(model), optimizer=ADAMW, spill_directory=tmp_path)
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, *, frozen: bool) -> None:
    """Saved after one update of each copy, and loaded where the other one is current."""

    def built() -> nn.Module:
        model = build(NAME)
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(not frozen or number % 3 != 1)
        return model

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            backward(model, number)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1 if number % 2 else 1e6)
            optimizer.step()
            optimizer.zero_grad()

    def prepared(folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = built()
        (tmp_path / folder).mkdir()
        plan = made_plan(model)
        return prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path / folder)

    reference = built()
    plainly = ADAMW([p for p in reference.parameters() if p.requires_grad])
    trained(reference, plainly, range(5))
    first, optimizer = prepared("first")
    trained(first, optimizer, range(2))
    save(first, optimizer, tmp_path / "saved")
    second, optimizer = prepared("second")
    trained(second, optimizer, range(3))  # other values, in the other copy
    load(second, optimizer, tmp_path / "saved")
    trained(second, optimizer, range(2, 5))
    assert_bitwise(outcome(second, optimizer, []), outcome(reference, plainly, []))


@pytest.mark.parametrize(
    "changes", [{"updates": "in backward"}, {"micro_batches": 2}, {"num_devices": 2}]
)
def test_plans_in_which_updates_cannot_run_ahead_are_refused(
    changes: dict[str, object], assert_says: Speaker, tmp_path: Path
) -> None:
    model = build(NAME)
    plan = with_settings(made_plan(model, overlap=False), **changes)
    before = copied(model.state_dict())
    with pytest.raises(ProtrainError) as caught:
        prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    assert_says(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_that_fails_ahead_of_the_norm_is_given_up(tmp_path: Path) -> None:
    """The states are those before it: training goes on."""
    model = build(NAME)
    plan = made_plan(model)
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    reference = build(NAME)
    plainly = ADAMW(reference.parameters())
    for number in range(4):
        if number == 2:
            hook = next(model.parameters()).register_hook(_fail)
            with pytest.raises(KeyboardInterrupt):
                backward(model, 40)
            hook.remove()
            optimizer.zero_grad()
        for each, its in ((model, optimizer), (reference, plainly)):
            backward(each, number)
            its.step()
            its.zero_grad()
    assert_bitwise(outcome(model, optimizer, []), outcome(reference, plainly, []))


def _fail(gradient: Tensor) -> Tensor:
    raise KeyboardInterrupt


def test_both_copies_are_in_the_store(tmp_path: Path) -> None:
    model = build(NAME)
    plan = made_plan(model)
    model, _ = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    engine = engine_of(model)
    assert engine is not None
    for chunk in engine._offloaded:
        assert chunk.spare is not None and chunk.store is not None
        for part in chunk.slices:
            size = part.num_bytes
            first, second = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
            chunk.store.read(chunk.current.place(part), first)
            chunk.store.read(chunk.spare.place(part), second)
            assert abs(chunk.current.place(part) - chunk.spare.place(part)) >= size
            assert part.trainable or torch.equal(first, second)
