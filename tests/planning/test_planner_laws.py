"""Laws that every plan keeps, on random models and machines; other questions than the fastest."""

import random
import re
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest

from protrain_plan.planning.model.options import Pin, parse_pin, pinned_options
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.objectives import Objective, Question, ask
from protrain_plan.planning.questions.planner import plan, solve_problem
from protrain_plan.planning.search.baselines import BASELINES, baseline
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_plan.simulation.critical_path import waits_of
from protrain_plan.simulation.timeline import simulate
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.decisions import (
    ACTIVATIONS,
    STATES,
    activations_text,
    states_text,
)
from protrain_runtime.contract.records.hardware import Hardware, Link
from protrain_runtime.contract.records.plan import (
    Budgets,
    Keep,
    Offload,
    Persistent,
    Plan,
    Recompute,
    Swap,
    SwapInput,
    Updates,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.messages import Speaker
from tests.support.planning_cases import MB, cpu, decoder, gpu, random_profile
from tests.support.thinning import thinned

CLOSE = Effort(gap_target=0.001)
WITH_A_PLAN = 300  # times asked after which any search of these has one
STAGES = 50
MODES: list[tuple[Updates, int]] = [
    ("in backward", 1),
    ("after backward", 1),
    ("in backward", 4),
    ("after backward", 2),
]


def model(hardware: Hardware, *, blocks: int = 6, pieces: int = 5) -> Profile:
    return decoder(
        hardware,
        blocks=blocks,
        block_parameters=40 * MB,
        embedding_parameters=20 * MB,
        kept=200 * MB,
        seconds=0.02,
        host_speed=1e9,
        pieces=pieces,
    )


def within(profile: Profile, device: int) -> Budgets:
    context = profile.hardware.device.context_bytes
    return Budgets(device=device + context, host=10**12, disk=10**12)


def some_budget(problem: Problem, rng: random.Random) -> int:
    """Device bytes between the least that works and what everything kept needs."""
    lean = min_memory(problem)
    assert lean
    plain = max(problem.static_bytes(tuple((0, 0) for _ in problem.options)))
    return lean.bytes + int(rng.random() * max(0, plain - lean.bytes))


@pytest.mark.parametrize("seed", thinned(range(12)))
def test_every_plan_is_a_valid_programme_within_its_budgets(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=8)
    updates, micro_batches = MODES[seed % len(MODES)]
    free = Problem.of(
        profile,
        within(profile, 10**12),
        settings=replace(OVERLAPPING, updates=updates, micro_batches=micro_batches),
    )
    device = some_budget(free, rng)
    problem, budgets = replace(free, device=device), within(profile, device)
    answer = solve_problem(problem, budgets)
    assert isinstance(answer, Solved)
    made = answer.plan
    assert (made.settings.updates, made.settings.micro_batches) == (updates, micro_batches)
    prediction, seconds = made.prediction, 0.0
    problem = problem.overlapping(made.settings.overlap_steps)
    for updating, times in ((True, 1), (False, micro_batches - 1)):
        program = problem.program(made.units, updating=updating)
        assert nx.is_directed_acyclic_graph(waits_of(program))
        timeline = simulate(program)
        assert sum(stall.seconds for stall in timeline.stalls) == pytest.approx(timeline.stall_s)
        seconds += times * timeline.step_seconds
        slots = device_bytes(program)
        assert max(slot.total for slot in slots) <= prediction.peak_bytes.device <= device
        if program.speculative:
            clipped = problem.program(made.units, clipped=True)
            assert max(s.total for s in device_bytes(clipped)) <= prediction.peak_bytes.device
            longer_s = simulate(clipped).step_seconds - timeline.step_seconds
            seconds += made.settings.clip_share * max(0.0, longer_s)
            assert prediction.clipped_step_seconds >= prediction.step_seconds
    assert prediction.step_seconds == pytest.approx(seconds, rel=1e-12)
    assert prediction.lower_bound_seconds <= prediction.step_seconds
    for tier in problem.tiers:
        used = program.tier_bytes(tier)
        assert used == getattr(prediction.peak_bytes, tier) <= getattr(budgets, tier)
    # Whatever a plain policy reaches is reached.
    for name in BASELINES:
        found = baseline(name, problem, Evaluator(problem))
        assert found is None or prediction.step_seconds <= found.seconds


@pytest.mark.parametrize(
    "hardware", [gpu(), pytest.param(cpu(), marks=pytest.mark.slow)], ids=["gpu", "cpu"]
)
def test_faster_links_are_never_slower(hardware: Hardware) -> None:
    before = float("inf")
    for factor in (0.5, 1.0, 2.0, 4.0):
        tiers = tuple(replace(t, link=_faster(t.link, factor)) for t in hardware.tiers)
        profile = model(replace(hardware, tiers=tiers))
        answer = plan(profile, within(profile, 700 * MB), effort=CLOSE)
        assert isinstance(answer, Solved)
        step = answer.plan.prediction.step_seconds
        assert step <= before * 1.001
        before = step


def _faster(link: Link, factor: float) -> Link:
    return replace(
        link,
        read_bytes_per_s=link.read_bytes_per_s * factor,
        write_bytes_per_s=link.write_bytes_per_s * factor,
    )


@pytest.mark.slow
def test_more_host_memory_is_never_slower() -> None:
    profile = model(gpu(disk_gb=1000), blocks=4)
    problem = Problem.of(profile, within(profile, 700 * MB))
    lean = min_memory(problem, of="host")
    assert lean
    before = float("inf")
    for factor in (1.0, 1.5, 3.0, 100.0):
        budgets = replace(within(profile, 700 * MB), host=int(lean.bytes * factor))
        answer = plan(profile, budgets, effort=CLOSE)
        assert isinstance(answer, Solved)
        step = answer.plan.prediction.step_seconds
        assert step <= before * 1.001
        before = step


def test_exchanging_equal_blocks_changes_nothing() -> None:
    profile = model(gpu())
    units = list(profile.units)
    units[2], units[5] = replace(units[2], name="layers.9"), replace(units[5], name="layers.8")
    answers = [
        plan(p, within(p, 700 * MB)) for p in (profile, replace(profile, units=tuple(units)))
    ]
    first, second = (answer.plan for answer in answers if isinstance(answer, Solved))
    assert _decisions(first) == _decisions(second)
    assert first.prediction == second.prediction


def _decisions(made: Plan) -> list[object]:
    return [(unit.activations, unit.states, unit.schedule) for unit in made.units]


def test_more_forms_are_never_slower() -> None:
    """A form that keeps less than everything for little time is taken where memory binds."""
    profile = model(gpu())
    units = []
    for unit in profile.units:
        if unit.kind == "block":
            keep = unit.cost("keep")
            lite = replace(
                keep,
                form="lite",
                kept_bytes=keep.kept_bytes // 2,
                swappable_bytes=keep.swappable_bytes // 2,
                swap_pieces=(),
                backward_peak_bytes=keep.backward_peak_bytes + keep.kept_bytes // 2,
                backward_s=keep.backward_s * 1.02,
            )
            unit = replace(unit, forms=(*unit.forms, lite))
        units.append(unit)
    richer = replace(profile, units=tuple(units))
    without = plan(profile, within(profile, 800 * MB), effort=CLOSE)
    with_lite = plan(richer, within(richer, 800 * MB), effort=CLOSE)
    assert isinstance(without, Solved)
    assert isinstance(with_lite, Solved)
    before, after = without.plan.prediction, with_lite.plan.prediction
    assert after.step_seconds < before.step_seconds
    decided = {unit.activations for unit in with_lite.plan.units}
    assert decided & {Recompute(form="lite"), SwapInput(tier="host", form="lite")}


def test_updates_that_wait_for_the_norm_forfeit_their_overlap_with_backward() -> None:
    profile = model(gpu())
    question = Question(
        profile=profile,
        budgets=within(profile, 700 * MB),
        settings=replace(OVERLAPPING, clip_share=1.0),
    )
    seconds = []
    for updates in ("in backward", "after backward"):
        answer = ask(
            replace(question, settings=replace(question.settings, updates=updates)),
            Objective(),
            effort=CLOSE,
        )
        assert answer.solved is not None
        seconds.append(answer.solved.plan.prediction.step_seconds)
    assert seconds[1] > seconds[0] * 1.05


def test_updates_run_ahead_of_the_norm_where_few_steps_are_clipped() -> None:
    profile = model(gpu(), blocks=4)
    question = Question(
        profile=profile,
        budgets=within(profile, 700 * MB),
        settings=replace(OVERLAPPING, updates="after backward"),
    )
    plans: list[Plan] = []
    for share in (0.0, 1.0):
        effort = Effort(gap_target=0.02)
        answer = ask(
            replace(question, settings=replace(question.settings, clip_share=share)),
            Objective(),
            effort=effort,
        )
        assert answer.solved is not None
        plans.append(answer.solved.plan)
    ahead, waiting = (
        sum(isinstance(unit.states, Offload) and unit.states.speculate for unit in plan.units)
        for plan in plans
    )
    assert ahead > 0 and waiting == 0
    never, always = (plan.prediction for plan in plans)
    assert never.step_seconds < 0.99 * always.step_seconds
    assert never.clipped_step_seconds > never.step_seconds
    assert always.clipped_step_seconds == 0


def test_micro_batches_share_one_update() -> None:
    profile = model(gpu())
    question = Question(profile=profile, budgets=within(profile, 900 * MB))
    steps = {}
    for count in (1, 2, 4):
        answer = ask(
            replace(question, settings=replace(question.settings, micro_batches=count)),
            Objective(),
            effort=CLOSE,
        )
        assert answer.solved is not None
        steps[count] = answer.solved.plan.prediction.step_seconds
    # Each micro-batch moves and computes all but the update, and adds its gradients.
    assert steps[1] < steps[2] < steps[4] < 5 * steps[1]


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_can_be_asked_for(name: str) -> None:
    profile = model(gpu())
    budgets = within(profile, 700 * MB)
    best = plan(profile, budgets)
    found = plan(profile, budgets, solver=next(b for b in BASELINES if b == name))
    assert isinstance(best, Solved)
    assert isinstance(found, Solved)
    assert found.solver == name
    assert found.plan.prediction.step_seconds >= best.plan.prediction.step_seconds
    assert found.gap == pytest.approx(found.plan.gap)


def test_a_baseline_that_does_not_fit_says_what_it_needs() -> None:
    profile = model(gpu())
    lean = min_memory(Problem.of(profile, within(profile, 10**12)))
    assert lean
    answer = plan(profile, within(profile, lean.bytes), solver="recompute-all")
    assert isinstance(answer, Infeasible)
    enough = replace(within(profile, 0), device=answer.smallest_budget_bytes)
    assert isinstance(plan(profile, enough, solver="recompute-all"), Solved)


def test_pins_hold_and_their_cost_is_told() -> None:
    profile = model(gpu())
    pins = (parse_pin("layers.0-2: keep, persistent"), parse_pin("layers.4: recompute"))
    question = Question(profile=profile, budgets=within(profile, 3400 * MB), pins=pins)
    answer = ask(question, Objective(), effort=CLOSE)
    assert answer.solved is not None
    units = {unit.name: unit for unit in answer.solved.plan.units}
    for n in range(3):
        assert (units[f"layers.{n}"].activations, units[f"layers.{n}"].states) == (
            Keep(),
            Persistent(),
        )
    assert units["layers.4"].activations == Recompute()
    assert answer.seconds_without_pins is not None
    with_pins = answer.solved.plan.prediction.step_seconds
    assert answer.seconds_without_pins <= with_pins * 1.001


def test_pins_that_need_too_much_are_a_no_that_names_them(assert_says: Speaker) -> None:
    profile = model(gpu())
    pins = (parse_pin("layers.*: keep, persistent"),)
    question = Question(profile=profile, budgets=within(profile, 900 * MB), pins=pins)
    answer = ask(question, Objective(), effort=CLOSE)
    assert answer.solved is None
    assert answer.infeasible is not None
    free = min_memory(Problem.of(profile, question.budgets))
    assert free
    needed = -(-(free.bytes + profile.hardware.device.context_bytes) // 2**20)
    assert f"without the pins the device needs {needed}MiB" in answer.infeasible.advice
    question = replace(
        question,
        budgets=replace(question.budgets, host=10 * MB),
        pins=(parse_pin("layers.*: offload to host"),),
    )
    with pytest.raises(ProtrainError) as caught:
        ask(question, Objective(), effort=CLOSE)
    assert_says(caught.value)


def random_pins(problem: Problem, rng: random.Random) -> tuple[Pin, ...]:
    """Pins of any units to any decisions: of all, of one, again, against each other, not open."""
    names = [options.unit.name for options in problem.options]
    chosen = names if rng.random() < 0.6 else rng.sample(names, rng.randint(1, len(names)))
    texts = [f"{rng.choice(['*', 'layers.*'])}: {rng.choice(list(ACTIVATIONS))}"] * (
        rng.random() < 0.2
    )
    for name in chosen:
        options = problem.options[names.index(name)]
        activations = activations_text(rng.choice(options.activations).decision)
        states = states_text(rng.choice(options.states).decision)
        texts.append(f"{name}: {rng.choice([activations, f'{activations}, {states}', states])}")
        if rng.random() < 0.7:  # the other decision as well, or again, or another one
            texts.append(f"{name}: {activations}, {states}")
    if rng.random() < 0.15:  # most units cannot
        texts.append(f"{rng.choice(names)}: {rng.choice([*ACTIVATIONS, *STATES])}")
    return tuple(map(parse_pin, texts))


@pytest.mark.parametrize("seed", thinned(range(60), every=6))
def test_any_pins_give_a_plan_that_keeps_them_or_one_answer(seed: int) -> None:
    """Pins may leave one decision of every unit, or none that fits."""
    rng = random.Random(seed)
    profile = random_profile(rng, max_blocks=4)
    updates, micro_batches = MODES[seed % len(MODES)]
    free = Problem.of(
        profile,
        within(profile, 10**12),
        settings=replace(OVERLAPPING, updates=updates, micro_batches=micro_batches),
    )
    question = Question(
        profile=profile,
        budgets=within(profile, int(some_budget(free, rng) * rng.choice([0.6, 1.1, 10]))),
        pins=random_pins(free, rng),
        settings=replace(OVERLAPPING, updates=updates, micro_batches=micro_batches),
    )
    refused, pinned = "", free.options
    try:
        pinned = pinned_options(free.implied, question.pins)
    except ProtrainError as error:
        refused = error.message
    if refused:
        with pytest.raises(ProtrainError, match=re.escape(refused)):
            ask(question, Objective(), effort=Effort())
        return
    answer = ask(question, Objective(), effort=Effort())
    if answer.solved is None:
        lean = min_memory(question.problem())
        assert answer.infeasible
        assert lean is None or lean.bytes > question.problem().device
        return
    made = answer.solved.plan
    for unit, options in zip(made.units, pinned, strict=True):
        assert options.decision(unit.activations, unit.states) is not None
    program = question.problem().overlapping(made.settings.overlap_steps).program(made.units)
    most = max(slot.total for slot in device_bytes(program))
    assert most <= made.prediction.peak_bytes.device <= question.problem().device


def test_least_memory_is_as_fast_as_asked_and_above_its_bound() -> None:
    profile = model(gpu())
    question = Question(profile=profile, budgets=within(profile, 5000 * MB))
    peaks = []
    for slowdown in (1.5, 1.7):
        answer = ask(question, Objective(max_slowdown=slowdown), effort=Effort())
        assert answer.solved is not None
        assert answer.least_memory is not None
        prediction = answer.solved.plan.prediction
        least = answer.least_memory
        assert prediction.step_seconds <= least.limit_seconds
        assert least.limit_seconds == pytest.approx(slowdown * least.fastest_seconds)
        peak = prediction.peak_bytes.device + prediction.peak_bytes.context
        assert least.lower_bound_bytes <= peak <= least.lower_bound_bytes * 1.1
        peaks.append(peak)
    assert peaks[1] < peaks[0]


def test_front_falls_in_time_as_memory_grows() -> None:
    profile = model(gpu())
    question = Question(profile=profile, budgets=within(profile, 10**11))
    answer = ask(question, Objective(pareto_points=6), effort=Effort())
    front = answer.front
    assert len(front) >= 4
    lean = min_memory(question.problem())
    assert lean
    assert front[0].device_bytes == lean.bytes + profile.hardware.device.context_bytes
    for less, more in pairwise(front):
        assert less.device_bytes < more.device_bytes
        assert less.solved.plan.prediction.step_seconds > more.solved.plan.prediction.step_seconds


def test_largest_batch_is_planned_and_one_more_does_not_fit() -> None:
    profile = model(cpu(), blocks=3)
    question = Question(profile=profile, budgets=within(profile, 2000 * MB))
    answer = ask(question, Objective(maximize="batch-size"), effort=Effort())
    assert answer.solved is not None
    assert answer.largest is not None
    assert answer.solved.plan.workload.batch_size == answer.largest.workload.batch_size > 1


def test_infeasible_names_the_largest_sizes_that_fit() -> None:
    profile = model(cpu(), blocks=3)
    lean = min_memory(Problem.of(profile, within(profile, 10**12)))
    assert lean
    question = Question(profile=profile, budgets=within(profile, int(lean.bytes * 0.9)))
    answer = ask(question, Objective(), effort=Effort())
    assert answer.infeasible is not None
    no = answer.infeasible
    assert no.proven_budget_bytes <= no.smallest_budget_bytes
    assert no.proven_budget_bytes >= no.smallest_budget_bytes * 0.999
    assert no.largest_seq_len is not None
    assert 0 < no.largest_seq_len < profile.workload.seq_len


@pytest.mark.parametrize("asked_before", [0, 3, 30, 300, 3000, 10_000])
def test_an_interrupted_search_gives_the_best_plan_so_far(asked_before: int) -> None:
    profile = model(gpu(disk_gb=1000), blocks=12)
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > asked_before

    answer = plan(profile, within(profile, 800 * MB), effort=Effort(stopped=stopped))
    if asked_before >= WITH_A_PLAN:  # every stage asks, and goes no further
        assert asked - asked_before < STAGES
    assert isinstance(answer, Solved)
    assert answer.gap >= 0
    peaks = answer.plan.prediction.peak_bytes
    assert peaks.device + peaks.context <= answer.plan.budgets.device


def test_a_search_for_less_memory_ends_when_it_is_asked_to() -> None:
    question = Question(profile=model(gpu()), budgets=within(model(gpu()), 3000 * MB))
    answer = ask(question, Objective(max_slowdown=1.2), effort=Effort(time_limit_s=0.05))
    assert answer.least_memory is not None


def test_budgets_above_what_an_estimate_assumes_are_the_users_to_say() -> None:
    profile = model(gpu(host_gb=1))
    budgets = replace(within(profile, 800 * MB), disk=0)
    assert Question(profile=profile, budgets=budgets).problem().tiers["host"] == budgets.host
    answer = ask(Question(profile=profile, budgets=budgets), Objective(), effort=Effort())
    assert answer.solved is not None
    assert answer.solved.plan.prediction.peak_bytes.host > 10**9


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_budgets_above_what_was_measured_are_refused_with_both_numbers(tier: str) -> None:
    profile = replace(model(gpu(host_gb=1, disk_gb=1)), method="measured")
    budgets = replace(within(profile, 800 * MB), host=10**9, disk=10**9)
    assert Question(profile=profile, budgets=budgets).problem().tiers == {
        "host": 10**9,
        "disk": 10**9,
    }
    with pytest.raises(ProtrainError) as refused:
        Question(profile=profile, budgets=replace(budgets, **{tier: 2 * 10**9})).problem()
    assert refused.value.key == {"host": "--host-memory", "disk": "--disk"}[tier]
    assert "1.86 GiB" in refused.value.message
    assert "953.67 MiB" in refused.value.message


def lacking(*, host: int, disk: int) -> Infeasible:
    """The answer where the device has room for nothing, and there is so much below it."""
    profile = model(gpu(host_gb=64, disk_gb=1000))
    budgets = replace(within(profile, 800 * MB), host=host, disk=disk)
    answer = plan(profile, budgets)
    assert isinstance(answer, Infeasible)
    enough = replace(budgets, **{answer.tier: answer.smallest_budget_bytes})
    if len(answer.advice) < 3 or " and " not in " ".join(answer.advice[1:2]):
        assert isinstance(plan(profile, enough), Solved)
        less = replace(budgets, **{answer.tier: answer.proven_budget_bytes - 10 * MB})
        assert isinstance(plan(profile, less), Infeasible)
    return answer


def test_what_lacks_is_named_with_what_is_enough_of_it() -> None:
    nothing = lacking(host=10**9, disk=0)
    assert nothing.tier in ("host", "disk")
    assert nothing.advice[0].startswith(f"raise the {nothing.tier} budget to ")
    assert nothing.advice[1].startswith("or the ")


def test_bytes_on_their_way_to_disk_need_host_memory() -> None:
    """A disk alone is not enough: states pass through host memory, and so do all bytes."""
    no_host = lacking(host=0, disk=10**12)
    assert no_host.tier == "host"
    assert no_host.shortfall_bytes > 0


def test_swaps_go_where_they_are_told() -> None:
    profile = model(gpu(disk_gb=1000))
    pins = (parse_pin("layers.*: swap to disk, offload to host"),)
    question = Question(profile=profile, budgets=within(profile, 1500 * MB), pins=pins)
    answer = ask(question, Objective(), effort=Effort())
    assert answer.solved is not None
    blocks = [unit for unit in answer.solved.plan.units if unit.kind == "block"]
    assert {unit.activations for unit in blocks} == {Swap(tier="disk")}
    assert {unit.states for unit in blocks} == {Offload(tier="host")}
