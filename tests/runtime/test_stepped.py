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

from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_runtime import restore
from protrain_runtime.contract.records.plan import KEEP, OPTIMIZER_IN_BACKWARD, Budgets
from protrain_runtime.states.stand_ins import ConsumedGradient, hollow, plainly
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.planning_cases import decoder, gpu
from tests.support.runtime_cases import decided
from tests.support.scenario import Run, Scenario, refusal


def tried(**options: Any) -> Scenario:
    return Scenario(
        units=partial(decided, activations=KEEP, states=OPTIMIZER_IN_BACKWARD), **options
    )


def start() -> Run:
    asked = tried()
    return asked.prepared(asked.subject.build(), None)


def up(model: nn.Module, layer: int) -> nn.Parameter:
    return model.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight")


@pytest.mark.nightly("emulated")
@every_device
def test_gradients_are_gone_before_those_of_earlier_blocks_come() -> None:
    run = start()
    blocks = [run.model.get_submodule(f"model.layers.{number}") for number in range(2)]
    seen: list[bool] = []

    def look(*_: object) -> None:
        # What stands for a gradient has its shape and holds one element.
        seen.append(all(type(p.grad) is ConsumedGradient for p in blocks[1].parameters()))

    next(blocks[0].parameters()).register_post_accumulate_grad_hook(look)
    run.step(0)
    assert seen == [True]


@every_device
def test_stand_ins_are_made_once() -> None:
    """The same objects stand for gradients in every step, and for equal shapes."""
    run, seen, made = start(), list[list[int]](), list[int]()
    for _ in range(3):
        run.backward(0)
        gradients = [parameter.grad for parameter in run.model.parameters()]
        taken = [one for one in gradients if isinstance(one, ConsumedGradient)]
        seen.append([id(one) for one in taken])
        with plainly():
            shapes = {one.shape for one in taken}
        assert len(set(seen[-1])) == len(shapes)
        run.update()
        made.append(hollow.cache_info().misses)
    assert seen[0] == seen[1] == seen[2] != []
    assert made[0] == made[2]


@every_device
def test_an_updated_parameter_cannot_be_read_before_the_step(assert_says: Speaker) -> None:
    """Plain PyTorch would show the value before the update, in a hook and after backward."""
    run = start()
    early, late = (up(run.model, number) for number in range(2))
    said: list[str] = []
    early.register_post_accumulate_grad_hook(lambda _: said.append(str(refusal(late.sum))))
    before = late.detach().clone()
    run.backward(0)
    assert_says([*said, str(refusal(early.sum))])
    run.optimizer.step()
    assert not torch.equal(late, before)


def test_a_backward_that_fails_ends_the_training(assert_says: Speaker) -> None:
    run = start()

    def fail(*_: object) -> None:
        raise ValueError("a hook of the user's")

    handle = up(run.model, 0).register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="a hook of the user's"):
        run.backward(0)
    handle.remove()
    for use in (partial(run.loss, 0), run.optimizer.step, partial(restore, run.model)):
        assert_says(refusal(use))
    # What there is can be looked at.
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters())


def test_the_planner_updates_in_backward_where_gradients_have_no_room_alone(
    assert_says: Speaker,
) -> None:
    """It saves the room that all gradients would take when the step begins."""
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
    assert any(unit.states == OPTIMIZER_IN_BACKWARD for unit in found.plan.units)
    clipping = Problem.of(
        profile,
        Budgets(device=10**12, host=0, disk=0),
        pins=[parse_pin("layers.0: persistent and update in backward")],
        settings=replace(OVERLAPPING, updates="after backward"),
    )
    assert_says.refused(lambda: clipping.options)
