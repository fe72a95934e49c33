"""Changes of single units that make a plan faster, then numbers that people can read.

Such changes leave equal blocks with decisions in no order: `in_runs` lets equal decisions stand
together. It takes updates in backward where nobody needs them: `at_the_step` undoes them.
Handing out every spare byte gives equal blocks unequal leads and drains, and a peak of what the
budget allows rather than what the step takes: `simplified` gives all units with the same decisions
the same, smallest numbers. None of them may cost time.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice, permutations, product
from math import inf
from typing import Any, Literal

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import Stopped
from protrain_plan.planning.search.baselines import BASELINES, Baseline
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator, step_seconds
from protrain_runtime.contract.program.memory import device_totals
from protrain_runtime.contract.records.forms import FORMS
from protrain_runtime.contract.records.plan import (
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    Activations,
    Schedule,
    UnitPlan,
)

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

NEARLY = 1.03
"""Factor by which an order may be slower before other schedules are tried for it."""

SLOW_WALK = 1.2
"""A walk may take so many times as long as the simulator finds. (It mostly takes 0.9 to 1.05.)"""

IMPROVEMENT = 1e-7
"""A step must be faster by this fraction to count: less is rounding in the simulator."""


Solver = Literal["milp"] | Baseline
SOLVERS: tuple[Solver, ...] = ("milp", *BASELINES)

Progress = Callable[[str, float | None, float | None], None]


def never() -> bool:
    """Nobody stops a search."""
    return False


@dataclass(slots=True, kw_only=True)
class Effort:
    """The length of a search, and when its plan is good enough.

    gap_target    a plan this close to the bound is good enough (0.005: half a per cent)
    enough_s      and so is one of as many seconds; a search that cannot get there is given up
    below_s       only plans that are faster than this matter; so is one that has none
    time_limit_s  for people in a hurry: with a limit that strikes, the plan depends on the machine
    seed          of the order in which changes are tried
    stopped       asked often; true ends the search with the best plan so far
    solver        `milp` for all the planner has, or a baseline to compare with
    progress      told a stage, the best step so far and the bound, in seconds
    """

    gap_target: float = 0.005
    enough_s: float | None = None
    below_s: float = inf
    time_limit_s: float | None = None
    seed: int = 0
    stopped: Stopped = never
    solver: Solver = "milp"
    progress: Progress = lambda *_: None
    started: float = field(default_factory=time.monotonic)

    def of_part(self, where: str) -> "Effort":
        """Return the effort of a part of the search, whose stages begin with these words."""
        return replace(self, progress=lambda stage, *found: self.progress(where + stage, *found))

    def spent(self) -> bool:
        """Whether the search has to end now."""
        return self.stopped() or self.left_s() <= 0

    def watched(self) -> Stopped | None:
        """`spent`, which the solver asks ten thousand times; None where nothing ends a search."""
        is_endless = self.stopped is never and self.time_limit_s is None
        return None if is_endless else self.spent

    def late(self) -> Callable[[], bool]:
        """Asked often: whether the search should have ended some time ago.

        Without any plan at all it goes on for as long: most first plans are a moment's work.
        """
        since: list[float] = []

        def late() -> bool:
            if not since and self.spent():
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] > GRACE_S

        return late

    def left_s(self) -> float:
        """Seconds until the time limit."""
        if self.time_limit_s is None:
            return float("inf")
        return self.time_limit_s - (time.monotonic() - self.started)


def changed(
    problem: Problem, choice: Choice, open_to: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[Choice]:
    """Choices that differ in one decision, then in one decision of each of two units.

    Single ones are among those that are open to units of the class.
    """
    for units, (activations, states) in zip(problem.classes, open_to, strict=True):
        for unit in units:
            activation, state = choice[unit]
            yield from (_with(choice, {unit: (activation, k)}) for k in states if k != state)
            yield from (_with(choice, {unit: (k, state)}) for k in activations if k != activation)
        # Trade decisions where runs of equal decisions meet, and across the whole class.
        for distance in (1, 2, 4, 8, 16, 32):
            for first, second in zip(units, units[distance:], strict=False):
                (a1, s1), (a2, s2) = choice[first], choice[second]
                if a1 != a2:
                    yield _with(choice, {first: (a2, s1), second: (a1, s2)})
                if s1 != s2:
                    yield _with(choice, {first: (a1, s2), second: (a2, s1)})
                if a1 != a2 and s1 != s2:
                    yield _with(choice, {first: (a2, s2), second: (a1, s1)})


def _with(choice: Choice, changes: dict[int, tuple[int, int]]) -> Choice:
    return tuple(changes.get(unit, decision) for unit, decision in enumerate(choice))


def in_runs(
    problem: Problem, evaluator: Evaluator, best: Evaluation, *, slowest_s: float
) -> Evaluation:
    """`best` with the decisions of alike units in runs, if some order takes up to `slowest_s`."""
    for members in problem.classes:
        decisions = [best.choice[unit] for unit in members]
        counts = Counter(decisions)
        fastest = None
        for order in islice(permutations(sorted(counts)), MAX_ORDERS):
            choice = list(best.choice)
            arranged = [decision for decision in order for _ in range(counts[decision])]
            for unit, decision in zip(members, arranged, strict=True):
                choice[unit] = decision
            limit = slowest_s * NEARLY
            if problem.least_seconds(tuple(choice)) >= limit or not problem.fits(tuple(choice)):
                continue
            # A walk may find a little more than the simulator does.
            if not evaluator.pacer.walk(tuple(choice), within_s=limit * SLOW_WALK):
                continue
            evaluation = evaluator.evaluate(tuple(choice), paces=(best.pace,), faster_than_s=limit)
            if evaluation and (fastest is None or evaluation.seconds < fastest.seconds):
                fastest = evaluation
        if fastest and slowest_s < fastest.seconds < slowest_s * NEARLY:
            fastest = evaluator.best_schedule(fastest.choice, pace=fastest.pace)
        if fastest and fastest.seconds <= slowest_s:
            best = fastest
    return best


def exact_where_free(
    problem: Problem, evaluator: Evaluator, best: Evaluation, *, slowest_s: float
) -> Evaluation:
    """`best` with exact activations in place of those by leave, where it takes up to `slowest_s`.

    All units that have one such form change together, then each by itself, the last ones first:
    what they keep is held for the shortest time.
    """

    def by_leave(unit: int) -> str:
        decision = problem.options[unit].activations[best.choice[unit][0]].decision
        return decision.form if FORMS[decision.form].leave else ""

    def taking(units: Iterable[int], activations: Activations) -> Evaluation | None:
        changes = {}
        for unit in units:
            number = problem.options[unit].numbers[0].get(activations)
            if number is None:  # it is pinned
                return None
            changes[unit] = (number, best.choice[unit][1])
        evaluation = evaluator.evaluate(_with(best.choice, changes), paces=(best.pace,))
        return evaluation if evaluation and evaluation.seconds <= slowest_s else None

    groups: dict[str, list[int]] = {}
    for unit in reversed(range(problem.count)):
        if form := by_leave(unit):
            groups.setdefault(form, []).append(unit)
    for members in groups.values():
        for units in (members, *([unit] for unit in members)):
            if not by_leave(units[0]):
                break  # all of them have changed
            exact = (option.decision for option in problem.options[units[0]].activations)
            for activations in exact:
                if FORMS[activations.form].leave:
                    continue
                if (found := taking(units, activations)) is not None:
                    best = found
                    break
    return best


def at_the_step(
    problem: Problem, evaluator: Evaluator, best: Evaluation, *, slowest_s: float
) -> Evaluation:
    """`best` with its first persistent chunks updated at the step, as far as there is room.

    A chunk that is updated in backward gains nothing where its gradients could stand until the
    step. Those of the first units, whose backward is last, stand for the shortest time.
    """
    for unit, options in enumerate(problem.options):
        activation, state = best.choice[unit]
        if options.states[state].decision != OPTIMIZER_IN_BACKWARD:
            continue
        plain = options.numbers[1].get(PERSISTENT)
        if plain is None:  # it is pinned
            continue
        choice = _with(best.choice, {unit: (activation, plain)})
        evaluation = evaluator.evaluate(choice, paces=(best.pace,))
        if evaluation is None or evaluation.seconds > slowest_s:
            break
        best = evaluation
    return best


def apart(
    problem: Problem, best: Evaluation, *, slowest_s: float, stopped: Stopped = lambda: False
) -> Evaluation | None:
    """`best` with steps that do not overlap, where those take up to `slowest_s`.

    A step that has ended when it says so can be looked at, and tells of its own faults.
    """
    if not problem.settings.overlap_steps:
        return None
    pace = best.pace._replace(late=0.0)
    evaluator = Evaluator(problem.overlapping(False), stopped)
    found = evaluator.best_schedule(best.choice, pace=pace)
    return found if found and found.seconds <= slowest_s else None


def simplified(
    problem: Problem, best: Evaluation, *, slowest_s: float, stopped: Stopped = lambda: False
) -> Evaluation:
    """`best` with leads and drains made uniform and small, within the budgets and `slowest_s`.

    With slower lanes, too, the step takes no longer than it did.
    """
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
