"""`protrain simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from protrain_plan.commands.options import JsonOption, ProfileOption, writable
from protrain_plan.commands.output import out
from protrain_plan.commands.output import show as print_result
from protrain_plan.records.files import replace_text

EXAMPLES = "Example: protrain simulate plan.yaml --trace trace.json"


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    profile: ProfileOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the step as a trace that Perfetto (ui.perfetto.dev) opens."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan's step: what each lane does, what compute waits for, what stands where."""
    if trace is not None:
        writable(trace, option="--trace")
    from protrain_plan.reporting.step import read_step
    from protrain_plan.reporting.summary import summary_json, summary_text
    from protrain_plan.reporting.trace import trace_text

    step = read_step(plan, profile)
    if trace is not None:
        replace_text(trace, trace_text(step))
    print_result(as_json, summary_json(step), lambda: summary_text(step))
    if trace is not None and not as_json:
        out.print(f"wrote {trace}", highlight=False, markup=False, soft_wrap=True)
