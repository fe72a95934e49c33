"""Leads and drains by pace: each move is submitted when its lane is about to be free.

One walk over the slots of a step, with a clock for compute and one for each lane. What a lane
begins before the running slot ends enters it now, if the device has room until it is used; earlier
it would hold room and gain nothing. What leaves stays until its room is needed. Where the
room is needed, compute waits for the oldest. The slots in which that happens become a schedule, and
the clocks say about how long the step takes.

The clocks are simple: a lane serves in turn, and what shares a link or processor with it makes it
slower, by what is known when it begins. So the seconds are for comparing choices, in a
millisecond where the simulator takes ten, and the simulator has the last word.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from math import ceil, inf, isinf
from typing import NamedTuple

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.simulation.rates import contention, slowed
from protrain_runtime.contract.program.effects import ActivationOption, StateOption
from protrain_runtime.contract.program.program import COLLECT, INWARDS, OUTWARDS, Lane, parts
from protrain_runtime.contract.records.plan import Schedule

LOOKED_AHEAD = 6
"""Slots for which what is about to leave counts before something is fetched ahead of them."""

Clock = tuple[int, float]
"""A lane by its number, and the seconds that a move takes of it."""


class _Arrival(NamedTuple):
    """A move that a slot needs, with the first slot that may submit it."""

    slot: int
    unit: int
    kind: int  # 0: for forward, 1: for backward, 2: swapped activations
    earliest: int
    bytes: int
    pieces: tuple[int, ...]
    clocks: tuple[Clock, ...]
    parts: int = 1  # of which one is gathered while the next is fetched


class _Departure(NamedTuple):
    """Bytes that a slot leaves until they have left; the device's update has `kept` of them."""

    slot: int
    unit: int
    swap: bool
    bytes: int
    kept: int
    clocks: tuple[Clock, ...]
    in_place: bool
    added: tuple[Clock, ...] = ()  # to the gradients of micro-batches before, in host memory


class _Standing(NamedTuple):
    """A departure under way, which ends by its lane's clock."""

    ended: float
    left: _Departure


class _Update(NamedTuple):
    """An update beside compute: lanes that read, update and write, -1 for none, with seconds."""

    unit: int
    read: Clock
    update: Clock
    write: Clock
    pieces: int
    on_device: bool
    waits: bool  # for the end of backward


class _Option(NamedTuple):
    """A decision of a unit as the walk sees it."""

    compute: tuple[tuple[int, float], ...]
    arrivals: tuple[_Arrival, ...]
    departures: tuple[_Departure, ...]
    update: _Update | None


class Pace(NamedTuple):
    """Parameters of a walk.

    wait    of a slot's compute, what it may wait for room for more; what leaves makes it
    late    of the chunks that are updated, those updated late, where steps overlap
    """

    wait: float = 0.1
    late: float = 0.0


PLAIN = Pace()

SIDE_BY_SIDE = 0
"""Parts of what comes from two tiers at a time, and not from one after the other."""


class Paced(NamedTuple):
    """A schedule, and about the seconds of a step under it."""

    schedules: tuple[Schedule, ...]
    seconds: float


