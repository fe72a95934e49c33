"""The number of replicas that the planner chooses: against each number by itself; its proof."""

import random
import re
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.objectives import Objective, Question, ask
from protrain_plan.planning.questions.planner import solve_any, solve_problem
from protrain_plan.planning.search.choices import plain_choices
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.plans import solved_json, solved_text
from protrain_runtime.contract.records import states_text
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import ALONE, Budgets, DeviceGroup
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import MB, decoder, gpu, joined, on_several, random_profile
from tests.support.thinning import thinned

GAP = 0.005
EIGHT = DeviceGroup(num_devices=8, num_nodes=2)


def small(hardware: Hardware, *, frozen: bool) -> Profile:
    profile = decoder(
        hardware,
        blocks=3,
        block_parameters=40 * MB,
        embedding_parameters=20 * MB,
        kept=100 * MB,
        seconds=0.02,
        host_speed=1e11,
        device_speed=1e15,
    )
    if not frozen:
        return profile
    units = (
        replace(one, num_parameters=0, gradient_bytes=0, gradient_pieces=(), state_bytes=0)
        for one in profile.units
    )
    return replace(profile, units=tuple(units))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What joins eight devices in two nodes, what each has, and what is best."""

    within: float
    across: float
    device: int
    below: int
    frozen: bool = False
    replicas: int


CASES = {
    "weights that are gathered and never summed": Case(
        within=1e9, across=1e8, device=450 * MB, below=10**12, frozen=True, replicas=8
    ),
    "slow across nodes": Case(
        within=1e11, across=1e8, device=1200 * MB, below=1200 * MB, replicas=2
    ),
    "little memory": Case(within=1e11, across=5e10, device=700 * MB, below=300 * MB, replicas=1),
}


def question(name: str) -> Question:
    case = CASES[name]
    hardware = joined(gpu(), network=case.within, across=case.across)
    context = hardware.device.context_bytes
    return Question(
        profile=small(hardware, frozen=case.frozen),
        budgets=Budgets(device=case.device + context, host=case.below, disk=0),
        replicas=EIGHT.replica_counts,
        settings=replace(OVERLAPPING, group=EIGHT),
    )


@cache
def chosen(name: str) -> Solved:
    asked = question(name)
    answer = solve_any(asked.problems(), asked.budgets, effort=Effort(gap_target=GAP))
    assert isinstance(answer, Solved)
    return answer


def test_groups_have_whole_nodes_or_equal_parts_of_one() -> None:
    assert ALONE.replica_counts == (1,)
    assert DeviceGroup(num_devices=6).replica_counts == (1, 2, 3, 6)
    assert EIGHT.replica_counts == (1, 2, 4, 8)
    assert DeviceGroup(num_devices=12, num_nodes=2).replica_counts == (1, 2, 4, 6, 12)
    assert DeviceGroup(num_devices=64, num_nodes=8).replica_counts == (1, 2, 4, 8, 16, 32, 64)
    assert DeviceGroup(num_devices=3, num_nodes=3).replica_counts == (1, 3)


@pytest.mark.parametrize("name", thinned(tuple(CASES)))
def test_no_number_of_replicas_is_faster_than_the_chosen_one(name: str) -> None:
    asked, best = question(name), chosen(name)
    assert best.plan.group.num_replicas == CASES[name].replicas
    prediction = best.plan.prediction
    assert prediction.lower_bound_seconds <= prediction.step_seconds
    for problem, told in zip(asked.problems(), best.replicas, strict=True):
        alone = solve_problem(problem, asked.budgets, effort=Effort(gap_target=GAP))
        assert told.number == problem.settings.group.num_replicas
        if isinstance(alone, Infeasible):  # fractions of decisions may fit all the same
            continue
        seconds = alone.plan.prediction.step_seconds
        assert prediction.step_seconds <= seconds * (1 + GAP)
        assert told.lower_bound_seconds is not None
        assert prediction.lower_bound_seconds <= told.lower_bound_seconds <= seconds


def test_numbers_that_a_bound_rules_out_are_not_planned_for() -> None:
    best = chosen("slow across nodes")
    told = {one.number: one for one in best.replicas}
    assert told[2].step_seconds == best.plan.prediction.step_seconds
    assert told[1].step_seconds is None
    assert told[1].lower_bound_seconds is not None
    assert told[1].lower_bound_seconds > best.plan.prediction.step_seconds


def test_what_other_numbers_would_take_is_told() -> None:
    best = chosen("slow across nodes")
    printed = Console(file=StringIO(), width=200)
    printed.print(solved_text(best, question("slow across nodes").profile, Path("plan.yaml")))
    assert isinstance(printed.file, StringIO)
    lines = printed.file.getvalue().splitlines()
    start = lines.index("on 8 devices in 2 nodes, 2 replicas, each with batches of its own")
    told = r"other numbers of replicas: 1: at least 5\.60 s, 4: at least 4\.80 s, 8: no plan fits"
    assert re.fullmatch(told, lines[start + 1])
    assert [one["number"] for one in solved_json(best)["replicas"]] == [1, 2, 4, 8]


def test_embeddings_and_heads_are_sharded_too() -> None:
    units = chosen("slow across nodes").plan.units
    taken = {states_text(unit.states) for unit in units}
    assert len(taken) == 1
    assert taken <= {"shard", "offload to host"}
    assert units[0].kind != "block" != units[-1].kind


def test_where_nothing_fits_the_fewest_replicas_say_what_is_missing() -> None:
    asked = replace(question("little memory"), budgets=Budgets(device=0, host=0, disk=0))
    found = solve_any(asked.problems(), asked.budgets)
    assert isinstance(found, Infeasible)
    assert found == solve_problem(asked.problem(), asked.budgets)


def test_a_given_number_is_kept() -> None:
    asked = replace(question("slow across nodes"), replicas=())
    answer = ask(asked, Objective(), effort=Effort(gap_target=GAP))
    assert answer.solved
    assert (answer.solved.plan.group.num_replicas, answer.solved.replicas) == (1, ())


def test_the_least_memory_may_have_other_replicas_than_the_fastest_step() -> None:
    asked = question("slow across nodes")
    fastest = chosen("slow across nodes").plan.prediction
    effort = Effort(gap_target=0.05)
    answer = ask(asked, Objective(max_slowdown=1.5), effort=effort)
    assert answer.solved and answer.least_memory
    slower = answer.solved.plan.prediction
    assert slower.peak_bytes.device < fastest.peak_bytes.device
    assert slower.step_seconds <= answer.least_memory.limit_seconds
    assert answer.least_memory.lower_bound_bytes <= answer.solved.plan.budgets.device


def test_a_front_is_as_fast_as_its_budgets_plans() -> None:
    asked = question("slow across nodes")
    effort = Effort(gap_target=0.05)
    answer = ask(asked, Objective(pareto_points=3), effort=effort)
    assert answer.solved and answer.front
    assert answer.solved.plan.group.num_replicas == 2
    seconds = [point.solved.plan.prediction.step_seconds for point in answer.front]
    assert seconds == sorted(seconds, reverse=True)


def test_the_largest_batch_is_that_of_the_fewest_replicas() -> None:
    asked = question("little memory")
    few = replace(asked, replicas=(1,))
    objective = Objective(maximize="batch-size")
    answers = [ask(one, objective, effort=Effort(gap_target=0.05)) for one in (asked, few)]
    assert all(answer.solved and answer.largest for answer in answers)
    sizes = [answer.profile.workload.batch_size for answer in answers]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_is_faster_than_the_lanes(seed: int) -> None:
    rng = random.Random(seed)
    profile, group = on_several(random_profile(rng, max_blocks=4), rng)
    context = profile.hardware.device.context_bytes
    budgets = Budgets(device=context + rng.choice([1, 3, 20]) * 500 * MB, host=10**11, disk=10**12)
    problem = Problem.of(
        profile,
        budgets,
        settings=replace(OVERLAPPING, group=group, micro_batches=rng.choice([1, 3])),
    )
    bound, evaluator = least_lane_seconds(problem), Evaluator(problem)
    evaluation = [evaluator.evaluate(choice) for choice in plain_choices(problem)]
    seconds = [one.seconds for one in evaluation if one]
    assert not seconds or (bound is not None and 0 < bound <= min(seconds))


def test_problems_differ_in_replicas_alone() -> None:
    first, *others = question("little memory").problems()
    for problem in others:
        group = replace(first.settings.group, num_replicas=problem.settings.group.num_replicas)
        settings = replace(first.settings, group=group)
        assert problem == Problem(
            profile=first.profile,
            made_from=first.made_from,
            settings=settings,
            device=first.device,
            tiers=first.tiers,
        )
        decisions = [[option.decision for option in options.states] for options in problem.options]
        assert decisions == [
            [option.decision for option in options.states] for options in first.options
        ]
