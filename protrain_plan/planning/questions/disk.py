"""The disk where it is worth it: where no plan fits without it, or where that is much slower.

    dry     = the fastest plan found without the disk
    limit   = its seconds / (1 + `disk_gain` of the settings)
    least   = a bound on all plans; above the limit, the disk cannot be worth it
    found   = the fastest plan with the disk, by a search that ends where its bound is above the
              limit; taken where it is within the limit

So a plan without the disk is the answer unless one with it is within the limit, and a machine that
gets a disk gets no slower plan. These are the plans that the rule admits, and the answer's bound is
one on them: on all plans, where some with the disk may be within the limit, or else on those
without it.

Of a search that the effort let end early it is not known how fast a plan may be. The disk is held
against its bound then.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import Hint, proven, solve_any
from protrain_plan.planning.search.choices import has_plan
from protrain_plan.planning.search.improving import Effort

NEARLY = 1.05
"""A short search is followed by a long one where its plan takes up to so many times the limit: its
plans took 0.97 to 1.08 times as long in 13 problems, three of them more than that."""


def solve_sparing(
    problems: Sequence[Problem], *, effort: Effort, hints: Sequence[Hint] = ()
) -> Solved | Infeasible:
    """Answer as `solve_any` does, with the disk only if worthwhile (see the module)."""
    without = tuple(one.changed(tiers={**one.tiers, "disk": 0}) for one in problems)
    is_open = any(one.tiers.get("disk") for one in problems)
    if (
        not is_open
        or effort.solver != "milp"
        or not has_plan(without[0].speculating(), stopped=effort.late())
    ):
        return solve_any(problems, effort=effort, hints=hints)
    dry = solve_any(without, effort=effort.of_part("without the disk: "), hints=hints)
    if isinstance(dry, Infeasible):
        return solve_any(problems, effort=effort, hints=hints)
    dry_s, dry_bound = dry.step_seconds, dry.bound_seconds
    wanted_s = min(effort.below_s, inf if effort.enough_s is None else effort.enough_s)
    gain = problems[0].settings.disk_gain
    limit_s = (dry_s if dry_s <= wanted_s else dry_bound) / (1 + gain)
    least = min(one.compute_seconds for one in problems)
    if least <= limit_s:
        bounds = (least_lane_seconds(one, stopped=effort.spent) for one in problems)
        least = min((bound for bound in bounds if bound is not None), default=least)
    enough_s = max(least * (1 + effort.gap_target), effort.enough_s or 0.0)
    wet, known, known_s, took_s = None, [*hints, dry.plan.units], dry_s, dry.solve_seconds
    # A search that may be abandoned is short; close to the limit, a long one is worth it.
    for is_long in (False, True):
        if wet or least > limit_s or dry_s <= enough_s or effort.spent():
            break
        if is_long != (known_s <= limit_s * NEARLY):
            continue
        below_s = inf if is_long else limit_s * (1 + effort.gap_target)
        nearly = replace(effort, below_s=min(effort.below_s, below_s))
        found = solve_any(problems, effort=nearly, hints=known)
        assert isinstance(found, Solved), "a plan without the disk is one with it, too"
        found_s = found.step_seconds
        known, known_s = [*known, found.plan.units], min(known_s, found_s)
        least, took_s = max(least, found.bound_seconds), took_s + found.solve_seconds
        if found.uses_disk:
            wet = found if found_s < dry_s and found_s <= limit_s else None
        elif found_s < dry_s:
            dry, dry_s, limit_s = found, found_s, min(limit_s, found_s / (1 + gain))
    bound = max(dry_bound, least) if least > limit_s else least
    return replace(
        proven(wet or dry, bound, effort),
        solve_seconds=took_s,
        seconds_without_disk=dry_s if wet else None,
    )
