"""The planner: a bound, whole numbers of units, their arrangements, evaluation, local search.

    bound   = the fluid model's relaxation, then that over whole numbers of units per option
    choices = plain policies, the paper's four parameters, and arrangements of whole numbers near
              the relaxation's (with more and less room for whole moves) or that promise more
    best    = the fastest of them in the simulator, each stage only while it is not close enough to
              the bound; then local search

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

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Literal

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.explain.advice import infeasible
from protrain_plan.planning.model.counting import Counting, Room
from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import solver_name
from protrain_plan.planning.outcome import Infeasible, Replicas, Solved, Status
from protrain_plan.planning.search.baselines import BASELINES, Baseline, baseline, leanest_variant
from protrain_plan.planning.search.choices import (
    Leanest,
    arranged,
    min_memory,
    moved_down,
    plain_choices,
    repaired,
    roundings,
)
from protrain_plan.planning.search.evaluation import QUICK_GRID, Evaluation, Evaluator
from protrain_plan.planning.search.improving import (
    TOLERANCE,
    Effort,
    apart,
    at_the_step,
    improved,
    in_runs,
    simplified,
)
from protrain_plan.program.group import ALONE, DeviceGroup
from protrain_plan.records.forms import FORMS
from protrain_plan.records.plan import Budgets, Offload, Plan, Prediction, StateTier
from protrain_plan.records.profile import Profile
from protrain_plan.records.writer import fingerprint
from protrain_plan.simulation.memory import peak_bytes
from protrain_plan.simulation.timeline import first_step_seconds, simulated_seconds

ROOMS = (
    *(Room(0.0, 1e-3), Room(0.0, 0.08), Room(0.1, 0.02), Room(0.25, 1e-3), Room(0.2, 0.05)),
    *(Room(0.05, 1e-3), Room(0.02, 0.02), Room(0.35, 1e-3)),
)
"""What relaxations leave for whole moves, one after the other (docs/decisions/planner.md)."""

PROBED_UNITS, PROVED_UNITS = 250, 400
"""How often, times units, the fluid model is asked for numbers, and for what they promise. A model
of thirty units takes 0.2 s for an answer, one of a hundred 3 s."""

MOST_PLAIN = 24
"""Plain policies that are simulated, those of the least busy lanes first."""

ROUNDS = 12
"""Of numbers that promise more than all before."""

SMALL = 1500
"""Variables of a fluid model for which a search tree over it takes a second or two. It knows what
whole numbers there are together, and not from slopes alone."""

BRANCHED_UNITS = {False: 2000, True: 600}
"""Nodes of that tree times units, by whether steps overlap, which makes a node three times as
long."""

LEARNT = 2
"""Numbers near the relaxation's that the programme learns from before it is asked."""

IN_VAIN = 4
"""Rounds after which neither the bound nor the plan is better, before they end."""

PROMISING = 1.01
"""Numbers are tried whose value is at most so many times the least known."""

SIMULATED_MOVES = 1_000_000
"""Moves of the plans that the local search simulates: some eight seconds."""

LEAST_SIMULATED, MOST_SIMULATED = 60, 3000
"""Plans that it simulates of any model, at least, and at most."""

Solver = Literal["milp"] | Baseline
SOLVERS: tuple[Solver, ...] = ("milp", *BASELINES)

Progress = Callable[[str, float | None, float | None], None]


def plan(
    profile: Profile,
    budgets: Budgets,
    *,
    piece_bytes: int | None = None,
    effort: Effort | None = None,
    solver: Solver = "milp",
    progress: Progress | None = None,
    hints: Sequence[Choice] = (),
    group: DeviceGroup = ALONE,
) -> Solved | Infeasible:
    """The fastest plan found for `profile` within `budgets`, or why there is none.

    `budgets.device` includes the context. See `solve_problem`.
    """
    problem = Problem.of(profile, budgets, piece_bytes=piece_bytes, group=group)
    return solve_problem(
        problem, budgets, effort=effort, solver=solver, progress=progress, hints=hints
    )


