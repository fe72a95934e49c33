"""What the commands print: tables for people, plain data for `--json`."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from protrain_plan.records import activations_text, states_text
from protrain_plan.records.plan import Plan, TierBytes, UnitPlan
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.simulation.report import in_words as report_in_words
from protrain_plan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from protrain_plan.planning.explaining import Explanation
    from protrain_plan.planning.objectives import Answer
    from protrain_plan.planning.outcome import Infeasible, Solved
    from protrain_plan.running import Run

Renderable = RenderableType


def escaped(text: str) -> str:
    """Text in which nothing is taken for markup."""
    return escape(text)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def run_name(first: str, last: str) -> str:
    """`model.layers.0` to `model.layers.11` as `model.layers.0-11`."""
    return first if first == last else f"{first}-{last.rpartition('.')[2]}"


# --- profile --------------------------------------------------------------------------------------


def profile_json(profile: Profile) -> dict[str, Any]:
    """What `protrain profile --json` prints."""
    keep = [unit.cost("keep") for unit in profile.units]
    return {
        "model": profile.workload.model,
        "model_fingerprint": profile.model_fingerprint,
        "num_units": len(profile.units),
        "num_parameters": sum(unit.num_parameters for unit in profile.units),
        "model_states_bytes": _states_bytes(profile.units),
        "activation_bytes": sum(cost.kept_bytes for cost in keep),
        "forward_seconds": sum(cost.forward_s for cost in keep),
        "backward_seconds": sum(cost.backward_s for cost in keep),
        "context_bytes": profile.hardware.device.context_bytes,
    }


def _states_bytes(units: Sequence[Unit]) -> int:
    return sum(u.parameter_bytes + u.gradient_bytes + u.state_bytes for u in units)


def profile_text(profile: Profile, path: Path) -> Renderable:
    """What `protrain profile` prints."""
    table = _table("unit", "parameters", "states", "kept", "input only", "forward", "backward")
    alike = itertools.groupby(
        profile.units, key=lambda u: (u.kind, u.num_parameters, u.parameter_bytes, u.forms)
    )
    for _, run in alike:
        units = list(run)
        unit, keep = units[0], units[0].cost("keep")
        forms = {cost.form: cost for cost in unit.forms}
        table.add_row(
            run_name(unit.name, units[-1].name),
            f"{unit.num_parameters / 1e6:.1f} M",
            format_bytes(_states_bytes([unit])),
            format_bytes(keep.kept_bytes),
            format_bytes(forms["full"].kept_bytes) if "full" in forms else "",
            format_seconds(keep.forward_s),
            format_seconds(keep.backward_s),
        )
    data = profile_json(profile)
    total = Text(
        f"{data['num_parameters'] / 1e6:.1f} M parameters,"
        f" {format_bytes(data['model_states_bytes'])} of model states,"
        f" {format_bytes(data['activation_bytes'])} of activations,"
        f" {format_bytes(data['context_bytes'])} besides tensors;"
        f" forward and backward {format_seconds(data['forward_seconds'])}"
        f" + {format_seconds(data['backward_seconds'])}"
    )
    return Group(table, total, Text(f"wrote {path}"))


# --- plan -----------------------------------------------------------------------------------------


def search_text(stage: str, step_seconds: float | None, bound_seconds: float | None) -> str:
    """How far the search is."""
    parts = [stage]
    if step_seconds is not None:
        parts.append(f"best {format_seconds(step_seconds)}")
    if bound_seconds is not None:
        parts.append(f"bound {format_seconds(bound_seconds)}")
    return ", ".join(parts)


def _tiers(peak: TierBytes) -> dict[str, int]:
    return {
        "device": peak.device,
        "context": peak.context,
        "host": peak.host,
        "disk": peak.disk,
    }


def solved_json(solved: "Solved") -> dict[str, Any]:
    """What `protrain plan --json` prints for a plan."""
    prediction = solved.plan.prediction
    return {
        "status": solved.status,
        "gap": solved.gap,
        "lower_bound_seconds": prediction.lower_bound_seconds,
        "step_seconds": prediction.step_seconds,
        "stall_seconds": solved.stall_seconds,
        "solve_seconds": solved.solve_seconds,
        "peak_bytes": _tiers(prediction.peak_bytes),
        "solver": solved.solver,
    }


def _decisions(units: Sequence[UnitPlan]) -> Table:
    table = _table("units", "activations", "model states")
    same = itertools.groupby(units, key=lambda u: (u.kind, u.activations, u.states))
    for (_, activations, states), run in same:
        members = list(run)
        # Parts that happen to stand side by side are no run of one name.
        groups = [members] if members[0].kind == "block" else [[unit] for unit in members]
        for group in groups:
            name = run_name(group[0].name, group[-1].name)
            table.add_row(name, activations_text(activations), states_text(states))
    return table


def solved_text(solved: "Solved", profile: Profile, path: Path) -> Renderable:
    """What `protrain plan` prints for a plan."""
    plan, prediction = solved.plan, solved.plan.prediction
    peak = prediction.peak_bytes
    table = _table("tier", "predicted peak", "budget")
    table.add_row(
        f"device (tensors + {format_bytes(peak.context)} besides)",
        format_bytes(peak.device + peak.context),
        format_bytes(plan.budgets.device),
    )
    for tier in profile.hardware.tiers:
        used = peak.host if tier.name == "host" else peak.disk
        budget = plan.budgets.host if tier.name == "host" else plan.budgets.disk
        table.add_row(tier.name, format_bytes(used), format_bytes(budget))
    verdict = Text(
        f"predicted step {format_seconds(prediction.step_seconds)},"
        f" at most {solved.gap:.2%} above the fastest possible"
        f" ({solved.status}, {solved.solver}, {format_seconds(solved.solve_seconds)})"
    )
    return Group(_decisions(plan.units), "", table, "", verdict, Text(f"wrote {path}"))


def answer_json(answer: "Answer", explanation: "Explanation | None") -> dict[str, Any]:
    """What `protrain plan --json` prints."""
    data: dict[str, Any] = {}
    if answer.infeasible is not None:
        data |= infeasible_json(answer.infeasible)
    if answer.solved is not None:
        data |= solved_json(answer.solved)
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


def answer_text(answer: "Answer", explanation: "Explanation | None", path: Path) -> Renderable:
    """What `protrain plan` prints."""
    if answer.infeasible is not None:
        return infeasible_text(answer.infeasible)
    assert answer.solved is not None
    if answer.front:
        return _front_text(answer)
    lines: list[Renderable] = []
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


def _front_text(answer: "Answer") -> Renderable:
    """Memory against time, the bars in proportion to the slowest step."""
    table = _table("device memory", "step", "gap", "")
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


def infeasible_json(answer: "Infeasible") -> dict[str, Any]:
    """What `protrain plan --json` prints where no plan fits."""
    return {
        "status": "infeasible",
        "tier": answer.tier,
        "slot": answer.slot,
        "occupants": dict(answer.occupants),
        "budget_bytes": answer.budget_bytes,
        "shortfall_bytes": answer.shortfall_bytes,
        "smallest_budget_bytes": answer.smallest_budget_bytes,
        "proven_budget_bytes": answer.proven_budget_bytes,
        "largest_batch_size": answer.largest_batch_size,
        "largest_seq_len": answer.largest_seq_len,
        "advice": list(answer.advice),
    }


def infeasible_text(answer: "Infeasible") -> Renderable:
    """What `protrain plan` prints where no plan fits."""
    head = Text(
        f"no plan fits: {format_bytes(answer.shortfall_bytes)} more {answer.tier} memory is needed"
        f" than the {format_bytes(answer.budget_bytes)} of the budget"
    )
    table = _table(answer.slot, "bytes")
    for kind, size in answer.occupants:
        table.add_row(kind, format_bytes(size))
    advice = [Text(f"- {line}") for line in (*answer.advice, *_sizes_that_fit(answer))]
    return Group(head, "", table, "", *advice)


def _sizes_that_fit(answer: "Infeasible") -> list[str]:
    if answer.largest_batch_size is None and answer.largest_seq_len is None:
        return ["no batch size and no sequence length fits"]
    lines: list[str] = []
    if answer.largest_batch_size is not None:
        lines.append(f"the largest batch that fits is {answer.largest_batch_size}")
    if answer.largest_seq_len is not None:
        lines.append(f"the longest sequence that fits is {answer.largest_seq_len} tokens")
    return [f"{line} (if bytes grow in proportion)" for line in lines]


# --- run ------------------------------------------------------------------------------------------


def run_json(plan: Plan, run: "Run", *, plain: bool, verified: bool | None) -> dict[str, Any]:
    """What `protrain run --json` prints."""
    measured = run.measured_peak_bytes
    return {
        "plain": plain,
        "losses": list(run.losses),
        "step_seconds": run.step_seconds,
        "seconds": list(run.seconds),
        "predicted_step_seconds": None if plain else plan.prediction.step_seconds,
        "predicted_peak_bytes": None if plain else _tiers(plan.prediction.peak_bytes),
        "measured_peak_bytes": None if measured is None else _tiers(measured),
        "parameters_sha256": run.parameters_sha256,
        "verified": verified,
    }


def run_text(plan: Plan, run: "Run", *, plain: bool, verified: bool | None) -> Renderable:
    """What `protrain run` prints."""
    lines: list[Renderable] = [
        Text("losses " + " ".join(f"{loss:.4f}" for loss in run.losses)),
    ]
    predicted, measured = plan.prediction.peak_bytes, run.measured_peak_bytes
    table = _table("", "predicted", "measured")
    blank = "-"
    table.add_row(
        "step",
        blank if plain else format_seconds(plan.prediction.step_seconds),
        format_seconds(run.step_seconds),
    )
    rows = (
        ("device peak, tensors", predicted.device, measured.device if measured else None),
        ("device, besides tensors", predicted.context, measured.context if measured else None),
        ("host peak", predicted.host, measured.host if measured else None),
        ("disk peak", predicted.disk, measured.disk if measured else None),
    )
    for label, promise, found in rows:
        if not promise and not found:
            continue
        table.add_row(
            label,
            blank if plain else format_bytes(promise),
            blank if found is None else format_bytes(found),
        )
    lines.append(table)
    if measured is None:
        lines.append(Text("peaks are measured in the last step of two or more"))
    if verified is not None:
        lines.append(
            Text("verified: losses and parameters equal plain PyTorch's bitwise", style="green")
            if verified
            else Text("NOT verified: losses or parameters differ from plain PyTorch's", style="red")
        )
    return Group(*lines)
