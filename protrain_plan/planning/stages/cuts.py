"""Where a model may be cut into stages, the bytes between units, and the best cuts for bounds.

A stage is a run of units. A cut sends one hidden state to the next stage, and its gradient back:
so only the next unit may read what the unit before the cut hands on, and no parameter may be used
on both sides (two copies of it would add their gradients in another order).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import networkx as nx

from protrain_runtime.contract.records.profile import Profile

Ends = tuple[int, ...]
"""The first unit after each run; the last one is the number of units."""

Bound = Callable[[int, int, int], float]
"""Seconds that the whole step takes at least, if stage s has the units from one up to another."""


def possible_cuts(profile: Profile) -> tuple[int, ...]:
    """Units that a stage may begin with: a cut before them breaks one edge of the data flow.

    Parts run as their neighbours do, and hand on what a loss may not be divided from: each belongs
    to a stage like any unit.
    """
    # An edge is where one unit uses what the other makes or has: activations, parameters.
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(len(profile.units)))
    graph.add_edges_from(pairwise(range(len(profile.units))))
    for reader, unit in enumerate(profile.units):
        # An edge beside a link of the chain would hide in it: it goes by a node of its own.
        others = [(source, reader) for source in unit.reads]
        others += [(reader, user) for user in unit.used_by if user != reader]
        for number, (one, other) in enumerate(others):
            between = -1 - graph.number_of_nodes() - number
            graph.add_edges_from(((one, between), (between, other)))
    joined = nx.k_edge_components(graph, 2)  # no single edge divides these
    of_unit = {unit: number for number, part in enumerate(joined) for unit in part}
    units = range(1, len(profile.units))
    return tuple(unit for unit in units if of_unit[unit - 1] != of_unit[unit])


def handed_bytes(profile: Profile, unit: int) -> int:
    """Bytes of the hidden state that a unit gets from the one before it.

    Where the profile does not say: a recomputed block keeps exactly that, those of its input that
    a swap can take, where it alone reads it. Elsewhere what the unit before adds to the level,
    which is the same and at most what else it has to keep.
    """
    if not unit:
        return 0
    if known := profile.units[unit].handed_bytes:
        return known
    forms = {cost.form: cost for cost in profile.units[unit].forms}
    if "full" in forms and forms["full"].swappable_bytes:
        return forms["full"].swappable_bytes
    before = {cost.form: cost for cost in profile.units[unit - 1].forms}
    return before["full" if "full" in before else "keep"].kept_bytes


class Cuts(NamedTuple):
    """Cuts with the seconds that a step takes at least with them."""

    seconds: float
    ends: Ends

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """The number of each stage, its first unit, and the first one after it."""
        return [(s, *run) for s, run in enumerate(pairwise((0, *self.ends)))]


def best_cuts(
    bound: Bound, count: int, starts: Sequence[int], p: int, below_s: float = inf
) -> Cuts:
    """The cuts of `count` units into `p` runs whose largest bound is least, and below `below_s`.

    Otherwise `below_s` without cuts. Dynamic programming from the last stage to the first: of the
    stages from s on over the units from i on, the least largest bound. Bounds grow with a run, so
    that the runs of a stage are looked at up to the first that is too long. Among equal cuts, those
    that come first.
    """
    places = (0, *starts)
    least: dict[int, tuple[float, Ends]] = {count: (0.0, ())}
    for s in reversed(range(p)):
        found: dict[int, tuple[float, Ends]] = {}
        ends = sorted(least)
        for i in places if s else (0,):
            best: tuple[float, Ends] = (below_s, ())
            for j in ends:
                if j <= i or least[j][0] >= best[0]:
                    continue
                own = bound(s, i, j)
                if own >= below_s:
                    break
                if (seconds := max(least[j][0], own)) < best[0]:
                    best = seconds, (j, *least[j][1])
            if best[0] < below_s:
                found[i] = best
        least = found
    return Cuts(*least.get(0, (below_s, ())))
