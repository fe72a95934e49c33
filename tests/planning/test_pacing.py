"""Schedules by pace against the peak function and the simulator."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.search.evaluation import LATES, PACES, Evaluator, plans_of, step_seconds
from protrain_plan.planning.search.pacing import Pace, Pacer
from protrain_runtime.contract.program.memory import device_bytes, device_totals
from protrain_runtime.contract.records.plan import (
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    StepSettings,
)
from tests.support.planning_cases import MB, decoder, gpu, random_profile
from tests.support.random_problems import PLENTY, random_choice, random_problem
from tests.support.schedule_rules import EVERY_RULE, seconds_by_rules


def random_pace(rng: random.Random) -> Pace:
    return Pace(wait=rng.choice([0.0, 0.1, 1.0]), late=rng.choice([0.0, 0.3, 1.0]))


@pytest.mark.nightly
@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 10**9), several=st.booleans())
def test_a_paced_step_stays_within_the_budget(seed: int, *, several: bool) -> None:
    """Ranks, clipping, micro-batches, both tiers, steps that overlap; with and without updates."""
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=rng.choice([3, 6]))
    problem = random_problem(profile, PLENTY, rng, several=several)
    choice = random_choice(problem, rng)
    least = max(problem.static_bytes(choice))
    problem = replace(problem, device=least + int(rng.random() ** 3 * least))
    paced = Pacer(problem).walk(choice, random_pace(rng))
    assert paced
    plans = plans_of(problem, choice, paced.schedules)
    for updating in (True, False):
        program = problem.program(plans, updating=updating)
        totals = device_totals(program)
        assert totals == [slot.total for slot in device_bytes(program)]
        assert max(totals) <= problem.device
    assert paced.seconds > 0
    assert Pacer(replace(problem, device=least - 1)).walk(choice) is None


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9), several=st.booleans())
def test_a_walk_that_is_cut_short_would_have_taken_longer(seed: int, *, several: bool) -> None:
    rng = random.Random(seed)
    problem = random_problem(random_profile(rng), PLENTY, rng, several=several)
    choice = random_choice(problem, rng)
    problem = replace(problem, device=round(1.1 * max(problem.static_bytes(choice))))
    pacer, pace = Pacer(problem), random_pace(rng)
    whole = pacer.walk(choice, pace)
    assert whole
    within = whole.seconds * rng.choice([0.3, 0.8, 0.999, 1.3])
    limited = pacer.walk(choice, pace, within)
    assert limited == whole or (limited is None and whole.seconds >= within)
    computing = sum(
        seconds
        for options, decision in zip(pacer.options, choice, strict=True)
        for kind, number in enumerate(decision)
        for _, seconds in options[kind][number].compute
    )
    assert pacer.walk(choice, pace, 0.999 * computing * problem.settings.micro_batches) is None


POLICIES: list[Activations] = [
    Activations(tier="host"),
    RECOMPUTE,
    Activations(form="full", tier="host"),
]
HOST = Placement(tier="host")


def a_decoder(*, micro_batches: int = 1, overlap_steps: bool = False) -> Problem:
    profile = decoder(gpu(disk_gb=1000), blocks=16, kept=200 * MB)
    budgets = Budgets(device=7_000 * MB, host=10**12, disk=10**12)
    return Problem.of(
        profile,
        budgets,
        settings=StepSettings(micro_batches=micro_batches, overlap_steps=overlap_steps),
    )


def every_other(problem: Problem, policy: Activations) -> Choice:
    """All states in host memory; half of the blocks follow a policy, the others recompute."""
    choice = []
    for unit, options in enumerate(problem.options):
        activations, states = options.numbers
        one = policy if unit % 2 else RECOMPUTE
        choice.append((activations.get(one, 0), states[HOST]))
    return tuple(choice)


@pytest.mark.nightly(but=("policy0-1", "policy1-4"))
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_walk_takes_about_what_the_simulator_finds(
    policy: Activations, micro_batches: int
) -> None:
    problem = a_decoder(micro_batches=micro_batches)
    choice = every_other(problem, policy)
    assert problem.fits(choice)
    paced = Pacer(problem).walk(choice)
    assert paced
    plans = plans_of(problem, choice, paced.schedules)
    # The clocks are an estimate by which choices are ordered; the simulator judges every plan.
    assert paced.seconds == pytest.approx(step_seconds(problem, plans)[0], rel=0.15)


def test_paces_are_as_fast_as_rules() -> None:
    """The best of three paces is within two per cent of the best of all depths and windows."""
    problem = a_decoder()
    for policy in POLICIES:
        choice = every_other(problem, policy)
        paced = Evaluator(problem).evaluate(choice, paces=PACES)
        assert paced
        assert paced.seconds <= seconds_by_rules(problem, choice, EVERY_RULE) * 1.02


def test_late_updates_are_tried_where_steps_overlap() -> None:
    problem = a_decoder(overlap_steps=True)
    choice = every_other(problem, Activations(form="full", tier="host"))
    found = Evaluator(problem).best_schedule(choice)
    assert found
    for late in LATES:
        other = Evaluator(problem).evaluate(choice, paces=[found.pace._replace(late=late)])
        assert other
        assert found.seconds <= other.seconds * (1 + 1e-9)
