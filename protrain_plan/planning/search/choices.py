"""Choices to try: one policy for all units, or near a model's fractions, made to meet budgets.

And the leanest one, solved exactly. Leads and drains only add to a slot's bytes, so the lowest peak
of any plan is that of the decisions alone: minimise z with m_t + what the last slot leaves <= z in
every slot.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

from protrain_plan.planning.model.decision_model import COUNTED, LE, DecisionModel, Terms
from protrain_plan.planning.model.options import Decision
from protrain_plan.planning.model.problem import AMPLE, Choice, Problem
from protrain_plan.planning.model.solver import LinearProgram, Stopped
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import Activations, Placement, StateTier

Fractions = Sequence[Sequence[Sequence[float]]]
"""The fractions of options that the model takes, by unit, kind and option."""

MAX_NODES = 300
CERTAIN = 1e-4
"""The part of the least bytes that may be left unproven..."""

MANY, NEARLY = 60, 1e-2
"""... and the same for so many units, where the search for more takes a minute."""

HOPELESS = 2
"""Times the device that the leanest decisions need from which on a few per cent do not matter."""

TIE_BREAK = 1e-9
"""Worth of a plain decision, in fractions of about the peak: less than it can matter."""

SURELY = 1 + 1e-6
"""Factor of a limit that is not met but for the solver's tolerance."""


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
            instead = [Activations(tier=policy.tier)] if policy.tier and policy.recomputes else []
            found[uniform(problem, [policy, *instead], placement)] = None
    yield from found


def uniform(problem: Problem, policies: Sequence[Activations], placement: Placement) -> Choice:
    """Decide alike for all: a unit takes the first policy open to it, or keeps and persists."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Leanest:
    """Decisions, and the bytes that they need of the tier; none need less than `proven_bytes`."""

    choice: Choice
    bytes: int
    proven_bytes: int


def min_memory(
    problem: Problem, *, of: StateTier = "device", enough: int = 0, stopped: Stopped | None = None
) -> Leanest | None:
    """The decisions that need least of a tier while all others' budgets are met; None: none do.

    Or any that need no more than `enough`. Where it is `stopped`, None may also mean that none are
    known.
    """
    if enough and (plain := leanest_plain(problem, of)) and plain.bytes <= enough:
        return plain
    # Whole numbers of units decide, unless their orders matter.
    if any(len(units) >= COUNTED for units in problem.classes):
        parts = (1.0, 1.0, 1.0)
        found = _tries(problem, of, parts, counted=True, enough=enough, stopped=stopped)
        certain = CERTAIN if problem.count < MANY else NEARLY
        if found and found.bytes <= max(enough, found.proven_bytes * (1 + certain)):
            return found
        if found and of == "device" and found.proven_bytes > HOPELESS * problem.device:
            return found
    # The solver may overstep a limit by its tolerance: then a little less is asked for.
    parts = (1.0, 1.0 - 3e-7, 1.0 - 3e-6)
    found = _tries(problem, of, parts, counted=False, enough=enough, stopped=stopped)
    if found or (stopped and stopped()):
        return found
    return leanest_plain(problem, of)


def has_plan(problem: Problem, *, stopped: Stopped | None = None) -> bool:
    """Whether some decisions meet all budgets. Where it is `stopped`, False may also mean unknown.

    That there are none is often proven by the program that has the device's limit, too.
    """
    plain = leanest_plain(problem, "device")
    if plain and plain.bytes <= problem.device:
        return True
    if any(len(units) >= COUNTED for units in problem.classes):
        tried = _try(problem, "device", 1.0, {}, counted=True, most=problem.device, stopped=stopped)
        if tried.proves_none:
            return False
        if tried.lean and tried.lean.bytes <= problem.device:
            return True
    lean = min_memory(problem, enough=problem.device, stopped=stopped)
    return lean is not None and lean.bytes <= problem.device


def _tries(
    problem: Problem,
    of: StateTier,
    parts: Sequence[float],
    *,
    counted: bool,
    enough: int = 0,
    stopped: Stopped | None,
) -> Leanest | None:
    """The first decisions that meet the other budgets, within ever smaller `parts` of limits.

    A tier's row has no staging, so that where the tier is full, decisions may take more of it than
    there is. Then the limit is that much lower; the first program's proof stays.
    """
    spare: dict[TierName, int] = {}
    proven: int | None = None
    for part in parts:
        tried = _try(problem, of, part, spare, counted=counted, enough=enough, stopped=stopped)
        proven = tried.proven if proven is None else proven
        if tried.lean:
            return replace(tried.lean, proven_bytes=min(tried.lean.proven_bytes, proven))
        if (counted and not tried.over) or tried.proves_none:
            break
        spare = {tier: spare.get(tier, 0) + tried.over.get(tier, 0) for tier in problem.tiers}
    return None


def leanest_plain(problem: Problem, of: StateTier) -> Leanest | None:
    """The leanest of plain policies, where the solver's nodes end before it has found any.

    That may be where the other tiers are all but full, so that whole chunks hardly fit.
    """
    choices = (one for one in plain_choices(problem) if not _lacking(problem, of, one))
    return _leanest(problem, of, choices, proven=0)


def _lacking(problem: Problem, of: StateTier, choice: Choice) -> dict[StateTier, int]:
    """Bytes by which a choice exceeds the tiers below the device, but for `of`."""
    beyond = problem.beyond(choice)
    return {tier: size for tier, size in beyond.items() if tier not in ("device", of)}


def _leanest(
    problem: Problem, of: StateTier, choices: Iterable[Choice], *, proven: int
) -> Leanest | None:
    """The choice that needs least of a tier; None if none fits the device."""
    found: list[Leanest] = []
    for choice in choices:
        static = max(problem.static_bytes(choice))
        if of != "device" and static > problem.device:
            continue
        needed = static if of == "device" else problem.tier_use(of, choice)
        found.append(Leanest(choice=choice, bytes=needed, proven_bytes=min(proven, needed)))
    return min(found, key=lambda lean: lean.bytes, default=None)


class _Try(NamedTuple):
    """One program's answer: the leanest decisions, a bound, and what tiers lacked of all."""

    lean: Leanest | None = None
    proven: int = 0
    over: Mapping[StateTier, int] = {}
    proves_none: bool = False


