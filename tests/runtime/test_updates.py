"""Accumulated, clipped, master-weight and skipped updates equal plain PyTorch's, bit by bit."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore, with_master_weights
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    Swap,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import Precision
from tests.support.runtime_cases import (
    ADAMW,
    Outcome,
    assert_bitwise,
    batch,
    build,
    copied,
    decided,
    decision_name,
    described,
    differences,
    mixed,
    outcome,
    plan_for,
)
from tests.support.thinning import thinned

NAME = "llama-tied"
NUM_STEPS = 3
CLIP_NORM = 0.05  # below every norm here, so that every step is scaled


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a loop trains: micro-batches per step, clipping, precision."""

    micro_batches: int = 1
    clips: bool = False
    precision: Precision = "pure"
    dtype: torch.dtype = torch.float32

    @property
    def updates(self) -> Updates:
        return "after backward" if self.clips else "in backward"


PRECISIONS: tuple[tuple[str, Precision, torch.dtype], ...] = (
    ("float32", "pure", torch.float32),
    ("bfloat16", "pure", torch.bfloat16),
    ("master", "master", torch.bfloat16),
)
KINDS = {
    f"{count}-{'clip' if clips else 'no clip'}-{label}": Kind(
        micro_batches=count, clips=clips, precision=precision, dtype=dtype
    )
    for count, clips, (label, precision, dtype) in itertools.product(
        (1, 2, 3),
        (False, True),
        PRECISIONS,
    )
}


def delays(seed: int) -> Callable[[], float]:
    """Up to two milliseconds before every transfer and update."""
    rng = random.Random(seed)
    return lambda: rng.random() * 0.002


def run_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: Kind,
    *,
    num_steps: int = NUM_STEPS,
    first: int = 0,
) -> list[Tensor]:
    """The loop that a user writes, from batch `first`; losses, and norms where it clips."""
    torch.manual_seed(1)
    seen: list[Tensor] = []
    numbers = itertools.count(first)
    for _ in range(num_steps):
        for _ in range(kind.micro_batches):
            loss = loss_of(call_model(model, batch(NAME, next(numbers))))
            (loss / kind.micro_batches).backward()
            seen.append(loss.detach())
        if kind.clips:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return seen


