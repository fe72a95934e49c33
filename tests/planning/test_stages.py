"""Stages: cuts, bounds and plans against exhaustive search, orders against PyTorch's own."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import accumulate, combinations, count, pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.planning.model.problem import Problem
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.evaluation import PACES, Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.planning.stages.answer import (
    GAP,
    StagesQuestion,
    plan_stages,
    planned_again,
    searched,
    stages_of,
)
from protrain_plan.planning.stages.cuts import best_cuts, handed_bytes, possible_cuts
from protrain_plan.planning.stages.cycles import Bounds, Pipeline
from protrain_plan.planning.stages.pipelines import pipelined, planned, stage_seconds
from protrain_plan.planning.stages.schedule import Action, StageSeconds, actions, simulated
from protrain_plan.planning.stages.shapes import Shape, hop_seconds, shapes
from protrain_plan.profiling.measured import measure_model
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.records.forms import ROUNDING
from protrain_runtime.contract.records.hardware import Collectives, Interconnect
from protrain_runtime.contract.records.plan import (
    KEEP,
    RECOMPUTE,
    Activations,
    Budgets,
    DeviceGroup,
    StepSettings,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support import random_models
from tests.support.hostile_models import WORKLOAD
from tests.support.planning_cases import MB, decoder, gpu, unit

TWO = DeviceGroup(num_devices=2)


def small(rng: random.Random, num_units: int = 4, *, alike: bool = False) -> Profile:
    """A few units of random sizes, or all of one, on a card beside others."""
    sizes = [rng.choice((1, 2, 4)) for _ in range(num_units)]
    sizes = sizes[:1] * num_units if alike else sizes
    units = [
        unit(
            f"block.{number}",
            parameters=size * 10 * MB,
            kept=size * 80 * MB,
            seconds=size * 0.01,
            inputs=8 * MB,
            used_by=(number,),
        )
        for number, size in enumerate(sizes)
    ]
    speeds = Collectives(gather_bytes_per_s=20e9, reduce_bytes_per_s=20e9, latency_s=1e-6)
    joined = Interconnect(devices_per_node=8, intra_node=speeds, below="of each device")
    machine = replace(gpu(host_gb=4), interconnect=joined)
    return replace(decoder(machine, blocks=1), units=tuple(units))


def pipeline(profile: Profile, device: int, shape: Shape, host: int = 4 * 10**9) -> Pipeline:
    budgets = Budgets(device=device, host=host, disk=0)
    whole = DeviceGroup(num_devices=shape.stages * shape.group.num_devices)
    return Pipeline(profile, budgets, StepSettings(group=whole), shape)


def asked(
    profile: Profile, budgets: Budgets, devices: int, global_batch: int, **own: Any
) -> StagesQuestion:
    settings = StepSettings(group=DeviceGroup(num_devices=devices))
    return StagesQuestion(
        profiles={1: profile}, budgets=budgets, settings=settings, global_batch=global_batch, **own
    )


def every_cut(units: int, p: int) -> list[tuple[int, ...]]:
    return [(*ends, units) for ends in combinations(range(1, units), p - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_cuts_match_all_cuts(seed: int) -> None:
    rng = random.Random(seed)
    units, p = rng.randint(4, 9), rng.randint(1, 4)
    work = [rng.choice((1, 2, 5)) for _ in range(units)]
    weight = [rng.choice((1.0, 1.3, 2.0)) for _ in range(p)]

    def bound(s: int, first: int, end: int) -> float:
        return weight[s] * sum(work[first:end])

    every = [
        max(bound(s, i, j) for s, (i, j) in enumerate(pairwise((0, *ends))))
        for ends in every_cut(units, p)
    ]
    found = best_cuts(bound, units, range(1, units), p)
    assert found.seconds == min(every)
    assert max(bound(*run) for run in found.runs) == found.seconds
    assert best_cuts(bound, units, range(1, units), p, min(every)) == (min(every), ())


def stage_choices(problem: Problem, sizes: Sequence[int] = ()) -> list[StageSeconds]:
    """The seconds of every choice of decisions that fits, as its schedule is simulated.

    `sizes` are the units of its chunks.
    """
    evaluator, found = Evaluator(problem), []
    options = [
        list(product(range(len(one.activations)), range(len(one.states))))
        for one in problem.options
    ]
    for choice in product(*options):
        if problem.fits(choice) and (one := evaluator.evaluate(choice, paces=PACES)):
            programs = [problem.program(one.plans, updating=last) for last in (False, True)]
            assert peak_bytes(programs[1]).device <= problem.device
            found.append(stage_seconds(programs[0], programs[1], sizes or [problem.count]))
    return found


def few_decisions(problem: Problem) -> Problem:
    """Keep, recompute or swap to host memory; states that stay, or are streamed to be updated."""
    left = []
    for options in problem.options:
        kinds = (KEEP, RECOMPUTE, Activations(tier="host"))
        activations = [n for n, one in enumerate(options.activations) if one.decision in kinds]
        left.append((activations, [0, len(options.states) - 1]))
    return problem.changed(left=tuple(left))


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("devices", "p", "chunks", "num_units", "host"),
    [
        (2, 2, (1,), 3, 4 * 10**9),
        (3, 3, (1,), 3, 4 * 10**9),
        (4, 2, (1,), 2, 4 * 10**9),
        (2, 2, (2,), 4, 0),  # keep or recompute alone: four units have many choices
    ],
)
def test_answers_match_exhaustive_search_over_cuts_and_decisions(
    devices: int, p: int, chunks: tuple[int, ...], num_units: int, host: int, seed: int
) -> None:
    """All shapes of p stages, all their cuts, and all decisions of every stage."""
    rng = random.Random(seed)
    profile = small(rng, num_units, alike=chunks != (1,))
    many, device = p * rng.choice((1, 2)), rng.choice((900, 1400, 2500)) * MB
    group = DeviceGroup(num_devices=devices)
    budgets = Budgets(device=device, host=host, disk=0)
    question = asked(profile, budgets, devices, many * devices // p, stages=(p,), chunks=chunks)
    search = searched(question, Effort())
    found = search.run([p], inf, lambda _: None)
    best = inf
    for shape in shapes(group, question.global_batch, (1,), (p,), chunks=chunks):
        line = pipeline(profile, device, shape, host)
        for ends in every_cut(num_units, p):
            runs = [line.runs(ends, s) for s in range(p)]
            sizes = [[end - first for first, end in run] for run in runs]
            of_stages = [set(stage_choices(line.problem(runs[s], s), sizes[s])) for s in range(p)]
            for chosen in product(*of_stages):
                best = min(best, simulated(shape, chosen, line.hops).step_seconds)
    assert search.bound([p]) <= best
    if found is None:
        assert best == inf
        return
    assert best * (1 - 1e-9) <= found.step_seconds <= best * 1.002
    # What is told is that, or one stage that no pipeline is much faster than.
    answer = plan_stages(question, effort=Effort()).best
    assert answer is not None
    assert answer.step_seconds <= found.step_seconds * (1 + GAP)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_are_below_every_choice(seed: int) -> None:
    rng = random.Random(seed)
    shape = Shape(
        stages=2,
        group=rng.choice((DeviceGroup(), TWO)),
        batch=1,
        micro_batches=rng.choice((2, 3, 8)),
        eager=rng.random() < 0.5,
    )
    line = pipeline(small(rng, 3), rng.choice((700, 900, 2500)) * MB, shape)
    bounds = Bounds(line)
    for ends in every_cut(3, 2):
        of_stages = [
            stage_choices(few_decisions(line.problem(line.runs(ends, s), s))) for s in (0, 1)
        ]
        pairs = product(*of_stages)
        best = min((simulated(shape, two, line.hops).step_seconds for two in pairs), default=inf)
        for s, run in enumerate(pairwise((0, *ends))):
            before = 0.0
            for _ in range(2):
                assert before <= bounds.seconds(s, *run) <= best * (1 + 1e-9)
                before = bounds.seconds(s, *run)
                bounds.lift(s, *run)
            assert before <= bounds.seconds(s, *run) <= best * (1 + 1e-9)


def test_others_compute_beside_an_update() -> None:
    """The last stage has a long update, and the first one its backward at that time."""
    first, last = small(random.Random(0), 2, alike=True).units
    last = unit(
        last.name, parameters=400 * MB, kept=80 * MB, seconds=0.01, inputs=8 * MB, used_by=(1,)
    )
    profile = replace(small(random.Random(0), 2), units=(first, last))
    line = pipeline(profile, 10**10, Shape(stages=2, group=DeviceGroup(), batch=1, micro_batches=1))
    of_stages = [stage_choices(line.problem(((s, s + 1),), s)) for s in (0, 1)]
    best = min(simulated(line.shape, two, line.hops).step_seconds for two in product(*of_stages))
    bounds = Bounds(line)
    for _ in range(2):
        bounds.lift(1, 1, 2)
        assert bounds.seconds(1, 1, 2) <= best


def test_activations_of_all_held_micro_batches_stand() -> None:
    profile = small(random.Random(0), 2)
    several = StepSettings(micro_batches=4)
    budgets = Budgets(device=10**10, host=10**10, disk=0)
    plain = (0, 0), (0, 0)
    one = Problem.of(profile, budgets, several).static_bytes(plain)
    held = Problem.of(profile, budgets, replace(several, held=3)).static_bytes(plain)
    kept = sum(unit.cost("keep").kept_bytes for unit in profile.units)
    assert [after - before for before, after in zip(one, held, strict=True)] == [2 * kept] * 4 + [0]


def theirs(order: Sequence[Any]) -> list[Action]:
    """PyTorch's actions as ours, without waits and reductions."""
    kinds = {schedules.FORWARD: True, schedules.FULL_BACKWARD: False}
    return [
        Action(kinds[one.computation_type], one.stage_index, one.microbatch_index)
        for one in order
        if one is not None and one.computation_type in kinds
    ]


