"""Choices to try: one policy for all units, or near a model's fractions, made to meet budgets.

And the leanest one, solved exactly. Leads and drains only add to a slot's bytes, so the lowest peak
of any plan is that of the decisions alone: minimise z with m_t + what the last slot leaves <= z in
every slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from protrain_plan.planning.model.decision_model import COUNTED, LE, DecisionModel, Terms
from protrain_plan.planning.model.options import Decision, UnitOptions
from protrain_plan.planning.model.problem import AMPLE, Choice, Problem
from protrain_plan.planning.model.solver import Stopped, solve
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import (
    Activations,
    Persistent,
    Placement,
    StateTier,
    Swap,
    SwapInput,
    activations_in,
)

Fractions = Sequence[tuple[Sequence[float], Sequence[float]]]
"""Per unit: how much of each activation option and of each state option the model takes."""

Amounts = tuple[Sequence[int], Sequence[int]]
"""Of a class, how many units take each activation option, and each state option."""

Relief = Literal["chunk below", "swap below", "no swap"]
"""How a tier is relieved: a chunk, or activations, to the next one, or these not swapped at all."""

RELIEFS: tuple[Relief, ...] = get_args(Relief)

MAX_NODES = 300
CERTAIN = 1e-4
"""The part of the least bytes that may be left unproven..."""

MANY, NEARLY = 60, 1e-2
"""... and the same for so many units, where the search for more takes a minute."""

TIE_BREAK = 1e-9
"""What a plain decision is worth, in fractions of about the peak: less than it can matter."""


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
        activations, states = options.numbers
        activation = next((activations[one] for one in policies if one in activations), 0)
        choice.append((activation, states.get(placement, 0)))
    return tuple(choice)


def roundings(problem: Problem, fractions: Fractions) -> Iterator[Choice]:
    """Several choices near `fractions`, without repetition.

    Each walks every class in unit order, accumulates fractions, takes the largest and subtracts
    one. They differ in the direction, and in the head start of every class's plain option.
    """

    def take(owed: list[float], fractions: Sequence[float]) -> int:
        for k, fraction in enumerate(fractions):
            owed[k] += fraction
        best = max(range(len(owed)), key=lambda k: round(owed[k], 6))
        owed[best] -= 1.0
        return best

    found: set[Choice] = set()
    for start, backwards in product((0.0, 0.25, -0.25, 0.45), (False, True)):
        chosen: dict[int, Decision] = {}
        for units in problem.classes:
            activations, states = ([0.0] * len(options) for options in fractions[units[0]])
            activations[0] = states[0] = start if len(units) > 1 else 0.0
            for unit in reversed(units) if backwards else units:
                of_activations, of_states = fractions[unit]
                chosen[unit] = take(activations, of_activations), take(states, of_states)
        choice = tuple(chosen[unit] for unit in range(problem.count))
        if choice not in found:
            found.add(choice)
            yield choice


def arranged(
    problem: Problem, fractions: Fractions, numbers: Sequence[Amounts]
) -> Iterator[Choice]:
    """Several choices with these numbers of each option per class, near `fractions`.

    Units that take the same stand together, in the order of their middle; or each unit takes in
    turn what is owed most. Without repetition.
    """
    found: set[Choice] = set()
    for way in ("runs", "runs of states", 0.0, 0.25, -0.25):
        for backwards in (False, True):
            chosen: dict[int, Decision] = {}
            for units, amounts in zip(problem.classes, numbers, strict=True):
                ordered = list(reversed(units)) if backwards else list(units)
                of_kinds = []
                for kind, wanted in enumerate(amounts):
                    shares = [fractions[unit][kind] for unit in ordered]
                    together = way == "runs" or (way == "runs of states" and kind == 1)
                    if together:
                        of_kinds.append(_in_runs(shares, wanted))
                    else:
                        start = way if isinstance(way, float) else 0.0
                        of_kinds.append(_in_turn(shares, wanted, start))
                chosen |= dict(zip(ordered, zip(*of_kinds, strict=True), strict=True))
            choice = tuple(chosen[unit] for unit in range(problem.count))
            if choice not in found:
                found.add(choice)
                yield choice


def _in_runs(shares: Sequence[Sequence[float]], wanted: Sequence[int]) -> list[int]:
    """So many of each option, one after the other in the order of where their shares lie."""
    middles = {}
    for option, number in enumerate(wanted):
        weights = [share[option] for share in shares]
        total = sum(weights)
        middle = sum(n * weight for n, weight in enumerate(weights)) / total if total else 0.0
        if number:
            middles[option] = middle
    order = sorted(middles, key=lambda option: (round(middles[option], 6), option))
    return [option for option in order for _ in range(wanted[option])]


def _in_turn(shares: Sequence[Sequence[float]], wanted: Sequence[int], start: float) -> list[int]:
    """What is owed most, as long as there is some of it; the first option has a head start."""
    owed, left, taken = [0.0] * len(wanted), list(wanted), []
    owed[0] = start
    for share in shares:
        for option, fraction in enumerate(share):
            owed[option] += fraction
        open_to = [option for option, number in enumerate(left) if number]
        best = max(open_to, key=lambda option: round(owed[option], 6))
        owed[best] -= 1.0
        left[best] -= 1
        taken.append(best)
    return taken


def moved_down(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """`choice`, changed as far as it takes to meet the budgets of the tiers below the device.

    Where it exceeds one: by chunks that move to a lower tier, and with fewer of these, by swapped
    activations that move there or stay on the device. The last units go first: their updates come
    first in backward, and a slow tier has the rest of it to carry their states.
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
                excess = problem.tier_use(tier, tuple(current)) - problem.tiers[tier]
                for unit in reversed(range(problem.count)):
                    if excess <= 0:
                        break
                    options, old = problem.options[unit], current[unit]
                    if changed := _relieved(options, old, tier, lower, one):
                        excess -= _on_tier(options, old, tier) - _on_tier(options, changed, tier)
                        current[unit] = changed
        yield tuple(current)


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
        states = replace(states, tier=lower, update_on_device=False)
    elif not isinstance(activations, Swap | SwapInput) or activations.tier != tier:
        return None
    elif relief == "swap below":
        activations = replace(activations, tier=lower) if lower else activations
    else:
        activations = activations_in(activations.form if activations.form != "keep" else "full")
    return options.decision(activations, states)


