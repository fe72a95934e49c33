"""Rows of all that a run on several ranks may combine, trained under a plan and by DDP."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import load, prepare, restore, save
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Plan, StateTier
from tests.support.pairwise import Impossible, Row, covering_rows
from tests.support.ranks_cases import run_ranks
from tests.support.runtime_cases import (
    RECOMPUTED,
    Outcome,
    batch,
    device,
    differences,
    outcome,
    random_states,
    set_random_states,
    weight_decay_groups,
)
from tests.support.training_rows import (
    ALWAYS_IMPOSSIBLE,
    PRECISIONS,
    SCHEDULES,
    optimizer_of,
    plainly,
    plan_of_row,
    uncompiled,
)

NUM_STEPS, OVERFLOWS_AT, RESUMED_AT = 5, 1, 3
CLIP_NORM = 0.5
COUNTED = {
    2: [(0, 1)] * NUM_STEPS,
    4: [(0, 1), (2, 3), (1, 2), (0, 3), (1, 3)],
}
"""By the number of ranks, the two that count in each step."""

TIERS: dict[str, tuple[StateTier, ...]] = {
    "device": ("device",),
    "host": ("host",),
    "disk": ("disk",),
    "all": ("device", "host", "disk"),
}
SWAPS: dict[str, tuple[TierName, ...]] = {"host": ("host",), "disk": ("disk",)}
FACTORS: dict[str, tuple[str, ...]] = {
    "ranks": ("2", "4"),
    "replicas": ("1", "2", "4"),
    "model": ("llama", "llama-tied", "gpt2", "functional", "t5"),
    "trained": ("all", "some", "lora"),
    "activations": ("keep", "recompute", "swap", "swap input", "mixed"),
    "form": ("none", *RECOMPUTED),
    "placement": ("persistent", "offload", "buffer", "mixed"),
    "tier": tuple(TIERS),
    "schedule": tuple(SCHEDULES),
    "pieces": ("small", "whole"),
    "micro-batches": ("1", "2", "3"),
    "clipping": ("none", "norm", "loss scale"),
    "updates": ("in backward", "after backward"),
    "precision": tuple(PRECISIONS),
    "optimizer": ("adamw", "adamw, not fused", "momentum", "sgd"),
    "resumed": ("no", "files into another plan", "states into another plan"),
}
IMPOSSIBLE = (
    Impossible(
        reason="each replica has as many ranks",
        values={"ranks": ("2",), "replicas": ("4",)},
    ),
    *ALWAYS_IMPOSSIBLE,
)


@cache
def every_row() -> list[Row]:
    """Not made by the ranks, which import this module too."""
    return covering_rows(FACTORS, IMPOSSIBLE, costly=("ranks",))


# --- training -------------------------------------------------------------------------------------

Pair = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class Trained:
    """What one rank's training computed, with the norms that it clipped by, and loss scales."""

    outcome: Outcome = field(default_factory=Outcome)
    norms: list[Tensor] = field(default_factory=list[Tensor])
    scales: list[float] = field(default_factory=list[float])


def trained(
    row: Row,
    rank: int,
    pair: Pair,
    resume: Callable[[nn.Module, torch.optim.Optimizer], Pair],
    clip: Callable[[nn.Module, int], Tensor],
) -> Trained:
    """Five steps on this rank's batches; the last rank's loss overflows in the second."""
    torch.manual_seed(1 + rank)
    (model, optimizer), found, losses = pair, Trained(), list[Tensor]()
    count, micro_batches = int(row["ranks"]), int(row["micro-batches"])
    scales = row["clipping"] == "loss scale"
    scaler = torch.amp.GradScaler(device().type, init_scale=8.0, growth_interval=2, enabled=scales)
    numbers = itertools.count(rank, count)
    for step in range(NUM_STEPS):
        if step == RESUMED_AT:
            model, optimizer = resume(model, optimizer)
        weight = 1.0 if rank in COUNTED[count][step] else 0.0
        if scales and step == OVERFLOWS_AT and rank == count - 1:
            weight = math.inf
        for number in range(micro_batches):
            ddp = model if isinstance(model, DistributedDataParallel) else None
            waits = ddp is not None and number + 1 < micro_batches
            with ddp.no_sync() if ddp is not None and waits else nullcontext():
                loss = loss_of(call_model(model, batch(row["model"], next(numbers))))
                scaler.scale(loss * weight).backward()
            losses.append(loss.detach())
        if row["clipping"] != "none":
            scaler.unscale_(optimizer)
            found.norms.append(clip(model, step))
        scaler.step(optimizer)
        scaler.update()
        found.scales.append(scaler.get_scale())
        optimizer.zero_grad()
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    found.outcome = outcome(plain, optimizer, losses)
    return found


