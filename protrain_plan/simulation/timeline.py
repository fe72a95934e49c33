"""When each move of a programme starts and ends, with a profile's durations.

An event-driven run: compute and every lane progress at a rate that depends on what else runs.
A link's two directions keep `duplex` of their speed while both run; compute and a lane keep their
`Contention` fractions while both run (factors multiply). Between events all rates are constant, so
the result is exact for this model.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from protrain_plan.program import Move, Program
from protrain_plan.records.plan import Persistent, UnitPlan
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import activation_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """One move, or one slot's compute, from start to end in seconds since the step began."""

    name: str
    lane: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step. `stall_s` is the time in which compute waited."""

    spans: tuple[Span, ...]
    step_seconds: float
    stall_s: float


def move_seconds(move: Move, plans: Sequence[UnitPlan], profile: Profile) -> float:
    """How long a move takes when nothing interferes: latency + bytes / bandwidth."""
    if move.lane.tier is None:
        return (move.stop - move.start) / profile.optimizer.host_parameters_per_s
    link = profile.hardware.tier(move.lane.tier).link
    size = move.bytes
    if size is None:
        size = activation_bytes(plans[move.unit].activations, profile.units[move.unit]).swapped
    match move.lane.direction:
        case "fetch":
            return link.latency_s + size / link.read_bytes_per_s
        case "spill":
            return link.latency_s + size / link.write_bytes_per_s
        case "update":
            raise AssertionError("an update has no tier")
        case _:
            assert_never(move.lane.direction)


def slot_seconds(program: Program, plans: Sequence[UnitPlan], profile: Profile) -> list[float]:
    """Compute seconds of every slot, recomputation included."""
    seconds: list[float] = []
    for slot in program.slots:
        unit = profile.units[slot.unit]
        cost = activation_bytes(plans[slot.unit].activations, unit).cost
        seconds.append(cost.forward_s if slot.forward else cost.backward_s)
    return seconds


def device_update_seconds(plans: Sequence[UnitPlan], profile: Profile) -> float:
    """Seconds of the optimizer's step on the persistent chunks."""
    parameters = sum(
        unit.num_parameters
        for plan, unit in zip(plans, profile.units, strict=True)
        if isinstance(plan.states, Persistent)
    )
    return parameters / profile.optimizer.device_parameters_per_s


def simulate(program: Program, plans: Sequence[UnitPlan], profile: Profile) -> Timeline:
    """Run the programme once."""
    run = _Simulation(program, plans, profile)
    run.run()
    return Timeline(run.spans(), run.now, run.stall)


def simulated_seconds(
    program: Program, plans: Sequence[UnitPlan], profile: Profile
) -> tuple[float, float]:
    """`step_seconds` and `stall_s` of the same run, without its spans."""
    run = _Simulation(program, plans, profile)
    run.run()
    return run.now, run.stall


class _Rates(NamedTuple):
    """The rates of compute and of each running lane, by its number, until the next event."""

    compute: float
    lanes: tuple[tuple[int, float], ...]