def solve_problem(
    problem: Problem,
    budgets: Budgets,
    *,
    effort: Effort | None = None,
    solver: Solver = "milp",
    progress: Progress | None = None,
    hints: Sequence[Choice] = (),
) -> Solved | Infeasible:
    """The fastest plan found for a problem with these budgets, or why there is none.

    `solver` is `milp` for all the planner has, or a baseline to compare with. `progress` is told a
    stage, the best step so far and the bound, in seconds. `hints` are choices to begin with.
    """
    effort = effort or Effort()
    started = time.monotonic()
    if solver != "milp":
        problem = problem.overlapping(False)
    # A second copy makes no plan leaner.
    late = effort.late()
    lean = min_memory(problem.speculating(), stopped=late)
    if (lean is None or lean.bytes > problem.device) and late():
        lean = _first_plain(problem)
    if lean is None or lean.bytes > problem.device:
        return infeasible(problem, budgets, lean)
    planning = _Planning(problem, lean, effort, progress)
    if solver == "milp":
        best = planning.solve(hints)
    elif found := planning.solve_baseline(solver):
        best = found
    else:
        variant = leanest_variant(solver, problem)
        peak = max(problem.static_bytes(variant))
        needed = Leanest(choice=variant, bytes=peak, proven_bytes=peak)
        return infeasible(problem, budgets, needed)
    return planning.solved(best, budgets, solver, time.monotonic() - started)


def _first_plain(problem: Problem) -> Leanest:
    """A plain policy that meets the budgets; ProtrainError where none does, and time is up."""
    for choice in plain_choices(problem):
        if problem.fits(choice):
            peak = max(problem.static_bytes(choice))
            return Leanest(choice=choice, bytes=peak, proven_bytes=0)
    raise ProtrainError(
        "the search ended before it had found any plan", fix="let it have more time"
    )


