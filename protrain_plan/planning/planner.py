"""The planner: bound, rounding, judging, local search, and a search tree where that is not enough.

    bound   = the fluid model's relaxation, the same with what whole chunks leave to slower tiers,
              and that with whole numbers of units per option
    choices = plain policies, the paper's four parameters, and roundings of these solutions and of
              some that leave a margin of memory
    best    = the fastest of them in the simulator; while it is not close enough to the bound:
              relaxations with more margins, local search

The model only proposes; every plan is judged by the simulator under the byte limits of its slots.
Work is limited by counts, never by time, unless the user sets a time limit: the same input gives
the same plan on every machine.
"""

import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Literal

from protrain_plan.planning.advice import infeasible
from protrain_plan.planning.baselines import BASELINES, Baseline, baseline, leanest_variant
from protrain_plan.planning.candidates import plain_choices
from protrain_plan.planning.counting import WORK, CountModel
from protrain_plan.planning.fluid import Fluid
from protrain_plan.planning.judging import Judge, Judged
from protrain_plan.planning.leanest import Leanest, leanest
from protrain_plan.planning.outcome import Infeasible, Solved, Status
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.rounding import moved_down, repaired, roundings
from protrain_plan.planning.search import Effort, improved
from protrain_plan.planning.solver import Answer, solve, solver_name
from protrain_plan.planning.tidying import TOLERANCE, in_runs, tidied
from protrain_plan.records.fingerprint import fingerprint
from protrain_plan.records.plan import Budgets, Plan, Prediction, TierBytes
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.graph import waits_in_a_circle
from protrain_plan.simulation.memory import device_bytes
from protrain_plan.simulation.ranks import ALONE, Group
from protrain_plan.simulation.tiers import tier_bytes

MARGINS = (0.0, 0.01, 0.02, 0.04, 0.07, 0.12)
"""Fractions of the budget that the relaxation leaves free for whole moves (docs/decisions.md)."""

SPARE_SWAPS = (0, 2)
"""Units' swapped activations that tiers have room for beside fractions, so that these are rounded
without moving a chunk, which may be a hundred times as large."""

LARGE = 4000
"""Variables of a fluid model from which on a search tree takes more than some seconds, up to a
minute (66 units on a machine with two tiers), for a bound that is at most 0.7 % better."""

BRANCHED_UNITS = 2000
"""Nodes of a search tree times units: about the same seconds for small and large models."""

SIMULATED_UNITS = 8_000
"""Plans that the local search may simulate times units: a second or two."""

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
    group: Group = ALONE,
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
    lean = leanest(problem)
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
    bound = min(planning.bound, best.seconds)
    return _solved(problem, budgets, best, bound, effort, solver, time.monotonic() - started)


