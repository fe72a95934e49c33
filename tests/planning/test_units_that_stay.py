"""Units whose states stay on the device (`Unit.stays`): planned, pinned, checked, explained."""

from dataclasses import replace

import pytest

from protrain_plan.checking.plan_on_machine import misfit
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_runtime.contract.records import dumps_profile, loads_profile
from protrain_runtime.contract.records.plan import PERSISTENT, Budgets, Placement
from protrain_runtime.contract.records.profile import SPARSE, Profile
from tests.support.messages import Speaker
from tests.support.planning_cases import MB, decoder, gpu, infeasible, least_bytes, plan, solved

STAYING = (0, 2)
WHY = "complex parameters beside real ones"


def profile(why: str = WHY) -> Profile:
    """Six blocks; the embedding's states and those of the second block stay."""
    made = decoder(gpu(), blocks=6)
    units = tuple(
        replace(unit, stays=why) if index in STAYING else unit
        for index, unit in enumerate(made.units)
    )
    return replace(made, units=units)


def budgets(device_bytes: int) -> Budgets:
    return Budgets(device=device_bytes, host=400_000 * MB, disk=0)


def least() -> int:
    besides = profile().hardware.device.besides_bytes
    return least_bytes(Problem.of(profile(), budgets(10**13))) + besides


@pytest.mark.nightly
def test_states_that_stay_are_persistent_where_all_others_leave() -> None:
    assert loads_profile(dumps_profile(profile()), source="p.yaml") == profile()
    found = solved(plan(profile(), budgets(int(least() * 1.05))))
    states = [unit.states for unit in found.plan.units]
    assert [states[index] for index in STAYING] == [PERSISTENT] * len(STAYING)
    assert Placement(tier="host") in states
    assert misfit(found.plan, profile()) is None
    assert found.plan.prediction.lower_bound_seconds <= found.plan.prediction.step_seconds


def test_the_least_counts_what_cannot_leave() -> None:
    free = least_bytes(Problem.of(profile(""), budgets(10**13)))
    assert least() >= free + sum(profile().units[index].state_bytes for index in STAYING)


def test_every_baseline_leaves_them_there() -> None:
    problem = Problem.of(profile(), budgets(10**12))
    for name in BASELINES:
        evaluation = baseline(name, problem, Evaluator(problem))
        assert evaluation is not None
        _, states = problem.chosen(evaluation.choice)
        assert [states[index].decision for index in STAYING] == [PERSISTENT] * len(STAYING)


def test_a_pin_against_it_is_refused_with_the_reason(assert_says: Speaker) -> None:
    pins = [parse_pin(f"{profile().units[2].name}: offload to host")]
    assert_says.refused(min_memory, Problem.of(profile(), budgets(10**12), pins=pins))


def test_where_no_plan_fits_the_reason_is_among_the_advice() -> None:
    found = infeasible(plan(profile(), budgets(least() - 2**20)))
    name = profile().units[0].name
    assert [line for line in found.advice if "cannot leave" in line] == [
        f"4.30 GiB of states cannot leave the device: those of {name} and 1 more ({WHY})"
    ]


@pytest.mark.nightly
def test_a_plan_that_moves_them_does_not_fit_its_profile() -> None:
    made = solved(plan(profile(""), budgets(least())))
    units = tuple(replace(unit, states=Placement(tier="host")) for unit in made.plan.units)
    name = profile().units[0].name
    assert misfit(replace(made.plan, units=units), profile()) == (
        f"{name} cannot have its states there: they stay on the device ({WHY})"
    )


def test_sparse_gradients_are_not_summed(assert_says: Speaker) -> None:
    assert_says.refused(
        Problem.of, profile(SPARSE), budgets(10**12), settings=replace(OVERLAPPING, micro_batches=2)
    )
