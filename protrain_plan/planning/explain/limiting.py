"""What limits a step: the fluid model's dual values, in seconds per byte and shares of the step.

[Note: shares] The model's optimum is in proportion to the durations it is given: were compute, all
links and all updates 1 % slower, the step would be 1 % longer. A lane's share is its part of that
1 %: the sum of -dual · term over the terms that hold its speed. Shares sum to one. Where
several duals are optimal (equal blocks, exact fits) the solver picks one: hence "about".

[Note: worth of memory] The dual of a row `bytes in slot t <= budget` is the change of the optimum
per byte. The optimum is convex in the budget: each further byte is worth the same or less.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pulp

from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.program.program import slot_words
from protrain_plan.records.folding import fold, runs
from protrain_plan.records.hardware import TierName

GIB = 2**30

NEGLIGIBLE = 1e-7
"""The solver's tolerance: smaller duals are zero."""

Tier = Literal["device"] | TierName


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimit:
    """How much of the step's time is a lane's doing. See [Note: shares]."""

    resource: str  # "compute", "update", or a lane: "fetch host"
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What a little more of a tier would save. See [Note: worth of memory].

    `where` are slots, with the plan's decisions as they are; "" means a new plan.
    """

    resource: Tier
    seconds_per_gib: float
    where: str  # "backward of layers.12-31"


Limit = LaneLimit | MemoryLimit


def limits_of(problem: Problem, choice: Choice) -> Iterator[Limit]:
    """What limits the plan's decisions, then what limits every plan; none if HiGHS fails."""
    model = Fluid(problem)
    if not _solved(model.pulp):
        return
    worth = _worth_of_tiers(model)
    for decisions, taken in (
        (variables, option)
        for kind, options in ((0, model.activations), (1, model.states))
        for variables, option in zip(options, (pair[kind] for pair in choice), strict=True)
    ):
        for number, decision in enumerate(decisions):
            decision.bounds(float(number == taken), float(number == taken))
    if not _solved(model.pulp):
        return
    shares = _shares(model)
    for lane, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share > NEGLIGIBLE:
            yield LaneLimit(resource=lane, share=share)
    yield from sorted(_worth_of_slots(model), key=lambda limit: -limit.seconds_per_gib)
    for tier, seconds_per_gib in worth.items():
        yield MemoryLimit(resource=tier, seconds_per_gib=seconds_per_gib, where="")


def _solved(model: pulp.LpProblem) -> bool:
    """Solve the relaxation, and leave the duals in the rows; `solver.solve` does not keep them."""
    pulp.HiGHS(mip=False, msg=False, threads=1, random_seed=0).actualSolve(model)
    return bool(model.sol_status == pulp.LpSolutionOptimal)


def _seconds_per_gib(model: Fluid, dual: float) -> float:
    """What a byte-unit's price in second-units means; more memory never costs time."""
    saved = -dual if dual < -NEGLIGIBLE else 0.0
    return saved * model.second_unit / model.byte_unit * GIB


def _worth_of_tiers(model: Fluid) -> dict[Tier, float]:
    """Seconds per GiB of each tier's budget."""
    device = sum(row.pi for phase in model.phases for row in phase.memory_rows)
    worth: dict[Tier, float] = {"device": _seconds_per_gib(model, device)}
    for tier in model.problem.tiers:
        row = model.pulp.get_constraint_by_name(f"budget_{tier}")
        worth[tier] = _seconds_per_gib(model, row.pi)
    return worth


def _worth_of_slots(model: Fluid) -> Iterator[MemoryLimit]:
    """Seconds per GiB in runs of slots that have no room left."""
    problem, count = model.problem, model.problem.count
    rows = zip(*(phase.memory_rows for phase in model.phases), strict=True)
    worth = [_seconds_per_gib(model, sum(row.pi for row in of_phases)) for of_phases in rows]
    in_backward = [worth[2 * count - 1 - unit] for unit in range(count)]
    names = [unit.name for unit in problem.profile.units]
    for direction, seconds in (("forward", worth[:count]), ("backward", in_backward)):
        for first, stop in _positive_runs(seconds):
            words = names[first]
            if stop - first > 1:
                words = f"{names[first]} to {names[stop - 1]}"
                inside = names[first:stop]
                if len(list(runs(inside, [None] * len(inside)))) == 1:
                    words = fold(names[first], names[stop - 1])
            yield MemoryLimit(
                resource="device",
                seconds_per_gib=sum(seconds[first:stop]),
                where=f"{direction} of {words}",
            )
    if worth[-1]:
        where = slot_words(problem.profile.units, 2 * count)
        yield MemoryLimit(resource="device", seconds_per_gib=worth[-1], where=where)


def _positive_runs(values: Sequence[float]) -> Iterator[tuple[int, int]]:
    """(first, behind the last) of what is above zero without a gap."""
    first = None
    for index, value in enumerate((*values, 0.0)):
        if value > 0 and first is None:
            first = index
        elif value <= 0 and first is not None:
            yield first, index
            first = None


def _shares(model: Fluid) -> dict[str, float]:
    """See [Note: shares]; of a model that is solved with fixed decisions."""
    lanes: dict[str, str] = {}  # by the variable of what a lane does
    for phase in model.phases:
        for flow in phase.flows.values():
            lanes.update((variable.name, flow.lane) for variable in (*flow.stall, *flow.compute))
    gradients = {
        y.name: f"spill {state.gradients.tier}" if state.gradients else "collect"
        for _, state, y in model.each_state()
        if state.gradients or state.scattered
    }
    decisions = {y.name for of_unit in (*model.activations, *model.states) for y in of_unit}
    shares: dict[str, float] = defaultdict(float)
    for row in model.pulp.constraints():
        if abs(row.pi) < NEGLIGIBLE:
            continue
        kind = row.name.removeprefix("micro_")
        for variable, factor in row.items():
            lane: str | None = None
            if kind.startswith(("lane_", "beside_")):
                lane = lanes.get(variable.name)
            elif kind.startswith("compute_") and variable.name in decisions:
                lane = "compute"
            elif kind.startswith("updates_from_") and variable.name in decisions:
                lane = "update"
            elif kind.startswith("tail_"):
                lane = gradients.get(variable.name)
            if lane:
                shares[lane] -= row.pi * factor * variable.varValue
    seconds = pulp.value(model.pulp.objective)
    return {name: share / seconds for name, share in shares.items()}