@contextmanager
def world(size: int) -> Iterator[None]:
    """A process group whose other ranks are imagined: schedules ask it for their place alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parts_of_rank(p: int, v: int) -> list[Any]:
    """PyTorch's stages of the first rank: v of v p parts."""
    cpu = torch.device("cpu")
    return [PipelineStage(nn.Identity(), part * p, v * p, cpu) for part in range(v)]


def interleaved(p: int, v: int, many: int) -> list[list[Action]]:
    """The order of every rank, as PyTorch's interleaved 1F1B writes it down."""
    with world(p):
        schedule = schedules.ScheduleInterleaved1F1B(parts_of_rank(p, v), many)
    return [theirs(schedule.pipeline_order[rank]) for rank in range(p)]


def plain(p: int, many: int) -> list[list[Action]]:
    """The order of every rank, as PyTorch's 1F1B writes it down.

    It numbers the last rank's forwards from 1 on there, and from 0 on when it runs.
    """
    with world(p):
        schedule = schedules.Schedule1F1B(parts_of_rank(p, 1)[0], many)
        told = schedule._get_pipeline_order()
    assert told is not None
    *orders, last = (theirs(told[rank]) for rank in range(p))
    begun = [one._replace(micro_batch=one.micro_batch - one.forward) for one in last]
    return [*orders, begun]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("many", [2, 3, 4, 7, 8, 12])
