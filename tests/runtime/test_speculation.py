"""Updates that run ahead of the norm: adopted where gradients are as they were, else done again."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.errors import ProtrainError
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.program.program import Move
from protrain_plan.records.plan import Offload, Persistent, Plan, Schedule
from protrain_runtime import full_parameters, prepare
from protrain_runtime.engine.moves import Moves
from tests.support.runtime_cases import (
    ADAMW,
    Factory,
    assert_bitwise,
    batch,
    build,
    described,
    offloads,
    outcome,
    plan_for,
    speculative,
)
from tests.support.training_rows import OPTIMIZERS
from tests.support.thinning import thinned

NAME = "llama-tied"
STEPS = 4
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


def made_plan(model: nn.Module, tier: str = "disk", *, overlap: bool = True) -> Plan:
    """Every third unit's states on the device, those of the others updated speculatively."""
    ways = [one for one in offloads(tier) if one.staged]
    places = itertools.cycle([Persistent(), *ways])
    schedule = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
    units = [replace(u, states=next(places), schedule=schedule) for u in described(NAME)]
    plan = replace(plan_for(model, tuple(units)), updates="after backward", overlap_steps=overlap)
    return speculative(plan)


def backward(model: nn.Module, number: int) -> Tensor:
    loss = loss_of(call_model(model, batch(NAME, number)))
    loss.backward()
    return loss.detach()


def clipped_at(norms: list[float]) -> Loop:
    """Steps with a norm each; 0: none."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number, norm in enumerate(norms):
            seen.append(backward(model, number))
            if norm:
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), norm))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return loop


def assert_same(
    loop: Loop,
    spill: Path,
    tier: str = "disk",
    *,
    factory: Factory = ADAMW,
    overlap: bool = True,
    redone: list[bool] | None = None,
) -> None:
    """The loop under the plan, bitwise as without; and by step whether updates were done again."""
    reference = build(NAME)
    plainly = factory(reference.parameters())
    expected = outcome(reference, plainly, loop(reference, plainly))
    model = build(NAME)
    plan = made_plan(model, tier, overlap=overlap)
    model, optimizer = prepare(model, plan, optimizer=factory, spill_directory=spill)
    engine = optimizer._engine  # type: ignore[attr-defined]
    steps: list[bool] = []
    holds = engine._holds

    def told() -> bool:
        steps.append(not holds())
        return not steps[-1]

    engine._holds = told
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)
    assert redone is None or steps == redone


@pytest.mark.parametrize(
    ("tier", "overlap", "name"),
    thinned(["disk", "host"], [True, False], sorted(OPTIMIZERS), every=3),
)
def test_steps_that_are_clipped_and_others_match_plain_torch_bitwise(
    tier: str, overlap: bool, name: str, tmp_path: Path
) -> None:
    assert_same(
        clipped_at([1e6, 0.01, 0.02, 0, 1e6, 0.01]),
        tmp_path,
        tier,
        factory=OPTIMIZERS[name],
        overlap=overlap,
        redone=[False, True, True, False, False, True],
    )
