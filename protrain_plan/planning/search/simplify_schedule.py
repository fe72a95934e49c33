"""Plans that people can read, and that ask for no more memory than they need.

A search changes one block at a time, and leaves equal blocks with decisions in no order:
`in_runs` lets equal decisions stand together. Handing out every spare byte gives equal blocks
unequal leads and drains, and a peak of what the budget allows rather than what the step takes:
`tidied` gives all units with the same decisions the same, smallest numbers. Neither may cost time.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice, permutations

from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.search.evaluation import Evaluation, Evaluator, step_seconds
from protrain_plan.records.hardware import Collectives, Hardware
from protrain_plan.records.plan import Persistent, Schedule, Swap, SwapInput, UnitPlan
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import device_bytes

TOLERANCE = 0.002
"""The fraction of the step's time that a tidier schedule may cost."""

SLOWER_LANES = 0.7
"""Numbers must hold with lanes at this fraction of their speed, too: slack for noise. Replays of
the planner's prototype were run at half and double bandwidth (docs/decisions.md)."""

VALUES = (1, 2, 3, 4, 6, 9, 14, 0)
"""In order of preference: 0 makes compute wait for the whole transfer, and is for want of room."""

MAX_ORDERS = 24
MAX_SLOTS = 40_000
"""Slots simulated in all, which bounds the time that tidying takes."""


def in_runs(
    problem: Problem, evaluator: Evaluator, best: Evaluation, *, slowest_s: float
) -> Evaluation:
    """`best` with the decisions of alike units in runs, if some order takes up to `slowest_s`."""
    for members in problem.classes:
        decisions = [best.choice[unit] for unit in members]
        counts = Counter(decisions)
        fastest = None
        for order in islice(permutations(sorted(counts)), MAX_ORDERS):
            choice = list(best.choice)
            arranged = [decision for decision in order for _ in range(counts[decision])]
            for unit, decision in zip(members, arranged, strict=True):
                choice[unit] = decision
            evaluation = evaluator.evaluate(tuple(choice), rules=(best.rule,))
            if evaluation and (fastest is None or evaluation.seconds < fastest.seconds):
                fastest = evaluation
        if fastest and fastest.seconds > slowest_s:
            fastest = evaluator.best_schedule(fastest.choice, rule=fastest.rule)
        if fastest and fastest.seconds <= slowest_s:
            best = fastest
    return best


def simplified(problem: Problem, best: Evaluation, *, slowest_s: float) -> Evaluation:
    """`best` with leads and drains made uniform and small, within the budgets and `slowest_s`."""
    plans = _tidied(problem, best.plans, slowest_s)
    seconds, stall_s = step_seconds(problem, plans)
    return best._replace(seconds=seconds, stall_s=stall_s, plans=plans)


def _tidied(
    problem: Problem, plans: tuple[UnitPlan, ...], slowest_s: float
) -> tuple[UnitPlan, ...]:
    slow = _with_slower_lanes(problem.profile)
    acceptance = _Acceptance(problem, slow, plans, slowest_s)
    for group in _groups(plans):
        for field in fields(Schedule):
            if not _applies(field.name, plans[group[0]]):
                continue
            for candidate in _candidates(plans, group, field.name):
                if candidate == plans:
                    break
                if acceptance.spent():
                    return plans
                if acceptance.accepts(candidate):
                    plans = candidate
                    break
    return plans


class _Acceptance:
    """Accepts what stays within the budget and takes no longer than the first plans."""

    def __init__(
        self, problem: Problem, slow: Profile, plans: tuple[UnitPlan, ...], slowest_s: float
    ) -> None:
        self._problem, self._problems = problem, (problem, replace(problem, profile=slow))
        self._num_slots = 0
        _, slow_s = self._seconds(plans)
        self._limits = [slowest_s, slow_s * (1 + TOLERANCE)]

    def spent(self) -> bool:
        return self._num_slots > MAX_SLOTS

    def accepts(self, plans: tuple[UnitPlan, ...]) -> bool:
        slots = device_bytes(self._problem.program(plans))
        if max(slot.total for slot in slots) > self._problem.device:
            return False
        pairs = zip(self._seconds(plans), self._limits, strict=True)
        return all(seconds <= limit for seconds, limit in pairs)

    def _seconds(self, plans: tuple[UnitPlan, ...]) -> list[float]:
        self._num_slots += 4 * len(plans)
        return [step_seconds(problem, plans)[0] for problem in self._problems]


def _groups(plans: Sequence[UnitPlan]) -> Iterator[list[int]]:
    """The units of every combination of decisions; a part stands alone."""
    groups: dict[object, list[int]] = {}
    for index, unit in enumerate(plans):
        same = (unit.activations, unit.states) if unit.kind == "block" else index
        groups.setdefault(same, []).append(index)
    yield from groups.values()


def _applies(field: str, unit: UnitPlan) -> bool:
    if field.startswith("swap"):
        return isinstance(unit.activations, Swap | SwapInput)
    return not isinstance(unit.states, Persistent)


def _candidates(
    plans: tuple[UnitPlan, ...], group: Sequence[int], field: str
) -> Iterator[tuple[UnitPlan, ...]]:
    """Every value for all units, and where that has no room, for all that can have so much.

    Before a slot that holds much, everything has left: the units next to it have less time.
    """
    for value in VALUES:
        for cap in (False, True):
            changed = list(plans)
            for index in group:
                schedule = plans[index].schedule
                old: int | None = getattr(schedule, field)
                new = min(value, old) if cap and old is not None else value
                changed[index] = replace(plans[index], schedule=replace(schedule, **{field: new}))
            yield tuple(changed)


def _with_slower_lanes(profile: Profile) -> Profile:
    hardware: Hardware = profile.hardware
    tiers = tuple(
        replace(
            tier,
            link=replace(
                tier.link,
                read_bytes_per_s=tier.link.read_bytes_per_s * SLOWER_LANES,
                write_bytes_per_s=tier.link.write_bytes_per_s * SLOWER_LANES,
            ),
        )
        for tier in hardware.tiers
    )
    optimizer = replace(
        profile.optimizer,
        host_parameters_per_s=profile.optimizer.host_parameters_per_s * SLOWER_LANES,
    )
    joined = hardware.interconnect
    if joined:
        near, far = _slower(joined.intra_node), joined.inter_node
        joined = replace(joined, intra_node=near, inter_node=far and _slower(far))
    slow = replace(hardware, tiers=tiers, interconnect=joined)
    return replace(profile, hardware=slow, optimizer=optimizer)


def _slower(speeds: Collectives) -> Collectives:
    return replace(
        speeds,
        gather_bytes_per_s=speeds.gather_bytes_per_s * SLOWER_LANES,
        reduce_bytes_per_s=speeds.reduce_bytes_per_s * SLOWER_LANES,
    )
