"""What `protrain run` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.presentation.plans import tiers_json
from protrain_plan.presentation.terminal import Text, table_of
from protrain_plan.records.commands import profile_command
from protrain_plan.records.plan import Plan
from protrain_plan.simulation.memory import Excess
from protrain_plan.units import format_bytes, format_range, format_seconds

if TYPE_CHECKING:
    from protrain_plan.commands.training import Run


def run_json(
    plan: Plan, run: "Run", *, plain: bool, verified: bool | None, overruns: Sequence[Excess] = ()
) -> dict[str, Any]:
    """What `protrain run --json` prints."""
    measured = run.measured_peak_bytes
    return {
        "plain": plain,
        "first_step": run.first_step,
        "losses": list(run.losses),
        "step_seconds": run.step_seconds,
        "seconds": list(run.seconds),
        "predicted_step_seconds": None if plain else plan.prediction.step_seconds,
        "expected_seconds": None if plain else plan.prediction.expected_seconds,
        "outside_expected": None if plain else _outside(plan, run),
        "predicted_peak_bytes": None if plain else tiers_json(plan.prediction.peak_bytes),
        "measured_peak_bytes": None if measured is None else tiers_json(measured),
        "parameters_sha256": run.parameters_sha256,
        "verified": verified,
        "overruns": [asdict(overrun) for overrun in overruns],
        "profile_again": _profile_again(plan) if overruns else None,
    }


def _profile_again(plan: Plan) -> str:
    return profile_command(plan.workload, optimizer=plan.optimizer, output="profile.yaml")


def _outside(plan: Plan, run: "Run") -> bool | None:
    """Whether the measured step took other times than the profile expects; None: it does not say.

    A first step warms up: a run of one tells nothing.
    """
    expected = plan.prediction.expected_seconds
    if expected is None or len(run.seconds) < 2:
        return None
    return not expected[0] <= run.step_seconds <= expected[1]


_MOST_OVERRUNS = 3
"""As many are printed; --json has all."""


def run_text(
    plan: Plan, run: "Run", *, plain: bool, verified: bool | None, overruns: Sequence[Excess] = ()
) -> RenderableType:
    """What `protrain run` prints."""
    resumed = f" from step {run.first_step + 1} on" if run.first_step else ""
    losses = Text(f"losses{resumed} " + " ".join(f"{loss:.4f}" for loss in run.losses))
    prediction, measured = plan.prediction, run.measured_peak_bytes
    expected = format_range(prediction.expected_seconds)
    table = table_of("", "predicted", "measured")
    promised = f"{format_seconds(prediction.step_seconds)}{expected}"
    table.add_row("step", "-" if plain else promised, format_seconds(run.step_seconds))
    for label, tier in (
        ("device peak, tensors", "device"),
        ("device, allocator", "allocator"),
        ("device, besides tensors", "context"),
        ("host peak", "host"),
        ("disk peak", "disk"),
    ):
        promise, found = getattr(prediction.peak_bytes, tier), getattr(measured, tier, None)
        if promise or found:
            told = "-" if found is None else format_bytes(found)
            table.add_row(label, "-" if plain else format_bytes(promise), told)
    notes: list[Text] = []
    if not plain and _outside(plan, run):
        took = f"the step took {format_seconds(run.step_seconds)} measured"
        notes.append(Text(f"{took}, outside what its profile expects{expected}", style="yellow"))
    if measured is None:
        notes.append(Text("peaks are measured in the last step of two or more"))
    if overruns:
        notes.append(Text("NOT as predicted: the measured step took more memory", style="red"))
        notes += [Text(f"  {overrun}") for overrun in overruns[:_MOST_OVERRUNS]]
        if len(overruns) > _MOST_OVERRUNS:
            notes.append(Text(f"  and in {len(overruns) - _MOST_OVERRUNS} slots more"))
        notes.append(Text(f"  fix: measure and plan again: {_profile_again(plan)}"))
    if verified is not None:
        notes.append(
            Text("verified: losses and parameters equal plain PyTorch's bitwise", style="green")
            if verified
            else Text("NOT verified: losses or parameters differ from plain PyTorch's", style="red")
        )
    return Group(losses, table, *notes)
