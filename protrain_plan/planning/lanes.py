"""A bound on a problem's seconds that takes a moment: no lane is faster than its work.

The linear programme of `judging.least_seconds` over all decisions that meet the budgets. The fluid
model knows when bytes are needed, and its bound is tighter; for a hundred units on a machine with
two tiers it takes half a minute, and this a second.
"""

from collections.abc import Iterator

import pulp

from protrain_plan.planning.counting import CountModel
from protrain_plan.planning.decision_model import Terms
from protrain_plan.planning.network import Network
from protrain_plan.planning.problem import Problem
from protrain_plan.planning.solver import solve

SAFE = 1e-6
"""What the bound gives away for the solver's tolerance."""


def least_lane_seconds(problem: Problem) -> float | None:
    """No plan within the budgets takes less; None where there is no plan."""
    model = LaneModel(problem)
    answer = solve(model.pulp, integer=False)
    if answer.status == "infeasible":
        return None
    return answer.bound * (1 - SAFE) if answer.status == "optimal" else 0.0


class LaneModel(CountModel):
    """The decisions that meet all budgets; minimises the seconds of the busiest lane."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        step = self.variable("step")
        for name, seconds in self._lanes():
            self.row(f"busy_{name}", [*seconds, (step, -1.0)], pulp.LpConstraintLE)
        self.pulp.setObjective(pulp.LpAffineExpression([(step, 1.0)]))

    def _lanes(self) -> Iterator[tuple[str, Terms]]:
        """What each lane takes of a step, one name each; see `judging.least_seconds`."""
        problem, times = self.problem, float(self.problem.settings.micro_batches)
        network = Network.of(problem)
        activations, states = list(self.each_activation()), list(self.each_state())
        last = problem.count - 1
        yield (
            "compute",
            [
                *(
                    (x, times * (option.forward_s + option.backward_s))
                    for _, option, x in activations
                ),
                *((y, option.device_s) for _, option, y in states),
            ],
        )
        # Updates and what comes with them start after the first backward slot.
        first: Terms = []
        for unit, option, x in activations:
            before = (times - 1) * (option.forward_s + option.backward_s)
            first.append((x, before + option.forward_s + option.backward_s * (unit == last)))
        yield "update", [*first, *((y, option.update_s) for _, option, y in states)]
        yield (
            "network",
            [
                (
                    y,
                    times * network.gathering_s(option)
                    + network.reducing_s(option)
                    + option.device_s,
                )
                for _, option, y in states
            ],
        )
        for tier in problem.profile.hardware.tiers:
            read, write = 1 / tier.link.read_bytes_per_s, 1 / tier.link.write_bytes_per_s
            name, into, out = tier.name, Terms(), Terms()
            for _, activation, x in activations:
                if activation.swap_in and activation.swap_in.tier == name:
                    into.append((x, times * activation.swap_in.bytes * read))
                if activation.swap_out and activation.swap_out.tier == name:
                    out.append((x, times * activation.swap_out.bytes * write))
            for _, state, y in states:
                fetched = sum(fetch.bytes for fetch in state.fetches if fetch.tier == name)
                into.append((y, times * fetched * read))
                if state.gradients and state.gradients.tier == name:
                    out.append((y, state.gradients.bytes * write))
            yield f"from_{name}", into
            yield f"to_{name}", out
            if name == "disk":
                yield "read", [*first, *((y, state.read_bytes * read) for _, state, y in states)]
                yield (
                    "write",
                    [*first, *((y, state.write_bytes * write) for _, state, y in states)],
                )
