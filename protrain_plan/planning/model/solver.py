"""The linear solver, HiGHS, behind PuLP.

PuLP builds a model and passes it on. A `LinearProgram` keeps it in the solver with its last basis:
another objective, limit or row then takes a moment. One thread and a fixed seed: the same questions
in the same order have the same answers in every process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

import highspy
import pulp

Status = Literal["optimal", "infeasible", "unknown"]

Stopped = Callable[[], bool]
"""Polled while the solver runs; true ends it."""

ITERATIONS = 1500
"""Iterations of the simplex method from the last basis before an interior point is asked instead:
about the same seconds. Most changes take some hundreds, few of them ten thousand."""

MOST_ITERATIONS = 60_000
"""Most iterations of a relaxation: some without a solution ran for minutes."""

_KINDS = highspy.HighsModelStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A result of the solver; `bound` is a lower bound on all solutions (-inf: none proven)."""

    status: Status
    bound: float
    values: Mapping[str, float]


SOLVER = f"HiGHS {highspy.Highs().version()}"


class LinearProgram:
    """A model in the solver. It minimises; variables have PuLP's names.

    `interior` starts with an interior point method, with crossover: three times as fast as the
    simplex method from scratch on models of thousands of rows. `stopped` ends runs early.
    """

    def __init__(
        self, model: pulp.LpProblem, *, interior: bool = False, stopped: Stopped | None = None
    ) -> None:
        self._variables: Sequence[pulp.LpVariable] = model.variables()
        # PuLP passes the model to the solver, without solving it.
        stating = pulp.HiGHS(mip=False, msg=False, threads=1, random_seed=0)
        stating.createAndConfigureSolver(model)
        stating.buildSolverModel(model)
        self._highs: Any = model.solverModel
        del model.solverModel  # not copied or kept with the model
        self._integers = [v.index for v in self._variables if v.cat == pulp.LpInteger]
        self._hard, self._interior, self._integral = interior, interior, False
        if stopped is not None:
            for word in ("Simplex", "Ipm", "Mip"):
                asks = getattr(self._highs, f"cb{word}Interrupt")
                asks.subscribe(lambda event: event.interrupt() if stopped() else None)

    def bound(self, variable: pulp.LpVariable, low: float, high: float) -> None:
        """Change a variable's limits."""
        self._highs.changeColBounds(variable.index, low, high)

    def limit(self, row: pulp.LpConstraint, right: float) -> None:
        """Change the right side of a `<=` row."""
        self._highs.changeRowBounds(row.index, -inf, right)

    def cost(self, variable: pulp.LpVariable, cost: float) -> None:
        """Change a variable's cost."""
        self._highs.changeColCost(variable.index, cost)

    def add_row(self, terms: Sequence[tuple[pulp.LpVariable, float]], *, at_least: float) -> None:
        """Add `sum of terms >= at_least`; no variable twice."""
        indices = [variable.index for variable, _ in terms]
        self._highs.addRow(at_least, inf, len(terms), indices, [factor for _, factor in terms])

    def add_excess(self, rows: Sequence[pulp.LpConstraint], cost: float) -> None:
        """Allow these `<=` rows a common excess at this cost: `allow_excess`."""
        self._excess = self._highs.getNumCol()
        indices = [row.index for row in rows]
        self._highs.addCol(cost, 0.0, 0.0, len(rows), indices, [-1.0] * len(rows))

    def allow_excess(self, *, allowed: bool) -> None:
        """Switch the rows' excess on or off."""
        self._highs.changeColBounds(self._excess, 0.0, inf if allowed else 0.0)

    @property
    def excess(self) -> float:
        """The rows' excess in the last solution."""
        return float(self._highs.getSolution().col_value[self._excess])

    def solve(
        self,
        *,
        integer: bool = False,
        time_limit_s: float = inf,
        max_nodes: int | None = None,
        gap: float = 0.0,
        target: float = -inf,
    ) -> Solution:
        """The minimum; without `integer`, of the linear relaxation.

        `max_nodes` limits a search tree independently of the machine's speed, as does stopping at
        an integer value of at most `target`.
        """
        if integer != self._integral:
            kind = highspy.HighsVarType.kInteger if integer else highspy.HighsVarType.kContinuous
            for index in self._integers:
                self._highs.changeColIntegrality(index, kind)
            self._integral = integer
        method = "ipm" if self._interior and not integer else "choose"
        limit = self._highs.getRunTime() + time_limit_s if isfinite(time_limit_s) else inf
        options = {"solver": method, "time_limit": limit, "mip_rel_gap": gap}
        options["objective_target"] = target
        options["mip_max_nodes"] = 2**31 - 1 if max_nodes is None else max_nodes
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        most = 2**31 - 1 if integer else MOST_ITERATIONS
        steps = ITERATIONS if not integer and not self._interior and self._hard else most
        self._highs.setOptionValue("simplex_iteration_limit", steps)
        self._highs.run()
        self._highs.setOptionValue("simplex_iteration_limit", most)
        if self._highs.getModelStatus() == _KINDS.kIterationLimit:
            self._highs.setOptionValue("solver", "ipm")
            self._highs.run()
        ended = (_KINDS.kOptimal, _KINDS.kInterrupt, _KINDS.kTimeLimit)
        if not integer and self._hard and self._highs.getModelStatus() not in ended:
            # With hardly any solution left, an interior point may find none.
            self._highs.setOptionValue("solver", "simplex")
            self._highs.run()
        self._interior = self._interior and integer
        status, info = self._highs.getModelStatus(), self._highs.getInfo()
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        found: Status = "optimal" if status == _KINDS.kOptimal else "unknown"
        if status in (_KINDS.kInfeasible, _KINDS.kUnboundedOrInfeasible):
            found = "infeasible"
        bound, values = -inf, dict[str, float]()
        if integer:
            bound = float(info.mip_dual_bound)
        elif found == "optimal":
            bound = float(info.objective_function_value)
        if feasible:
            numbers = self._highs.getSolution().col_value
            values = {one.name: float(numbers[one.index]) for one in self._variables}
        return Solution(status=found, bound=bound, values=values)

    def reduced_costs(self, variables: Mapping[str, pulp.LpVariable]) -> dict[str, float]:
        """The last relaxation's reduced cost of each variable, at its fixed value."""
        duals = self._highs.getSolution().col_dual
        return {name: float(duals[variable.index]) for name, variable in variables.items()}


def relaxed(model: pulp.LpProblem, *, stopped: Stopped | None = None) -> Solution:
    """The minimum of `model`'s linear relaxation, found once."""
    return LinearProgram(model, interior=True, stopped=stopped).solve()
