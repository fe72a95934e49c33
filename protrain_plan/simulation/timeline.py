"""Start and end of each of a program's moves, with a profile's durations.

An event-driven run: compute and every lane progress at rates that depend on the running set (see
`rates`). Rates are constant between events, so the result is exact for this model. The thread that
launches an accelerator's work has its own clock: it runs ahead, or the device waits for it.

Overlapping steps run until one leaves what it found: that step repeats.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import add
from typing import Literal

from protrain_plan.simulation.group import collective_seconds
from protrain_plan.simulation.rates import rates
from protrain_runtime.contract.program.effects import BoundProgram, update_seconds
from protrain_runtime.contract.program.program import UPDATE_ON_DEVICE, MoveKind
from protrain_runtime.contract.records.hardware import LaunchKind, is_accelerator


@dataclass(frozen=True, slots=True)
class Span:
    """One move, or one slot's compute: start and end in seconds of the step."""

    name: str
    lane: str
    start_s: float
    end_s: float


Reason = Literal[
    "fetch",  # for a slot's inputs to arrive
    "drain",  # for bytes to leave the device before the slot starts
    "end",  # after the last compute, for running moves
]


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which compute waited before a slot.

    Slot 2U is the device's update, and 2U + 1 stands for the end of the step. `waited_for` names
    the move whose end ended the wait: of those awaited, the last to end.
    """

    slot: int
    seconds: float
    waited_for: str
    lane: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step. `stall_s` is the time in which compute waited, the sum of `stalls`.

    `compute` has the start and the end of each slot's compute and, last, of the device's update:
    a span only where it takes time. Where steps overlap, spans may end after the step.
    """

    spans: tuple[Span, ...]
    step_seconds: float
    stall_s: float
    stalls: tuple[Stall, ...]
    compute: tuple[tuple[float, float], ...]


def _work(program: BoundProgram) -> list[float]:
    """The seconds of every move when nothing interferes; most are like others, and known.

    They are latency + bytes / bandwidth; of an update of a piece, piece_s + parameters / speed.
    """
    profile, work = program.profile, list[float]()
    known = program.implications.known_seconds
    for move in program.moves:
        tier, count = move.lane.tier, move.stop - move.start
        like = (move.kind, move.lane, move.bytes, count)
        seconds = known.get(like)
        if seconds is None:
            if move.kind in ("all-gather", "reduce-scatter", "all-reduce"):
                machine, settings = profile.hardware, program.settings
                seconds = collective_seconds(move.kind, move.bytes, machine, settings)
            elif move.lane.direction == "update":
                seconds = update_seconds(profile.optimizer, count, on_device=tier == "device")
            else:
                assert tier is not None and tier != "device", "others have no link"
                link, inwards = profile.hardware.tier(tier).link, move.lane.channel.inwards
                bytes_per_s = link.read_bytes_per_s if inwards else link.write_bytes_per_s
                seconds = link.latency_s + move.bytes / bytes_per_s
            known[like] = seconds
        work.append(seconds)
    return work


_LAUNCHED_AS: Mapping[MoveKind, LaunchKind] = {
    "fetch": "fetch",
    "swap in": "swap",
    "swap out": "swap",
    "spill gradients": "spill gradients",
    "update": "update",
}


def launch_seconds(program: BoundProgram) -> list[float]:
    """Seconds of every move in the thread that launches, or that computes on a CPU.

    Those of its kind where they were measured, else `move_s`.
    """
    hardware = program.profile.hardware
    costs = {cost.kind: cost for cost in hardware.launches}
    if not costs:
        return [hardware.move_s] * len(program.moves)
    tensors, found = program.implications.tensor_counts, list[float]()
    for move in program.moves:
        kind, part = _LAUNCHED_AS.get(move.kind), move.share[1] - move.share[0]
        if pieces := move.stop - move.start:
            state = program.states[move.unit]
            kind = "streamed update" if state.decision.update_on_device else kind
            part = pieces / state.own.num_parameters
        cost = costs.get(kind) if kind else None
        found.append(
            cost.seconds + cost.tensor_s * tensors[move.unit] * part if cost else hardware.move_s
        )
    return found


def slot_seconds(program: BoundProgram) -> list[float]:
    """Compute seconds of every slot, recomputation and updates in backward included."""
    costs = [option.cost for option in program.activations]
    return [
        (costs[slot.unit].forward_s if slot.forward else costs[slot.unit].backward_s)
        + sum(program.states[unit].device_s for unit in slot.stepped)
        for slot in program.slots
    ]


