"""One forward and backward of the fluid model: its flows, and what they wait for.

The letters of variables are those of `planning/fluid.py`.
"""

from itertools import pairwise

import pulp

from protrain_plan.planning.decision_model import DecisionModel, Terms
from protrain_plan.planning.flows import Flow
from protrain_plan.planning.lane_rows import LaneRows
from protrain_plan.planning.network import Network
from protrain_plan.planning.options import Leaving
from protrain_plan.records.hardware import TierName

LE, EQ, GE = pulp.LpConstraintLE, pulp.LpConstraintEQ, pulp.LpConstraintGE


class Phase:
    """One forward and backward: transfers and time of a model's decisions."""

    def __init__(
        self,
        model: DecisionModel,
        static: list[pulp.LpVariable],
        second_unit: float,
        prefix: str,
        *,
        updating: bool,
    ) -> None:
        self.model, self.problem, self.end = model, model.problem, model.end
        self.prefix, self.updating = prefix, updating
        self.byte_unit, self.second_unit = model.byte_unit, second_unit
        self.memory_rows: list[pulp.LpConstraint] = []
        self.stall, self.compute = self.per_slot("s"), self.per_slot("d")
        self.fetched: dict[TierName, Flow] = {}  # by tier
        self.leaving: dict[TierName, Flow] = {}  # by tier
        self.reads: Flow | None = None  # from disk
        self.writes: Flow | None = None  # to disk
        self.updates: Flow | None = None
        self.network: Network | None = None
        self.shards: dict[TierName, Flow] = {}  # by tier
        self.gathered: Flow | None = None
        self.scattered: Flow | None = None
        self.summed: Flow | None = None
        if self.problem.settings.num_devices > 1:
            self.network = Network.of(self.problem)
        self.held_per_written = 0.0
        self._add_flows()
        LaneRows(self)
        if updating:
            self._add_chains()
        self._add_limits(static)

    def slot_name(self, slot: int) -> str:
        return self.model.slot_name(slot)

    def variable(self, name: str) -> pulp.LpVariable:
        return self.model.variable(f"{self.prefix}{name}")

    def per_slot(self, name: str) -> list[pulp.LpVariable]:
        return self.model.per_slot(f"{self.prefix}{name}")

    def row(self, name: str, terms: Terms, sense: int, right: float = 0.0) -> pulp.LpConstraint:
        return self.model.row(f"{self.prefix}{name}", terms, sense, right)

    def _flow(self, names: str, rate: float) -> Flow:
        stall, compute, waiting = names.split()
        return Flow(self.per_slot(stall), self.per_slot(compute), self.per_slot(waiting), rate)

    def _add_flows(self) -> None:
        """What is fetched for slots, and what slots leave to be moved, read, updated, written."""
        hardware, unit, seconds = self.problem.profile.hardware, self.byte_unit, self.second_unit
        for tier in hardware.tiers:
            name, link = tier.name, tier.link
            down = unit / link.write_bytes_per_s / seconds
            up = unit / link.read_bytes_per_s / seconds
            self.fetched[name] = self._flow(f"hs_{name} hc_{name} J_{name}", up)
            self.leaving[name] = self._flow(f"os_{name} oc_{name} Q_{name}", down)
            if name == "disk" and self.updating:
                self.reads = self._flow("rs rc R", up)
                self.writes = self._flow("ws wc W", down)
        if hardware.tiers:
            self.updates = self._flow("us uc P", 1.0)
        if self.network:
            self._add_network_flows(self.network)
        # Of several devices, only the last micro-batch reduces gradients; no host adds them.
        adding = self.problem.settings.micro_batches > 1 and not self.network
        for _, activation, x in self.model.each_activation():
            if activation.swap_in and activation.swap_out:
                fetch, leaving = activation.swap_in, activation.swap_out
                self.fetched[fetch.tier].amounts[fetch.slot].append((x, fetch.bytes / unit))
                self._leave(self.leaving[leaving.tier], leaving, x)
        held_per_written: list[float] = []
        for unit_index, state, y in self.model.each_state():
            fetched = self.shards if self.network else self.fetched
            for fetch in state.fetches:
                fetched[fetch.tier].amounts[fetch.slot].append((y, fetch.bytes / unit))
            if state.gradients and (self.updating or not self.network):
                self._leave(self.leaving[state.gradients.tier], state.gradients, y)
            if state.gradients and adding:
                assert self.updates
                slot = self.end - 1 - unit_index
                self.updates.amounts[slot].append((y, state.update_s / seconds))
            if not self.updating:
                continue
            if state.update_s:
                assert self.updates
                self.updates.amounts[state.update_slot].append((y, state.update_s / seconds))
            if state.write_bytes:
                assert self.reads and self.writes
                self.reads.amounts[state.update_slot].append((y, state.read_bytes / unit))
                self.writes.amounts[state.update_slot].append((y, state.write_bytes / unit))
                if state.in_place:
                    held_per_written.append(state.in_place.held / state.in_place.bytes)
        self.held_per_written = min(held_per_written, default=0.0)
        for tier_name, flow in self.fetched.items():
            self._add_inventory(tier_name, flow)
        for tier_name, flow in self.shards.items():
            self._add_inventory(f"{tier_name}_shards", flow)
        if self.gathered:
            self._add_inventory("ranks", self.gathered)
        for tier_name, flow in self.leaving.items():
            self._add_backlog(f"leave_{tier_name}", flow)
        for word, backlog in (
            ("read", self.reads),
            ("write", self.writes),
            ("up", self.updates),
            ("scatter", self.scattered),
            ("sum", self.summed),
        ):
            if backlog:
                self._add_backlog(word, backlog)
        # The device's update waits for the sums of gradients.
        sums = [(f.compute[self.end], 1.0) for f in (self.scattered, self.summed) if f]
        if sums:
            self.row("summed_before_update", sums, EQ)

    def _add_network_flows(self, network: Network) -> None:
        """What is gathered from all ranks, and reduced over them; the shards that tiers hold."""
        hardware, unit, seconds = self.problem.profile.hardware, self.byte_unit, self.second_unit
        for tier in hardware.tiers:
            up = unit / tier.link.read_bytes_per_s / seconds
            name = tier.name
            self.shards[name] = self._flow(f"ks_{name} kc_{name} K_{name}", up)
        self.gathered = self._flow("ns nc N", unit * network.gathered / seconds)
        for _, state, y in self.model.each_state():
            for gather in state.gathers:
                self.gathered.amounts[gather.slot].append((y, gather.bytes / unit))
        if not self.updating:
            return
        self.scattered = self._flow("xs xc X", unit * network.scattered / seconds)
        self.summed = self._flow("ys yc Y", unit * network.summed / seconds)
        for unit_index, state, y in self.model.each_state():
            slot = self.end - 1 - unit_index
            if state.scattered:
                self.scattered.amounts[slot].append((y, state.scattered.bytes / unit))
            if state.summed_bytes:
                self.summed.amounts[slot].append((y, state.summed_bytes / unit))

    def _leave(self, flow: Flow, leaving: Leaving, binary: pulp.LpVariable) -> None:
        flow.amounts[leaving.slot].append((binary, leaving.bytes / self.byte_unit))

    def _add_inventory(self, name: str, flow: Flow) -> None:
        for t in range(self.end + 1):
            slot = self.slot_name(t)
            before: Terms = [(flow.waiting[t - 1], 1.0)] if t else []
            needed = [(binary, -size) for binary, size in flow.amounts[t]]
            # What the slot reads is there when its compute starts.
            self.row(f"arrive_{name}_{slot}", [*before, (flow.stall[t], 1.0), *needed], GE)
            # J_t = J_{t-1} + hs_t + hc_t - needed_t
            came = [(flow.stall[t], 1.0), (flow.compute[t], 1.0)]
            terms = [*before, *came, *needed, (flow.waiting[t], -1.0)]
            self.row(f"ahead_{name}_{slot}", terms, EQ)

    def _add_backlog(self, name: str, flow: Flow) -> None:
        for t in range(self.end + 1):
            slot = self.slot_name(t)
            before: Terms = [(flow.waiting[t - 1], 1.0)] if t else []
            done = [(flow.stall[t], -1.0), (flow.compute[t], -1.0)]
            # Only what earlier slots produced can be done by the end of this one.
            self.row(f"{name}_produced_{slot}", [*before, *done], GE)
            # waiting_t = waiting_{t-1} - done_t + produced_t
            terms = [*before, *done, *flow.amounts[t], (flow.waiting[t], -1.0)]
            self.row(f"{name}_waiting_{slot}", terms, EQ)
        # The step ends when every move has ended.
        self.row(f"{name}_all", [(flow.waiting[self.end], 1.0)], EQ)

    def _add_chains(self) -> None:
        """Updates run in the order of backward, and a piece is read, updated, then written."""
        if not self.updates:
            return
        end, updates = self.end, self.updates
        left, after = self.per_slot("left"), self.per_slot("updates_from")
        # left_t: seconds from the end of slot t to the end of the step.
        self.row("left_end", [(left[end], 1.0)], EQ)
        self.row("updates_from_end", [(after[end], 1.0)], EQ)
        for t, following in pairwise(range(end + 1)):
            name = self.slot_name(t)
            step = [(left[t], 1.0), (left[following], -1.0)]
            step += [(self.stall[following], -1.0), (self.compute[following], -1.0)]
            self.row(f"left_{name}", step, EQ)
            # updates_from_t = updates_from_{t+1} + the updates of slot t
            terms = [(after[t], 1.0), (after[following], -1.0)]
            terms += [(y, -size) for y, size in updates.amounts[t]]
            self.row(f"updates_from_{name}", terms, EQ)
        for _, state, y in self.model.each_state():
            if not state.update_s:
                continue
            # The update of a slot, and all updates behind it in the lane, wait for its gradients.
            t, waits = state.update_slot, 0.0
            if state.gradients and self.problem.settings.updates == "in backward":
                flow = self.leaving[state.gradients.tier]
                waits = state.gradients.bytes / self.byte_unit * flow.rate
            if state.scattered and self.network and state.scattered.slot == t:
                # Its pieces leave one after the other, while the next are summed.
                summed_s = self.network.scattered * state.scattered.bytes
                waits = max(waits, summed_s / self.second_unit)
            name = f"tail_{y.name}"
            self.row(name, [(left[t], 1.0), (after[t], -1.0), (y, -waits)], GE)
        if not self.reads or not self.writes:
            return
        written = {t: dict(terms) for t, terms in self.writes.amounts.items()}
        for name, earlier in (("read", self.reads), ("updated", updates)):
            ratio = max(
                (
                    size / written[t][y]
                    for t, terms in earlier.amounts.items()
                    for y, size in terms
                    if y in written.get(t, {})
                ),
                default=0.0,
            )
            if earlier is updates and len(self.problem.tiers) > 1:
                continue  # updates of states in host memory are never written
            for t in range(end + 1):
                # What is still to be read or updated is still to be written.
                terms = [(earlier.waiting[t], 1.0), (self.writes.waiting[t], -ratio)]
                self.row(f"{name}_before_written_{self.slot_name(t)}", terms, LE)

    def _add_limits(self, static: list[pulp.LpVariable]) -> None:
        """In every slot: what the decisions need, what is ahead and what waits fit the budget.

        Compute waits for what drains before it starts (os, ws); what a slot fetches ahead counts
        in full, since its bytes are reserved from the slot that submits the move.
        """
        ahead = [*self.fetched.values(), *([self.gathered] if self.gathered else [])]
        for t in range(self.end + 1):
            terms: Terms = [(static[t], 1.0)]
            terms += [(flow.waiting[t], 1.0) for flow in ahead]
            flows = [(flow, 1.0) for flow in self.leaving.values()]
            if self.scattered and t < self.end:  # the device's update waits for sums
                flows.append((self.scattered, 1.0))
            if self.writes:
                flows.append((self.writes, self.held_per_written))
            for flow, held in flows:
                if t and held:
                    terms.append((flow.waiting[t - 1], held))
                if 0 < t < self.end and held:  # nothing waits before the device's update
                    terms.append((flow.stall[t], -held))
            self.memory_rows.append(self.row(f"memory_{self.slot_name(t)}", terms, LE, 1.0))

    def collectives(self) -> list[Flow]:
        """What collectives do, on one lane."""
        return [flow for flow in (self.gathered, self.scattered, self.summed) if flow]

    def seconds(self) -> Terms:
        """The seconds of the phase."""
        return [(variable, 1.0) for variable in (*self.stall, *self.compute)]

    def seconds_and_moves(self) -> Terms:
        """The same, and a little of all that moves."""
        flows = [*self.fetched.values(), *self.leaving.values(), self.updates]
        flows += [*self.shards.values(), *self.collectives()]
        few = [
            (variable, 1e-3 * flow.rate)
            for flow in flows
            if flow
            for variable in (*flow.stall, *flow.compute)
        ]
        compute = [(variable, 1.0) for variable in self.compute]
        return [*compute, *((variable, 1.0 + 1e-3) for variable in self.stall), *few]
