"""Assumptions that the choice of stages rests on: bounds with one of them changed at a time.

The bounds are those of lanes (see `cycles`), of the machine as it is and of changed ones. Where a
change lets one stage be as fast, stages are worth what that assumption is worth.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from protrain_plan.planning.search.improving import Effort
from protrain_plan.planning.stages.answer import LANES, Search, StagesQuestion, searched
from protrain_runtime.contract.records.hardware import PCIE, Collectives, Contention
from protrain_runtime.contract.records.profile import Profile

FASTER = 10
"""Factor of the network between nodes that is asked about: 100 Gb/s in place of 10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Least seconds of a step with one stage and with several, under one assumption."""

    words: str
    single_seconds: float
    several_seconds: float

    @property
    def speedup(self) -> float:
        """How many times as fast several stages may be."""
        return self.single_seconds / self.several_seconds


def _with_peer_access(profile: Profile) -> Profile | None:
    """Cards that read each other's memory over PCIe, and leave the host's alone."""
    joined, speed = profile.hardware.interconnect, PCIE["pcie-4"]
    if joined is None or joined.link_share == 1 or joined.intra_node.gather_bytes_per_s >= speed:
        return None
    latency_s = joined.intra_node.latency_s
    peers = Collectives(gather_bytes_per_s=speed, reduce_bytes_per_s=speed, latency_s=latency_s)
    free = Contention(compute=joined.contention.compute, lane=1.0)
    changed = replace(joined, intra_node=peers, link_share=1.0, contention=free)
    return replace(profile, hardware=replace(profile.hardware, interconnect=changed))


def _with_twice_the_host(profile: Profile) -> Profile | None:
    """Host memory of twice the bandwidth, for copies and for the optimizer."""
    rates, optimizer = profile.hardware.rates, profile.optimizer
    if rates is None or not rates.host_bandwidth_bytes_per_s:
        return None
    twice = replace(rates, host_bandwidth_bytes_per_s=2 * rates.host_bandwidth_bytes_per_s)
    faster = replace(
        optimizer,
        host_parameters_per_s=2 * optimizer.host_parameters_per_s,
        node_parameters_per_s=2 * optimizer.node_parameters_per_s,
    )
    return replace(profile, hardware=replace(profile.hardware, rates=twice), optimizer=faster)


def _with_faster_network(profile: Profile) -> Profile | None:
    """Nodes that are joined by a network of ten times the speed."""
    joined = profile.hardware.interconnect
    if joined is None or joined.inter_node is None:
        return None
    far = joined.inter_node
    faster = Collectives(
        gather_bytes_per_s=FASTER * far.gather_bytes_per_s,
        reduce_bytes_per_s=FASTER * far.reduce_bytes_per_s,
        latency_s=far.latency_s,
    )
    machine = replace(profile.hardware, interconnect=replace(joined, inter_node=faster))
    return replace(profile, hardware=machine)


CHANGES: dict[str, Callable[[Profile], Profile | None]] = {
    "as the machine is": lambda profile: profile,
    "with peer access at 24 GB/s": _with_peer_access,
    "with twice the host's bandwidth": _with_twice_the_host,
    f"with {FASTER} times the network between nodes": _with_faster_network,
}
"""Assumptions; None where a machine says nothing of it, or has that much."""


def assumptions(question: StagesQuestion, effort: Effort) -> tuple[Assumed, ...]:
    """The bounds under every assumption that can be changed, the machine as it is first."""
    found: list[Assumed] = []
    for words, change in CHANGES.items():
        changed = {size: change(profile) for size, profile in question.profiles.items()}
        profiles = {size: profile for size, profile in changed.items() if profile is not None}
        if not profiles:
            continue
        search = searched(replace(question, profiles=profiles), effort)
        numbers = sorted({shape.stages for shape in search.cuts})
        single = _lane_bound(search, [1])
        several = _lane_bound(search, [number for number in numbers if number > 1])
        found.append(Assumed(words=words, single_seconds=single, several_seconds=several))
    return tuple(found)


def _lane_bound(search: Search, stages: list[int]) -> float:
    """The least bound of lanes of shapes with so many stages."""
    shapes = [shape for shape in search.cuts if shape.stages in stages]
    while shapes:
        shape = min(shapes, key=lambda one: search.cuts[one].seconds)
        if not search.improve(shape, LANES):
            return search.cuts[shape].seconds
    return inf