def repaired(problem: Problem, choice: Choice, leanest: Choice) -> Choice:
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
        for unit, (lean_activation, lean_state) in enumerate(leanest):
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
            return leanest
        current[best[0]] = best[1]


def _standing(problem: Problem, unit: int, decision: Decision, slot: int) -> int:
    """What a unit's decision holds in a slot."""
    options = problem.options[unit]
    chosen = options.activations[decision[0]], options.states[decision[1]]
    holdings = (held for option in chosen for held in option.holdings)
    return sum(held.bytes for held in holdings if held.first <= slot <= held.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leanest:
    """Decisions, and the bytes that they need of the tier; none need less than `proven_bytes`."""

    choice: Choice
    bytes: int
    proven_bytes: int


def min_memory(
    problem: Problem, *, of: StateTier = "device", stopped: Stopped | None = None
) -> Leanest | None:
    """The decisions that need least of a tier while all others' budgets are met; None: none do.

    Where it is `stopped`, None may also mean that none are known.
    """
    # Whole numbers of units decide, unless their orders matter.
    if any(len(units) >= COUNTED for units in problem.classes):
        found = _leanest(problem, of, 1.0, counted=True, stopped=stopped)
        certain = CERTAIN if problem.count < MANY else NEARLY
        if found and found.bytes <= found.proven_bytes * (1 + certain):
            return found
    # The solver may overstep a limit by its tolerance: then a little less is asked for.
    for slack in (0.0, 3e-7, 3e-6):
        found = _leanest(problem, of, 1.0 - slack, counted=False, stopped=stopped)
        if found:
            return found
    return None


def _leanest(
    problem: Problem, of: StateTier, part: float, *, counted: bool, stopped: Stopped | None
) -> Leanest | None:
    """The same, within `part` of every limit.

    With whole decisions, or (`counted`) with whole numbers of units per option.
    """
    # The answer does not depend on the budget of the tier asked for: neither may the model's scale.
    scale = min(max(problem.static_bytes(choice)) for choice in plain_choices(problem))
    tiers = {tier: int(size * part) for tier, size in problem.tiers.items()}
    if of != "device":
        tiers[of] = AMPLE
    model = DecisionModel(replace(problem, device=max(1, scale), tiers=tiers))
    needs, peak = model.add_needs(), model.variable("peak")
    asked: Terms = [(peak, -1.0)]
    for t, terms in enumerate(needs):
        name = f"peak_{model.slot_name(t)}"
        if of == "device":
            model.row(name, [*terms, *asked], LE)
        else:
            model.row(name, terms, LE, problem.device * part / model.byte_unit)
    if of != "device":
        model.row(f"use_{of}", [*model.tier_terms(of), *asked], LE)
    # Among equally lean decisions, those that keep and persist most, and move least.
    plain = [(xs[0], -TIE_BREAK) for xs in (*model.activations, *model.states)]
    model.minimise([(peak, 1.0), *plain])
    if counted:
        model.count_units()
    answer = solve(model.pulp, integer=True, max_nodes=MAX_NODES, gap=1e-9, stopped=stopped)
    if not answer.values:
        return None
    # What the solver proved, less its tolerance and what the tie-break may have taken off.
    proven = 0.0
    if answer.bound > 0:
        proven = (answer.bound - 1e-8 * problem.count) * model.byte_unit * (1 - 1e-6)
    found: list[Leanest] = []
    for choice in roundings(problem, model.choice_values(answer.values)):
        static = max(problem.static_bytes(choice))
        others = (tier for tier in problem.tiers if tier != of)
        if any(problem.tier_use(tier, choice) > problem.tiers[tier] for tier in others):
            continue
        if of != "device" and static > problem.device:
            continue
        needed = static if of == "device" else problem.tier_use(of, choice)
        bound = max(0, min(int(proven), needed))
        found.append(Leanest(choice=choice, bytes=needed, proven_bytes=bound))
    return min(found, key=lambda lean: lean.bytes, default=None)
