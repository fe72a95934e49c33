"""What the commands print: tables for people, plain data for `--json`."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from protrain_plan.records import activations_text, states_text
from protrain_plan.records.hardware import Hardware
from protrain_plan.records.plan import Plan, TierBytes, UnitPlan
from protrain_plan.records.profile import Profile, Unit
from protrain_plan.simulation.memory import checkpoint_bytes
from protrain_plan.simulation.report import in_words as report_in_words
from protrain_plan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from protrain_plan.fitting import Fit
    from protrain_plan.models.presets import Preset
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


# --- models ---------------------------------------------------------------------------------------


def presets_json(presets: Sequence["Preset"]) -> list[dict[str, Any]]:
    """What `protrain models --json` prints."""
    return [asdict(preset) for preset in presets]


def presets_text(presets: Sequence["Preset"]) -> Renderable:
    """What `protrain models` prints."""
    table = _table("name", "parameters", "layers", "hidden", "source")
    table.columns[-1].justify = "left"
    for preset in presets:
        # Hugging Face's repository says enough; other sources are sentences.
        repository = preset.source.removeprefix("https://huggingface.co/").partition("/blob/")[0]
        table.add_row(
            preset.name,
            f"{preset.num_parameters / 1e6:,.1f} M",
            str(preset.num_layers),
            str(preset.hidden_size),
            Text(repository),
        )
    return table


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
    notes = [verdict]
    saving = checkpoint_bytes(plan.units, profile) - peak.device
    if profile.hardware.device.kind == "cpu" and saving > 0:
        notes.append(Text(f"saving a checkpoint takes {format_bytes(saving)} more than a step"))
    return Group(_decisions(plan.units), "", table, "", *notes, Text(f"wrote {path}"))


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
        "first_step": run.first_step,
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
    resumed = f" from step {run.first_step + 1} on" if run.first_step else ""
    lines: list[Renderable] = [
        Text(f"losses{resumed} " + " ".join(f"{loss:.4f}" for loss in run.losses)),
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


# --- fit ------------------------------------------------------------------------------------------


def fits_json(fits: Sequence["Fit"]) -> list[dict[str, Any]]:
    """What `protrain fit --json` prints: one object per cell."""
    return [_fit_json(fit) for fit in fits]


def _fit_json(fit: "Fit") -> dict[str, Any]:
    workload, rates = fit.profile.workload, fit.profile.hardware.rates
    data: dict[str, Any] = {
        "hardware": fit.profile.hardware.name,
        "batch_size": workload.batch_size,
        "seq_len": workload.seq_len,
        "verdict": fit.verdict,
        "plain_device_bytes": fit.plain_bytes,
        "binds": fit.binds,
        "tokens_per_second": fit.tokens_per_s,
        "measured_over_estimated": (
            [rates.error_low, rates.error_high] if rates and rates.error_high else None
        ),
    }
    if fit.solved is not None:
        data |= solved_json(fit.solved)
    if fit.infeasible is not None:
        data |= infeasible_json(fit.infeasible)
    return data


def fits_text(fits: Sequence["Fit"]) -> Renderable:
    """What `protrain fit` prints."""
    table = _table("machine", "batch", "", "tokens/s", "device", "host", "disk")
    table.columns[2].justify = "left"
    for column in table.columns:
        column.no_wrap = True
    for fit in fits:
        cells = ["-"] * 4
        if fit.solved is not None:
            peak = fit.solved.plan.prediction.peak_bytes
            cells = [
                f"{fit.tokens_per_s:,.0f}",
                _gib(peak.device + peak.context),
                *(_gib(size) if size else "-" for size in (peak.host, peak.disk)),
            ]
        words, style = _VERDICTS[fit.verdict]
        machine = fit.profile.hardware.name
        table.add_row(machine, _fit_size(fit), Text(words, style=style), *cells)
    return Group(table, "", *(Text(line) for line in _fit_notes(fits)))


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
    """What binds in each cell, and how far to trust the seconds on each machine."""
    lines = ["what makes up the step, or what is missing:"]
    lines += [f"  {fit.profile.hardware.name} {_fit_size(fit)}: {fit.binds}" for fit in fits]
    for hardware in dict.fromkeys(fit.profile.hardware for fit in fits):
        rates = hardware.rates
        if rates is not None and rates.error_high:
            band = (
                f"measured steps took {rates.error_low:.2f} to {rates.error_high:.2f} times as long"
            )
        else:
            band = "estimates of seconds were never compared with this machine"
        lines.append(f"{hardware.name}: {band}")
    return lines


# --- hardware -------------------------------------------------------------------------------------


def machines_json(machines: Sequence[Hardware]) -> dict[str, Any]:
    """What `protrain hardware list --json` prints."""
    return {"machines": [machine_json(machine) for machine in machines]}


def machine_json(machine: Hardware) -> dict[str, Any]:
    """What `protrain hardware show --json` prints: the record as it is."""
    return asdict(machine)


def machines_text(machines: Sequence[Hardware]) -> Renderable:
    """What `protrain hardware list` prints."""
    table = _table("machine", "memory", "bf16", "fp32", "bandwidth", "link", "host", "disk")
    for machine in machines:
        rates = machine.rates
        tiers = {tier.name: tier for tier in machine.tiers}
        table.add_row(
            machine.name,
            format_bytes(machine.device.memory_bytes),
            f"{rates.bfloat16_flops_per_s / 1e12:.4g}" if rates else "-",
            f"{rates.float32_flops_per_s / 1e12:.4g}" if rates else "-",
            _rate(rates.memory_bytes_per_s, "B/s") if rates else "-",
            _rate(tiers["host"].link.read_bytes_per_s, "B/s") if "host" in tiers else "-",
            f"{tiers['host'].capacity_bytes / 2**30:.0f} GiB" if "host" in tiers else "-",
            f"{tiers['disk'].capacity_bytes / 1e12:.2g} TB" if "disk" in tiers else "-",
        )
    notes = (
        "bf16, fp32: TFLOP/s of dense matrix products, at the peak",
        "host, disk: typical ones; --host-memory and --disk say what there is",
        "protrain hardware show NAME has a machine's every number, and its source",
    )
    return Group(table, "", *(Text(note) for note in notes))


def _rate(per_s: float, unit: str) -> str:
    """The rate for a reader, in powers of 1000: `24 GB/s`, `1.01 TB/s`, `989 TFLOP/s`."""
    scale, prefix = (1e9, "G") if per_s < 1e12 else (1e12, "T")
    return f"{per_s / scale:.4g} {prefix}{unit}"


def machine_text(machine: Hardware) -> Renderable:
    """What `protrain hardware show` prints."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for what, value in _facts(machine):
        table.add_row(what, Text(value))
    head = Text(f"{machine.name}: {machine.device.name} ({machine.device.kind})", style="bold")
    if not machine.sources:
        return Group(head, table)
    # A table, so that the further lines of a long source are indented.
    sources = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    sources.add_column()
    sources.add_column(overflow="fold")
    for source in machine.sources:
        sources.add_row("-", Text(source))
    return Group(head, table, "", Text("sources", style="bold"), sources)


