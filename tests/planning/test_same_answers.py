"""Sixty problems whose answers were written down: a change of the code's shape alters none of them.

A change that is meant to find better plans writes them anew (`--write-golden`), and its review
sees which problems got faster. Seconds are compared as the bits that they are.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.records.decisions import activations_text, states_text
from protrain_runtime.contract.records.plan import ALONE, Budgets, Plan, Schedule, Updates
from tests.support.planning_cases import MB, kept_bytes, least_bytes, on_several, random_profile
from tests.support.thinning import thinned

NUM_CASES = 60
BELOW = 10**13
MODES: tuple[tuple[Updates, int], ...] = (
    ("in backward", 1),
    ("after backward", 1),
    ("in backward", 4),
    ("after backward", 4),
)
SHARES = (-0.05, 0.01, 0.1, 0.3, 0.6, 1.0)  # from just too small, on the way to everything kept


def problem_of(number: int) -> Problem:
    rng = random.Random(number)
    profile, group = random_profile(rng, max_blocks=5), ALONE
    if number % 3 == 2:
        profile, group = on_several(profile, rng)
    updates, micro_batches = MODES[number % len(MODES)]
    settings = replace(
        OVERLAPPING, updates=updates, micro_batches=micro_batches, group=group, piece_bytes=64 * MB
    )
    ample = Budgets(device=10**15, host=BELOW, disk=BELOW)
    problem = Problem.of(profile, ample, settings=settings)
    least, share = least_bytes(problem), SHARES[number // 2 % len(SHARES)]
    device = round(least + (kept_bytes(problem) - least) * share)
    budgets = replace(ample, device=device + profile.hardware.device.context_bytes)
    return Problem.of(profile, budgets, settings=settings)


def decided(plan: Plan) -> list[str]:
    return [
        f"{unit.name}: {activations_text(unit.activations)}; {states_text(unit.states)};"
        f" {' '.join(slots(lead) for lead in leads(unit.schedule))}"
        for unit in plan.units
    ]


def leads(schedule: Schedule) -> tuple[float | None, ...]:
    early = (schedule.forward_lead, schedule.backward_lead, schedule.swap_lead)
    return (*early, schedule.swap_drain, schedule.update_drain)


def slots(lead: float | None) -> str:
    """Whole ones without a point: 1 and 1.0 are equal, and caches of the planner give either."""
    return str(int(lead)) if lead is not None and lead == int(lead) else str(lead)


def answer(number: int) -> dict[str, Any]:
    outcome = solve_problem(problem_of(number), effort=Effort())
    match outcome:
        case Infeasible():
            return {"short of": outcome.tier, "by": outcome.shortfall_bytes}
        case Solved():
            promised = outcome.plan.prediction
            peaks = promised.peak_bytes
            return {
                "seconds": promised.step_seconds.hex(),
                "bound": promised.lower_bound_seconds.hex(),
                "peaks": [peaks.device, peaks.context, peaks.host, peaks.disk, peaks.allocator],
                "units": decided(outcome.plan),
            }


@pytest.mark.nightly("0")
@pytest.mark.parametrize("ten", thinned(range(NUM_CASES // 10)))
def test_answers_are_those_written_down(
    ten: int, assert_golden: Callable[[str, str], None]
) -> None:
    found = {f"problem {number}": answer(number) for number in range(10 * ten, 10 * ten + 10)}
    assert_golden(f"answers/{ten}.json", json.dumps(found, indent=1))
