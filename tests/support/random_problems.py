"""Random planning problems, choices within them, and rules for their schedules."""

import random
from math import inf
from typing import get_args

from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import relaxed
from protrain_plan.planning.search.evaluation import plans_of
from protrain_runtime.contract.records.plan import (
    ALONE,
    Budgets,
    Reductions,
    Schedule,
    StepSettings,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import on_several
from tests.support.schedule_rules import ALL, ScheduleRule, fill

STEPS: list[tuple[Updates, int]] = [
    ("in backward", 1),
    ("in backward", 1),
    ("after backward", 1),
    ("in backward", 3),
    ("after backward", 2),
]
PLENTY = Budgets(device=10**14, host=10**14, disk=10**14)


def random_choice(problem: Problem, rng: random.Random) -> Choice:
    return tuple(
        (rng.randrange(len(options.activations)), rng.randrange(len(options.states)))
        for options in problem.options
    )


def random_problem(
    profile: Profile, budgets: Budgets, rng: random.Random, *, several: bool = False
) -> Problem:
    updates, micro_batches = rng.choice(STEPS)
    group = ALONE
    if several:
        profile, group = on_several(profile, rng)
    return Problem.of(
        profile,
        budgets,
        settings=StepSettings(
            piece_bytes=rng.choice([16 << 20, 64 << 20, 1 << 40]),
            updates=updates,
            micro_batches=micro_batches,
            group=group,
            overlap_steps=rng.random() < 0.7,
            **({"reductions": rng.choice(get_args(Reductions))} if several else {}),
        ),
    )


def fixed_seconds(problem: Problem, choice: Choice) -> float:
    """The fluid model's step with these decisions; infinity where it has none."""
    fluid = Fluid(problem)
    fluid.fix(choice)
    answer = relaxed(fluid.pulp)
    return fluid.second_unit * answer.bound if answer.status == "optimal" else inf


def random_units(profile: Profile, rng: random.Random, settings: StepSettings) -> list[UnitPlan]:
    """Any decisions with any leads and drains, whatever memory they take."""
    leads, drains = [0, 0.5, 1, 2, 50], [None, 0, 0.5, 1, 7]
    return [
        UnitPlan(
            name=options.unit.name,
            activations=rng.choice(options.activations).decision,
            states=rng.choice(options.states).decision,
            schedule=Schedule(
                forward_lead=rng.choice(leads),
                backward_lead=rng.choice(leads),
                swap_lead=rng.choice(leads),
                swap_drain=rng.choice(drains),
                update_drain=rng.choice(drains),
            ),
        )
        for options in Problem.of(profile, PLENTY, settings=settings).options
    ]


def random_rule(rng: random.Random) -> ScheduleRule:
    return ScheduleRule(
        rng.choice([0, 1, 2, 3, 9, ALL]),
        rng.choice([0, 0.3, 1, 1.6, 2, 5, ALL]),
        rng.choice([0, 0.3, 1, rng.random()]),
    )


def schedule(
    problem: Problem, choice: Choice, *, limit: int, rule: ScheduleRule
) -> list[UnitPlan] | None:
    """Full plans for the units whose device bytes stay within `limit`; None if there are none."""
    free = [limit - total for total in problem.static_bytes(choice)]
    if min(free) < 0:
        return None
    return list(plans_of(problem, choice, fill(problem, choice, free, rule)))
