"""Choices to try: one policy for all units, or near a model's fractions, made to meet budgets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from protrain_plan.planning.model.options import UnitOptions
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import (
    Activations,
    Persistent,
    Placement,
    Swap,
    SwapInput,
    activations_in,
)

Fractions = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Per unit: how much of each activation option and of each state option the model takes."""

Decision = tuple[int, int]
"""The numbers of a unit's activation option and of its state option."""

Relief = Literal["chunk below", "swap below", "no swap"]
"""How a tier is relieved: a chunk, or activations, to the next one, or these not swapped at all."""

RELIEFS: tuple[Relief, ...] = get_args(Relief)


def plain_choices(problem: Problem) -> Iterator[Choice]:
    """Each activation policy with each placement policy; everything kept and persistent first.

    A unit that cannot take part in a policy keeps its activations, or swaps them where the policy
    swaps; a chunk that cannot is persistent.
    """
    policies = {o.decision: None for options in problem.options for o in options.activations}
    placements = {o.decision: None for options in problem.options for o in options.states}
    found: dict[Choice, None] = {}
    for placement in placements:
        for policy in policies:
            instead = [Swap(tier=policy.tier)] if isinstance(policy, SwapInput) else []
            found[uniform(problem, [policy, *instead], placement)] = None
    yield from found


def uniform(problem: Problem, policies: Sequence[Activations], placement: Placement) -> Choice:
    """The same for all: a unit takes the first policy open to it, or keeps and persists."""
    choice = []
    for options in problem.options:
        activations = [option.decision for option in options.activations]
        states = [option.decision for option in options.states]
        activation = next((activations.index(p) for p in policies if p in activations), 0)
        choice.append((activation, states.index(placement) if placement in states else 0))
    return tuple(choice)


def roundings(problem: Problem, fractions: Fractions) -> Iterator[Choice]:
    """Several choices near `fractions`, without repetition."""
    found: set[Choice] = set()
    for start in (0.0, 0.25, -0.25, 0.45):
        for backwards in (False, True):
            choice = diffuse(problem, fractions, start=start, backwards=backwards)
            if choice not in found:
                found.add(choice)
                yield choice


def diffuse(problem: Problem, fractions: Fractions, *, start: float, backwards: bool) -> Choice:
    """Walk each class in unit order, accumulate fractions, take the largest, subtract one.

    `start` is the head start of every class's plain option.
    """
    chosen: dict[int, tuple[int, int]] = {}
    for units in problem.classes:
        owed_activations = [0.0] * len(fractions[units[0]][0])
        owed_states = [0.0] * len(fractions[units[0]][1])
        owed_activations[0] = owed_states[0] = start if len(units) > 1 else 0.0
        for unit in reversed(units) if backwards else units:
            activation = _take(owed_activations, fractions[unit][0])
            state = _take(owed_states, fractions[unit][1])
            chosen[unit] = (activation, state)
    return tuple(chosen[unit] for unit in range(problem.count))


def _take(owed: list[float], fractions: Sequence[float]) -> int:
    for k, fraction in enumerate(fractions):
        owed[k] += fraction
    best = max(range(len(owed)), key=lambda k: round(owed[k], 6))
    owed[best] -= 1.0
    return best


def moved_down(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """`choice`, changed as far as it takes to meet the budgets of the tiers below the device.

    Where it exceeds one: by chunks that move to a lower tier, and with fewer of these, by swapped
    activations that move there or stay on the device.
    """
    if problem.within_tiers(choice):
        yield choice
        return
    tiers = list(problem.tiers)
    for relief in RELIEFS:
        current = list(choice)
        for tier, lower in zip(tiers, [*tiers[1:], None], strict=True):
            # Then chunks, once more for the staging buffers that the first of them need.
            for one in (relief, "chunk below", "chunk below"):
                _relieve(problem, current, tier, lower, one)
        yield tuple(current)


def _relieve(
    problem: Problem,
    current: list[Decision],
    tier: TierName,
    lower: TierName | None,
    relief: Relief,
) -> None:
    """Change units' decisions until a tier's budget is met, or nothing is left to change.

    The last units go first: their updates come first in backward, and a slow tier has the rest of
    it to carry their states.
    """
    excess = problem.tier_use(tier, tuple(current)) - problem.tiers[tier]
    for unit in reversed(range(problem.count)):
        if excess <= 0:
            return
        options = problem.options[unit]
        if changed := _relieved(options, current[unit], tier, lower, relief):
            excess -= _on_tier(options, current[unit], tier) - _on_tier(options, changed, tier)
            current[unit] = changed


def _on_tier(options: UnitOptions, decision: Decision, tier: TierName) -> int:
    """What a unit's decision takes of a tier, staging apart."""
    activation, state = options.activations[decision[0]], options.states[decision[1]]
    return activation.tier_bytes.get(tier, 0) + state.tier_bytes.get(tier, 0)


def _relieved(
    options: UnitOptions, decision: Decision, tier: TierName, lower: TierName | None, relief: Relief
) -> Decision | None:
    """A unit's decision with less on `tier`; None where the unit has none such."""
    activations = options.activations[decision[0]].decision
    states = options.states[decision[1]].decision
    if relief == "chunk below":
        if isinstance(states, Persistent) or states.tier != tier or lower is None:
            return None
        states = replace(states, tier=lower)
    elif not isinstance(activations, Swap | SwapInput) or activations.tier != tier:
        return None
    elif relief == "swap below":
        activations = replace(activations, tier=lower) if lower else activations
    else:
        form = activations.form if activations.form != "keep" else "full"
        activations = activations_in(form)
    known = [option.decision for option in options.activations]
    placements = [option.decision for option in options.states]
    if activations not in known or states not in placements:
        return None
    return known.index(activations), placements.index(states)


def repaired(problem: Problem, choice: Choice, min_memory: Choice) -> Choice:
    """`choice`, with as many decisions of `leanest` as it takes to meet the device's budget.

    Each step changes the one decision that takes least off the tightest slot and yet enough, or
    most where none is enough: what is a little too much should not move a chunk.
    """
    current = list(choice)
    while True:
        static = problem.static_bytes(tuple(current))
        tightest = max(range(len(static)), key=lambda t: static[t])
        if static[tightest] <= problem.device:
            return tuple(current)
        excess = static[tightest] - problem.device
        best, saved = None, 0
        for unit, (lean_activation, lean_state) in enumerate(min_memory):
            activation, state = current[unit]
            for change in ((lean_activation, state), (activation, lean_state)):
                if change == current[unit]:
                    continue
                gain = _standing(problem, unit, current[unit], tightest) - _standing(
                    problem, unit, change, tightest
                )
                if gain > saved if saved < excess else excess <= gain < saved:
                    best, saved = (unit, change), gain
        if best is None:
            return min_memory
        current[best[0]] = best[1]


def _standing(problem: Problem, unit: int, decision: tuple[int, int], slot: int) -> int:
    """What a unit's decision holds in a slot."""
    options = problem.options[unit]
    chosen = options.activations[decision[0]], options.states[decision[1]]
    holdings = (held for option in chosen for held in option.holdings)
    return sum(held.bytes for held in holdings if held.first <= slot <= held.last)
