"""The program's facts for every boundary, computed once."""

from collections.abc import Sequence
from typing import NamedTuple

from protrain_runtime.contract.program.program import Program
from protrain_runtime.contract.records.plan import UnitPlan


class Table(NamedTuple):
    """A program as the engine walks it.

    names  of moves, for errors
    ends   by slot, the moves that end before its fetches: those that must have left, and those
           before them in their lanes (pieces of a chunk are written in order, and a slot names the
           last of them alone)
    takes  by slot, whether its unit's gradients go from the parameters to where moves take them
    """

    names: Sequence[str]
    ends: Sequence[Sequence[int]]
    takes: Sequence[bool]

    @staticmethod
    def of(program: Program, plans: Sequence[UnitPlan]) -> "Table":
        """Compute the table."""
        names = [program.move_name(number) for number in range(len(program.moves))]
        running: list[int] = []
        ends: list[list[int]] = []
        takes: list[bool] = []
        for slot in program.slots:
            last = {program.moves[number].lane: number for number in sorted(slot.drained)}
            ending = [n for n in running if n <= last.get(program.moves[n].lane, -1)]
            ends.append(ending)
            gone = {*ending, *slot.ready}
            running = [n for n in (*running, *slot.submit) if n not in gone] + slot.finish
            own = any(program.moves[number].unit == slot.unit for number in slot.finish)
            late = plans[slot.unit].schedule.update_late and slot.unit in program.updates
            takes.append(not slot.forward and (own or late))
        return Table(names, ends, takes)
