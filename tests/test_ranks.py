"""Training on several ranks equals DistributedDataParallel on the same batches."""

import itertools
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.records.plan import (
    Buffer,
    Keep,
    Offload,
    Persistent,
    Placement,
    Plan,
    Recompute,
    Schedule,
    StateTier,
    Swap,
    UnitPlan,
)
from protrain_runtime import prepare, restore
from tests.ranks_cases import run_ranks
from tests.runtime_cases import (
    ADAMW,
    FRACTIONAL,
    Factory,
    Outcome,
    activation_decisions,
    batch,
    build,
    copied,
    decided,
    described,
    differences,
    plan_for,
    random_schedule,
)

STEPS = 5
TIERS: tuple[StateTier, ...] = ("device", "host", "disk")
PLACES: tuple[Placement, ...] = (
    Persistent(),
    *(Offload(tier=tier) for tier in TIERS),
    *(Buffer(tier=tier) for tier in TIERS),
)


@dataclass(frozen=True)
class Loop:
    """What a training script does besides forward, backward and step."""

    name: str = "llama"
    factory: Factory = ADAMW
    micro_batches: int = 1
    clips: bool = False
    double: bool = False  # everything in float64


def built(loop: Loop, seed: int = 0) -> nn.Module:
    model = build(loop.name, seed=seed)
    return model.double() if loop.double else model


def train(
    loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int
) -> list[Tensor]:
    """Losses and norms of a plain loop on this rank's batches."""
    torch.manual_seed(1 + rank)
    seen: list[Tensor] = []
    numbers = itertools.count(rank, count)
    for _ in range(STEPS):
        for number in range(loop.micro_batches):
            ddp = model if isinstance(model, DistributedDataParallel) else None
            waits = number + 1 < loop.micro_batches
            with ddp.no_sync() if ddp is not None and waits else nullcontext():
                loss = loss_of(call_model(model, batch(loop.name, next(numbers))))
                (loss / loop.micro_batches).backward()
            seen.append(loss.detach())
        if loop.clips:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).detach())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def ddp(rank: int, count: int, loop: Loop) -> Outcome:
    """What DistributedDataParallel computes."""
    model = DistributedDataParallel(built(loop))
    optimizer = loop.factory(list(model.parameters()))
    losses = train(loop, model, optimizer, rank, count)
    return Outcome(losses, copied(model.module.state_dict()), copied(optimizer.state_dict()))


def planned(rank: int, count: int, loop: Loop, plan: Plan, spill: Path) -> Outcome:
    # Rank 0's weights are everybody's, as with DistributedDataParallel.
    model = built(loop, seed=0 if rank == 0 else 5)
    spill = spill / str(rank)
    spill.mkdir(exist_ok=True)
    rng = random.Random(rank)
    model, optimizer = prepare(
        model,
        plan,
        optimizer=loop.factory,
        spill_directory=spill,
        wait_limit_s=60,
        lane_delay=lambda: rng.random() * 0.0005,
    )
    losses = train(loop, model, optimizer, rank, count)
    found = Outcome(losses, copied(model.state_dict()), copied(optimizer.state_dict()))
    restore(model)
    assert list(differences(copied(model.state_dict()), found.parameters, "restored")) == []
    return found


def compared(
    rank: int, count: int, loop: Loop, plans: Sequence[Plan], spill: Path, tolerance: float
) -> list[list[str]]:
    """By plan, where its training differs from DistributedDataParallel's."""
    expected = ddp(rank, count, loop)
    return [
        list(differing(planned(rank, count, loop, plan, spill), expected, tolerance))
        for plan in plans
    ]


def differing(found: Outcome, expected: Outcome, tolerance: float) -> list[str]:
    """Bits where `tolerance` is 0, else numbers further apart, relative to the largest."""
    trees = [
        (found.losses, expected.losses),
        (found.parameters, expected.parameters),
        (found.optimizer, expected.optimizer),
    ]
    if not tolerance:
        return [line for one, other in trees for line in differences(one, other, "")]
    pairs = [pair for one, other in trees for pair in zip(leaves(one), leaves(other), strict=True)]
    return [
        f"{(one - other).abs().max().item():.3g} of {other.abs().max().item():.3g}"
        for one, other in pairs
        if (one - other).abs().max() > tolerance * other.abs().max()
    ]


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.cpu()]  # states may be on the host
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree, key=str)]
    return [leaf for each in tree for leaf in leaves(each)] if isinstance(tree, list) else []


def several(loop: Loop, units: Sequence[UnitPlan], count: int, **options: Any) -> Plan:
    updates = "after backward" if loop.clips else "in backward"
    plan = plan_for(built(loop), units)
    own = {"num_devices": count, "updates": updates, "micro_batches": loop.micro_batches}
    return replace(plan, **{**own, **options})