class Pacer:
    """Walks over choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # Walks that came to their end, with the seconds within which they did.
        self.walked: dict[tuple[Choice, Pace], tuple[float, Paced]] = {}
        hardware = problem.profile.hardware
        tiers = [tier.name for tier in hardware.tiers]
        lanes = [Lane(direction, tier) for tier in tiers for direction in INWARDS]
        lanes += [Lane(direction, tier) for tier in tiers for direction in OUTWARDS]
        lanes += [Lane("update", "host"), Lane("update", "disk")]
        lanes += [COLLECT] * (problem.settings.group.num_devices > 1)
        self.lanes = {lane: n for n, lane in enumerate((*lanes, Lane("update", "device")))}
        self.of_gradients = [
            n for lane, n in self.lanes.items() if lane.direction in ("spill", "collect")
        ]
        # Per lane those that slow it down, by the seconds that one second of both adds to each.
        self.against: list[list[Clock]] = []
        for lane in self.lanes:
            others = (other for other in lanes if other != lane)
            slower = [
                (self.lanes[one], slowed(hardware, lane.channel, one.channel)) for one in others
            ]
            self.against.append([one for one in slower if one[1] > 0])
        # Lanes that slow compute down, by the seconds that one of compute takes longer.
        self.slowing: list[tuple[list[int], float]] = []
        for channel, of_channel in groupby(lanes, lambda lane: lane.channel):
            kept = contention(hardware, channel).compute
            if kept < 1:
                self.slowing.append(([self.lanes[lane] for lane in of_channel], 1 / kept - 1))
        self.by_itself = [1 / contention(hardware, lane.channel).lane for lane in lanes] + [1.0]
        self.options = [
            (
                [self._of_activations(unit, option) for option in options.activations],
                [self._of_states(unit, option) for option in options.states],
            )
            for unit, options in enumerate(problem.options)
        ]

    def clock(self, lane: Lane, size: int) -> Clock:
        """A transfer of so many bytes."""
        return self.lanes[lane], size * self.problem.lane_seconds.per_byte[lane.channel]

    def _of_activations(self, unit: int, option: ActivationOption) -> _Option:
        served = 2 * self.problem.count - 1 - unit
        arrivals: tuple[_Arrival, ...] = ()
        departures: tuple[_Departure, ...] = ()
        if (fetch := option.swap_in) and (out := option.swap_out):
            come = self.clock(Lane("fetch", fetch.tier), fetch.bytes)
            go = self.clock(Lane("spill", fetch.tier), out.bytes)
            arrivals = (_Arrival(served, unit, 2, unit + 1, fetch.bytes, fetch.pieces, (come,)),)
            departures = (_Departure(unit, unit, True, out.bytes, 0, (go,), False),)
        compute = ((unit, option.cost.forward_s), (served, option.cost.backward_s))
        return _Option(compute, arrivals, departures, None)

    def _of_states(self, unit: int, option: StateOption) -> _Option:
        network, count = self.problem.lane_seconds, self.problem.count
        arrivals: list[_Arrival] = []
        for number, come in enumerate(option.arriving):
            # The disk's lane says when to submit what comes from two tiers: it takes longest.
            fetched = reversed(option.fetched(number))
            clocks = [self.clock(Lane("fetch", one.tier), one.bytes) for one in fetched]
            if option.gathers:
                gathered = option.gathers[number].bytes
                clocks.append((self.lanes[COLLECT], gathered * network.gathered))
            kind, size, moves = int(come.slot >= count), come.bytes, tuple(clocks)
            num_parts = len(parts(come.pieces)) if len(clocks) > 1 else 1
            if option.from_disk:
                num_parts = SIDE_BY_SIDE
            arrivals.append(
                _Arrival(come.slot, unit, kind, come.earliest, size, come.pieces, moves, num_parts)
            )
        departures: list[_Departure] = []
        clocks, on_host = [], self.lanes[Lane("update", "host")]
        if option.summed_bytes:
            clocks.append((self.lanes[COLLECT], option.summed_bytes * network.summed))
            slot = 2 * count - 1 - unit
            departures.append(_Departure(slot, unit, False, 0, 0, tuple(clocks), False))
        elif leaving := option.leaving:
            if option.scattered:
                clocks.append((self.lanes[COLLECT], sum(leaving.pieces) * network.scattered))
            if (gone := option.gradients) and gone.tier:
                clocks.append(self.clock(Lane("spill", gone.tier), gone.bytes))
            slot, held, kept = leaving.slot, leaving.held, leaving.kept
            in_place = option.home == "in place"
            added = ((on_host, option.added_s),) if option.added_s else ()
            departures.append(
                _Departure(slot, unit, False, held, kept, tuple(clocks), in_place, added)
            )
        compute = ((option.step_slot, option.device_s),) if option.device_s else ()
        update: _Update | None = None
        if num_updates := option.num_updates:
            decision, read, write = option.decision, (-1, 0.0), (-1, 0.0)
            lane = Lane("update", option.tier)
            if option.state_lanes:
                reading, lane, writing = option.state_lanes
                read = self.clock(reading, option.read_bytes)
                write = self.clock(writing, option.write_bytes)
            waits = self.problem.settings.updates == "after backward" and not decision.speculate
            seconds, on_device = (self.lanes[lane], option.update_s), decision.update_on_device
            update = _Update(unit, read, seconds, write, num_updates, on_device, waits)
        return _Option(compute, tuple(arrivals), tuple(departures), update)

    def walk(self, choice: Choice, pace: Pace = PLAIN, within_s: float = inf) -> Paced | None:
        """The schedule of a choice that fits the tiers.

        None where the device has no room, or a slot comes too late for the last one to have
        computed `within_s` after the step's begin.
        """
        known_s, known = self.walked.get((choice, pace), (inf, None))
        if known and within_s >= known_s:
            return known
        problem = self.problem
        room = [problem.device - total for total in problem.static_bytes(choice)]
        if min(room) < 0:
            return None
        if paced := _Walk(self, choice, room, pace).paced(within_s):
            self.walked[choice, pace] = within_s, paced
        return paced


class _Walk:
    """One walk: clocks, what stands ahead of its slot, and what has not left."""

    def __init__(self, pacer: Pacer, choice: Choice, room: list[int], pace: Pace) -> None:
        problem = pacer.problem
        self.pacer, self.problem, self.pace = pacer, problem, pace
        self.count, self.end = problem.count, 2 * problem.count
        self.room_at_first = room
        options = [
            of_unit[kind][number]
            for of_unit, decision in zip(pacer.options, choice, strict=True)
            for kind, number in enumerate(decision)
        ]
        self.compute = [0.0] * (self.end + 1)
        self.due: list[list[_Arrival]] = [[] for _ in range(self.end + 1)]
        self.leaves: list[list[_Departure]] = [[] for _ in range(self.end + 1)]
        self.updates: list[_Update] = []
        for option in options:
            for slot, seconds in option.compute:
                self.compute[slot] += seconds
            for arrival in option.arrivals:
                self.due[arrival.slot].append(arrival)
            for departure in option.departures:
                self.leaves[departure.slot].append(departure)
            if option.update:
                self.updates.append(option.update)
        left = ([one.bytes for one in leaves] for leaves in self.leaves)
        self.left_before = [0, *accumulate(map(sum, left))]  # bytes that leave before each slot
        several = Counter((one.unit, one.kind) for arrivals in self.due for one in arrivals)
        self.of_several = {one for one, number in several.items() if number > 1}
        self.free = [0.0] * len(pacer.lanes)
        self.late = self._late(choice)
        self.updated: dict[int, float] = {}  # by unit, when its update ends

    def _late(self, choice: Choice) -> set[int]:
        """Units that are updated late; what waits in place for that takes its room at once."""
        _, states = self.problem.chosen(choice)
        late: set[int] = set()
        for unit in late_units(self.problem, states, self.pace.late):
            if states[unit].home == "in place":
                leaving = states[unit].in_place
                assert leaving, "it leaves when it is updated"
                held, room = leaving.held, self.room_at_first
                stands = [*range(unit), *range(leaving.slot + 1, self.end)]
                if min([room[slot] for slot in stands], default=held) < held:
                    continue
                if room[self.end] < leaving.kept:
                    continue
                for slot in stands:
                    room[slot] -= held
                room[self.end] -= leaving.kept
            late.add(unit)
        return late

    def paced(self, within_s: float) -> Paced | None:
        """The schedule and its seconds. Micro-batches before the last have no updates."""
        settings = self.problem.settings
        if before := settings.micro_batches - 1:
            ended = self.run(within_s / (before + 1), updating=False)
            if isinf(ended):
                return None
            ended = max(ended, *self.free)
            schedules = self.schedules()
            self.free = [0.0] * len(self.free)
            return Paced(schedules, before * ended + self.tail(self.run(inf, updating=True)))
        ended = self.run(within_s, updating=True)
        if isinf(ended):
            return None
        if not settings.overlap_steps or not self.updates:
            return Paced(self.schedules(), self.tail(ended))
        # The next step finds the updates that this one has left.
        self.tail(ended)
        self.free = [max(0.0, free - ended) for free in self.free]
        self.updated = {unit: seconds - ended for unit, seconds in self.updated.items()}
        ended = self.run(within_s, updating=True)
        return None if isinf(ended) else Paced(self.schedules(), ended)

    def serve(self, start: float, clocks: Sequence[Clock]) -> float:
        """Occupy lanes, one after the other; returns when the last ends."""
        free, against, alone = self.free, self.pacer.against, self.pacer.by_itself
        for lane, taken in clocks:
            taken *= alone[lane]
            begin = free[lane]
            if begin < start:
                begin = start
            more = 0.0
            for other, slower in against[lane]:
                if (both := free[other] - begin) > 0:
                    if both > taken:
                        both = taken
                    more += both * slower
                    free[other] += both * slower
            start = free[lane] = begin + taken + more
        return start

    def brought(self, start: float, clocks: Sequence[Clock], num_parts: int) -> float:
        """When something has come that is fetched from `start` on, and gathered part by part."""
        if num_parts == 1:
            return self.serve(start, clocks)
        if num_parts == SIDE_BY_SIDE:
            return max(self.serve(start, (clock,)) for clock in clocks)
        fetch, gather = clocks
        began = max(self.free[fetch[0]], start)
        came = self.serve(start, (fetch,))
        ended = self.serve(began + (came - began) / num_parts, (gather,))
        ended = max(ended, came + gather[1] / num_parts)
        self.free[gather[0]] = ended
        return ended

    def run(self, within_s: float, *, updating: bool) -> float:
        """Walk over the slots; returns when the last one has computed, infinity: later."""
        compute = self.compute
        # When each slot has to begin for the last one to end in time.
        latest = [within_s - rest for rest in accumulate(reversed(compute))][::-1]
        self.room = list(self.room_at_first)
        # What waits for its lane, and when all has come that came ahead of each slot.
        queues: dict[int, deque[_Arrival]] = {}
        for arrivals in self.due:
            for arrival in arrivals:
                queues.setdefault(arrival.clocks[-1][0], deque()).append(arrival)
        self.queues, self.came = list(queues.values()), [0.0] * self.end
        # Leads and drains, what leaves and what has left.
        self.submitted: dict[tuple[int, int], float] = {}
        self.drains: dict[tuple[int, bool], int] = {}
        self.out, self.standing = deque[_Standing](), 0
        self.gone: set[tuple[int, bool]] = set()
        in_backward: dict[int, _Update] = {}
        if updating:
            updates = (one for one in self.updates if not one.waits and one.unit not in self.late)
            in_backward = {one.unit: one for one in updates}
        reduces = updating or self.problem.settings.group.num_devices == 1
        now = self.on_device = 0.0
        for t in range(self.end):
            while self.standing > self.room[t]:  # what stands has no room: wait until it has left
                now = self.retire(t, now)
            if now > latest[t]:
                return inf
            now = self.fetched(t, now)
            now += self.computed(t, now)
            for left in self.leaves[t]:
                self.left(t, now, left, in_backward, reduces=reduces)
        return self.ended(now)

    def fetched(self, t: int, now: float) -> float:
        """Submit what a slot needs, and what its lanes have time and the device has room for.

        Returns when that has come which it needs, and it has found gone what makes room.
        """
        compute, out, room, free = self.compute[t], self.out, self.room, self.free
        ready = max(now, self.came[t])
        for queue in self.queues:
            while queue and queue[0].slot == t:
                ready = max(ready, self.submit(queue.popleft(), 0, now))
        # The slot ends when it has computed, which waits for what it needs.
        horizon = ready + compute
        active = [one for one in self.queues if one and free[one[0].clocks[0][0]] < horizon]
        while active:
            # What is needed first goes first: what comes later takes no room from it.
            queue = active[0]
            for other in active:
                if other[0].slot < queue[0].slot:
                    queue = other
            arrival = queue[0]
            if self.waits(arrival, t, now, horizon):
                active.remove(queue)
                continue
            served, size = arrival.slot, arrival.bytes
            # Find gone what makes room, as far as it has left by then.
            until = now + self.pace.wait * compute
            while out and self.standing + size > room[t] and out[0].ended <= until:
                now = self.retire(t, now)
            lead, there = self.ahead(arrival, t)
            if not lead or not self.has_room(t, served, size, now):
                break
            queue.popleft()
            if not queue:
                active.remove(queue)
            self.came[served] = max(self.came[served], self.submit(arrival, lead, now))
            room[t] -= there
            for slot in range(t + 1, served):
                room[slot] -= size
        return max(now, ready)

    def submit(self, arrival: _Arrival, lead: float, now: float) -> float:
        """Submit the moves that a slot needs; returns when they have ended."""
        _, unit, kind, _, _, _, clocks, num_parts = arrival
        # Several stays of a chunk have one lead.
        self.submitted[unit, kind] = min(self.submitted.get((unit, kind), lead), lead)
        start = max(now, self.updated.get(unit, 0.0)) if kind == 0 else now
        return self.brought(start, clocks, num_parts)

    def waits(self, arrival: _Arrival, t: int, now: float, horizon: float) -> bool:
        """Whether an arrival of a later slot would gain nothing by its submission now."""
        _, unit, kind, earliest, _, _, clocks, num_parts = arrival
        lane, taken = clocks[0]
        if self.free[lane] >= horizon or earliest > t:
            return True
        if len(clocks) > 1 and num_parts and self.free[clocks[1][0]] - taken / num_parts >= horizon:
            return True
        # What comes back needs its room again: the last of it is gone.
        swapped = kind == 2 and (unit, True) not in self.gone
        return swapped and not self.came_to(unit, t, now)

    def computed(self, t: int, now: float) -> float:
        """The seconds that a slot computes beside what lanes do, and updates on the device."""
        compute, free = self.compute[t], self.free
        taken = compute
        for numbers, slower in self.pacer.slowing:
            busy = 0.0
            for number in numbers:
                busy = max(busy, free[number] - now)
            taken += min(busy, compute) * slower
        turns = min(self.on_device, taken)
        self.on_device -= turns
        return taken + turns

    def left(
        self,
        t: int,
        now: float,
        left: _Departure,
        in_backward: Mapping[int, _Update],
        *,
        reduces: bool,
    ) -> None:
        """Submit the moves of what leaves a slot, and its update if that is in backward."""
        ended, clocks = now, left.clocks
        if not left.swap and not reduces:  # the sums of shards, at most
            clocks = clocks[: self.problem.settings.adds_shards and left.bytes > 0]
        if clocks:
            ended = self.serve(now, clocks)
            if left.added:
                self.serve(ended, left.added)
        if not left.swap and (update := in_backward.get(left.unit)):
            done = self.update(update, now, ended)
            ended = done if left.in_place else ended
            self.on_device += update.update[1] * update.on_device
        elif left.in_place and left.unit in self.late:
            return  # its room is taken already
        if t < self.end - 1 and left.bytes:
            self.out.append(_Standing(ended, left))
            self.standing += left.bytes

    def ended(self, now: float) -> float:
        """When the device's update has ended, which begins when there is room for it."""
        # No slot is left to wait for what stands in the device's update, or in the next step.
        out, end, overlap = self.out, self.end, self.problem.settings.overlap_steps
        kept = sum(one.left.kept for one in out)
        last = max((n for n, one in enumerate(out) if overlap and one.left.in_place), default=-1)
        while out and (kept > self.room[end] or last >= 0):
            kept -= out[0].left.kept
            now = self.retire(end - 1, now)
            last -= 1
        if any(one.waits for one in self.updates):  # for all gradients, and their norm
            now = max(now, *(self.free[lane] for lane in self.pacer.of_gradients))
        return now + self.compute[end] + self.on_device

    # What leaves

    def retire(self, t: int, now: float) -> float:
        """The oldest departure has left before slot t; returns when it has."""
        ended, left = self.out.popleft()
        self.standing -= left.bytes
        self.gone.add((left.unit, left.swap))
        self.drains[left.unit, left.swap] = t - left.slot - 1
        return max(now, ended)

    def came_to(self, unit: int, t: int, now: float) -> bool:
        """Whether a unit's swapped activations have left by now; they are found gone then."""
        for place, one in enumerate(self.out):
            if one.left.unit == unit and one.left.swap:
                if one.ended > now:
                    return False
                for _ in range(place + 1):
                    self.retire(t, now)
                return True
        return False

    def ahead(self, arrival: _Arrival, t: int) -> tuple[float, int]:
        """The lead of a move submitted now, and its bytes with room in slot t; 0: no room."""
        served, size, pieces, room = arrival.slot, arrival.bytes, arrival.pieces, self.room
        if min(room[t + 1 : served], default=size) < size:
            return 0, 0
        if (left := room[t] - self.standing) >= size:
            return served - t, size
        if len(pieces) == 1 or (arrival.unit, arrival.kind) in self.of_several:
            return 0, 0  # other stays have whole leads
        fraction, taken = first_fraction(pieces, left)
        return (served - t - 1 + fraction, taken) if fraction else (0, 0)

    def tail(self, now: float) -> float:
        """The end of all updates, in the order in which they are made."""
        overlap = self.problem.settings.overlap_steps
        late = [one for one in self.updates if one.waits or one.unit in self.late]
        for one in late if overlap else reversed(late):
            self.update(one, now, now)
        return max(now, *self.free)

    def update(self, one: _Update, start: float, gradients: float) -> float:
        """The end of an update that may begin at `start`, and works once gradients are there."""
        lane, taken = one.update
        if one.write[0] < 0:
            ended = self.serve(gradients, (one.update,))
        else:
            free, pieces = self.free, one.pieces
            began = max(free[one.read[0]], start)
            came = self.serve(start, (one.read,))
            # The optimizer begins with the first piece, and ends after the last.
            done = max(free[lane], gradients, began + (came - began) / pieces) + taken
            free[lane] = done = max(done, came + taken / pieces)
            ended = self.serve(max(start, done - taken), (one.write,))
            ended = max(ended, done + one.write[1] / pieces)
        self.updated[one.unit] = ended
        return ended

    def has_room(self, t: int, served: int, size: int, now: float) -> bool:
        """Whether what is about to leave has room until `served` beside what comes for it."""
        until = min(served, t + LOOKED_AHEAD)
        if until <= t + 1:
            return True
        free, begins, room = self.free, now + self.compute[t], self.room
        # All that could stand then, as if none of it left: mostly there is room for that.
        most = self.standing + self.left_before[until - 1] - self.left_before[t]
        if size + most <= min(room[t + 1 : until]):
            return True
        ends: list[tuple[float, int]] = [(one.ended, one.left.bytes) for one in self.out]
        lanes: dict[int, float] = {}
        for slot in range(t + 1, until):
            for left in self.leaves[slot - 1]:
                ended = begins
                for lane, taken in left.clocks:
                    ended = max(lanes.get(lane, free[lane]), ended) + taken
                    lanes[lane] = ended
                ends.append((ended, left.bytes))
            still = sum([held for ended, held in ends if ended > begins])
            if size + still > room[slot]:
                return False
            begins += self.compute[slot]
        return True

    def schedules(self) -> tuple[Schedule, ...]:
        """The slots of the walk as a plan says them."""
        submitted, drains, end = self.submitted, self.drains, self.end
        found: list[Schedule] = []
        for unit in range(self.count):
            lead, drain = submitted.get((unit, 2), 0), drains.get((unit, True))
            # What comes back waits for all of it anyway.
            if drain == end - 1 - unit - ceil(lead) - unit - 1:
                drain = None
            leads = submitted.get((unit, 0), 0), submitted.get((unit, 1), 0), lead
            found.append(schedule_of((*leads, drain, drains.get((unit, False)), unit in self.late)))
        return tuple(found)


