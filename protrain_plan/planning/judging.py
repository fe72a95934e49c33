"""What decisions are worth: the fastest of several schedules, by the simulator."""

from collections.abc import Sequence
from typing import NamedTuple

from protrain_plan.planning.network import Network
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.schedule import Rule, fill, plans_of
from protrain_plan.records.plan import Persistent, Schedule, UnitPlan
from protrain_plan.simulation.timeline import simulated_seconds

ALL = 1 << 20
"""A depth that no lead reaches."""

DEPTHS = (0, 1, 2, 3, 4, 6, 9, 14, ALL)
WINDOWS = (0, 0.25, 0.5, 1, 2, 4, ALL)

QUICK_GRID = (Rule(3, 1), Rule(ALL, 1))
"""The rules that decisions are compared with during local search."""


class Judged(NamedTuple):
    """Decisions with their best schedule, and the rule that made it."""

    seconds: float
    stall_s: float
    choice: Choice
    rule: Rule
    plans: tuple[UnitPlan, ...]


class Judge:
    """Simulates schedules of one problem, each at most once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_simulations = 0
        self._seen: dict[Choice, dict[tuple[Schedule, ...], Judged]] = {}

    def judge(
        self,
        choice: Choice,
        *,
        rules: Sequence[Rule] = QUICK_GRID,
        faster_than_s: float = float("inf"),
    ) -> Judged | None:
        """The fastest schedule of `choice` under `rules`, and under those it was tried with before.

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
            schedules = fill(problem, choice, list(free), rule)
            if schedules not in seen:
                seen[schedules] = self._simulated(choice, rule, schedules)
        return min(seen.values(), key=lambda judged: judged.seconds)

    def judge_well(self, choice: Choice, *, rule: Rule = QUICK_GRID[0]) -> Judged | None:
        """The fastest schedule of `choice` under a search over rules that starts at `rule`.

        Depths and windows in turn, until neither gives a faster one.
        """
        best = self.judge(choice, rules=(rule,))
        if best is None or not moves_anything(self.problem, choice):
            return best
        before = None
        while before is None or best.seconds < before:
            before = best.seconds
            windows = [Rule(best.rule.depth, window) for window in WINDOWS]
            best = self.judge(choice, rules=windows) or best
            depths = [Rule(depth, best.rule.window) for depth in DEPTHS]
            best = self.judge(choice, rules=depths) or best
        return best

    def _simulated(self, choice: Choice, rule: Rule, schedules: tuple[Schedule, ...]) -> Judged:
        plans = plans_of(self.problem, choice, schedules)
        seconds, stall = step_seconds(self.problem, plans)
        self.num_simulations += 1
        return Judged(seconds, stall, choice, rule, plans)


def step_seconds(problem: Problem, plans: Sequence[UnitPlan]) -> tuple[float, float]:
    """A step's simulated seconds and those of its stalls, over all its micro-batches."""
    seconds, stall = simulated_seconds(problem.program(plans), plans, problem.profile)
    if before := problem.settings.micro_batches - 1:
        program = problem.program(plans, updating=False)
        more, more_stall = simulated_seconds(program, plans, problem.profile)
        seconds, stall = seconds + before * more, stall + before * more_stall
    return seconds, stall


def least_seconds(problem: Problem, choice: Choice) -> float:
    """A bound on the seconds of every schedule of a choice: no lane is faster than its work.

    Updates and what comes with them start after the first backward slot.
    """
    activations, states = problem.chosen(choice)
    forward = compute = 0.0
    read = dict.fromkeys(problem.tiers, 0)
    written = dict.fromkeys(problem.tiers, 0)
    for option in activations:
        forward += option.forward_s
        compute += option.forward_s + option.backward_s
        if option.swap_in and option.swap_out:
            read[option.swap_in.tier] += option.swap_in.bytes
            written[option.swap_out.tier] += option.swap_out.bytes
    forward += activations[-1].backward_s
    device_s = update_s = gathered_s = reduced_s = 0.0
    network = Network.of(problem)
    states_read = states_written = 0
    for state in states:
        device_s += state.device_s
        update_s += state.update_s
        states_read += state.read_bytes
        states_written += state.write_bytes
        for fetch in state.fetches:
            read[fetch.tier] += fetch.bytes
        gathered_s += network.gathering_s(state)
        reduced_s += network.reducing_s(state)
        if state.gradients:
            written[state.gradients.tier] += state.gradients.bytes
    micro_batches = problem.settings.micro_batches
    before = compute * (micro_batches - 1)  # seconds of the micro-batches before the last
    bounds = [before + compute + device_s, before + forward + update_s]
    bounds.append(micro_batches * gathered_s + reduced_s + device_s)
    for tier in problem.profile.hardware.tiers:
        down, up = tier.link.write_bytes_per_s, tier.link.read_bytes_per_s
        if tier.name == "disk":
            bounds.append(before + forward + states_written / down)
            bounds.append(before + forward + states_read / up)
        bounds.append(micro_batches * read[tier.name] / up)
        bounds.append(micro_batches * written[tier.name] / down)
    return max(bounds)


def moves_anything(problem: Problem, choice: Choice) -> bool:
    """Whether some unit offloads its states or swaps activations."""
    activations, states = problem.chosen(choice)
    return any(option.swap_in for option in activations) or any(
        not isinstance(state.decision, Persistent) for state in states
    )
