"""Plans that people can read: no decision and no number that gains nothing.

Steps downhill spread the decisions of equal blocks among each other: `in_runs` lets equal ones
stand together. Handing out every spare byte gives equal blocks unequal leads and drains, and a peak
of what the budget allows rather than what the step takes: `simplified` gives all units with the
same decisions the same, smallest numbers. None of them may cost time.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice, permutations, product
from math import inf
from typing import Any, Literal

from protrain_plan.planning.model.options import Decision
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.model.solver import Stopped
from protrain_plan.planning.search.baselines import BASELINES, Baseline
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator, step_seconds
from protrain_runtime.contract.program.memory import device_totals
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.plan import Activations, Schedule, UnitPlan

TOLERANCE = 0.002
"""The fraction of the step's time that a tidier schedule may cost."""

SLOWER_LANES = 0.7
"""Numbers must hold with lanes at this fraction of their speed, too: slack for noise. Replays of
the planner's prototype were run at half and double bandwidth (docs/decisions.md)."""

VALUES = (1, 2, 3, 4, 6, 9, 14, 0)
"""In order of preference: 0 makes compute wait for the whole transfer, and is for want of room."""

MAX_ORDERS = 12
MAX_MOVES = 60_000
"""Moves of the plans that tidying simulates, in all: half a second."""

GRACE_S = 0.7
"""Extra seconds that a search gets while it has no plan."""

IMPROVEMENT = 1e-7
"""A step must be faster by this fraction to count: less is rounding in the simulator."""


Solver = Literal["milp"] | Baseline
SOLVERS: tuple[Solver, ...] = ("milp", *BASELINES)

Progress = Callable[[str, float | None, float | None], None]


ANOTHER_GAP = 3
"""Plans of another number of replicas lie 2 % above their bound at least, in 17 cases of the grid:
none of them was faster than a plan within 1.5 % of that bound, and planning took 0.87 of its time.
"""


@dataclass(slots=True, kw_only=True)
class Effort:
    """The length of a search, and when its plan is good enough.

    gap_target    a plan this close to the bound is good enough (0.005: half a per cent)
    enough_s      and so is one of as many seconds; a search that cannot get there is given up
    below_s       only plans that are faster than this matter; so is one that has none
    is_another    the plans to begin with are of another number of replicas: the search goes on only
                  where their decisions are faster here, or do not fit, and where the bound promises
                  more than `ANOTHER_GAP` times the gap
    time_limit_s  for people in a hurry: with a limit that strikes, the plan depends on the machine
    seed          of the order in which changes are tried
    stopped       asked often; true ends the search with the best plan so far
    solver        `milp` for all the planner has, or a baseline to compare with
    progress      called with a stage, the best step so far and the bound, in seconds
    """

    gap_target: float = 0.005
    enough_s: float | None = None
    below_s: float = inf
    is_another: bool = False
    time_limit_s: float | None = None
    seed: int = 0
    stopped: Stopped | None = None
    solver: Solver = "milp"
    progress: Progress = lambda *_: None
    started: float = field(default_factory=time.monotonic)

    def of_part(self, where: str) -> "Effort":
        """Return the effort of a part of the search, whose stages begin with these words."""
        return replace(self, progress=lambda stage, *found: self.progress(where + stage, *found))

    def spent(self) -> bool:
        return (self.stopped is not None and self.stopped()) or self.left_s() <= 0

    def late(self) -> Callable[[], bool]:
        """Whether the search should have ended; without any plan it gets as much time again."""
        since: list[float] = []

        def late() -> bool:
            if not since and self.spent():
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] > GRACE_S

        return late

    def is_vain(self, bound_s: float) -> bool:
        """Whether no plan is as fast as it has to be, up to the gap asked for."""
        gap = self.gap_target * (ANOTHER_GAP if self.is_another else 1)
        return bound_s * (1 + gap) >= self.below_s or bound_s > (self.enough_s or inf)

    def left_s(self) -> float:
        if self.time_limit_s is None:
            return float("inf")
        return self.time_limit_s - (time.monotonic() - self.started)


def _changed(
    evaluator: Evaluator, best: Evaluation, changes: dict[int, Decision], slowest_s: float
) -> Evaluation | None:
    """`best` with other decisions of some units; None where it has no room or is too slow."""
    choice = tuple(changes.get(unit, decision) for unit, decision in enumerate(best.choice))
    limit_s = slowest_s * (1 + IMPROVEMENT)
    found = evaluator.evaluate(choice, paces=(best.pace,), faster_than_s=limit_s)
    return found if found and found.seconds <= slowest_s else None


