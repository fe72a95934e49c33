"""Several devices: a rank's part of a machine, collectives' seconds, and the replicas' number."""

import random
import re
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from rich.console import Console

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.planning.model import options
from protrain_plan.planning.model.decision_model import least_lane_seconds
from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.alternatives import alternatives
from protrain_plan.planning.questions.answers import Alternative, Objective, Question
from protrain_plan.planning.questions.grid import fastest_batch
from protrain_plan.planning.questions.growth import in_proportion, largest_of
from protrain_plan.planning.questions.objectives import SHARDED, ask, fit
from protrain_plan.planning.questions.planner import solve_any, solve_problem
from protrain_plan.planning.search.choices import plain_choices
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.plans import solved_json, solved_text
from protrain_plan.simulation.group import (
    collective_seconds,
    group_on,
    profile_for,
    profile_of_rank,
)
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.program.program import PAGE_BYTES
from protrain_runtime.contract.records.decisions import ON_DISK
from protrain_runtime.contract.records.forms import ROUNDING
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import (
    ALONE,
    Budgets,
    DeviceGroup,
    Placement,
    StepSettings,
    Updates,
)
from protrain_runtime.contract.records.profile import Unit
from tests.support.messages import Speaker
from tests.support.planning_cases import (
    MB,
    gpu,
    infeasible,
    joined,
    least_bytes,
    on_several,
    question,
    random_profile,
    small,
    solved,
    within,
)
from tests.support.thinning import thinned

TWO, FOUR = DeviceGroup(num_devices=2), DeviceGroup(num_devices=4)
EIGHT = DeviceGroup(num_devices=8, num_nodes=2)
GAP = 0.005


def unit_frozen(unit: Unit) -> Unit:
    return replace(unit, gradient_bytes=0, gradient_pieces=(), num_parameters=0, state_bytes=0)


# --- a rank's part of a machine -------------------------------------------------------------------


def test_a_node_s_ranks_share_its_memory_its_disk_and_its_processors() -> None:
    hardware = joined(gpu(disk_gb=1000), below="of the node", library_bytes=7)
    profile = small(hardware, blocks=1)
    own = profile_of_rank(profile, EIGHT)
    for name, share in (("host", 1), ("disk", 4)):
        tier = next(tier for tier in hardware.tiers if tier.name == name)
        mine = next(tier for tier in own.hardware.tiers if tier.name == name)
        assert mine.capacity_bytes == tier.capacity_bytes // 4
        assert mine.link.read_bytes_per_s == tier.link.read_bytes_per_s / share
    assert own.optimizer.host_parameters_per_s == profile.optimizer.host_parameters_per_s / 4
    assert own.hardware.device.context_bytes == hardware.device.context_bytes + 7
    assert profile_of_rank(own, EIGHT) == own
    assert profile_of_rank(profile, ALONE) is profile


def test_devices_with_tiers_of_their_own_keep_them() -> None:
    profile = small(joined(gpu(), below="of each device"), blocks=1)
    own = profile_of_rank(profile, TWO)
    assert (own.hardware.tiers, own.optimizer) == (profile.hardware.tiers, profile.optimizer)


def test_all_ranks_of_a_node_update_no_more_than_its_memory_lets_through() -> None:
    """Whatever threads each has of its own: an x86 node has one memory for all its devices."""
    profile = small(joined(gpu(), below="of each device", devices_per_node=8), blocks=1)
    speed = profile.optimizer.host_parameters_per_s
    bound = replace(profile.optimizer, node_parameters_per_s=3 * speed)
    for devices, own in ((1, speed), (2, speed), (4, 3 / 4 * speed), (8, 3 / 8 * speed)):
        group = DeviceGroup(num_devices=devices)
        found = profile_of_rank(replace(profile, optimizer=bound), group)
        assert found.optimizer.host_parameters_per_s == pytest.approx(own)
        assert profile_of_rank(found, group) == found


def test_devices_go_to_as_few_nodes_as_hold_equal_parts_of_them() -> None:
    hardware = joined(gpu(), devices_per_node=8)
    assert group_on(hardware, 1) == ALONE == group_on(gpu(), 1)
    assert group_on(hardware, 6) == DeviceGroup(num_devices=6)
    assert group_on(hardware, 12) == DeviceGroup(num_devices=12, num_nodes=2)
    many = group_on(hardware, 64, num_replicas=8)
    assert many == DeviceGroup(num_devices=64, num_nodes=8, num_replicas=8)
    assert str(many) == "64 devices in 8 nodes, 8 replicas"


