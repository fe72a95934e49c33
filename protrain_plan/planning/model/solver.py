"""The linear solver, HiGHS, behind PuLP.

PuLP reports "Optimal" after a time limit as well, so that status and bound come from the solver.
One thread and a fixed seed: the same model gives the same answer in every process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import highspy
import pulp

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What the solver found; `bound` is one that no solution beats (-inf: none proven)."""

    status: Status
    bound: float
    values: Mapping[str, float]


def solver_name() -> str:
    """The solver in use, with its version."""
    return f"HiGHS {highspy.Highs().version()}"


def solve(
    model: pulp.LpProblem,
    *,
    integer: bool,
    time_limit_s: float | None = None,
    max_nodes: int | None = None,
    gap: float = 0.0,
) -> Solution:
    """Minimise `model`; without `integer`, its linear relaxation.

    `max_nodes` limits the search in a way that does not depend on the machine's speed.
    """
    limits: dict[str, Any] = {} if max_nodes is None else {"mip_max_nodes": max_nodes}
    _Highs(
        mip=integer,
        msg=False,
        threads=1,
        timeLimit=time_limit_s,
        gapRel=gap,
        random_seed=0,
        **limits,
    ).actualSolve(model)
    run = model.solverModel
    status, info = run.getModelStatus(), run.getInfo()
    has_solution = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    kinds = highspy.HighsModelStatus
    found: Status
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        found = "infeasible"
    elif status == kinds.kOptimal:
        found = "optimal"
    else:
        found = "feasible" if has_solution else "unknown"
    if integer:
        bound = float(info.mip_dual_bound)
    else:
        bound = float(info.objective_function_value) if found == "optimal" else -float("inf")
    del model.solverModel  # not to be copied or kept with the model
    values: dict[str, float] = {}
    if has_solution:
        values = {variable.name: float(variable.varValue or 0.0) for variable in model.variables()}
    return Solution(status=found, bound=bound, values=values)


class _Highs(pulp.HiGHS):
    """PuLP's HiGHS, whose table of statuses lacks that of a node limit."""

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
        """The values alone; `solve` reads the status."""
        values = list(lp.solverModel.getSolution().col_value)
        for variable in lp.variables():
            variable.varValue = values[variable.index] if values else None
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
