"""Persistent chunks that backward updates: what only they do, and what is refused.

That they train bitwise, in the bytes predicted, is asked with all other placements (test_peaks,
test_parity_matrix).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.simulation.timeline import simulated_seconds
from protrain_runtime import prepare, restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.records.plan import STEPPED, Budgets, Keep, Persistent, Plan
from protrain_runtime.states.stand_ins import ConsumedGradient, hollow, plainly
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import decoder, gpu
from tests.support.runtime_cases import (
    ADAMW,
    Factory,
    attached,
    batch,
    build,
    decided,
    described,
    differences,
    plan_for,
)

NAME = "llama-tied"


def prepared(model: nn.Module, optimizer: Factory = ADAMW, **changes: Any) -> Any:
    plan: Plan = plan_for(model, decided(described(NAME), Keep(), STEPPED))
    return prepare(model, with_settings(plan, **changes), optimizer=optimizer)


def loss_on(model: nn.Module, number: int = 0) -> torch.Tensor:
    return loss_of(call_model(model, batch(NAME, number)))


@every_device
def test_gradients_are_gone_before_those_of_earlier_blocks_come() -> None:
    model = build(NAME)
    model, optimizer = prepared(model)
    blocks = [model.get_submodule(f"model.layers.{number}") for number in range(2)]
    seen: list[bool] = []

    def look(*_: object) -> None:
        # What stands for a gradient has its shape and holds one element.
        seen.append(all(type(p.grad) is ConsumedGradient for p in blocks[1].parameters()))

    first = next(blocks[0].parameters())
    first.register_post_accumulate_grad_hook(look)
    loss_on(model).backward()
    assert seen == [True]
    optimizer.step()


@every_device
def test_stand_ins_are_made_once() -> None:
    """The same objects stand for gradients in every step, and for equal shapes."""
    model, optimizer = prepared(build(NAME))
    seen: list[list[int]] = []
    made: list[int] = []
    for _ in range(3):
        loss_on(model).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        taken = [one for one in gradients if isinstance(one, ConsumedGradient)]
        seen.append([id(one) for one in taken])
        with plainly():
            shapes = {one.shape for one in taken}
        assert len(set(seen[-1])) == len(shapes)
        optimizer.step()
        optimizer.zero_grad()
        made.append(hollow.cache_info().misses)
    assert seen[0] == seen[1] == seen[2] != []
    assert made[0] == made[2]


@every_device
def test_an_updated_parameter_cannot_be_read_before_the_step(assert_says: Speaker) -> None:
    """Plain PyTorch would show the value before the update, in a hook and after backward."""
    model = build(NAME)
    model, optimizer = prepared(model)
    early, late = (
        model.get_submodule(f"model.layers.{number}").get_parameter("mlp.up_proj.weight")
        for number in range(2)
    )
    said: list[str] = []

    def read(*_: object) -> None:
        with pytest.raises(RuntimeError) as caught:
            late.sum()
        said.append(str(caught.value))

    early.register_post_accumulate_grad_hook(read)
    before = late.detach().clone()
    loss_on(model).backward()
    with pytest.raises(RuntimeError) as caught:
        early.sum()
    assert_says([*said, str(caught.value)])
    optimizer.step()
    assert not torch.equal(late, before)


def test_a_backward_that_fails_ends_the_training(assert_says: Speaker) -> None:
    model, optimizer = prepared(build(NAME))
    early = model.get_submodule("model.layers.0").get_parameter("mlp.up_proj.weight")

    def fail(*_: object) -> None:
        raise ValueError("a hook of the user's")

    handle = early.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="a hook of the user's"):
        loss_on(model).backward()
    handle.remove()
    for use in (lambda: loss_on(model), optimizer.step, lambda: restore(model)):
        with pytest.raises(RuntimeError) as caught:
            use()
        assert_says(caught.value)
    # What there is can be looked at.
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


class Counting(torch.optim.SGD):
    """Takes smaller steps each time: with a step on each parameter it is another training."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * 0.5**self.calls
        return super().step(closure)


