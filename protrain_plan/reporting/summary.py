"""What `protrain simulate` prints: where the step's seconds and bytes go."""

from dataclasses import asdict
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from protrain_plan.reporting.step import Step
from protrain_plan.simulation.ranks import Group
from protrain_plan.simulation.report import in_words
from protrain_plan.units import format_bytes, format_seconds


def summary_json(step: Step) -> dict[str, Any]:
    """The step as plain data, in seconds and bytes; `protrain show --json` has the time line."""
    report = step.report
    peaks = {tier: size for tier, size in asdict(report.tier_peaks).items() if tier != "allocator"}
    if held_back := report.tier_peaks.allocator:
        peaks["allocator"] = held_back
    expected = step.plan.prediction.expected_seconds
    several = asdict(Group.of(step.plan)) if step.plan.num_devices > 1 else {}
    return several | {
        "step_seconds": report.step_seconds,
        "predicted_step_seconds": step.plan.prediction.step_seconds,
        **({"expected_seconds": expected} if expected else {}),
        "stall_seconds": report.stall_seconds,
        "stall_by_cause": report.stall_by_cause,
        "stall_by_lane": report.stall_by_lane,
        "lanes": [asdict(lane) for lane in report.lanes],
        "peak_slot": report.peak_slot.name,
        "peak_slot_bytes": report.slots[report.peak_slot.index].device.by_kind,
        "peak_bytes": peaks,
    }


def summary_text(step: Step) -> RenderableType:
    """The lanes as a table, then what limits time and memory in sentences."""
    report, table = step.report, Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(("lane", "busy", "of the step", "bytes", "moves")):
        table.add_column(column, justify="left" if index == 0 else "right")
    for lane in report.lanes:
        table.add_row(
            lane.name,
            format_seconds(lane.busy_s),
            f"{lane.utilisation:.1%}",
            format_bytes(lane.bytes) if lane.bytes else "",
            f"{lane.num_moves}",
        )
    head = f"step {format_seconds(report.step_seconds)}"
    if step.plan.micro_batches > 1:
        whole = format_seconds(step.plan.prediction.step_seconds)
        head = (
            f"the last of {step.plan.micro_batches} micro-batches, with its update:"
            f" {format_seconds(report.step_seconds)} of the step's {whole}"
        )
    if step.plan.num_devices > 1:
        head += f", on each of {Group.of(step.plan)}"
    return Lines(Text(head), "", table, "", *(Text(line) for line in in_words(report)))