def occupied_seconds(program: BoundProgram) -> tuple[list[float], list[float]]:
    """Seconds of every slot, and of the device's update: of compute, and of its launching thread.

    One thread launches an accelerator's work, submits moves and ends them (counted at submission:
    the end is seen at a later boundary); an update in backward is launched in about a move's time.
    A processor computes in that thread, without launches.
    """
    move_s, costs = program.profile.hardware.move_s, [each.cost for each in program.activations]
    handling_s = launch_seconds(program)
    # The optimizer updates persistent chunks and shards on the device; updates in backward take
    # their time there.
    end, update_s = len(program.slots), 0.0
    if program.updating:
        stepped = sum(state.num_stepped for state in program.states if state.step_slot == end)
        update_s = stepped / program.profile.optimizer.device_parameters_per_s
    computing = [*slot_seconds(program), update_s]
    handling = [
        sum(handling_s[number] for number in (*slot.submit, *slot.finish)) for slot in program.slots
    ]
    handling.append(sum(handling_s[number] for number in program.last))
    if not is_accelerator(program.device):
        return list(map(add, computing, handling)), [0.0] * len(computing)
    launching = [
        costs[slot.unit].forward_launch_s
        if slot.forward
        else costs[slot.unit].backward_launch_s + len(slot.stepped) * move_s
        for slot in program.slots
    ]
    return computing, list(map(add, [*launching, 0.0], handling))


def host_update_seconds(program: BoundProgram) -> float:
    """Seconds of a step's host updates beside an accelerator, without interference."""
    if not is_accelerator(program.device):
        return 0.0
    moves = zip(program.moves, _work(program), strict=True)
    return sum(s for m, s in moves if m.lane.direction == "update" and m.lane.tier != "device")


def simulate(program: BoundProgram) -> Timeline:
    """Run the program once."""
    run = _Simulation(program)
    seconds, stall = run.run()
    run.end_moves()
    return Timeline(run.spans(), seconds, stall, run.stalls(), run.computed())


def simulated_seconds(
    program: BoundProgram, *, within_s: float = inf, lanes_at: float = 1.0
) -> tuple[float, float]:
    """`step_seconds` and `stall_s` of the same run, without its spans.

    Lanes run at `lanes_at` of their speed; the device's own update does not slow. Infinity if a
    step without leftovers of another already takes `within_s`.
    """
    return _Simulation(program, lanes_at).run(within_s)


def first_step_seconds(program: BoundProgram) -> float:
    """Seconds of a separate step, from its first slot to its last move's end."""
    return simulated_seconds(replace(program, updates={}))[0]


_NEVER = inf
_CRUMB = 1e-12
"""Seconds of work that count as zero."""

MOST_STEPS = 8
"""Steps that follow the first one, until one repeats: mostly one does, and 1 of 3,400 random
problems needs a third. Where none does, the longer of the last two counts."""

SAME_S = 1e-9
"""Negligible difference in seconds of work."""

_Rates = tuple[float, tuple[tuple[int, float], ...]]
"""The rates of compute and of each running lane, by number, until the next event."""


