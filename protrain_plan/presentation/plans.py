"""What `protrain plan` and `protrain fit` print: plans, fronts of plans, or why there is none."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.presentation.profiles import error_band, trust
from protrain_plan.presentation.terminal import Table, Text, run_name, table_of, wrote
from protrain_plan.program.group import DeviceGroup
from protrain_plan.records import activations_text, states_text
from protrain_plan.records.hardware import is_accelerator
from protrain_plan.records.plan import TierBytes, UnitPlan
from protrain_plan.records.profile import Profile
from protrain_plan.simulation.memory import checkpoint_bytes
from protrain_plan.simulation.report import in_words as report_in_words
from protrain_plan.units import format_bytes, format_range, format_seconds

if TYPE_CHECKING:
    from protrain_plan.planning.explain.explaining import Explanation
    from protrain_plan.planning.outcome import Infeasible, Solved
    from protrain_plan.planning.questions.objectives import Answer, Fit


def solved_json(solved: "Solved") -> dict[str, Any]:
    """What `protrain plan --json` prints for a plan."""
    prediction = solved.plan.prediction
    return {
        "status": solved.status,
        "gap": solved.gap,
        **devices_json(DeviceGroup.of(solved.plan)),
        "lower_bound_seconds": prediction.lower_bound_seconds,
        "step_seconds": prediction.step_seconds,
        "expected_seconds": prediction.expected_seconds,
        "stall_seconds": solved.stall_seconds,
        "solve_seconds": solved.solve_seconds,
        "peak_bytes": tiers_json(prediction.peak_bytes),
        "solver": solved.solver,
        **({"replicas": [asdict(one) for one in solved.replicas]} if solved.replicas else {}),
    }


def devices_json(group: DeviceGroup) -> dict[str, int]:
    """The devices, where there is more than one."""
    return asdict(group) if group.num_devices > 1 else {}


def tiers_json(peak: TierBytes) -> dict[str, int]:
    """Bytes by tier."""
    return {
        "device": peak.device,
        "context": peak.context,
        "host": peak.host,
        "disk": peak.disk,
        **({"allocator": peak.allocator} if peak.allocator else {}),
    }


def solved_text(solved: "Solved", profile: Profile, path: Path) -> RenderableType:
    """What `protrain plan` prints for a plan."""
    plan, prediction = solved.plan, solved.plan.prediction
    peak = prediction.peak_bytes
    several = DeviceGroup.of(plan) if plan.num_devices > 1 else None
    table = table_of("tier", "predicted peak" + " of each device" * bool(several), "budget")
    held_back = f" + {format_bytes(peak.allocator)} for the allocator" if peak.allocator else ""
    table.add_row(
        f"device (tensors + {format_bytes(peak.context)} besides{held_back})",
        format_bytes(peak.on_device),
        format_bytes(plan.budgets.device),
    )
    for tier in profile.hardware.tiers:
        used = peak.host if tier.name == "host" else peak.disk
        budget = plan.budgets.host if tier.name == "host" else plan.budgets.disk
        table.add_row(tier.name, format_bytes(used), format_bytes(budget))
    verdict = Text(
        f"predicted step {format_seconds(prediction.step_seconds)}{_expected(solved, profile)},"
        f" at most {solved.gap:.2%} above the fastest possible"
        f" ({solved.status}, {solved.solver}, {format_seconds(solved.solve_seconds)})"
    )
    notes = [verdict]
    if several:
        notes.insert(0, Text(f"on {several}, each with batches of its own"))
    if len(solved.replicas) > 1:
        notes.insert(1, Text(f"other numbers of replicas: {_others(solved)}"))
    saving = checkpoint_bytes(plan.units, profile) - peak.device
    if not is_accelerator(profile.hardware.device.kind) and saving > 0:
        notes.append(Text(f"saving a checkpoint takes {format_bytes(saving)} more than a step"))
    return Group(_decisions(plan.units), "", table, "", *notes, wrote(path))


def _expected(solved: "Solved", profile: Profile) -> str:
    """Within what the step is expected, and who says so."""
    expected = format_range(solved.plan.prediction.expected_seconds)
    said = (
        "by the profile's own repetitions"
        if profile.method == "measured"
        else "as measured steps were beside estimates"
    )
    return f"{expected[:-1]} {said})" if expected else ""


def _others(solved: "Solved") -> str:
    """What the numbers of replicas that were not chosen would take."""
    words = []
    for one in solved.replicas:
        if one.number == solved.plan.num_replicas:
            continue
        if one.lower_bound_seconds is None:
            found = "no plan fits"
        elif one.step_seconds is None:
            found = f"at least {format_seconds(one.lower_bound_seconds)}"
        else:
            found = format_seconds(one.step_seconds)
        words.append(f"{one.number}: {found}")
    return ", ".join(words)


def _decisions(units: Sequence[UnitPlan]) -> Table:
    table = table_of("units", "activations", "model states")
    same = itertools.groupby(units, key=lambda u: (u.kind, u.activations, u.states))
    for (_, activations, states), run in same:
        members = list(run)
        # Parts that happen to follow one another are no run of one name.
        groups = [members] if members[0].kind == "block" else [[unit] for unit in members]
        for group in groups:
            name = run_name(group[0].name, group[-1].name)
            table.add_row(name, activations_text(activations), states_text(states))
    return table


def infeasible_json(answer: "Infeasible") -> dict[str, Any]:
    """What `protrain plan --json` prints where no plan fits."""
    return {"status": "infeasible", **asdict(answer), "occupants": dict(answer.occupants)}


def infeasible_text(answer: "Infeasible") -> RenderableType:
    """What `protrain plan` prints where no plan fits."""
    head = Text(
        f"no plan fits: {format_bytes(answer.shortfall_bytes)} more {answer.tier} memory is needed"
        f" than the {format_bytes(answer.budget_bytes)} of the budget"
    )
    table = table_of(answer.slot, "bytes")
    for kind, size in answer.occupants:
        table.add_row(kind, format_bytes(size))
    advice = [Text(f"- {line}") for line in (*answer.advice, *_sizes_that_fit(answer))]
    return Group(head, "", table, "", *advice)


def _sizes_that_fit(answer: "Infeasible") -> list[str]:
    if answer.largest_batch_size is None and answer.largest_seq_len is None:
        return ["no batch size and no sequence length fits"]
    batch, longest = answer.largest_batch_size, answer.largest_seq_len
    lines = {
        f"the largest batch that fits is {batch}": batch,
        f"the longest sequence that fits is {longest} tokens": longest,
    }
    return [f"{line} (if bytes grow in proportion)" for line, size in lines.items() if size]


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
        data["growth"] = "in proportion"
    if answer.least_memory is not None:
        keys = ("fastest_seconds", "limit_seconds", "lower_bound_bytes")
        data |= {key: getattr(answer.least_memory, key) for key in keys}
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
    head: list[str] = []
    workload, step_s = answer.profile.workload, answer.solved.plan.prediction.step_seconds
    if answer.largest is not None:
        size = f"{workload.batch_size} sequences of {workload.seq_len} tokens"
        grown = "growth in proportion; profile this size before you rely on it"
        head = [f"the largest that fits: {size} ({grown})", ""]
    notes = report_in_words(answer.report) if answer.report is not None else []
    if answer.seconds_without_pins is not None:
        cost = max(0.0, step_s / answer.seconds_without_pins - 1)
        notes.append(f"the pins cost {cost:.2%} of the step")
    if answer.kept_seconds is not None and answer.kept_seconds > step_s:
        notes.append(
            "keeping everything on the device fits as well, and its step takes"
            f" {answer.kept_seconds / step_s - 1:.1%} longer: --pin '*: keep, persistent'"
        )
    if answer.least_memory is not None:
        least = answer.least_memory
        notes.append(
            f"within {least.limit_seconds / least.fastest_seconds:g} times the fastest step"
            f" ({format_seconds(least.fastest_seconds)}) no plan needs less device memory than"
            f" {format_bytes(least.lower_bound_bytes)}"
        )
    if explanation is not None:
        from protrain_plan.planning.explain.explaining import in_words

        notes += ["", *in_words(explanation)]
    solved = solved_text(answer.solved, answer.profile, path)
    return Group(*map(Text, head), solved, *map(Text, notes))


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


def fits_json(fits: Sequence["Fit"]) -> dict[str, Any]:
    """What `protrain fit --json` prints: one cell per machine and size."""
    return {"cells": [_fit_json(fit) for fit in fits]}


def _fit_json(fit: "Fit") -> dict[str, Any]:
    workload = fit.profile.workload
    data: dict[str, Any] = {
        "hardware": fit.profile.hardware.name,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        **devices_json(fit.group),
        "verdict": fit.verdict,
        "plain_device_bytes": fit.plain_bytes,
        "plain_step_seconds": fit.plain_seconds,
        "binds": fit.binds,
        "tokens_per_second": fit.tokens_per_s,
        "measured_over_estimated": error_band(fit.profile.hardware),
    }
    if fit.solved is not None:
        data |= solved_json(fit.solved)
    if fit.infeasible is not None:
        data |= infeasible_json(fit.infeasible)
    return data


def fits_text(fits: Sequence["Fit"]) -> RenderableType:
    """What `protrain fit` prints."""
    several = any(fit.group.num_devices > 1 for fit in fits)
    names = ("machine", *(["devices"] if several else []), "batch", "")
    table = table_of(*names, "tokens/s", "device", "host", "disk")
    table.columns[len(names) - 1].justify = "left"
    for column in table.columns:
        column.no_wrap = True
    for fit in fits:
        cells = ["-"] * 4
        if fit.solved is not None:
            peak = fit.solved.plan.prediction.peak_bytes
            below = (_gib(size) if size else "-" for size in (peak.host, peak.disk))
            cells = [f"{fit.tokens_per_s:,.0f}", _gib(peak.on_device), *below]
        words, style = _VERDICTS[fit.verdict]
        group = fit.group
        replicas = f" ({group.num_replicas} replicas)" if group.num_replicas > 1 else ""
        devices = [f"{group.num_devices}{replicas}"] if several else []
        machine = fit.profile.hardware.name
        table.add_row(machine, *devices, _fit_size(fit), Text(words, style=style), *cells)
    return Group(table, "", *map(Text, _fit_notes(fits)))


_VERDICTS = {
    "fits": ("fits", "green"),
    "fits with a plan": ("with a plan", "yellow"),
    "does not fit": ("no", "red"),
}


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _fit_size(fit: "Fit") -> str:
    return f"{fit.profile.workload.batch_size} x {fit.profile.workload.seq_len}"


def _fit_notes(fits: Sequence["Fit"]) -> list[str]:
    """What binds in each cell, what a plan saves, and how far to trust each machine's seconds."""
    binds: list[str] = []
    faster: list[str] = []
    for fit in fits:
        devices = f"{fit.group.num_devices} x " if fit.group.num_devices > 1 else ""
        cell = f"  {devices}{fit.profile.hardware.name} {_fit_size(fit)}"
        binds.append(f"{cell}: {fit.binds}")
        if fit.solved is not None and fit.plain_seconds is not None:
            saved = 1 - fit.solved.plan.prediction.step_seconds / fit.plain_seconds
            if saved >= 0.0005:
                faster.append(f"{cell}: {saved:.1%} less time per step")
    machines = dict.fromkeys(fit.profile.hardware for fit in fits)
    return [
        "what makes up the step, or what is missing:",
        *binds,
        *(["what a plan saves where plain PyTorch fits:", *faster] if faster else []),
        *(f"{hardware.name}: {trust(hardware)}" for hardware in machines),
    ]
