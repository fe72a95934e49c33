"""Predicted bytes against measured ones, slot by slot, on real models under real plans.

The prediction is an upper bound in every slot; how far above the truth it may stand is asserted
too, so that it cannot become one by being generous.
"""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.hardware.speeds import Stepped, lane_update
from protrain_plan.models.batches import Batch
from protrain_plan.models.building import TORCH_DTYPES
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.problem import OVERLAPPING
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.profiling.optimizer_cost import workspace
from protrain_plan.simulation.wear import wear
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import device_bytes, evaluation_bytes
from protrain_runtime.contract.records import read_profile
from protrain_runtime.contract.records.decisions import activations_text
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    Placement,
    Plan,
    Schedule,
    TierBytes,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import DType, Precision, Profile
from protrain_runtime.devices.device import HOST
from protrain_runtime.devices.memory_meter import MemoryMeter, reachable, storage_bytes
from protrain_runtime.devices.spill_file import SpillFile
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer
from protrain_runtime.model.prepared import below_device
from protrain_runtime.states.updates import UpdateTeam
from tests.support.estimates import batches_of, measure, model_of
from tests.support.peaks import (
    NUM_STEPS,
    PIECE_BYTES,
    SLACK_BYTES,
    Peaks,
    assert_disk_within,
    assert_equal_to_the_promise,
    assert_within_the_promise,
    bytes_of_others,
    peaks,
    preset_with,
    profile_file,
    profile_made,
    trained,
    without_freedom,
)
from tests.support.planning_cases import plan as solve
from tests.support.programs import compile_units
from tests.support.runtime_cases import (
    FRACTIONAL,
    Subject,
    decided,
    decision_name,
    decisions,
    described_by,
    mixed,
    plan_for_profile,
    profiled_here,
)
from tests.support.scenario import Run, Scenario
from tests.support.thinning import thinned

SOURCES = {
    "llama": "tiny-llama",
    "gpt2": "tiny-gpt2",
    "functional-relu": "tests.support.functional_model:relu_factory",
}
MODELS = tuple(SOURCES.values())
SMALL_PIECE_BYTES = 1 << 15  # several pieces in every chunk, and in most of their parameters
DISK = Placement(tier="disk")
STEPS: list[tuple[Updates, int]] = [
    ("after backward", 1),
    ("in backward", 2),
    ("after backward", 3),
]

Profiles = pytest.TempPathFactory


@pytest.fixture(scope="module", params=MODELS, ids=list(SOURCES))
def profile(request: pytest.FixtureRequest, tmp_path_factory: Profiles) -> Profile:
    return read_profile(profile_file(tmp_path_factory, request.param))


def each_profile(*axes: Sequence[object], names: str, every: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        f"profile, {names}",
        thinned(MODELS, *axes, every=every),
        ids=decision_name,
        indirect=["profile"],
    )


# --- every decision -------------------------------------------------------------------------------


@pytest.mark.nightly("str-Recompute_attn-Offload3", "str-SwapInput_full-Persistent1")  # of GPT-2
@pytest.mark.nightly(every=20)
@each_profile(decisions("disk")[1:], names="decision", every=18)
def test_measured_bytes_match_predicted_in_every_slot(
    profile: Profile, decision: tuple[Activations, Placement], tmp_path: Path
) -> None:
    units = without_freedom(decided(described_by(profile), *decision))
    assert_equal_to_the_promise(peaks(profile, units, tmp_path))


@pytest.mark.nightly("str-int11")
@each_profile(range(6), names="seed", every=6)
def test_measured_bytes_of_mixed_plans_match_predicted_in_every_slot(
    profile: Profile, seed: int, tmp_path: Path
) -> None:
    units = without_freedom(mixed(described_by(profile), random.Random(seed), "disk"))
    assert_equal_to_the_promise(peaks(profile, units, tmp_path))