class _Planning:
    """The pipeline of one problem that some plan meets."""

    def __init__(
        self, problem: Problem, lean: Leanest, effort: Effort, progress: Progress | None
    ) -> None:
        self.problem, self.lean = problem, lean
        self.effort, self.progress = effort, progress
        self.judge = Judge(problem)
        self.bound = 0.0
        first = self.judge.judge(lean.choice)
        assert first, "the leanest choice meets the budgets"
        self.best: Judged = first

    def solve(self, hints: Sequence[Choice]) -> Judged:
        """The best plan of all stages."""
        for choice in (*hints, *plain_choices(self.problem)):
            self._try(choice)
        self._tell("plain policies")
        self._find_bound()
        stages = (
            self._place_whole_chunks,
            self._count,
            self._round,
            self._count_with_margin,
            self._improve,
        )
        for stage in stages if self.effort.enough_s is None else stages[:2]:
            if self._good_enough() or self.effort.spent() or self._hopeless():
                break
            stage()
        if self._beaten() and self.best.seconds >= self.effort.below_s:
            return self.best
        self._keep(self.judge.judge_well(self.best.choice, rule=self.best.rule))
        slowest = self.best.seconds * (1 + TOLERANCE)
        if self.effort.enough_s is not None:
            slowest = max(self.best.seconds, min(slowest, self.effort.enough_s))
        # Whatever a simple policy reaches is reached.
        for name in BASELINES:
            if self.effort.spent() or self.effort.enough_s is not None:
                break
            found = baseline(name, self.problem, Judge(self.problem))
            self._keep(found)
            slowest = min(slowest, found.seconds if found else slowest)
        self._tell("baselines")
        return self._tidied(max(slowest, self.best.seconds))

    def solve_baseline(self, name: Baseline) -> Judged | None:
        """The best plan of a baseline, None where it has none within the budgets."""
        self._find_bound()
        found = baseline(name, self.problem, self.judge)
        if found:
            self.best = found
            self._tell(name)
        return found

    def _find_bound(self) -> None:
        self.fluid = Fluid(self.problem)
        answer = solve(self.fluid.pulp, integer=False)
        if answer.status == "optimal":
            self.bound = self.fluid.lower_bound_seconds(answer.bound)
        self._tell("lower bound")

    def _tidied(self, slowest_s: float) -> Judged:
        best = in_runs(self.problem, self.judge, self.best, slowest_s=slowest_s)
        return tidied(self.problem, best, slowest_s=slowest_s)

    def _good_enough(self) -> bool:
        return self.best.seconds <= max(self._enough(), self.effort.enough_s or 0.0)

    def _enough(self) -> float:
        return self.bound * (1 + self.effort.gap_target)

    def _hopeless(self) -> bool:
        """Whether no plan takes what the effort asks for."""
        slower = self.effort.enough_s is not None and self.bound > self.effort.enough_s
        return slower or self._beaten()

    def _beaten(self) -> bool:
        """Whether no plan is faster than what is known already, by more than the gap asked for."""
        return self._enough() >= self.effort.below_s

    def _tell(self, stage: str) -> None:
        if self.progress:
            self.progress(stage, self.best.seconds, self.bound or None)

    def _keep(self, judged: Judged | None) -> None:
        if judged and judged.seconds < self.best.seconds:
            self.best = judged

    def _try(self, choice: Choice) -> None:
        self._keep(self.judge.judge(choice, faster_than_s=self.best.seconds))

    def _try_near(self, values: dict[str, float]) -> None:
        """Judge the roundings of a solution of the fluid model."""
        for choice in roundings(self.problem, self.fluid.choice_values(values)):
            for below in moved_down(self.problem, choice):
                self._try(repaired(self.problem, below, self.lean.choice))

    def _round(self) -> None:
        self.fluid.prefer_few_moves()
        large = len(self.fluid.pulp.variables()) > LARGE // 2
        for margin in MARGINS[::2] if large else MARGINS:
            if self._good_enough() or self.effort.spent():
                break
            self.fluid.set_margin(margin)
            answer = solve(self.fluid.pulp, integer=False)
            if answer.values:
                self._try_near(dict(answer.values))
        self._keep(self.judge.judge_well(self.best.choice, rule=self.best.rule))
        self._tell("roundings")

    def _improve(self) -> None:
        self.best = improved(
            self.problem,
            self.judge,
            self.best,
            effort=self.effort,
            max_simulations=SIMULATED_UNITS // self.problem.count,
            enough_s=max(self._enough(), self.effort.enough_s or 0.0),
        )
        self._keep(self.judge.judge_well(self.best.choice, rule=self.best.rule))
        self._tell("local search")

    def _place_whole_chunks(self) -> None:
        """The relaxation that knows what whole chunks leave to slower tiers; its roundings."""
        model = CountModel(self.problem)
        for amount in WORK:
            if least := model.least(amount):
                self.fluid.at_least(amount.__name__, amount, least)
        answer = solve(self.fluid.pulp, integer=False)
        if answer.status == "optimal":
            self.bound = max(self.bound, self.fluid.lower_bound_seconds(answer.bound))
            if numbers := model.nearest(answer.values):
                for spare in SPARE_SWAPS:
                    with self.fluid.placing(numbers, spare_swaps=spare):
                        placed = solve(self.fluid.pulp, integer=False)
                    if placed.values and not self._good_enough():
                        self._try_near(dict(placed.values))
        if not self._good_enough():
            self._keep(self.judge.judge_well(self.best.choice, rule=self.best.rule))
        self._tell("whole chunks")

    def _count(self) -> None:
        """Branch and bound over how many units of a class take which option."""
        if len(self.fluid.pulp.variables()) > LARGE:
            return
        self.fluid.minimise_seconds()
        self.fluid.set_margin(0.0)
        answer = self._search_tree()
        # At the smallest budget, where one plan is left, solvers may find none: infinity then.
        if isfinite(answer.bound):
            self.bound = max(self.bound, self.fluid.lower_bound_seconds(answer.bound))
        self._keep(self.judge.judge_well(self.best.choice, rule=self.best.rule))
        self._tell("whole numbers of units")

    def _count_with_margin(self) -> None:
        """The same with few moves preferred and room for whole ones: for its solution alone."""
        if len(self.fluid.pulp.variables()) > LARGE // 2:
            return
        self.fluid.prefer_few_moves()
        self.fluid.set_margin(MARGINS[2])
        self._search_tree()
        self._keep(self.judge.judge_well(self.best.choice, rule=self.best.rule))
        self._tell("whole numbers of units, with room for pieces")

    def _search_tree(self) -> Answer:
        answer = solve(
            self.fluid.pulp,
            integer=True,
            max_nodes=max(10, BRANCHED_UNITS // self.problem.count),
            time_limit_s=min(self.effort.left_s(), 1e6),
            gap=self.effort.gap_target / 4,
        )
        if answer.values:
            self._try_near(dict(answer.values))
        return answer


def status_of(gap: float, effort: Effort) -> Status:
    """What a plan of this gap is called."""
    return "optimal" if gap <= effort.gap_target else "feasible"


def _solved(
    problem: Problem,
    budgets: Budgets,
    best: Judged,
    bound: float,
    effort: Effort,
    solver: Solver,
    seconds: float,
) -> Solved:
    profile, settings = problem.profile, problem.settings
    program = problem.program(best.plans)
    peak = max(slot.total for slot in device_bytes(program, best.plans, profile))
    assert peak <= problem.device, "the schedule and the peak function disagree"
    assert not waits_in_a_circle(program), "a programme that waits for itself"
    below = {tier: tier_bytes(tier, best.plans, profile, settings) for tier in problem.tiers}
    error_low, error_high = profile.error_band
    prediction = Prediction(
        step_seconds=best.seconds,
        lower_bound_seconds=bound,
        peak_bytes=TierBytes(
            device=peak,
            context=profile.hardware.device.context_bytes,
            allocator=profile.hardware.device.allocator_bytes,
            host=below.get("host", 0),
            disk=below.get("disk", 0),
        ),
        error_low=error_low,
        error_high=error_high,
    )
    made = Plan(
        workload=profile.workload,
        hardware=profile.hardware.name,
        optimizer=profile.optimizer.name,
        profile_fingerprint=fingerprint(problem.made_from),
        model_fingerprint=profile.model_fingerprint,
        exact=True,
        budgets=budgets,
        prediction=prediction,
        piece_bytes=settings.piece_bytes,
        units=best.plans,
        updates=settings.updates,
        micro_batches=settings.micro_batches,
        num_devices=settings.num_devices,
        num_replicas=settings.num_replicas,
        num_nodes=settings.num_nodes,
        tensors=profile.tensors,
    )
    gap = made.gap
    return Solved(
        plan=made,
        status=status_of(gap, effort),
        gap=gap,
        stall_seconds=best.stall_s,
        solve_seconds=seconds,
        solver=solver_name() if solver == "milp" else solver,
    )
