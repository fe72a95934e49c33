"""Making the profile that a command asks for: measured in a process of its own, or estimated.

The process is fresh, not forked: memory that a parent's threads leave behind would be counted as
what a run holds besides tensors. It has the libraries of the command line, as a run has them. It
sends where it is before each slot runs; when it is gone, the last place is known.
"""

import ctypes
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protrain_plan.commands.model_code import culprit, explained
from protrain_plan.errors import OutOfMemoryError, ProtrainError
from protrain_plan.profiling import whereabouts
from protrain_plan.profiling.whereabouts import Place
from protrain_plan.records.hardware import Hardware, is_accelerator
from protrain_plan.records.profile import DType, Precision, Profile

if TYPE_CHECKING:
    from protrain_plan.profiling.estimated import Options

Progress = Callable[[str, float], None]

SMALLER = "a smaller --batch-size or --seq-len; the model alone: --unit-by-unit"
"""What to do where memory runs out."""

_GRACE_S = 5.0
"""How long an interrupted process may take to end by itself; its spill file has no name."""

_POLL_S = 0.2
"""How often to look whether the process lives: one that it started may hold the pipe open."""

# Through the command line, so that its libraries are there as in a run. A first Ctrl-C ends the
# process silently, as long as it has nothing to clean up.
_CHILD = """
import json, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:] = json.loads(sys.argv.pop(1))
from protrain_plan.cli import main
main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to profile: the options of the command, as they were given."""

    model: str
    batch_size: int
    seq_len: int
    dtype: DType
    precision: Precision
    lora: str | None
    optimizer: str
    device: str | None
    deterministic: bool
    steps: int | None
    unit_by_unit: bool
    seed: int
    text: Path | None
    spill_directory: Path | None

    def options(self, progress: Progress) -> "Options":
        """What measuring and estimating take, and are told; ProtrainError for what is unknown."""
        from protrain_plan.models.adapters import parse_lora
        from protrain_plan.models.optimizers import optimizer_factory

        optimizer_factory(self.optimizer)  # a wrong name is told at once
        return {
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "dtype": self.dtype,
            "precision": self.precision,
            "adapter": "" if self.lora is None else str(parse_lora(self.lora)),
            "optimizer": self.optimizer,
            "seed": self.seed,
            "text": self.text,
            "progress": progress,
        }


# Torch loads in the functions below, so that --help and planning need not wait for it.


def estimated(request: Request, machine: Hardware, progress: Progress) -> Profile:
    """The profile that was asked for, estimated for a machine.

    ProtrainError where something of the request cannot be had, or the model's code looks at values.
    """
    from protrain_plan.models.sources import load_source
    from protrain_plan.profiling.estimated import estimate

    options = request.options(progress)
    return estimate(load_source(request.model), hardware=machine, **options)


def measured(request: Request, progress: Progress) -> Profile:
    """The profile that was asked for, measured in this process.

    ProtrainError where something of the request cannot be had, memory runs out, or the model's code
    raises.
    """
    from protrain_plan.commands.options import found_device
    from protrain_plan.models.building import kernels
    from protrain_plan.models.sources import load_source
    from protrain_plan.profiling.measured import measure
    from protrain_runtime.exhaustion import explained_exhaustion
    from protrain_runtime.measure import return_freed_memory

    def report(what: str, fraction: float) -> None:
        whereabouts.begin(what)
        progress(what, fraction)

    where = found_device(request.device or "cpu")
    options = request.options(report)
    with explained(whereabouts.place):
        source = load_source(request.model)
        if not is_accelerator(where.type):
            return_freed_memory()
        with kernels(deterministic=request.deterministic), explained_exhaustion(fix=SMALLER):
            return measure(
                source,
                device=where,
                num_steps=request.steps,
                spill_directory=request.spill_directory or Path(tempfile.gettempdir()),
                unit_by_unit=request.unit_by_unit,
                **options,
            )


# ---- in a process of its own ---------------------------------------------------------------------


