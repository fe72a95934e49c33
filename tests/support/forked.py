"""Processes that have PyTorch, transformers and the runtime already: forked from one that does.

Importing them takes six seconds, which most of the commands and ranks in the tests would wait for.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

from tests.support.commands import without_progress

CONTEXT = multiprocessing.get_context("forkserver")
# The server imports what takes long, once, and runs nothing.
CONTEXT.set_forkserver_preload(
    [
        "tests.support.ranks_cases",
        "tests.support.runtime_cases",
        "protrain_plan.planning.questions.planner",
        "protrain_plan.profiling.estimated",
    ]
)

Result = CompletedProcess[str]


def protrain(*arguments: object, folder: Path, **environment: str) -> Result:
    """A command in a process of its own, as `tests.commands.test_cli.protrain` runs it."""
    with TemporaryDirectory() as told:
        outputs = Path(told, "out"), Path(told, "err")
        given = [*map(str, arguments)]
        process = CONTEXT.Process(target=_command, args=(given, folder, environment, outputs))
        process.start()
        process.join(200)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        out, err = (path.read_text(encoding="utf-8") for path in outputs)
        return CompletedProcess(given, process.exitcode, out, without_progress(err))


def _command(
    arguments: list[str], folder: Path, environment: Mapping[str, str], outputs: tuple[Path, Path]
) -> None:
    gc.freeze()
    sys.dont_write_bytecode = True
    for descriptor, path in enumerate(outputs, start=1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["protrain", *arguments]
    # Not with what is imported before: it looks at the terminal.
    from protrain_plan.cli import main

    main()
