"""Scenarios, on every rank, that fail without a line that keeps collectives in their place."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.plan import PERSISTENT, Placement
from tests.support import routed_model
from tests.support.mutations import AMONG_RANKS, mutate
from tests.support.ranks_cases import end_ranks
from tests.support.ranks_loops import ROUNDING, Loop, ddp, differing, in_turn, planned, several
from tests.support.runtime_cases import ADAMW, Outcome, batch, build

NAME = "functional"
LIMIT_S = 10.0
TRIES = 4


# --- scenarios, on every rank ---------------------------------------------------------------------

_seeds = itertools.count()


def late(*, compute_us: float = 0.0, lanes_us: float = 0.0) -> AbstractContextManager[None]:
    from tests.emulated.device import delayed

    return delayed(next(_seeds), compute_us=compute_us, lanes_us=lanes_us)


Lateness = Callable[[], AbstractContextManager[None]]
LATE_COMPUTE: Lateness = partial(late, compute_us=100.0)
LATE_LANES: Lateness = partial(late, lanes_us=1000.0)


@cache
def by_ddp(loop: Loop) -> Outcome:
    with late():
        return ddp(dist.get_rank(), 2, loop)


PLAIN = Loop(NAME, num_steps=3)


def trains(
    lateness: Lateness,
    *states: Placement,
    loop: Loop = PLAIN,
    num_replicas: int = 1,
    tolerance: float = 0.0,
) -> list[str]:
    """Where training under a plan differs, whose units have these placements in turn."""
    expected = by_ddp(loop)
    plan = several(loop, in_turn(NAME, *states), 2, num_replicas=num_replicas)
    with TemporaryDirectory() as folder, lateness():
        try:
            found = planned(dist.get_rank(), 2, loop, plan, Path(folder))
        except AssertionError as error:  # what is not a number is not what it was before
            return [str(error)]
        return list(differing(found, expected, tolerance))


def evaluated() -> list[str]:
    """A model is evaluated while its shards come late."""
    model = build(NAME)
    with torch.no_grad():
        plain = loss_of(call_model(model, batch(NAME, 0))).item()
    units = in_turn(NAME, Placement(tier="device"))
    model, _ = prepare(model, several(Loop(NAME), units, 2), optimizer=ADAMW, wait_limit_s=LIMIT_S)
    with LATE_LANES(), torch.no_grad():
        found = loss_of(call_model(model, batch(NAME, 0))).item()
    restore(model)
    return [] if found == plain else [f"{found} instead of {plain}"]


def running_statistics() -> list[str]:
    """Buffers are the first rank's from the first micro-batch on."""
    with LATE_LANES():
        return routed_model.routed(dist.get_rank(), 2, (PERSISTENT,))


DEVICE, HOST = Placement(tier="device"), Placement(tier="host")
NORMED = replace(PLAIN, clips=True, double=True)
SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "persistent_with_late_lanes": partial(trains, LATE_LANES, PERSISTENT),
    # Some of the units, while others' sums are on their way.
    "updated_in_backward_with_late_lanes": partial(trains, LATE_LANES, PERSISTENT, HOST),
    "persistent_with_late_compute": partial(trains, LATE_COMPUTE, PERSISTENT),
    "shards_with_late_lanes": partial(trains, LATE_LANES, DEVICE),
    "shards_with_late_compute": partial(trains, LATE_COMPUTE, DEVICE),
    "replicas_with_late_lanes": partial(trains, LATE_LANES, DEVICE, num_replicas=2),
    "from_host_with_late_lanes": partial(trains, LATE_LANES, HOST),
    "evaluated": evaluated,
    "running_statistics": running_statistics,
    # A norm is summed from those of shards.
    "clipped": partial(trains, LATE_LANES, DEVICE, loop=NORMED, tolerance=ROUNDING),
}


# --- without the lines ----------------------------------------------------------------------------


def told(rank: int, count: int, scenario: Callable[[], list[str]], hosts: Any) -> list[list[str]]:
    """By rank, what a scenario found."""
    found: list[list[str]] = [[] for _ in range(count)]
    dist.all_gather_object(found, scenario(), group=hosts)
    return found


def holding(rank: int, count: int, scenarios: Sequence[str]) -> list[tuple[str, list[list[str]]]]:
    """The scenarios that do not hold, and by rank what they found."""
    hosts = dist.new_group(backend="gloo")
    found = [(each, told(rank, count, SCENARIOS[each], hosts)) for each in scenarios]
    return [(each, by_rank) for each, by_rank in found if any(by_rank)]


def mutants(rank: int, count: int, chosen: Sequence[int]) -> list[int]:
    """The chosen mutations under which a scenario held, with several delays."""
    from tests.emulated.device import longer

    hosts, left = dist.new_group(backend="gloo"), list[int]()
    for number in chosen:
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch, AMONG_RANKS[number])
            scenario = SCENARIOS[AMONG_RANKS[number].scenario]
            for attempt in range(TRIES):
                with longer(2.0**attempt):
                    if any(told(rank, count, scenario, hosts)):
                        break
            else:
                left.append(number)
    return left


def assert_none_holds(chosen: Sequence[int], folder: Path) -> None:
    ended = end_ranks(mutants, 2, folder, chosen)
    # An operator may meet what none can compute with. The other rank is left alone then.
    if not any("an operator failed on a stream" in end.error for end in ended):
        assert [(end.result, end.error, end.exit_code) for end in ended] == [([], "", 0)] * 2