def in_turn(name: str, *places: Placement) -> tuple[UnitPlan, ...]:
    """The placements, unit by unit."""
    schedule = Schedule(forward_lead=1, backward_lead=2, update_drain=1)
    return tuple(
        replace(unit, states=place, schedule=schedule)
        for unit, place in zip(described(name), itertools.cycle(places), strict=False)
    )


def mixed(name: str, seed: int) -> tuple[UnitPlan, ...]:
    """Decisions at random for every unit, on any of the tiers."""
    rng = random.Random(seed)
    return tuple(
        replace(
            unit,
            activations=rng.choice(activation_decisions(rng.choice(("host", "disk"))))
            if unit.kind == "block"
            else Keep(),
            states=rng.choice(PLACES),
            schedule=random_schedule(rng),
        )
        for unit in described(name)
    )


def assert_as_ddp(
    count: int, loop: Loop, plans: Sequence[Plan], folder: Path, *, tolerance: float = 0.0
) -> None:
    for found in run_ranks(compared, count, folder, loop, plans, folder, tolerance):
        assert found == [[]] * len(plans)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["llama-tied", slow("llama"), slow("gpt2"), slow("functional")])
def test_two_ranks_match_ddp_bitwise_in_every_placement(name: str, tmp_path: Path) -> None:
    """A sum of two numbers does not depend on their order."""
    loop, units = Loop(name), described(name)
    plans = [several(loop, decided(units, Keep(), place), 2) for place in PLACES]
    assert_as_ddp(2, loop, plans, tmp_path)


@pytest.mark.parametrize("name", [slow("gpt2"), slow("llama-tied")])
def test_two_ranks_match_ddp_bitwise_under_mixed_plans(name: str, tmp_path: Path) -> None:
    """Recomputed and swapped units, cut transfers, slow lanes."""
    loop = Loop(name)
    cut = [
        decided(described(name), Swap(tier="disk"), Offload(tier=tier), schedule)
        for tier in TIERS
        for schedule in FRACTIONAL[:1]
    ]
    plans = [several(loop, units, 2) for units in (*cut, *(mixed(name, n) for n in range(3)))]
    assert_as_ddp(2, loop, plans, tmp_path)


@pytest.mark.slow
def test_two_ranks_add_micro_batches_up_as_ddp_does_bitwise(tmp_path: Path) -> None:
    loop = Loop("gpt2", micro_batches=3)
    plans = [several(loop, in_turn(loop.name, *PLACES), 2), several(loop, mixed("gpt2", 7), 2)]
    plans.append(replace(plans[0], updates="after backward"))
    assert_as_ddp(2, loop, plans, tmp_path)


SGD: Factory = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("factory", [SGD, slow(partial(torch.optim.Adam, lr=1e-3, foreach=False))])
def test_two_ranks_match_ddp_bitwise_with_other_optimizers(
    factory: Factory, tmp_path: Path
) -> None:
    loop = Loop(factory=factory)
    assert_as_ddp(2, loop, [several(loop, in_turn(loop.name, *PLACES), 2)], tmp_path)


ROUNDING = 1e-11
"""In float64, of what five steps make of roundings in the last of 53 bits."""


@pytest.mark.parametrize("micro_batches", [2, slow(1)])
def test_two_ranks_clip_one_norm(micro_batches: int, tmp_path: Path) -> None:
    """A norm of parts is rounded otherwise than that of the whole."""
    loop = Loop("functional", clips=True, double=True, micro_batches=micro_batches)
    plans = [several(loop, in_turn(loop.name, *PLACES), 2)]
    plans += [several(loop, decided(described(loop.name), Keep(), p), 2) for p in PLACES[1:4]]
    assert_as_ddp(2, loop, plans, tmp_path, tolerance=ROUNDING)


def test_two_replicas_share_nothing_and_match_ddp_bitwise(tmp_path: Path) -> None:
    loop = Loop()
    plans = [several(loop, in_turn(loop.name, *PLACES), 2, num_replicas=2)]
    assert_as_ddp(2, loop, plans, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_four_ranks_match_ddp_within_the_rounding_of_sums(
    num_replicas: int, tmp_path: Path
) -> None:
    """The order of four summands depends on where in a buffer they lie."""
    loop = Loop("functional", double=True)
    placed = [in_turn(loop.name, *PLACES), mixed(loop.name, 3), mixed(loop.name, 4)]
    plans = [several(loop, units, 4, num_replicas=num_replicas) for units in placed]
    assert_as_ddp(4, loop, plans, tmp_path, tolerance=ROUNDING)


@pytest.mark.slow
def test_recomputed_llama_on_four_ranks_matches_ddp(tmp_path: Path) -> None:
    loop = Loop(double=True)
    units = decided(described(loop.name), Recompute(), Offload(tier="disk"))
    assert_as_ddp(4, loop, [several(loop, units, 4)], tmp_path, tolerance=ROUNDING)