class _Planning:
    """The pipeline of one problem that some plan meets."""

    def __init__(
        self, problem: Problem, lean: Leanest, effort: Effort, progress: Progress | None
    ) -> None:
        self.problem, self.lean = problem, lean
        self.effort, self.progress = effort, progress
        self.evaluator = Evaluator(problem)
        self.bound, self.room = problem.compute_seconds, ROOMS[0]
        self.on_device = problem.may_update_on_device
        self.near: dict[tuple[int, ...], dict[str, int]] = {}  # numbers near the relaxation's
        first = self.evaluator.evaluate(lean.choice)
        assert first, "the leanest choice meets the budgets"
        self.evaluator.stopped = effort.spent  # from here on there is a plan
        self.best: Evaluation = first

    def solve(self, hints: Sequence[Choice]) -> Evaluation:
        """The best plan of all stages."""
        before = self._searched_before(hints)
        self._search(hints)
        if self.best.seconds >= self.effort.below_s:
            return self.best
        self._keep(self.evaluator.best_schedule(self.best.choice, rule=self.best.rule))
        slowest = self.best.seconds * (1 + TOLERANCE)
        if self.effort.enough_s is not None:
            slowest = max(self.best.seconds, min(slowest, self.effort.enough_s))
        # Whatever a simple policy reaches is reached.
        for name in BASELINES:
            if self.effort.spent() or self.effort.enough_s is not None:
                break
            found = baseline(name, self.problem, self.evaluator, below_s=self.best.seconds)
            self._keep(found)
            slowest = min(slowest, found.seconds if found else slowest)
        self._tell("baselines")
        slowest = max(slowest, self.best.seconds)
        best = in_runs(self.problem, self.evaluator, self.best, slowest_s=slowest)
        best = at_the_step(self.problem, self.evaluator, best, slowest_s=slowest)
        stopped = self.effort.spent
        alone = (
            apart(self.problem, one, slowest_s=slowest, stopped=stopped) for one in (best, *before)
        )
        if found := min(filter(None, alone), key=lambda one: one.seconds, default=None):
            self.problem, best = self.problem.overlapping(False), found
        return simplified(self.problem, best, slowest_s=slowest, stopped=stopped)

    def _searched_before(self, hints: Sequence[Choice]) -> list[Evaluation]:
        """The best plans without speculative updates, and with some, where they are an option.

        The latter are on the tier of which the former stages most chunks. They are kept, and so is
        what follows from the former: that the last units' updates are speculative, by ever more of
        them, since their gradients come first.
        """
        if not self.problem.may_speculate:
            return []
        waiting = self._searched(self.problem.speculating(), hints)
        rules, staged = (waiting.rule, *QUICK_GRID), Counter[StateTier]()
        decided = list(waiting.plans)
        for unit in reversed(range(self.problem.count)):
            states = decided[unit].states
            if isinstance(states, Offload) and states.staged:
                staged[states.tier] += 1
                ahead = replace(states, speculate=True)
                if ahead in self.problem.options[unit].numbers[1]:
                    decided[unit] = replace(decided[unit], states=ahead)
                    choice = self.problem.choice_of(decided)
                    self._keep(self.evaluator.evaluate(choice, rules=rules))
        self._find_bound()
        if not staged or self._good_enough():
            return [waiting]
        (tier, _), *_ = staged.most_common(1)
        ahead_on = self.problem.speculating(tier)
        known = self.best.plans
        of_units = zip(known, ahead_on.options, strict=True)
        same = all(unit.states in options.numbers[1] for unit, options in of_units)
        return [waiting, self._searched(ahead_on, [ahead_on.choice_of(known)] if same else [])]

    def _searched(self, problem: Problem, hints: Sequence[Choice]) -> Evaluation:
        """The best plan with fewer options, found from those hints that it has them for."""
        other = _Planning(problem, self.lean, self.effort, self.progress)
        known = [len(options.states) for options in problem.options]
        open_to = [c for c in hints if all(s < n for (_, s), n in zip(c, known, strict=True))]
        other._search(open_to, last=False)
        best = other.best._replace(choice=self.problem.choice_of(other.best.plans))
        self._keep(best)
        return best

    def _search(self, hints: Sequence[Choice], *, last: bool = True) -> None:
        """All stages up to the last polish; without the last, whose plan others go on from."""
        for choice in hints:
            self._try(choice)
        plain = [choice for choice in plain_choices(self.problem) if self.problem.fits(choice)]
        for choice in sorted(plain, key=self.problem.least_seconds)[:MOST_PLAIN]:
            self._try(choice)
        self._tell("plain policies")
        self._find_bound()
        stages = [self._number, self._prove]
        if last and (self.on_device or self.effort.enough_s is None):
            stages.append(self._improve)
        for stage in stages:
            if self._good_enough() or self.effort.spent() or self._beaten():
                break
            if stage != stages[0] and self.best.seconds * (1 + TOLERANCE) >= self.effort.below_s:
                break  # another number of replicas is as good, or nearly
            if self.effort.enough_s is not None and self.bound > self.effort.enough_s:
                break  # no plan takes what the effort asks for
            stage()

    def solve_baseline(self, name: Baseline) -> Evaluation | None:
        """The best plan of a baseline, None where it has none within the budgets."""
        self._find_bound()
        found = baseline(name, self.problem, self.evaluator)
        if found:
            self.best = found
            self._tell(name)
        return found

    def solved(self, best: Evaluation, budgets: Budgets, solver: Solver, seconds: float) -> Solved:
        """The answer: `best` as a plan, with what it promises."""
        profile, settings = self.problem.profile, self.problem.settings
        program = self.problem.program(best.plans)
        peaks = peak_bytes(program)
        assert peaks.device <= self.problem.device, "the schedule and the peak function disagree"
        assert self.bound <= best.seconds, "no plan is faster than the bound"
        clipped_s = 0.0
        if program.speculative:
            clipped = self.problem.program(best.plans, clipped=True)
            clipped_s = max(best.seconds, simulated_seconds(clipped)[0])
        error_low, error_high = profile.error_band
        prediction = Prediction(
            step_seconds=best.seconds,
            lower_bound_seconds=self.bound,
            peak_bytes=peaks,
            error_low=error_low,
            error_high=error_high,
            first_step_seconds=first_step_seconds(program) if settings.overlap_steps else 0.0,
            clipped_step_seconds=clipped_s,
        )
        made = Plan(
            workload=profile.workload,
            hardware=profile.hardware.name,
            optimizer=profile.optimizer.name,
            profile_fingerprint=fingerprint(self.problem.made_from),
            model_fingerprint=profile.model_fingerprint,
            exact=all(FORMS[unit.activations.form].exact for unit in best.plans),
            budgets=budgets,
            prediction=prediction,
            piece_bytes=settings.piece_bytes,
            units=best.plans,
            updates=settings.updates,
            micro_batches=settings.micro_batches,
            num_devices=settings.num_devices,
            num_replicas=settings.num_replicas,
            num_nodes=settings.num_nodes,
            overlap_steps=settings.overlap_steps,
            clip_share=settings.clip_share,
            tensors=profile.tensors,
        )
        return Solved(
            plan=made,
            status=status_of(made.gap, self.effort),
            gap=made.gap,
            stall_seconds=best.stall_s,
            solve_seconds=seconds,
            solver=solver_name() if solver == "milp" else solver,
        )

    @cached_property
    def counting(self) -> Counting:
        """The fluid model and its numbers, relaxed once."""
        counting = Counting(self.problem, stopped=self.effort.spent)
        counting.relax()
        return counting

    def _find_bound(self) -> None:
        self.bound = max(self.bound, self.counting.bound_seconds)
        self._tell("lower bound")

    def _good_enough(self) -> bool:
        return self.best.seconds <= max(self._enough(), self.effort.enough_s or 0.0)

    def _enough(self) -> float:
        return self.bound * (1 + self.effort.gap_target)

    def _beaten(self) -> bool:
        """Whether no plan is faster than what is known already, by more than the gap asked for."""
        return self._enough() >= self.effort.below_s

    def _tell(self, stage: str) -> None:
        if self.progress:
            self.progress(stage, self.best.seconds, self.bound or None)

    def _polish(self, stage: str) -> None:
        """The best schedule for the best choice, at the end of a stage."""
        self._keep(self.evaluator.best_schedule(self.best.choice, rule=self.best.rule))
        self._tell(stage)

    def _keep(self, evaluation: Evaluation | None) -> None:
        if evaluation and evaluation.seconds < self.best.seconds:
            self.best = evaluation

    def _try(self, choice: Choice) -> None:
        rules = (*QUICK_GRID, self.best.rule) if self.best.rule not in QUICK_GRID else QUICK_GRID
        enough = self.best.seconds
        self._keep(self.evaluator.evaluate(choice, rules=rules, faster_than_s=enough))

    def _number(self) -> None:
        """Whole numbers of units per option, near the relaxation's with more and more room."""
        counting = self.counting
        for room in ROOMS[: max(2, PROBED_UNITS // self.problem.count)]:
            if self._good_enough() or self.effort.spent():
                break
            values = counting.amounts(room)
            if numbers := counting.near(values):
                self.near.setdefault(tuple(numbers.values()), numbers)
                self._try_numbers(numbers, values, room)
                if not self._good_enough():
                    self._try_rounded(counting.placed(numbers, room), room)
            self._tell("whole numbers of units near the bound's")
        self._polish("whole numbers of units")

    def _prove(self) -> None:
        """Lift the bound: numbers that promise more, until what they promise is what they take."""
        counting, least = self.counting, inf
        close = 1 + self.effort.gap_target / 4
        if counting.size <= SMALL:
            branched = BRANCHED_UNITS[self.problem.settings.overlap_steps]
            found = counting.branch(
                max_nodes=max(10, branched // self.problem.count),
                gap=self.effort.gap_target / 4,
                time_limit_s=self.effort.left_s(),
            )
            self.bound = max(self.bound, counting.bound_seconds)
            if found:
                self._try_numbers(*found, self.room)
            self._tell("a search tree")
        for near in list(self.near.values())[:LEARNT]:
            if not self._good_enough() and not self.effort.spent():
                least = min(least, counting.learn(near))
        in_vain = 0
        for _ in range(min(ROUNDS, max(3, PROVED_UNITS // self.problem.count))):
            if self._good_enough() or self.effort.spent() or in_vain == IN_VAIN:
                break
            known = self.bound, self.best.seconds
            numbers = counting.promising(self.effort.gap_target / 4)
            self.bound = max(self.bound, counting.bound_seconds)
            if numbers is None or least <= counting.bound * close:
                break
            value = counting.learn(numbers)
            if value <= least * PROMISING:
                self._try_numbers(numbers, counting.spread(numbers, self.room), self.room)
            least = min(least, value)
            in_vain = in_vain + 1 if known == (self.bound, self.best.seconds) else 0
            self._tell("numbers that promise more")
        self._polish("numbers that promise more")

    def _try_numbers(
        self, numbers: Mapping[str, int], values: Mapping[str, float], room: Room
    ) -> None:
        """Evaluate arrangements of so many units per option, by fractions that the model takes."""
        if values:
            fractions = self.counting.fluid.choice_values(values)
            amounts = self.counting.of_classes(numbers)
            self._try_all(arranged(self.problem, fractions, amounts), room)

    def _try_rounded(self, values: Mapping[str, float], room: Room) -> None:
        """Evaluate roundings of fractions that the model takes."""
        if values:
            self._try_all(roundings(self.problem, self.counting.fluid.choice_values(values)), room)

    def _try_all(self, choices: Iterable[Choice], room: Room) -> None:
        before = self.best.seconds
        for choice in choices:
            for below in moved_down(self.problem, choice):
                self._try(repaired(self.problem, below, self.lean.choice))
        if self.best.seconds < before:
            self.room = room

    def _improve(self) -> None:
        longer = self.on_device and self.effort.enough_s is None
        num_moves = 1 + len(self.problem.program(self.best.plans).moves)
        most = min(MOST_SIMULATED, SIMULATED_MOVES // num_moves)
        last = self.evaluator.num_simulations + max(LEAST_SIMULATED, most)
        before = None
        # Other decisions may want another schedule, and under that yet other ones.
        while before is None or (longer and self.best.seconds < before):
            before = self.best.seconds
            self.best = improved(
                self.problem,
                self.evaluator,
                self.best,
                effort=self.effort,
                max_simulations=last - self.evaluator.num_simulations,
                enough_s=max(self._enough(), self.effort.enough_s or 0.0),
                again=self.effort.enough_s is None,
            )
            self._polish("local search")


def status_of(gap: float, effort: Effort) -> Status:
    """What a plan of this gap is called."""
    return "optimal" if gap <= effort.gap_target else "feasible"


def solve_any(
    problems: Sequence[Problem],
    budgets: Budgets,
    *,
    effort: Effort | None = None,
    solver: Solver = "milp",
    progress: Progress | None = None,
    hints: Sequence[Choice] = (),
) -> Solved | Infeasible:
    """The fastest plan found for any of the problems; why the first has none, where none has any.

    The bound is one on the plans of all of them. Arguments as of `solve_problem`.
    """
    effort = effort or Effort()
    if len(problems) == 1:
        return solve_problem(
            problems[0], budgets, effort=effort, solver=solver, progress=progress, hints=hints
        )
    started, tolerated = time.monotonic(), 1 + effort.gap_target
    best: Solved | None = None
    best_s, known = inf, list(hints)

    def solve_one(problem: Problem) -> Solved | Infeasible:
        number = problem.settings.num_replicas

        def tell(stage: str, step_s: float | None, bound_s: float | None) -> None:
            if progress:
                word = "replica" if number == 1 else "replicas"
                progress(f"{number} {word}: {stage}", step_s, bound_s)

        faster = replace(effort, below_s=best_s)
        return solve_problem(
            problem, budgets, effort=faster, solver=solver, progress=tell, hints=known
        )

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
    # The most promising first; those whose bounds hardly differ by their replicas.
    near = min(bounds.values(), default=0.0) * tolerated
    for number in sorted(bounds, key=lambda number: max(near, bounds[number])):
        if bounds[number] * tolerated >= best_s:
            continue  # no plan of it is faster by more than the gap asked for
        if best and (effort.spent() or best_s <= (effort.enough_s or 0.0)):
            break
        found = solve_one(problems[number])
        if isinstance(found, Infeasible):
            del bounds[number]
            reason = found if number == 0 else reason
            continue
        prediction = found.plan.prediction
        bounds[number] = prediction.lower_bound_seconds
        if bounds[number] * tolerated < best_s:  # otherwise the search was given up
            seconds[number] = prediction.step_seconds
        if prediction.step_seconds < best_s:
            best, best_s = found, prediction.step_seconds
            seconds[number] = best_s
            # The options are the same for every number of replicas.
            known.append(problems[number].choice_of(found.plan.units))
    if best is None:
        return reason or solve_one(problems[0])
    # What was not looked at computes as much.
    bound = min([*bounds.values(), *(one.compute_seconds for one in problems[looked_at:])])
    prediction = replace(best.plan.prediction, lower_bound_seconds=bound)
    proven = replace(best.plan, prediction=prediction)
    return replace(
        best,
        plan=proven,
        gap=proven.gap,
        status=status_of(proven.gap, effort),
        solve_seconds=time.monotonic() - started,
        replicas=tuple(
            Replicas(
                number=problem.settings.num_replicas,
                step_seconds=seconds.get(number),
                lower_bound_seconds=bounds.get(number),
            )
            for number, problem in enumerate(problems)
        ),
    )


def problem_of(solved: Solved, problems: Sequence[Problem]) -> Problem:
    """The problem that a plan was made for."""
    number = solved.plan.num_replicas
    problem = next(one for one in problems if one.settings.num_replicas == number)
    return problem.overlapping(solved.plan.overlap_steps)


def within(problems: Sequence[Problem], device: int) -> tuple[Problem, ...]:
    """The same with so many bytes for tensors on the device."""
    return tuple(replace(problem, device=device) for problem in problems)
