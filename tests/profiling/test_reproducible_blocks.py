"""Blocks that draw random numbers of their own, or cannot run twice with the same result.

The oracle is plain PyTorch, bit by bit.
"""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protrain_plan.planning.model.options import parse_pin, pinned_options
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_runtime import restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import Profile
from tests.support.held_models import Block, Stack, batch, made, stack_of
from tests.support.held_training import NUM_STEPS, four_plans, profiled, takable, trained
from tests.support.runtime_cases import differences, outcome, profiled_here
from tests.support.thinning import thinned

# --- random numbers -------------------------------------------------------------------------------


class PythonDrops(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return super().inner(hidden) * random.choice([0.5, 1.0, 2.0])


class NumpyDrops(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return super().inner(hidden) * float(np.random.rand())


class OwnGenerators(Block):
    """One of each kind, in an attribute, a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.python = random.Random(1)
        self.numpy: list[Any] = [np.random.default_rng(2), np.random.RandomState(3)]
        self.others = {"torch": (torch.Generator().manual_seed(4),)}

    def inner(self, hidden: Tensor) -> Tensor:
        scale = self.python.random() + self.numpy[0].random() + self.numpy[1].randn()
        mask = torch.rand(hidden.shape[-1], generator=self.others["torch"][0])
        out: Tensor = super().inner(hidden * mask) * scale
        return out


# --- forwards that cannot run twice ---------------------------------------------------------------


class Counting(Block):
    calls = 0

    def inner(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().inner(hidden) / self.calls


class Listing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"calls": []}

    def inner(self, hidden: Tensor) -> Tensor:
        self.seen["calls"] = [*self.seen["calls"][-2:], len(self.seen["calls"])]
        return super().inner(hidden) / len(self.seen["calls"])


class Summing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())  # no buffer

    def inner(self, hidden: Tensor) -> Tensor:
        self.total += 1
        return super().inner(hidden) / self.total.item()


class WritesInput(Block):
    """As models do that save memory by hand; the caller gives it a copy."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(0.5).add_(0.1))


_CALLS = [0]


class ReadsGlobal(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        _CALLS[0] += 1
        return super().inner(hidden) * (1 + _CALLS[0] % 3)


class ReadsEntropy(Block):
    def inner(self, hidden: Tensor) -> Tensor:
        return super().inner(hidden) * (1 + int.from_bytes(os.urandom(4), "big"))


class LaterWritten(Stack):
    """The model writes to a block's input after the block has run."""

    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            given = hidden * 1.0
            out = block(given)
            hidden = out + given.detach().mul_(0.5)
        return hidden


class WrittenBlock(Block):
    """Saves nothing of its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(self.inner(hidden.clone()))
        return out


class GivenCopies(Stack):
    def hidden(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden + 0.0)
        return hidden


def _kind(base: type[Stack], block: type[nn.Module]) -> type[Stack]:
    return type(f"{base.__name__}Of{block.__name__}", (base,), {"block": block})


DRAWING = (stack_of(PythonDrops), stack_of(NumpyDrops), stack_of(OwnGenerators))
ONCE: dict[type[Stack], str] = {
    stack_of(Counting): "its forward changes its attribute 'calls'",
    stack_of(Listing): "its forward changes its attribute 'seen'",
    stack_of(Summing): "its forward changes its attribute 'total'",
    _kind(GivenCopies, WritesInput): "its forward writes an input in place",
    _kind(LaterWritten, WrittenBlock): "an input of its forward is written to after it has run",
    stack_of(ReadsGlobal): "its forward gave another result when it ran again on the same inputs",
}


def result_of(kind: type[nn.Module], profile: Profile | None, units: Any, spill: Path) -> Any:
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    _CALLS[0] = 0
    model, optimizer, losses, step = trained(kind, profile, units, spill)
    for _ in range(NUM_STEPS):
        step(lambda _: None)
    drawn = random.random(), float(np.random.rand()), torch.rand(()).item()
    found = outcome(model, optimizer, losses)
    if profile is not None:
        restore(model)
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    return found.losses, parameters, drawn


@pytest.mark.parametrize(
    "kind", thinned([*DRAWING, *ONCE], every=4), ids=lambda kind: kind.__name__
)
def test_training_is_bitwise_under_every_plan(kind: type[nn.Module], tmp_path: Path) -> None:
    expected = result_of(kind, None, (), tmp_path)
    profile = profiled(kind)
    for decisions in four_plans(profile):
        found = result_of(kind, profile, takable(decisions, profile), tmp_path)
        assert list(differences(found, expected, "training")) == []


@pytest.mark.parametrize("kind", DRAWING, ids=lambda kind: kind.__name__)
def test_a_block_that_draws_may_be_recomputed(kind: type[nn.Module]) -> None:
    profile = profiled(kind)
    assert {unit.forms[-1].form for unit in profile.units if unit.kind == "block"} == {"full"}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [*ONCE.items(), (stack_of(ReadsEntropy), list(ONCE.values())[-1])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_block_that_cannot_run_twice_says_why_and_keeps(
    kind: type[nn.Module], reason: str
) -> None:
    profile = profiled(kind)
    blocks = [unit for unit in profile.units if unit.kind == "block"]
    assert {unit.runs_once for unit in blocks} == {reason}
    assert {cost.form for unit in blocks for cost in unit.forms} == {"keep"}
    budgets = Budgets(device=10**12, host=0, disk=10**12)
    problem = Problem.of(profile, budgets, replace(OVERLAPPING, piece_bytes=1 << 20))
    with pytest.raises(ProtrainError) as raised:
        pinned_options(problem.implied, [parse_pin("blocks.1: recompute")])
    assert raised.value.message == f"blocks.1 cannot take 'recompute': {reason}"


def test_ordinary_blocks_run_twice() -> None:
    profile = profiled(Stack)
    assert {unit.runs_once for unit in profile.units} == {""}


# --- a rehearsal that fails -----------------------------------------------------------------------


class Particular(Stack):
    """Looks at all parameters, in every forward, as kernels of one's own do at theirs."""

    def hidden(self, hidden: Tensor) -> Tensor:
        if not all(type(parameter) is nn.Parameter for parameter in self.parameters()):
            raise RuntimeError("parameters have to be parameters")
        return super().hidden(hidden)


def particular() -> tuple[nn.Module, list[Tensor]]:
    """For `protrain profile`."""
    return made(Particular), [batch(0)]


def test_a_model_that_no_plan_can_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ProtrainError) as raised:
        profiled_here(f"{__name__}:particular", tmp_path)
    assert raised.value.message == (
        "the model runs as it is, and not under a plan that moves everything: parameters have to be"
        " parameters"
    )
