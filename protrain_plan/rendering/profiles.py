"""What `protrain profile` prints."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from protrain_plan.records.profile import Profile, Unit
from protrain_plan.rendering.machines import error_band, trust
from protrain_plan.rendering.tables import run_name, table_of
from protrain_plan.units import format_bytes, format_seconds


def profile_json(profile: Profile) -> dict[str, Any]:
    """What `protrain profile --json` prints."""
    keep = [unit.cost("keep") for unit in profile.units]
    return {
        "model": profile.workload.model,
        "hardware": profile.hardware.name,
        "method": profile.method,
        "model_fingerprint": profile.model_fingerprint,
        "num_units": len(profile.units),
        "num_parameters": sum(unit.num_parameters for unit in profile.units),
        "model_states_bytes": _states_bytes(profile.units),
        "activation_bytes": sum(cost.kept_bytes for cost in keep),
        "forward_seconds": sum(cost.forward_s for cost in keep),
        "backward_seconds": sum(cost.backward_s for cost in keep),
        "context_bytes": profile.hardware.device.context_bytes,
        **_held_back(profile),
        "repetitions": asdict(profile.repetitions) if profile.repetitions else None,
        "unsteady": unsteady(profile),
        "measured_over_estimated": error_band(profile.hardware) if _estimated(profile) else None,
    }


STEADY = 1.2
"""The slowest of whole steps over the fastest, on a machine that does nothing else. Medians of
three were up to 15 % off where others' work changes its speed from second to second (`passes`)."""


def unsteady(profile: Profile) -> str | None:
    """What to say of repetitions that took very different times; None of others."""
    found = profile.repetitions
    if found is None or found.high <= STEADY * found.low:
        return None
    return (
        f"repetitions varied by {found.high / found.low - 1:.0%}: the machine was busy; profile"
        " again on a quiet one"
    )


def _held_back(profile: Profile) -> dict[str, int]:
    """What the allocator was seen to hold beyond the tensors, if anything."""
    size = profile.hardware.device.allocator_bytes
    return {"allocator_bytes": size} if size else {}


def _states_bytes(units: Sequence[Unit]) -> int:
    return sum(u.parameter_bytes + u.gradient_bytes + u.state_bytes for u in units)


def profile_text(profile: Profile, path: Path) -> RenderableType:
    """What `protrain profile` prints."""
    table = table_of("unit", "params", "states", "kept", "input", "forward", "backward")
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
            _short(_states_bytes([unit])),
            _short(keep.kept_bytes),
            _short(forms["full"].kept_bytes) if "full" in forms else "",
            format_seconds(keep.forward_s),
            format_seconds(keep.backward_s),
        )
    data = profile_json(profile)
    held = _held_back(profile)
    held_back = "".join(f", {format_bytes(size)} for its allocator" for size in held.values())
    total = Text(
        f"{data['num_parameters'] / 1e6:.1f} M parameters,"
        f" {format_bytes(data['model_states_bytes'])} of model states,"
        f" {format_bytes(data['activation_bytes'])} of activations,"
        f" {format_bytes(data['context_bytes'])} besides tensors{held_back};"
        f" forward and backward {format_seconds(data['forward_seconds'])}"
        f" + {format_seconds(data['backward_seconds'])}"
    )
    note = Text("kept: by the unit between forward and backward; input: where it is recomputed")
    machine = profile.hardware
    how = [Text(f"estimated for {machine.name}: {trust(machine)}")] if _estimated(profile) else []
    warning = unsteady(profile)
    how += [Text(warning, style="yellow")] if warning else []
    return Group(table, "", note, total, *how, Text(f"wrote {path}"))


def _estimated(profile: Profile) -> bool:
    return profile.method == "estimated"


def _short(size: int) -> str:
    """The size in three digits, `54.0 MiB`: six columns beside a name in 80 characters."""
    if abs(size) < 1024:
        return format_bytes(size)
    number, unit = format_bytes(size).split()
    whole = number.partition(".")[0]
    return f"{float(number):.{max(0, 3 - len(whole))}f} {unit}"
