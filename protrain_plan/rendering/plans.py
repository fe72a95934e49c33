"""What is printed of a plan that was found."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from protrain_plan.records import activations_text, states_text
from protrain_plan.records.hardware import is_accelerator
from protrain_plan.records.plan import TierBytes, UnitPlan
from protrain_plan.records.profile import Profile
from protrain_plan.rendering.tables import run_name, table_of
from protrain_plan.simulation.memory import checkpoint_bytes
from protrain_plan.simulation.ranks import Group as Devices
from protrain_plan.units import format_bytes, format_range, format_seconds

if TYPE_CHECKING:
    from protrain_plan.planning.outcome import Solved


def solved_json(solved: "Solved") -> dict[str, Any]:
    """What `protrain plan --json` prints for a plan."""
    prediction = solved.plan.prediction
    return {
        "status": solved.status,
        "gap": solved.gap,
        **devices_json(Devices.of(solved.plan)),
        "lower_bound_seconds": prediction.lower_bound_seconds,
        "step_seconds": prediction.step_seconds,
        "expected_seconds": prediction.expected_seconds,
        "stall_seconds": solved.stall_seconds,
        "solve_seconds": solved.solve_seconds,
        "peak_bytes": tiers_json(prediction.peak_bytes),
        "solver": solved.solver,
        **({"replicas": [asdict(one) for one in solved.replicas]} if solved.replicas else {}),
    }


def devices_json(group: Devices) -> dict[str, int]:
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
    several = Devices.of(plan) if plan.num_devices > 1 else None
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
    return Group(_decisions(plan.units), "", table, "", *notes, Text(f"wrote {path}"))


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
        # Parts that happen to stand side by side are no run of one name.
        groups = [members] if members[0].kind == "block" else [[unit] for unit in members]
        for group in groups:
            name = run_name(group[0].name, group[-1].name)
            table.add_row(name, activations_text(activations), states_text(states))
    return table
