"""The least that a model can be trained in: decisions with the lowest peak, solved exactly.

Leads and drains only add to a slot's bytes, so the lowest peak of any plan is that of the
decisions alone: minimise z with m_t + what the last slot leaves <= z in every slot.
"""

from dataclasses import dataclass, replace
from typing import Literal

import pulp

from protrain_plan.planning.model.decision_model import COUNTED, DecisionModel, Terms
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import solve
from protrain_plan.planning.search.choices import plain_choices, roundings
from protrain_plan.records.hardware import TierName

MAX_NODES = 300
CERTAIN = 1e-4
"""The part of the least bytes that may be left unproven..."""

MANY, NEARLY = 60, 1e-2
"""... and the same for so many units, where the search for more takes a minute."""

TIE_BREAK = 1e-9
"""What a plain decision is worth, in fractions of about the peak: less than it can matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leanest:
    """Decisions, and the bytes that they need of the tier; none need less than `proven_bytes`."""

    choice: Choice
    bytes: int
    proven_bytes: int


def min_memory(
    problem: Problem,
    *,
    of: Literal["device"] | TierName = "device",
) -> Leanest | None:
    """The decisions that need least of a tier while all others' budgets are met; None: none do."""
    # Whole numbers of units decide, unless their orders matter.
    if any(len(units) >= COUNTED for units in problem.classes):
        found = _leanest(problem, of, 1.0, counted=True)
        certain = CERTAIN if problem.count < MANY else NEARLY
        if found and found.bytes <= found.proven_bytes * (1 + certain):
            return found
    # The solver may overstep a limit by its tolerance: then a little less is asked for.
    for slack in (0.0, 3e-7, 3e-6):
        found = _leanest(problem, of, 1.0 - slack, counted=False)
        if found:
            return found
    return None


def _leanest(
    problem: Problem, of: Literal["device"] | TierName, part: float, *, counted: bool
) -> Leanest | None:
    """The same, within `part` of every limit.

    With whole decisions, or (`counted`) with whole numbers of units per option.
    """
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
            terms += model.left_by_last_slot()
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
    if counted:
        model.count_units()
    answer = solve(model.pulp, integer=True, max_nodes=MAX_NODES, gap=1e-9)
    if not answer.values:
        return None
    # What the solver proved, less its tolerance and what the tie-break may have taken off.
    proven = 0.0
    if answer.bound > 0:
        proven = (answer.bound - 1e-8 * problem.count) * model.byte_unit * (1 - 1e-6)
    found: list[Leanest] = []
    for choice in roundings(problem, model.choice_values(answer.values)):
        if not _meets(problem, choice, of):
            continue
        static = max(problem.static_bytes(choice))
        needed = static if of == "device" else problem.tier_use(of, choice)
        bound = max(0, min(int(proven), needed))
        found.append(Leanest(choice=choice, bytes=needed, proven_bytes=bound))
    return min(found, key=lambda lean: lean.bytes, default=None)


def _meets(problem: Problem, choice: Choice, of: Literal["device"] | TierName) -> bool:
    """Whether a choice is within all budgets but the one asked for."""
    others = {tier: limit for tier, limit in problem.tiers.items() if tier != of}
    within = all(problem.tier_use(tier, choice) <= limit for tier, limit in others.items())
    return within and (of == "device" or max(problem.static_bytes(choice)) <= problem.device)