@each_profile(
    [
        lambda _: {"updates": "in backward"},
        lambda seed: {"updates": STEPS[seed % 3][0], "overlap_steps": True},
        lambda seed: dict(zip(("updates", "micro_batches"), STEPS[seed % 3], strict=True)),
    ],
    range(100, 106),
    names="settings, seed",
    every=18,
)
def test_measured_bytes_never_exceed_predicted_where_lanes_may_lag(
    settings: Callable[[int], dict[str, Any]], profile: Profile, seed: int, tmp_path: Path
) -> None:
    """Drains at random: the promise is for the slowest lanes, and these are faster."""
    own = settings(seed)
    alone = own["updates"] == "in backward" and own.get("micro_batches", 1) == 1
    units = mixed(described_by(profile), random.Random(seed), "disk", stepped=alone)
    assert_within_the_promise(peaks(profile, units, tmp_path, **own))


@pytest.mark.nightly("str-bool0")
@each_profile([False, True], names="gathered", every=6)
def test_measured_bytes_of_speculative_updates_never_exceed_predicted(
    profile: Profile, gathered: bool, tmp_path: Path
) -> None:
    """Bytes of steps that are clipped, as those of random weights are."""
    states = replace(DISK, keep_gathered=gathered, speculate=True)
    units = decided(described_by(profile), RECOMPUTE, states)
    assert_within_the_promise(peaks(profile, units, tmp_path, updates="after backward"))


@pytest.mark.nightly
def test_a_plan_that_keeps_everything_matches_its_predicted_peak(
    profile: Profile, tmp_path: Path
) -> None:
    """Without an engine the slots cannot be told apart; the peak of the step can."""
    units = decided(described_by(profile), KEEP, PERSISTENT)
    plan = plan_for_profile(profile, units)
    program = compile_units(units, profile, piece_bytes=PIECE_BYTES)
    predicted = max(slot.total for slot in device_bytes(program))
    run = trained(plan, tmp_path)
    assert run.measured_peak_bytes is not None
    assert run.measured_peak_bytes.device <= predicted
    assert predicted - run.measured_peak_bytes.device <= SLACK_BYTES


@pytest.mark.nightly("str-SwapInput_lite-Persistent1")  # of GPT-2
@pytest.mark.nightly(every=29)
@each_profile(decisions("disk")[1:], names="decision", every=24)
def test_an_evaluation_before_a_backward_never_exceeds_what_is_predicted_for_it(
    profile: Profile, decision: tuple[Activations, Placement], tmp_path: Path
) -> None:
    units = without_freedom(decided(described_by(profile), *decision))
    program = compile_units(units, profile, piece_bytes=PIECE_BYTES)
    others = bytes_of_others()
    run = started(profile, units, tmp_path, piece_bytes=PIECE_BYTES)

    def evaluated(observe: Observer) -> None:
        loss = run.loss(0)
        observe("slot evaluation")
        with torch.no_grad():
            run.loss(0)
        observe("slot waiting")
        loss.backward()
        observe("update")
        run.update()

    evaluated(lambda _: None)
    slots = measure_step(run.model, evaluated, besides_bytes=others).slot_bytes
    evaluation = slots[program.num_units]
    assert evaluation > slots[program.num_units + 1]
    assert evaluation <= evaluation_bytes(program)


def started(
    profile: Profile,
    units: Sequence[UnitPlan],
    spill: Path,
    *,
    piece_bytes: int,
    plan: Plan | None = None,
    **options: Any,
) -> Run:
    source = load_source(profile.workload.model, model_config=profile.workload.model_config)
    given = batches_of(source, batch_size=4, seq_len=64)
    held: dict[int, Batch] = {}  # one batch, as the profile counts

    def batch_at(number: int) -> Batch:
        if number not in held:
            held.clear()
            held[number] = next(given)
        return held[number]

    return Scenario(
        model=Subject(lambda: model_of(source), batch_at),
        plan=lambda _: plan or plan_for_profile(profile, units, piece_bytes=piece_bytes),
        options=options,
    ).start(spill)


# --- other optimizers and precisions --------------------------------------------------------------


