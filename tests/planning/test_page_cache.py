"""Plans that count the page cache as memory: at its speed, and with no more on disk than it has."""

from dataclasses import replace

import pytest

from protrain_plan.planning.model.problem import OVERLAPPING
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.objectives import Objective, Question, ask
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.report.step import simulated
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.group import profile_for, through_cache
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.hardware import Cached, Contention, Hardware, Link
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import Profile
from tests.support.messages import Speaker
from tests.support.planning_cases import MB, cpu, decoder, joined

FAST = Link(read_bytes_per_s=4e9, write_bytes_per_s=3e9, latency_s=1e-5, duplex=0.9)
BESIDE = Contention(compute=0.7, lane=0.6)


def caching(hardware: Hardware) -> Hardware:
    """The machine, whose disk is faster through the page cache."""
    cached = Cached(link=FAST, read_contention=BESIDE, write_contention=BESIDE)
    tiers = tuple(
        replace(tier, cached=cached) if tier.name == "disk" else tier for tier in hardware.tiers
    )
    return replace(hardware, tiers=tiers)


def small(hardware: Hardware) -> Profile:
    return decoder(
        hardware,
        blocks=3,
        block_parameters=20 * MB,
        embedding_parameters=10 * MB,
        kept=100 * MB,
        seconds=0.1,
        tied=False,
        host_speed=1e9,
        device_speed=1e9,
    )


def asked(profile: Profile, page_cache_bytes: int) -> Solved | Infeasible:
    """The fastest plan in a device that holds less than a third of the states."""
    budgets = Budgets(device=700 * MB, host=0, disk=10**11)
    question = Question(
        profile=profile,
        budgets=budgets,
        settings=replace(OVERLAPPING, page_cache_bytes=page_cache_bytes),
    )
    answer = ask(question, Objective(), effort=Effort(gap_target=0.01))
    outcome = answer.solved or answer.infeasible
    assert outcome is not None
    return outcome


def test_a_plan_says_it_and_is_simulated_as_it_runs() -> None:
    """The same plan without the cache takes the disk's own time."""
    profile = small(caching(cpu()))
    solved = asked(profile, 10**10)
    assert isinstance(solved, Solved)
    plan = solved.plan
    assert "\npage_cache_bytes: 10000000000\n" in dumps_plan(plan)
    assert loads_plan(dumps_plan(plan)) == plan
    own = simulated(plan, profile)
    assert own.report.step_seconds == pytest.approx(plan.prediction.step_seconds)
    past = simulated(replace(plan, settings=replace(plan.settings, page_cache_bytes=0)), profile)
    assert past.report.step_seconds > own.report.step_seconds
    direct = asked(profile, 0)
    assert isinstance(direct, Solved)
    assert "page_cache" not in dumps_plan(direct.plan)
    assert direct.plan.prediction.lower_bound_seconds > plan.prediction.lower_bound_seconds


def test_no_more_is_on_disk_than_the_cache_may_take() -> None:
    profile = small(caching(cpu()))
    most = asked(profile, 10**10)
    assert isinstance(most, Solved)
    needed = most.plan.prediction.peak_bytes.disk
    less = asked(profile, needed * 2 // 3)
    if isinstance(less, Solved):
        assert less.plan.prediction.peak_bytes.disk <= needed * 2 // 3
    none = asked(profile, needed // 8)
    assert isinstance(none, Infeasible)


def test_a_machine_that_was_not_measured_so_is_refused(assert_says: Speaker) -> None:
    with pytest.raises(ProtrainError) as caught:
        asked(small(cpu()), 10**9)
    assert caught.value.key == "--page-cache"
    assert_says(caught.value)


def test_the_machine_is_changed_in_its_disk_and_what_copies_leave_compute() -> None:
    machine = caching(cpu())
    assert through_cache(machine, 0) == machine
    found = through_cache(machine, 10**9)
    [disk] = found.tiers
    assert (disk.link, disk.capacity_bytes) == (FAST, 10**9)
    assert (found.read_contention, found.write_contention) == (BESIDE, BESIDE)
    assert through_cache(found, 10**9) == found


def test_ranks_share_the_cache_s_speed() -> None:
    profile = small(caching(joined(cpu(), below="of the node")))
    plan = asked(profile, 10**10)
    assert isinstance(plan, Solved)
    two = replace(
        plan.plan,
        settings=replace(
            plan.plan.settings, group=replace(plan.plan.group, num_devices=2, num_replicas=1)
        ),
    )
    [disk] = profile_for(profile, two).hardware.tiers
    assert disk.link.read_bytes_per_s == FAST.read_bytes_per_s / 2
    again = profile_for(profile_for(profile, two), two)
    assert again.hardware.tiers == (disk,)
