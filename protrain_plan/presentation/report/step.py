"""A plan with its profile, and the step that the simulator predicts: lanes, waits, memory."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from protrain_plan.checking.plan_files import opened, read_files
from protrain_plan.planning.model.problem import checked
from protrain_plan.simulation.group import profile_for
from protrain_plan.simulation.report import StepReport, report, stall_cause
from protrain_plan.simulation.timeline import Span, Timeline, simulate
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.effects import BoundProgram
from protrain_runtime.contract.program.program import pinned_bytes
from protrain_runtime.contract.program.recording import Event
from protrain_runtime.contract.records import fingerprint, read_plan, read_profile
from protrain_runtime.contract.records.hardware import TierName, is_accelerator
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile

if TYPE_CHECKING:
    from protrain_plan.planning.stages.pipelines import Pipelined


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStages:
    """The pipeline that a step's stage belongs to: its plan, its prediction, and the stage."""

    plan: Plan
    pipeline: "Pipelined"
    stage: int

    def __str__(self) -> str:
        """`stage 1 of 2`."""
        return f"stage {self.stage} of {len(self.pipeline.stages)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A simulated step; with micro-batches, the last of them and the update after it.

    For a pipeline, plan and profile are those of one stage.
    """

    plan: Plan
    profile: Profile
    program: BoundProgram
    timeline: Timeline
    report: StepReport
    of_stages: OfStages | None = None

    @property
    def whole(self) -> Plan:
        """The plan with all stages."""
        return self.of_stages.plan if self.of_stages else self.plan


def simulated(plan: Plan, profile: Profile, stage: int | None = None) -> Step:
    """Return the step of one device of a plan; the profile has the plan's units.

    For a pipeline it is the step of a stage, by default of the one that waits least. Raises
    ProtrainError if the machine has no interconnect for several devices, or the plan no such stage.
    """
    of_stages = None
    if plan.pipeline is None:
        if stage is not None:
            raise ProtrainError("the plan has no stages", key="--stage", fix="leave it out")
    else:
        if stage is not None and stage not in range(plan.num_stages):
            problem, last = f"the plan has no stage {stage}", plan.num_stages - 1
            raise ProtrainError(problem, key="--stage", fix=f"choose one of 0 to {last}")
        from protrain_plan.planning.stages.pipelines import of_plan  # with the solver

        found = of_plan(plan, profile)
        stage = found.run.idle.index(min(found.run.idle)) if stage is None else stage
        of_stages = OfStages(plan=plan, pipeline=found, stage=stage)
        runs, plan = found.stages[stage].runs, found.stages[stage].plan
        profile = found.pipeline.problem(runs, stage, plan.settings.piece_bytes).profile
    profile = profile_for(profile, plan)
    program = program_of(plan, profile)
    return Step(
        plan=plan,
        profile=profile,
        program=program,
        timeline=simulate(program),
        report=report(program),
        of_stages=of_stages,
    )


def read_step(
    plan_path: Path, profile_path: Path | None = None, *, stage: int | None = None
) -> Step:
    """The step of the plan in a file; its profile is by default the one in its folder.

    Raises ProtrainError if a file is no such record, if plan and profile do not belong together, or
    if the plan has no such `stage`.
    """
    plan, source = read_plan(plan_path), str(plan_path)
    case = None if profile_path else opened(read_files(plan_path))
    if case:
        profile = case.profile
    else:
        path = profile_path or plan_path.with_name("profile.yaml")
        if not (profile_path or os.path.exists(path)):  # noqa: PTH110  (a name that no file can have)
            problem = "the profile that this plan was made from is not in its folder"
            raise ProtrainError(problem, source=source, fix="name it with --profile")
        profile = read_profile(path)
        if (found := fingerprint(profile)) != plan.profile_fingerprint:
            raise ProtrainError(
                f"not the profile that {plan_path} was made from: this one is {found},"
                f" that one was {plan.profile_fingerprint}",
                source=str(path),
                fix="name the plan's own profile with --profile, or plan again",
            )
    try:
        checked(plan, profile)
        step = simulated(plan, profile, stage)
    except ProtrainError as error:
        raise ProtrainError(error.message, source=source, key=error.key, fix=error.fix) from None
    if not step.report.step_seconds:
        raise ProtrainError("a step that takes no time cannot be shown", source=source)
    return step


MAX_BARS = 1_000
"""Maximum of bars per lane. With more, consecutive pieces of one chunk are one bar: a chunk on disk
is updated in hundreds of pieces."""


class Bar(NamedTuple):
    """A slot's compute, a move, or several pieces of one chunk, on a lane."""

    start_s: float
    end_s: float
    kind: str  # a move's kind; "forward", "backward" and "update on the device" on compute
    unit: int
    slot: int
    bytes: int
    num_pieces: int = 1


class Wait(NamedTuple):
    """A time in which compute waits before `slot`."""

    start_s: float
    end_s: float
    slot: int
    cause: str  # "parameters from host"
    waited_for: str  # the move whose end ended it
    lane: str


def bars(step: Step, ran: Iterable[Span | Event]) -> dict[str, tuple[Bar, ...]]:
    """Return the bars of a simulated or a recorded step on each lane, in the order of starts."""
    known = named(step)
    found: dict[str, list[Bar]] = {}
    for one in sorted(ran, key=lambda one: (one.start_s, one.end_s)):
        bar = known[one.name]._replace(start_s=one.start_s, end_s=one.end_s)
        found.setdefault(one.lane, []).append(bar)
    return {
        lane: tuple(_merged(of_lane) if len(of_lane) > MAX_BARS else of_lane)
        for lane, of_lane in found.items()
    }


