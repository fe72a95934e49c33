"""Steps that need no solver: decisions made by hand or by chance, with their records."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from protrain_plan.planning.stages.cycles import Pipeline
from protrain_plan.planning.stages.pipelines import Stage, pipelined, planned
from protrain_plan.planning.stages.shapes import Shape
from protrain_plan.presentation.report.step import Step, simulated
from protrain_runtime.contract.program.memory import peak_bytes
from protrain_runtime.contract.program.recording import Event, Recording
from protrain_runtime.contract.records import fingerprint, write_plan, write_profile
from protrain_runtime.contract.records.hardware import Collectives, Interconnect
from protrain_runtime.contract.records.plan import (
    ALONE,
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Budgets,
    DeviceGroup,
    Placement,
    Prediction,
    Schedule,
    StepSettings,
    UnitPlan,
    Updates,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import MB, decoder, drafted, gpu, random_profile
from tests.support.random_problems import random_units

Decision = tuple[Activations, Placement, Schedule]


def step_of(
    profile: Profile,
    decisions: Sequence[Decision],
    *,
    piece_bytes: int = 256 * MB,
    updates: Updates = "in backward",
    micro_batches: int = 1,
) -> Step:
    """The step of these decisions, one per unit, within budgets that it fills to nine tenths."""
    units = tuple(
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            activations=activations,
            states=states,
            schedule=schedule,
        )
        for unit, (activations, states, schedule) in zip(profile.units, decisions, strict=True)
    )
    settings = StepSettings(piece_bytes=piece_bytes, updates=updates, micro_batches=micro_batches)
    nothing = Budgets(device=0, host=0, disk=0)
    plan = drafted(profile, units, nothing, settings).regraded()
    report = simulated(plan, profile).report
    peaks, seconds = report.tier_peaks, report.step_seconds
    budgets = Budgets(
        device=(peaks.device + peaks.context) * 10 // 9,
        host=peaks.host * 10 // 9,
        disk=peaks.disk * 10 // 9,
    )
    prediction = Prediction(
        step_seconds=seconds, lower_bound_seconds=seconds / 1.01, peak_bytes=peaks
    )
    return simulated(replace(plan, budgets=budgets, prediction=prediction), profile)


@cache
def small_step() -> Step:
    """Every decision about activations and most about states, in six units, with waits."""
    profile = decoder(gpu(disk_gb=1000), blocks=4, pieces=2)
    prompt = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=0, update_drain=1)
    return step_of(
        profile,
        [
            (KEEP, PERSISTENT, Schedule()),
            (Activations(tier="host"), PERSISTENT, prompt),
            (Activations(form="full", tier="disk"), Placement(tier="host"), prompt),
            (RECOMPUTE, Placement(tier="host", keep_gathered=True), prompt),
            (KEEP, Placement(tier="disk"), Schedule(backward_lead=0.5)),
            (KEEP, Placement(tier="host"), Schedule()),
        ],
    )


@cache
def deep_step(blocks: int = 126) -> Step:
    """As many blocks as published models have at most, no two neighbours decided alike."""
    profile = decoder(gpu(disk_gb=20_000, host_gb=20_000), blocks=blocks, pieces=7)
    led = Schedule(forward_lead=1.5, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)
    choices: list[Decision] = [
        (Activations(tier="host"), Placement(tier="host"), led),
        (Activations(form="full", tier="disk"), Placement(tier="disk"), led),
        (RECOMPUTE, Placement(tier="host", keep_gathered=True), led),
        (KEEP, Placement(tier="disk"), Schedule(forward_lead=2, update_drain=2)),
    ]
    ends: Decision = (KEEP, PERSISTENT, Schedule())
    return step_of(profile, [ends, *(choices[n % 4] for n in range(blocks)), ends])


@cache
def stages_step(stage: int | None = None, *, micro_batches: int = 8) -> Step:
    """Four stages on two nodes of two cards, of which the first ones recompute and offload."""
    speed = Collectives(gather_bytes_per_s=20e9, reduce_bytes_per_s=20e9, latency_s=1e-6)
    far = replace(speed, gather_bytes_per_s=2e9, reduce_bytes_per_s=2e9)
    joined = Interconnect(
        devices_per_node=2, intra_node=speed, inter_node=far, below="of each device"
    )
    profile = decoder(replace(gpu(), interconnect=joined), blocks=8)
    budgets = Budgets(device=60 * 10**9, host=500 * 10**9, disk=0)
    shape = Shape(stages=4, group=ALONE, batch=1, micro_batches=micro_batches)
    whole = DeviceGroup(num_devices=4, num_nodes=2)
    pipeline = Pipeline(profile, budgets, StepSettings(group=whole), shape)
    led = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
    lean: list[Decision] = [(RECOMPUTE, Placement(tier="host"), led)]
    kept: list[Decision] = [(KEEP, PERSISTENT, Schedule())]
    stages: list[Stage] = []
    for s, decisions in enumerate((kept + 2 * lean, kept + lean, 2 * kept, 3 * kept)):
        runs = pipeline.runs((3, 5, 7, 10), s)
        problem = pipeline.problem(runs, s)
        units = [problem.unit_plan(unit, *decided) for unit, decided in enumerate(decisions)]
        plan = drafted(profile, units, budgets, problem.settings)
        peaks = peak_bytes(problem.program(units))
        stages.append(planned(problem, runs, with_settings(plan, peak_bytes=peaks)))
    found = pipelined(pipeline, stages)
    return simulated(found.plan(found.step_seconds / 1.04), profile, stage)


def stages_files(folder: Path) -> Path:
    """The plan of these stages, with its profile beside it."""
    of = stages_step().of_stages
    assert of is not None
    write_profile(of.pipeline.pipeline.profile, folder / "profile.yaml")
    write_plan(of.plan, folder / "plan.yaml")
    return folder / "plan.yaml"


def random_step(rng: random.Random) -> Step:
    """Any decisions with any leads and drains on any machine, whatever memory they take."""
    profile = random_profile(rng)
    updates: list[Updates] = ["in backward", "after backward"]
    settings = StepSettings(
        piece_bytes=rng.choice([16 << 20, 1 << 40]),
        updates=rng.choice(updates),
        micro_batches=rng.choice([1, 2]),
    )
    units = random_units(profile, rng, settings)
    return step_of(
        profile,
        [(unit.activations, unit.states, unit.schedule) for unit in units],
        piece_bytes=settings.piece_bytes,
        updates=settings.updates,
        micro_batches=settings.micro_batches,
    )


GOLDEN = Path(__file__).parents[1] / "golden"


def recorded(step: Step) -> Recording:
    """The simulated step as if it had run, a quarter slower and with the bytes promised."""
    return Recording(
        plan_fingerprint=fingerprint(step.plan),
        step_seconds=1.25 * step.report.step_seconds,
        events=tuple(
            Event(
                lane=span.lane, name=span.name, start_s=1.25 * span.start_s, end_s=1.25 * span.end_s
            )
            for span in step.timeline.spans
        ),
        slot_bytes=tuple(slot.device.total for slot in step.report.slots),
    )


FRONT = [
    {"device_bytes": size, "step_seconds": seconds, "gap": gap}
    for size, seconds, gap in ((6 * 10**9, 0.9, 0.002), (9 * 10**9, 0.7, 0.0))
]