def test_orders_are_those_of_pytorch(p: int, many: int) -> None:
    if many < p:
        pytest.skip("1F1B wants as many micro-batches as stages")
    of: dict[str, Any] = {"group": DeviceGroup(), "batch": 1, "micro_batches": many, "stages": p}
    assert [actions(Shape(**of), rank) for rank in range(p)] == plain(p, many)
    if many % (many // p) == 0:
        eager, in_chunks = Shape(**of, eager=True), Shape(**of, chunks=2)
        assert [actions(eager, rank) for rank in range(p)] == interleaved(p, 1, many)
        assert [actions(in_chunks, rank) for rank in range(p)] == interleaved(p, 2, many)


def longest_path(orders: Sequence[Sequence[Action]], stages: Sequence[StageSeconds]) -> float:
    """Seconds of a step whose devices follow these orders: the longest way through its actions.

    An action waits for the one before it on its device, and for that of its micro-batch in the
    part before it (a forward) or behind it (a backward).
    """
    p = len(orders)
    parts = p * len(stages[0].forward)
    waits: dict[Action, list[Action]] = {}
    for order in orders:
        for before, one in zip([None, *order], order, strict=False):
            part = one.part + (-1 if one.forward else 1)
            source = one._replace(part=part) if 0 <= part < parts else None
            if part == parts:
                source = one._replace(forward=True)
            waits[one] = [other for other in (before, source) if other is not None]
    ends: dict[Action, float] = {}
    for one in TopologicalSorter(waits).static_order():
        of_part = stages[one.part % p]
        taken = (of_part.forward if one.forward else of_part.backward)[one.part // p]
        ends[one] = max((ends[other] for other in waits[one]), default=0.0) + taken
    return max(ends.values())


@pytest.mark.parametrize(("p", "many"), [(2, 2), (2, 6), (3, 9), (4, 4), (4, 16), (8, 16)])
def test_pytorchs_orders_take_what_formulas_say(p: int, many: int) -> None:
    """Equal stages wait for (p - 1) / (v M) of their work, in PyTorch's orders and in ours."""
    of: dict[str, Any] = {"group": DeviceGroup(), "batch": 1, "micro_batches": many, "stages": p}
    for v, orders in ((1, plain(p, many)), (2, interleaved(p, 2, many))):
        equal = [each(1.0 / v, 2.0 / v, chunks=v)] * p
        run = simulated(Shape(**of, chunks=v), equal, (0.0,) * p)
        waited = (p - 1) / (v * many)
        assert longest_path(orders, equal) == pytest.approx(3 * many * (1 + waited))
        assert run.step_seconds == pytest.approx(3 * many * (1 + waited))
        assert run.idle == pytest.approx([waited / (1 + waited)] * p)
        for stage, order in enumerate(orders):
            standing = accumulate(1 if one.forward else -1 for one in order)
            assert -(-max(standing) // v) == Shape(**of, chunks=v).held(stage)


@pytest.mark.parametrize("seed", range(12))
def test_pytorchs_orders_take_what_is_simulated(seed: int) -> None:
    """Stages that take all kinds of seconds, in each chunk and direction."""
    rng = random.Random(seed)
    p = rng.choice((2, 3, 4))
    many = p * rng.choice((1, 2, 4))
    of: dict[str, Any] = {"group": DeviceGroup(), "batch": 1, "micro_batches": many, "stages": p}
    for v, orders in ((1, plain(p, many)), (2, interleaved(p, 2, many))):
        stages = []
        for _ in range(p):
            forward, backward = (tuple(rng.uniform(1, 3) for _ in range(v)) for _ in range(2))
            stages.append(
                StageSeconds(forward=forward, backward=backward, last_backward=backward, update_s=0)
            )
        step = simulated(Shape(**of, chunks=v), stages, (0.0,) * p).step_seconds
        assert step == pytest.approx(longest_path(orders, stages), rel=1e-12)


def each(forward: float, backward: float, chunks: int = 1) -> StageSeconds:
    """Seconds of a stage whose chunks take as long."""
    last = (backward,) * chunks
    return StageSeconds(
        forward=(forward,) * chunks, backward=last, last_backward=last, update_s=0.0
    )


def test_hops_hide_behind_eager_forwards() -> None:
    stages = [each(1.0, 2.0)] * 2
    shape = Shape(stages=2, group=DeviceGroup(), batch=1, micro_batches=10)
    # 1F1B: of every two micro-batches, a round through both stages and two hops; then one more.
    assert simulated(shape, stages, (1.0, 1.0)).step_seconds == 5 * (3 + 3 + 2) + 3
    eager = simulated(replace(shape, eager=True), stages, (1.0, 1.0))
    assert eager.step_seconds == 10 * 3 + 3 + 2
    assert eager.idle == (1 - 30 / 35,) * 2


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_the_actions_and_fill_what_stages_do_not_wait(seed: int) -> None:
    rng = random.Random(seed)
    p, many, chunks = rng.choice((2, 3, 4)), rng.choice((12, 24)), rng.choice((1, 2))
    of: dict[str, Any] = {"group": DeviceGroup(), "batch": 1, "micro_batches": many}
    shape = Shape(**of, stages=p, chunks=chunks, eager=rng.random() < 0.5)
    times = [(rng.uniform(1, 2), rng.uniform(1, 3)) for _ in range(p)]
    seconds = [replace(each(*both, chunks), update_s=rng.choice((0.0, 1.5))) for both in times]
    hops = tuple(rng.uniform(0, 1) for _ in range(p))
    of_all = seed % 2 == 1
    run = simulated(shape, seconds, hops, norm_of_all=of_all, with_spans=True)
    assert replace(run, spans=()) == simulated(shape, seconds, hops, norm_of_all=of_all)
    ends = {span.action: span.end_s for span in run.spans if span.action}
    for stage, idle in enumerate(run.idle):
        spans = [span for span in run.spans if span.stage == stage]
        computed = [span.action for span in spans if span.action is not None]
        assert computed == actions(shape, stage)
        assert [span.kind for span in spans if span.action is None] == ["update"] * (
            seconds[stage].update_s > 0
        )
        assert all(one.end_s <= other.start_s for one, other in pairwise(spans))
        busy = sum(span.end_s - span.start_s for span in spans)
        assert busy == pytest.approx((1 - idle) * run.step_seconds)
        for span in spans:
            if span.action and span.action.forward and span.action.part:
                source = span.action._replace(part=span.action.part - 1)
                assert ends[source] + hops[(stage - 1) % p] <= span.start_s + 1e-9
    assert max(span.end_s for span in run.spans) == run.step_seconds
    if of_all:  # the norm of all gradients
        begins = {span.start_s for span in run.spans if span.action is None}
        assert begins <= {max(ends.values())}


def test_a_pipeline_with_clipping_waits_for_the_norm_and_repeats_no_update() -> None:
    """A stage's clipped step would be told as that of all stages."""
    shape = Shape(stages=2, group=DeviceGroup(), batch=1, micro_batches=1)
    plain = pipeline(small(random.Random(0)), 900 * MB, shape)
    clipped = replace(plain, settings=replace(plain.settings, updates="after backward"))
    ends = []
    for line in (plain, clipped):
        stages = []
        for s in (0, 1):
            runs = line.runs((2, 4), s)
            problem = line.problem(runs, s)
            found = solve_problem(problem, effort=Effort())
            assert isinstance(found, Solved)
            assert not found.plan.prediction.clipped_step_seconds
            stages.append(planned(problem, runs, found.plan))
        ends.append(pipelined(line, stages).run.spans)
    updates = [[span.start_s for span in spans if span.kind == "update"] for spans in ends]
    assert len(set(updates[0])) == 2
    assert len(set(updates[1])) == 1


def test_cuts_are_where_one_unit_reads_the_last() -> None:
    profile = small(random.Random(1), 6)
    assert possible_cuts(profile) == (1, 2, 3, 4, 5)
    units = profile.units
    skip = replace(units[4], reads=(1,))  # adds what unit 1 handed on
    assert possible_cuts(replace(profile, units=(*units[:4], skip, *units[5:]))) == (1, 5)
    tied = replace(units[0], used_by=(0, 5))
    assert possible_cuts(replace(profile, units=(tied, *units[1:]))) == ()
    assert [handed_bytes(profile, unit) for unit in (0, 1, 5)] == [0, 8 * MB, 8 * MB]


def test_a_skip_connection_is_not_cut(tmp_path: Path) -> None:
    """Such an output is read by the last part, and added without being saved."""
    skipping = random_models.Shape(blocks=(("linear", "nothing"),) * 4, skip=True)
    made = random_models.subject(skipping)
    workload = replace(WORKLOAD, model="tests:random")
    profile = measure_model(
        made.build(),
        map(made.batch, count()),
        workload=workload,
        num_steps=1,
        spill_directory=tmp_path,
        progress=lambda *_: None,
        machine=load_hardware("cpu"),
        cost=decoder(gpu(), blocks=1).optimizer,
    )
    assert 1 in profile.units[-1].reads
    assert possible_cuts(profile) == (1,)


def test_devices_between_nodes_share_their_link() -> None:
    near = Collectives(gather_bytes_per_s=20e9, reduce_bytes_per_s=20e9, latency_s=0.0)
    far = Collectives(gather_bytes_per_s=1e9, reduce_bytes_per_s=1e9, latency_s=0.0)
    hardware = replace(
        gpu(), interconnect=Interconnect(devices_per_node=4, intra_node=near, inter_node=far)
    )
    whole = DeviceGroup(num_devices=8, num_nodes=2)
    found = list(shapes(whole, 16, (1,), (1, 2, 4)))
    assert {(one.stages, one.layout, one.group.num_nodes) for one in found} == {
        (1, "stages across nodes", 2),
        (2, "stages across nodes", 1),
        (2, "stages within nodes", 2),
        (4, "stages across nodes", 1),
        (4, "stages within nodes", 2),
    }
    hops = {
        (one.stages, one.layout): hop_seconds(hardware, whole, one, 10**9)
        for one in found
        if one.stages > 1
    }
    assert hops == {
        (2, "stages across nodes"): (4.0, 4.0),
        (2, "stages within nodes"): (0.05, 0.05),
        (4, "stages across nodes"): (0.05, 2.0, 0.05, 2.0),
        (4, "stages within nodes"): (0.05,) * 4,
    }


def test_bounds_are_below_what_a_better_profile_takes() -> None:
    """Profiles between two batches are interpolated, and their estimates may be faster."""
    profile = small(random.Random(0))
    question = asked(profile, Budgets(device=10**10, host=10**9, disk=0), 2, 2)
    answer = plan_stages(question, effort=Effort())
    faster = [
        replace(
            one,
            forms=tuple(
                replace(cost, forward_s=cost.forward_s / 2, backward_s=cost.backward_s / 2)
                for cost in one.forms
            ),
        )
        for one in profile.units
    ]
    again = planned_again(answer, replace(profile, units=tuple(faster)), Effort())
    assert again.best
    assert answer.best
    assert again.lower_bound_seconds <= again.best.step_seconds < answer.lower_bound_seconds


def test_numbers_of_stages_divide_the_devices() -> None:
    question = asked(small(random.Random(0)), Budgets(device=10**9, host=10**9, disk=0), 6, 6)
    assert stages_of(question) == (1, 2, 3)
    with pytest.raises(ProtrainError, match="6 devices cannot be divided evenly into 4 stages"):
        stages_of(replace(question, stages=(4,)))


@pytest.mark.nightly
def test_stages_reduce_every_micro_batch_by_leave() -> None:
    """Both one stage on all devices and several stages may have sums in shards."""
    profile, budgets = small(random.Random(0), alike=True), Budgets(device=0, host=0, disk=0)
    question = asked(profile, budgets, 4, 16)
    least = {}
    for allow in ((), (ROUNDING,)):
        for device in range(400, 1400, 20):
            budgets = Budgets(device=device * MB, host=4 * 10**9, disk=0)
            answer = plan_stages(replace(question, budgets=budgets, allow=allow), effort=Effort())
            if answer.single:
                least[allow] = device
                plan = answer.single.plan(answer.lower_bound_seconds)
                assert plan.settings.adds_shards == bool(allow)
                assert answer.lower_bound_seconds <= answer.single.step_seconds
                break
    assert least[ROUNDING,] < least[()]
