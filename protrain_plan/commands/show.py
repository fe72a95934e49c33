"""`protrain show`."""

from pathlib import Path
from typing import Annotated

import typer

from protrain_plan.commands.options import JsonOption, ProfileOption
from protrain_plan.commands.output import show as print_result

EXAMPLES = "Example: protrain show plans/smollm2-135m-cpu-1100MiB/plan.yaml"


def show(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a plan in one screen: decisions, memory over the step, lanes and waits."""
    from protrain_plan.reporting.data import step_data
    from protrain_plan.reporting.screen import Screen
    from protrain_plan.reporting.step import read_step

    step = read_step(plan, profile)
    print_result(as_json, step_data(step), lambda: Screen(step=step))