@pytest.mark.nightly("str-int-Persistent0")
@pytest.mark.parametrize(
    ("step", "states"),
    thinned([("in backward", 1), *STEPS], [PERSISTENT, DISK], every=8),
    ids=decision_name,
)
def test_measured_bytes_with_master_weights_never_exceed_predicted(
    step: tuple[Updates, int], states: Placement, tmp_path_factory: Profiles, tmp_path: Path
) -> None:
    updates, micro_batches = step
    profile = profile_made(tmp_path_factory, "peaks-master", masters)
    units = without_freedom(decided(described_by(profile), RECOMPUTE, states))
    found = peaks(profile, units, tmp_path, updates=updates, micro_batches=micro_batches)
    assert_within_the_promise(found)


def masters(folder: Path) -> Profile:
    """12 bytes of states per parameter, and an optimizer that asks for float32 gradients."""
    record = profiled_here("tiny-llama", folder, dtype="bfloat16")
    return replace(
        record,
        workload=replace(record.workload, precision="master"),
        # Masters have room by the chunk: their records say nothing of one step's.
        optimizer=replace(record.optimizer, workspace_fraction=2.0, workspace_bytes=0),
        units=tuple(
            replace(unit, state_bytes=12 * unit.num_parameters, largest_gradient_bytes=0)
            for unit in record.units
        ),
    )


@pytest.mark.nightly
def test_measured_bytes_of_eight_bits_never_exceed_predicted_and_are_near(
    tmp_path_factory: Profiles, tmp_path: Path
) -> None:
    """Bitsandbytes' operators take five copies of the parameter that they are at."""
    pytest.importorskip("bitsandbytes")
    make = partial(profiled_here, "tiny-llama", optimizer="adamw8bit")
    profile = profile_made(tmp_path_factory, "peaks-adamw8bit", make)
    tables = 2 * 2 * 1024 * len(profile.units) * 7  # of each matrix, and once more in a step
    cases: list[tuple[Placement, Updates]] = [
        (PERSISTENT, "after backward"),
        (OPTIMIZER_IN_BACKWARD, "in backward"),
    ]
    for states, updates in cases:
        units = without_freedom(decided(described_by(profile), RECOMPUTE, states))
        found = peaks(profile, units, tmp_path, updates=updates)
        assert_within_the_promise(found)
        # Of the step's peak; a slot in which a chunk is updated may count its workspace in vain.
        assert max(found.predicted) - max(found.measured) <= tables + SLACK_BYTES


def update_bytes(update: Callable[[], object]) -> int:
    """Bytes of the second update: the first makes the states."""
    for _ in range(2):
        with MemoryMeter() as meter:
            meter.mark("update")
            update()
    (segment,) = meter.segments
    return segment.peak_bytes - segment.start_bytes


@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw8bit", "float32"), ("nadam", "bfloat16")])
def test_a_lanes_update_takes_the_workspace_of_one_run(optimizer: str, dtype: DType) -> None:
    """Bytes of the thread that counts: a meter does not see a lane's."""
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    run, runs = 2**16, 8
    team = UpdateTeam(longest=run)
    stepped = Stepped(dtype, optimizer)
    update = lane_update(stepped, team, num_parameters=run * runs, num_tensors=2)
    fraction = workspace(optimizer, dtype, "pure").workspace_fraction
    counted = fraction * run * TORCH_DTYPES[dtype].itemsize
    scalars = 3 * 1024 * (runs + 1)  # two tables of 8 bits, steps and factors
    assert 0.98 * counted <= update_bytes(update) <= counted + scalars


