"""Leads and drains by pace: each move is submitted when its lane is about to be free.

One walk over the slots of a step, with a clock for compute and one for each lane. What a lane
begins before the running slot ends enters it now, if the device has room until it is used; earlier
it would hold room and gain nothing. What leaves stays as long as nobody needs its room. Where the
room is needed, compute waits for the oldest. The slots in which that happens become a schedule, and
the clocks say about how long the step takes.

The clocks are simple: lanes serve in turn, and neither share links nor slow compute down. So the
seconds are for comparing choices, and the simulator has the last word.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import _schedule
from protrain_plan.program.implications import ActivationOption, StateOption
from protrain_plan.records.plan import Schedule

LOOKED_AHEAD = 6
"""Slots for which what is about to leave counts before something is fetched ahead of them."""

Clock = tuple[int, float]
"""A lane by its number, and the seconds that a move takes of it."""


class _Arrival(NamedTuple):
    """What a slot needs, in whichever slots it may be submitted."""

    slot: int
    unit: int
    kind: int  # 0: for forward, 1: for backward, 2: swapped activations
    earliest: int
    bytes: int
    pieces: tuple[int, ...]
    clocks: tuple[Clock, ...]


class _Departure(NamedTuple):
    """What a slot leaves until it has left; `kept` is what the device's update has still."""

    slot: int
    unit: int
    swap: bool
    bytes: int
    kept: int
    clocks: tuple[Clock, ...]
    in_place: bool


class _Update(NamedTuple):
    """An update beside compute: lanes that read, update and write, -1 for none, with seconds."""

    unit: int
    read: Clock
    update: Clock
    write: Clock
    pieces: int
    on_device: bool
    waits: bool  # for the end of backward
    reads: int  # slot of the forward that fetches what it updates, or -1


class _Option(NamedTuple):
    """What one decision of a unit has for the walk."""

    compute: tuple[tuple[int, float], ...]
    changes: tuple[tuple[int, int], ...]
    arrivals: tuple[_Arrival, ...]
    departures: tuple[_Departure, ...]
    update: _Update | None


class Pace(NamedTuple):
    """How the walk looks at lanes.

    slower  times as long as by themselves, since a link's directions share it
    ahead   seconds after the running slot within which a lane must be free to be given more
    care    the part of what is about to leave that counts before something is fetched ahead of it
    late    of the chunks that are updated, those updated late, where steps overlap
    """

    slower: float = 1.0
    ahead: float = 0.0
    care: float = 1.0
    late: float = 0.0


class Paced(NamedTuple):
    """A schedule, and about the seconds of a step under it."""

    schedules: tuple[Schedule, ...]
    seconds: float


