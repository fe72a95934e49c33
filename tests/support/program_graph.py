"""A programme as a graph of what waits for what, and the proof that it cannot deadlock."""

import networkx as nx

from protrain_runtime.contract.program.program import Program


def dependency_graph(program: Program) -> "nx.DiGraph[str]":
    """An edge for every wait: between moves, of slots for moves, of moves for their submission.

    Nodes are "slot 3" (its compute), "begin 3" (what stands before it may be submitted) and the
    programme's names of moves.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    names = [program.move_name(number) for number in range(len(program.moves))]
    last_on_lane: dict[object, str] = {}

    def submit(number: int, after: str) -> None:
        move, name = program.moves[number], names[number]
        graph.add_edge(after, name)
        graph.add_edges_from((names[other], name) for other in move.after)
        if move.lane in last_on_lane:
            graph.add_edge(last_on_lane[move.lane], name)
        last_on_lane[move.lane] = name

    for index, slot in enumerate(program.slots):
        begin, compute = f"begin {index}", f"slot {index}"
        if index:
            graph.add_edge(f"slot {index - 1}", begin)
        graph.add_edges_from((names[number], begin) for number in slot.drained)
        for number in slot.submit:
            submit(number, begin)
        graph.add_edge(begin, compute)
        graph.add_edges_from((names[number], compute) for number in slot.ready)
        for number in slot.finish:
            submit(number, compute)
    graph.add_edges_from((names[number], "update on the device") for number in program.reduced)
    if program.last:
        end = f"slot {len(program.slots) - 1}"
        graph.add_edge(end, "update on the device")
        graph.add_edges_from(
            (name, "update on the device")
            for number, name in enumerate(names)
            if number not in program.last
        )
        for number in program.last:
            submit(number, "update on the device")
    return graph


def waits_in_a_circle(program: Program) -> list[str]:
    """The names that wait for each other, none where the programme can always go on."""
    try:
        cycle = nx.find_cycle(dependency_graph(program))
    except nx.NetworkXNoCycle:
        return []
    return [str(edge[0]) for edge in cycle]
