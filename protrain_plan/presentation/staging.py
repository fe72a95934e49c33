"""The answer about pipeline stages, as text and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.presentation.plans import infeasible_json, infeasible_text
from protrain_plan.presentation.terminal import Text, table_of, wrote
from protrain_runtime.contract.records.decisions import activations_text, states_text
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from protrain_plan.planning.outcome import Infeasible
    from protrain_plan.planning.stages.answer import StagesAnswer
    from protrain_plan.planning.stages.assumed import Assumed
    from protrain_plan.planning.stages.pipelines import Pipelined


def stages_json(
    answer: "StagesAnswer",
    assumed: Sequence["Assumed"] = (),
    infeasible: "Infeasible | None" = None,
) -> dict[str, Any]:
    """Return what `protrain plan --stages --json` prints; `infeasible` is why one stage is."""
    best = answer.best
    return {
        **(infeasible_json(infeasible) if infeasible else {}),
        "status": "planned" if best else "infeasible",
        "stages": best and best.shape.stages,
        "step_seconds": best and best.step_seconds,
        "lower_bound_seconds": answer.lower_bound_seconds,
        "gap": answer.gap,
        "tokens_per_step": answer.question.tokens,
        "speedup": answer.speedup,
        "single": answer.single and pipelined_json(answer.single),
        "several": answer.several and pipelined_json(answer.several),
        "bounds": answer.bounds,
        "shapes": answer.num_shapes,
        "assumptions": assumed,
    }


def pipelined_json(found: "Pipelined", *, with_spans: bool = False) -> dict[str, Any]:
    """Return a pipeline as its plan has it, its step, and when each stage computes what."""
    shape, told = found.shape, asdict(found.record)
    stages = zip(told["stages"], found.stages, found.run.idle, strict=True)
    for number, (of_stage, stage, idle) in enumerate(stages):
        of_stage |= {
            "units": len(stage.plan.units),
            "seconds": asdict(stage.seconds),
            "idle": idle,
            "device_bytes": stage.plan.prediction.peak_bytes.on_device,
            "decisions": decisions_text(stage.plan),
            **({"spans": _spans_json(found, number)} if with_spans else {}),
        }
    return told | {
        "group": asdict(shape.group),
        "batch": shape.batch,
        "micro_batches": shape.micro_batches,
        "chunks": shape.chunks,
        "step_seconds": found.step_seconds,
        "hop_seconds": list(found.pipeline.hops),
    }


def _spans_json(found: "Pipelined", stage: int) -> dict[str, list[Any]]:
    """Return columns of what a stage computes, in order; the update is of no micro-batch."""
    spans = [span for span in found.run.spans if span.stage == stage]
    chunks = found.shape.stages
    return {
        "kind": [span.kind for span in spans],
        "micro_batch": [span.action.micro_batch if span.action else None for span in spans],
        "chunk": [span.action.part // chunks if span.action else None for span in spans],
        "start_seconds": [span.start_s for span in spans],
        "end_seconds": [span.end_s for span in spans],
    }


def decisions_text(plan: Plan) -> str:
    """Return how many units decide what: `10 keep, 3 recompute; 13 offload to host`."""
    counts = (
        Counter(activations_text(unit.activations) for unit in plan.units),
        Counter(states_text(unit.states) for unit in plan.units),
    )
    return "; ".join(
        ", ".join(f"{count} {words}" for words, count in each.most_common()) for each in counts
    )


def stages_text(
    answer: "StagesAnswer",
    assumed: Sequence["Assumed"] = (),
    paths: Sequence[Path] = (),
    infeasible: "Infeasible | None" = None,
) -> RenderableType:
    """Return what `protrain plan --stages` prints; `infeasible` is why one stage is."""
    best = answer.best
    if best is None:
        head = "no plan: no number of stages that was looked at fits the budgets"
        if infeasible is None:
            return Text(head)
        return Group(Text(f"{head}; with one stage:"), infeasible_text(infeasible))
    parts: list[RenderableType] = [Text(pace_text(best)), Text(answer.worth)]
    if best.shape.stages > 1:
        parts.append(stages_table(best))
    bound = format_seconds(answer.lower_bound_seconds)
    shapes = f"{answer.num_shapes} arrangement{'s' * (answer.num_shapes > 1)}"
    parts.append(Text(f"none of {shapes} takes less than {bound} (gap {answer.gap:.1%})"))
    parts += [Text(_assumed(one)) for one in assumed]
    parts += [wrote(path) for path in paths]
    return Group(*parts)


def pace_text(found: "Pipelined") -> str:
    """Return the shape, and how fast it is."""
    return (
        f"{found.shape}: {format_seconds(found.step_seconds)} a step,"
        f" {found.tokens / found.step_seconds:,.0f} tokens/s"
    )


def layout_text(found: "Pipelined") -> str:
    """Return where stages lie, to follow other words; nothing where there is one node."""
    return f"; {found.shape.layout}" if found.pipeline.whole.num_nodes > 1 else ""


def _assumed(one: "Assumed") -> str:
    if not isfinite(one.several_seconds):
        return f"{one.words}: several stages do not fit"
    several = format_seconds(one.several_seconds)
    if not isfinite(one.single_seconds):
        return f"{one.words}: one stage does not fit, several take at least {several}"
    single = format_seconds(one.single_seconds)
    return f"{one.words}: one stage takes at least {single}, several {several} ({one.speedup:.2f}x)"


def stages_table(found: "Pipelined") -> RenderableType:
    """Return a row for each stage."""
    names = ("stage", "from", "units", "held", "a micro-batch", "waits", "device", "host")
    table = table_of(*names, words=(1,))
    rows = zip(found.stages, found.record.stages, found.run.idle, strict=True)
    for number, (stage, record, idle) in enumerate(rows):
        peak = stage.plan.prediction.peak_bytes
        table.add_row(
            str(number),
            ", ".join(record.first_units),
            str(len(stage.plan.units)),
            str(stage.held),
            format_seconds(stage.seconds.cycle_s),
            f"{idle:.0%}",
            format_bytes(peak.on_device),
            format_bytes(peak.host),
        )
    return table
