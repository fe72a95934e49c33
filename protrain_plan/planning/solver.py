"""The linear solver behind PuLP: HiGHS, or the CBC that PuLP carries where highspy is missing.

PuLP reports "Optimal" after a time limit as well, so that status and bound come from the solver.
One thread and a fixed seed: the same model gives the same answer in every process.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import pulp

HAS_HIGHS = find_spec("highspy") is not None
if HAS_HIGHS:
    import highspy

CBC_LIMIT_S = 20.0

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the solver found; `bound` is one that no solution beats (-inf: none proven)."""

    status: Status
    bound: float
    values: Mapping[str, float]


def solver_name() -> str:
    """The solver in use, with its version."""
    if not HAS_HIGHS:
        return "CBC (PuLP)"
    return f"HiGHS {highspy.Highs().version()}"


def solve(
    model: pulp.LpProblem,
    *,
    integer: bool,
    time_limit_s: float | None = None,
    max_nodes: int | None = None,
    gap: float = 0.0,
) -> Answer:
    """Minimise `model`; without `integer`, its linear relaxation.

    `max_nodes` limits the search in a way that does not depend on the machine's speed (HiGHS only;
    CBC stops after `CBC_LIMIT_S`).
    """
    if not HAS_HIGHS:
        return _solve_with_cbc(model, integer=integer, time_limit_s=time_limit_s, gap=gap)
    options: dict[str, Any] = {"random_seed": 0}
    if max_nodes is not None:
        options["mip_max_nodes"] = max_nodes
    highs = _Highs(
        mip=integer,
        msg=False,
        threads=1,
        timeLimit=time_limit_s,
        gapRel=gap,
        **options,
    )
    highs.actualSolve(model)
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
    return Answer(status=found, bound=bound, values=_values(model) if has_solution else {})


def _solve_with_cbc(
    model: pulp.LpProblem, *, integer: bool, time_limit_s: float | None, gap: float
) -> Answer:
    cbc = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,  # the one in PuLP's own package
        mip=integer,
        msg=False,
        threads=1,
        timeLimit=min(CBC_LIMIT_S, time_limit_s or CBC_LIMIT_S),
        gapRel=gap,
        options=["randomS 1"],
    )
    cbc.actualSolve(model)
    solved = model.sol_status
    if solved == pulp.LpSolutionOptimal and not integer:
        bound = float(pulp.value(model.objective))
    else:
        bound = -float("inf")  # CBC does not tell PuLP the bound that it proved
    found: Status
    match solved:
        case pulp.LpSolutionOptimal:
            found = "optimal"
        case pulp.LpSolutionIntegerFeasible:
            found = "feasible"
        case pulp.LpSolutionInfeasible:
            found = "infeasible"
        case _:
            found = "unknown"
    has_solution = found in ("optimal", "feasible")
    return Answer(status=found, bound=bound, values=_values(model) if has_solution else {})


def _values(model: pulp.LpProblem) -> dict[str, float]:
    return {variable.name: float(variable.varValue or 0.0) for variable in model.variables()}


if HAS_HIGHS:

    class _Highs(pulp.HiGHS):
        """PuLP's HiGHS, whose table of statuses lacks that of a node limit."""

        def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
            """The values alone; `solve` reads the status."""
            values = list(lp.solverModel.getSolution().col_value)
            for variable in lp.variables():
                variable.varValue = values[variable.index] if values else None
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