def _try(
    problem: Problem,
    of: StateTier,
    part: float,
    spare: Mapping[TierName, int],
    *,
    counted: bool,
    enough: int = 0,
    most: int | None = None,
    stopped: Stopped | None,
) -> _Try:
    """Solve one program within `part` of every limit, and of a tier with so much to `spare`.

    With whole decisions, or (`counted`) with whole numbers of units per option. Any decisions that
    need no more than `enough` end the search; none may need more than `most`, where that is given.
    """
    # The answer does not depend on the budget of the tier asked for: neither may the model's scale.
    scale = min(max(problem.static_bytes(choice)) for choice in plain_choices(problem))
    tiers = {tier: int(size * part) - spare.get(tier, 0) for tier, size in problem.tiers.items()}
    if any(size < 0 for size in tiers.values()):
        return _Try()
    if of != "device":
        tiers[of] = AMPLE
    model = DecisionModel(problem.changed(device=max(1, scale), tiers=tiers))
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
    target = enough / SURELY / model.byte_unit if enough else -inf
    if most is not None:
        target = most * SURELY / model.byte_unit
        model.row("limit", [(peak, 1.0)], LE, target)
    # Among equally lean decisions, those that keep and persist most, and move least.
    plain = [(xs[0], -TIE_BREAK) for of_unit in model.binaries for xs in of_unit]
    model.minimise([(peak, 1.0), *plain])
    if counted:
        model.count_units()
    program = LinearProgram(model.pulp, stopped=stopped)
    answer = program.solve(integer=True, max_nodes=MAX_NODES, gap=1e-9, target=target)
    if not answer.values:
        return _Try(proves_none=answer.status == "infeasible")
    # What the solver proved, less its tolerance and what the tie-break may have taken off.
    proven = 0
    if answer.bound > 0:
        bound = (answer.bound - 1e-8 * problem.count) * model.byte_unit * (1 - 1e-6)
        proven = max(0, int(bound))
    found = roundings(problem, model.choice_values(answer.values))
    lacking = {choice: _lacking(problem, of, choice) for choice in found}
    within = (choice for choice, over in lacking.items() if not over)
    lean = _leanest(problem, of, within, proven=proven)
    overs = (over for over in lacking.values() if over)
    least = min(overs, key=lambda over: sum(over.values()), default={})
    return _Try(lean, proven, {} if lean else least)