class _Simulation:
    """The state of a run; lanes go by numbers, and a set of running lanes by the sum of bits."""

    def __init__(self, program: Program, plans: Sequence[UnitPlan], profile: Profile) -> None:
        self.program, self.profile = program, profile
        self.now = self.stall = 0.0
        moves = program.moves
        self.work = [move_seconds(move, plans, profile) for move in moves]
        self.compute_work = [
            *slot_seconds(program, plans, profile),
            device_update_seconds(plans, profile),
        ]
        self.lanes = sorted({move.lane for move in moves}, key=str)
        numbers = {lane: number for number, lane in enumerate(self.lanes)}
        self.lane_of = [numbers[move.lane] for move in moves]
        self.queues: list[deque[int]] = [deque() for _ in self.lanes]
        self.idle = set(range(len(self.lanes)))  # lanes that run nothing
        self.running = [-1] * len(self.lanes)
        self.left = [0.0] * len(self.lanes)
        self.bits = 0
        self.started = [0.0] * len(moves)
        self.ended: list[float | None] = [None] * len(moves)
        self.computed: list[tuple[float, float]] = []
        self.rates: dict[tuple[int, bool], _Rates] = {}

    def run(self) -> None:
        """From the first slot to the end of the last move."""
        for index, slot in enumerate(self.program.slots):
            self._wait(slot.drained)
            self._submit(slot.submit)
            self._wait(slot.ready)
            self._compute(self.compute_work[index])
            self._submit(slot.finish)
        self._compute(self.compute_work[-1])
        self._wait(range(len(self.program.moves)))

    def spans(self) -> tuple[Span, ...]:
        """What ran when: compute first, then the moves in the order of submission."""
        names = [
            f"{'forward' if slot.forward else 'backward'} {slot.unit}"
            for slot in self.program.slots
        ]
        names.append("update on the device")
        spans = [
            Span(name, "compute", start, end)
            for name, (start, end) in zip(names, self.computed, strict=True)
            if end > start
        ]
        for number, end in enumerate(self.ended):
            assert end is not None
            lane = str(self.lanes[self.lane_of[number]])
            spans.append(Span(self.program.move_name(number), lane, self.started[number], end))
        return tuple(sorted(spans, key=lambda span: (span.end_s, span.start_s)))

    def _submit(self, moves: Sequence[int]) -> None:
        for number in moves:
            self.queues[self.lane_of[number]].append(number)

    def _wait(self, moves: Sequence[int]) -> None:
        """Let the lanes run until all of `moves` have ended."""
        before = self.now
        for number in moves:
            while self.ended[number] is None:
                self._advance(None)
        self.stall += self.now - before

    def _compute(self, seconds: float) -> None:
        start, left = self.now, seconds
        while left > 0:
            left = self._advance(left)
        self.computed.append((start, self.now))

    def _advance(self, compute_left: float | None) -> float:
        """To the next event; returns the compute work that is left then."""
        if self.idle:
            self._start_moves()
        key = (self.bits, compute_left is not None)
        rates = self.rates.get(key)
        if rates is None:
            rates = self.rates[key] = self._rates(computing=compute_left is not None)
        left = self.left
        step = min(
            [left[lane] / rate for lane, rate in rates.lanes],
            default=float("inf"),
        )
        if compute_left is not None:
            step = min(step, compute_left / rates.compute)
        assert step < float("inf"), "a wait that no running move can end"
        self.now += step
        for lane, rate in rates.lanes:
            left[lane] -= step * rate
            # Rounding may leave a crumb of the work that this step was chosen to finish.
            if left[lane] <= 1e-12:
                self.ended[self.running[lane]] = self.now
                self.idle.add(lane)
                self.bits -= 1 << lane
        if compute_left is None:
            return 0.0
        remaining = compute_left - step * rates.compute
        return remaining if remaining > 1e-12 else 0.0

    def _rates(self, *, computing: bool) -> _Rates:
        hardware = self.profile.hardware
        running = [n for n in range(len(self.lanes)) if self.bits >> n & 1]
        links = [self.lanes[n].tier for n in running]
        compute, lanes = 1.0, []
        for number in running:
            lane, rate = self.lanes[number], 1.0
            match lane.direction:
                case "fetch":
                    contention = hardware.read_contention
                case "spill":
                    contention = hardware.write_contention
                case "update":
                    contention = hardware.update_contention
                case _:
                    assert_never(lane.direction)
            if computing:
                rate *= contention.lane
                compute *= contention.compute
            if lane.tier is not None and links.count(lane.tier) == 2:
                rate *= hardware.tier(lane.tier).link.duplex
            lanes.append((number, rate))
        return _Rates(compute, tuple(lanes))

    def _start_moves(self) -> None:
        for lane in sorted(self.idle):
            queue = self.queues[lane]
            if not queue:
                continue
            number = queue[0]
            if all(self.ended[other] is not None for other in self.program.moves[number].after):
                queue.popleft()
                self.running[lane] = number
                self.left[lane] = self.work[number]
                self.started[number] = self.now
                self.idle.discard(lane)
                self.bits += 1 << lane