class _Simulation:
    """A run's state; lanes have numbers, and a set of running lanes is a bit mask.

    The planner's search spends its time here: an event touches only running lanes, and an ended
    move names the lanes it unblocks.
    """

    def __init__(self, program: BoundProgram, lanes_at: float = 1.0) -> None:
        self.program = program
        self.now = self.stall = self.began = 0.0
        moves = program.moves
        self.work = _work(program)
        if lanes_at != 1.0:
            speeds = (1.0 if move.lane == UPDATE_ON_DEVICE else lanes_at for move in moves)
            self.work = [taken / speed for taken, speed in zip(self.work, speeds, strict=True)]
        self.after = [move.after for move in moves]
        # The moves of the step before that moves wait for. Of moves, these lists are of one step;
        # numbers go on from step to step.
        self.awaited: dict[int, int] = {}
        self.num_moves = len(moves)
        self.first = 0  # the number of the running step's first move
        # What a step does not wait for at its end, counted from its first move.
        self.runs_on = program.running_on
        self.compute_work, self.launch_work = occupied_seconds(program)
        self.launched = 0.0  # when the thread that launches has launched the last slot
        self.lanes = sorted({move.lane for move in moves}, key=str)
        numbers = {lane: number for number, lane in enumerate(self.lanes)}
        self.lane_of = [numbers[move.lane] for move in moves]
        self.queues: list[deque[int]] = [deque() for _ in self.lanes]
        self.held: dict[int, list[int]] = {}  # move -> lanes whose next move waits for it
        self.running = [-1] * len(self.lanes)
        self.left = [0.0] * len(self.lanes)
        self.bits = 0
        self.started = [0.0] * len(moves)
        self.ended: list[float | None] = [None] * len(moves)
        self.spent: list[tuple[float, float]] = []  # each slot's compute
        self.waited: list[tuple[int, Reason, Sequence[int], float]] = []  # for moves, seconds
        # By the running lanes, beside compute and while it waits; programs of one problem that
        # have the same lanes know the same.
        known = program.implications.known_rates.setdefault(tuple(self.lanes), ({}, {}))
        self.computing_rates: dict[int, _Rates] = known[0]
        self.waiting_rates: dict[int, _Rates] = known[1]

    def run(self, within_s: float = inf) -> tuple[float, float]:
        """The seconds of a step, and of its stalls; see `simulated_seconds`."""
        self._step()
        seconds = self.now - self.began
        if seconds >= within_s:
            return inf, inf
        before = self._left_over()
        longer, steps = seconds, 0
        while before and steps < MOST_STEPS:
            self._follow()
            self._step()
            longer, seconds, left = seconds, self.now - self.began, self._left_over()
            if left.keys() == before.keys() and all(
                abs(work - before[number]) < SAME_S for number, work in left.items()
            ):
                return seconds, self.stall
            before, steps = left, steps + 1
        return max(seconds, longer), self.stall

    def _left_over(self) -> dict[int, float]:
        """By move, counted from its step's first, the work that a step leaves to the next one."""
        left: dict[int, float] = {}
        for lane, queue in enumerate(self.queues):
            left |= {n - self.first: self.work[n % self.num_moves] for n in queue}
            if self.running[lane] >= 0:
                left[self.running[lane] - self.first] = self.left[lane]
        return left

    def end_moves(self) -> None:
        """End the moves that run on after the step."""
        now, stall, waited = self.now, self.stall, len(self.waited)
        self._wait(range(len(self.program.moves)), len(self.program.slots) + 1, "end")
        self.now, self.stall = now, stall
        del self.waited[waited:]

    def computed(self) -> tuple[tuple[float, float], ...]:
        """The start and the end of each slot's compute, from the step's start on."""
        return tuple((start - self.began, end - self.began) for start, end in self.spent)

    def _follow(self) -> None:
        """Begin the next step, in which updates of this one run on."""
        if not self.first:
            for slot in self.program.slots[: self.program.num_units]:
                for number in slot.submit:
                    awaited = self.program.awaited(self.program.moves[number])
                    if awaited is not None:
                        self.awaited[number] = awaited
        self.started += [0.0] * self.num_moves
        self.ended += [None] * self.num_moves
        self.first, self.began, self.stall = self.first + self.num_moves, self.now, 0.0
        self.spent.clear()
        self.waited.clear()

    def _step(self) -> None:
        """From the first slot to the end of the last move, but for what runs on."""
        self.launched = self.now
        for index, slot in enumerate(self.program.slots):
            if slot.drained_before and self.first:
                self._wait(slot.drained_before, index, "drain", before=True)
            if slot.drained:
                self._wait(slot.drained, index, "drain")
            if slot.submit:
                self._submit(slot.submit)
            if slot.ready:
                self._wait(slot.ready, index, "fetch")
            self._compute(index)
            if slot.finish:
                self._submit(slot.finish)
        if self.program.reduced:
            self._wait(self.program.reduced, len(self.program.slots), "drain")
        moves = range(len(self.program.moves))
        if self.program.last or self.program.speculative:
            # Clipping: no other update before the norm of all gradients is known.
            others = self.program.speculative.union(self.program.last)
            before = [number for number in moves if number not in others]
            self._wait(before, len(self.program.slots), "drain")
            self.launched = max(self.launched, self.now)
            self._submit(self.program.last)
        self._compute(-1)
        ends = [number for number in moves if number not in self.runs_on]
        self._wait(ends if self.runs_on else moves, len(self.program.slots) + 1, "end")

    def spans(self) -> tuple[Span, ...]:
        """Spans of compute, then of the moves in the order of submission, by their ends."""
        spans = [
            Span(self.program.slot_name(index), "compute", start, end)
            for index, (start, end) in enumerate(self.computed())
            if end > start
        ]
        for number in range(len(self.program.moves)):
            start, end = self.started[self.first + number], self.ended[self.first + number]
            assert end is not None
            lane, name = str(self.lanes[self.lane_of[number]]), self.program.move_name(number)
            spans.append(Span(name, lane, start - self.began, end - self.began))
        return tuple(sorted(spans, key=lambda span: (span.end_s, span.start_s)))

    def stalls(self) -> tuple[Stall, ...]:
        """Every wait in which time passed, with the move that ended it."""
        found: list[Stall] = []
        for slot, reason, awaited, seconds in self.waited:
            last = max(awaited, key=lambda number: self.ended[number] or 0.0)
            last %= self.num_moves
            lane = str(self.lanes[self.lane_of[last]])
            found.append(Stall(slot, seconds, self.program.move_name(last), lane, reason))
        return tuple(found)

    def _submit(self, moves: Sequence[int]) -> None:
        lane_of, queues, running, first = self.lane_of, self.queues, self.running, self.first
        for move in moves:
            lane = lane_of[move]
            queue = queues[lane]
            queue.append(first + move)
            if running[lane] < 0 and len(queue) == 1:
                self._start_next(lane)

    def _wait(
        self, moves: Sequence[int], slot: int, reason: Reason, *, before: bool = False
    ) -> None:
        """Run the lanes until all of `moves` have ended, of this step or of the one before."""
        since, ended = self.now, self.ended
        first = self.first - (len(self.program.moves) if before else 0)
        for number in moves:
            while ended[first + number] is None:
                self._advance(None)
        if self.now > since:
            self.stall += self.now - since
            awaited = [first + number for number in moves] if first else moves
            self.waited.append((slot, reason, awaited, self.now - since))

    def _compute(self, slot: int) -> None:
        """The device computes what has been launched: no slot ends before its last launch."""
        start, left = self.now, self.compute_work[slot]
        while left > 0:
            left = self._advance(left)
        self.launched += self.launch_work[slot]
        while self.now < self.launched:
            self._advance(None, self.launched)
        self.spent.append((start, self.now))

    def _advance(self, compute_left: float | None, until: float = _NEVER) -> float:
        """To the next event; returns the compute work that is left then."""
        known = self.waiting_rates if compute_left is None else self.computing_rates
        found = known.get(self.bits)
        if found is None:
            running = [n for n in range(len(self.lanes)) if self.bits >> n & 1]
            channels = [self.lanes[n].channel for n in running]
            hardware, computing = self.program.profile.hardware, compute_left is not None
            compute, of_lanes = rates(hardware, channels, computing=computing)
            found = known[self.bits] = compute, tuple(zip(running, of_lanes, strict=True))
        compute, lanes = found
        left = self.left
        step = until - self.now if compute_left is None else compute_left / compute
        for lane, rate in lanes:
            until_end = left[lane] / rate
            if until_end < step:
                step = until_end
        assert step < _NEVER, "a wait that no running move can end"
        self.now += step
        for lane, rate in lanes:
            rest = left[lane] - step * rate
            # Rounding may leave a crumb of the work that this step was chosen to finish.
            if rest > _CRUMB:
                left[lane] = rest
            else:
                self._end(lane)
        if compute_left is None:
            return 0.0
        compute_left -= step * compute
        return compute_left if compute_left > _CRUMB else 0.0

    def _end(self, lane: int) -> None:
        """The lane's move has ended: what waited for it may start."""
        number = self.running[lane]
        self.ended[number] = self.now
        self.running[lane] = -1
        self.bits -= 1 << lane
        if self.queues[lane]:
            self._start_next(lane)
        for waiting in self.held.pop(number, ()):
            self._start_next(waiting)

    def _start_next(self, lane: int) -> None:
        """Start the lane's next move, or note which move it waits for."""
        number, ended = self.queues[lane][0], self.ended
        move = number % self.num_moves
        first = number - move
        for other in self.after[move]:
            if ended[first + other] is None:
                self.held.setdefault(first + other, []).append(lane)
                return
        if first and move in self.awaited:
            other = first - self.num_moves + self.awaited[move]
            if ended[other] is None:
                self.held.setdefault(other, []).append(lane)
                return
        self.queues[lane].popleft()
        self.running[lane] = number
        self.left[lane] = self.work[move]
        self.started[number] = self.now
        self.bits += 1 << lane
