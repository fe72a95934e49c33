"""The answer about pipeline stages, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.presentation.plans import devices_json, tiers_json
from protrain_plan.presentation.terminal import Text, table_of, wrote
from protrain_runtime.contract.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from protrain_plan.planning.stages.answer import StagesAnswer
    from protrain_plan.planning.stages.assumed import Assumed
    from protrain_plan.planning.stages.pipelines import Pipelined, Stage


def stages_json(answer: "StagesAnswer", assumed: Sequence["Assumed"] = ()) -> dict[str, Any]:
    """Return what `protrain plan --stages --json` prints."""
    best = answer.best
    return {
        "status": "planned" if best else "infeasible",
        "stages": best.shape.stages if best else None,
        "step_seconds": best.step_seconds if best else None,
        "lower_bound_seconds": _finite(answer.lower_bound_seconds),
        "gap": answer.gap,
        "tokens_per_step": answer.question.tokens,
        "speedup": answer.speedup,
        "single": _pipelined_json(answer.single),
        "several": _pipelined_json(answer.several),
        "bounds": {str(p): _finite(seconds) for p, seconds in answer.bounds.items()},
        "shapes": answer.num_shapes,
        "assumptions": [
            {
                "words": one.words,
                "single_seconds": _finite(one.single_seconds),
                "several_seconds": _finite(one.several_seconds),
            }
            for one in assumed
        ],
    }


def _finite(seconds: float) -> float | None:
    return seconds if isfinite(seconds) else None


def _pipelined_json(found: "Pipelined | None") -> dict[str, Any] | None:
    if found is None:
        return None
    shape = found.shape
    return {
        "schedule": shape.schedule,
        "stages": shape.stages,
        "layout": shape.layout,
        "group": devices_json(shape.group),
        "batch": shape.batch,
        "micro_batches": shape.micro_batches,
        "chunks": shape.chunks,
        "step_seconds": found.step_seconds,
        "hop_seconds": list(found.pipeline.hops),
        "of_stages": [
            {
                "first_units": _first_units(found, stage),
                "units": len(stage.plan.units),
                "held": stage.held,
                "seconds": asdict(stage.seconds),
                "idle": idle,
                "peak_bytes": tiers_json(stage.plan.prediction.peak_bytes),
            }
            for stage, idle in zip(found.stages, found.run.idle, strict=True)
        ],
    }


def _first_units(found: "Pipelined", stage: "Stage") -> list[str]:
    return [found.pipeline.profile.units[first].name for first, _ in stage.runs]


def stages_text(
    answer: "StagesAnswer", assumed: Sequence["Assumed"] = (), paths: Sequence[Path] = ()
) -> RenderableType:
    """Return what `protrain plan --stages` prints."""
    best = answer.best
    if best is None:
        return Text("no plan: neither one stage nor several fit the budgets")
    tokens = answer.question.tokens
    parts: list[RenderableType] = [
        Text(
            f"{best.shape}: {format_seconds(best.step_seconds)} a step,"
            f" {tokens / best.step_seconds:,.0f} tokens/s"
        ),
        Text(answer.worth),
    ]
    if best.shape.stages > 1:
        parts.append(_table(best))
    bound = format_seconds(answer.lower_bound_seconds)
    shapes = f"{answer.num_shapes} arrangement{'s' * (answer.num_shapes > 1)}"
    parts.append(Text(f"none of {shapes} takes less than {bound} (gap {answer.gap:.1%})"))
    if not answer.cuts:
        parts.append(
            Text("this model cannot be cut: units share parameters, or read more than the last one")
        )
    parts += [Text(_assumed(one)) for one in assumed]
    parts += [wrote(path) for path in paths]
    return Group(*parts)


def _assumed(one: "Assumed") -> str:
    if not isfinite(one.several_seconds):
        return f"{one.words}: several stages do not fit"
    several = format_seconds(one.several_seconds)
    if not isfinite(one.single_seconds):
        return f"{one.words}: one stage does not fit, several take at least {several}"
    single = format_seconds(one.single_seconds)
    return f"{one.words}: one stage takes at least {single}, several {several} ({one.speedup:.2f}x)"


def _table(found: "Pipelined") -> RenderableType:
    names = ("stage", "from", "units", "held", "a micro-batch", "waits", "device", "host")
    table = table_of(*names, words=(1,))
    for number, (stage, idle) in enumerate(zip(found.stages, found.run.idle, strict=True)):
        peak = stage.plan.prediction.peak_bytes
        table.add_row(
            str(number),
            ", ".join(_first_units(found, stage)),
            str(len(stage.plan.units)),
            str(stage.held),
            format_seconds(stage.seconds.cycle_s),
            f"{idle:.0%}",
            format_bytes(peak.on_device),
            format_bytes(peak.host),
        )
    return table