@pytest.mark.parametrize(
    ("hardware", "devices", "nodes", "replicas"),
    [
        pytest.param(gpu(), 2, None, 1, id="nothing joins them"),
        pytest.param(joined(gpu()), 4, 3, 1, id="unequal nodes"),
        pytest.param(joined(gpu()), 4, None, 3, id="unequal replicas"),
        pytest.param(joined(gpu()), 16, 2, 1, id="too many in a node"),
        pytest.param(joined(gpu(), across=None), 8, None, 1, id="nothing joins nodes"),
    ],
)
def test_devices_that_cannot_train_together_are_one_error(
    hardware: Hardware, devices: int, nodes: int | None, replicas: int, assert_says: Speaker
) -> None:
    assert_says.refused(group_on, hardware, devices, num_nodes=nodes, num_replicas=replicas)


def test_a_shard_cannot_be_pinned_on_one_device(assert_says: Speaker) -> None:
    profile = small(joined(gpu()), blocks=1)
    asked = question(profile, within(profile, 10**12), parse_pin("layers.0: shard"), group=TWO)
    [option] = asked.problem().options[1].states
    assert option.decision == Placement(tier="device")
    alone = question(profile, asked.budgets, *asked.pins).problem()
    assert_says.refused(lambda: alone.options)


def test_a_common_copy_is_for_frozen_parameters_of_several_devices(assert_says: Speaker) -> None:
    whole = small(joined(gpu()), blocks=2)
    frozen = unit_frozen(whole.units[2])
    profile = replace(whole, units=(*whole.units[:2], frozen, *whole.units[3:]))
    pin = "layers.{}: offload to host with a common copy"
    asked = question(profile, within(profile, 10**12), parse_pin(pin.format(1)), group=TWO)
    [option] = asked.problem().options[2].states
    assert option.decision == Placement(tier="host", common_copy=True)
    assert option.gathers == ()
    assert option.tier_bytes["host"] == pytest.approx(frozen.parameter_bytes / 2, abs=2 * 4096 * 4)
    for number, group in ((0, TWO), (1, ALONE)):
        other = question(profile, asked.budgets, parse_pin(pin.format(number)), group=group)
        assert_says.refused(lambda problem: problem.options, other.problem())


def test_part_of_a_chunk_on_disk_is_for_frozen_parameters_of_one_device(
    assert_says: Speaker,
) -> None:
    whole = small(gpu(disk_gb=1000), blocks=2)
    frozen = unit_frozen(whole.units[2])
    profile = replace(whole, units=(*whole.units[:2], frozen, *whole.units[3:]))
    pin = "layers.{}: offload to host with 3/16 on disk"
    asked = question(profile, within(profile, 10**12), parse_pin(pin.format(1)))
    [option] = asked.problem().options[2].states
    assert option.decision == Placement(tier="host", on_disk=3)
    on_disk = [fetch.bytes for fetch in option.from_disk]
    assert on_disk == pytest.approx([frozen.parameter_bytes * 3 / 16] * 2, abs=PAGE_BYTES)
    assert [fetch.bytes for fetch in option.fetches] == [
        frozen.parameter_bytes - size for size in on_disk
    ]
    assert_says.refused(
        lambda: question(profile, asked.budgets, parse_pin(pin.format(0))).problem().options
    )
    joined_up = replace(profile, hardware=joined(gpu(disk_gb=1000)))
    assert_says.refused(
        lambda: question(joined_up, asked.budgets, *asked.pins, group=TWO).problem().options
    )


