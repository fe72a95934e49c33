"""Laws of compiled programmes: nothing waits for what comes later, and everything arrives."""

import random
from dataclasses import replace

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.simulation.critical_path import waits_of
from protrain_plan.simulation.timeline import simulate
from protrain_runtime.contract.program.implications import BoundProgram
from protrain_runtime.contract.records.plan import Budgets, Schedule, UnitPlan
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import random_profile
from tests.support.programs import compile_units


def random_plans(rng: random.Random) -> tuple[Profile, list[UnitPlan], BoundProgram]:
    """Any decisions with any schedule, feasible or not."""
    profile = random_profile(rng)
    plenty = Budgets(device=10**14, host=10**14, disk=10**14)
    options = Problem.of(
        profile, plenty, settings=replace(OVERLAPPING, piece_bytes=64 << 20)
    ).options
    drains = [None, 0, 1, 2, 7]
    plans = [
        UnitPlan(
            name=unit.name,
            activations=rng.choice(option.activations).decision,
            states=rng.choice(option.states).decision,
            schedule=Schedule(
                forward_lead=rng.choice([0, 1, 3, 50]),
                backward_lead=rng.choice([0, 1, 3, 50]),
                swap_lead=rng.choice([0, 1, 3, 50]),
                swap_drain=rng.choice(drains),
                update_drain=rng.choice(drains),
            ),
        )
        for unit, option in zip(profile.units, options, strict=True)
    ]
    return profile, plans, compile_units(plans, profile, piece_bytes=64 << 20)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_moves_wait_only_for_moves_submitted_before(seed: int) -> None:
    _, _, program = random_plans(random.Random(seed))
    submitted: list[int] = []
    for slot in program.slots:
        assert all(number in submitted for number in slot.drained)
        submitted += slot.submit
        assert all(number in submitted for number in slot.ready)
        submitted += slot.finish
    assert submitted == sorted(submitted)
    assert len(submitted) == len(program.moves)
    for number, move in enumerate(program.moves):
        assert all(earlier < number for earlier in move.after)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_every_fetch_is_ready_in_the_slot_that_it_serves(seed: int) -> None:
    _, _, program = random_plans(random.Random(seed))
    for number, move in enumerate(program.moves):
        waits = [index for index, slot in enumerate(program.slots) if number in slot.ready]
        fetches = move.kind in ("fetch", "swap in")
        assert waits == ([move.slot] if fetches else [])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_random_plans_end_and_every_move_runs_once(seed: int) -> None:
    _, _, program = random_plans(random.Random(seed))
    timeline = simulate(program)
    names = [span.name for span in timeline.spans if span.lane != "compute"]
    assert sorted(names) == sorted(program.move_name(n) for n in range(len(program.moves)))
    assert all(0 <= span.start_s <= span.end_s <= timeline.step_seconds for span in timeline.spans)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_graph_of_waits_has_no_cycle_by_networkx(seed: int) -> None:
    _, _, program = random_plans(random.Random(seed))
    graph = waits_of(program)
    assert nx.is_directed_acyclic_graph(graph)
    assert nx.has_path(graph, ("slot", 0), ("slot", len(program.slots)))
    assert set(graph) >= {("move", number) for number in range(len(program.moves))}