def first_fraction(pieces: tuple[int, ...], room: int) -> tuple[float, int]:
    """The largest share of a move, from its first piece on, that takes up to `room` bytes.

    As a fraction of two digits, where that names the pieces (else of more), and its bytes.
    """
    done = list(accumulate(pieces))
    number = bisect_right(done, room, hi=len(done) - 1)
    taken = done[number - 1] if number else 0
    for digits in (100, 10_000, 10**8) if taken else ():
        fraction = ceil(taken / done[-1] * digits) / digits
        if fraction < 1 and fraction * done[-1] < done[number]:  # the next piece does not fit in
            return fraction, taken
    return 0.0, 0


@lru_cache(maxsize=100_000)
def schedule_of(values: tuple[float, float, float, float | None, float | None, bool]) -> Schedule:
    """One object per schedule: a search compares and hashes many."""
    return Schedule(
        forward_lead=values[0],
        backward_lead=values[1],
        swap_lead=values[2],
        swap_drain=values[3],
        update_drain=values[4],
        update_late=values[5],
    )


def late_units(problem: Problem, states: Sequence[StateOption], share: float) -> Sequence[int]:
    """The units of which a share is updated late; after backward, all are.

    The others keep the optimizer busy while backward goes on, and should be needed last. Where
    nothing waits on the device, they are spread: the last unit, whose gradients come first, is one
    of them. What waits in place waits for the shorter, the earlier its unit is.
    """
    if not problem.settings.overlap_steps or problem.settings.updates == "after backward":
        return ()
    late: list[int] = []
    of_homes: dict[bool, list[int]] = {False: [], True: []}
    for unit, state in enumerate(states):
        if state.num_updates:
            of_homes[state.home == "in place"].append(unit)
    for in_place, units in of_homes.items():
        count = len(units)
        num_late = round(share * count)
        if in_place:
            late += units[:num_late]
            continue
        soon = {count - 1 - n * count // (count - num_late) for n in range(count - num_late)}
        late += (unit for n, unit in enumerate(units) if n not in soon)
    return late