def named(step: Step) -> dict[str, Bar]:
    """Return a bar without a time for each name of the program."""
    program = program_of(step.plan, step.profile, clipped=True)  # with the moves of other steps
    end = len(program.slots)
    update = program.slot_name(end)
    known = {update: Bar(0.0, 0.0, update, 0, end, 0)}
    for index, slot in enumerate(program.slots):
        kind = "forward" if slot.forward else "backward"
        known[program.slot_name(index)] = Bar(0.0, 0.0, kind, slot.unit, index, 0)
    for number, move in enumerate(program.moves):
        ran = move.kind, move.unit, move.slot, move.bytes
        known[program.move_name(number)] = Bar(0.0, 0.0, *ran)
    return known


def waits(step: Step) -> tuple[Wait, ...]:
    """Waits of compute, in order: before a slot, first for drains, then for arrivals."""
    program, compute = step.program, step.timeline.compute
    moves = {program.move_name(number): move for number, move in enumerate(program.moves)}
    now = [0.0, *(end for _, end in compute)]  # where the next wait before a slot begins
    found: list[Wait] = []
    for stall in step.timeline.stalls:
        start, end = now[stall.slot], now[stall.slot] + stall.seconds
        now[stall.slot] = end
        cause = stall_cause(stall, moves[stall.waited_for])
        found.append(Wait(start, end, stall.slot, cause, stall.waited_for, stall.lane))
    return tuple(found)


def _merged(found: Iterable[Bar]) -> Iterator[Bar]:
    """Consecutive pieces of one chunk as one bar."""
    for _, run in groupby(found, key=lambda bar: (bar.kind, bar.unit, bar.slot)):
        pieces = list(run)
        yield pieces[0]._replace(
            end_s=pieces[-1].end_s,
            bytes=sum(bar.bytes for bar in pieces),
            num_pieces=sum(bar.num_pieces for bar in pieces),
        )


KINDS = (
    *("context", "base", "staging", "states", "gradients", "activations", "buffers"),
    *("fetched ahead", "leaving", "reserved"),
)
"""Kinds of bytes, from the bottom of a stack to its top. "context" is memory of the process besides
tensors, with the allocator's; "reserved" is room for activations that are elsewhere now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMemory:
    """Bytes on a tier from `times_s[index]` on; `by_kind` in the order of KINDS."""

    name: str  # "device", "host", "disk"
    budget_bytes: int
    times_s: tuple[float, ...]
    by_kind: dict[str, tuple[int, ...]]

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.by_kind.values(), strict=True)))


def slot_begins_s(step: Step) -> tuple[float, ...]:
    """Start of each slot, and of the device's update."""
    ends = [0.0, *(end for _, end in step.timeline.compute[:-1])]
    drains = [0.0] * len(ends)
    for stall in step.timeline.stalls:
        if stall.reason == "drain":
            drains[stall.slot] += stall.seconds
    return tuple(end + drain for end, drain in zip(ends, drains, strict=True))


def memory(step: Step) -> tuple[TierMemory, ...]:
    """The device, and the machine's tiers below it that hold anything."""
    hardware, slots = step.profile.hardware, step.report.slots
    by_kind = {kind: [0] * len(slots) for kind in KINDS}
    by_kind["context"] = [hardware.device.besides_bytes] * len(slots)
    for number, slot in enumerate(slots):
        for kind, size in slot.device.by_kind.items():
            by_kind[kind][number] = size
    device = _memory(step, "device", slot_begins_s(step), by_kind)
    below = (_tier(step, tier.name) for tier in hardware.tiers)
    return (device, *(tier for tier in below if tier.by_kind))


def _tier(step: Step, tier: TierName) -> TierMemory:
    """A tier below: room is reserved for the whole step, and swaps come and go in it."""
    program, gradients = step.program, 0
    pinned = tier == "host" and is_accelerator(program.device)
    for state in program.states:
        if state.home == tier and state.own.used_by:
            size = state.own.gradient_bytes
            gradients += pinned_bytes(size) if pinned else size
    states = sum(state.tier_bytes.get(tier, 0) for state in program.states) - gradients
    room = sum(activation.tier_bytes.get(tier, 0) for activation in program.activations)
    spans = {span.name: span for span in step.timeline.spans}
    changes: list[tuple[float, int]] = []  # swapped bytes are here until the device has them back
    for number, move in enumerate(program.moves):
        if move.lane.tier == tier and move.kind in ("swap out", "swap in"):
            span, leaves = spans[program.move_name(number)], move.kind == "swap out"
            changes.append((span.start_s, move.bytes) if leaves else (span.end_s, -move.bytes))
    changes.sort()
    times = tuple(dict.fromkeys([0.0, *(time for time, _ in changes)]))
    after = dict(zip((t for t, _ in changes), accumulate(size for _, size in changes), strict=True))
    swapped = [after.get(time, 0) for time in times]
    by_kind = {
        "staging": [program.staging_bytes(tier)] * len(times),
        "states": [states] * len(times),
        "gradients": [gradients] * len(times),
        "activations": swapped,
        "reserved": [room - size for size in swapped],
    }
    return _memory(step, tier, times, by_kind)


def _memory(
    step: Step, tier: str, times_s: tuple[float, ...], by_kind: Mapping[str, list[int]]
) -> TierMemory:
    return TierMemory(
        name=tier,
        budget_bytes=getattr(step.plan.budgets, tier),
        times_s=times_s,
        by_kind={kind: tuple(by_kind[kind]) for kind in KINDS if any(by_kind.get(kind, ()))},
    )
