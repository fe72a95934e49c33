"""What `protrain plan` prints: how far its search is, and its answer to what was asked."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from protrain_plan.rendering.infeasible import infeasible_json, infeasible_text
from protrain_plan.rendering.plans import solved_json, solved_text
from protrain_plan.rendering.tables import table_of
from protrain_plan.simulation.report import in_words as report_in_words
from protrain_plan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from protrain_plan.planning.explaining import Explanation
    from protrain_plan.planning.objectives import Answer


def search_text(stage: str, step_seconds: float | None, bound_seconds: float | None) -> str:
    """How far the search is."""
    parts = [stage]
    if step_seconds is not None:
        parts.append(f"best {format_seconds(step_seconds)}")
    if bound_seconds is not None:
        parts.append(f"bound {format_seconds(bound_seconds)}")
    return ", ".join(parts)


def answer_json(answer: "Answer", explanation: "Explanation | None") -> dict[str, Any]:
    """What `protrain plan --json` prints."""
    data: dict[str, Any] = {}
    if answer.infeasible is not None:
        data |= infeasible_json(answer.infeasible)
    if answer.solved is not None:
        data |= solved_json(answer.solved)
        data["kept_seconds"] = answer.kept_seconds
        data["lanes"] = {
            lane.name: {"busy_seconds": lane.busy_s, "utilisation": lane.utilisation}
            for lane in (answer.report.lanes if answer.report else ())
        }
    if answer.seconds_without_pins is not None:
        data["seconds_without_pins"] = answer.seconds_without_pins
    if answer.largest is not None:
        data["batch_size"] = answer.profile.workload.batch_size
        data["seq_len"] = answer.profile.workload.seq_len
        data["growth"] = answer.largest.growth
    if answer.least_memory is not None:
        least = answer.least_memory
        data["fastest_seconds"] = least.fastest_seconds
        data["limit_seconds"] = least.limit_seconds
        data["lower_bound_bytes"] = least.lower_bound_bytes
    if answer.front:
        data["front"] = [
            {"device_bytes": point.device_bytes, **solved_json(point.solved)}
            for point in answer.front
        ]
    if explanation is not None:
        data["explanation"] = asdict(explanation)
    return data


def answer_text(answer: "Answer", explanation: "Explanation | None", path: Path) -> RenderableType:
    """What `protrain plan` prints."""
    if answer.infeasible is not None:
        return infeasible_text(answer.infeasible)
    assert answer.solved is not None
    if answer.front:
        return _front_text(answer)
    lines: list[RenderableType] = []
    workload, plan = answer.profile.workload, answer.solved.plan
    if answer.largest is not None:
        size = f"{workload.batch_size} sequences of {workload.seq_len} tokens"
        lines.append(
            Text(
                f"the largest that fits: {size} (growth {answer.largest.growth};"
                " profile this size before you rely on it)\n"
            )
        )
    lines.append(solved_text(answer.solved, answer.profile, path))
    if answer.report is not None:
        lines += [Text(line) for line in report_in_words(answer.report)]
    if answer.seconds_without_pins is not None:
        cost = plan.prediction.step_seconds / answer.seconds_without_pins - 1
        lines.append(Text(f"the pins cost {max(0.0, cost):.2%} of the step"))
    if answer.kept_seconds is not None and answer.kept_seconds > plan.prediction.step_seconds:
        longer = answer.kept_seconds / plan.prediction.step_seconds - 1
        lines.append(
            Text(
                "keeping everything on the device fits as well, and its step takes"
                f" {longer:.1%} longer: --pin '*: keep, persistent'"
            )
        )
    if answer.least_memory is not None:
        least = answer.least_memory
        lines.append(
            Text(
                f"within {least.limit_seconds / least.fastest_seconds:g} times the fastest step"
                f" ({format_seconds(least.fastest_seconds)}) no plan needs less device memory than"
                f" {format_bytes(least.lower_bound_bytes)}"
            )
        )
    if explanation is not None:
        from protrain_plan.planning.explaining import in_words

        lines += ["", *(Text(line) for line in in_words(explanation))]
    return Group(*lines)


_BAR_WIDTH = 30


def _front_text(answer: "Answer") -> RenderableType:
    """Memory against time, the bars in proportion to the slowest step."""
    table = table_of("device memory", "step", "gap", "")
    slowest = max(point.solved.plan.prediction.step_seconds for point in answer.front)
    for point in answer.front:
        seconds = point.solved.plan.prediction.step_seconds
        table.add_row(
            f"{-(-point.device_bytes // 2**20)}MiB",  # as one would type it, rounded up
            format_seconds(seconds),
            f"{point.solved.gap:.2%}",
            Text("█" * max(1, round(_BAR_WIDTH * seconds / slowest)), justify="left"),
        )
    note = Text("each line is a plan; --device-memory with a line's memory writes it")
    return Group(table, "", note)
