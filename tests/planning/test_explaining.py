"""Reasons against the memory count and the simulator, limits against slower lanes and budgets."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protrain_plan.planning.explain.explaining import (
    GIB,
    MAX_GROUPS,
    Alternative,
    Explanation,
    LaneLimit,
    MemoryLimit,
    explain,
    in_words,
)
from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.model.solver import relaxed
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    Plan,
    StepSettings,
    Updates,
)
from protrain_runtime.contract.records.profile import FormCost, Profile
from tests.support.messages import Speaker
from tests.support.planning_cases import (
    MB,
    drafted,
    gpu,
    plan,
    question,
    random_profile,
    small,
    solved,
    within,
)
from tests.support.random_problems import fixed_seconds, random_choice

PIECE_BYTES = 64 << 20
OFFLOAD = Placement(tier="host")
KEPT: tuple[Activations, Placement] = (KEEP, PERSISTENT)


def model(hardware: Hardware | None = None, *, blocks: int = 6, host_speed: float = 5e9) -> Profile:
    return small(hardware or gpu(), blocks=blocks, kept=400 * MB, host_speed=host_speed)


def chosen(problem: Problem, decisions: Sequence[tuple[Activations, Placement]]) -> Choice:
    return tuple(
        (options.numbers[0][activations], options.numbers[1][states])
        for options, (activations, states) in zip(problem.options, decisions, strict=True)
    )


def made(problem: Problem, budgets: Budgets, choice: Choice) -> Plan:
    """A plan with these decisions, whether good or bad."""
    evaluation = Evaluator(problem).evaluate(choice)
    assert evaluation
    settings = replace(problem.settings, overlap_steps=False)
    units, seconds = evaluation.plans, evaluation.seconds
    return drafted(problem.profile, units, budgets, settings, seconds)


def problem_of(profile: Profile, plan: Plan) -> Problem:
    return Problem.of(profile, plan.budgets, settings=plan.settings)


def choice_of(problem: Problem, plan: Plan) -> Choice:
    return chosen(problem, [(unit.activations, unit.states) for unit in plan.units])


def with_blocks(
    profile: Profile, decisions: list[tuple[Activations, Placement]], *, spare: int
) -> Plan:
    """Parts keep everything, blocks do as told; `spare` bytes more than that stands for."""
    asked = question(profile, within(profile, 10**11), piece_bytes=PIECE_BYTES)
    choice = chosen(asked.problem(), [KEPT, *decisions, KEPT])
    budgets = within(profile, max(asked.problem().static_bytes(choice)) + spare)
    return made(replace(asked, budgets=budgets).problem(), budgets, choice)


def recomputing(*, spare: int = 10 * MB) -> tuple[Profile, Plan]:
    """Four blocks that recompute, where one that keeps would need 375 MB more; two that keep."""
    profile = model()
    decisions: list[tuple[Activations, Placement]] = [(RECOMPUTE, PERSISTENT)] * 4
    return profile, with_blocks(profile, [*decisions, KEPT, KEPT], spare=spare)


def alternative(explanation: Explanation, units: str, decision: str) -> Alternative:
    group = next(group for group in explanation.groups if group.units == units)
    return next(found for found in group.alternatives if found.decision == decision)


# Reasons


def test_shortfall_is_that_of_the_memory_count() -> None:
    profile, planned = recomputing()
    problem = problem_of(profile, planned)
    choice = list(choice_of(problem, planned))
    choice[3] = chosen(problem, [KEPT] * problem.count)[3]  # the third of the four blocks
    static = problem.static_bytes(tuple(choice))
    found = alternative(explain(profile, planned), "layers.0-3", "keep")
    assert found.shortfall_bytes == max(static) - problem.device == 365 * MB
    assert (found.tier, found.slot) == ("device", "backward of head and the loss")
    assert static.index(max(static)) == problem.count  # the first backward slot
    assert found.extra_seconds is None


def test_extra_seconds_are_those_of_the_simulator() -> None:
    profile, planned = recomputing()
    problem = problem_of(profile, planned)
    choice = choice_of(problem, planned)
    decisions = [(unit.activations, unit.states) for unit in planned.units]
    decisions[6] = (RECOMPUTE, PERSISTENT)  # the second of the two blocks that keep
    before = Evaluator(problem).best_schedule(choice)
    after = Evaluator(problem).best_schedule(chosen(problem, decisions))
    assert before
    assert after
    found = alternative(explain(profile, planned), "layers.4-5", "recompute")
    assert found.extra_seconds == pytest.approx(after.seconds - before.seconds)
    assert found.extra_seconds == pytest.approx(0.02)


def updating() -> tuple[Profile, Plan]:
    """Six blocks whose states are updated on a slow host; the rest has nothing to wait for."""
    profile = model(host_speed=1e8)
    return profile, with_blocks(profile, [(RECOMPUTE, OFFLOAD)] * 6, spare=400 * MB)


@pytest.mark.nightly
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_every_plan_is_explained(seed: int) -> None:
    rng = random.Random(seed)
    profile, planned = random_plan(rng)
    problem = problem_of(profile, planned)
    explanation = explain(profile, planned)
    assert sum(group.num_units for group in explanation.groups) == problem.count
    for group in explanation.groups:
        options = problem.options[[unit.name for unit in profile.units].index(first(group.units))]
        open_to_it = len(options.activations) + len(options.states)
        assert len(group.alternatives) == open_to_it - 2
        for found in group.alternatives:
            assert (found.extra_seconds is None) == (found.shortfall_bytes is not None)
            assert (found.tier is None) == (found.shortfall_bytes is None)
            assert found.shortfall_bytes is None or found.shortfall_bytes > 0
    lanes = [limit for limit in explanation.limits if isinstance(limit, LaneLimit)]
    assert sum(limit.share for limit in lanes) == pytest.approx(1.0, abs=1e-4)
    memory = [limit for limit in explanation.limits if isinstance(limit, MemoryLimit)]
    assert all(limit.seconds_per_gib >= 0 for limit in memory)
    assert [limit.resource for limit in memory if not limit.where] == ["device", *problem.tiers]
    assert len(in_words(explanation)) == 3 + len(explanation.groups) + 1


def first(units: str) -> str:
    """The first unit of a text such as `layers.0-3 and layers.6`."""
    return units.split(" ")[0].split(",")[0].split("-")[0]


def random_plan(rng: random.Random) -> tuple[Profile, Plan]:
    """Any decisions that fit, with up to 300 MB more than they stand for."""
    profile = random_profile(rng)
    updates: list[Updates] = ["in backward", "after backward"]
    asked = question(
        profile,
        within(profile, 10**12),
        piece_bytes=PIECE_BYTES,
        updates=rng.choice(updates),
        micro_batches=rng.choice([1, 3]),
    )
    problem = asked.problem()
    while problem.beyond(choice := random_choice(problem, rng)).keys() - {"device"}:
        pass
    device = max(problem.static_bytes(choice)) + rng.choice([0, 30, 300]) * MB
    budgets = within(profile, device)
    return profile, made(replace(asked, budgets=budgets).problem(), budgets, choice)


@pytest.mark.nightly
def test_large_groups_come_first_and_small_ones_are_counted(assert_says: Speaker) -> None:
    profile = model(blocks=20)
    decisions = [KEPT] * 20
    for number in range(0, 20, 2):  # alternately: two groups of blocks, each with many runs
        decisions[number] = (RECOMPUTE, PERSISTENT)
    explanation = explain(profile, with_blocks(profile, decisions, spare=0))
    assert [group.num_units for group in explanation.groups] == [10, 10, 1, 1]
    assert_says(explanation.groups[0].units)
    units = tuple(  # no two of a class
        replace(u, num_parameters=u.num_parameters + n, state_bytes=u.state_bytes + n)
        for n, u in enumerate(profile.units)
    )
    profile = replace(profile, units=units)
    explanation = explain(profile, with_blocks(profile, decisions, spare=0))
    assert len(explanation.groups) == MAX_GROUPS
    assert explanation.num_unexplained == 22 - MAX_GROUPS
    assert_says(in_words(explanation)[-2])


# Limits


def planned_seconds(profile: Profile, planned: Plan) -> float:
    """The relaxation's optimum with the plan's decisions."""
    problem = problem_of(profile, planned)
    return fixed_seconds(problem, choice_of(problem, planned))


def moving() -> tuple[Profile, Plan]:
    """Everything matters: compute, both directions of the link, and updates."""
    hardware = gpu(pcie=12e9)
    profile = model(hardware, host_speed=1e9)
    decisions: list[tuple[Activations, Placement]] = [(Activations(tier="host"), OFFLOAD)] * 4
    return profile, with_blocks(profile, [*decisions, KEPT, KEPT], spare=150 * MB)


def slowed(profile: Profile, lane: str, factor: float) -> Profile:
    """The profile with one lane's, or compute's, durations times `factor`."""
    tier, optimizer, units = profile.hardware.tiers[0], profile.optimizer, profile.units
    link = tier.link
    match lane:
        case "fetch host":
            link = replace(link, read_bytes_per_s=link.read_bytes_per_s / factor)
        case "spill host":
            link = replace(link, write_bytes_per_s=link.write_bytes_per_s / factor)
        case "update":
            speed = optimizer.host_parameters_per_s / factor
            optimizer = replace(optimizer, host_parameters_per_s=speed)
        case _:
            speed = optimizer.device_parameters_per_s / factor
            optimizer = replace(optimizer, device_parameters_per_s=speed)
            units = tuple(
                replace(unit, forms=tuple(slower(form, factor) for form in unit.forms))
                for unit in units
            )
    hardware = replace(profile.hardware, tiers=(replace(tier, link=link),))
    return replace(profile, hardware=hardware, optimizer=optimizer, units=units)


def slower(form: FormCost, factor: float) -> FormCost:
    return replace(form, forward_s=form.forward_s * factor, backward_s=form.backward_s * factor)


@pytest.mark.nightly("spill host", "update")
@pytest.mark.parametrize("lane", ["fetch host", "spill host", "update", "compute"])
def test_share_is_what_another_speed_of_the_lane_changes(lane: str) -> None:
    profile, planned = moving()
    limits = explain(profile, planned).limits
    shares = {limit.resource: limit.share for limit in limits if isinstance(limit, LaneLimit)}
    step = planned_seconds(profile, planned)
    much = 0.001
    saved = step - planned_seconds(slowed(profile, lane, 1 - much), planned)
    lost = planned_seconds(slowed(profile, lane, 1 + much), planned) - step
    # Equal blocks and exact fits have many optima, of which the solver picks one: "about".
    about = 0.005
    assert saved / step / much - about <= shares[lane] <= lost / step / much + about
    assert lost > 0


def worth(explanation: Explanation) -> float:
    """Seconds per byte of the device's budget, with a new plan."""
    found = [limit for limit in explanation.limits if isinstance(limit, MemoryLimit)]
    return next(limit.seconds_per_gib for limit in found if not limit.where) / GIB


