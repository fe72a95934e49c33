"""The command line: its commands, and errors as exit codes.

Exit codes: 0 done, 1 a verification or a rule failed, 2 a mistake in the input, 3 no plan fits,
4 out of memory, 130 interrupted.
"""

import os
import sys
from typing import Annotated, NoReturn

# Before anything imports torch: a lane's waiting threads must not spin on the processors that
# compute; the profiler warns of blocks that we know of, and transformers of published settings.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# An accelerator's allocator then cuts blocks as they are asked for, from segments that grow. Limits
# are on the segments: without this, much of them may be holes that no tensor fits into.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & set(
    os.environ
):
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import typer
from rich.markup import escape

from protrain_plan import __version__
from protrain_plan.commands import (
    check,
    diff,
    export,
    fit,
    hardware,
    measuring,
    models,
    plan,
    profile,
    report,
    run,
    show,
    simulate,
)
from protrain_plan.commands.output import err, out
from protrain_plan.errors import ProtrainError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan training under a memory limit: profile a model, plan it, look at the plan, run it.",
)
for _command, _examples in (
    (profile.profile, profile.EXAMPLES),
    (fit.fit, fit.EXAMPLES),
    (plan.plan, plan.EXAMPLES),
    (show.show, show.EXAMPLES),
    (simulate.simulate, simulate.EXAMPLES),
    (report.report, report.EXAMPLES),
    (run.run, run.EXAMPLES),
    (check.check, check.EXAMPLES),
    (diff.diff, diff.EXAMPLES),
    (export.export, export.EXAMPLES),
    (models.models, models.EXAMPLES),
):
    # Paragraphs without the docstring's line breaks, which would be shown beside the terminal's.
    _paragraphs = [" ".join(part.split()) for part in (_command.__doc__ or "").split("\n\n")]
    app.command(help="\n\n".join(_paragraphs), epilog=_examples)(_command)
app.command(hidden=True)(measuring.serve)
app.add_typer(hardware.app, name="hardware", help=hardware.HELP, epilog=hardware.EXAMPLES)


def main() -> None:
    """Run the command line, and turn what a user can mend into one message and an exit code."""
    try:
        code = app(standalone_mode=False)  # a typer.Exit comes back as its code
    except ProtrainError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        # What typer's parser found wrong with the arguments.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if not message:  # no arguments at all: the help was shown
            sys.exit(2)
        _fail(message, 2, hint="try protrain --help")
    sys.exit(code)


def _fail(message: str, code: int, *, hint: str | None = None) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    if hint:
        err.print(f"  {hint}", highlight=False)
    sys.exit(code)


def _show_version(value: bool) -> None:
    if value:
        out.print(f"protrain {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