def _facts(machine: Hardware) -> Iterator[tuple[str, str]]:
    """What a machine offers: a word and a sentence for each."""
    device, rates = machine.device, machine.rates
    size, context = format_bytes(device.memory_bytes), format_bytes(device.context_bytes)
    yield "memory", f"{size}, of which a process holds {context} besides tensors"
    yield "threads", str(device.num_threads)
    if rates is not None:
        yield (
            "compute",
            f"{_rate(rates.bfloat16_flops_per_s, 'FLOP/s')} in bf16,"
            f" {_rate(rates.float32_flops_per_s, 'FLOP/s')} in fp32;"
            f" large matrix products reach {rates.compute_efficiency:.0%}",
        )
        yield (
            "bandwidth",
            f"{_rate(rates.memory_bytes_per_s, 'B/s')}; large operators reach"
            f" {rates.memory_efficiency:.0%}",
        )
        yield "operator", f"at least {format_seconds(rates.operator_s)}"
        yield "AdamW", f"{rates.host_parameters_per_s / 1e9:.3g} G parameters/s in host memory"
    for tier in machine.tiers:
        link = tier.link
        yield (
            tier.name,
            f"{format_bytes(tier.capacity_bytes)}, {_rate(link.read_bytes_per_s, 'B/s')} to the"
            f" device, {_rate(link.write_bytes_per_s, 'B/s')} from it,"
            f" {link.duplex:.0%} of each both ways at once, latency"
            f" {format_seconds(link.latency_s)}",
        )
    yield (
        "contention",
        f"compute keeps {machine.read_contention.compute:.0%} of its speed beside reads,"
        f" {machine.write_contention.compute:.0%} beside writes,"
        f" {machine.update_contention.compute:.0%} beside updates",
    )
    if rates is not None and rates.error_high:
        yield (
            "estimates",
            f"measured steps took {rates.error_low:.2f} to {rates.error_high:.2f} times as long",
        )
    elif rates is not None:
        yield "estimates", "of seconds were never compared with this machine"


def probed_text(machine: Hardware, path: Path) -> Renderable:
    """What `protrain hardware probe` prints."""
    return Group(machine_text(machine), "", Text(f"wrote {path}"))
