"""The planner: a bound, layouts that it proposes, steps downhill, and tidier numbers.

    bound   = the fluid model's relaxation, then that over whole numbers of units per option
    layouts = plain policies, and numbers of units per option near the relaxation's, with more and
              less of the device left free for whole moves
    best    = the fastest plan after steps downhill: 1, 2, 4, ... units in another option

The model only proposes; every plan is judged by the simulator under the byte limits of its slots.
Work is limited by counts, never by time, unless the user sets a time limit: the same input gives
the same plan on every machine.

Of several numbers of replicas, those that may be best are planned, and the others ruled out:

    bounds  = what the lanes take at least with each number; from the first without a plan on,
              more have none either
    solved  = the fewest replicas whose bound is the least, or nearly; then whichever may still be
              faster by more than the gap asked for. A search ends when its bound says: not so
    proof   = the least of all bounds

All these problems are of the same devices and budgets. The first has the fewest replicas, and needs
the least memory.
"""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import inf, isfinite

from protrain_plan.garbage import SELDOM, collected
from protrain_plan.planning.explain.advice import infeasible
from protrain_plan.planning.model.counting import Caution, Counting, Layout, Prices
from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.model.fitting import within_reach
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import SOLVER
from protrain_plan.planning.outcome import Infeasible, Replicas, SearchStage, Solved, Status
from protrain_plan.planning.search.baselines import Baseline, baseline, leanest_variant, staying
from protrain_plan.planning.search.choices import Leanest, min_memory, plain_choices
from protrain_plan.planning.search.descending import Descent
from protrain_plan.planning.search.evaluation import PACES, Evaluation, Evaluator
from protrain_plan.planning.search.improving import (
    TOLERANCE,
    Effort,
    exact_where_free,
    in_runs,
    simplified,
)
from protrain_plan.planning.search.layouts import choice_of, layout_of, layouts_near
from protrain_plan.simulation.timeline import (
    SAME_S,
    first_step_seconds,
    host_update_seconds,
    simulated_seconds,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.records.plan import Plan, Prediction, UnitPlan
from protrain_runtime.contract.records.writer import fingerprint

CAUTIONS = (
    *(Caution(free, 0.0) for free in (0.0, 0.06, 0.15, 0.25)),
    *(Caution(free, 0.1) for free in (0.0, 0.1)),
    *(Caution(free, 0.3) for free in (0.06, 0.15)),
)
"""Relaxations near which the search begins."""

WINDOWS = 12
"""Windows of slots per forward for the bound (see `fluid`)."""

WALKED_PLAIN, SIMULATED_PLAIN = 12, 2
"""Plain policies to walk, by the least busy lanes, and to simulate."""

SMALL = 16
"""Models of up to this many units get the four-parameter search."""

FEW = 8
BRANCHED = {False: 1000, True: 300}
"""Variables, of few units, of a fluid model over which a search tree is worth its time, by
whether steps overlap: most take 0.1 s, and the longest of 40 small problems 1.3 s, for 4 % of bound
in the median."""

BRANCHED_UNITS = 800
"""Nodes of that tree times units."""

DESCENTS = 4
"""Layouts to descend from."""

WALKED_UNITS = 25_000
"""Walks times units, in all: half a second for thirty units as for a hundred."""

LEAST_WALKS, MOST_WALKS, SMALL_WALKS = 200, 500, 3000
"""Least and most walks of any model, and the most of a small one, in which one unit counts for much
(with 500 a faster link made one of 96 random plans 4.6 % slower)."""

LOOSE = 0.05
"""The gap above which the last descents take eight times as many walks."""

MOVING_GAIN = 0.1
"""The part of the step that moving something must save, where keeping everything fits: on an H200
steps of plans that move took 1.6 to 2.6 times the predicted seconds (benchmarks/results/h200.md),
and what the host updates has its rounding."""

ANOTHER = 3
"""Divisor of walks for further numbers of replicas."""

GAIN = 0.005
"""The part of the step by which the best decisions so far must be faster with another number of
replicas, where they fit: otherwise no search of it follows, which made none of 23 cases of the grid
slower by 0.05 %."""

NEAR = 1.2
"""Numbers of replicas whose lane bounds are up to so many times the least go by memory: of 23 cases
of the grid, the fewest of them was the fastest in all but one, and those lay 1 % apart."""

ROUNDS = 8
"""Rounds of numbers with a better promise than all before."""

IN_VAIN, WORTH = 2, 0.01
"""Rounds that close less than this part of the gap, after which they end, unless it is above
`WIDE`: of a 1B on a card of 6 GiB, the first three closed nothing, and then it fell from 21 to
13 %; of 11 cases of the grid, the eighth closed that of one from 21 to 12 %."""

WIDE = 0.1
"""The gap, as part of the bound, that is worth a longer search."""

REORDERED = 60
"""Units up to which a wide gap lets the runs of layouts be tried in other orders, of which no
relaxation knows: 60 plans of models with 18 to 34 units became 2 % faster in the mean and 22 at
best, in twice the time. Of nine cases on several devices, and of ten on one with more units, one
each gained 2 %."""

ORDERS = 2
"""Rounds of other orders; a second follows if the first gains `WORTH`."""

PROMISING = 1.01
"""Numbers are tried up to this multiple of the least known value."""

Hint = Sequence[UnitPlan]
"""A plan's units to start from; skipped if not open."""


@collected(SELDOM)
def solve_problem(
    problem: Problem, *, effort: Effort, hints: Sequence[Hint] = ()
) -> Solved | Infeasible:
    """The fastest plan found for a problem from `hints`, or `Infeasible`."""
    found = _solved_exactly(problem, effort, hints)
    is_small = problem.count <= SMALL and effort.solver == "milp" and not effort.spent()
    if not is_small or not isinstance(found, Solved) or found.status == "optimal":
        return found
    fewer = problem.changed(in_parts=False)
    if fewer.options == problem.options:  # no chunk may lie in two tiers
        return found
    # With few units, a search among fewer options may end with a faster plan.
    other = _solved_exactly(fewer, effort, hints)
    if not isinstance(other, Solved):
        return found
    best = min(found, other, key=lambda one: one.step_seconds)
    best = proven(best, found.bound_seconds, effort)
    return replace(best, solve_seconds=found.solve_seconds + other.solve_seconds)


def _solved_exactly(problem: Problem, effort: Effort, hints: Sequence[Hint]) -> Solved | Infeasible:
    """Search for an exact plan first, if inexact ones are allowed.

    An inexact plan must be faster than every exact one found, by more than tidying may cost: the
    problem without opt-in forms is solved first. Its plan also solves the whole problem, so an
    opt-in makes no plan slower.
    """
    exact = problem.exactly() if problem.profile.allowed and effort.solver == "milp" else None
    known = exact and _solved(exact, effort, hints)
    if not isinstance(known, Solved):
        return _solved(problem, effort, hints)
    limit_s = known.step_seconds / (1 + TOLERANCE)
    faster = replace(effort, below_s=min(effort.below_s, limit_s))
    found = _solved(problem, faster, (*hints, known.plan.units))
    assert isinstance(found, Solved), "an exact plan is a plan of the whole problem"
    seconds = known.solve_seconds + found.solve_seconds
    if found.step_seconds > limit_s:
        found = proven(known, found.bound_seconds, effort)
    return replace(found, solve_seconds=seconds)


def proven(solved: Solved, bound_s: float, effort: Effort) -> Solved:
    """The plan with a bound from another search."""
    prediction = replace(solved.plan.prediction, lower_bound_seconds=bound_s)
    plan = replace(solved.plan, prediction=prediction)
    return replace(solved, plan=plan, gap=plan.gap, status=_status(plan.gap, effort))


def _solved(problem: Problem, effort: Effort, hints: Sequence[Hint]) -> Solved | Infeasible:
    """Search once, whether or not an exact plan is as fast."""
    started, solver = time.monotonic(), effort.solver
    if solver != "milp":
        problem = problem.overlapping(False)
    # A second copy makes no plan leaner.
    late = effort.late()
    lean = min_memory(problem.speculating(), enough=problem.device, stopped=late)
    if lean is None or lean.bytes > problem.device:
        if late():
            unknown = "the search ended before it had found any plan"
            raise ProtrainError(unknown, fix="give it more time")
        return infeasible(problem, lean)
    options = zip(*problem.chosen(lean.choice), strict=True)
    decided = [(activation.decision, state.decision) for activation, state in options]
    if solver == "milp":
        problem = within_reach(problem)
    choice = problem.known_choice(decided)
    assert choice, "the leanest plan is within reach"
    planning = _Planning(problem, choice, effort)
    found: Evaluation | None
    if solver == "milp":
        found = planning.solve(hints)
    elif (found := planning.solve_baseline(solver)) is None:
        variant = leanest_variant(solver, problem)
        peak = max(problem.static_bytes(variant))
        return infeasible(problem, Leanest(choice=variant, bytes=peak, proven_bytes=peak))
    return planning.solved(found, time.monotonic() - started)


class _Planning:
    """The pipeline of one feasible problem."""

    def __init__(self, problem: Problem, lean: Choice, effort: Effort) -> None:
        self.problem, self.lean, self.effort = problem, lean, effort
        self.evaluator = Evaluator(problem)
        self.bound = problem.compute_seconds
        most = SMALL_WALKS if problem.count <= SMALL else MOST_WALKS
        self.walks = max(LEAST_WALKS, min(most, WALKED_UNITS // problem.count))
        if isfinite(effort.below_s):  # another number of replicas has a plan
            self.walks //= ANOTHER
        first = self.evaluator.evaluate(lean)
        assert first, "the leanest choice meets the budgets"
        self.evaluator.stopped = effort.spent  # from here on a plan exists
        self.best: Evaluation = first
        self.staying: Evaluation | None = None  # moves nothing, if keeping everything fits
        self.found: dict[Layout, float] = {}  # seconds of plans at the end of descents
        self.stages: list[SearchStage] = []  # ended ones

    def solve(self, hints: Sequence[Hint]) -> Evaluation:
        """The best plan of all stages."""
        fits = False
        for hint in hints:
            if choice := self.problem.known_choice((u.activations, u.states) for u in hint):
                found = self.evaluator.evaluate(choice, paces=PACES)
                fits = fits or found is not None
                self._keep(found)
        if isfinite(self.effort.below_s) or self.effort.enough_s is not None:
            self._find_bound()
            # Another number of replicas' decisions may be no faster with this one.
            is_another = self.effort.is_another and fits
            if self.effort.is_vain(self.bound) or (
                is_another and self.best.seconds >= self.effort.below_s * (1 - GAIN)
            ):
                return self.best
        self._try_plain()
        compared = False
        for stage in (self._descend, self._prove, self._improve, self._reorder):
            if self._staying_will_do(self.bound) or self._good_enough():
                break
            if self.effort.is_vain(self.bound):
                break
            is_slower = self.best.seconds >= self.effort.below_s * (1 + TOLERANCE)
            if self.effort.spent() or (is_slower and stage != self._descend):
                break
            stage()
        else:
            compared = self.problem.count <= SMALL
        if self.best.seconds >= self.effort.below_s:
            return self.best
        stays = self._staying_will_do(self.best.seconds)
        slowest = self.best.seconds * (1 + TOLERANCE)
        if self.effort.enough_s is not None:
            slowest = max(self.best.seconds, min(slowest, self.effort.enough_s))
        best = exact_where_free(self.problem, self.evaluator, self.best, slowest_s=slowest)
        best = in_runs(self.problem, self.evaluator, best, slowest_s=slowest)
        stopped = self.effort.spent
        if self.problem.settings.overlap_steps:
            alone = Evaluator(self.problem.overlapping(False), stopped)
            # Steps that do not overlap are easier to debug.
            found = alone.best_schedule(best.choice, pace=best.pace._replace(late=0.0))
            found = found if found and found.seconds <= slowest else None
            if compared and not stays:
                plain = baseline("four-parameter", alone.problem, alone)
                found = plain if plain and plain.seconds < (found or best).seconds else found
            if found:
                self.problem, best = alone.problem, found
        self.best = simplified(self.problem, best, slowest_s=slowest, stopped=stopped)
        self._tell("simpler decisions")
        return self.best

    def solve_baseline(self, name: Baseline) -> Evaluation | None:
        """The best plan of a baseline; None without one within the budgets."""
        self._find_bound()
        found = baseline(name, self.problem, self.evaluator)
        if found:
            self.best = found
            self._tell(name)
        return found

    def solved(self, best: Evaluation, seconds: float) -> Solved:
        """The answer: `best` as a plan, with its prediction."""
        profile, settings = self.problem.profile, self.problem.settings
        program = self.problem.program(best.plans)
        peaks = peak_bytes(program)
        assert peaks.device <= self.problem.device, "the schedule and the peak function disagree"
        assert self.bound <= best.seconds, "no plan is faster than the bound"
        clipped_s = 0.0
        if program.speculative:
            clipped = self.problem.program(best.plans, clipped=True)
            clipped_s = max(best.seconds, simulated_seconds(clipped)[0])
        update_s = host_update_seconds(program)
        error_low, error_high = profile.error_band
        threads = self.problem.profile.hardware.device.num_threads  # one launches
        prediction = Prediction(
            step_seconds=best.seconds,
            lower_bound_seconds=self.bound,
            peak_bytes=peaks,
            error_low=error_low,
            error_high=error_high,
            first_step_seconds=first_step_seconds(program) if settings.overlap_steps else 0.0,
            clipped_step_seconds=clipped_s,
            host_update_seconds=update_s,
            host_update_threads=max(1, threads - 1) if update_s else 0,
        )
        made = Plan(
            workload=profile.workload,
            hardware=profile.hardware.name,
            optimizer=profile.optimizer.name,
            profile_fingerprint=fingerprint(self.problem.made_from),
            model_fingerprint=profile.model_fingerprint,
            exact=True,
            budgets=self.problem.budgets,
            prediction=prediction,
            settings=settings,
            units=best.plans,
            tensors=profile.tensors,
        )
        made = made.regraded()
        return Solved(
            plan=made,
            status=_status(made.gap, self.effort),
            gap=made.gap,
            stall_seconds=best.stall_s,
            solve_seconds=seconds,
            solver=SOLVER if self.effort.solver == "milp" else self.effort.solver,
            search=tuple(self.stages),
        )

    @cached_property
    def counting(self) -> Counting:
        """The fluid model and its numbers, by windows of slots."""
        window = -(-self.problem.count // WINDOWS)
        # The solver polls ten thousand times: skipped if nothing ends a search.
        is_endless = self.effort.stopped is None and self.effort.time_limit_s is None
        stopped = None if is_endless else self.effort.spent
        return Counting(self.problem, window=window, stopped=stopped)

    @cached_property
    def prices(self) -> Prices:
        return self.counting.relax()

    @cached_property
    def descent(self) -> Descent:
        """The descent, which remembers tried layouts."""
        order = random.Random(self.effort.seed)
        return Descent(self.problem, self.evaluator, self.prices, order)

    def _find_bound(self) -> None:
        self.bound = max(self.bound, self.prices.bound)
        self._tell("lower bound")

    @property
    def _enough_s(self) -> float:
        """The seconds of a good enough plan."""
        return max(self.bound * (1 + self.effort.gap_target), self.effort.enough_s or 0.0)

    def _good_enough(self) -> bool:
        return self.best.seconds <= self._enough_s

    def _is_above(self, gap: float) -> bool:
        return self.best.seconds > self.bound * (1 + gap)

    def _tell(self, stage: str) -> None:
        self.effort.progress(stage, self.best.seconds, self.bound or None)
        self.stages.append(
            SearchStage(stage=stage, step_seconds=self.best.seconds, bound_seconds=self.bound)
        )

    def _keep(self, evaluation: Evaluation | None) -> None:
        if evaluation and evaluation.seconds < self.best.seconds:
            self.best = evaluation

    def _staying_will_do(self, seconds: float) -> bool:
        """Take the plan that moves nothing, unless `seconds` is worth the moves."""
        if self.staying is None or self.staying.seconds > seconds * (1 + MOVING_GAIN):
            return False
        self.best = self.staying
        return True

    def _polish(self, stage: str) -> None:
        """The best schedule for the best choice, at the end of a stage."""
        self._keep(self.evaluator.best_schedule(self.best.choice, pace=self.best.pace))
        self._tell(stage)

    def _try_plain(self) -> None:
        """Simulate the plain policies that a walk finds fastest, and find the bound.

        The plainest that fits is taken if it is close enough to that.
        """
        fitting = [choice for choice in plain_choices(self.problem) if self.problem.fits(choice)]
        plainest = self.evaluator.evaluate(fitting[0], paces=PACES) if fitting else None
        self._keep(plainest)
        self.staying = staying(self.problem, self.evaluator)
        likely = sorted(fitting, key=self.problem.least_seconds)[:WALKED_PLAIN]
        walks = ((choice, self.evaluator.pacer.walk(choice)) for choice in likely)
        seconds = {one: paced.seconds for one, paced in walks if paced and not self.effort.spent()}
        for choice in sorted(seconds, key=lambda one: seconds[one])[:SIMULATED_PLAIN]:
            if self._good_enough():
                break
            limit = self.best.seconds
            self._keep(self.evaluator.evaluate(choice, paces=PACES, faster_than_s=limit))
        self.plain = list(seconds)
        self._tell("plain policies")
        self._find_bound()
        if plainest and plainest.seconds <= self.bound * (1 + self.effort.gap_target):
            self.best = plainest  # though others may be a little faster

    def _descend(self) -> None:
        """Steps downhill from the layouts that look fastest.

        They are near the relaxation's amounts, or plain ones; all are made to meet the budgets.
        """
        found: dict[Layout, None] = {}
        for caution in CAUTIONS:
            if not self.effort.spent() and (amounts := self.counting.amounts(caution)):
                found |= dict.fromkeys(layouts_near(self.problem, amounts))
        for choice in (self.lean, self.best.choice, *self.plain):
            found[layout_of(self.problem, choice)] = None
        repaired = [self.descent.repaired(layout) for layout in found]
        starts = dict.fromkeys(filter(None, repaired))
        walked = {one: self.descent.walked(choice_of(self.problem, one)) for one in starts}
        most = self.walks // (2 * DESCENTS)
        self._go_down(sorted(walked, key=lambda one: walked[one])[:DESCENTS], most)
        self._polish("steps downhill")

    def _go_down(self, layouts: Iterable[Layout], most: int) -> None:
        """Steps downhill from each of the layouts, in up to `most` walks."""
        for layout in layouts:
            if not self._good_enough():
                found = self.descent.descended(layout, most=most, enough_s=self._enough_s)
                if found:
                    self.found[layout_of(self.problem, found.choice)] = found.seconds
                self._keep(found)

    def _prove(self) -> None:
        """Lift the bound: numbers that promise more, until what they promise is what they take."""
        counting, least = self.counting, inf
        close = 1 + self.effort.gap_target / 4
        most = BRANCHED[self.problem.settings.overlap_steps]
        if self.problem.count <= FEW and len(counting.fluid.pulp.variables()) <= most:
            numbers = counting.branch(
                max_nodes=max(8, BRANCHED_UNITS // self.problem.count),
                gap=self.effort.gap_target / 4,
                time_limit_s=self.effort.left_s(),
            )
            self.bound = max(self.bound, counting.bound_seconds)
            if numbers and (amounts := counting.amounts(numbers)):
                self._try(layouts_near(self.problem, amounts))
            self._tell("a search tree")
        in_vain = 0
        for _ in range(ROUNDS):
            gap_s = self.best.seconds - self.bound
            is_vain = in_vain >= IN_VAIN and not self._is_above(WIDE)
            if self._good_enough() or self.effort.spent() or is_vain:
                break
            numbers = counting.promising(self.effort.gap_target / 4)
            self.bound = max(self.bound, counting.bound_seconds)
            if numbers is None or least <= counting.bound * close:
                break
            value = counting.learn(numbers)
            if value <= least * PROMISING and (amounts := counting.amounts(numbers)):
                self._try(layouts_near(self.problem, amounts))
            least = min(least, value)
            closed = self.best.seconds - self.bound <= gap_s * (1 - WORTH)
            in_vain = 0 if closed else in_vain + 1
            self._tell("numbers that promise more")

    def _try(self, layouts: Iterable[Layout]) -> None:
        """Simulate the layouts that the walk finds faster than the best plan."""
        for layout in layouts:
            if repaired := self.descent.repaired(layout):
                choice = choice_of(self.problem, repaired)
                if isfinite(self.descent.walked(choice, self.best.seconds)):
                    limit = self.best.seconds
                    self._keep(self.evaluator.evaluate(choice, paces=PACES, faster_than_s=limit))

    def _improve(self) -> None:
        """Steps downhill from the best plan, with its pace."""
        if self.problem.count <= SMALL:
            self._keep(baseline("four-parameter", self.problem, self.evaluator))
        self.descent.pace = self.best.pace
        most = 2 * self.walks if self._is_above(LOOSE) else self.walks // 4
        self._go_down([layout_of(self.problem, self.best.choice)], most)
        self._polish("steps downhill from the best plan")

    def _reorder(self) -> None:
        """Steps downhill from the plans found, with the runs of their layouts in other orders."""
        for _ in range(ORDERS if self.problem.count <= REORDERED else 0):
            if not self._is_above(WIDE):
                break
            before_s = self.best.seconds
            near = sorted(self.found, key=lambda one: self.found[one])
            others = dict.fromkeys(self.descent.reordered(one) for one in near)
            starts = islice((one for one in others if one not in self.found), DESCENTS)
            self._go_down(starts, self.walks)
            self._polish("other orders")
            if self.best.seconds > before_s * (1 - WORTH):
                break


def _status(gap: float, effort: Effort) -> Status:
    return "optimal" if gap <= effort.gap_target else "feasible"


def solve_any(
    problems: Sequence[Problem], *, effort: Effort, hints: Sequence[Hint] = ()
) -> Solved | Infeasible:
    """The fastest plan of any problem, with a bound for all; or why the first has none."""
    if len(problems) == 1:
        return solve_problem(problems[0], effort=effort, hints=hints)
    started, tolerated = time.monotonic(), 1 + effort.gap_target
    best: Solved | None = None
    best_s, known = inf, list(hints)

    def faster(problem: Problem) -> Effort:
        number = problem.settings.group.num_replicas
        part = effort.of_part(f"{number} {'replica' if number == 1 else 'replicas'}: ")
        return replace(part, below_s=min(best_s, effort.below_s), is_another=best is not None)

    bounds: dict[int, float] = {}  # of all that may have plans
    looked_at = len(problems)
    for number, problem in enumerate(problems):
        if number and effort.spent():
            looked_at = number
            break
        if (bound := least_lane_seconds(problem, stopped=effort.spent)) is None:
            break  # more replicas need more memory
        bounds[number] = bound
    seconds: dict[int, float] = {}  # of the plans found
    reason: Infeasible | None = None  # why the first problem has none
    # The most promising first; those whose bounds are near by their replicas.
    near = min(bounds.values(), default=0.0) * NEAR
    for number in sorted(bounds, key=lambda number: max(near, bounds[number])):
        if bounds[number] * tolerated >= best_s:
            continue  # no plan of it is faster by more than the gap asked for
        if best and (effort.spent() or best_s <= (effort.enough_s or 0.0)):
            break
        problem, below = problems[number], faster(problems[number])
        found = solve_problem(problem, effort=below, hints=known)
        if isinstance(found, Infeasible):
            del bounds[number]
            reason = found if number == 0 else reason
            continue
        bounds[number] = found.bound_seconds
        if not below.is_vain(bounds[number]):  # otherwise the search was given up
            seconds[number] = found.step_seconds
        if found.step_seconds < best_s - SAME_S:
            best, best_s = found, found.step_seconds
            seconds[number] = best_s
            known.append(found.plan.units)
    if best is None:
        return reason or solve_problem(problems[0], effort=faster(problems[0]), hints=known)
    # What was not looked at computes as much.
    bound = min([*bounds.values(), *(one.compute_seconds for one in problems[looked_at:])])
    return replace(
        proven(best, bound, effort),
        solve_seconds=time.monotonic() - started,
        replicas=tuple(
            Replicas(
                number=problem.settings.group.num_replicas,
                step_seconds=seconds.get(number),
                lower_bound_seconds=bounds.get(number),
            )
            for number, problem in enumerate(problems)
        ),
    )


def problem_of(solved: Solved, problems: Sequence[Problem]) -> Problem:
    """The problem that a plan was made for."""
    number = solved.plan.group.num_replicas
    problem = next(one for one in problems if one.settings.group.num_replicas == number)
    made = solved.plan.settings
    settings = replace(
        problem.settings, overlap_steps=made.overlap_steps, reductions=made.reductions
    )
    return problem if settings == problem.settings else replace(problem, settings=settings)


def within(problems: Sequence[Problem], device: int) -> tuple[Problem, ...]:
    """The problems with so many bytes for tensors on the device."""
    budget = device + problems[0].profile.hardware.device.besides_bytes
    budgets = replace(problems[0].budgets, device=budget)
    return tuple(problem.changed(device=device, budgets=budgets) for problem in problems)
