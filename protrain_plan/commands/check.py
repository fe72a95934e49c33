"""`protrain check`."""

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from protrain_plan.commands.options import JsonOption, choice
from protrain_plan.commands.output import print_json, print_rendered, print_text, progress
from protrain_plan.errors import ProtrainError

Format = Literal["text", "json", "junit", "sarif", "github"]
EXAMPLES = (
    "Examples: protrain check | protrain check plans --on rtx-4090 --on rtx-3090"
    " | protrain check plans --format github | protrain check --explain MEM001"
)
DEFAULT = Path("plans")


def check(
    plans: Annotated[
        list[Path] | None,
        typer.Argument(help="Plans, and folders with plans; default: plans/.", show_default=False),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="Check on this machine of the catalogue, or of a file, instead of the plans' own"
            " and those with budgets. May be given several times."
        ),
    ] = None,
    budgets: Annotated[
        Path | None,
        typer.Option(help="Limits per machine; default: budgets.yaml or pyproject.toml here."),
    ] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="text, json, junit, sarif or github (annotations).")
    ] = "text",
    records_only: Annotated[
        bool, typer.Option("--records-only", help="Look at no model: no torch, no source code.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="What cannot be checked counts as failed.")
    ] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="CODE", help="Say what a rule is about, and check none.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hold plans against budgets, their profiles and the models that they were made for.

    Exit codes: 0 all rules hold, 1 one does not, 2 a mistake in the input, 3 one does not and no
    other plan of the workload fits the budget.
    """
    from protrain_plan.checking.budgets import find_budgets
    from protrain_plan.checking.cases import find_plans
    from protrain_plan.checking.formats.github import github
    from protrain_plan.checking.formats.junit import junit
    from protrain_plan.checking.formats.plain_data import plain_data
    from protrain_plan.checking.formats.sarif import sarif
    from protrain_plan.checking.formats.text import explanation, text
    from protrain_plan.checking.reestimating import look, look_away
    from protrain_plan.checking.rules import explained
    from protrain_plan.checking.running import check as checked
    from protrain_plan.hardware.catalogue import load_hardware

    form: Format = choice("--format", "json" if as_json else output_format, get_args(Format))
    if explain is not None:
        print_rendered(explanation(explained(explain)), highlight=False)
        return
    if not plans and not DEFAULT.is_dir():
        problem = "there is no folder plans/ here"
        raise ProtrainError(problem, fix="name plans, or folders with plans")
    found = find_plans(plans or [DEFAULT])
    with progress(quiet=form != "text") as tell:
        report = checked(
            found,
            look=look_away if records_only else look,
            budgets=find_budgets(budgets),
            on=[load_hardware(name) for name in on or ()],
            strict=strict,
            progress=tell,
        )
    root = Path(os.environ.get("GITHUB_WORKSPACE", ""))  # where an action's paths count from
    match form:
        case "text":
            print_rendered(text(report), highlight=False)
        case "json":
            print_json(plain_data(report))
        case "sarif":
            print_json(sarif(report, root=root))
        case "junit":
            print_text(junit(report))
        case "github":
            print_text(github(report, root=root))
    raise typer.Exit(report.exit_code)