@pytest.mark.nightly(but=("adamw", "rmsprop"))
@pytest.mark.parametrize(
    "optimizer", ["adamw", "adamw-amsgrad", "sgd-momentum", "rmsprop", "nadam"]
)
def test_an_update_of_channels_last_parameters_takes_the_workspace_of_one(optimizer: str) -> None:
    """Fused kernels copy gradients whose elements are in another order."""
    order = torch.channels_last
    parameters = [
        nn.Parameter(torch.ones(64, 64, 3, 3).contiguous(memory_format=order)) for _ in range(3)
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    measured = update_bytes(optimizer_factory(optimizer)(parameters).step)
    fraction = workspace(optimizer, "float32", "pure", strided=True).workspace_fraction
    assert 0 <= fraction * parameters[0].nbytes + SLACK_BYTES - measured <= 2 * SLACK_BYTES


# --- transfers in parts ---------------------------------------------------------------------------


def slow_ways_out() -> float:
    """Seconds before each item of a lane: little leaves the device before it has to."""
    out = ("protrain spill", "protrain write")
    return 0.02 if threading.current_thread().name.startswith(out) else 0


def assert_reached_in_every_slot(measure: Callable[[], Peaks]) -> None:
    """No run takes more than was promised, and some run takes as much: slot by slot.

    On a busy machine a lane may get ahead of compute for once, however slow it is.
    """
    found = measure()
    assert_within_the_promise(found)
    for _ in range(3):
        if found.excess <= SLACK_BYTES:
            break
        again = measure()
        assert_within_the_promise(again)
        found.measured = list(map(max, found.measured, again.measured))
    assert_equal_to_the_promise(found)


def slow_peaks(
    profile: Profile, units: tuple[UnitPlan, ...], spill: Path, *, overlap: bool = False
) -> Peaks:
    """The bytes of a step in which the lanes off the device lag, and in the step before it."""
    plan = plan_for_profile(profile, units, piece_bytes=SMALL_PIECE_BYTES, overlap_steps=overlap)
    program = program_of(plan, profile)
    others, measured = bytes_of_others(), False
    run = started(
        profile,
        units,
        spill,
        piece_bytes=SMALL_PIECE_BYTES,
        plan=plan,
        lane_delay=lambda: slow_ways_out() if measured else 0,
    )
    for number in range(NUM_STEPS - 1):
        measured = number == NUM_STEPS - 2
        run.step(number)

    def step(observe: Observer) -> None:
        run.backward(NUM_STEPS - 1)
        observe("update")
        run.update()

    memory = measure_step(run.model, step)
    return Peaks(
        predicted=[slot.total for slot in device_bytes(program)],
        measured=[size - others for size in memory.slot_bytes],
        predicted_disk=program.tier_bytes("disk"),
        measured_disk=below_device(run.model)[1],
    )


@pytest.mark.nightly
def test_measured_bytes_of_updates_that_run_on_match_predicted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Chunks updated in place stand until the next step fetches them again."""
    profile = read_profile(profile_file(tmp_path_factory, "tiny-llama"))
    schedule = Schedule(forward_lead=1)
    units = decided(described_by(profile), RECOMPUTE, Placement(tier="disk"), schedule)
    assert_reached_in_every_slot(
        lambda: slow_peaks(profile, units, tmp_path_factory.mktemp("spill"), overlap=True)
    )


def with_short_drains(units: tuple[UnitPlan, ...], rng: random.Random) -> tuple[UnitPlan, ...]:
    """The units with some bytes gone before the next slot, and the rest before the one after."""
    return tuple(
        replace(
            unit,
            schedule=replace(unit.schedule, swap_drain=rng.random(), update_drain=rng.random()),
        )
        for unit in units
    )


@pytest.mark.nightly("str-Schedule-Swap-Offload0")
@pytest.mark.parametrize(
    ("profile", "schedule", "decision"),
    thinned(
        list(SOURCES.values()),
        FRACTIONAL,
        [
            (Activations(tier="disk"), Placement(tier="disk")),
            (Activations(form="full", tier="disk"), Placement(tier="disk", keep_gathered=True)),
            (KEEP, Placement(tier="disk")),
        ],
        every=6,
    ),
    ids=decision_name,
    indirect=["profile"],
)
def test_measured_bytes_of_transfers_in_parts_match_predicted_in_every_slot(
    profile: Profile, decision: tuple[Activations, Placement], schedule: Schedule, tmp_path: Path
) -> None:
    """Updates in place too: a chunk's parameters and gradients leave piece by piece."""
    units = decided(described_by(profile), *decision, schedule)
    program = compile_units(units, profile, piece_bytes=SMALL_PIECE_BYTES)
    writes = {
        move.share
        for move in program.moves
        if (move.kind, move.unit) == ("write states", 1) and move.share[0] < move.share[1]
    }
    assert len(writes) >= 3
    assert_reached_in_every_slot(lambda: slow_peaks(profile, units, tmp_path))


@pytest.mark.nightly("tiny-llama-200")
@pytest.mark.parametrize(
    ("profile", "seed"),
    thinned(list(SOURCES.values()), range(200, 204), every=6),
    indirect=["profile"],
)
def test_measured_bytes_of_mixed_transfers_in_parts_match_predicted_in_every_slot(
    profile: Profile, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    units = with_short_drains(mixed(described_by(profile), rng, "disk"), rng)
    assert_reached_in_every_slot(lambda: slow_peaks(profile, units, tmp_path))


# --- plans of the planner -------------------------------------------------------------------------


def smallest_budget(profile: Profile) -> int:
    answer = solve(profile, Budgets(device=1, host=0, disk=1 << 34))
    assert isinstance(answer, Infeasible)
    return answer.smallest_budget_bytes


@pytest.mark.nightly(
    "tiny-llama-1.0", "tiny-gpt2-3.0", "tests.support.functional_model:relu_factory-2.0"
)
@pytest.mark.parametrize(
    ("profile", "factor"),
    thinned(list(SOURCES.values()), [1.0, 1.1, 1.4, 2.0, 3.0], every=5),
    indirect=["profile"],
)
def test_solved_plans_stay_within_their_promise_and_budget(
    profile: Profile, factor: float, tmp_path: Path
) -> None:
    """At multiples of the smallest budget for tensors; the context is on top."""
    context = profile.hardware.device.context_bytes
    tensors = round((smallest_budget(profile) - context) * factor)
    answer = solve(
        profile,
        Budgets(device=context + tensors, host=0, disk=1 << 34),
        settings=replace(OVERLAPPING, piece_bytes=PIECE_BYTES),
    )
    assert isinstance(answer, Solved)
    plan = answer.plan
    predicted = [slot.total for slot in device_bytes(program_of(plan, profile))]
    promised = plan.prediction.peak_bytes
    assert max(predicted) == promised.device <= tensors

    run = trained(plan, tmp_path)
    found = run.measured_peak_bytes
    assert found is not None
    assert found.device <= promised.device
    assert_disk_within(promised.disk, found.disk, num_slots=len(predicted))
    assert promised.device - found.device <= max(0.02 * found.device, SLACK_BYTES)
    if len(run.slot_bytes) > 1:  # else the plan keeps everything, and no slots are told apart
        slots = zip(run.slot_bytes, predicted, strict=True)
        assert [slot for slot, (seen, most) in enumerate(slots) if seen > most] == []


# --- what a step writes to disk -------------------------------------------------------------------


def with_a_disk(profile: Profile, units: Sequence[UnitPlan], **settings: Any) -> Plan:
    """As if it had been planned: with bytes on disk, and a step of two seconds."""
    said = {"step_seconds": 2.0, "peak_bytes": TierBytes(device=0, context=0, host=0, disk=1)}
    return plan_for_profile(profile, units, piece_bytes=PIECE_BYTES, **said, **settings)


WRITES: list[tuple[int | None, Updates, int]] = [
    (None, "in backward", 1),
    (None, "after backward", 1),
    (None, "in backward", 3),
    (7, "in backward", 1),
    (8, "after backward", 2),
]
"""Everything on disk, or mixed decisions by a seed; when updates come; micro-batches."""


@pytest.mark.nightly(but=("None-in backward-1", "7-in backward-1"))
@pytest.mark.parametrize(("seed", "updates", "micro_batches"), WRITES)
def test_a_step_writes_what_is_said(
    seed: int | None,
    updates: Updates,
    micro_batches: int,
    tmp_path_factory: Profiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = read_profile(profile_file(tmp_path_factory, "tiny-llama"))
    alone = updates == "in backward" and micro_batches == 1
    units = (
        decided(described_by(profile), Activations(tier="disk"), DISK)
        if seed is None
        else mixed(described_by(profile), random.Random(seed), "disk", stepped=alone)
    )
    plan = with_a_disk(profile, units, updates=updates, micro_batches=micro_batches)
    run = started(profile, units, tmp_path, piece_bytes=PIECE_BYTES, plan=plan)
    usual, written = SpillFile.write, 0

    def counting(file: SpillFile, offset: int, data: memoryview) -> None:
        nonlocal written
        written += len(data)
        usual(file, offset, data)

    monkeypatch.setattr(SpillFile, "write", counting)
    for _ in range(3):  # the first ones make the optimizer's states
        written = 0
        for _ in range(micro_batches):
            run.backward(0)
        run.update()
    said = wear(plan, profile)
    assert said is not None
    assert said.step_bytes == written
    assert said.day_bytes == said.step_bytes * 43_200
    assert said.life_days is None
    bears = replace(profile.hardware.tier("disk"), endurance_bytes=3 * said.day_bytes)
    known = wear(plan, replace(profile, hardware=profile.hardware.with_tier(bears)))
    assert known == replace(said, life_days=3.0)


def test_what_is_not_on_a_disk_or_not_written_wears_nothing(tmp_path_factory: Profiles) -> None:
    profile = read_profile(profile_file(tmp_path_factory, "tiny-llama"))
    units = described_by(profile)
    in_memory = plan_for_profile(profile, decided(units, KEEP, DISK))  # it says: nothing on disk
    assert wear(in_memory, profile) is None
    assert wear(with_a_disk(profile, decided(units, KEEP, PERSISTENT)), profile) is None


# --- forms by leave -------------------------------------------------------------------------------

LEAVES = ("rounding", "int8-activations", "low-rank-activations")
BATCH, TOKENS, WIDTH, CLASSES, BLOCKS = 2, 256, 96, 2048, 2
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": CLASSES, "num_hidden_layers": BLOCKS, "intermediate_size": 384},
    "gpt2": {"vocab_size": CLASSES, "n_layer": BLOCKS},
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, and the numbers that it is trained in."""

    model: str
    precision: Precision
    dtype: DType = "bfloat16"
    adapter: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.precision, self.dtype, self.adapter)))


KINDS = [
    Kind("llama", "autocast"),
    Kind("llama", "master"),
    Kind("llama", "pure", "float32"),
    Kind("llama", "autocast", adapter="lora r=4"),
    Kind("llama", "pure", adapter="lora r=4"),
    Kind("gpt2", "autocast"),
    Kind("gpt2", "master"),
]

FORMS: list[tuple[Activations, Activations]] = [  # of blocks, and of the last part
    (Activations(form="int8"), KEEP),
    (Activations(tier="disk", form="int8"), KEEP),
    (Activations(form="low-rank"), KEEP),
    (Activations(tier="disk", form="low-rank"), KEEP),
    (Activations(form="tiled"), KEEP),
    (RECOMPUTE, Activations(form="8 tiles")),
    (RECOMPUTE, Activations(form="64 tiles")),
    (Activations(form="tiled"), Activations(form="64 tiles")),
    (Activations(form="int8"), Activations(form="64 tiles")),
]


def profile_by_leave(factory: Profiles, kind: Kind) -> Profile:
    def make(folder: Path) -> Profile:
        path = folder / f"by-leave-{kind}.json"
        return profiled_here(
            preset_with(path, f"tiny-{kind.model}", **SIZES[kind.model]),
            folder,
            dtype=kind.dtype,
            precision=kind.precision,
            adapter=kind.adapter,
            allow=LEAVES,
            batch_size=BATCH,
            seq_len=TOKENS,
        )

    return profile_made(factory, f"by-leave-{kind}", make)


def excess_bytes(profile: Profile, states: Placement, step: tuple[Updates, int]) -> int:
    """The most that the promised peak stands above the measured one."""
    most = SLACK_BYTES + 8 * BATCH * TOKENS  # and the tokens, as what is to be predicted
    # The first block's input and the last one's output, in float32, and with adapters one more: a
    # frame of the model's forward holds them, and autograd under `int8` does not. A part is
    # promised the most of all forms.
    most += 3 * 4 * BATCH * TOKENS * WIDTH
    if not states.is_persistent:
        most += 4 * PIECE_BYTES  # staging: a small plan has fewer pieces than are counted
    if step[1] > 1:
        # Gradients are counted to the end of the last backward, and the running unit's twice.
        most += 2 * max(unit.gradient_bytes for unit in profile.units)
    return most


def _cases() -> Iterator[object]:
    """Two kinds of steps for every form in every precision; each kind meets each of both."""
    steps = list(itertools.product([("in backward", 1), *STEPS], [PERSISTENT, DISK]))
    for number, (kind, forms) in enumerate(itertools.product(KINDS, FORMS)):
        if kind.model == "gpt2" and forms[0].form == "tiled":
            continue  # its MLP ends in dropout, which draws numbers: it is no form there
        for place in (number, 3 * number + 5):
            step, states = steps[place % len(steps)]
            activations = " and ".join(map(activations_text, forms))
            name = f"{kind}, {activations}, {step[0]} {step[1]}, {decision_name(states)}"
            yield pytest.param(kind, forms, step, states, id=name)


@pytest.mark.slow  # each form is asked for every change by test_compressed and test_tiles
@pytest.mark.parametrize(("kind", "forms", "step", "states"), [*_cases()])
def test_measured_bytes_of_forms_by_leave_never_exceed_predicted_and_are_near(
    kind: Kind,
    forms: tuple[Activations, Activations],
    step: tuple[Updates, int],
    states: Placement,
    tmp_path_factory: Profiles,
    tmp_path: Path,
) -> None:
    profile = profile_by_leave(tmp_path_factory, kind)
    blocks, last = forms
    assert blocks.form in {cost.form for cost in profile.units[1].forms}
    assert last.form in {cost.form for cost in profile.units[-1].forms}
    *before, part = decided(described_by(profile), blocks, states)
    units = without_freedom((*before, replace(part, activations=last)))
    updates, micro_batches = step
    found = peaks(profile, units, tmp_path, updates=updates, micro_batches=micro_batches)
    assert_within_the_promise(found)
    excess = max(found.predicted) - max(found.measured)
    assert excess <= excess_bytes(profile, states, step)


# --- compiled blocks ------------------------------------------------------------------------------


@pytest.fixture(params=["aot_eager", "inductor"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: Profiles) -> Iterator[Profile]:
    def make(folder: Path) -> Profile:
        return measure(
            load_source("tiny-llama"),
            batch_size=4,
            seq_len=64,
            dtype="float32",
            compile="blocks",
            allow=("rounding",),
            device="cpu",
            num_steps=1,
            spill_directory=folder,
            machine=load_hardware("cpu"),
        )

    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend=request.param):
        yield profile_made(tmp_path_factory, f"compiled-{request.param}", make)


@pytest.mark.slow  # a profile compiles every form
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (Activations(form="fused"), DISK),
        (Activations(form="fused"), PERSISTENT),
        (RECOMPUTE, DISK),
        (KEEP, DISK),
    ],
)
def test_measured_bytes_of_compiled_blocks_never_exceed_predicted(
    compiled: Profile, activations: Activations, states: Placement, tmp_path: Path
) -> None:
    forms = [[cost.form for cost in unit.forms] for unit in compiled.units if unit.kind == "block"]
    assert all({"keep", "fused", "full"} <= {*names} for names in forms)
    units = decided(described_by(compiled), activations, states)
    assert_within_the_promise(peaks(compiled, units, tmp_path))


# --- what profiling leaves behind -----------------------------------------------------------------


def test_what_others_let_go_of_is_counted_until_the_next_measurement() -> None:
    left = [torch.ones(1 << 16)]
    counted = bytes_of_others()
    left.clear()
    assert storage_bytes(reachable(HOST)) >= counted
    assert bytes_of_others() == counted - (4 << 16)