def in_runs(
    problem: Problem, evaluator: Evaluator, best: Evaluation, *, slowest_s: float
) -> Evaluation:
    """`best` with the decisions of alike units in runs, in the first order that is fast enough."""
    for members in problem.classes:
        counts = Counter(best.choice[unit] for unit in members)
        for order in islice(permutations(sorted(counts)), MAX_ORDERS):
            arranged = (decision for decision in order for _ in range(counts[decision]))
            changes = dict(zip(members, arranged, strict=True))
            if found := _changed(evaluator, best, changes, slowest_s):
                best = found
                break
    return best


def exact_where_free(
    problem: Problem, evaluator: Evaluator, best: Evaluation, *, slowest_s: float
) -> Evaluation:
    """`best` with exact activations in place of opt-in ones, where it takes up to `slowest_s`.

    All units that have one such form change together, then each by itself, the last ones first:
    what they keep is held for the shortest time.
    """

    def by_opt_in(unit: int) -> str:
        decision = problem.options[unit].activations[best.choice[unit][0]].decision
        return decision.form if FORMS[decision.form].opt_in else ""

    def taking(units: Iterable[int], activations: Activations) -> Evaluation | None:
        changes = {}
        for unit in units:
            number = problem.options[unit].numbers[0].get(activations)
            if number is None:  # it is pinned
                return None
            changes[unit] = (number, best.choice[unit][1])
        return _changed(evaluator, best, changes, slowest_s)

    groups: dict[str, list[int]] = {}
    for unit in reversed(range(problem.count)):
        if form := by_opt_in(unit):
            groups.setdefault(form, []).append(unit)
    singles = [[unit] for members in groups.values() for unit in members]
    for units in (*groups.values(), *singles):
        if not by_opt_in(units[0]):
            continue  # its group has changed
        exact = (option.decision for option in problem.options[units[0]].activations)
        found = (taking(units, one) for one in exact if not FORMS[one.form].opt_in)
        best = next(filter(None, found), best)
    return best


def simplified(
    problem: Problem, best: Evaluation, *, slowest_s: float, stopped: Stopped = lambda: False
) -> Evaluation:
    """`best` with small uniform leads and drains, as fast also on slower lanes."""
    plans, num_moves = best.plans, 0
    slow_s = step_seconds(problem, plans, lanes_at=SLOWER_LANES)[0] * (1 + TOLERANCE)

    def accepted(plans: tuple[UnitPlan, ...]) -> bool:
        nonlocal num_moves
        program = problem.program(plans)
        num_moves += 2 * len(plans) + len(program.moves)
        if max(device_totals(program)) > problem.device:
            return False
        for lanes_at, limit in ((1.0, slowest_s), (SLOWER_LANES, slow_s)):
            num_moves += len(program.moves)
            within_s = limit * (1 + IMPROVEMENT)
            if step_seconds(problem, plans, within_s=within_s, lanes_at=lanes_at)[0] > limit:
                return False
        return True

    groups: dict[object, list[int]] = {}
    for index, unit in enumerate(plans):  # a part is a group of its own
        same = (unit.activations, unit.states) if unit.kind == "block" else index
        groups.setdefault(same, []).append(index)
    # All groups at once: every unit has what most of its group have, or no more than that.
    for cap in (False, True):
        candidate = plans
        for group, number in product(groups.values(), fields(Schedule)):
            values = [getattr(plans[index].schedule, number.name) for index in group]
            value = Counter(values).most_common(1)[0][0]
            candidate = _with_number(candidate, group, number.name, value, cap=cap)
        if candidate == plans or stopped():
            break
        if accepted(candidate):
            plans = candidate
            break
    for group, number in product(groups.values(), fields(Schedule)):
        first = plans[group[0]]
        swaps, moves = first.activations.tier, not first.states.is_persistent
        if number.type is bool or not (swaps if number.name.startswith("swap") else moves):
            continue
        units = group
        if number.name == "update_drain":  # no slot waits for what is updated late
            units = [index for index in group if not plans[index].schedule.update_late]
        # Before a slot that holds much, everything has left: the units next to it have less time.
        for value, cap in product(VALUES, (False, True)):
            candidate = _with_number(plans, units, number.name, value, cap=cap)
            if candidate == plans or num_moves > MAX_MOVES or stopped():
                break
            if accepted(candidate):
                plans = candidate
                break
    step_s, stall_s = step_seconds(problem, plans)
    return best._replace(seconds=step_s, stall_s=stall_s, plans=plans)


def _with_number(
    plans: tuple[UnitPlan, ...], group: Sequence[int], name: str, value: Any, *, cap: bool
) -> tuple[UnitPlan, ...]:
    """The plans with one number of a schedule for a group; `cap`: for those that have more.

    None is as long as it takes.
    """
    changed = list(plans)
    for index in group:
        schedule = plans[index].schedule
        old = getattr(schedule, name)
        less = cap and old is not None and (value is None or old < value)
        if old != value and not less:
            changed[index] = replace(plans[index], schedule=replace(schedule, **{name: value}))
    return tuple(changed)
