"""Leads and drains for given decisions: as large as a rule asks and memory allows.

Memory is handed out in the order in which lanes work: first every outgoing move gets up to
`window` slots, then every fetch, the one needed first before the others, gets a lead of up to
`depth` slots; what is left goes to the outgoing moves again, a little to each in turn.
"""

from dataclasses import dataclass
from typing import NamedTuple

from protrain_plan.planning.options import Fetch
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.records.plan import Schedule, UnitPlan


class Rule(NamedTuple):
    """How far ahead to fetch, and how long to let bytes leave at first; in slots."""

    depth: int
    window: int


SHARES = (1, 2, 3, 4, 6, 9, 14, 1 << 30)
"""Drains that what is left of memory is handed out by, the same for all moves before the next."""


@dataclass(slots=True)
class _Drain:
    """An outgoing move of `held` bytes, gone when slot `gone` starts; `latest` is its limit.

    For what leaves after backward, `latest` is 2U + 1: no slot waits for it, and the device's
    update, "slot" 2U, has it still. It is never gone at 2U, since no wait stands there.
    """

    unit: int
    slot: int
    held: int
    gone: int
    latest: int

    def extend(self, free: list[int], drain: int) -> None:
        """Stay for up to `drain` slots in all, while there is room."""
        stop, end = min(self.latest, self.slot + 1 + drain), len(free) - 1
        while self.gone < stop and free[self.gone] >= self.held:
            if self.gone == end - 1:
                if free[end] < self.held:
                    return
                free[end] -= self.held
                free[end - 1] -= self.held
                self.gone = end + 1
                return
            free[self.gone] -= self.held
            self.gone += 1


def schedule(problem: Problem, choice: Choice, *, limit: int, rule: Rule) -> list[UnitPlan] | None:
    """Full plans for the units whose device bytes stay within `limit`; None if there are none."""
    free = [limit - total for total in problem.static_bytes(choice)]
    if min(free) < 0:
        return None
    return fill(problem, choice, free, rule)


def fill(problem: Problem, choice: Choice, free: list[int], rule: Rule) -> list[UnitPlan]:
    """Hand out `free`, the bytes per slot that the choice leaves; changes it."""
    count, end = problem.count, 2 * problem.count
    activations, states = problem.chosen(choice)
    swaps: dict[int, _Drain] = {}
    updates: dict[int, _Drain] = {}
    for unit, (activation, state) in enumerate(zip(activations, states, strict=True)):
        if activation.swap_in:
            size = activation.swap_in.bytes
            swaps[unit] = _Drain(unit, unit, size, unit + 1, activation.swap_in.slot)
        if leaving := state.gradients or state.in_place:
            slot = leaving.slot
            last = slot == end - 1  # stays for the device's update: see Problem.static_bytes
            gone = end + 1 if last else slot + 1
            updates[unit] = _Drain(unit, slot, leaving.held, gone, end + 1)
    drains = [*swaps.values(), *(updates[unit] for unit in sorted(updates, reverse=True))]
    for drain in drains:
        drain.extend(free, rule.window)

    groups: list[tuple[int, int, str, list[Fetch]]] = []
    for unit, (activation, state) in enumerate(zip(activations, states, strict=True)):
        if activation.swap_in:
            fetch = activation.swap_in._replace(earliest=swaps[unit].gone)
            groups.append((fetch.slot, unit, "swap", [fetch]))
        for name in ("forward", "backward"):
            fetches = [f for f in state.fetches if (f.slot < count) == (name == "forward")]
            if fetches:
                groups.append((fetches[0].slot, unit, name, fetches))
    groups.sort(key=lambda group: group[:2])
    leads: dict[tuple[int, str], int] = {}
    for _, unit, name, fetches in groups:
        leads[unit, name] = _lead(fetches, free, rule.depth)
        if name == "swap":
            swaps[unit].latest = fetches[0].slot - leads[unit, name]
    for share in SHARES:
        for drain in drains:
            drain.extend(free, share)

    plans: list[UnitPlan] = []
    for unit, (activation, state) in enumerate(zip(activations, states, strict=True)):
        swap, update = swaps.get(unit), updates.get(unit)
        profiled = problem.profile.units[unit]
        others = [user for user in profiled.used_by if user != unit]
        plans.append(
            UnitPlan(
                name=profiled.name,
                kind=profiled.kind,
                parameters=profiled.parameters,
                also_used_by=tuple(problem.profile.units[user].name for user in others),
                own_inputs=profiled.own_inputs,
                activations=activation.decision,
                states=state.decision,
                schedule=Schedule(
                    forward_lead=leads.get((unit, "forward"), 0),
                    backward_lead=leads.get((unit, "backward"), 0),
                    swap_lead=leads.get((unit, "swap"), 0),
                    swap_drain=_drain_slots(swap),
                    update_drain=_drain_slots(update),
                ),
            )
        )
    return plans


def _lead(fetches: list[Fetch], free: list[int], depth: int) -> int:
    """The largest common lead up to `depth`; takes its bytes from `free`."""
    lead = 0
    while lead < depth:
        ahead = [fetch for fetch in fetches if fetch.slot - lead - 1 >= fetch.earliest]
        if not ahead or any(free[f.slot - lead - 1] < f.bytes for f in ahead):
            break
        lead += 1
        for fetch in ahead:
            free[fetch.slot - lead] -= fetch.bytes
    return lead


def _drain_slots(drain: _Drain | None) -> int | None:
    if drain is None or drain.gone >= drain.latest:
        return None
    return drain.gone - drain.slot - 1
