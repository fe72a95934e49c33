"""The fluid inventory model: transfers as liquids, whose optimum no simulated schedule beats.

Slot t runs from the end of compute t-1 to the end of compute t: a stall of s_t seconds, then
compute for d_t seconds. Slot 2U is the device's update of the persistent chunks, and the wait for
the last moves after it. Bytes are fractions of the device's budget M, seconds of the model's plain
compute time. Decisions are binaries (fractions in the relaxation), everything else is continuous:

    s, d            seconds of stall and of compute
    m               bytes that stand for the decisions alone (leads and drains 0)
    hs, hc, J       per tier: bytes fetched during stall and compute, and fetched ahead after it
    os, oc, Q       per tier: swapped activations and gradients that leave, and wait to leave
    rs, rc, R       optimizer states read from disk, and waiting to be read
    ws, wc, W       parameters and states written to disk, and waiting to be written
    us, uc, P       seconds of updates on the host, and waiting to be done
    rs_host ...     the same of states in host memory that the device updates, if any

and of several devices

    ns, nc, N       parameters gathered from all ranks during stall and compute, and ahead
    ks, kc, K       per tier: this rank's shards of them, which take no room of their own
    xs, xc, X       gradients scattered to the ranks that have them, and waiting to be
    ys, yc, Y       gradients summed for all ranks, and waiting to be

Where steps overlap, the first slot follows the last one: what waits of updates after slot 2U waits
before slot 0, and has an end by the forward slot that fetches what is updated.

Over a window of several slots, stalls, compute and flows may be sums. What waits is known at its
end then, and its sum over the window's slots: rows of the window are the sums of its slots' rows,
which every schedule meets as well. Decisions and what stands for them stay per slot. So a model of
a hundred units has a tenth of the flows, and a bound that is a little lower:

    J_all, Q_all ...   what waits after each slot, summed over the slots of a window

The model relaxes the program: moves are divisible and without latency, a lane serves them in any
order, a swap may return before it left, states waiting in place leave bit by bit. So its optimum
bounds the seconds of every plan within the budgets (a test holds this).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import pulp

from protrain_plan.planning.model.decision_model import EQ, GE, LE, DecisionModel, Terms
from protrain_plan.planning.model.problem import SAFE, Problem
from protrain_plan.planning.model.solver import Stopped, relaxed
from protrain_plan.simulation.rates import contention, crossing, rates
from protrain_runtime.contract.program.program import NETWORK, UPDATE_ON_DEVICE, UPDATES, Channel
from protrain_runtime.contract.records.hardware import is_accelerator


class Chain(NamedTuple):
    """The flows of updates of one kind: states are read, updated, and written."""

    read: str
    update: str
    write: str


BELOW = Chain("read", "up", "write")
"""Updates on the host, where states from disk pass through."""

ON_DEVICE = Chain("read_host", "up_device", "write_host")
"""Updates on the device, where states from host memory pass through."""

_UPDATES = (*BELOW, *ON_DEVICE)
"""Flows that may run on into the next step."""

BOUND_TOLERANCE = 1e-6
"""Slack of the bound for the solver's feasibility tolerance (1e-7) and rounded pieces."""


@dataclass(slots=True, eq=False)  # variables overload `==` to make constraints, which are truthy
class Flow:
    """One kind of work on a lane: amounts during stalls, during compute, and waiting.

    Fetches wait on the device, `ahead` of their slot; other work waits to be done. `rate` turns its
    unit (bytes / M, or seconds) into fractions of the plain compute time.
    """

    channel: Channel
    ahead: bool
    stall: list[pulp.LpVariable]
    compute: list[pulp.LpVariable]
    waiting: list[pulp.LpVariable]
    all: list[pulp.LpVariable]  # waiting after each slot, summed over a window
    rate: float
    of_slot: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    amounts: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))  # of a window


Weighted = tuple[tuple[Channel, float], ...]
"""Channels, weighted per second."""