def measured_apart(request: Request, progress: Progress) -> Profile:
    """The profile that was asked for, measured in a process of its own, which ends in here.

    The errors of `measured`, and ProtrainError where that process dies.
    """
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile() as dump:
        with theirs:
            ends = (theirs.fileno(), dump.fileno())
            python = (sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions))
            arguments = (json.dumps(sys.path), "serve", *map(str, ends))
            child = subprocess.Popen([*python, "-c", _CHILD, *arguments], pass_fds=ends)
        try:
            place, outcome = _followed(child, ours, request, progress)
            child.wait()
        except BaseException:
            child.send_signal(signal.SIGINT)  # as a terminal does
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
            raise
        finally:
            child.kill()
            child.wait()
        if isinstance(outcome, Profile):
            return outcome
        if outcome is not None:
            raise outcome
        if child.returncode in (_INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        dump.seek(0)
        raise _death(child.returncode, place, dump.read().decode(errors="replace"))


Outcome = Profile | ProtrainError | None


def _followed(
    child: subprocess.Popen[bytes], line: Connection, request: Request, progress: Progress
) -> tuple[Place, Outcome]:
    """Where the process was last, and what came of it: None where it sent nothing."""
    place = Place()
    try:
        line.send((os.getpid(), sys.argv, request))
        while line.poll(_POLL_S) or child.poll() is None or line.poll():
            if not line.poll():
                continue
            told: Place | tuple[str, float] | Profile | ProtrainError = line.recv()
            match told:
                case Place():
                    place = told
                case (what, fraction):
                    place = Place(doing=what)
                    progress(what, fraction)
                case _:
                    return place, told
    except (EOFError, OSError):  # it died, perhaps as it wrote
        child.wait()
    return place, None


def _death(code: int, place: Place, dump: str) -> ProtrainError:
    """What is said of a process that ended without a word."""
    lines = re.findall(r'^  File "(.+)", line ([0-9]+) in ', dump, re.MULTILINE)
    source, number = culprit((file, int(line)) for file, line in lines)
    if code >= 0:
        return ProtrainError(
            f"the measuring process ended with code {code} and no profile{place}",
            fix="if it printed a traceback, that says why; --in-process measures where a debugger"
            " can stop",
        )
    died = signal.Signals(-code)
    message = (
        f"the measuring process died: {died.name} ({str(signal.strsignal(died)).lower()}){place}"
    )
    if died == signal.SIGKILL:
        return OutOfMemoryError(message, fix=f"probably memory ran out: {SMALLER}")
    return ProtrainError(
        message,
        source=source,
        line=number,
        fix="look for what is no Python there: an extension, or memory that is used after its end;"
        " --in-process measures where a debugger can stop",
    )


# ---- the other side ------------------------------------------------------------------------------

_INTERRUPTED = 130


def serve(
    connection: Annotated[int, typer.Argument(help="The descriptor to send and receive through.")],
    dump: Annotated[int, typer.Argument(help="That of a file for Python's stack after a signal.")],
) -> None:
    """Measure for the process that started this one."""
    line = Connection(connection)
    parent, sys.argv[:], request = line.recv()
    _end_with(parent)
    faulthandler.enable(dump, all_threads=False)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _interrupt)

    def report(what: str, fraction: float) -> None:
        line.send((what, fraction))

    try:
        with whereabouts.listening(line.send):
            line.send(measured(request, report))
    except (KeyboardInterrupt, BrokenPipeError):
        raise typer.Exit(_INTERRUPTED) from None
    except ProtrainError as error:
        # Its own class may not be known on the other side, and would import PyTorch there.
        kind = OutOfMemoryError if error.exit_code == OutOfMemoryError.exit_code else ProtrainError
        line.send(
            kind(error.message, source=error.source, line=error.line, key=error.key, fix=error.fix)
        )


def _interrupt(*_: object) -> None:
    """Let the first Ctrl-C clean up; a second one would cut that short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


_PR_SET_PDEATHSIG = 1  # prctl(2)


def _end_with(parent: int) -> None:
    """Let the system end this process where its parent is killed; elsewhere the pipe's end does."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise typer.Exit(_INTERRUPTED)
