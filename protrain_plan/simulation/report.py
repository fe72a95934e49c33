"""Reports of a step's time and memory: a record for programs, sentences for people."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from protrain_plan.simulation.critical_path import PathPart, critical_path
from protrain_plan.simulation.timeline import Stall, simulate
from protrain_runtime.contract.program.effects import BoundProgram
from protrain_runtime.contract.program.memory import SlotBytes, device_bytes, peak_bytes
from protrain_runtime.contract.program.program import COMPUTE, Move, MoveKind, slot_words
from protrain_runtime.contract.records.plan import Plan, TierBytes
from protrain_runtime.contract.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """A lane's work in a step.

    busy_s       seconds in which it runs something
    utilisation  busy_s as a fraction of the step
    bytes        what it transfers; 0 for compute and the optimizer
    num_moves    moves that it runs; for compute, slots that take time
    """

    name: str
    busy_s: float
    utilisation: float
    bytes: int
    num_moves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """A slot's compute in time, and the device's peak in it."""

    name: str  # "forward of layers.3"
    start_s: float
    end_s: float
    device: SlotBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A simulated step. The last of `slots`, after 2U of them, is the device's update.

    Stalls are summed by the lane of the move that ended them and by cause, most seconds first.
    `critical_path` is what the step waits for, one after the other (see `critical_path`).
    """

    step_seconds: float
    stall_seconds: float
    lanes: tuple[LaneReport, ...]  # compute first
    stall_by_lane: dict[str, float]
    stall_by_cause: dict[str, float]  # "parameters from host" -> seconds
    critical_path: tuple[PathPart, ...]
    slots: tuple[SlotReport, ...]
    peak_slot: int  # the first one at the device's peak
    tier_peaks: TierBytes

    @property
    def fullest(self) -> SlotReport:
        return self.slots[self.peak_slot]


def report(program: BoundProgram) -> StepReport:
    """Simulate the program once and report the step."""
    timeline, device = simulate(program), device_bytes(program)
    slots = tuple(
        SlotReport(name=slot_words(program.units, index), start_s=start, end_s=end, device=held)
        for index, ((start, end), held) in enumerate(zip(timeline.compute, device, strict=True))
    )
    peak = max(range(len(slots)), key=lambda index: slots[index].device.total)
    moved = Counter({COMPUTE: 0})
    for move in sorted(program.moves, key=lambda move: str(move.lane)):
        moved[str(move.lane)] += move.bytes
    lanes: list[LaneReport] = []
    for lane, size in moved.items():
        spans = [span for span in timeline.spans if span.lane == lane]
        # A lane runs one thing at a time: only rounding can exceed the step.
        busy = min(sum(span.end_s - span.start_s for span in spans), timeline.step_seconds)
        lanes.append(
            LaneReport(
                name=lane,
                busy_s=busy,
                utilisation=busy / timeline.step_seconds if busy else 0.0,
                bytes=size,
                num_moves=len(spans),
            )
        )
    moves = {program.move_name(number): move for number, move in enumerate(program.moves)}
    return StepReport(
        step_seconds=timeline.step_seconds,
        stall_seconds=timeline.stall_s,
        lanes=tuple(lanes),
        stall_by_lane=_summed((stall.lane, stall.seconds) for stall in timeline.stalls),
        stall_by_cause=_summed(
            (stall_cause(stall, moves[stall.waited_for]), stall.seconds)
            for stall in timeline.stalls
        ),
        critical_path=critical_path(program, timeline),
        slots=slots,
        peak_slot=peak,
        tier_peaks=peak_bytes(program, device),
    )


def part_in_words(plan: Plan) -> str:
    """The scope of a report, if less than the plan's whole or mean step."""
    part = ""
    if (many := plan.settings.micro_batches) > 1:
        part = f"the last of {many} micro-batches, with its update"
    if plan.prediction.clipped_step_seconds:
        part = f"{part or 'a step'}, not clipped"
    return part


def in_words(report: StepReport, plan: Plan | None = None) -> list[str]:
    """Two to four sentences on the limits of a step's time and memory, or of the plan's."""
    step = format_seconds(report.step_seconds)
    of_it, never = "the step", f"in the step of {step}"
    if plan and (part := part_in_words(plan)):
        whole = format_seconds(plan.prediction.step_seconds)
        of_it, step = "that", f"{part} ({step}; the predicted step: {whole})"
        never = f"in {step}"
    sentences = [f"compute never waits {never}"]
    if report.stall_by_cause:
        waits = [f"{format_seconds(s)} for {cause}" for cause, s in report.stall_by_cause.items()]
        stall = format_seconds(report.stall_seconds)
        sentences = [f"compute waits {stall} of {step}: {', '.join(waits)}"]
    transfers = [lane for lane in report.lanes if lane.name != COMPUTE]
    if transfers:
        busiest = max(transfers, key=lambda lane: lane.busy_s)
        sentences.append(
            f"besides compute, {busiest.name} is busiest: "
            f"{100 * busiest.utilisation:.0f} % of {of_it}"
            + (f", with {format_bytes(busiest.bytes)}" if busiest.bytes else "")
        )
        path = report.critical_path
        seconds = _summed((part.lane, part.end_s - part.start_s) for part in path)
        shares = ", ".join(f"{lane} {format_seconds(s)}" for lane, s in seconds.items())
        words = f"the critical path is {shares}"
        if others := [part for part in path if part.lane != COMPUTE]:
            longest = max(others, key=lambda part: part.end_s - part.start_s)
            to_last = f" to {longest.last}" if longest.last != longest.first else ""
            words += f"; most of all it waits for {longest.first}{to_last}"
        sentences.append(words)
    fullest = report.fullest.device
    by_kind = sorted(fullest.by_kind.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in by_kind if size)
    sentences.append(
        f"the device is fullest ({format_bytes(fullest.total)}) in the {report.fullest.name}: "
        f"{parts or 'nothing'}"
    )
    below = [("host", report.tier_peaks.host), ("disk", report.tier_peaks.disk)]
    held = " and ".join(f"{name} holds {format_bytes(size)}" for name, size in below if size)
    if held:
        sentences.append(f"below the device, {held}")
    return sentences


def stall_cause(stall: Stall, move: Move) -> str:
    """The cause of a wait, after "for"."""
    what = carried(move.kind)
    match stall.reason:
        case "fetch":
            return f"{what} from {move.lane.tier or 'the other devices'}"
        case "drain":
            return f"{what} to be offloaded"
        case "end":
            if move.kind == "update":
                return "the last updates"
            return f"the last {what}" + " to be offloaded" * (move.lane.direction == "spill")
        case _:
            assert_never(stall.reason)


def carried(kind: MoveKind) -> str:
    """The objects of a kind of move."""
    match kind:
        case "fetch" | "all-gather":
            return "parameters"
        case "swap in" | "swap out":
            return "activations"
        case "spill gradients" | "add gradients" | "all-reduce" | "reduce-scatter":
            return "gradients"
        case "read states" | "update" | "write states":
            return "optimizer states"
        case _:
            assert_never(kind)


def _summed(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The seconds of each name, largest first."""
    totals = defaultdict[str, float](float)
    for name, value in seconds:
        totals[name] += value
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
