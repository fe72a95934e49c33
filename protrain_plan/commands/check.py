"""`protrain check`."""

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from protrain_plan.commands import output
from protrain_plan.commands.option_records import flag, option, option_record
from protrain_plan.commands.options import JsonOption, NoCacheOption, choice, separated, size
from protrain_runtime.contract.errors import ProtrainError

DEFAULT = Path("plans")
CheckFormat = Literal["text", "json", "github"]


@option_record
class CheckOptions:
    """Options of a check."""

    on: list[str] | None = option(
        "Check on these machines, separated by commas, instead of the plans' own and those with"
        " budgets: catalogue names or files."
    )
    budgets: Path | None = option(
        "Limits per machine. Default: budgets.yaml or pyproject.toml here."
    )
    output_format: str = option("text, json or github (annotations).", "--format", default="text")
    records_only: bool = flag("Build no models: run neither torch nor model code.")
    strict: bool = flag("Count skipped checks as failures.")
    expect: int | None = option("Fail unless exactly this many plans are checked.", min=0)
    time_limit: float = option("Maximum seconds to build and estimate a model.", default=300.0)
    model_memory: str = option("Maximum memory of a model's code (Linux).", default="8GiB")
    no_cache: NoCacheOption = False
    explain: str | None = option("Explain a rule instead of checking.", metavar="CODE")


def check(
    plans: Annotated[
        list[Path] | None,
        typer.Argument(help="Plans and folders with plans. Default: plans/.", show_default=False),
    ] = None,
    *,
    options: CheckOptions,
    as_json: JsonOption = False,
) -> None:
    """Check plans against budgets, their profiles and today's models.

    check and profile run the model's code with your rights, as pytest does. check --records-only is
    safe on anything: it parses and never executes.

    Exit codes: 0 all rules hold; 1 a rule does not; 2 a mistake in the input; 3 a rule does not,
    and no other plan fits the budget.

    Examples: protrain check | protrain check plans --on rtx-4090 --on rtx-3090
    | protrain check plans --format github | protrain check --explain MEM001
    """
    from protrain_plan.checking.budgets import find_limits
    from protrain_plan.checking.reestimate import Reestimates, look_away
    from protrain_plan.checking.rules import check as checked
    from protrain_plan.checking.rules import explained
    from protrain_plan.hardware.catalogue import load_hardware
    from protrain_plan.isolated.process import Limits
    from protrain_plan.presentation.checks import reports
    from protrain_plan.profiling.estimate_cache import EstimateCache

    if sys.__stdout__ is None:  # since the start of this program
        raise ProtrainError("standard output is closed", fix="redirect it to /dev/null")
    asked = "json" if as_json else options.output_format
    form: CheckFormat = choice("--format", asked, get_args(CheckFormat))
    if options.explain is not None:
        output.print_rendered(reports.explanation(explained(options.explain)))
        return
    if not plans and not DEFAULT.is_dir():
        raise ProtrainError("no plans/ folder here", fix="pass plan files or folders")
    away, seconds = options.records_only, options.time_limit
    if not 0 < seconds < math.inf:
        raise ProtrainError(f"expected seconds, got {seconds:g}", key="--time-limit")
    memory = size("--model-memory", options.model_memory, 0)
    cache = EstimateCache(off=options.no_cache or away)
    look = Reestimates(Limits(seconds=seconds, memory=memory), cache)
    limits = find_limits(options.budgets)
    with output.progress(quiet=form != "text") as tell:
        report = checked(
            plans or [DEFAULT],
            look=look_away if away else look,
            prepare=lambda found: None if away else look.prepare(found, tell),
            budgets=limits.budgets,
            allow=limits.allow,
            on=[load_hardware(name) for name in separated(options.on)],
            strict=options.strict,
            expect=options.expect,
            progress=tell,
        )
    match form:
        case "text":
            output.print_rendered(reports.text(report))
        case "json":
            output.print_json(reports.plain_data(report))
        case "github":  # whose paths are relative to this folder
            root = Path(os.environ.get("GITHUB_WORKSPACE", ""))
            output.print_text(reports.github(report, root=root))
    raise typer.Exit(report.exit_code)
