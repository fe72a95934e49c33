"""What decisions are worth: the fastest of several schedules, by the simulator."""

from collections.abc import Sequence
from typing import NamedTuple

from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.schedule import Rule, fill
from protrain_plan.records.plan import Persistent, UnitPlan
from protrain_plan.simulation.memory import compile_units
from protrain_plan.simulation.timeline import simulated_seconds

ALL = 1 << 20
"""A depth that no lead reaches."""

FULL_GRID = tuple(
    Rule(depth, window) for depth in (1, 0, 2, 3, 4, 6, 9, 14, ALL) for window in (0, 1, 2, 4, ALL)
)
"""Every rule that the best decisions are tried with."""

QUICK_GRID = (Rule(3, 1), Rule(ALL, 1))
"""The rules that decisions are compared with during local search."""


class Judged(NamedTuple):
    """Decisions with their best schedule."""

    seconds: float
    stall_s: float
    choice: Choice
    plans: tuple[UnitPlan, ...]


class Judge:
    """Simulates schedules of one problem, each at most once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_moves = 0
        self._seen: dict[Choice, dict[tuple[UnitPlan, ...], Judged]] = {}

    def judge(
        self,
        choice: Choice,
        *,
        rules: Sequence[Rule] = QUICK_GRID,
        faster_than_s: float = float("inf"),
    ) -> Judged | None:
        """The fastest schedule of `choice` under `rules`, the first of equals.

        None where the choice exceeds a budget, or can at best reach `faster_than_s`.
        """
        problem = self.problem
        if least_seconds(problem, choice) >= faster_than_s:
            return None
        if not problem.within_tiers(choice):
            return None
        free = [problem.device - total for total in problem.static_bytes(choice)]
        if min(free) < 0:
            return None
        seen = self._seen.setdefault(choice, {})
        for rule in rules if moves_anything(problem, choice) else rules[:1]:
            plans = tuple(fill(problem, choice, list(free), rule))
            if plans not in seen:
                seen[plans] = self._simulated(choice, plans)
        return min(seen.values(), key=lambda judged: judged.seconds)

    def _simulated(self, choice: Choice, plans: tuple[UnitPlan, ...]) -> Judged:
        problem = self.problem
        program = compile_units(plans, problem.profile, piece_bytes=problem.piece_bytes)
        self.num_moves += len(program.moves) + len(program.slots)
        seconds, stall = simulated_seconds(program, plans, problem.profile)
        return Judged(seconds, stall, choice, plans)


def least_seconds(problem: Problem, choice: Choice) -> float:
    """A bound on the seconds of every schedule of a choice: no lane is faster than its work.

    Updates and what comes with them start after the first backward slot.
    """
    activations, states = problem.chosen(choice)
    forward = sum(option.forward_s for option in activations) + activations[-1].backward_s
    compute = sum(option.forward_s + option.backward_s for option in activations)
    bounds = [compute + sum(state.device_s for state in states)]
    bounds.append(forward + sum(state.update_s for state in states))
    for tier in problem.profile.hardware.tiers:
        read = sum(f.bytes for state in states for f in state.fetches if f.tier == tier.name)
        read += sum(
            a.swap_in.bytes for a in activations if a.swap_in and a.swap_in.tier == tier.name
        )
        written = 0
        for activation in activations:
            if activation.swap_out and activation.swap_out.tier == tier.name:
                written += activation.swap_out.bytes
        for state in states:
            if state.gradients and state.gradients.tier == tier.name:
                written += state.gradients.bytes
        if tier.name == "disk":
            states_read = sum(state.read_bytes for state in states)
            states_written = sum(state.write_bytes for state in states)
            read, written = read + states_read, written + states_written
            bounds.append(forward + states_written / tier.link.write_bytes_per_s)
            bounds.append(forward + states_read / tier.link.read_bytes_per_s)
        bounds.append(read / tier.link.read_bytes_per_s)
        bounds.append(written / tier.link.write_bytes_per_s)
    return max(bounds)


def moves_anything(problem: Problem, choice: Choice) -> bool:
    """Whether some unit offloads its states or swaps activations."""
    activations, states = problem.chosen(choice)
    return any(option.swap_in for option in activations) or any(
        not isinstance(state.decision, Persistent) for state in states
    )