class ForwardBackward:
    """One forward and backward: transfers and time of a model's decisions."""

    def __init__(self, model: "Fluid", static: list[pulp.LpVariable], *, updating: bool) -> None:
        self.model, self.problem = model, model.problem
        self.windows, self.window_of = model.windows, model.window_of
        self.last = len(self.windows) - 1  # the window of the device's update alone
        self.prefix, self.updating = "" if updating else "micro_", updating
        self.byte_unit, self.second_unit = model.byte_unit, model.second_unit
        self.memory_rows: list[pulp.LpConstraint] = []
        self.stall, self.compute = self.per_window("s"), self.per_window("d")
        self.flows: dict[str, Flow] = {}
        self.several = self.problem.settings.group.num_devices > 1
        self.overlap = updating and self.problem.settings.overlap_steps
        self.lane_seconds = self.problem.lane_seconds
        self.hardware = self.problem.profile.hardware
        # Everything beside compute, except updates on the device, which take turns with it.
        tiers = self.hardware.tiers
        self.channels = [Channel(tier.name, inwards) for tier in tiers for inwards in (True, False)]
        self.channels += [UPDATES] * bool(tiers) + [NETWORK] * self.several
        self.on_device = updating and any(
            o.decision.update_on_device for _, o, _ in model.each_state()
        )
        self.held_per_written: dict[str, float] = {}
        # The ranks have equal shards of gathered fetches.
        shards = any(state.fetches and state.gathers for _, state, _ in model.each_state())
        self.held_per_shard = float(shards * self.problem.settings.group.num_shards)
        self._add_flows()
        self._add_amounts()
        self._add_balances()
        self._add_lanes()
        self._add_compute()
        # One thread launches the whole phase, during stalls and compute. Omitted if the device's
        # minimum exceeds that thread's maximum.
        costs = [[o.cost for o in options.activations] for options in self.problem.options]
        most = sum(max(cost.launch_s for cost in unit) for unit in costs)
        least = sum(min(cost.compute_s for cost in unit) for unit in costs)
        if most > least and is_accelerator(self.hardware.device.kind):
            launches = [
                (x, option.cost.launch_s / self.second_unit)
                for _, option, x in model.each_activation()
            ]
            self.row("launches", [*launches, *((v, -f) for v, f in self.seconds())], LE)
        if updating:
            self._add_chains()
        self._add_limits(static)

    def name(self, window: int) -> str:
        """A window is named by its last slot."""
        return self.model.slot_name(self.windows[window][-1])

    def variable(self, name: str) -> pulp.LpVariable:
        return self.model.variable(f"{self.prefix}{name}")

    def per_window(self, name: str) -> list[pulp.LpVariable]:
        return [self.variable(f"{name}_{self.name(w)}") for w in range(len(self.windows))]

    def row(self, name: str, terms: Terms, sense: int, right: float = 0.0) -> pulp.LpConstraint:
        return self.model.row(f"{self.prefix}{name}", terms, sense, right)

    def _add_flow(
        self,
        name: str,
        channel: Channel,
        names: str,
        *,
        ahead: bool = False,
        per_byte: float | None = None,
    ) -> None:
        """Add work on a channel's lanes; updates are in seconds, all else in bytes."""
        if channel.tier:
            per_byte = self.lane_seconds.per_byte[channel]
        rate = 1.0 if per_byte is None else self.byte_unit * per_byte / self.second_unit
        stall, compute, waiting = map(self.per_window, names.split())
        every = list(waiting)
        for number, window in enumerate(self.windows):
            if len(window) > 1:
                every[number] = self.variable(f"{names.split()[2]}_all_{self.name(number)}")
        self.flows[name] = Flow(channel, ahead, stall, compute, waiting, every, rate)

    def on(self, channel: Channel) -> list[Flow]:
        """The flows on the lanes of a channel."""
        return [flow for flow in self.flows.values() if flow.channel == channel]

    def _add_flows(self) -> None:
        """Add fetches for slots, and slots' moves, reads, updates and writes."""
        tiers, several = [tier.name for tier in self.hardware.tiers], self.several
        for name in tiers:
            inwards, outwards = Channel(name, True), Channel(name)
            self._add_flow(name, inwards, f"hs_{name} hc_{name} J_{name}", ahead=True)
            self._add_flow(f"leave_{name}", outwards, f"os_{name} oc_{name} Q_{name}")
            if name == "disk" and self.updating:
                self._add_flow("read", inwards, "rs rc R")
                self._add_flow("write", outwards, "ws wc W")
            if name == "host" and self.on_device:
                self._add_flow(ON_DEVICE.read, inwards, "rs_host rc_host R_host")
                self._add_flow(ON_DEVICE.write, outwards, "ws_host wc_host W_host")
                words = "us_device uc_device P_device"
                self._add_flow(ON_DEVICE.update, UPDATE_ON_DEVICE.channel, words)
        if tiers:
            self._add_flow("up", UPDATES, "us uc P")
        # Shards on tiers, gathers from all ranks, and reductions.
        for name in tiers if several else ():
            words = f"ks_{name} kc_{name} K_{name}"
            self._add_flow(f"{name}_shards", Channel(name, True), words, ahead=True)
        if several:
            seconds = self.lane_seconds
            self._add_flow("ranks", NETWORK, "ns nc N", ahead=True, per_byte=seconds.gathered)
            if self.updating or self.problem.settings.adds_shards:
                self._add_flow("scatter", NETWORK, "xs xc X", per_byte=seconds.scattered)
            if self.updating:
                self._add_flow("sum", NETWORK, "ys yc Y", per_byte=seconds.summed)

    def _add_amounts(self) -> None:
        """Sum each decision's amounts per flow, by slot."""
        # On several devices only the last micro-batch moves gradients, except for sums of shards;
        # the host adds none.
        several, updating = self.several, self.updating

        def ask(name: str, slot: int, binary: pulp.LpVariable, amount: float) -> None:
            self.flows[name].of_slot[slot].append((binary, amount))
            self.flows[name].amounts[self.window_of[slot]].append((binary, amount))

        unit = self.byte_unit
        for _, activation, x in self.model.each_activation():
            if activation.swap_in and activation.swap_out:
                fetch, leaving = activation.swap_in, activation.swap_out
                ask(fetch.tier, fetch.slot, x, fetch.bytes / unit)
                ask(f"leave_{leaving.tier}", leaving.slot, x, leaving.bytes / unit)
        for unit_index, state, y in self.model.each_state():
            slot = self.model.end - 1 - unit_index
            update_s = state.update_s / self.second_unit
            for fetch in (*state.fetches, *state.from_disk):
                # A common copy takes its own room, as do all fetches on one device.
                if shard := several * (fetch.bytes - state.common_bytes):
                    ask(f"{fetch.tier}_shards", fetch.slot, y, shard / unit)
                if shard < fetch.bytes:
                    ask(fetch.tier, fetch.slot, y, (fetch.bytes - shard) / unit)
            for gather in state.gathers:
                ask("ranks", gather.slot, y, gather.bytes / unit)
            if state.gradients and (updating or not several):
                leaving = state.gradients
                ask(f"leave_{leaving.tier}", leaving.slot, y, leaving.bytes / unit)
            if state.added_s:
                ask("up", slot, y, state.added_s / self.second_unit)
            if state.scattered and "scatter" in self.flows:
                ask("scatter", slot, y, state.scattered.bytes / unit)
            if not updating:
                continue
            if state.summed_bytes:
                ask("sum", slot, y, state.summed_bytes / unit)
            chain = ON_DEVICE if state.decision.update_on_device else BELOW
            if state.update_s:
                ask(chain.update, state.update_slot, y, update_s)
            if state.write_bytes:
                ask(chain.read, state.update_slot, y, state.read_bytes / unit)
                ask(chain.write, state.update_slot, y, state.write_bytes / unit)
                if state.in_place:
                    held = state.in_place.held / state.in_place.bytes
                    known = self.held_per_written.get(chain.write, held)
                    self.held_per_written[chain.write] = min(held, known)

    def _add_balances(self) -> None:
        """Balance the waiting amounts after each window: prefetched first, then remaining."""
        of_unit = {y: unit for unit, _, y in self.model.each_state()}
        for name, flow in sorted(self.flows.items(), key=lambda item: not item[1].ahead):
            goes_round = self.overlap and name in _UPDATES
            for w in range(self.last + 1):
                slot = self.name(w)
                before: Terms = [(flow.waiting[w - 1], 1.0)] if w or goes_round else []
                after = (flow.waiting[w], -1.0)
                # Amounts waiting before each slot, summed.
                each = [*before, (flow.all[w], 1.0), after]
                if flow.ahead:
                    needed = [(binary, -size) for binary, size in flow.amounts[w]]
                    # A slot's inputs are present when its compute starts.
                    self.row(f"arrive_{name}_{slot}", [*each, (flow.stall[w], 1.0), *needed], GE)
                    # J_t = J_{t-1} + hs_t + hc_t - needed_t
                    came = [(flow.stall[w], 1.0), (flow.compute[w], 1.0)]
                    self.row(f"ahead_{name}_{slot}", [*before, *came, *needed, after], EQ)
                else:
                    done = [(flow.stall[w], -1.0), (flow.compute[w], -1.0)]
                    # Work done by the end of this slot was produced by earlier slots.
                    self.row(f"{name}_produced_{slot}", [*each, *done], GE)
                    # waiting_t = waiting_{t-1} - done_t + produced_t
                    produced = flow.amounts[w]
                    self.row(f"{name}_waiting_{slot}", [*before, *done, *produced, after], EQ)
                if flow.all[w] is not flow.waiting[w]:
                    # The amount waiting after the last slot is one of the summed.
                    self.row(f"{name}_all_{slot}", [(flow.all[w], 1.0), after], GE)
            if goes_round:
                # While a forward slot computes, only later units' work waits.
                amounts = [pair for terms in flow.amounts.values() for pair in terms]
                for w, window in enumerate(self.windows):
                    unit = window[0]
                    if unit >= self.problem.count:
                        break
                    later = [(y, -size) for y, size in amounts if of_unit[y] > unit]
                    left: Terms = [(flow.waiting[w - 1], 1.0), (flow.stall[w], -1.0)]
                    self.row(f"{name}_by_{self.model.slot_name(unit)}", [*left, *later], LE)
            elif not flow.ahead:  # the step ends with its last move
                self.row(f"{name}_all", [(flow.waiting[self.last], 1.0)], EQ)
        # The device's update waits for the sums of gradients.
        if self.several and self.updating:
            sums = (self.flows["scatter"], self.flows["sum"])
            self.row("summed_before_update", [(f.compute[self.last], 1.0) for f in sums], EQ)

    def _add_lanes(self) -> None:
        """A lane's work in a stall takes at most its time; lanes that share a link share it."""
        every: list[Weighted] = [((channel, 1.0),) for channel in self.channels if not channel.tier]
        if self.on_device:
            every.append(((UPDATE_ON_DEVICE.channel, 1.0),))
        every += [works for link in self._shared() for works in link]
        self._add_sums("lane", every, computing=False)

    def _add_sums(self, word: str, every: Sequence[Weighted], *, computing: bool) -> None:
        """Weighted seconds of channels fit the time of stalls, or of compute beside them."""
        times = self.compute if computing else self.stall
        for number, works in enumerate(every):
            name = f"{word}_{works[0][0]}_{number}".replace(" ", "_")
            for t, time in enumerate(times):
                terms: Terms = []
                for channel, factor in works:
                    speed = contention(self.hardware, channel).lane if computing else 1.0
                    for flow in self.on(channel):
                        amount = flow.compute[t] if computing else flow.stall[t]
                        terms.append((amount, factor * flow.rate / speed))
                self.row(f"{name}_{self.name(t)}", [*terms, (time, -1.0)], LE)

    def _shared(self) -> Iterator[list[Weighted]]:
        """Per link the weighted seconds of its lanes that fit into the available time.

        With k of `crossing` between the directions of a link, and n between it and the network:

            in + k out + n net <= time,   net + n (in + k out) <= time

        and the same with in and out exchanged. For running lanes at their `rates`, no sum grows
        faster than time: with all three, of a link's share s = 1 / (1 + n) and duplex d = 1 / (1 +
        k), s d + k s d + n s = s + n s = 1.
        """
        links = [channel for channel in self.channels if channel.tier]
        for inwards, outwards in zip(links[::2], links[1::2], strict=True):
            k = crossing(self.hardware, inwards, outwards)
            n = crossing(self.hardware, NETWORK, inwards) if self.several else 0.0
            of_link: list[Weighted] = []
            for first, second in ((inwards, outwards), (outwards, inwards)):
                if n:
                    of_link.append(((NETWORK, n), (first, 1.0), (second, k)))
                    of_link.append(((NETWORK, 1.0), (first, n), (second, n * k)))
                else:
                    of_link.append(((first, 1.0), (second, k)))
            yield of_link

    def _add_compute(self) -> None:
        """Compute's time is divided among the sets of lanes that run beside it and slow it down.

        While a set S runs, compute progresses at the product of its lanes' contention factors, and
        a lane at its own factor, times `duplex` if both directions of its link are in S. With r_St
        seconds of set S in slot t, these rows allow exactly the simulator's rates:

            d_t = sum over S of r_St,   compute_t <= sum of rate_S · r_St,
            work of lane l in t <= sum over S with l of rate_Sl · r_St

        Updates on the device take turns with compute: they are its seconds, in any slot. Lanes that
        do not slow compute take none of its time; their rows are those of stalls.
        """
        seconds: list[Terms] = [[] for _ in range(self.last + 1)]
        for unit, activation, x in self.model.each_activation():
            forward, backward = self.window_of[unit], self.window_of[self.model.end - 1 - unit]
            seconds[forward].append((x, activation.cost.forward_s / self.second_unit))
            seconds[backward].append((x, activation.cost.backward_s / self.second_unit))
        for _, state, y in self.model.each_state():
            if state.device_s and self.updating:
                step = self.window_of[state.step_slot]
                seconds[step].append((y, state.device_s / self.second_unit))
        slowing = [one for one in self.channels if contention(self.hardware, one).compute < 1]
        sets = [
            [channel for place, channel in enumerate(slowing) if number >> place & 1]
            for number in range(1 << len(slowing))
        ]
        of_sets = [rates(self.hardware, running, computing=True) for running in sets]
        for t in range(self.last + 1):
            slot = self.name(t)
            spent = [self.variable(f"r{number}_{slot}") for number in range(len(sets))]
            self.row(f"time_{slot}", [*((r, 1.0) for r in spent), (self.compute[t], -1.0)], EQ)
            slowed = [(r, -rate) for r, (rate, _) in zip(spent, of_sets, strict=True)]
            turns = [(one.compute[t], 1.0) for one in self.on(UPDATE_ON_DEVICE.channel)]
            self.row(f"compute_{slot}", [*seconds[t], *turns, *slowed], LE)
            for channel in slowing:
                terms = [(flow.compute[t], flow.rate) for flow in self.on(channel)]
                terms += [
                    (r, -lanes[running.index(channel)])
                    for r, running, (_, lanes) in zip(spent, sets, of_sets, strict=True)
                    if channel in running
                ]
                self.row(f"beside_{channel}_{slot}".replace(" ", "_"), terms, LE)
        # During compute, lanes' work fits its time at their remaining speed.
        quiet = [channel for channel in self.channels if channel not in slowing]
        every: list[Weighted] = [((channel, 1.0),) for channel in quiet if not channel.tier]
        for link in self._shared():
            # The sets' seconds cover lanes that slow compute.
            every += [works for works in link if any(channel in quiet for channel, _ in works)]
        self._add_sums("beside_together", every, computing=True)

    def _add_chains(self) -> None:
        """Updates run in backward's order; a piece is read, updated, then written."""
        if "up" not in self.flows:
            return
        left = self.per_window("left")
        # left_t: seconds from the end of slot t to the end of the step.
        self.row("left_end", [(left[self.last], 1.0)], EQ)
        for t, following in pairwise(range(self.last + 1)):
            step = [(left[t], 1.0), (left[following], -1.0)]
            step += [(self.stall[following], -1.0), (self.compute[following], -1.0)]
            self.row(f"left_{self.name(t)}", step, EQ)
        self._add_chain(BELOW, left)
        if self.on_device:
            self._add_chain(ON_DEVICE, left)

    def _add_chain(self, chain: Chain, left: Sequence[pulp.LpVariable]) -> None:
        """Add updates of one kind; `left` are seconds from a slot's end to the step's."""
        updates, end = self.flows[chain.update], self.last
        word = "" if chain is BELOW else "device_"
        after = self.per_window(f"{word}updates_from")
        self.row(f"{word}updates_from_end", [(after[end], 1.0)], EQ)
        for t, following in pairwise(range(end + 1)):
            # updates_from_t = updates_from_{t+1} + the updates of slot t
            terms = [(after[t], 1.0), (after[following], -1.0)]
            terms += [(y, -size) for y, size in updates.amounts[t]]
            self.row(f"{word}updates_from_{self.name(t)}", terms, EQ)
        until = self._add_updates_until(chain) if self.overlap else []
        # Speculative updates may end before those that wait for the end of backward.
        until_waiting = until
        if self.overlap and any(
            option.decision.speculate for _, option, _ in self.model.each_state()
        ):
            until_waiting = self._add_updates_until(chain, speculative=False)
        for unit, state, y in self.model.each_state():
            if not state.update_s or state.decision.update_on_device != (chain is ON_DEVICE):
                continue
            # A slot's update, and all behind it in the lane, wait for its gradients.
            slot, waits = state.update_slot, 0.0
            window = self.windows[t := self.window_of[slot]]
            in_backward = self.problem.settings.updates == "in backward" or state.decision.speculate
            if state.gradients and in_backward:
                flow = self.flows[f"leave_{state.gradients.tier}"]
                waits = state.gradients.bytes / self.byte_unit * flow.rate
            if state.scattered and self.several and state.scattered.slot == slot:
                # Its pieces leave one by one while the next are reduced.
                summed_s = self.lane_seconds.scattered * state.scattered.bytes
                waits = max(waits, summed_s / self.second_unit)
            # A later-ending window has at most the time left at its beginning.
            ends = left[t] if slot == window[-1] else left[t - 1]
            name, behind = f"tail_{y.name}_{unit}", [(after[t], -1.0)]
            if slot != window[0]:  # at least its own, and later windows'
                behind = [(after[t + 1], -1.0), (y, -state.update_s / self.second_unit)]
            if self.overlap:
                # Until the unit's next forward: its own updates and earlier units'.
                until_unit = self.window_of[unit]
                computed = until_unit + (unit != self.windows[until_unit][0])
                ahead = [*self.stall[: until_unit + 1], *self.compute[:computed]]
                behind = [(seconds, 1.0) for seconds in ahead]
                behind.append(((until if in_backward else until_waiting)[unit], -1.0))
            self.row(name, [(ends, 1.0), *behind, (y, -waits)], GE)
        if not (writes := self.flows.get(chain.write)):
            return
        written = {t: dict(terms) for t, terms in writes.amounts.items()}
        for name, earlier in (("read", self.flows[chain.read]), ("updated", updates)):
            ratio = max(
                (
                    size / written[t][y]
                    for t, terms in earlier.amounts.items()
                    for y, size in terms
                    if y in written.get(t, {})
                ),
                default=0.0,
            )
            if earlier is self.flows["up"] and len(self.problem.tiers) > 1:
                continue  # these updates of states in host memory are never written
            for t in range(end + 1):
                # Work not yet read or updated is not yet written.
                terms = [(earlier.waiting[t], 1.0), (writes.waiting[t], -ratio)]
                self.row(f"{word}{name}_before_written_{self.name(t)}", terms, LE)

    def _add_updates_until(
        self, chain: Chain, *, speculative: bool = True
    ) -> list[pulp.LpVariable]:
        """Per unit the seconds of its and earlier updates; without `speculative`, of late ones."""
        name = "updates_until" if chain is BELOW else "device_updates_until"
        name = name if speculative else f"waiting_{name}"
        until = [self.variable(f"{name}_{n}") for n in range(self.problem.count)]
        own: list[Terms] = [[] for _ in until]
        for unit, state, y in self.model.each_state():
            counts = speculative or not state.decision.speculate
            if state.decision.update_on_device == (chain is ON_DEVICE) and counts:
                own[unit].append((y, -state.update_s / self.second_unit))
        for unit, total in enumerate(until):
            before = [(until[unit - 1], -1.0)] if unit else []
            self.row(f"{name}_{unit}", [(total, 1.0), *before, *own[unit]], EQ)
        return until

    def _add_limits(self, static: list[pulp.LpVariable]) -> None:
        """In every slot, live bytes, prefetched bytes and waiting bytes fit the budget.

        Compute waits for drains before it starts (os, ws); a slot's prefetches count in full, since
        their bytes are reserved from the submitting slot. Of a window, the mean of its slots fits,
        and its first and last slot as far as known.
        """
        flows = [(f, 1.0) for name, f in self.flows.items() if name.startswith("leave_")]
        writes = [self.flows[name] for name in self.held_per_written]
        held_writes = list(zip(writes, self.held_per_written.values(), strict=True))
        # Prefetch flows, with the device bytes per byte. A rank's shard is read into its place in
        # the gather buffer: the room is taken by the gathered bytes, or, per shard, by those to
        # come.
        shards = [flow for name, flow in self.flows.items() if name.endswith("_shards")]
        others = [flow for flow in self.flows.values() if flow.ahead and flow not in shards]
        every_ahead = {"": [(flow, 1.0) for flow in others]}
        if shards and self.held_per_shard:
            rest = [(flow, 1.0) for flow in others if flow is not self.flows["ranks"]]
            every_ahead["_of_shards"] = [*((flow, self.held_per_shard) for flow in shards), *rest]
        for w, window in enumerate(self.windows):
            leaving = [pair for pair in (*flows, *held_writes) if pair[1]]
            if "scatter" in self.flows and w < self.last:  # the device's update waits for sums
                leaving.append((self.flows["scatter"], 1.0))
            part = 1.0 / len(window)
            terms: Terms = [(static[t], part) for t in window]
            for flow, held in leaving:
                goes_round = self.overlap and flow in writes
                if not w and not goes_round:
                    continue
                terms.append((flow.waiting[w - 1], part * held))
                # Nothing waits before the device's update.
                if w < self.last:
                    terms.append((flow.stall[w], -part * held))
                if len(window) > 1:
                    terms += [(flow.all[w], part * held), (flow.waiting[w], -part * held)]
            for word, ahead in every_ahead.items():
                coming = [(flow.all[w], part * held) for flow, held in ahead]
                name = f"memory{word}_{self.name(w)}"
                self.memory_rows.append(self.row(name, [*terms, *coming], LE, 1.0))
                if len(window) > 1:
                    self._add_edges(w, static, word, ahead, leaving)

    def _add_edges(
        self,
        w: int,
        static: list[pulp.LpVariable],
        word: str,
        ahead: Sequence[tuple[Flow, float]],
        leaving: Sequence[tuple[Flow, float]],
    ) -> None:
        """The first and the last slot of a window, and all slots for the decisions alone."""
        first, last = self.windows[w][0], self.windows[w][-1]
        begins: Terms = [(static[first], 1.0)]
        ends: Terms = [(static[last], 1.0)]
        for flow, held in ahead:
            # Of earlier prefetches, the window's first slot consumes at most its need.
            begins.append((flow.waiting[w - 1], held))
            begins += [(x, -held * size) for x, size in flow.of_slot[first]]
            ends.append((flow.waiting[w], held))
        for flow, held in leaving:
            begins += [(flow.waiting[w - 1], held), (flow.stall[w], -held)]
            # Everything waiting after the last slot, except its own output, waited before.
            ends.append((flow.waiting[w], held))
            ends += [(x, -held * size) for x, size in flow.of_slot[last]]
        names = self.model.slot_name(first), self.model.slot_name(last)
        self.memory_rows.append(self.row(f"memory{word}_from_{names[0]}", begins, LE, 1.0))
        self.memory_rows.append(self.row(f"memory{word}_until_{names[1]}", ends, LE, 1.0))
        if not self.updating or word:
            return  # decisions are the other phase's, or in the other rows
        for t in self.windows[w]:
            name = f"memory_static_{self.model.slot_name(t)}"
            self.memory_rows.append(self.row(name, [(static[t], 1.0)], LE, 1.0))

    def seconds(self) -> Terms:
        return [(variable, 1.0) for variable in (*self.stall, *self.compute)]