class Normed(torch.optim.SGD):
    """Scales every gradient by the norm of all: one parameter's step depends on the others'."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


@pytest.mark.parametrize("kind", [Counting, Normed])
def test_optimizers_that_look_at_several_parameters_are_refused(
    kind: type[torch.optim.SGD], assert_says: Speaker
) -> None:
    model = build(NAME)
    before = attached(model)
    with pytest.raises(ProtrainError) as caught:
        prepared(model, partial(kind, lr=0.1))
    assert_says(caught.value)
    assert attached(model) == before


@pytest.mark.parametrize("changes", [{"updates": "after backward"}, {"micro_batches": 2}])
def test_plans_whose_gradients_are_needed_later_are_refused(
    changes: dict[str, Any], assert_says: Speaker
) -> None:
    model = build(NAME)
    before = attached(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ProtrainError) as caught:
        prepared(model, **changes)
    assert_says(caught.value)
    assert attached(model) == before
    assert list(differences(model.state_dict(), expected, "the model")) == []


def test_a_parameter_in_no_group_is_refused(assert_says: Speaker) -> None:
    """Plain PyTorch leaves its gradient, which this plan would use up."""
    model = build(NAME)
    before = attached(model)
    plan = plan_for(model, decided(described(NAME), Keep(), STEPPED))
    left_out = model.get_submodule("model.layers.1").get_parameter("mlp.up_proj.weight")
    groups = [{"params": [p for p in model.parameters() if p is not left_out]}]
    with pytest.raises(ProtrainError) as caught:
        prepare(model, plan, optimizer=ADAMW, param_groups=groups)
    assert_says(caught.value)
    assert attached(model) == before


def test_parameters_of_one_storage_in_several_units_are_refused(assert_says: Speaker) -> None:
    """The update of one would change what the other's backward reads."""
    model = build(NAME)
    weights = [
        model.get_submodule(f"model.layers.{number}").get_parameter("mlp.up_proj.weight")
        for number in range(2)
    ]
    together = torch.stack([weight.detach() for weight in weights])
    for weight, values in zip(weights, together, strict=True):
        weight.data = values
    with pytest.raises(ProtrainError) as caught:
        prepared(model)
    assert_says(caught.value)


def test_the_planner_updates_in_backward_where_gradients_have_no_room_alone(
    assert_says: Speaker,
) -> None:
    """What it saves is the room that all gradients would take when the step begins."""
    profile = decoder(gpu(), blocks=6)
    nothing_below = replace(profile, hardware=replace(profile.hardware, tiers=()))

    def solved(device: int, *pins: str) -> Solved | Infeasible:
        budgets = Budgets(device=device, host=0, disk=0)
        found = Problem.of(nothing_below, budgets, pins=[parse_pin(pin) for pin in pins])
        return solve_problem(found, budgets)

    at_the_step, anyhow = solved(0, "*: persistent"), solved(0)
    assert isinstance(at_the_step, Infeasible)
    assert isinstance(anyhow, Infeasible)
    gradients = sum(unit.gradient_bytes for unit in profile.units)
    saved = at_the_step.shortfall_bytes - anyhow.shortfall_bytes
    assert gradients / 2 < saved <= gradients
    found = solved(anyhow.shortfall_bytes)
    assert isinstance(found, Solved)
    assert any(unit.states == STEPPED for unit in found.plan.units)
    # Nor where they have: one unit more at the step would be too many, or too slow.
    between = solved((anyhow.shortfall_bytes + at_the_step.shortfall_bytes) // 2)
    assert isinstance(between, Solved)
    stepped = [unit.states == STEPPED for unit in between.plan.units]
    assert 0 < sum(stepped) < len(stepped)
    units = list(between.plan.units)
    units[stepped.index(True)] = replace(units[stepped.index(True)], states=Persistent())
    program = program_of(replace(between.plan, units=tuple(units)), nothing_below)
    peak = peak_bytes(program).on_device
    slower = simulated_seconds(program)[0] > between.plan.prediction.step_seconds
    assert peak > between.plan.budgets.device or slower
    clipping = Problem.of(
        profile,
        Budgets(device=10**12, host=0, disk=0),
        pins=[parse_pin("layers.0: persistent and update in backward")],
        settings=replace(OVERLAPPING, updates="after backward"),
    )
    with pytest.raises(ProtrainError) as caught:
        assert clipping.options
    assert_says(caught.value)
