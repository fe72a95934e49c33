"""The critical path of a simulated step: the slots and moves that it waits for, in order.

Each slot and move of the step is a node, which waits for others: the order of compute and of its
lane, `Move.after`, and a slot's waits (see `program.Slot`). In a simulated step it starts when the
last of these has ended: the path goes back from the last node along the latest ends.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from protrain_plan.simulation.timeline import Span, Timeline
from protrain_runtime.contract.program.effects import BoundProgram
from protrain_runtime.contract.program.program import COMPUTE

_Node = tuple[str, int]  # ("slot", t), or ("move", its number)


class PathPart(NamedTuple):
    """Consecutive spans of the critical path on one lane, by the program's names."""

    lane: str
    first: str
    last: str
    start_s: float
    end_s: float


def waits_of(program: BoundProgram) -> dict[_Node, list[_Node]]:
    """The nodes that each node waits for within one step."""
    waits: dict[_Node, list[_Node]] = {}
    on_lane: dict[object, _Node] = {}
    end = len(program.slots)

    def moves(numbers: Iterable[int]) -> list[_Node]:
        return [("move", number) for number in numbers]

    def submit(numbers: Sequence[int], after: Sequence[_Node]) -> None:
        for number in numbers:
            move, node = program.moves[number], ("move", number)
            before = [on_lane[move.lane]] if move.lane in on_lane else []
            waits[node] = [*before, *after, *moves(move.after)]
            on_lane[move.lane] = node

    for index, slot in enumerate(program.slots):
        ready = moves(slot.drained) + ([("slot", index - 1)] if index else [])
        submit(slot.submit, ready)
        waits["slot", index] = ready + moves(slot.ready)
        submit(slot.finish, [("slot", index)])
    others = program.speculative.union(program.last)
    awaited = program.reduced
    if program.last or program.speculative:
        awaited = tuple(n for n in range(len(program.moves)) if n not in others)
    waits["slot", end] = [("slot", end - 1), *moves(awaited)]
    submit(program.last, waits["slot", end])
    return waits


def critical_path(program: BoundProgram, timeline: Timeline) -> tuple[PathPart, ...]:
    """The parts of the critical path in order, from the previous step's if steps overlap."""
    spans: dict[_Node, Span] = {
        ("slot", index): Span(program.slot_name(index), COMPUTE, start, stop)
        for index, (start, stop) in enumerate(timeline.compute)
    }
    moved = {span.name: span for span in timeline.spans if span.lane != COMPUTE}
    for number in range(len(program.moves)):
        spans["move", number] = moved[program.move_name(number)]
    waits = waits_of(program)
    running_on = {("move", number) for number in program.running_on}
    node: _Node | None = max(
        (one for one in waits if one not in running_on), key=lambda one: spans[one].end_s
    )
    path: list[Span] = []
    while node is not None:
        path.append(spans[node])
        node = max(waits[node], key=lambda one: spans[one].end_s, default=None)
    timed = [span for span in reversed(path) if span.end_s > span.start_s]
    return tuple(
        PathPart(lane, part[0].name, part[-1].name, part[0].start_s, part[-1].end_s)
        for lane, part in ((lane, list(of)) for lane, of in groupby(timed, lambda one: one.lane))
    )
