"""Where the solver finds no leanest choice in its nodes, plain policies are known."""

import random

import pytest

from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.search import choices
from protrain_plan.planning.search.choices import leanest_plain, min_memory
from protrain_runtime.contract.records.plan import Budgets
from tests.support.planning_cases import decoder, gpu, random_profile


@pytest.mark.parametrize("seed", range(8))
def test_plain_policies_meet_the_other_tiers_and_are_no_leaner(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=6)
    room = {tier: rng.randrange(2 * 10**9) for tier in ("host", "disk")}
    problem = Problem.of(profile, Budgets(device=10**12, **room))
    lean, plain = min_memory(problem), leanest_plain(problem, "device")
    assert plain, "everything kept and persistent needs nothing below the device"
    assert lean
    assert lean.proven_bytes <= lean.bytes <= plain.bytes
    assert plain.bytes == max(problem.static_bytes(plain.choice))
    assert plain.proven_bytes == 0
    for tier, limit in problem.tiers.items():
        assert problem.tier_use(tier, plain.choice) <= limit


def test_of_a_tier_plain_policies_meet_the_device_or_there_are_none() -> None:
    profile = random_profile(random.Random(3), max_blocks=6)
    ample = Problem.of(profile, Budgets(device=10**12, host=10**12, disk=10**12))
    found = leanest_plain(ample, "disk")
    assert found
    assert found.bytes == 0, "everything persists"
    assert found.bytes == ample.tier_use("disk", found.choice)
    context = profile.hardware.device.besides_bytes
    none = Problem.of(profile, Budgets(device=context + 1, host=10**12, disk=10**12))
    assert leanest_plain(none, "disk") is None


def test_a_full_tier_is_asked_for_what_staging_takes_of_it() -> None:
    """The first whole numbers of units overstep it; the next ones meet it, under the same bound."""
    profile = decoder(gpu(disk_gb=4000), blocks=12)
    states = sum(unit.state_bytes + unit.gradient_bytes for unit in profile.units)
    room = Budgets(device=10**12, host=int(0.13 * states), disk=4 * 10**12)
    problem = Problem.of(profile, room)
    first = choices._try(problem, "device", 1.0, {}, counted=True, stopped=None)
    assert first.lean is None
    assert first.over["host"] > 0
    found = choices._tries(problem, "device", (1.0, 1.0), counted=True, stopped=None)
    assert found
    assert found.proven_bytes == first.proven < found.bytes
    assert problem.within_tiers(found.choice)
    lean = min_memory(problem)
    assert lean
    assert lean.bytes <= found.bytes
