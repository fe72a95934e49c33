"""Sweeps, what helps, and the search for a machine: on small synthetic models."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.questions.allocator_slack import default_device_bytes, headroom_bytes
from protrain_plan.planning.questions.answers import Answer, Question
from protrain_plan.planning.questions.cells import (
    LANES,
    MEMORY,
    MUCH,
    WORTH,
    Cell,
    Resource,
    with_resource,
)
from protrain_plan.planning.questions.grid import (
    Found,
    best_change,
    changes,
    fits,
    helped,
    least_seconds,
    search,
)
from protrain_plan.planning.questions.objectives import fit
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.records.hardware import Hardware, Shared
from protrain_runtime.contract.records.plan import Budgets, DeviceGroup
from tests.support.planning_cases import MB, cpu, decoder, gpu, joined, least_bytes, small, solved
from tests.support.planning_cases import question as asked_of

GAP = 0.02


def question(
    hardware: Hardware, *, device: int = 900 * MB, group: DeviceGroup | None = None
) -> Question:
    """A model of 60 M parameters: states of 840 MB, of which a card of 900 MB has room for half."""
    profile = small(hardware, blocks=1, embedding_parameters=10 * MB, kept=60 * MB, seconds=0.01)
    capacities = {tier.name: tier.capacity_bytes for tier in hardware.tiers}
    budgets = Budgets(device=device, host=capacities.get("host", 0), disk=capacities.get("disk", 0))
    group = group or DeviceGroup()
    return asked_of(profile, budgets, replicas=group.replica_counts, group=group)


def seconds_of(reached: Answer) -> float:
    return solved(reached.solved).plan.prediction.step_seconds


def speed_of(reached: Answer) -> float:
    return reached.tokens_per_s or 0.0


# --- sweeps ---------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("resource", ["host", "device", "disk"])
def test_more_memory_is_never_slower(resource: Resource) -> None:
    """Exactly, and with searches that end far from the best: by construction, not by luck."""
    asked = question(gpu(disk_gb=10, host_gb=2), device=900 * MB)
    least = {"host": 100 * MB, "device": 700 * MB, "disk": 100 * MB}[resource]
    values = [round(least * 1.25**number) for number in range(8)]
    line = fits([with_resource(asked, resource, value) for value in values], gap=0.5)
    found = [one for one in line if one.solved]
    assert len(found) >= 3
    assert [one.solved is not None for one in line] == sorted(bool(one.solved) for one in line)
    for less, more in pairwise(found):
        assert seconds_of(more) <= seconds_of(less)
    for one in found:
        assert one.solved
        plan = one.solved.plan
        assert plan.budgets == one.question.budgets
        assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds
        problem = Problem.of_plan(plan, one.question.profile)
        peaks = peak_bytes(problem.program(plan.units))
        assert peaks == plan.prediction.peak_bytes
        assert peaks.on_device <= plan.budgets.device
        assert (peaks.host, peaks.disk) <= (plan.budgets.host, plan.budgets.disk)


def test_of_two_resources_each_cell_is_as_fast_as_all_that_have_less() -> None:
    asked = question(gpu(disk_gb=10, host_gb=2), device=900 * MB)
    values = [(host, device) for host in (100, 400) for device in (750, 900, 1100)]
    line = fits(
        [
            with_resource(with_resource(asked, "host", host * MB), "device", device * MB)
            for host, device in values
        ],
        gap=0.5,
    )
    for (host, device), more in zip(values, line, strict=True):
        for (no_more, nor_more), less in zip(values, line, strict=True):
            if no_more <= host and nor_more <= device and less.solved:
                assert seconds_of(more) <= seconds_of(less)


@pytest.mark.nightly
def test_the_plan_for_less_is_kept_where_no_faster_one_is_found() -> None:
    """A search that ends at once, after one that went on."""
    asked = question(gpu())
    good = fit(asked, effort=Effort(gap_target=GAP))
    more = with_resource(asked, "device", asked.budgets.device + 10 * MB)
    hasty = Effort(gap_target=100.0)
    assert seconds_of(fit(more, effort=hasty)) > seconds_of(good), "there is nothing to keep"
    kept = fit(more, effort=hasty, known=good)
    assert seconds_of(kept) <= seconds_of(good)
    less = with_resource(asked, "device", asked.budgets.device - 10 * MB)
    other = fit(less, effort=hasty, known=good)
    assert other.solved is not None
    assert other.solved.plan.prediction.peak_bytes.on_device <= less.budgets.device


def test_a_machine_without_host_memory_is_refused() -> None:
    asked = question(cpu(), device=900 * MB)
    for resource in ("host", "link"):
        with pytest.raises(ProtrainError, match="cpu has no host memory below its device"):
            with_resource(asked, resource, 1e9)


def test_resources_are_those_of_the_machine() -> None:
    """A link in both directions; host memory is a node's."""
    faster = with_resource(question(gpu()), "link", 40e9).profile.hardware.tier("host").link
    assert (faster.read_bytes_per_s, faster.write_bytes_per_s) == (40e9, 40e9)
    shared = joined(gpu(), below="of the node")
    asked = question(shared, group=DeviceGroup(num_devices=8, num_nodes=2))
    assert with_resource(asked, "host", 8000 * MB).budgets.host == 2000 * MB


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("below", ["of the node", "of each device"])
def test_more_than_the_measured_machine_has_can_be_asked_for(
    below: Shared, num_devices: int
) -> None:
    """`plan` asks for it to name what helps most."""
    group = DeviceGroup(num_devices=num_devices)
    asked = question(joined(gpu(host_gb=2, disk_gb=1), below=below), group=group)
    measured = replace(asked, profile=replace(asked.profile, method="measured"))
    budgets = replace(asked.budgets, host=measured.budgets.host // num_devices, disk=0)
    measured = replace(measured, budgets=budgets)
    every = list(changes(measured, device_sizes=[10**12]))
    assert {"host memory", "device memory", "disk"} <= {change.name for change in every}
    for change in [*every, Cell(question=with_resource(measured, "disk", 10**13))]:
        assert least_seconds(change.question), change.name


# --- what helps -----------------------------------------------------------------------------------


def helps(base: Answer) -> dict[str, tuple[Cell, float | None, bool]]:
    found = {}
    for change in changes(base.question, device_sizes=[800 * MB, 1500 * MB, 3000 * MB]):
        one = helped(base, change)
        found[change.name] = (change, one.times_as_fast(base), one.reached is not None)
    return found


@pytest.mark.nightly
def test_what_helps_is_what_planning_says() -> None:
    """Changes that a bound leaves out are planned here, and are worth less than was said."""
    asked = question(gpu())
    base = fit(asked, effort=Effort(gap_target=GAP))
    found = helps(base)
    assert found.keys() == {"host memory", "link", "device memory", "micro-batches", "batch"}
    change, times, _ = found["device memory"]
    assert change.question.budgets.device == 1500 * MB
    assert change.words == "1.40 GiB of device memory in place of 858.31 MiB"
    assert times is not None
    assert times > 1 + WORTH
    for what in ("device memory", "host memory"):
        change, times, planned = found[what]
        again = fit(change.question, effort=Effort(gap_target=GAP))
        if planned:
            assert times == pytest.approx(speed_of(again) / speed_of(base), rel=3 * GAP)
        else:
            assert speed_of(again) < (1 + WORTH) * speed_of(base)
    # 512 GB are more than the model can take.
    assert found["host memory"][1] == pytest.approx(1.0, abs=WORTH)


@pytest.mark.parametrize("device", [900 * MB, 3000 * MB])
def test_the_best_change_is_the_one_that_helps_most(device: int) -> None:
    base = fit(question(gpu(), device=device), effort=Effort(gap_target=GAP))
    tried = [*changes(base.question, device_sizes=[1500 * MB, 3000 * MB])]
    asked: list[Cell] = []

    def answer(change: Cell, speed: float = 0.0) -> Answer:
        asked.append(change)
        below_s = change.question.tokens / speed if speed else inf
        return fit(change.question, effort=Effort(gap_target=GAP, below_s=below_s), known=base)

    found = best_change(base, tried, answer)
    planned = len(asked)
    speeds = {change.name: speed_of(answer(change)) for change in tried}
    if found is None:
        assert max(speeds.values()) <= (1 + MUCH) * speed_of(base)
    else:
        assert found.tokens_per_s == pytest.approx(max(speeds.values()), rel=GAP)
        assert found.tokens_per_s > (1 + MUCH) * speed_of(base)
    keeps_all = device == 3000 * MB
    assert (found is None) == keeps_all
    assert (planned < len(tried)) == keeps_all, "bounds rule out what gains little"


def test_a_larger_card_has_headroom_where_this_one_has() -> None:
    profile = decoder(gpu(), blocks=2)
    headroom = headroom_bytes(160_000 * MB, gpu().device.besides_bytes)
    for tight, left in ((False, headroom), (True, 0)):
        budgets = Budgets(device=default_device_bytes(profile, tight=tight), host=0, disk=0)
        one = Question(profile=profile, budgets=budgets)
        (change,) = (
            change
            for change in changes(one, device_sizes=[80_000 * MB, 160_000 * MB])
            if change.name == "device memory"
        )
        assert change.question.budgets.device == 160_000 * MB - left
        assert change.words == "149.01 GiB of device memory in place of 74.51 GiB"


def test_a_change_that_a_pin_excludes_does_not_help() -> None:
    """Units are updated speculatively with one micro-batch only."""
    pin = parse_pin("layers.0: offload to host and update on device speculatively")
    asked = question(gpu(pcie=2e9))
    asked = asked_of(asked.profile, asked.budgets, pin, updates="after backward")
    base, tried = fit(asked, effort=Effort(gap_target=GAP)), list(changes(asked))
    (excluded,) = (change for change in tried if change.name == "micro-batches")
    with pytest.raises(ProtrainError, match="with one micro-batch"):
        least_seconds(excluded.question)
    best = best_change(base, tried, lambda change, _: fit(change.question, effort=Effort()))
    assert best is not None
    assert best.cell.name == "link", "the changes that are left are compared"


def test_what_would_fit_is_said_where_nothing_does() -> None:
    device = least_bytes(question(gpu()).problem()) + gpu().device.context_bytes - MB
    base = fit(question(gpu(), device=device), effort=Effort(gap_target=GAP))
    assert base.solved is None
    found = helps(base)
    assert found["device memory"][1] is None, "it fits with that, and there is nothing to divide by"
    assert found["link"][1] == 0.0


# --- machines -------------------------------------------------------------------------------------


def offers() -> list[Cell]:
    """Cards and counts of them, of which some are too small, some too slow and some too dear."""
    made: list[Cell] = []
    for pcie, device, price in (
        (4e9, 500 * MB, 0.1),
        (2e9, 900 * MB, 0.2),
        (20e9, 1200 * MB, 0.5),
        (20e9, 3000 * MB, 1.6),
    ):
        hardware = joined(gpu(pcie=pcie), network=pcie / 2)
        for count in (1, 4):
            group = DeviceGroup(num_devices=count)
            asked = question(hardware, device=device, group=group)
            name = f"{count} x {device // MB} at {pcie:g}"
            made.append(Cell(name=name, price_per_hour=count * price, question=asked))
    random.Random(0).shuffle(made)
    return made


@pytest.fixture(scope="module")
def exhaustive() -> dict[str, float]:
    """Tokens per second of every offer, each planned by itself."""
    effort = Effort(gap_target=GAP)
    return {one.name: speed_of(fit(one.question, effort=effort)) for one in offers()}


def speeds(known: dict[str, float]) -> Sequence[float]:
    """Between what offers reach, and beyond."""
    found = sorted(value for value in known.values() if value)
    return [found[0] / 2, *((a + b) / 2 for a, b in pairwise(found)), found[-1] * 2]


@pytest.mark.nightly
def test_the_cheapest_is_what_planning_all_of_them_finds(exhaustive: dict[str, float]) -> None:
    prices = {one.name: one.price_per_hour for one in offers()}
    bounds: set[str] = set()
    for speed in speeds(exhaustive)[::2]:
        found = search(offers(), speed=speed)
        reaching = [name for name, value in exhaustive.items() if value >= speed]
        assert bool(found.best) is bool(reaching), speed
        if found.best is not None:
            assert found.best.cell.price_per_hour == min(prices[name] for name in reaching)
            assert found.best.tokens_per_s >= speed
            most = exhaustive[found.best.cell.name]
            assert found.best.tokens_per_s == pytest.approx(most, rel=2 * GAP)
        holds(found, exhaustive, speed)
        bounds |= {one.bound for one in found.looked_at if one.reached is None}
    assert {LANES, MEMORY} <= bounds, "nothing was ruled out without a plan"


def test_the_fastest_is_what_planning_all_of_them_finds(exhaustive: dict[str, float]) -> None:
    found = search(offers())
    assert found.best is not None
    assert found.best.tokens_per_s == pytest.approx(max(exhaustive.values()), rel=2 * GAP)
    assert any(one.reached is None for one in found.looked_at) or found.unseen
    holds(found, exhaustive, found.best.tokens_per_s)


def holds(found: Found, exhaustive: dict[str, float], speed: float) -> None:
    """No offer that was ruled out is as fast as its bound, and all offers are accounted for."""
    for one in found.looked_at:
        assert exhaustive[one.cell.name] <= one.most_tokens_per_s * (1 + 1e-9)
        assert one.reached is not None or one.most_tokens_per_s <= speed
    names = [one.cell.name for one in found.looked_at] + [one.name for one in found.unseen]
    assert sorted(names) == sorted(exhaustive)


def test_the_bound_of_a_question_is_that_of_all_its_replicas() -> None:
    asked = question(joined(gpu(), network=1e9), group=DeviceGroup(num_devices=4))
    assert len(asked.replicas) == 3
    bound = least_seconds(asked)
    assert bound is not None
    found = [
        fit(replace(asked, replicas=(number,)), effort=Effort(gap_target=GAP))
        for number in asked.replicas
    ]
    steps = [seconds_of(one) for one in found if one.solved]
    assert steps
    assert bound <= min(steps)
    assert asked.tokens == 4 * 1024
