"""Plans that use a disk only where it is worth it, held against searches with and without one."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.answers import Objective, Question
from protrain_plan.planning.questions.cells import with_resource
from protrain_plan.planning.questions.disk import solve_sparing
from protrain_plan.planning.questions.objectives import ask, fit
from protrain_plan.planning.questions.planner import solve_any
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.plan import DISK_GAIN, Budgets
from tests.support.planning_cases import (
    MB,
    gpu,
    joined,
    kept_bytes,
    least_bytes,
    question,
    random_profile,
    small,
    solved,
    within,
)

GB = 10**9
EFFORT = Effort(gap_target=0.01)


def asked(*, host_gb: int, disk_speed: float = 1.0, device_mb: int = 1500, **own: Any) -> Question:
    """A question on a card that is too small for the model, with a disk."""
    hardware = gpu(disk_gb=1000)
    link = hardware.tier("disk").link
    speeds = link.read_bytes_per_s * disk_speed, link.write_bytes_per_s * disk_speed
    profile = small(hardware.with_link("disk", *speeds))
    budgets = Budgets(device=device_mb * MB, host=host_gb * GB, disk=1000 * GB)
    return question(profile, budgets, **own)


SPARED = asked(host_gb=4)  # 4 % of a step are to be gained
WORTH = asked(host_gb=4, disk_speed=10)  # 19 %
NEEDED = asked(host_gb=2)
GREAT = asked(host_gb=4, disk_speed=10, device_mb=1000)  # no plan without the disk is as fast


def with_gain(one: Question, gain: float) -> Question:
    return replace(one, settings=replace(one.settings, disk_gain=gain))


def planned(one: Question, effort: Effort = EFFORT, *, stages: list[str] | None = None) -> Solved:
    """The plan under the rule; `stages` are those of its searches."""
    seen = [] if stages is None else stages
    return solved(
        solve_sparing(
            one.problems(),
            effort=replace(effort, progress=lambda stage, *_: seen.append(stage)),
        )
    )


@cache
def freely(one: Question, *, disk: bool) -> Solved | None:
    """The plan of a search that uses the disk as any tier, or has none."""
    one = one if disk else with_resource(one, "disk", 0)
    found = solve_any(one.problems(), effort=EFFORT)
    return found if isinstance(found, Solved) else None


def seconds(found: Solved | None) -> float:
    return solved(found).plan.prediction.step_seconds


def bound(found: Solved) -> float:
    return found.plan.prediction.lower_bound_seconds


@pytest.mark.nightly
def test_a_disk_that_gains_little_is_spared() -> None:
    wet, dry = freely(SPARED, disk=True), freely(SPARED, disk=False)
    assert solved(wet).uses_disk
    assert seconds(dry) / (1 + DISK_GAIN) < seconds(wet) < seconds(dry)
    found = planned(SPARED)
    assert not found.uses_disk
    assert found.plan.units == solved(dry).plan.units
    assert found.plan.budgets == SPARED.budgets  # as the question had them
    less = planned(with_gain(SPARED, 0.01))
    assert less.uses_disk
    assert less.seconds_without_disk == seconds(dry) >= 1.01 * seconds(less)
    assert planned(with_gain(SPARED, 0.0)).uses_disk


@pytest.mark.nightly
def test_a_disk_that_gains_enough_is_used_and_what_it_gains_is_said() -> None:
    found, dry = planned(WORTH), seconds(freely(WORTH, disk=False))
    assert found.uses_disk
    assert found.seconds_without_disk == dry >= (1 + DISK_GAIN) * seconds(found)
    assert seconds(found) == pytest.approx(seconds(freely(WORTH, disk=True)), rel=0.01)
    assert not planned(with_gain(WORTH, 0.25)).uses_disk


@pytest.mark.nightly
def test_a_bound_on_plans_without_the_disk_is_none_on_those_with_it() -> None:
    dry, wet = freely(GREAT, disk=False), planned(GREAT)
    assert bound(wet) <= seconds(wet) < bound(solved(dry))
    ended: list[str] = []

    def told(stage: str, *_: object) -> None:
        if stage == "without the disk: steps downhill":
            ended.append(stage)

    early = solve_sparing(
        GREAT.problems(),
        effort=replace(EFFORT, stopped=lambda: bool(ended), progress=told),
    )
    assert not solved(early).uses_disk
    assert bound(solved(early)) <= seconds(wet)


@pytest.mark.nightly
def test_a_disk_without_which_nothing_fits_is_used_as_any_tier() -> None:
    assert freely(NEEDED, disk=False) is None
    found = planned(with_gain(NEEDED, 100.0))
    assert found.plan.units == solved(freely(NEEDED, disk=True)).plan.units
    assert found.seconds_without_disk is None


@pytest.mark.nightly
def test_without_an_open_disk_there_is_one_search() -> None:
    closed = with_resource(SPARED, "disk", 0)
    stages: list[str] = []
    assert planned(closed, stages=stages).plan == solved(freely(SPARED, disk=False)).plan
    assert not any(stage.startswith("without the disk") for stage in stages)


def test_a_disk_that_cannot_be_worth_it_is_not_searched_for() -> None:
    """All lanes take nearly as long as the plan without it."""
    ample = asked(host_gb=5, device_mb=2500)
    stages: list[str] = []
    found = planned(ample, stages=stages)
    assert stages
    assert all(stage.startswith("without the disk: ") for stage in stages)
    assert seconds(freely(ample, disk=True)) > seconds(found) / (1 + DISK_GAIN)


@pytest.mark.nightly("0", "1")
@pytest.mark.parametrize("number", range(5))
def test_the_bound_is_one_on_all_that_the_rule_admits(number: int) -> None:
    """No faster plan without the disk is known, nor one with it that is faster by so much."""
    rng = random.Random(number)
    profile = random_profile(rng, max_blocks=4)
    hardware = gpu(disk_gb=1000) if profile.hardware.device.kind == "cuda" else profile.hardware
    if number % 3 == 2:
        hardware = joined(hardware)
    profile = replace(profile, hardware=hardware)
    gain, replicas = rng.choice([0.0, 0.02, 0.1]), (1, 2) if number % 3 == 2 else ()
    group = replace(question(profile, within(profile, 0)).group, num_devices=2 if replicas else 1)
    one = question(profile, within(profile, GB), disk_gain=gain, group=group, replicas=replicas)
    least, most = least_bytes(one.problem()), kept_bytes(one.problem())
    budgets = within(profile, least + (most - least) // rng.choice([3, 6, 20]))
    one = replace(one, budgets=budgets)
    found, dry, wet = planned(one), freely(one, disk=False), freely(one, disk=True)
    assert bound(found) <= seconds(found)
    if dry is None:
        assert seconds(found) == seconds(wet)
        return
    assert seconds(found) <= seconds(dry)  # a disk that is added makes no step longer
    assert bound(found) <= seconds(dry)
    if found.uses_disk:
        assert seconds(found) * (1 + gain) <= seconds(dry)
    if seconds(wet) * (1 + gain) <= seconds(dry):
        assert bound(found) <= seconds(wet)


@pytest.mark.nightly
def test_a_search_that_ends_early_has_a_plan() -> None:
    looks = 0

    def stopped() -> bool:
        nonlocal looks
        looks += 1
        return looks > 40

    found = planned(WORTH, Effort(stopped=stopped))
    assert bound(found) <= seconds(found)
    assert bound(found) <= seconds(planned(WORTH))


@pytest.mark.nightly
def test_a_given_up_search_without_the_disk_lets_none_in_that_gains_less() -> None:
    """No plan takes 0.45 s: the search without the disk ends before it has found its fastest."""
    effort = replace(EFFORT, enough_s=0.45)
    closed = with_resource(SPARED, "disk", 0)
    given_up = solved(solve_any(closed.problems(), effort=effort))
    assert seconds(given_up) > seconds(freely(SPARED, disk=True)) * (1 + DISK_GAIN)
    assert not planned(SPARED, effort).uses_disk


@pytest.mark.nightly
def test_more_host_memory_spares_the_disk() -> None:
    """The plan for less memory needs the disk, and is only 19 % faster than any without it."""
    more = with_gain(WORTH, 0.25)
    before = fit(with_resource(more, "host", 3 * GB), effort=EFFORT)
    after = fit(more, effort=EFFORT, known=before)
    assert solved(before.solved).uses_disk
    assert not solved(after.solved).uses_disk
    assert seconds(before.solved) < seconds(after.solved)


@pytest.mark.nightly
def test_plans_keep_the_question() -> None:
    usual = ask(SPARED, Objective(), effort=EFFORT)
    assert "disk_gain" not in dumps_plan(solved(usual.solved).plan)
    other = solved(ask(with_gain(SPARED, 0.25), Objective(), effort=EFFORT).solved).plan
    assert "disk_gain: 0.25" in dumps_plan(other)
    assert loads_plan(dumps_plan(other)) == other