def windows(count: int, size: int) -> list[range]:
    """The slots of a step in windows of up to `size`, mirrored in backward.

    The first and the last slot, and the two between forward and backward, are alone: peaks,
    beginnings and ends are there.
    """
    forward = [range(1)]
    forward += [range(t, min(t + size, count - 1)) for t in range(1, count - 1, size)]
    forward += [range(count - 1, count)] if count > 1 else []
    end = 2 * count
    backward = [range(end - one.stop, end - one.start) for one in reversed(forward)]
    return [*forward, *backward, range(end, end + 1)]


class Fluid(DecisionModel):
    """Decisions, memory, transfers and time of one problem; minimises the step's seconds.

    `window` is the number of slots that share flows (1: none, for the tightest bound). With
    micro-batches there are two phases with the same decisions: the last one, with the update, and
    the earlier ones.
    """

    def __init__(self, problem: Problem, *, window: int = 1, alike: bool = False) -> None:
        super().__init__(problem, alike=alike)
        self.windows = windows(problem.count, window)
        self.window_of = {t: w for w, slots in enumerate(self.windows) for t in slots}
        self.second_unit = sum(
            min(option.cost.compute_s for option in options.activations)
            for options in problem.options
        )
        static = self.add_memory()
        self.phases = [ForwardBackward(self, static, updating=True)]
        if problem.settings.micro_batches > 1:
            self.phases.append(ForwardBackward(self, static, updating=False))
        if not alike:
            self.count_units()
        self.minimise(self.seconds())

    def seconds(self) -> Terms:
        """The step's seconds, over all its micro-batches."""
        times = (1.0, float(self.problem.settings.micro_batches - 1))
        return [
            (variable, factor * weight)
            for phase, weight in zip(self.phases, times, strict=False)
            for variable, factor in phase.seconds()
        ]

    @property
    def memory_rows(self) -> list[pulp.LpConstraint]:
        """The rows that limit the device's bytes, of all phases."""
        return [row for phase in self.phases for row in phase.memory_rows]

    def least_bytes(self, limit_s: float, stopped: Stopped) -> float:
        """Least device bytes, without context, for a step of `limit_s`; infinity if impossible."""
        budget = self.variable("budget")
        for row in self.memory_rows:
            row.expr.addterm(budget, -1.0)
            row.changeRHS(0.0)
        # The step's seconds.
        self.row("seconds", self.seconds(), LE, limit_s / self.second_unit)
        self.minimise([(budget, 1.0)])
        answer = relaxed(self.pulp, stopped=stopped)
        return max(0.0, answer.bound * self.byte_unit * (1 - SAFE))

    def lower_bound_seconds(self, objective: float) -> float:
        """The lower bound on every plan's seconds, from a bound on the objective."""
        return max(0.0, objective * self.second_unit * (1 - BOUND_TOLERANCE))
