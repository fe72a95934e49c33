"""Planning for several devices: against exhaustive search, and laws; collectives' seconds."""

import itertools
import random
from dataclasses import replace

import networkx as nx
import pytest

from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.objectives import Objective, Question, ask
from protrain_plan.planning.questions.planner import plan, solve_problem
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.planning.search.scheduling import DEPTHS, WINDOWS, ScheduleRule
from protrain_plan.presentation.report.step import simulated
from protrain_plan.simulation.critical_path import waits_of
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.group import collective_seconds, group_on, profile_of_rank
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records import dumps_plan, loads_plan, states_text
from protrain_runtime.contract.records.hardware import Contention, Hardware
from protrain_runtime.contract.records.plan import (
    ALONE,
    Budgets,
    DeviceGroup,
    Keep,
    Offload,
    Persistent,
    StepSettings,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import MB, cpu, decoder, gpu, joined, on_several, random_profile
from tests.support.thinning import thinned

TWO = DeviceGroup(num_devices=2)
EVERY_RULE = tuple(ScheduleRule(depth, window) for depth in DEPTHS for window in WINDOWS)
SLOW = Contention(compute=0.9, lane=0.9)


def small(
    hardware: Hardware,
    *,
    blocks: int,
    tied: bool = False,
    seconds: float = 0.02,
    device_speed: float = 4e10,
) -> Profile:
    return decoder(
        hardware,
        blocks=blocks,
        block_parameters=40 * MB,
        embedding_parameters=20 * MB,
        kept=200 * MB,
        seconds=seconds,
        tied=tied,
        host_speed=1e9,
        device_speed=device_speed,
    )


def budget(profile: Profile, device: int, below: int = 10**12) -> Budgets:
    context = profile.hardware.device.context_bytes
    return Budgets(device=device + context, host=below, disk=below)


def made(profile: Profile, budgets: Budgets, group: DeviceGroup) -> Solved:
    answer = plan(
        profile,
        budgets,
        effort=Effort(gap_target=0.001),
        settings=replace(OVERLAPPING, group=group),
    )
    assert isinstance(answer, Solved)
    return answer


# The planner

CASES = {
    "gpu": small(joined(gpu()), blocks=1),
    "gpu, slow network, tied": small(joined(gpu(), network=1e9), blocks=1, tied=True),
    "gpu, PCIe for all": small(joined(gpu(), link_share=0.5, contention=SLOW), blocks=1),
    "cpu": small(joined(cpu(), network=5e8), blocks=1),
}


@pytest.mark.parametrize(
    ("name", "device"), thinned(tuple(CASES), [450 * MB, 800 * MB, 1300 * MB], every=6)
)
def test_planner_matches_exhaustive_search(name: str, device: int) -> None:
    profile = CASES[name]
    budgets = budget(profile, device)
    problem = Problem.of(
        profile, budgets, settings=replace(OVERLAPPING, piece_bytes=64 << 20, group=TWO)
    )
    evaluator = Evaluator(problem)
    open_to_units = [
        list(itertools.product(range(len(options.activations)), range(len(options.states))))
        for options in problem.options
    ]
    # Everything with one rule, and what is near the best with every one.
    rough = [
        (found.seconds, choice)
        for choice in itertools.product(*open_to_units)
        if (found := evaluator.evaluate(choice, rules=EVERY_RULE[-2:]))
    ]
    near = sorted(rough)[:200]
    evaluation = [evaluator.evaluate(choice, rules=EVERY_RULE[::3]) for _, choice in near]
    best = min((found.seconds for found in evaluation if found), default=None)
    answer = plan(profile, budgets, settings=replace(OVERLAPPING, piece_bytes=64 << 20, group=TWO))
    if best is None:
        assert isinstance(answer, Infeasible)
        return
    assert isinstance(answer, Solved)
    prediction = answer.plan.prediction
    assert prediction.lower_bound_seconds <= best * (1 + 1e-9)
    assert prediction.step_seconds <= best * 1.005


@pytest.mark.parametrize("name", CASES)
def test_a_plan_for_several_devices_keeps_its_promises(name: str) -> None:
    profile = CASES[name]
    solved = made(profile, budget(profile, 700 * MB), DeviceGroup(num_devices=4))
    assert loads_plan(dumps_plan(solved.plan)) == solved.plan
    assert solved.plan.group.num_devices == 4
    step = simulated(solved.plan, profile)
    prediction = solved.plan.prediction
    assert step.timeline.step_seconds == prediction.step_seconds
    slots = device_bytes(step.program)
    assert max(slot.total for slot in slots) == prediction.peak_bytes.device <= 700 * MB
    for tier in step.profile.hardware.tiers:
        used = step.program.tier_bytes(tier.name)
        assert used == getattr(prediction.peak_bytes, tier.name)


@pytest.mark.parametrize("seed", thinned(range(3, 8), every=5))
def test_every_plan_is_a_valid_programme_within_its_budgets(seed: int) -> None:
    rng = random.Random(seed)
    profile, group = on_several(random_profile(rng, max_blocks=4), rng)
    free = Problem.of(profile, budget(profile, 10**12), settings=replace(OVERLAPPING, group=group))
    lean = min_memory(free)
    assert lean
    plain = max(free.static_bytes(tuple((0, 0) for _ in free.options)))
    context = free.profile.hardware.device.context_bytes
    device = context + lean.bytes + int(rng.random() * max(0, plain - lean.bytes))
    budgets = Budgets(device=device, host=10**12, disk=10**12)
    problem = Problem.of(profile, budgets, settings=replace(OVERLAPPING, group=group))
    answer = solve_problem(problem, budgets)
    assert isinstance(answer, Solved)
    program = problem.program(answer.plan.units)
    assert nx.is_directed_acyclic_graph(waits_of(program))
    slots = device_bytes(program)
    assert max(slot.total for slot in slots) + context <= device
    prediction = answer.plan.prediction
    assert prediction.lower_bound_seconds <= prediction.step_seconds
    # Whatever a plain policy reaches is reached.
    for name in BASELINES:
        found = baseline(name, problem, Evaluator(problem))
        assert found is None or prediction.step_seconds <= found.seconds


def test_more_devices_never_need_more_memory_of_each() -> None:
    """With states on the devices alone; below them, the buffers of sums are more than nothing."""
    hardware = replace(joined(gpu(), devices_per_node=64), tiers=())
    profile = small(hardware, blocks=6)
    needed = []
    for count in (1, 2, 4, 8, 64):
        group = DeviceGroup(num_devices=count)
        lean = min_memory(
            Problem.of(profile, budget(profile, 10**12), settings=replace(OVERLAPPING, group=group))
        )
        assert lean
        needed.append(lean.bytes)
    assert needed == sorted(needed, reverse=True)
    assert needed[-1] < needed[0] / 3


def test_a_faster_network_is_never_slower() -> None:
    before = float("inf")
    for network in (2e8, 1e9, 1e10, 1e12):
        profile = small(joined(gpu(), network=network), blocks=4)
        solved = made(profile, budget(profile, 900 * MB), DeviceGroup(num_devices=4))
        assert solved.plan.prediction.step_seconds <= before * 1.001
        before = solved.plan.prediction.step_seconds


def test_what_fits_a_device_is_replicated_for_many_micro_batches() -> None:
    """Sums are taken once for all of them, shards are gathered for each."""
    profile = small(joined(gpu(), network=2e9), blocks=3, seconds=1e-3, device_speed=1e15)
    budgets = budget(profile, 20_000 * MB)
    problem = Problem.of(
        profile, budgets, settings=replace(OVERLAPPING, micro_batches=8, group=TWO)
    )
    solved = solve_problem(problem, budgets, effort=Effort(gap_target=0.001))
    assert isinstance(solved, Solved)
    assert {unit.states for unit in solved.plan.units} == {Persistent()}
    assert {unit.activations for unit in solved.plan.units} == {Keep()}


def test_a_fast_network_shards_what_one_device_would_offload() -> None:
    hardware = joined(gpu(pcie=5e9), network=3e11, devices_per_node=8)
    profile = small(hardware, blocks=6, device_speed=1e15)
    budgets = budget(profile, 1500 * MB)
    alone = made(profile, budgets, ALONE)
    assert any(unit.states != Persistent() for unit in alone.plan.units)
    eight = made(profile, budgets, DeviceGroup(num_devices=8))
    homes = {states_text(unit.states) for unit in eight.plan.units}
    assert homes & {"shard", "shard and keep gathered"}
    assert eight.plan.prediction.step_seconds < alone.plan.prediction.step_seconds


def test_one_device_gets_the_same_plan_whatever_would_join_it() -> None:
    plain = small(gpu(), blocks=6)
    beside = replace(plain, hardware=joined(plain.hardware))
    budgets = budget(plain, 900 * MB)
    one, other = (made(profile, budgets, ALONE).plan for profile in (plain, beside))
    assert replace(other, profile_fingerprint=one.profile_fingerprint) == one


def test_replicas_of_shards_are_a_plan_too() -> None:
    profile = small(joined(gpu(), network=1e11, across=1e9), blocks=4)
    budgets = budget(profile, 1200 * MB)
    spread = DeviceGroup(num_devices=8, num_nodes=2)
    whole = made(profile, budgets, spread)
    hybrid = made(profile, budgets, replace(spread, num_replicas=2))
    assert (hybrid.plan.group.num_replicas, hybrid.plan.group.num_nodes) == (2, 2)
    # What is gathered stays in a node then, where the network is a hundred times as fast.
    assert hybrid.plan.prediction.step_seconds < whole.plan.prediction.step_seconds


def test_questions_are_asked_of_several_devices() -> None:
    profile = small(joined(gpu(), library_bytes=50 * MB), blocks=4)
    question = Question(
        profile=profile, budgets=budget(profile, 900 * MB), settings=replace(OVERLAPPING, group=TWO)
    )
    answer = ask(question, Objective(maximize="batch-size"), effort=Effort())
    assert answer.solved and answer.largest
    assert answer.solved.plan.group.num_devices == 2
    # The library's memory stands beside the context.
    context = profile.hardware.device.context_bytes + 50 * MB
    assert answer.solved.plan.prediction.peak_bytes.context == context


def test_a_shard_cannot_be_pinned_on_one_device() -> None:
    profile = small(joined(gpu()), blocks=1)
    budgets = budget(profile, 10**12)
    pins = [parse_pin("layers.0: shard")]
    [option] = (
        Problem.of(profile, budgets, pins=pins, settings=replace(OVERLAPPING, group=TWO))
        .options[1]
        .states
    )
    assert option.decision == Offload(tier="device")
    with pytest.raises(ProtrainError) as caught:
        _ = Problem.of(profile, budgets, pins=pins).options
    assert str(caught.value).startswith(
        "--pin: layers.0: layers.0 cannot take 'shard': that is for several devices, which share"
        " states\n  fix: it can take "
    )


# A rank's part of a machine


def test_a_node_s_ranks_share_its_memory_its_disk_and_its_processors() -> None:
    hardware = joined(gpu(disk_gb=1000), below="of the node", library_bytes=7)
    profile = small(hardware, blocks=1)
    own = profile_of_rank(profile, DeviceGroup(num_devices=8, num_nodes=2))
    host, disk = own.hardware.tier("host"), own.hardware.tier("disk")
    assert host.capacity_bytes == hardware.tier("host").capacity_bytes // 4
    assert host.link == hardware.tier("host").link
    assert disk.capacity_bytes == hardware.tier("disk").capacity_bytes // 4
    assert disk.link.read_bytes_per_s == hardware.tier("disk").link.read_bytes_per_s / 4
    assert own.optimizer.host_parameters_per_s == profile.optimizer.host_parameters_per_s / 4
    assert own.hardware.device.context_bytes == hardware.device.context_bytes + 7
    assert profile_of_rank(own, DeviceGroup(num_devices=8, num_nodes=2)) == own
    assert profile_of_rank(profile, ALONE) is profile


def test_devices_with_tiers_of_their_own_keep_them() -> None:
    profile = small(joined(gpu(), below="of each device"), blocks=1)
    own = profile_of_rank(profile, TWO)
    assert own.hardware.tiers == profile.hardware.tiers
    assert own.optimizer == profile.optimizer


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
    assert group_on(hardware, 64, num_replicas=8) == DeviceGroup(
        num_devices=64, num_nodes=8, num_replicas=8
    )
    assert str(group_on(hardware, 64, num_replicas=8)) == "64 devices in 8 nodes, 8 replicas"


@pytest.mark.parametrize(
    ("hardware", "devices", "nodes", "replicas", "message"),
    [
        (
            gpu(),
            2,
            None,
            1,
            "--num-devices: gpu does not say what joins its devices\n"
            "  fix: add interconnect: to its hardware (devices_per_node, and intra_node: of"
            " gather_bytes_per_s, reduce_bytes_per_s and latency_s), take another machine's"
            " (protrain profile --interconnect MACHINE), or measure it:"
            " torchrun --nproc-per-node N --no-python protrain hardware probe",
        ),
        (joined(gpu()), 4, 3, 1, "--nodes: 4 devices are no equal parts of 3 nodes"),
        (joined(gpu()), 4, None, 3, "--replicas: 4 devices are no equal parts of 3 replicas"),
        (
            joined(gpu()),
            16,
            2,
            1,
            "--nodes: gpu has 4 devices in a node, not 8\n  fix: --nodes 4",
        ),
        (
            joined(gpu(), across=None),
            8,
            None,
            1,
            "--num-devices: gpu does not say what joins its nodes\n"
            "  fix: add inter_node: to its interconnect:, or measure it with protrain hardware"
            " probe",
        ),
    ],
)
def test_devices_that_cannot_train_together_are_one_error(
    hardware: Hardware, devices: int, nodes: int | None, replicas: int, message: str
) -> None:
    with pytest.raises(ProtrainError) as caught:
        group_on(hardware, devices, num_nodes=nodes, num_replicas=replicas)
    assert str(caught.value) == message


# Collectives


def settings(group: DeviceGroup) -> StepSettings:
    return StepSettings(piece_bytes=1, group=group)


HOP = 1e-5


def test_a_collective_takes_what_comes_from_others_and_its_hops() -> None:
    hardware = joined(gpu(), network=10e9, across=1e9)  # sums at 8e9 within a node
    four = settings(DeviceGroup(num_devices=4))
    size = 8_000 * MB
    part = size * 3 / 4
    assert collective_seconds("all-gather", size, hardware, four) == part / 10e9 + 3 * HOP
    assert collective_seconds("reduce-scatter", size, hardware, four) == part / 8e9 + 3 * HOP
    assert collective_seconds("all-reduce", size, hardware, four) == pytest.approx(
        part / 8e9 + part / 10e9 + 6 * HOP
    )


def test_across_nodes_what_joins_them_binds() -> None:
    hardware = joined(gpu(), network=10e9, across=1e9)
    eight = settings(DeviceGroup(num_devices=8, num_nodes=2))
    seconds = collective_seconds("all-gather", 800 * MB, hardware, eight)
    assert seconds == pytest.approx(700 * MB / 1e9 + 8 * HOP)


def test_replicas_gather_in_their_nodes_and_sum_shards_across() -> None:
    hardware = joined(gpu(), network=10e9, across=1e9)
    hybrid = settings(DeviceGroup(num_devices=8, num_nodes=2, num_replicas=2))
    size = 800 * MB
    gathered = collective_seconds("all-gather", size, hardware, hybrid)
    assert gathered == pytest.approx(600 * MB / 10e9 + 3 * HOP)
    # Four rings, one for each shard, share what joins the nodes.
    across = 2 * (size / 4) / 2 * 4 / 1e9 + 2 * 2 * HOP
    scattered = collective_seconds("reduce-scatter", size, hardware, hybrid)
    assert scattered == pytest.approx(600 * MB / 8e9 + 3 * HOP + across)


def test_a_link_and_collectives_share_pcie() -> None:
    """A chunk below the devices: what is fetched for one gather overlaps with the one before."""
    profile = small(joined(gpu(), network=20e9), blocks=3)
    shared = replace(profile, hardware=joined(gpu(), network=20e9, link_share=0.5))
    problem = Problem.of(profile, budget(profile, 10**12), settings=replace(OVERLAPPING, group=TWO))
    choice = tuple(
        (0, next(k for k, o in enumerate(options.states) if o.decision == Offload(tier="host")))
        if options.unit.used_by
        else (0, 0)
        for options in problem.options
    )
    alone = Evaluator(problem).best_schedule(choice)
    beside = Evaluator(
        Problem.of(shared, budget(profile, 10**12), settings=replace(OVERLAPPING, group=TWO))
    ).best_schedule(choice)
    assert alone and beside
    assert alone.seconds < beside.seconds < 2 * alone.seconds
