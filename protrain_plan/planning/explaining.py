"""Why each group of units got its decision, and what limits the step. Solved, not guessed.

reasons   one unit of a group takes another decision, everything else stays
limits    the fluid model's dual values: what a little more of a resource is worth

"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protrain_plan.errors import ProtrainError
from protrain_plan.planning.alternatives import Alternative, Neighbours
from protrain_plan.planning.limiting import GIB, LaneLimit, Limit, MemoryLimit, limits_of
from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.planning.reasons import Reasons
from protrain_plan.planning.wording import (
    amount_of,
    at_most,
    lane_words,
    listed_words,
    units_text,
)
from protrain_plan.records import activations_text, states_text
from protrain_plan.records.plan import Plan
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import evaluation_bytes
from protrain_plan.simulation.ranks import Group
from protrain_plan.units import format_bytes

MAX_GROUPS = 12
"""Groups that are explained, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReason:
    """Units that cost the same and do the same, and why; `alternatives` as the profile has them."""

    units: str  # "layers.0-11"
    num_units: int
    activations: str
    states: str
    reason: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The limits of a plan, by the relaxed model, and the reasons for its decisions.

    Lanes come first, then the device's slots, each with what limits most at the head, then what
    more of each tier is worth to a new plan. `evaluation_bytes` are what the device holds at most,
    besides its context, while the model is evaluated between a forward and its backward.
    `num_unexplained` counts the groups left out.
    """

    limits: tuple[Limit, ...]
    groups: tuple[GroupReason, ...]
    device_budget: int
    evaluation_bytes: int
    num_unexplained: int = 0


def explain(profile: Profile, plan: Plan) -> Explanation:
    """Why `plan`, made for `profile`, is as it is.

    ProtrainError where the profile does not have the plan's units and decisions, or gives them
    more bytes than the plan's budgets.
    """
    problem = Problem.of(
        profile,
        plan.budgets,
        piece_bytes=plan.piece_bytes,
        updates=plan.updates,
        micro_batches=plan.micro_batches,
        group=Group.of(plan),
    )
    choice = _choice(problem, plan)
    neighbours = Neighbours(problem, choice)
    reasons = Reasons(problem, step_s=neighbours.base.seconds, gap=plan.gap)
    groups = sorted(_groups(problem, choice), key=lambda units: (-len(units), units[0]))
    return Explanation(
        limits=tuple(limits_of(problem, choice)),
        groups=tuple(_reason(neighbours, reasons, units) for units in groups[:MAX_GROUPS]),
        device_budget=plan.budgets.device,
        evaluation_bytes=evaluation_bytes(problem.program(plan.units), plan.units, profile),
        num_unexplained=max(0, len(groups) - MAX_GROUPS),
    )


def _choice(problem: Problem, plan: Plan) -> Choice:
    names = [unit.name for unit in problem.profile.units]
    if [unit.name for unit in plan.units] != names:
        raise ProtrainError("the plan has other units than the profile", fix="plan again")
    choice: list[tuple[int, int]] = []
    for unit, options in zip(plan.units, problem.options, strict=True):
        activations = [option.decision for option in options.activations]
        states = [option.decision for option in options.states]
        if unit.activations not in activations or unit.states not in states:
            decisions = f"{activations_text(unit.activations)}, {states_text(unit.states)}"
            raise ProtrainError(
                f"the profile does not offer {unit.name} its decisions: {decisions}",
                fix="plan again",
            )
        choice.append((activations.index(unit.activations), states.index(unit.states)))
    return tuple(choice)


def _groups(problem: Problem, choice: Choice) -> Iterator[list[int]]:
    """Blocks of one class with the same decisions; a part stands alone."""
    for members in problem.classes:
        groups: dict[object, list[int]] = {}
        for unit in members:
            is_block = problem.profile.units[unit].kind == "block"
            groups.setdefault(choice[unit] if is_block else unit, []).append(unit)
        yield from groups.values()


def _reason(neighbours: Neighbours, reasons: Reasons, units: Sequence[int]) -> GroupReason:
    """Judge the group's middle unit with every other decision."""
    options = neighbours.problem.options[units[0]]
    activation, state = neighbours.choice[units[0]]
    activations, states = neighbours.activations(units), neighbours.states(units)
    chosen, placed = options.activations[activation], options.states[state]
    names = [neighbours.problem.profile.units[index].name for index in units]
    return GroupReason(
        units=units_text(names),
        num_units=len(units),
        activations=activations_text(chosen.decision),
        states=states_text(placed.decision),
        reason=reasons.sentences(names, chosen, placed, activations, states),
        alternatives=tuple(judged.alternative for judged in (*activations, *states)),
    )


def in_words(explanation: Explanation) -> list[str]:
    """Two or three sentences on the limits, then the reason of each group."""
    lanes = [limit for limit in explanation.limits if isinstance(limit, LaneLimit)]
    memory = [limit for limit in explanation.limits if isinstance(limit, MemoryLimit)]
    words: list[str] = []
    if shares := [limit for limit in lanes if limit.share >= 0.005]:
        parts = [f"{lane_words(limit.resource)} {100 * limit.share:.0f} %" for limit in shares]
        words.append(f"What makes up the step, about: {', '.join(parts)}.")
    amount = amount_of(explanation.device_budget)
    if memory:
        slots = [limit for limit in memory if limit.where]
        saved = sum(limit.seconds_per_gib for limit in slots) * amount / GIB
        more = f"{format_bytes(amount)} more on the device"
        sentence = f"With these decisions {more} would save "
        if slots:
            most = max(slots, key=lambda limit: limit.seconds_per_gib)
            share = most.seconds_per_gib / sum(limit.seconds_per_gib for limit in slots)
            part = f"{100 * share:.0f} % of it " if len(slots) > 1 else ""
            sentence += f"{at_most(saved)}, {part}in the {most.where}."
        else:
            sentence += "nothing."
        words.append(sentence)
        worth = [
            f"{at_most(limit.seconds_per_gib * amount / GIB)} on the {limit.resource}"
            for limit in memory
            if not limit.where
        ]
        words.append(
            f"With a new plan {format_bytes(amount)} more would save {listed_words(worth, 'and')}."
        )
    words += [group.reason for group in explanation.groups]
    if explanation.num_unexplained:
        smaller = "group is" if explanation.num_unexplained == 1 else "groups are"
        words.append(f"{explanation.num_unexplained} smaller {smaller} not explained.")
    words.append(
        "Evaluated between a forward and its backward, the model takes up to"
        f" {format_bytes(explanation.evaluation_bytes)} of tensors on the device."
    )
    return words