@pytest.mark.nightly
def test_worth_of_memory_is_what_planning_with_more_saves() -> None:
    profile = model(host_speed=5e8)
    budgets = [within(profile, device) for device in (1400 * MB, 1600 * MB)]
    settings = StepSettings(piece_bytes=PIECE_BYTES, overlap_steps=False)
    before, after = (
        solved(plan(profile, budget, settings, effort=Effort(gap_target=0.001)))
        for budget in budgets
    )
    more = 200 * MB
    at_first, at_last = (worth(explain(profile, one.plan)) for one in (before, after))
    bounds = [
        relaxed(model.pulp).bound * model.second_unit
        for model in (Fluid(problem_of(profile, one.plan)) for one in (before, after))
    ]
    # The bound is convex in the budget.
    assert 0 < at_last * more <= (bounds[0] - bounds[1]) * (1 + 1e-6)
    assert bounds[0] - bounds[1] <= at_first * more * (1 + 1e-6)
    # No plan does better than the bound.
    assert after.plan.prediction.step_seconds >= bounds[0] - at_first * more


def test_slots_without_room_are_named() -> None:
    profile, planned = moving()
    found = [
        limit
        for limit in explain(profile, planned).limits
        if isinstance(limit, MemoryLimit) and limit.where
    ]
    saved = sum(limit.seconds_per_gib for limit in found) / GIB * MB
    more = replace(planned, budgets=replace(planned.budgets, device=planned.budgets.device + MB))
    fewer = planned_seconds(profile, planned) - planned_seconds(profile, more)
    assert fewer == pytest.approx(saved, rel=0.01)
    assert fewer > 0


