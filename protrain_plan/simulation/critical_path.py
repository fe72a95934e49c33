"""The critical path of a simulated step: the slots and moves that it waits for, in order.

The graph has a node per slot and move of the step, and an edge to each from whatever it waits for:
the order of compute and of its lane, `Move.after`, and a slot's waits (see `program.Slot`). In a
simulated step each node starts when the last of these has ended: the path goes back from the last
node along the latest ends.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from protrain_plan.simulation.timeline import Span, Timeline
from protrain_runtime.contract.program.effects import BoundProgram
from protrain_runtime.contract.program.program import COMPUTE

if TYPE_CHECKING:
    import networkx as nx

_Node = tuple[str, int]  # ("slot", t), or ("move", its number)


class PathPart(NamedTuple):
    """Consecutive spans of the critical path on one lane, by the program's names."""

    lane: str
    first: str
    last: str
    start_s: float
    end_s: float


def waits_of(program: BoundProgram) -> "nx.DiGraph[_Node]":
    """The graph of waits within one step; edges go from an ending to a waiting node."""
    import networkx as nx  # slower to import than most plans are to show

    graph: nx.DiGraph[_Node] = nx.DiGraph()
    on_lane: dict[object, _Node] = {}
    end = len(program.slots)

    def submit(numbers: Sequence[int], after: Sequence[_Node]) -> None:
        for number in numbers:
            move, node = program.moves[number], ("move", number)
            before = [on_lane[move.lane]] if move.lane in on_lane else []
            waits = [*before, *after, *(("move", other) for other in move.after)]
            graph.add_node(node)
            graph.add_edges_from((one, node) for one in waits)
            on_lane[move.lane] = node

    for index, slot in enumerate(program.slots):
        node, drained = ("slot", index), [("move", number) for number in slot.drained]
        ready = [*drained, *([("slot", index - 1)] if index else [])]
        submit(slot.submit, ready)
        graph.add_node(node)
        arrived = (("move", number) for number in slot.ready)
        graph.add_edges_from((one, node) for one in (*ready, *arrived))
        submit(slot.finish, [node])
    update: _Node = ("slot", end)
    others = program.speculative.union(program.last)
    awaited = program.reduced
    if program.last or program.speculative:
        awaited = tuple(n for n in range(len(program.moves)) if n not in others)
    before_update: list[_Node] = [("slot", end - 1), *(("move", number) for number in awaited)]
    graph.add_edges_from((one, update) for one in before_update)
    submit(program.last, before_update)
    return graph


def critical_path(program: BoundProgram, timeline: Timeline) -> tuple[PathPart, ...]:
    """The parts of the critical path in order, from the previous step's if steps overlap."""
    spans: dict[_Node, Span] = {
        ("slot", index): Span(program.slot_name(index), COMPUTE, start, stop)
        for index, (start, stop) in enumerate(timeline.compute)
    }
    moved = {span.name: span for span in timeline.spans if span.lane != COMPUTE}
    for number in range(len(program.moves)):
        spans["move", number] = moved[program.move_name(number)]
    graph = waits_of(program)
    running_on = {("move", number) for number in program.running_on}
    node: _Node | None = max(
        (one for one in graph if one not in running_on), key=lambda one: spans[one].end_s
    )
    path: list[Span] = []
    while node is not None:
        path.append(spans[node])
        node = max(graph.predecessors(node), key=lambda one: spans[one].end_s, default=None)
    timed = [span for span in reversed(path) if span.end_s > span.start_s]
    return tuple(
        PathPart(lane, part[0].name, part[-1].name, part[0].start_s, part[-1].end_s)
        for lane, part in ((lane, list(of)) for lane, of in groupby(timed, lambda one: one.lane))
    )
