"""What `protrain fit` prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from protrain_plan.rendering.infeasible import infeasible_json
from protrain_plan.rendering.machines import error_band, trust
from protrain_plan.rendering.plans import devices_json, solved_json
from protrain_plan.rendering.tables import table_of

if TYPE_CHECKING:
    from protrain_plan.fitting import Fit


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
            cells = [
                f"{fit.tokens_per_s:,.0f}",
                _gib(peak.on_device),
                *(_gib(size) if size else "-" for size in (peak.host, peak.disk)),
            ]
        words, style = _VERDICTS[fit.verdict]
        machine = fit.profile.hardware.name
        devices = [_fit_devices(fit)] if several else []
        table.add_row(machine, *devices, _fit_size(fit), Text(words, style=style), *cells)
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


def _fit_devices(fit: "Fit") -> str:
    replicas = fit.group.num_replicas
    return f"{fit.group.num_devices}" + (f" ({replicas} replicas)" if replicas > 1 else "")


def _fit_machine(fit: "Fit") -> str:
    devices = f"{fit.group.num_devices} x " if fit.group.num_devices > 1 else ""
    return f"{devices}{fit.profile.hardware.name}"


def _faster(fit: "Fit") -> float:
    """The fraction of plain PyTorch's step that the plan saves; 0 where that does not fit."""
    if fit.solved is None or fit.plain_seconds is None:
        return 0.0
    return 1 - fit.solved.plan.prediction.step_seconds / fit.plain_seconds


def _fit_notes(fits: Sequence["Fit"]) -> list[str]:
    """What binds in each cell, and how far to trust the seconds on each machine."""
    lines = ["what makes up the step, or what is missing:"]
    lines += [f"  {_fit_machine(fit)} {_fit_size(fit)}: {fit.binds}" for fit in fits]
    faster = [
        f"  {_fit_machine(fit)} {_fit_size(fit)}: {_faster(fit):.1%} less time per step"
        for fit in fits
        if _faster(fit) >= 0.0005
    ]
    if faster:
        lines += ["what a plan saves where plain PyTorch fits:", *faster]
    for hardware in dict.fromkeys(fit.profile.hardware for fit in fits):
        lines.append(f"{hardware.name}: {trust(hardware)}")
    return lines