# Words


def without_host() -> tuple[Profile, Plan]:
    profile, planned = recomputing()
    return profile, replace(planned, budgets=replace(planned.budgets, host=0))


STEPS: dict[str, Callable[[], tuple[Profile, Plan]]] = {
    "little fits": without_host,
    "updates take most of the step": updating,
    "everything fits": lambda: (model(), with_blocks(model(), [KEPT] * 6, spare=10**9)),
    "time is wasted": lambda: recomputing(spare=10**10),
    "slots have no room": moving,
}


@pytest.mark.parametrize("step", STEPS)
def test_sentences(step: str, assert_says: Speaker) -> None:
    assert_says(in_words(explain(*STEPS[step]())))


# Errors


def test_another_profile_is_refused(assert_says: Speaker) -> None:
    profile, planned = recomputing()
    alone = replace(profile, hardware=replace(profile.hardware, tiers=()))
    tight = replace(planned, budgets=replace(planned.budgets, device=10**9))
    for of, refused in ((model(blocks=7), planned), (alone, moving()[1]), (profile, tight)):
        assert_says.refused(explain, of, refused)


def test_each_stage_of_the_search_says_what_it_found() -> None:
    profile = model(gpu(disk_gb=1000), blocks=8)
    found = solved(plan(profile, within(profile, 1_500 * MB)))
    stages = found.search
    assert stages[0].stage == "plain policies"
    assert stages[-1].stage == "simpler decisions"
    prediction = found.plan.prediction
    assert stages[-1].step_seconds == prediction.step_seconds
    assert stages[-1].bound_seconds == prediction.lower_bound_seconds
    steps = [stage.step_seconds for stage in stages[:-1]]
    bounds = [stage.bound_seconds for stage in stages]
    assert steps == sorted(steps, reverse=True)
    assert bounds == sorted(bounds)
    said = in_words(explain(profile, found.plan, stages))[-len(stages) - 1 :]
    assert all(
        line.startswith(f"Search, {one.stage}: ")
        for line, one in zip(said[:-1], stages, strict=True)
    )
    assert f"{found.gap:.1%} above that bound" in said[-1]
    assert (
        in_words(explain(profile, found.plan))
        == in_words(explain(profile, found.plan, stages))[: -len(said)]
    )
