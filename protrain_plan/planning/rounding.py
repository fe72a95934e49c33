"""From the fluid model's fractions to decisions, by error diffusion within classes of units."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from protrain_plan.planning.problem import Choice, Problem
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import Persistent, Placement

Fractions = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Per unit: how much of each activation option and of each state option the model takes."""


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


def moved_down(problem: Problem, choice: Choice) -> Choice:
    """`choice`, with as many decisions moved to a lower tier as it takes to meet tiers' budgets.

    The last units go first: their updates come first in backward, and a slow tier has the rest of
    it to carry their states.
    """
    current = list(choice)
    tiers = [tier.name for tier in problem.profile.hardware.tiers]
    for tier, lower in pairwise(tiers):
        excess = problem.tier_use(tier, tuple(current)) - problem.tiers[tier]
        for unit in reversed(range(problem.count)):
            if excess <= 0:
                break
            options, (activation, state) = problem.options[unit], current[unit]
            for k, option in enumerate(options.states):
                here = options.states[state]
                if _same_below(here.decision, option.decision, tier, lower):
                    excess -= here.tier_bytes.get(tier, 0) - option.tier_bytes.get(tier, 0)
                    current[unit] = (activation, k)
                    break
    return tuple(current)


def _same_below(here: Placement, there: Placement, tier: TierName, lower: TierName) -> bool:
    """Whether `there` is `here` with `lower` in the place of `tier`."""
    if isinstance(here, Persistent) or isinstance(there, Persistent):
        return False
    return type(here) is type(there) and here.tier == tier and there.tier == lower


def repaired(problem: Problem, choice: Choice, leanest: Choice) -> Choice:
    """`choice`, with as many decisions of `leanest` as it takes to meet the device's budget.

    Each step changes the one decision that takes most off the tightest slot.
    """
    current = list(choice)
    while True:
        static = problem.static_bytes(tuple(current))
        tightest = max(range(len(static)), key=lambda t: static[t])
        if static[tightest] <= problem.device:
            return tuple(current)
        best, saved = None, 0
        for unit, (lean_activation, lean_state) in enumerate(leanest):
            activation, state = current[unit]
            for change in ((lean_activation, state), (activation, lean_state)):
                if change == current[unit]:
                    continue
                gain = _standing(problem, unit, current[unit], tightest) - _standing(
                    problem, unit, change, tightest
                )
                if gain > saved:
                    best, saved = (unit, change), gain
        if best is None:
            return leanest
        current[best[0]] = best[1]


def _standing(problem: Problem, unit: int, decision: tuple[int, int], slot: int) -> int:
    """What a unit's decision holds in a slot."""
    options = problem.options[unit]
    stays = (*options.activations[decision[0]].stays, *options.states[decision[1]].stays)
    return sum(stay.bytes for stay in stays if stay.first <= slot <= stay.last)
