"""The least that a model can be trained in: decisions with the lowest peak, solved exactly.

Leads and drains only add to a slot's bytes, so the lowest peak of any plan is that of the
decisions alone: minimise z with m_t + what the last slot leaves <= z in every slot.
"""

from dataclasses import dataclass, replace
from typing import Literal

import pulp

from protrain_plan.planning.candidates import plain_choices
from protrain_plan.planning.decision_model import DecisionModel, Terms
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.solver import solve
from protrain_plan.records.hardware import TierName

MAX_NODES = 300
TIE_BREAK = 1e-9
"""What a plain decision is worth, in fractions of about the peak: less than it can matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leanest:
    """Decisions, and the bytes that they need of the tier."""

    choice: Choice
    bytes: int


def leanest(
    problem: Problem,
    *,
    of: Literal["device"] | TierName = "device",
) -> Leanest | None:
    """The decisions that need least of a tier while all others' budgets are met; None: none do."""
    # The solver may overstep a limit by its tolerance: then a little less is asked for.
    for slack in (0.0, 3e-7, 3e-6):
        found = _leanest(problem, of, 1.0 - slack)
        if found is None:
            return None
        others = {tier: limit for tier, limit in problem.tiers.items() if tier != of}
        within = all(
            problem.tier_use(tier, found.choice) <= limit for tier, limit in others.items()
        )
        if within and (of == "device" or max(problem.static_bytes(found.choice)) <= problem.device):
            return found
    return None


def _leanest(problem: Problem, of: Literal["device"] | TierName, part: float) -> Leanest | None:
    """The same, within `part` of every limit."""
    limit = problem.device * part
    # The answer does not depend on the budget of the tier asked for: neither may the model's scale.
    scale = min(max(problem.static_bytes(choice)) for choice in plain_choices(problem))
    tiers = {tier: int(size * part) for tier, size in problem.tiers.items()}
    if of != "device":
        tiers[of] = problem.profile.hardware.tier(of).capacity_bytes
    model = DecisionModel(replace(problem, device=max(1, scale), tiers=tiers))
    memory, peak = model.add_memory(), model.variable("peak")
    for t, standing in enumerate(memory):
        terms: Terms = [(standing, 1.0)]
        if t == model.end:
            # No slot is left that could wait for what the last one produced.
            for _, state, y in model.each_state():
                for leaving in (state.gradients, state.in_place):
                    if leaving and leaving.slot == t - 1:
                        terms.append((y, leaving.held / model.byte_unit))
        name = f"peak_{model.slot_name(t)}"
        if of == "device":
            model.row(name, [*terms, (peak, -1.0)], pulp.LpConstraintLE)
        else:
            model.row(name, terms, pulp.LpConstraintLE, limit / model.byte_unit)
    if of != "device":
        model.row(f"use_{of}", [*model.tier_terms(of), (peak, -1.0)], pulp.LpConstraintLE)
    # Among equally lean decisions, those that keep and persist most, and move least.
    plain = [(xs[0], -TIE_BREAK) for xs in (*model.activations, *model.states)]
    model.pulp.setObjective(pulp.LpAffineExpression([(peak, 1.0), *plain]))
    answer = solve(model.pulp, integer=True, max_nodes=MAX_NODES, gap=1e-9)
    if not answer.values:
        return None
    choice = tuple(
        (
            max(range(len(activations)), key=lambda k: activations[k]),
            max(range(len(states)), key=lambda k: states[k]),
        )
        for activations, states in model.choice_values(answer.values)
    )
    needed = max(problem.static_bytes(choice)) if of == "device" else problem.tier_use(of, choice)
    return Leanest(choice=choice, bytes=needed)
