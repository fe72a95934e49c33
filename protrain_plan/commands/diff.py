"""`protrain diff`."""

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from protrain_plan.commands.options import JsonOption, choice
from protrain_plan.commands.output import print_json, print_rendered, print_text
from protrain_plan.records import read_plan

Format = Literal["text", "json", "markdown"]
EXAMPLES = (
    "Examples: protrain diff old.yaml plan.yaml"
    " | protrain diff <(git show main:plans/a/plan.yaml) plans/a/plan.yaml --format markdown"
)


def diff(
    old: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="The plan that replaces it.", show_default=False)],
    output_format: Annotated[
        str, typer.Option("--format", help="text, json or markdown (for a pull request).")
    ] = "text",
    title: Annotated[
        str | None, typer.Option(help="What the Markdown is about; default: the new plan's file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a new plan decides otherwise, and what that does to memory and time."""
    from protrain_plan.checking.diffing import plan_diff
    from protrain_plan.checking.formats.diffs import diff_data, diff_markdown, diff_text

    form: Format = choice("--format", "json" if as_json else output_format, get_args(Format))
    found = plan_diff(read_plan(old), read_plan(new))
    match form:
        case "text":
            print_rendered(diff_text(found), highlight=False)
        case "json":
            print_json(diff_data(found))
        case "markdown":
            print_text(diff_markdown(found, title=title or str(new)))
