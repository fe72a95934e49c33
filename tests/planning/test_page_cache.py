"""Plans that count the page cache as memory: at its speed, and with no more on disk than it has."""

from dataclasses import replace

import pytest

from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.answers import Objective
from protrain_plan.planning.questions.objectives import ask
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.report.step import simulated
from protrain_plan.simulation.group import profile_for, through_cache
from protrain_runtime.contract.records import dumps_plan, loads_plan
from protrain_runtime.contract.records.hardware import Cached, Contention, Hardware, Link
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.contract.records.profile import Profile
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import MB, cpu, infeasible, joined, question, small, solved

FAST = Link(read_bytes_per_s=4e9, write_bytes_per_s=3e9, latency_s=1e-5, duplex=0.9)
BESIDE = Contention(compute=0.7, lane=0.6)


def caching(hardware: Hardware) -> Hardware:
    """The machine, whose disk is faster through the page cache."""
    cached = Cached(link=FAST, read_contention=BESIDE, write_contention=BESIDE)
    tiers = tuple(
        replace(tier, cached=cached) if tier.name == "disk" else tier for tier in hardware.tiers
    )
    return replace(hardware, tiers=tiers)


def model(hardware: Hardware) -> Profile:
    sizes = {"block_parameters": 20 * MB, "embedding_parameters": 10 * MB, "kept": 100 * MB}
    return small(hardware, blocks=3, **sizes, seconds=0.1, device_speed=1e9)


def asked(profile: Profile, page_cache_bytes: int) -> Solved | Infeasible:
    """The fastest plan in a device that holds less than a third of the states."""
    budgets = Budgets(device=700 * MB, host=0, disk=10**11)
    of = question(profile, budgets, page_cache_bytes=page_cache_bytes)
    answer = ask(of, Objective(), effort=Effort(gap_target=0.01))
    outcome = answer.solved or answer.infeasible
    assert outcome is not None
    return outcome


@pytest.mark.nightly
def test_a_plan_says_it_and_is_simulated_as_it_runs() -> None:
    """The same plan without the cache takes the disk's own time."""
    profile = model(caching(cpu()))
    plan = solved(asked(profile, 10**10)).plan
    assert "page_cache_bytes: 10000000000" in dumps_plan(plan)
    assert loads_plan(dumps_plan(plan)) == plan
    own = simulated(plan, profile)
    assert own.report.step_seconds == pytest.approx(plan.prediction.step_seconds)
    past = simulated(with_settings(plan, page_cache_bytes=0), profile)
    assert past.report.step_seconds > own.report.step_seconds
    direct = solved(asked(profile, 0)).plan
    assert "page_cache" not in dumps_plan(direct)
    assert direct.prediction.lower_bound_seconds > plan.prediction.lower_bound_seconds


@pytest.mark.nightly
def test_no_more_is_on_disk_than_the_cache_may_take() -> None:
    profile = model(caching(cpu()))
    needed = solved(asked(profile, 10**10)).plan.prediction.peak_bytes.disk
    less = asked(profile, needed * 2 // 3)
    if isinstance(less, Solved):
        assert less.plan.prediction.peak_bytes.disk <= needed * 2 // 3
    infeasible(asked(profile, needed // 8))


def test_a_machine_that_was_not_measured_so_is_refused(assert_says: Speaker) -> None:
    error = assert_says.refused(asked, model(cpu()), 10**9)
    assert error.key == "--page-cache"


def test_the_machine_is_changed_in_its_disk_and_what_copies_leave_compute() -> None:
    machine = caching(cpu())
    assert through_cache(machine, 0) == machine
    found = through_cache(machine, 10**9)
    [disk] = found.tiers
    assert (disk.link, disk.capacity_bytes) == (FAST, 10**9)
    assert (found.read_contention, found.write_contention) == (BESIDE, BESIDE)
    assert through_cache(found, 10**9) == found


def test_ranks_share_the_cache_s_speed() -> None:
    profile = model(caching(joined(cpu(), below="of the node")))
    two = with_settings(solved(asked(profile, 10**10)).plan, num_devices=2, num_replicas=1)
    own = profile_for(profile, two)
    [disk] = own.hardware.tiers
    assert disk.link.read_bytes_per_s == FAST.read_bytes_per_s / 2
    assert profile_for(own, two).hardware.tiers == (disk,)
