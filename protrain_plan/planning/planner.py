"""The planner: bound, rounding, judging, local search, and a search tree where that is not enough.

    bound   = the fluid model's relaxation
    choices = plain policies, and roundings of the relaxation at several memory margins
    best    = the fastest of them in the simulator, improved by local search
    if best is not within the gap asked for: branch and bound from it, its bound, its roundings

The model only proposes; every plan is judged by the simulator under the byte limits of its slots.
"""

import time
from collections.abc import Callable

from protrain_plan.planning.advice import infeasible
from protrain_plan.planning.candidates import plain_choices
from protrain_plan.planning.fluid import Fluid
from protrain_plan.planning.judging import FULL_GRID, Judge, Judged
from protrain_plan.planning.leanest import Leanest, leanest
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.rounding import repaired, roundings
from protrain_plan.planning.search import Effort, improved
from protrain_plan.planning.solver import Answer, solve, solver_name
from protrain_plan.planning.tidying import in_runs, tidied
from protrain_plan.records.fingerprint import fingerprint
from protrain_plan.records.plan import Budgets, Plan, Prediction, TierBytes
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.graph import waits_in_a_circle
from protrain_plan.simulation.memory import compile_units, device_bytes, tier_bytes
from protrain_plan.simulation.timeline import simulated_seconds

PIECE_BYTES = 8 * 1024 * 1024
MARGINS = (0.0, 0.01, 0.02, 0.04, 0.07, 0.12)
"""Fractions of the budget that the relaxation leaves free for whole moves (design, section 4)."""

BRANCHED_UNITS = 6000
MARGIN_BRANCHED_UNITS = 1200
"""Nodes of a search tree times units: about the same seconds for small and large models."""

SIMULATED_MOVES = 200_000
"""What the local search may simulate: about three seconds."""

Progress = Callable[[str, float | None, float | None], None]


def plan(
    profile: Profile,
    budgets: Budgets,
    *,
    piece_bytes: int = PIECE_BYTES,
    time_limit_s: float = 20.0,
    gap_target: float = 0.005,
    progress: Progress | None = None,
) -> Solved | Infeasible:
    """The fastest plan found for `profile` within `budgets`, or why there is none.

    `budgets.device` includes the context. `progress` is told a stage, the best step so far and the
    bound, in seconds. The answer depends on the inputs alone unless the time limit strikes.
    """
    started = time.monotonic()
    problem = Problem.of(profile, budgets, piece_bytes=piece_bytes)
    lean = leanest(problem)
    if lean is None or lean.bytes > problem.device:
        return infeasible(problem, budgets, lean)
    planning = _Planning(problem, lean, started + time_limit_s, gap_target, progress)
    best = planning.solve()
    return _solved(problem, budgets, best, planning.bound, gap_target, time.monotonic() - started)


