"""The fluid inventory model: transfers as liquids, whose optimum no simulated schedule beats.

Slot t runs from the end of compute t-1 to the end of compute t: a stall of s_t seconds, then
compute for d_t seconds. Slot 2U is the device's update of the persistent chunks, and the wait for
the last moves after it. Bytes are fractions of the device's budget M, seconds of the model's plain
compute time. Decisions are binaries (fractions in the relaxation), everything else is continuous:

    s, d            seconds of stall and of compute
    m               bytes that stand for the decisions alone (leads and drains 0)
    hs, hc, J       per tier: bytes fetched during stall and compute, and fetched ahead after it
    os, oc, Q       per tier: swapped activations and gradients that leave, and wait to leave
    rs, rc, R       optimizer states read from disk, and waiting to be read
    ws, wc, W       parameters and states written to disk, and waiting to be written
    us, uc, P       seconds of updates on the host, and waiting to be done

and of several devices

    ns, nc, N       parameters gathered from all ranks during stall and compute, and ahead
    ks, kc, K       per tier: this rank's shards of them, which take no room of their own
    xs, xc, X       gradients scattered to the ranks that have them, and waiting to be
    ys, yc, Y       gradients summed for all ranks, and waiting to be

The model relaxes the programme: moves are divisible and without latency, a lane serves them in any
order, a swap may return before it left, states waiting in place leave bit by bit. So its optimum
bounds the seconds of every plan within the budgets (a test holds this).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pulp

from protrain_plan.planning.decision_model import DecisionModel, Terms
from protrain_plan.planning.options import StateOption
from protrain_plan.planning.phase import Phase
from protrain_plan.planning.problem import Problem

LE, EQ, GE = pulp.LpConstraintLE, pulp.LpConstraintEQ, pulp.LpConstraintGE

BOUND_TOLERANCE = 1e-6
"""What the bound gives away for the solver's feasibility tolerance (1e-7) and rounded pieces."""


class Fluid(DecisionModel):
    """Decisions, memory, transfers and time of one problem; minimises the step's seconds.

    With micro-batches there are two phases with the same decisions: the last one, with the update,
    and those before it.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.second_unit = sum(
            min(o.forward_s + o.backward_s for o in options.activations)
            for options in problem.options
        )
        static = self.add_memory()
        before = problem.settings.micro_batches - 1
        self.phases = [Phase(self, static, self.second_unit, "", updating=True)]
        if before:
            self.phases.append(Phase(self, static, self.second_unit, "micro_", updating=False))
        self.weights = [1.0, float(before)][: len(self.phases)]
        self.count_units()
        self.minimise_seconds()

    def minimise_seconds(self) -> None:
        """The step's seconds alone: what bounds are made of."""
        self.pulp.setObjective(pulp.LpAffineExpression(self._weighted(Phase.seconds)))

    def prefer_few_moves(self) -> None:
        """Among equally fast solutions, those that stall and move least; for choices, no bounds."""
        self.pulp.setObjective(pulp.LpAffineExpression(self._weighted(Phase.seconds_and_moves)))

    def _weighted(self, terms: Callable[[Phase], Terms]) -> Terms:
        return [
            (variable, factor * weight)
            for phase, weight in zip(self.phases, self.weights, strict=True)
            for variable, factor in terms(phase)
        ]

    def set_margin(self, margin: float) -> None:
        """Leave a fraction of the device's budget free, for what the model does not see."""
        for phase in self.phases:
            for row in phase.memory_rows:
                row.changeRHS(1.0 - margin)

    def at_least(self, name: str, amount: Callable[[StateOption], float], least: float) -> None:
        """Say that every plan within the budgets leaves this much of a kind of work.

        A fact about whole chunks that their fractions do not know: see `planning/counting.py`.
        """
        amounts = [(y, amount(option) / least) for _, option, y in self.each_state()]
        self.row(name, [(y, part) for y, part in amounts if part], GE, 1.0)

    @contextmanager
    def placing(self, numbers: Mapping[str, int], *, spare_swaps: int) -> Iterator[None]:
        """Meanwhile, so many units take each placement (see `placed`).

        Tiers also have room for `spare_swaps` units' activations more than the fractions take.
        """
        variables = [(self.placed[name].number, fixed) for name, fixed in numbers.items()]
        limits = [variable.upBound for variable, _ in variables]
        for variable, fixed in variables:
            variable.bounds(fixed, fixed)
        for tier, row in self.tier_rows.items():
            largest = max(option.tier_bytes.get(tier, 0) for _, option, _ in self.each_activation())
            limit = self.problem.tiers[tier] - spare_swaps * largest
            row.changeRHS(max(0, limit) / self.byte_unit)
        yield
        for (variable, _), highest in zip(variables, limits, strict=True):
            variable.bounds(0, highest)
        for tier, row in self.tier_rows.items():
            row.changeRHS(self.problem.tiers[tier] / self.byte_unit)

    def minimise_memory(self, limit_s: float) -> None:
        """Ask for the least budget of the device, in the model's own bytes, within `limit_s`."""
        budget = self.variable("budget")
        for phase in self.phases:
            for row in phase.memory_rows:
                row.expr.addterm(budget, -1.0)
                row.changeRHS(0.0)
        # The step's seconds.
        self.row("seconds", self._weighted(Phase.seconds), LE, limit_s / self.second_unit)
        self.pulp.setObjective(pulp.LpAffineExpression([(budget, 1.0)]))

    def lower_bound_seconds(self, objective: float) -> float:
        """The bound on every plan's seconds that a bound on the objective implies."""
        return max(0.0, objective * self.second_unit * (1 - BOUND_TOLERANCE))
