"""The answer about pipeline stages, as text and as JSON."""

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from protrain_plan.presentation.plans import infeasible_json, infeasible_text
from protrain_plan.presentation.terminal import Text, fields_of, table_of, wrote
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
    """Return what `protrain plan --stages --json` prints; `infeasible` is about one stage."""
    best = answer.best
    return {
        **(infeasible_json(infeasible) if infeasible else {}),
        **fields_of(answer, "lower_bound_seconds", "gap", "speedup", "bounds"),
        "status": "planned" if best else "infeasible",
        "stages": best and best.shape.stages,
        "step_seconds": best and best.step_seconds,
        "tokens_per_step": answer.question.tokens,
        "single": answer.single and pipelined_json(answer.single),
        "several": answer.several and pipelined_json(answer.several),
        "shapes": answer.num_shapes,
        "assumptions": assumed,
    }


def pipelined_json(found: "Pipelined", *, with_spans: bool = False) -> dict[str, Any]:
    """Return a pipeline as its plan has it, its step, and, `with_spans`, computations in time."""
    rows = stage_rows(found)
    for number, row in enumerate(rows if with_spans else ()):
        # Columns of a stage's computations, in order; the update has no micro-batch.
        spans = [span for span in found.run.spans if span.stage == number]
        actions = [span.action for span in spans]
        row["spans"] = {
            "kind": [span.kind for span in spans],
            "micro_batch": [action and action.micro_batch for action in actions],
            "chunk": [action and action.part // found.shape.stages for action in actions],
            "start_seconds": [span.start_s for span in spans],
            "end_seconds": [span.end_s for span in spans],
        }
    return {
        **fields_of(found.record),
        **fields_of(found.shape, "group", "batch", "micro_batches", "chunks"),
        **fields_of(found, "step_seconds"),
        "hop_seconds": found.pipeline.hops,
        "stages": rows,
    }


def stage_rows(found: "Pipelined") -> list[dict[str, Any]]:
    """Return each stage as its plan has it, with its seconds, and the share in which it waits."""
    stages = zip(found.record.stages, found.stages, found.run.idle, strict=True)
    return [
        {
            **fields_of(record),
            **fields_of(stage, "seconds"),
            "units": len(stage.plan.units),
            "idle": idle,
            "device_bytes": record.peak_bytes.on_device,
            "decisions": decisions_text(stage.plan),
        }
        for record, stage, idle in stages
    ]


def decisions_text(plan: Plan) -> str:
    """Return the decisions of units with their counts: `10 keep, 3 recompute; 13 persistent`."""
    activations = Counter(activations_text(unit.activations) for unit in plan.units)
    counts = activations, Counter(states_text(unit.states) for unit in plan.units)
    return "; ".join(
        ", ".join(f"{count} {words}" for words, count in each.most_common()) for each in counts
    )


def stages_text(
    answer: "StagesAnswer",
    assumed: Sequence["Assumed"] = (),
    paths: Sequence[Path] = (),
    infeasible: "Infeasible | None" = None,
) -> RenderableType:
    """Return what `protrain plan --stages` prints; `infeasible` is about one stage."""
    best = answer.best
    if best is None:
        head = "no plan: none of the numbers of stages tried fits the budgets"
        if infeasible is None:
            return Text(head)
        return Group(Text(f"{head}; with one stage:"), infeasible_text(infeasible))
    bound = format_seconds(answer.lower_bound_seconds)
    shapes = f"{answer.num_shapes} arrangement{'s' * (answer.num_shapes > 1)}"
    return Group(
        Text(pace_text(best)),
        Text(answer.worth),
        *([stages_table(best)] if best.shape.stages > 1 else []),
        Text(f"none of {shapes} takes less than {bound} (gap {answer.gap:.1%})"),
        *(Text(_assumed(one)) for one in assumed),
        *map(wrote, paths),
    )


def pace_text(found: "Pipelined") -> str:
    """Return the shape and its speed."""
    tokens = f"{found.tokens / found.step_seconds:,.0f} tokens/s"
    return f"{found.shape}: {format_seconds(found.step_seconds)} a step, {tokens}"


def layout_text(found: "Pipelined") -> str:
    """Return the layout of stages, after other words; empty for one node."""
    return f"; {found.shape.layout}" if found.pipeline.settings.group.num_nodes > 1 else ""


def _assumed(one: "Assumed") -> str:
    if not isfinite(one.several_seconds):
        return f"{one.words}: several stages do not fit"
    several, single = format_seconds(one.several_seconds), one.single_seconds
    if not isfinite(single):
        return f"{one.words}: one stage does not fit, several take at least {several}"
    took = f"one stage takes at least {format_seconds(single)}, several {several}"
    return f"{one.words}: {took} ({one.speedup:.2f}x)"


def stages_table(found: "Pipelined") -> RenderableType:
    """Return a row for each stage."""
    names = ("stage", "from", "layers", "in flight", "a micro-batch", "waits", "device", "host")
    table = table_of(*names, words=(1,))
    for number, row in enumerate(stage_rows(found)):
        table.add_row(
            str(number),
            ", ".join(row["first_units"]),
            str(row["units"]),
            str(row["held"]),
            format_seconds(row["cycle_seconds"]),
            f"{row['idle']:.0%}",
            format_bytes(row["device_bytes"]),
            format_bytes(row["peak_bytes"].host),
        )
    return table