class _Planning:
    """The pipeline of one problem that some plan meets."""

    def __init__(
        self,
        problem: Problem,
        lean: Leanest,
        deadline: float,
        gap_target: float,
        progress: Progress | None,
    ) -> None:
        self.problem, self.lean, self.deadline = problem, lean, deadline
        self.gap_target, self.progress = gap_target, progress
        self.judge = Judge(problem)
        self.bound = 0.0
        first = self.judge.judge(lean.choice)
        assert first, "the leanest choice meets the budgets"
        self.best: Judged = first

    def solve(self) -> Judged:
        """The best plan of all stages."""
        for choice in plain_choices(self.problem):
            self._try(choice)
        self._tell("plain policies")
        self.fluid = Fluid(self.problem)
        answer = solve(self.fluid.pulp, integer=False)
        if answer.status == "optimal":
            self.bound = self.fluid.lower_bound_seconds(answer.bound)
        self._tell("lower bound")
        for stage in (self._round, self._branch, self._branch_with_margin, self._improve):
            if self._done():
                break
            stage()
        return self._tidied(self._with_best_rule())

    def _tidied(self, best: Judged) -> Judged:
        best = in_runs(self.problem, self.judge, best)
        plans = tidied(self.problem, best.plans)
        program = compile_units(plans, self.problem.profile, piece_bytes=self.problem.piece_bytes)
        seconds, stall_s = simulated_seconds(program, plans, self.problem.profile)
        return best._replace(seconds=seconds, stall_s=stall_s, plans=plans)

    def _enough(self) -> float:
        """Seconds at which the plan is good enough."""
        return self.bound * (1 + self.gap_target)

    def _done(self) -> bool:
        return self.best.seconds <= self._enough() or time.monotonic() > self.deadline

    def _tell(self, stage: str) -> None:
        if self.progress:
            self.progress(stage, self.best.seconds, self.bound or None)

    def _try(self, choice: Choice) -> None:
        judged = self.judge.judge(choice, faster_than_s=self.best.seconds)
        if judged and judged.seconds < self.best.seconds:
            self.best = judged

    def _try_near(self, values: dict[str, float]) -> None:
        """Judge the roundings of a solution of the fluid model."""
        for choice in roundings(self.problem, self.fluid.choice_values(values)):
            self._try(repaired(self.problem, choice, self.lean.choice))

    def _round(self) -> None:
        self.fluid.prefer_few_moves()
        for margin in MARGINS:
            if time.monotonic() > self.deadline:
                break
            self.fluid.set_margin(margin)
            answer = solve(self.fluid.pulp, integer=False)
            if answer.values:
                self._try_near(dict(answer.values))
        self._tell("roundings")
        self.best = self._with_best_rule()

    def _improve(self) -> None:
        self.best = improved(
            self.problem,
            self.judge,
            self.best,
            effort=Effort(SIMULATED_MOVES, self.deadline),
            enough_s=self._enough(),
        )
        self._tell("local search")
        self.best = self._with_best_rule()

    def _branch(self) -> None:
        """Branch and bound on the plain model, for its bound and for its solution."""
        self.fluid.minimise_seconds()
        self.fluid.set_margin(0.0)
        answer = self._search_tree(BRANCHED_UNITS)
        if answer.bound > -float("inf"):
            self.bound = max(self.bound, self.fluid.lower_bound_seconds(answer.bound))
        self._tell("branch and bound")

    def _branch_with_margin(self) -> None:
        """The same with few moves preferred and room for whole ones: for its solution alone."""
        self.fluid.prefer_few_moves()
        for margin in MARGINS[1:3]:
            self.fluid.set_margin(margin)
            self._search_tree(MARGIN_BRANCHED_UNITS)
            if self._done():
                break
        self._tell("branch and bound with margins")

    def _search_tree(self, branched_units: int) -> Answer:
        answer = solve(
            self.fluid.pulp,
            integer=True,
            max_nodes=max(10, branched_units // self.problem.count),
            time_limit_s=max(0.1, self.deadline - time.monotonic()),
            gap=self.gap_target / 2,
            start=self.fluid.start(self.best.choice),
        )
        if answer.values:
            self._try_near(dict(answer.values))
            self.best = self._with_best_rule()
        return answer

    def _with_best_rule(self) -> Judged:
        """The best choice under every rule for leads and drains."""
        judged = self.judge.judge(self.best.choice, rules=FULL_GRID)
        assert judged
        return judged


def _solved(
    problem: Problem,
    budgets: Budgets,
    best: Judged,
    bound: float,
    gap_target: float,
    seconds: float,
) -> Solved:
    profile = problem.profile
    program = compile_units(best.plans, profile, piece_bytes=problem.piece_bytes)
    peak = max(slot.total for slot in device_bytes(program, best.plans, profile))
    assert peak <= problem.device, "the schedule and the peak function disagree"
    assert not waits_in_a_circle(program), "a programme that waits for itself"
    below = {tier: tier_bytes(tier, program, best.plans, profile) for tier in problem.tiers}
    prediction = Prediction(
        step_seconds=best.seconds,
        lower_bound_seconds=min(bound, best.seconds),
        peak_bytes=TierBytes(
            device=peak,
            context=profile.hardware.device.context_bytes,
            host=below.get("host", 0),
            disk=below.get("disk", 0),
        ),
    )
    made = Plan(
        workload=profile.workload,
        hardware=profile.hardware.name,
        optimizer=profile.optimizer.name,
        profile_fingerprint=fingerprint(profile),
        model_fingerprint=profile.model_fingerprint,
        exact=True,
        budgets=budgets,
        prediction=prediction,
        piece_bytes=problem.piece_bytes,
        units=best.plans,
    )
    gap = made.gap
    return Solved(
        plan=made,
        status="optimal" if gap <= gap_target else "feasible",
        gap=gap,
        stall_seconds=best.stall_s,
        solve_seconds=seconds,
        solver=solver_name(),
    )
