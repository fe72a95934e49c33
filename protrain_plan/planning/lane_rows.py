"""The time of lanes in the fluid model: alone in stalls, and beside compute."""

from typing import TYPE_CHECKING

import pulp

from protrain_plan.planning.decision_model import Terms
from protrain_plan.planning.flows import Flow, Lane, crossing, rates_of, work
from protrain_plan.records.hardware import TierName

if TYPE_CHECKING:
    from protrain_plan.planning.phase import Phase

LE, EQ = pulp.LpConstraintLE, pulp.LpConstraintEQ


class LaneRows:
    """The rows that give the lanes of one phase their time."""

    def __init__(self, phase: "Phase") -> None:
        self._phase = phase
        self._add_lanes()
        self._add_compute()

    def _add_lanes(self) -> None:
        """During a stall a lane does no more than its time; a link's directions share it.

        With k = 1/duplex - 1, in + k·out <= time and k·in + out <= time: exact for duplex >= 1/2,
        optimistic below, where k is cut to 1. The same for a link and collectives.
        """
        phase = self._phase
        self._add_network_lane()
        for tier in phase.problem.profile.hardware.tiers:
            k = crossing(tier.link.duplex)
            fetches, spills = self._on_link(tier.name)
            for t in range(phase.end + 1):
                for word, first, second in (("in", 1.0, k), ("out", k, 1.0)):
                    terms = [(f.stall[t], first * f.rate) for f in fetches]
                    terms += [(f.stall[t], second * f.rate) for f in spills]
                    terms.append((phase.stall[t], -1.0))
                    phase.row(f"lane_{word}_{tier.name}_{phase.slot_name(t)}", terms, LE)
        if phase.updates:
            for t in range(phase.end + 1):
                terms = [(phase.updates.stall[t], 1.0), (phase.stall[t], -1.0)]
                phase.row(f"lane_update_{phase.slot_name(t)}", terms, LE)

    def _add_network_lane(self) -> None:
        phase = self._phase
        if not phase.network:
            return
        collectives, k = phase.collectives(), crossing(self._link_share)
        for t in range(phase.end + 1):
            slot = phase.slot_name(t)
            terms = [(f.stall[t], f.rate) for f in collectives]
            phase.row(f"lane_network_{slot}", [*terms, (phase.stall[t], -1.0)], LE)
            for tier in phase.problem.profile.hardware.tiers if k else ():
                for way, flows in zip(("in", "out"), self._on_link(tier.name), strict=True):
                    for word, one, other in (("", 1.0, k), ("_shared", k, 1.0)):
                        both = [(f.stall[t], one * f.rate) for f in collectives]
                        both += [(f.stall[t], other * f.rate) for f in flows]
                        name = f"lane_network{word}_{way}_{tier.name}_{slot}"
                        phase.row(name, [*both, (phase.stall[t], -1.0)], LE)

    @property
    def _link_share(self) -> float:
        joined = self._phase.problem.profile.hardware.interconnect
        return joined.link_share if joined else 1.0

    def _on_link(self, tier: TierName) -> tuple[list[Flow], list[Flow]]:
        """What is read from a tier, and what is written to it."""
        phase = self._phase
        reads = [phase.fetched[tier], *([phase.reads] if tier == "disk" and phase.reads else [])]
        reads += [phase.shards[tier]] if phase.network else []
        writes = [phase.leaving[tier], *([phase.writes] if tier == "disk" and phase.writes else [])]
        return reads, writes

    def _add_compute(self) -> None:
        """Compute's time is divided among the sets of lanes that slow it down and run beside it.

        While a set S runs, compute progresses at the product of its lanes' contention factors, and
        a lane at its own factor, times `duplex` where both directions of its link are in S. With
        r_St seconds of set S in slot t, these rows allow what the simulator's rates allow, and
        no more:

            d_t = sum over S of r_St,   compute_t <= sum of rate_S · r_St,
            work of lane l in t <= sum over S with l of rate_Sl · r_St

        Lanes that leave compute alone take up no time of it; their links' rows are those of stalls.
        """
        phase = self._phase
        seconds: list[Terms] = [[] for _ in range(phase.end + 1)]
        for unit, activation, x in phase.model.each_activation():
            seconds[unit].append((x, activation.forward_s / phase.second_unit))
            seconds[phase.end - 1 - unit].append((x, activation.backward_s / phase.second_unit))
        for _, state, y in phase.model.each_state():
            if state.device_s and phase.updating:
                seconds[phase.end].append((y, state.device_s / phase.second_unit))
        all_lanes = self._lanes()
        lanes = [lane for lane in all_lanes if lane.contention.compute < 1]
        sets = [
            tuple(lane for lane in lanes if number >> lanes.index(lane) & 1)
            for number in range(1 << len(lanes))
        ]
        rates = [rates_of(running, self._link_share) for running in sets]
        for t in range(phase.end + 1):
            slot = phase.slot_name(t)
            spent = [phase.variable(f"r{number}_{slot}") for number in range(len(sets))]
            phase.row(f"time_{slot}", [*((r, 1.0) for r in spent), (phase.compute[t], -1.0)], EQ)
            slowed = [(r, -rate) for r, (rate, _) in zip(spent, rates, strict=True)]
            phase.row(f"compute_{slot}", [*seconds[t], *slowed], LE)
            for lane in lanes:
                terms = [(flow.compute[t], flow.rate) for flow in lane.flows]
                terms += [
                    (r, -by_lane[lane.name])
                    for r, (_, by_lane) in zip(spent, rates, strict=True)
                    if lane.name in by_lane
                ]
                phase.row(f"beside_{lane.name}_{slot}", terms, LE)
        self._add_links_beside_compute([lane for lane in all_lanes if lane not in lanes], lanes)

    def _add_links_beside_compute(self, quiet: list[Lane], slowing: list[Lane]) -> None:
        """What `quiet` lanes do during compute, and whichever lane shares a link with them."""
        across = crossing(self._link_share)
        for lane in quiet:
            others = [o for o in (*quiet, *slowing) if o is not lane and o.link == lane.link]
            k = crossing(lane.duplex)
            pairs = [(lane, other) for other in others] if others else [(lane, None)]
            for one, other in pairs:
                self._add_beside(one.name, one, other, k)
        for lane in quiet if across else ():
            for other in (*quiet, *slowing):
                kinds = {lane.link, other.link} - {None}
                first = lane.link == "network" or other not in quiet
                if len(kinds) == 2 and "network" in kinds and first:
                    self._add_beside(f"{lane.name}_{other.name}", lane, other, across)

    def _add_beside(self, name: str, one: Lane, other: Lane | None, k: float) -> None:
        """Work during compute takes no longer than compute."""
        phase = self._phase
        for t in range(phase.end + 1):
            for first, second, word in ((1.0, k, ""), (k, 1.0, "_shared")):
                terms = work(one, t, first)
                if other:
                    terms += work(other, t, second)
                elif word:
                    continue
                row = f"beside_{name}{word}_{phase.slot_name(t)}"
                phase.row(row, [*terms, (phase.compute[t], -1.0)], LE)

    def _lanes(self) -> list[Lane]:
        phase = self._phase
        hardware, lanes = phase.problem.profile.hardware, []
        for tier in hardware.tiers:
            fetches, spills = self._on_link(tier.name)
            name, duplex = tier.name, tier.link.duplex
            lanes.append(Lane(f"in_{name}", name, duplex, hardware.read_contention, fetches))
            lanes.append(Lane(f"out_{name}", name, duplex, hardware.write_contention, spills))
        if phase.updates:
            slowing = hardware.update_contention
            lanes.append(Lane("update", None, 1.0, slowing, [phase.updates]))
        if phase.network:
            assert hardware.interconnect, "asked when the problem was made"
            contention = hardware.interconnect.contention
            lanes.append(Lane("network", "network", 1.0, contention, phase.collectives()))
        return lanes
