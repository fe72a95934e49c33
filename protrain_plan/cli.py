"""The command line: its commands, and errors as exit codes.

Exit codes: 0 done, 1 a verification or a rule failed, 2 a mistake in the input, 3 no plan fits,
4 out of memory, 130 interrupted, 141 standard output was closed.
"""

import gc
import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working directory first. What lies there is data, whatever its name.
    del sys.path[0]


def _leave_repository_out() -> None:
    """Import nothing from the repository that the command is run in, wherever PYTHONPATH leads.

    What runs this program stays: its Python's folders, and this package's where it is the
    repository's.
    """
    here = repository = os.path.realpath(".")
    while not os.path.exists(f"{repository}/.git"):
        above = os.path.dirname(repository)
        if above == repository:
            repository = here
            break
        repository = above
    own = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    stay = {own, f"{own}/runtime"}
    if "site" in sys.modules:  # imported already, as os is
        site = sys.modules["site"]
        stay.update(map(os.path.realpath, [*site.getsitepackages(), site.getusersitepackages()]))
    python = os.path.dirname(os.path.realpath(os.__file__))
    for entry in list(sys.path):
        real = os.path.realpath(entry)
        is_inside = f"{real}/".startswith(f"{repository}/")
        if is_inside and real not in stay and not f"{real}/".startswith(python):
            sys.path.remove(entry)


if "--records-only" in sys.argv:  # which is safe on anything
    _leave_repository_out()

gc.disable()  # until all is imported: nothing of that is garbage

from collections.abc import Callable
from traceback import walk_tb
from typing import Annotated

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

from protrain_plan.commands import check, fit, machines, plan, plans, profile, run
from protrain_plan.commands.help import Command, Group
from protrain_plan.commands.option_records import with_options
from protrain_plan.commands.output import (
    BROKEN_PIPE,
    flush,
    lost,
    prepare_streams,
    print_error,
    print_text,
)
from protrain_plan.isolated.ending import INTERRUPTED, quiet_libraries
from protrain_runtime.contract import __version__
from protrain_runtime.contract.errors import ProtrainError

gc.enable()

# The commands' modules import what they need where they run: help is for all of them.
app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Plan training under a memory limit: profile a model, plan it, run the plan.",
)
hardware = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode="rich")


def _add(group: typer.Typer, command: Callable[..., None], name: str | None = None) -> None:
    """Add a command, whose docstring is its help: the last paragraph are examples."""
    # Paragraphs without the docstring's line breaks, which would be shown beside the terminal's.
    *paragraphs, examples = (
        " ".join(part.split()) for part in (command.__doc__ or "").split("\n\n")
    )
    text, listed = "\n\n".join(paragraphs), examples.replace(": ", ":\n", 1).replace(" | ", "\n")
    group.command(name, cls=Command, help=text, epilog=listed)(with_options(command))


for _command in (
    *(profile.profile, fit.fit, plan.plan, plans.show, plans.simulate, plans.report, run.run),
    *(check.check, plans.diff, plans.export, machines.models),
):
    _add(app, _command)
_add(hardware, machines.list_machines, "list")
_add(hardware, machines.show_machine, "show")
_add(hardware, machines.copy)
_add(hardware, machines.probe)
_add(hardware, fit.search)
app.add_typer(hardware, name="hardware", help=machines.HELP, epilog=machines.EXAMPLES)


def main() -> None:
    """Run the command line; what a user can mend becomes one message."""
    gc.disable()  # until a command begins: help ends before there is garbage
    prepare_streams()
    quiet_libraries()
    try:
        code: int | None = app(standalone_mode=False)  # that of a typer.Exit
        flush()
        if code == INTERRUPTED:  # typer makes Ctrl-C a code
            print_error("interrupted")
    except (Exception, KeyboardInterrupt) as error:
        code = _failed(error)
        if code is None:
            raise
    sys.exit(code)


def _failed(error: BaseException) -> int | None:
    """Print an error and return its exit code; None for our own mistakes."""
    if isinstance(error, OSError):
        # Of the help, which rich prints; all else that is printed says itself that it is lost.
        names = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
        error = lost(error) if "rich.console" in names else error
    match error:
        case typer.Exit():
            return error.exit_code
        case KeyboardInterrupt() | typer.Abort():
            print_error("interrupted")
            return INTERRUPTED
        case ProtrainError(__cause__=BrokenPipeError()):
            return BROKEN_PIPE
        case ProtrainError():
            print_error(str(error))
            return error.exit_code
        case _ if hasattr(error, "format_message"):
            # What typer's parser found wrong with the arguments.
            if message := error.format_message():  # no arguments at all: the help was shown
                path, context = "--help", getattr(error, "ctx", None)
                while context is not None and context.parent is not None:
                    path, context = f"{context.info_name} {path}", context.parent
                print_error(message, hint=f"try protrain {path}")
            return 2
        case _:
            return None


def _show_version(value: bool) -> None:
    if value:
        print_text(f"protrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001  (its callback reads it)
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    gc.enable()


if __name__ == "__main__":
    main()