class CopyingOptimizer(torch.optim.Optimizer):
    """fp32 copies of all parameters, one optimizer over them, and copies back: the oracle."""

    def __init__(self, model: nn.Module) -> None:
        self.own = list(model.parameters())
        self.copies = [nn.Parameter(parameter.detach().float()) for parameter in self.own]
        self.inner = ADAMW(self.copies)
        super().__init__(self.own, self.inner.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter, copy in zip(self.own, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for parameter, copy in zip(self.own, self.copies, strict=True):
                parameter.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """In the layout of optimizers with master weights."""
        state = self.inner.state_dict()
        for number, copy in enumerate(self.copies):
            if number in state["state"]:
                state["state"][number]["master"] = copy.detach()
        return state


@cache
def expected(kind: Kind) -> Outcome:
    """What plain PyTorch computes; with master weights, by a loop of this test's own."""
    model = build(NAME).to(kind.dtype)
    masters = kind.precision == "master"
    optimizer = CopyingOptimizer(model) if masters else ADAMW(model.parameters())
    return outcome(model, optimizer, run_steps(model, optimizer, kind))


def as_kind(plan: Plan, kind: Kind) -> Plan:
    return replace(
        plan,
        workload=replace(plan.workload, precision=kind.precision),
        settings=replace(plan.settings, updates=kind.updates, micro_batches=kind.micro_batches),
    )


def prepared(
    kind: Kind,
    units: tuple[UnitPlan, ...],
    spill: Path,
    *,
    seed: int | None = None,
    piece_bytes: int = 20_000,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(NAME).to(kind.dtype)
    return prepare(
        model,
        as_kind(plan_for(model, units, piece_bytes=piece_bytes), kind),
        optimizer=ADAMW,
        spill_directory=spill,
        lane_delay=None if seed is None else delays(seed),
    )


def assert_trains_bitwise(
    kind: Kind,
    units: tuple[UnitPlan, ...],
    spill: Path,
    *,
    seed: int | None = None,
    piece_bytes: int = 20_000,
) -> None:
    model, optimizer = prepared(kind, units, spill, seed=seed, piece_bytes=piece_bytes)
    found = outcome(model, optimizer, run_steps(model, optimizer, kind))
    assert_bitwise(found, expected(kind))
    assert restore(model) is model
    assert list(differences(model.state_dict(), expected(kind).parameters, "restored")) == []
    assert list(differences(optimizer.state_dict(), expected(kind).optimizer, "restored")) == []
    assert list(spill.iterdir()) == []


# --- every kind of step, with every placement -----------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "states"),
    thinned(
        tuple(KINDS),
        [Persistent(), Offload(tier="disk"), Offload(tier="disk", keep_gathered=True)],
        every=6,
    ),
    ids=decision_name,
)
def test_every_kind_of_step_matches_plain_torch_bitwise(
    kind: str, states: Placement, tmp_path: Path
) -> None:
    units = decided(described(NAME), Swap(tier="disk"), states)
    assert_trains_bitwise(KINDS[kind], units, tmp_path)


@pytest.mark.parametrize("kind", thinned(tuple(KINDS), every=6))
def test_every_kind_of_step_on_the_host_tier_matches_plain_torch_bitwise(
    kind: str, tmp_path: Path
) -> None:
    """As on a machine with a GPU: gradients are spilled, added and updated in host memory."""
    units = decided(described(NAME), Recompute(), Offload(tier="host"))
    assert_trains_bitwise(KINDS[kind], units, tmp_path, seed=0)


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS.values())),
    tiers=st.sampled_from([("disk",), ("host",), ("disk", "host")]),
    seed=st.integers(0, 1 << 16),
    piece_bytes=st.sampled_from([3_000, 20_000, 10**9]),
)
def test_any_plan_of_any_step_with_slow_lanes_matches_plain_torch_bitwise(
    kind: Kind, tiers: tuple[TierName, ...], seed: int, piece_bytes: int
) -> None:
    stepped = kind.updates == "in backward" and kind.micro_batches == 1
    units = mixed(described(NAME), random.Random(seed), *tiers, stepped=stepped)
    with TemporaryDirectory() as folder:
        assert_trains_bitwise(kind, units, Path(folder), seed=seed, piece_bytes=piece_bytes)


def test_one_line_gives_plain_training_master_weights() -> None:
    kind = KINDS["1-no clip-master"]
    model = build(NAME).to(kind.dtype)
    optimizer = with_master_weights(ADAMW)(model.parameters())
    found = outcome(model, optimizer, run_steps(model, optimizer, kind))
    assert_bitwise(found, expected(kind))


@pytest.mark.parametrize(("first", "second"), [("plan", "plain"), ("plain", "plan")])
def test_master_weights_go_through_checkpoints_bitwise(
    first: str, second: str, tmp_path: Path
) -> None:
    """A master has bits that its parameter lacks: they are loaded, not made from the parameter."""
    kind = KINDS["1-no clip-master"]

    def made(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        if how == "plan":
            return prepared(kind, mixed(described(NAME), random.Random(3), "disk"), tmp_path)
        model = build(NAME).to(kind.dtype)
        return model, with_master_weights(ADAMW)(model.parameters())

    model, optimizer = made(first)
    losses = run_steps(model, optimizer, kind, num_steps=2)
    parameters, states = copied(model.state_dict()), copied(optimizer.state_dict())
    assert {state["master"].dtype for state in states["state"].values()} == {torch.float32}
    model, optimizer = made(second)
    model.load_state_dict(parameters)
    optimizer.load_state_dict(states)
    losses += run_steps(model, optimizer, kind, num_steps=1, first=2)
    assert_bitwise(outcome(model, optimizer, losses), expected(kind))