def test_frozen_weights_that_host_memory_lacks_room_for_come_from_disk_beside_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole chunks on the disk would keep the step waiting for each of them."""
    whole = small(gpu(disk_gb=1000), blocks=12, block_parameters=400 * MB)
    blocks = [unit_frozen(unit) for unit in whole.units[1:-1]]
    profile = replace(whole, units=(whole.units[0], *blocks, whole.units[-1]))
    weights = sum(unit.parameter_bytes for unit in blocks)
    budgets = replace(within(profile, 2000 * MB), host=round(0.95 * weights))
    part = solve_problem(question(profile, budgets).problem(), effort=Effort())
    monkeypatch.setattr(options, "ON_DISK", ())
    apart = solve_problem(question(profile, budgets).problem(), effort=Effort())
    assert isinstance(part, Solved) and isinstance(apart, Solved)
    assert any(unit.states.on_disk for unit in part.plan.units)
    assert part.plan.prediction.step_seconds <= 0.9 * apart.plan.prediction.step_seconds


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("seed", range(5))
def test_parts_on_disk_make_no_plan_of_a_small_model_slower(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    whole = small(gpu(disk_gb=1000), blocks=rng.randint(2, 6), block_parameters=200 * MB)
    units = [unit_frozen(unit) if rng.random() < 0.5 else unit for unit in whole.units]
    profile = replace(whole, units=tuple(units))
    weights = sum(unit.parameter_bytes for unit in units)
    device, host = round(rng.uniform(3_000, 5_000) * MB), round(rng.uniform(0.7, 1.3) * weights)
    budgets = replace(within(profile, device), host=host)
    steps: list[float] = []
    for parts in (ON_DISK, ()):
        monkeypatch.setattr(options, "ON_DISK", parts)
        solved = solve_problem(question(profile, budgets).problem(), effort=Effort())
        assert isinstance(solved, Solved)
        steps.append(solved.plan.prediction.step_seconds)
    assert steps[0] <= steps[1]


def test_links_share_the_memory_of_their_host() -> None:
    profile = small(joined(gpu(pcie=20e9), devices_per_node=8), blocks=1)
    rates = load_hardware("rtx-4090").rates
    assert rates is not None
    rates = replace(rates, host_bandwidth_bytes_per_s=100e9)
    profile = replace(profile, hardware=replace(profile.hardware, rates=rates))
    for devices, speed in ((1, 20e9), (4, 20e9), (8, 12.5e9)):
        group = DeviceGroup(num_devices=devices)
        own = profile_of_rank(profile, group)
        link = own.hardware.tier("host").link
        assert (link.read_bytes_per_s, link.write_bytes_per_s) == (speed, speed)
        assert profile_of_rank(own, group) == own


# --- collectives ----------------------------------------------------------------------------------

HOP = 1e-5
PART = 6_000 * MB  # of 8,000 MB, what comes from others of four
ACROSS = 2 * (8_000 * MB / 4) / 2 * 4 / 1e9 + 2 * 2 * HOP  # four rings share what joins nodes


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all-gather", FOUR, PART / 10e9 + 3 * HOP),
        ("reduce-scatter", FOUR, PART / 8e9 + 3 * HOP),
        ("all-reduce", FOUR, PART / 8e9 + PART / 10e9 + 6 * HOP),
        ("all-gather", EIGHT, 7_000 * MB / 1e9 + 8 * HOP),  # what joins nodes binds
        ("all-gather", replace(EIGHT, num_replicas=2), PART / 10e9 + 3 * HOP),
        ("reduce-scatter", replace(EIGHT, num_replicas=2), PART / 8e9 + 3 * HOP + ACROSS),
    ],
)
def test_a_collective_takes_what_comes_from_others_and_its_hops(
    kind: str, group: DeviceGroup, seconds: float
) -> None:
    hardware = joined(gpu(), network=10e9, across=1e9)  # sums at 8e9 within a node
    settings = StepSettings(piece_bytes=1, group=group)
    found = {
        one: collective_seconds(one, 8_000 * MB, hardware, settings)
        for one in ("all-gather", "reduce-scatter", "all-reduce")
    }
    assert found[kind] == pytest.approx(seconds)


def test_a_link_and_collectives_share_pcie() -> None:
    """A chunk below the devices: what is fetched for one gather overlaps with the one before."""
    seconds = []
    for share in (1.0, 0.5):
        profile = small(joined(gpu(), network=20e9, link_share=share), blocks=3)
        problem = question(profile, within(profile, 10**12), group=TWO).problem()
        on_host = Placement(tier="host")
        choice = tuple((0, options.numbers[1].get(on_host, 0)) for options in problem.options)
        found = Evaluator(problem).best_schedule(choice)
        assert found
        seconds.append(found.seconds)
    assert seconds[0] < seconds[1] < 2 * seconds[0]


# --- the number of replicas -----------------------------------------------------------------------


class Case(NamedTuple):
    """Two nodes of four devices: the speed of what joins them, memory, and the best number."""

    within: float
    across: float
    device: int
    below: int
    replicas: int


FROZEN = "weights that are gathered and never summed"
CASES = {
    # A copy in each node serves its devices: no more replicas are needed for it.
    FROZEN: Case(1e9, 1e8, 450 * MB, 10**12, 1),
    "slow across nodes": Case(1e11, 1e8, 1200 * MB, 1200 * MB, 2),
    "little memory": Case(1e11, 5e10, 700 * MB, 300 * MB, 1),
}


def asked_of(name: str) -> Question:
    case = CASES[name]
    hardware = joined(gpu(), network=case.within, across=case.across)
    profile = small(hardware, blocks=3, kept=100 * MB, host_speed=1e11, device_speed=1e15)
    if name == FROZEN:
        profile = replace(profile, units=tuple(map(unit_frozen, profile.units)))
    budgets = replace(within(profile, case.device, case.below), disk=0)
    return question(profile, budgets, replicas=EIGHT.replica_counts, group=EIGHT)


@cache
def chosen(name: str) -> Solved:
    asked = asked_of(name)
    return solved(solve_any(asked.problems(), effort=Effort(gap_target=GAP)))


@pytest.mark.parametrize(
    ("group", "counts"),
    [
        (ALONE, (1,)),
        (DeviceGroup(num_devices=6), (1, 2, 3, 6)),
        (EIGHT, (1, 2, 4, 8)),
        (DeviceGroup(num_devices=12, num_nodes=2), (1, 2, 4, 6, 12)),
        (DeviceGroup(num_devices=3, num_nodes=3), (1, 3)),
    ],
)
def test_groups_have_whole_nodes_or_equal_parts_of_one(
    group: DeviceGroup, counts: tuple[int, ...]
) -> None:
    assert group.replica_counts == counts


@pytest.mark.nightly("weights that are gathered and never summed")
@pytest.mark.parametrize("name", thinned(tuple(CASES)))
def test_no_number_of_replicas_is_faster_than_the_chosen_one(name: str) -> None:
    asked, best = asked_of(name), chosen(name)
    assert best.plan.group.num_replicas == CASES[name].replicas
    prediction = best.plan.prediction
    assert prediction.lower_bound_seconds <= prediction.step_seconds
    for problem, told in zip(asked.problems(), best.replicas, strict=True):
        alone = solve_problem(problem, effort=Effort(gap_target=GAP))
        assert told.number == problem.settings.group.num_replicas
        if isinstance(alone, Infeasible):  # fractions of decisions may fit all the same
            continue
        seconds = alone.plan.prediction.step_seconds
        assert prediction.step_seconds <= seconds * (1 + GAP)
        assert told.lower_bound_seconds is not None
        assert prediction.lower_bound_seconds <= told.lower_bound_seconds <= seconds


def test_what_other_numbers_would_take_is_told() -> None:
    """And those that a bound rules out are not planned for."""
    best = chosen("slow across nodes")
    one, two, *_ = best.replicas
    assert two.step_seconds == best.plan.prediction.step_seconds
    assert one.step_seconds is None
    assert (one.lower_bound_seconds or 0) > best.plan.prediction.step_seconds
    printed = Console(file=StringIO(), width=200)
    printed.print(solved_text(best, asked_of("slow across nodes").profile, Path("plan.yaml")))
    assert isinstance(printed.file, StringIO)
    lines = printed.file.getvalue().splitlines()
    start = lines.index("on 8 devices in 2 nodes, 2 replicas, each with batches of its own")
    told = r"other numbers of replicas: 1: at least 5\.60 s, 4: at least 4\.80 s, 8: no plan fits"
    assert re.fullmatch(told, lines[start + 1])
    assert [one.number for one in solved_json(best)["replicas"]] == [1, 2, 4, 8]


def test_where_nothing_fits_the_fewest_replicas_say_what_is_missing() -> None:
    asked = replace(asked_of("little memory"), budgets=Budgets(device=0, host=0, disk=0))
    found = infeasible(solve_any(asked.problems(), effort=Effort()))
    assert found == solve_problem(asked.problem(), effort=Effort())


@pytest.mark.nightly
def test_other_questions_choose_replicas_too() -> None:
    """A given number is kept; the least memory and a front may have any."""
    asked, fastest = asked_of("slow across nodes"), chosen("slow across nodes").plan.prediction
    given = solved(
        ask(replace(asked, replicas=()), Objective(), effort=Effort(gap_target=GAP)).solved
    )
    assert (given.plan.group.num_replicas, given.replicas) == (1, ())
    effort = Effort(gap_target=0.05)
    answer = ask(asked, Objective(max_slowdown=1.5), effort=effort)
    slower, least = solved(answer.solved).plan, answer.least_memory
    assert least
    assert slower.prediction.peak_bytes.device < fastest.peak_bytes.device
    assert slower.prediction.step_seconds <= least.limit_seconds
    assert least.lower_bound_bytes <= slower.budgets.device
    answer = ask(asked, Objective(pareto_points=3), effort=effort)
    assert solved(answer.solved).plan.group.num_replicas == 2
    seconds = [point.solved.plan.prediction.step_seconds for point in answer.front]
    assert seconds and seconds == sorted(seconds, reverse=True)


@pytest.mark.nightly
def test_the_largest_batch_is_that_of_the_fewest_replicas() -> None:
    asked = asked_of("little memory")
    few = replace(asked, replicas=(1,))
    found = {largest_of(one, "batch-size") for one in (asked, few)}
    assert len(found) == 1
    assert None not in found


@pytest.mark.nightly(but=("0", "3", "6"))
@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_is_faster_than_the_lanes(seed: int) -> None:
    rng = random.Random(seed)
    profile, group = on_several(random_profile(rng, max_blocks=4), rng)
    device = rng.choice([1, 3, 20]) * 500 * MB
    budgets = replace(within(profile, device, below=10**11), disk=10**12)
    micro_batches = rng.choice([1, 3])
    problem = question(profile, budgets, group=group, micro_batches=micro_batches).problem()
    bound, evaluator = least_lane_seconds(problem), Evaluator(problem)
    evaluation = [evaluator.evaluate(choice) for choice in plain_choices(problem)]
    seconds = [one.seconds for one in evaluation if one]
    assert not seconds or (bound is not None and 0 < bound <= min(seconds))


# --- reductions -----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("updates", get_args(Updates))
def test_by_leave_every_micro_batch_is_reduced_where_whole_gradients_do_not_fit(
    updates: Updates,
) -> None:
    profile = small(joined(gpu()), blocks=8)
    whole = question(profile, within(profile, 10**12), group=FOUR, micro_batches=3)
    whole = replace(whole, settings=replace(whole.settings, updates=updates))
    shards = replace(whole, allow=(ROUNDING,)).adding_shards()
    assert shards is not None
    least = [least_bytes(one.problem()) for one in (whole, shards)]
    gradients = sum(unit.gradient_bytes for unit in profile.units)
    assert least[0] - least[1] > gradients / 2
    for device, adds in ((least[0] * 21 // 20, False), ((least[0] + least[1]) // 2, True)):
        asked = replace(whole, budgets=within(profile, device))
        allowed = ask(replace(asked, allow=(ROUNDING,)), Objective(), effort=Effort())
        found = solved(allowed.solved)
        assert found.plan.settings.adds_shards == adds
        assert (found.plan.allowed == (ROUNDING,)) == adds
        assert found.plan.prediction.peak_bytes.device <= device
        exact = ask(asked, Objective(), effort=Effort())
        assert (exact.solved is None) == adds
        if exact.infeasible is not None:
            assert SHARDED in exact.infeasible.advice
            numbers = [
                fastest_batch([replace(asked, allow=allow)], effort=Effort())
                for allow in ((), (ROUNDING,))
            ]
            assert numbers == [None, 0]
    one = replace(whole, settings=replace(whole.settings, micro_batches=1), allow=(ROUNDING,))
    assert one.adding_shards() is None


@pytest.mark.parametrize("micro_batches", [2, 5])
def test_a_shard_is_added_at_the_speed_of_the_device_s_memory(micro_batches: int) -> None:
    rates = load_hardware("h100-sxm").rates
    assert rates
    seconds: dict[float, dict[str, float]] = {}
    for speed in (rates.memory_bytes_per_s, 1e8):  # such that collectives bind
        machine = replace(joined(gpu()), rates=replace(rates, memory_bytes_per_s=speed))
        profile = small(machine, blocks=4)
        asked = question(profile, within(profile, 10**12), group=FOUR, micro_batches=micro_batches)
        settings = replace(asked.settings, reductions="in every micro-batch")
        for one in (asked, replace(asked, settings=settings)):
            problem = one.problem()
            sharded = Placement(tier="device")
            choice = tuple((0, options.numbers[1].get(sharded, 0)) for options in problem.options)
            found = Evaluator(problem).best_schedule(choice)
            bound = least_lane_seconds(problem)
            assert found and bound and bound <= found.seconds
            seconds.setdefault(speed, {})[one.settings.reductions] = found.seconds
    fast, slow = seconds.values()
    assert fast["in the last micro-batch"] == slow["in the last micro-batch"]
    own = sum(unit.gradient_bytes for unit in profile.units) / 4
    each = 3 * own / (1e8 * rates.memory_efficiency)
    longer = slow["in every micro-batch"] - fast["in every micro-batch"]
    assert 0.9 < longer / (micro_batches * each) <= 1  # a little is beside compute


@pytest.mark.nightly
def test_others_that_add_shards_are_compared_with_plans_that_may_do_so() -> None:
    profile = small(joined(gpu()), blocks=8)
    whole = question(profile, within(profile, 10**12), group=FOUR, micro_batches=3)

    def fsdp(device: int) -> Alternative:
        problems = replace(whole, budgets=within(profile, device)).problems()
        return next(one for one in alternatives(problems) if one.name == "FSDP2")

    roomy = fsdp(10**12)
    assert roomy.step_seconds and not roomy.adds_shards  # the last reduction alone is faster
    most = roomy.peak_bytes.on_device
    tight = next(one for n in range(1, 40) if (one := fsdp(most - n * most // 40)).adds_shards)
    assert tight.step_seconds
    assert tight.step_seconds > roomy.step_seconds
    device = tight.peak_bytes.on_device
    asked = replace(whole, budgets=within(profile, device), allow=(ROUNDING,))
    found = fit(asked, effort=Effort(gap_target=GAP), compare=True)
    seconds = [one.step_seconds for one in found.alternatives if one.step_seconds]
    assert found.step_seconds and found.step_seconds <= min(seconds) * (1 + GAP)


def test_the_largest_batch_is_that_with_sums_in_shards_by_leave() -> None:
    profile = small(joined(gpu()), blocks=8)
    whole = question(profile, within(profile, 10**12), group=FOUR, micro_batches=3)
    whole = replace(whole, budgets=within(profile, least_bytes(whole.problem()) * 21 // 20))
    allowed = replace(whole, allow=(ROUNDING,))
    exact, rounded = (largest_of(one, "batch-size") for one in (whole, allowed))
    assert exact and rounded
    assert exact < rounded
    larger = replace(allowed, profile=in_proportion(profile, "batch-size", rounded))
    answer = ask(larger, Objective(), effort=Effort())
    assert solved(answer.solved).plan.settings.adds_shards


@pytest.mark.nightly
def test_a_plan_holds_the_same_bytes_by_a_profile_with_forms_that_it_has_no_leave_for() -> None:
    """`check` computes them anew from the profile as it was recorded."""
    profile = small(joined(gpu()), blocks=4)

    def with_tiles(unit: Unit) -> Unit:
        least = min(unit.forms, key=lambda cost: cost.backward_peak_bytes)
        tiled = replace(least, form="tiled", kept_bytes=0, backward_peak_bytes=0, backward_s=9.0)
        return replace(unit, forms=(*unit.forms, tiled)) if unit.kind == "block" else unit

    units = tuple(map(with_tiles, profile.units))
    profile = replace(profile, units=units, allowed=(ROUNDING,))
    least = least_bytes(question(profile, within(profile, 10**12), group=FOUR).problem())
    for allow in ((), (ROUNDING,)):
        asked = question(profile, within(profile, least * 11 // 10), group=FOUR)
        found = solved(ask(replace(asked, allow=allow), Objective(), effort=Effort()).solved)
        assert found.plan.allowed == ()
        again = program_of(found.plan, profile_for(profile, found.plan))
        assert peak_bytes(again) == found.plan.prediction.peak_bytes
