"""Parts of moves in slots, units that are updated late, and the schedules of both."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil, floor

from protrain_plan.planning.model.problem import Problem
from protrain_runtime.contract.program.implications import StateOption
from protrain_runtime.contract.records.plan import Schedule


def first_fraction(pieces: tuple[int, ...], room: float) -> tuple[float, int]:
    """The largest share of a move, from its first piece on, that takes up to `room` bytes.

    As a fraction of two digits, where that names the pieces (else of more), and its bytes.
    """
    done = _ends(pieces)
    return _first(pieces, bisect_right(done, room, hi=len(done) - 1))


@lru_cache(maxsize=10_000)
def _ends(pieces: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(pieces))


@lru_cache(maxsize=10_000)
def _first(pieces: tuple[int, ...], number: int) -> tuple[float, int]:
    """The share of so many first pieces, but not all."""
    taken, total = sum(pieces[:number]), sum(pieces)
    if not taken:
        return 0.0, 0
    for digits in (100, 10_000, 10**8):
        fraction = ceil(taken / total * digits) / digits
        # The next piece must not fit in.
        following = next(done for done in _ends(pieces) if done > taken)
        if fraction * total < following and fraction < 1:
            return fraction, taken
    return 0.0, 0


def last_fraction(pieces: tuple[int, ...], held: tuple[int, ...], room: float) -> tuple[float, int]:
    """The largest share of a move's last pieces that holds up to `room` bytes, and these."""
    done = _ends(held[::-1])
    return _last(pieces, held, len(held) - bisect_right(done, room, hi=len(done) - 1))


@lru_cache(maxsize=10_000)
def _last(pieces: tuple[int, ...], held: tuple[int, ...], first: int) -> tuple[float, int]:
    """The share of the pieces from the `first` on, but not all."""
    taken, total, before = sum(held[first:]), sum(pieces), sum(pieces[:first])
    if not taken:
        return 0.0, 0
    for digits in (100, 10_000, 10**8):
        # 1 - fraction must name the first pieces: at least their bytes, less than one piece more.
        fraction = floor((1 - before / total) * digits) / digits
        if fraction > 0 and (1.0 - fraction) * total < before + pieces[first]:
            return fraction, taken
    return 0.0, 0


@lru_cache(maxsize=100_000)
def schedule_of(
    values: tuple[float, float, float, float | None, float | None, bool],
) -> Schedule:
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
