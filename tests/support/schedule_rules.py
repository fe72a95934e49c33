"""Schedules by rules: leads and drains are as large as a rule asks and memory allows.

They are made in another way than the planner's paces: what these are compared with, and where tests
have schedules of any kind from. Memory is handed out in the order in which lanes work: first every
outgoing move gets up to `window` slots, then every fetch, the one needed first before the others,
gets a lead of up to `depth` slots; what is left goes to the outgoing moves again, a little to each
in turn. Where a slot has no room for all of a move's bytes, as many of its pieces as fit get it.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, floor, inf
from typing import NamedTuple

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import plans_of, step_seconds
from protrain_plan.planning.search.pacing import first_fraction, late_units, schedule_of
from protrain_runtime.contract.program.effects import Fetch
from protrain_runtime.contract.records.plan import Schedule


class ScheduleRule(NamedTuple):
    """Slots to fetch ahead, and slots to let bytes leave at first.

    A window of n + f is n slots, and one more for the fraction f of the bytes. Where steps overlap,
    the fraction `late` of the chunks is updated late.
    """

    depth: int
    window: float
    late: float = 0.0


ALL = 1 << 20
"""A depth that no lead reaches."""

EVERY_DEPTH = (0, 1, 2, 3, 4, 6, 9, 14, ALL)
EVERY_WINDOW = (0, 0.25, 0.5, 1, 2, 4, ALL)
SHARES = (1, 2, 3, 4, 6, 9, 14, 1 << 30)
"""Drains that what is left of memory is handed out by, the same for all moves before the next."""


@dataclass(slots=True)
class _Drain:
    """An outgoing move whose bytes are gone when slot `gone` starts.

    `latest` is the limit of `gone`. For what leaves after backward, it is 2U + 1: no slot waits for
    it, and the device's update, "slot" 2U, has it still. It is never gone at 2U, since no wait
    stands there. The fraction `rest` of the bytes stays one slot longer. Where steps overlap, what
    no slot waits for may stand in the next step, too, before slot `until`.
    """

    slot: int
    pieces: tuple[int, ...]  # see implications.Eviction
    held: tuple[int, ...]
    gone: int
    latest: int
    size: int  # of all that is held
    kept: int  # of it that the device's update has still
    until: int = 0
    rest: float = 0.0
    rest_held: int = 0

    def extend(self, free: list[int], drain: float) -> bool:
        """Stay for up to `drain` slots in all, while there is room; whether there may be more.

        Room only gets less, so that a move which lacked it once will not get it later.
        """
        whole = floor(drain)
        stop, end, held = min(self.latest, self.slot + 1 + whole), len(free) - 1, self.size
        if self.rest and self.gone < stop:
            free[self.gone] += self.rest_held
            self.rest, self.rest_held = 0.0, 0
        while self.gone < stop and free[self.gone] >= held:
            if self.gone == end - 1:
                if free[end] >= self.kept and min(free[: self.until], default=held) >= held:
                    free[end] -= self.kept
                    free[end - 1] -= held
                    free[: self.until] = [room - held for room in free[: self.until]]
                    self.gone = end + 1
                return False
            free[self.gone] -= held
            self.gone += 1
        # A part of the bytes for one slot more; what is left for the step's end is left whole.
        if self.gone >= self.latest or self.gone >= end - 1 or self.rest:
            return False
        if free[self.gone] >= held and drain == whole:
            return True
        room: float = free[self.gone]
        if self.gone == self.slot + 1 + whole:
            room = min(room, (drain - whole) * held)
        self.rest, self.rest_held = _last_fraction(self.pieces, self.held, room)
        free[self.gone] -= self.rest_held
        return drain > whole

    def stay(self, free: list[int]) -> bool:
        """Stay until no slot waits for it any more, if there is room; whether there was."""
        before = list(free)
        self.extend(free, ALL)
        if self.gone >= self.latest:
            return True
        free[:] = before
        self.gone, self.rest, self.rest_held = self.slot + 1, 0.0, 0
        return False

    def slots(self) -> float | None:
        """The drain as a plan says it."""
        if self.gone >= self.latest:
            return None
        return self.gone - self.slot - 1 + self.rest


def fill(
    problem: Problem, choice: Choice, free: list[int], rule: ScheduleRule
) -> tuple[Schedule, ...]:
    """Hand out `free`, the bytes per slot that the choice leaves; changes it."""
    count, end = problem.count, 2 * problem.count
    activations, states = problem.chosen(choice)
    swaps: dict[int, _Drain] = {}
    updates: dict[int, _Drain] = {}
    for unit, (activation, state) in enumerate(zip(activations, states, strict=True)):
        if activation.swap_in:
            fetch = activation.swap_in
            swaps[unit] = _Drain(
                unit, fetch.pieces, fetch.pieces, unit + 1, fetch.slot, fetch.bytes, 0
            )
        if leaving := state.leaving:
            slot, pieces, held = leaving.slot, leaving.pieces, leaving.held_pieces
            last = slot == end - 1  # stays for the device's update: see Problem.static_bytes
            gone = end + 1 if last else slot + 1
            drain = _Drain(slot, pieces, held, gone, end + 1, leaving.held, leaving.kept)
            if problem.settings.overlap_steps and state.home == "in place":
                drain.until = unit
            updates[unit] = drain
    late: set[int] = set()
    for unit in late_units(problem, states, rule.late):
        in_place = states[unit].home == "in place"
        if not in_place or updates[unit].gone > end or updates[unit].stay(free):
            late.add(unit)
    drains = [*swaps.values(), *(updates[unit] for unit in sorted(updates, reverse=True))]
    for drain in drains:
        drain.extend(free, rule.window)

    groups: list[tuple[int, int, str, list[Fetch]]] = []
    for unit, (activation, state) in enumerate(zip(activations, states, strict=True)):
        if activation.swap_in:
            # What comes back needs its room again: the last of it is gone by then.
            gone = swaps[unit].gone + bool(swaps[unit].rest)
            fetch = activation.swap_in._replace(earliest=gone)
            groups.append((fetch.slot, unit, "swap", [fetch]))
        for name in ("forward", "backward"):
            here = name == "forward"
            coming: list[Fetch] = [f for f in state.arriving if (f.slot < count) == here]
            if coming:
                groups.append((coming[0].slot, unit, name, coming))
    groups.sort(key=lambda group: group[:2])
    leads: dict[tuple[int, str], float] = {}
    for _, unit, name, fetches in groups:
        leads[unit, name] = _lead(fetches, free, rule.depth)
        if name == "swap":
            swaps[unit].latest = fetches[0].slot - ceil(leads[unit, name])
    for share in SHARES:
        drains = [drain for drain in drains if drain.extend(free, share)]

    schedules: list[Schedule] = []
    for unit in range(count):
        swap, update = swaps.get(unit), updates.get(unit)
        values = (
            leads.get((unit, "forward"), 0),
            leads.get((unit, "backward"), 0),
            leads.get((unit, "swap"), 0),
            swap.slots() if swap else None,
            update.slots() if update else None,
            unit in late,
        )
        schedules.append(schedule_of(values))
    return tuple(schedules)


def _lead(fetches: list[Fetch], free: list[int], depth: int) -> float:
    """The largest common lead up to `depth`; takes its bytes from `free`."""
    lead = 0
    while lead < depth:
        ahead = [fetch for fetch in fetches if fetch.slot - lead - 1 >= fetch.earliest]
        if not ahead:
            break
        room = min(free[fetch.slot - lead - 1] for fetch in ahead)
        if any(room < fetch.bytes for fetch in ahead):
            # All stays of a chunk are of the same pieces.
            fraction, taken = first_fraction(ahead[0].pieces, room)
            for fetch in ahead:
                free[fetch.slot - lead - 1] -= taken
            return lead + fraction
        lead += 1
        for fetch in ahead:
            free[fetch.slot - lead] -= fetch.bytes
    return lead


EVERY_RULE = tuple(ScheduleRule(depth, window) for depth in EVERY_DEPTH for window in EVERY_WINDOW)


def seconds_by_rules(problem: Problem, choice: Choice, rules: Iterable[ScheduleRule]) -> float:
    """Seconds of a step under the fastest of these rules; infinity where it has no room."""
    free = [problem.device - total for total in problem.static_bytes(choice)]
    if problem.beyond(choice):
        return inf
    made = {fill(problem, choice, list(free), rule) for rule in rules}
    return min(step_seconds(problem, plans_of(problem, choice, one))[0] for one in made)


@lru_cache(maxsize=10_000)
def _ends(pieces: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(pieces))


def _last_fraction(
    pieces: tuple[int, ...], held: tuple[int, ...], room: float
) -> tuple[float, int]:
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
