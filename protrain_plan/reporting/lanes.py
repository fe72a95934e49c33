"""What runs on compute and on each lane, as bars on the time axis, and when compute waits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protrain_plan.reporting.step import Step
from protrain_plan.simulation.report import stall_cause
from protrain_plan.simulation.sizes import moved_bytes

MAX_BARS = 1_000
"""Bars that a lane shows one by one. On a lane with more, consecutive pieces of one chunk are one
bar: a chunk on disk is updated in hundreds of them."""


class Bar(NamedTuple):
    """Something that runs on a lane: a slot's compute, a move, or several pieces of one chunk."""

    start_s: float
    end_s: float
    kind: str  # a move's kind; "forward", "backward" and "update on the device" on compute
    unit: int
    slot: int
    bytes: int
    num_pieces: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A lane with what it runs, in order. `bytes` is what it transfers; see `LaneReport`."""

    name: str
    busy_s: float
    utilisation: float
    bytes: int
    num_moves: int
    bars: tuple[Bar, ...]


class Wait(NamedTuple):
    """A time in which compute waits before `slot`."""

    start_s: float
    end_s: float
    slot: int
    cause: str  # "parameters from host"
    waited_for: str  # the move whose end ended it
    lane: str


class Ran(NamedTuple):
    """A name that simulated and recorded timelines share, with its time."""

    lane: str
    name: str
    start_s: float
    end_s: float


def lanes(step: Step) -> tuple[Lane, ...]:
    """Compute first, then the lanes by name."""
    ran = [Ran(span.lane, span.name, span.start_s, span.end_s) for span in step.timeline.spans]
    by_lane = bars(step, ran)
    return tuple(
        Lane(
            name=lane.name,
            busy_s=lane.busy_s,
            utilisation=lane.utilisation,
            bytes=lane.bytes,
            num_moves=lane.num_moves,
            bars=by_lane.get(lane.name, ()),
        )
        for lane in step.report.lanes
    )


def bars(step: Step, ran: Iterable[Ran]) -> dict[str, tuple[Bar, ...]]:
    """The bars of each lane, in the order of their starts."""
    known = named(step)
    found: dict[str, list[Bar]] = {}
    for one in sorted(ran, key=lambda one: (one.start_s, one.end_s)):
        bar = known[one.name]._replace(start_s=one.start_s, end_s=one.end_s)
        found.setdefault(one.lane, []).append(bar)
    return {
        lane: tuple(_merged(of_lane) if len(of_lane) > MAX_BARS else of_lane)
        for lane, of_lane in found.items()
    }


def named(step: Step) -> dict[str, Bar]:
    """What the programme's names mean, as bars without a time."""
    program = step.program
    end = len(program.slots)
    update = program.slot_name(end)
    known = {update: Bar(0.0, 0.0, update, 0, end, 0)}
    for index, slot in enumerate(program.slots):
        kind = "forward" if slot.forward else "backward"
        known[program.slot_name(index)] = Bar(0.0, 0.0, kind, slot.unit, index, 0)
    for number, move in enumerate(program.moves):
        size = moved_bytes(move, step.plan.units, step.profile)
        known[program.move_name(number)] = Bar(0.0, 0.0, move.kind, move.unit, move.slot, size)
    return known


def waits(step: Step) -> tuple[Wait, ...]:
    """Compute's waits, in order: before a slot first for what leaves, then for what arrives."""
    program, compute = step.program, step.timeline.compute
    moves = {program.move_name(number): move for number, move in enumerate(program.moves)}
    now = [0.0, *(end for _, end in compute)]  # where the next wait before a slot begins
    found: list[Wait] = []
    for stall in step.timeline.stalls:
        start, end = now[stall.slot], now[stall.slot] + stall.seconds
        now[stall.slot] = end
        cause = stall_cause(stall, moves[stall.waited_for])
        found.append(Wait(start, end, stall.slot, cause, stall.waited_for, stall.lane))
    return tuple(found)


def _merged(found: Sequence[Bar]) -> Iterable[Bar]:
    merged: list[Bar] = []
    for bar in found:
        last = merged[-1] if merged else None
        if last and (last.kind, last.unit, last.slot) == (bar.kind, bar.unit, bar.slot):
            merged[-1] = last._replace(
                end_s=bar.end_s,
                bytes=last.bytes + bar.bytes,
                num_pieces=last.num_pieces + bar.num_pieces,
            )
        else:
            merged.append(bar)
    return merged
