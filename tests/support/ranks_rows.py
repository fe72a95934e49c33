"""Rows of all that a run on several ranks may combine, trained under a plan and by DDP."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from protrain_runtime import load, restore, save
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import DeviceGroup, Plan, StateTier
from tests.support.pairwise import Impossible, Row, covering_rows
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import run_ranks
from tests.support.ranks_loops import RanksRun, in_ddp, played, under_plan
from tests.support.runtime_cases import (
    RECOMPUTED,
    Outcome,
    differences,
    random_states,
    set_random_states,
    weight_decay_groups,
)
from tests.support.scenario import Loop, Run
from tests.support.training_rows import (
    ALWAYS_IMPOSSIBLE,
    PRECISIONS,
    SCHEDULES,
    of_row,
    optimizer_of,
    plain_optimizer_of,
    plan_of_row,
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


def plan(row: Row, model: nn.Module, *, seed: int) -> Plan:
    swaps_to = SWAPS.get(row["tier"], ("host", "disk"))
    found = plan_of_row(row, model, seed=seed, states_on=TIERS[row["tier"]], swaps_to=swaps_to)
    count, replicas = int(row["ranks"]), int(row["replicas"])
    return with_settings(found, group=DeviceGroup(num_devices=count, num_replicas=replicas))


def planned(row: Row, rank: int, folder: Path, *, seed: int = 0) -> RanksRun:
    return under_plan(
        of_row(row),
        rank,
        int(row["ranks"]),
        partial(plan, row, seed=seed),
        folder=folder,
        seed=seed,
        groups=weight_decay_groups,
        optimizer=optimizer_of(row),
    )


def script(row: Row, folder: Path) -> Loop:
    """Five steps on each rank's batches; the last rank's loss overflows in the second."""
    count, scales = int(row["ranks"]), row["clipping"] == "loss scale"

    def before(run: Run, step: int) -> None:
        """Go on under another plan, with what was saved or handed over; count, or not."""
        assert isinstance(run, RanksRun)
        run.factor = 1.0 if run.rank in COUNTED[count][step] else 0.0
        if scales and step == OVERFLOWS_AT and run.rank == count - 1:
            run.factor = math.inf
        if run.folder is not None and step == RESUMED_AT and row["resumed"] != "no":
            resume(run, partial(planned, row, run.rank, folder, seed=1), row["resumed"], folder)

    clips = None if row["clipping"] == "none" else CLIP_NORM
    return Loop(
        num_steps=NUM_STEPS,
        micro_batches=int(row["micro-batches"]),
        clips=clips,
        scales=scales,
        before=before,
    )


def resume(run: Run, again: Callable[[], RanksRun], how: str, folder: Path) -> None:
    model, optimizer = run.model, run.optimizer
    if how == "files into another plan":
        save(model, optimizer, folder / "checkpoint")
        restore(model)
        run.become(again())
        load(run.model, run.optimizer, folder / "checkpoint")
        return
    weights, states, randomness = model.state_dict(), optimizer.state_dict(), random_states()
    restore(model)
    run.become(again())
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(states)
    set_random_states(randomness)


def compared(
    rank: int, _: int, rows: Sequence[tuple[int, Row]], folder: Path
) -> dict[int, tuple[list[str], list[float]]]:
    """By row, where a plan's training differs from DistributedDataParallel's, and its norms."""
    found: dict[int, tuple[list[str], list[float]]] = {}
    for number, row in rows:
        run, loop = planned(row, rank, folder), script(row, folder)
        own = played(run, loop)
        plain = plain_optimizer_of(row)
        groups = weight_decay_groups
        ddp = in_ddp(of_row(row), rank, int(row["ranks"]), plain, groups=groups, clips_by=run.norms)
        expected = played(ddp, loop)
        differing = [*differing_of(own, expected), *far(run.norms, ddp.norms)]
        found[number] = differing, [norm.item() for norm in run.norms]
    return found


def differing_of(found: Outcome, expected: Outcome) -> Iterator[str]:
    for name in ("losses", "parameters", "optimizer", "random_states"):
        yield from differences(getattr(found, name), getattr(expected, name), name)


def far(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Iterator[str]:
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
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
