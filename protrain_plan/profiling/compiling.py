"""PyTorch's compiler in this process: graphs, seconds, cache hits, for all callers."""

import sys
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from protrain_runtime.contract.records.profile import Compilation
from protrain_runtime.contract.units import four_digits


class Compiled(NamedTuple):
    """Compilations since the process began."""

    num_graphs: int = 0  # forwards; training adds a backward
    seconds: float = 0.0
    cached: int = 0  # Inductor's programs, forward or backward, found in its cache
    made: int = 0  # and those compiled


def compiled_so_far() -> Compiled:
    """This process's totals. Loads no compiler."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return Compiled()
    inductor = utils.counters["inductor"]
    return Compiled(
        num_graphs=utils.counters["stats"]["unique_graphs"],
        seconds=utils.calculate_time_spent()["total_wall_time"],
        cached=inductor["fxgraph_cache_hit"],
        made=inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )


def compilation_since(before: Compiled) -> Compilation | None:
    """The compilations since `before`; None without any."""
    now = compiled_so_far()
    num_graphs, cached = now.num_graphs - before.num_graphs, now.cached - before.cached
    made = now.made - before.made
    if num_graphs <= 0:
        return None
    return Compilation(
        num_graphs=num_graphs,
        seconds=four_digits(max(0.0, now.seconds - before.seconds)),
        cache="partly" if cached and made else "warm" if cached else "cold" if made else "none",
    )


def compiled_whole() -> AbstractContextManager[None]:
    """Compile blocks inside DistributedDataParallel whole, as plans do: cuts change bits."""
    whole: AbstractContextManager[None] = torch._dynamo.config.patch(optimize_ddp=False)
    return whole