def under_plan(row: Row, rank: int, folder: Path, *, seed: int = 0) -> Pair:
    # Rank 0's weights are everybody's, as with DistributedDataParallel.
    model = uncompiled(row, seed=seed if rank == 0 else 5)
    rng = random.Random(rank)
    return prepare(
        model,
        plan(row, model, seed=seed),
        optimizer=optimizer_of(row),
        param_groups=weight_decay_groups(model),
        spill_directory=folder,
        wait_limit_s=60,
        lane_delay=lambda: rng.random() * 0.0005,
    )


def plan(row: Row, model: nn.Module, *, seed: int) -> Plan:
    swaps_to = SWAPS.get(row["tier"], ("host", "disk"))
    found = plan_of_row(row, model, seed=seed, states_on=TIERS[row["tier"]], swaps_to=swaps_to)
    return replace(
        found,
        settings=replace(
            found.settings,
            group=replace(
                found.group, num_devices=int(row["ranks"]), num_replicas=int(row["replicas"])
            ),
        ),
    )


def planned(row: Row, rank: int, folder: Path) -> Trained:
    def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
        """Go on under another plan, with what was saved or handed over."""
        if row["resumed"] == "no":
            return model, optimizer
        if row["resumed"] == "files into another plan":
            save(model, optimizer, folder / "checkpoint")
            restore(model)
            model, optimizer = under_plan(row, rank, folder, seed=1)
            load(model, optimizer, folder / "checkpoint")
            return model, optimizer
        weights, states = model.state_dict(), optimizer.state_dict()
        randomness = random_states()
        restore(model)
        model, optimizer = under_plan(row, rank, folder, seed=1)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        set_random_states(randomness)
        return model, optimizer

    def clip(model: nn.Module, _: int) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).detach().clone()

    return trained(row, rank, under_plan(row, rank, folder), resume, clip)


def ddp(row: Row, rank: int, norms: Sequence[Tensor]) -> Trained:
    """DistributedDataParallel, whose gradients are clipped by the norms given."""
    model = DistributedDataParallel(uncompiled(row))

    def clip(model: nn.Module, step: int) -> Tensor:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        own = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP_NORM, norms[step])
        return own

    return trained(row, rank, (model, plainly(row, model)), lambda *pair: pair, clip)


def compared(
    rank: int, _: int, rows: Sequence[tuple[int, Row]], folder: Path
) -> dict[int, tuple[list[str], list[float]]]:
    """By row, where a plan's training differs from DistributedDataParallel's, and its norms."""
    found: dict[int, tuple[list[str], list[float]]] = {}
    for number, row in rows:
        own = planned(row, rank, folder)
        expected = ddp(row, rank, own.norms)
        found[number] = list(differing(own, expected)), [norm.item() for norm in own.norms]
    return found


def differing(found: Trained, expected: Trained) -> Iterator[str]:
    for name in ("losses", "parameters", "optimizer", "random_states"):
        yield from differences(getattr(found.outcome, name), getattr(expected.outcome, name), name)
    yield from differences(found.scales, expected.scales, "scales")
    for step, (one, other) in enumerate(zip(found.norms, expected.norms, strict=True)):
        eps = torch.finfo(other.dtype).eps
        if not torch.isclose(one, other, rtol=ROUNDINGS * eps, atol=0, equal_nan=True):
            yield f"norm {step}: {one.item()}, not {other.item()}"


ROUNDINGS = 8
"""In the last bits of a norm, of what sums of squares in another order make."""


def numbered(ranks: str, part: int, parts: int) -> list[tuple[int, Row]]:
    """Some of the rows for so many ranks, by their numbers."""
    rows = [(number, row) for number, row in enumerate(every_row()) if row["ranks"] == ranks]
    return rows[part::parts]


def assert_rows(rows: Sequence[tuple[int, Row]], count: int, folder: Path) -> None:
    by_rank = run_ranks(compared, count, folder, rows, folder)
    for number, row in rows:
        for found in by_rank:
            differences, norms = found[number]
            assert differences == [], (number, row)
            assert repr(norms) == repr(by_rank[0][number][1]), (number, row)
