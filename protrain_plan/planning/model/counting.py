"""What whole numbers of chunks leave to slower tiers: a model without transfers and time.

Large chunks fit a tier in whole numbers only, and what does not fit goes to a slower one. The fluid
model's relaxation leaves fractions of chunks there, and takes too little time. Here the decisions,
their bytes in every slot and the tiers' budgets are the same, and there is nothing else: whole
numbers of units are found at once.
"""

from collections.abc import Callable, Mapping

import pulp

from protrain_plan.planning.model.decision_model import DecisionModel, Terms
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.model.solver import solve
from protrain_plan.program.implications import StateOption

MAX_NODES = 50

DISK_WEIGHT = 10.0
"""What a byte more that is written to disk counts for, in bytes that are placed otherwise."""

SAFE = 1e-6
"""What a proven least amount gives away for the solver's tolerance."""


def written_to_disk(option: StateOption) -> float:
    """Bytes that an update writes to disk."""
    return float(option.write_bytes)


def updated_below(option: StateOption) -> float:
    """Seconds of the optimizer on the host."""
    return option.update_s


WORK: tuple[Callable[[StateOption], float], ...] = (written_to_disk, updated_below)
"""What whole numbers of chunks can leave to slower tiers."""


class CountModel(DecisionModel):
    """The decisions that meet all budgets with leads and drains of 0, whole numbers per class."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        for t, standing in enumerate(self.add_memory()):
            # What the decisions alone need in a slot fits the device.
            terms = [(standing, 1.0), *(self.left_by_last_slot() if t == self.end else [])]
            self.row(f"fits_{self.slot_name(t)}", terms, pulp.LpConstraintLE, 1.0)
        self.count_units()

    def least(self, amount: Callable[[StateOption], float]) -> float:
        """The least of a kind of work that any decisions leave, 0 where none is proven."""
        amounts = [(y, amount(option)) for _, option, y in self.each_state()]
        scale = max(size for _, size in amounts)
        if not scale:
            return 0.0
        terms: Terms = [(y, size / scale) for y, size in amounts if size]
        self.pulp.setObjective(pulp.LpAffineExpression(terms))
        answer = solve(self.pulp, integer=True, max_nodes=MAX_NODES, gap=1e-6)
        return max(0.0, answer.bound * scale * (1 - SAFE))

    def nearest(self, values: Mapping[str, float]) -> dict[str, int] | None:
        """Whole numbers of units per placement, near those in `values`, that meet all budgets.

        Near by the bytes of chunks that are placed otherwise, and much nearer where no more is
        written to disk. To be asked once per model.
        """
        more_written = self.variable("more_written")
        distance: Terms = [(more_written, DISK_WEIGHT)]
        written: Terms = [(more_written, -1.0)]
        for name, (unit, option, number) in self.placed.items():
            cost = self.problem.profile.units[unit]
            away = self.variable(f"away_{name}")
            distance.append((away, (cost.parameter_bytes + cost.state_bytes) / self.byte_unit))
            # How many units more, or fewer, take the placement.
            more = [(number, 1.0), (away, -1.0)]
            self.row(f"more_{name}", more, pulp.LpConstraintLE, values[name])
            fewer = [(number, 1.0), (away, 1.0)]
            self.row(f"fewer_{name}", fewer, pulp.LpConstraintGE, values[name])
            written.append((number, option.write_bytes / self.byte_unit))
        before = sum(
            values[name] * placed.option.write_bytes for name, placed in self.placed.items()
        )
        self.row("more_written", written, pulp.LpConstraintLE, before / self.byte_unit)
        self.pulp.setObjective(pulp.LpAffineExpression(distance))
        answer = solve(self.pulp, integer=True, max_nodes=MAX_NODES, gap=1e-3)
        if not answer.values:
            return None
        return {name: round(answer.values[name]) for name in self.placed}


def least_lane_seconds(problem: Problem) -> float | None:
    """No plan within the budgets takes less; None where there is no plan.

    The fluid model knows when bytes are needed, and its bound is tighter; for a hundred units on a
    machine with two tiers it takes half a minute, and this a second.
    """
    model = LaneModel(problem)
    answer = solve(model.pulp, integer=False)
    if answer.status == "infeasible":
        return None
    return answer.bound * (1 - SAFE) if answer.status == "optimal" else 0.0


class LaneModel(CountModel):
    """The decisions that meet all budgets; minimises the seconds of the busiest lane."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        step, lanes = self.variable("step"), problem.lane_seconds
        busy: dict[str, Terms] = {lane: [] for lane in lanes.lanes}
        taken = [
            *(
                (x, lanes.of_activations(option, last=unit == problem.count - 1))
                for unit, option, x in self.each_activation()
            ),
            *((y, lanes.of_states(option)) for _, option, y in self.each_state()),
        ]
        for variable, seconds in taken:
            for lane, amount in seconds.items():
                busy[lane].append((variable, amount))
        for lane, terms in busy.items():
            self.row(f"busy_{lane}", [*terms, (step, -1.0)], pulp.LpConstraintLE)
        self.pulp.setObjective(pulp.LpAffineExpression([(step, 1.0)]))
