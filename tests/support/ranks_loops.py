"""A training loop on several ranks: plain with DistributedDataParallel, and under plans."""

import itertools
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore
from protrain_runtime.activations.compiled import compile_each
from protrain_runtime.contract.records.plan import (
    Offload,
    Persistent,
    Placement,
    Plan,
    Schedule,
    StateTier,
    UnitPlan,
)
from protrain_runtime.diagnostics.compiling import compiled_whole
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.runtime_cases import (
    ADAMW,
    Factory,
    Outcome,
    batch,
    build,
    copied,
    described,
    differences,
    plan_for,
)

STEPS = 5


TIERS: tuple[StateTier, ...] = ("device", "host", "disk")


PLACES: tuple[Placement, ...] = (
    Persistent(),
    *(Offload(tier=tier) for tier in TIERS),
    *(Offload(tier=tier, keep_gathered=True) for tier in TIERS),
)


@dataclass(frozen=True)
class Loop:
    """What a training script does besides forward, backward and step."""

    name: str = "llama"
    factory: Factory = ADAMW
    micro_batches: int = 1
    clips: bool = False
    double: bool = False  # everything in float64
    compiled: str = ""  # a backend of torch.compile's, for the blocks; empty: they are plain


def built(loop: Loop, seed: int = 0) -> nn.Module:
    model = build(loop.name, seed=seed)
    return model.double() if loop.double else model


def train(
    loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int
) -> list[Tensor]:
    """Losses and norms of a plain loop on this rank's batches; in modes, where there are some."""
    modes: Any = optimizer if hasattr(optimizer, "eval") else None
    torch.manual_seed(1 + rank)
    seen: list[Tensor] = []
    numbers = itertools.count(rank, count)
    for _ in range(STEPS):
        if modes is not None:
            modes.train()
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
        if modes is not None:
            modes.eval()
    return seen


def ddp(rank: int, count: int, loop: Loop) -> Outcome:
    """What DistributedDataParallel computes."""
    plain = built(loop)
    if loop.compiled:
        units = described(loop.name)
        blocks = {u.name: plain.get_submodule(u.name) for u in units if u.kind == "block"}
        compile_each(blocks, backend=loop.compiled)
    model = DistributedDataParallel(plain)
    optimizer = loop.factory(list(model.parameters()))
    losses = train(loop, model, optimizer, rank, count)
    return Outcome(losses, copied(model.module.state_dict()), copied(optimizer.state_dict()))


def planned(
    rank: int, count: int, loop: Loop, plan: Plan, spill: Path, *, checked: bool = False
) -> Outcome:
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
        check="spills" if checked else None,
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
    """By plan, where its training differs from DistributedDataParallel's; odd ones checked."""
    with _backend(loop.compiled):
        expected = ddp(rank, count, loop)
        return [
            list(
                differing(
                    planned(rank, count, loop, plan, spill, checked=number % 2 > 0),
                    expected,
                    tolerance,
                )
            )
            for number, plan in enumerate(plans)
        ]


def _backend(name: str) -> AbstractContextManager[object]:
    """What PyTorch compiles inside is compiled by this one, as a plan compiles it in DDP, too."""
    stack = ExitStack()
    if name:
        stack.enter_context(torch.compiler.set_stance("default", force_backend=name))
        stack.enter_context(compiled_whole())
    return stack


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
    if loop.compiled:
        own["workload"] = replace(plan.workload, compile="blocks")
    return with_settings(plan, **{**own, **options})


def in_turn(name: str, *places: Placement) -> tuple[UnitPlan, ...]:
    """The placements, unit by unit."""
    schedule = Schedule(forward_lead=1, backward_lead=2, update_drain=1)
    return tuple(
        replace(unit, states=place, schedule=schedule)
        for unit, place in zip(described(name), itertools.cycle(places), strict=False)
    )


def assert_as_ddp(
    count: int, loop: Loop, plans: Sequence[Plan], folder: Path, *, tolerance: float = 0.0
) -> None:
    for found in run_ranks(compared, count, folder, loop, plans, folder, tolerance):
        assert found == [[]] * len(plans)


ROUNDING = 1e-11
"""In float64, of what five steps make of roundings in the last of 53 bits."""