class Pacer:
    """Walks over choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        names = ["network", "update host", "update disk", "update device"]
        tiers = [tier.name for tier in problem.profile.hardware.tiers]
        for tier in tiers:
            names += [f"{lane} {tier}" for lane in ("fetch", "read", "spill", "write")]
        self.lanes = {name: number for number, name in enumerate(names)}
        # States share a link's direction with all else.
        self.beside = [-1] * len(names)
        for tier in tiers:
            for one, other in (("fetch", "read"), ("spill", "write")):
                first, second = self.lanes[f"{one} {tier}"], self.lanes[f"{other} {tier}"]
                self.beside[first], self.beside[second] = second, first
        self.read = {t.name: 1 / t.link.read_bytes_per_s for t in problem.profile.hardware.tiers}
        self.write = {t.name: 1 / t.link.write_bytes_per_s for t in problem.profile.hardware.tiers}
        self.options = [
            (
                [self._of_activations(unit, option) for option in options.activations],
                [self._of_states(unit, option) for option in options.states],
            )
            for unit, options in enumerate(problem.options)
        ]

    def _of_activations(self, unit: int, option: ActivationOption) -> _Option:
        served = 2 * self.problem.count - 1 - unit
        arrivals: tuple[_Arrival, ...] = ()
        departures: tuple[_Departure, ...] = ()
        if (fetch := option.swap_in) and (out := option.swap_out):
            come = (self.lanes[f"fetch {fetch.tier}"], fetch.bytes * self.read[fetch.tier])
            go = (self.lanes[f"spill {fetch.tier}"], out.bytes * self.write[fetch.tier])
            arrivals = (_Arrival(served, unit, 2, unit + 1, fetch.bytes, fetch.pieces, (come,)),)
            departures = (_Departure(unit, unit, True, out.bytes, 0, (go,), False),)
        compute = ((unit, option.forward_s), (served, option.backward_s))
        return _Option(compute, _changes(option), arrivals, departures, None)

    def _of_states(self, unit: int, option: StateOption) -> _Option:
        network, count = self.problem.lane_seconds.network, self.problem.count
        arrivals: list[_Arrival] = []
        for number, come in enumerate(option.arriving):
            clocks: list[Clock] = []
            if option.fetches:
                fetch = option.fetches[number]
                seconds = fetch.bytes * self.read[fetch.tier]
                clocks.append((self.lanes[f"fetch {fetch.tier}"], seconds))
            if option.gathers:
                clocks.append((0, come.bytes * network.gathered))
            kind = int(come.slot >= count)
            arrivals.append(
                _Arrival(
                    come.slot, unit, kind, come.earliest, come.bytes, come.pieces, tuple(clocks)
                )
            )
        departures: list[_Departure] = []
        clocks = []
        if option.summed_bytes:
            clocks.append((0, option.summed_bytes * network.summed))
            slot = 2 * count - 1 - unit
            departures.append(_Departure(slot, unit, False, 0, 0, tuple(clocks), False))
        elif leaving := option.leaving:
            if option.scattered:
                clocks.append((0, sum(leaving.pieces) * network.scattered))
            if gone := option.gradients:
                seconds = gone.bytes * self.write[gone.tier]
                clocks.append((self.lanes[f"spill {gone.tier}"], seconds))
            departures.append(
                _Departure(
                    leaving.slot,
                    unit,
                    False,
                    leaving.held,
                    leaving.kept,
                    tuple(clocks),
                    option.home == "in place",
                )
            )
        compute = ((option.step_slot, option.device_s),) if option.device_s else ()
        update = self._update(unit, option)
        return _Option(compute, _changes(option), tuple(arrivals), tuple(departures), update)

    def _update(self, unit: int, option: StateOption) -> _Update | None:
        if not option.num_updates:
            return None
        tier = option.tier
        assert tier != "device", "others have no updates beside compute"
        on_device = option.updated_on_device
        read = write = (-1, 0.0)
        if option.write_bytes:
            read = (self.lanes[f"read {tier}"], option.read_bytes * self.read[tier])
            write = (self.lanes[f"write {tier}"], option.write_bytes * self.write[tier])
        lane = self.lanes["update device" if on_device else f"update {tier}"]
        waits = self.problem.settings.updates == "after backward" and not option.speculates
        forward = min((come.slot for come in option.arriving), default=-1)
        seconds = (lane, option.update_s)
        return _Update(unit, read, seconds, write, option.num_updates, on_device, waits, forward)

    @cached_property
    def _base(self) -> int:
        problem = self.problem
        return problem.static_bytes(tuple((0, 0) for _ in problem.options))[0]

    def walk(self, choice: Choice, pace: Pace = Pace()) -> Paced | None:
        """The schedule of a choice, whose decisions fit the tiers; None where the device is full."""
        problem = self.problem
        room = [problem.device - total for total in problem.static_bytes(choice)]
        if min(room) < 0:
            return None
        run = _Walk(self, choice, room, pace)
        return run.paced()


def _changes(option: ActivationOption | StateOption) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for held in option.holdings:
        found += [(held.first, held.bytes), (held.last + 1, -held.bytes)]
    return tuple(found)


class _Walk:
    """One walk: clocks, what stands ahead of its slot, and what has not left."""

    def __init__(self, pacer: Pacer, choice: Choice, room: list[int], pace: Pace) -> None:
        problem = pacer.problem
        self.pacer, self.problem, self.room, self.pace = pacer, problem, room, pace
        self.count, self.end = problem.count, 2 * problem.count
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
        self.free = [0.0] * len(pacer.lanes)

    def paced(self) -> Paced:
        settings = self.problem.settings
        self.updating = settings.micro_batches == 1
        seconds = self.run()
        if settings.micro_batches > 1:
            first = seconds
            return Paced(self.schedules(), first * settings.micro_batches + self.tail(0.0))
        return Paced(self.schedules(), seconds)

    def serve(self, start: float, clocks: Sequence[Clock]) -> float:
        """Let lanes work on something, one after the other; returns when it has ended."""
        free, beside, slower = self.free, self.pacer.beside, self.pace.slower
        for lane, taken in clocks:
            taken *= slower
            begin = free[lane]
            if begin < start:
                begin = start
            other = beside[lane]
            if other >= 0 and free[other] > begin:
                shared = min(taken, free[other] - begin)
                free[other] += taken
                taken += shared
            start = free[lane] = begin + taken
        return start

    def run(self) -> float:
        end, room, compute, free = self.end, self.room, self.compute, self.free
        leaves, due, pace = self.leaves, self.due, self.pace
        queues: dict[int, deque[_Arrival]] = {}
        for arrivals in due:
            for arrival in arrivals:
                queues.setdefault(arrival.clocks[0][0], deque()).append(arrival)
        self.submitted: dict[tuple[int, int], float] = {}
        self.gone: dict[tuple[int, bool], int] = {}
        came: dict[tuple[int, int, int], float] = {}
        out: deque[tuple[float, _Departure]] = deque()
        standing, now, gone = 0, 0.0, self.gone
        in_backward: dict[int, _Update] = {}
        if self.updating:
            in_backward = {one.unit: one for one in self.updates if not one.waits}
        on_device = 0.0  # seconds of updates there that compute takes turns with
        for t in range(end):
            while out and standing > room[t]:
                ended, left = out.popleft()
                now = max(now, ended)
                gone[left.unit, left.swap] = t
                standing -= left.bytes
            horizon = now + compute[t] + pace.ahead
            for lane, queue in queues.items():
                while queue:
                    arrival = queue[0]
                    served, unit, kind, earliest, size, pieces, clocks = arrival
                    if served > t:
                        if free[lane] >= horizon or earliest > t:
                            break
                        if kind == 2 and (unit, True) not in gone:
                            # What comes back needs its room again: the last of it is gone.
                            place = next(
                                (n for n, (_, o) in enumerate(out) if o.unit == unit and o.swap), -1
                            )
                            if place < 0 or out[place][0] > now:
                                break
                            for _ in range(place + 1):
                                _, left = out.popleft()
                                gone[left.unit, left.swap] = t
                                standing -= left.bytes
                        while out and standing + size > room[t] and out[0][0] <= now:
                            _, left = out.popleft()
                            gone[left.unit, left.swap] = t
                            standing -= left.bytes
                        if standing + size > room[t] or min(room[t:served]) < size:
                            break
                        if pace.care and not self.has_room(t, served, size, now, out):
                            break
                    queue.popleft()
                    self.submitted[unit, kind] = served - min(t, served)
                    came[served, unit, kind] = self.serve(now, clocks)
                    for slot in range(t, served):
                        room[slot] -= size
            for arrival in due[t]:
                there = came[t, arrival.unit, arrival.kind]
                if there > now:
                    now = there
            taken = compute[t]
            if on_device:
                turns = min(on_device, taken)
                on_device -= turns
                taken += turns
            now += taken
            for left in leaves[t]:
                ended = self.serve(now, left.clocks)
                if update := in_backward.get(left.unit) if not left.swap else None:
                    done = self.update(update, now, ended)
                    ended = done if left.in_place else ended
                    on_device += update.update[1] * update.on_device
                if t < end - 1 and left.bytes:
                    out.append((ended, left))
                    standing += left.bytes
        kept = sum(left.kept for _, left in out)
        while out and kept > room[end]:
            ended, left = out.popleft()
            now = max(now, ended)
            gone[left.unit, left.swap] = end - 1
            kept -= left.kept
        now += compute[end] + on_device
        if self.updating:
            now = self.tail(now)
        return now

    def tail(self, now: float) -> float:
        """The end of all updates, in order."""
        for lane, free in enumerate(self.free):
            now = max(now, free)
        start = now
        for update in self.updates:
            if update.waits or not self.updating:
                now = max(now, self.update(update, start, start))
        return now

    def update(self, one: _Update, start: float, gradients: float) -> float:
        """The end of an update that may begin at `start`, with its gradients there."""
        free, beside, slower = self.free, self.pacer.beside, self.pace.slower
        lane, taken = one.update
        if one.write[0] < 0:
            free[lane] = max(free[lane], gradients) + taken
            return free[lane]
        read, reading = one.read
        write, writing = one.write
        reading *= slower
        writing *= slower
        came = max(free[read], start) + reading
        if (other := free[beside[read]] - max(free[read], start)) > 0:
            came += min(other, reading)
        free[read] = came
        pieces = one.pieces
        done = max(free[lane], gradients, came - reading) + taken
        done = max(done, came + taken / pieces)
        free[lane] = done
        ended = max(free[write], start) + writing
        ended = max(ended, done + writing / pieces)
        free[write] = ended
        return ended

    def has_room(
        self, t: int, served: int, size: int, now: float, out: Sequence[tuple[float, _Departure]]
    ) -> bool:
        """Whether what is about to leave has room until `served` beside what comes for it."""
        until = min(served, t + LOOKED_AHEAD)
        if until <= t + 1:
            return True
        free, begins, room = self.free, now + self.compute[t], self.room
        ends: list[tuple[float, int]] = [(ended, left.bytes) for ended, left in out]
        lanes: dict[int, float] = {}
        slower, care = self.pace.slower, self.pace.care
        for slot in range(t + 1, until):
            for left in self.leaves[slot - 1]:
                ended = begins
                for lane, taken in left.clocks:
                    ended = max(lanes.get(lane, free[lane]), ended) + taken * slower
                    lanes[lane] = ended
                ends.append((ended, left.bytes))
            still = sum(size for ended, size in ends if ended > begins)
            if size + care * still > room[slot]:
                return False
            begins += self.compute[slot]
        return True

    def schedules(self) -> tuple[Schedule, ...]:
        submitted, gone, end = self.submitted, self.gone, self.end
        drains: dict[int, int] = {}
        for departures in self.leaves:
            for left in departures:
                if not left.swap and (left.unit, False) in gone:
                    drains[left.unit] = gone[left.unit, False] - left.slot - 1
        found: list[Schedule] = []
        for unit in range(self.count):
            swap_lead = submitted.get((unit, 2), 0)
            drain = None
            if (unit, True) in gone:
                slot = gone[unit, True]
                if slot < end - 1 - unit - swap_lead:
                    drain = slot - unit - 1
            found.append(
                _schedule(
                    (
                        submitted.get((unit, 0), 0),
                        submitted.get((unit, 1), 0),
                        swap_lead,
                        drain,
                        drains.get(unit),
                        False,
                    )
                )
            )
        return tuple(found)
