"""Output of commands: results, errors, progress, the first Ctrl-C.

Results go to standard output at once; a failure to write them is an error. Text for people consists
of the texts of `terminal.py`; nothing here is read as markup.
"""

import fcntl
import io
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType

from protrain_plan.presentation.terminal import Text, plain
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.escaping import as_printed, lines, one_line
from protrain_runtime.contract.units import format_seconds

# No emoji: `package.module:factory: ...` is a message, not a picture of a factory.
_out = Console(markup=False, emoji=False, highlight=False)
_err = Console(markup=False, emoji=False, highlight=False, stderr=True)

BROKEN_PIPE = 128 + signal.SIGPIPE  # as shells say of a program whose reader has gone


def prepare_streams() -> None:
    """Make output, and warnings, safe for any characters, and keep it out of files opened later."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file to be opened would be this one
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: (  # noqa: ARG005
        lines(f"{one_line(filename)}:{lineno}: {category.__name__}: {message}") + "\n"
    )


def destination(
    path: Path, *, option: str = "-o", inputs: Iterable[str | Path | None] = ()
) -> Path:
    """Return the file to write, if it can be written, so that no error comes after minutes of work.

    Raises ProtrainError otherwise, and for one of the `inputs` (files, or names of models) by any
    name or link. `-` is standard output, which then holds the file alone: everything else that is
    printed, by us or by the model's code, goes to standard error.
    """
    from protrain_runtime.contract.records import files

    path = Path("/dev/stdout") if str(path) == "-" else path
    fix = f"name a file with {option}"
    directory, descriptor = path.parent, files.descriptor_of(path)
    if any(_is_same(path, source) for source in inputs if source is not None):
        problem = "this is an input file, and would be overwritten"
        raise ProtrainError(problem, source=str(path), fix=fix)
    if descriptor is not None or files.is_special(path):
        is_writable = False
        with suppress(OSError):  # a closed descriptor
            if descriptor is None:
                is_writable = os.access(path, os.W_OK)
            else:
                mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
                is_writable = mode != os.O_RDONLY
        if not is_writable:
            raise ProtrainError("cannot be written", source=str(path), fix=fix)
    else:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:  # a name that no file can have
            problem = f"cannot be written: {getattr(error, 'strerror', None) or error}"
            raise ProtrainError(problem, source=str(path)) from None
        if os.path.isdir(path):  # noqa: PTH112  (a name that no file can have is none)
            raise ProtrainError("is a directory", source=str(path), fix=fix)
        if not os.path.isdir(directory) or not os.access(directory, os.W_OK):  # noqa: PTH112
            problem = "the directory is missing or cannot be written"
            fix = f"name a file in another directory with {option}"
            raise ProtrainError(problem, source=str(directory), fix=fix)
    if descriptor != files.STANDARD_OUTPUT:
        return path
    if _given_away:
        problem = f"{_given_away[0]} already uses standard output"
        raise ProtrainError(problem, key=option, fix=fix)
    _given_away.append(option)
    flush()
    files.keep_standard_output()
    return path


def _is_same(path: Path, source: str | Path) -> bool:
    """Return whether a file is the source, or a model's configuration or code."""
    named = [str(source), os.path.join(source, "config.json"), str(source).rpartition(":")[0]]  # noqa: PTH118
    for name in named:
        with suppress(OSError, ValueError):  # one of them is not there: no model's name is a file
            if os.path.isfile(name) and os.path.samefile(path, name):  # noqa: PTH113, PTH121
                return True
    return isinstance(source, Path) and os.path.realpath(path) == os.path.realpath(source)


_given_away: list[str] = []  # option that uses standard output


def print_result(as_json: bool, data: object, text: Callable[[], RenderableType]) -> None:
    """Print a result, plain data or a record: as one JSON object, or for people."""
    if as_json:
        print_json(data)
    else:
        print_rendered(text())


def print_rendered(text: RenderableType, *, wrap: bool = True) -> None:
    """Print for people; in a pipe without blanks at the ends of lines."""
    print_text(_printed(_out, text, wrap=wrap))


def print_json(data: object, *, indent: int | None = 2) -> None:
    """Print plain data, and records inside, as one JSON object; in one line without `indent`."""
    print_text(json.dumps(plain(data), indent=indent))


def print_beside(text: str) -> None:
    """A line on standard error, above a progress bar if there is one."""
    _err.print(one_line(text), soft_wrap=True)


def print_text(text: str) -> None:
    """Print lines as they are, never wrapped; raises as `flush` does."""
    flush(text + "\n")


def flush(text: str = "") -> None:
    """Write to standard output, and flush it.

    Exits quietly if the reader has closed the pipe; ProtrainError if the text cannot be written.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise lost(error) from None


def print_error(message: str, *, hint: str | None = None) -> None:
    """Print an error on standard error, if that can be written."""
    first, *rest = lines(message).split("\n")
    text = Text().append("error:", "bold red").append(f" {first}")
    parts = [text, *map(Text, rest), *([Text(f"  {hint}")] if hint else [])]
    with suppress(OSError):
        sys.stderr.write(_printed(_err, Group(*parts), wrap=False) + "\n")
        sys.stderr.flush()


def lost(error: OSError) -> Exception:
    """Return the error for a standard output that cannot be written."""
    # Text that is still in its buffer would fail again when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(error, BrokenPipeError):
        return typer.Exit(BROKEN_PIPE)
    return ProtrainError(f"cannot be written: {error.strerror}", source="standard output")


def _printed(console: Console, text: RenderableType, *, wrap: bool) -> str:
    with console.capture() as printed:
        console.print(text, soft_wrap=not wrap)
    shown = as_printed(printed.get())
    if console.is_terminal:
        return shown.removesuffix("\n")
    return "\n".join(line.rstrip() for line in shown.splitlines())


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event instead of ending the program; the second one ends it."""
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


EVERY_S = 5.0
"""Seconds between lines of progress if standard error is no terminal."""


@contextmanager
def progress(
    *, quiet: bool, threaded: bool = True, rank: int = 0
) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error until the work is done; lines if standard error is no terminal.

    With `quiet` there is no bar, since results go to the same terminal; only rank 0 has one. A
    thread updates it, but not where the process's memory is measured or limited: the stack of a
    thread counts as 8 MiB of data.
    """
    if rank > 0 or (quiet and _err.is_terminal):
        yield lambda *_: None
        return
    if not _err.is_terminal:
        with _lines(threaded=threaded) as tell_in_lines:
            yield tell_in_lines
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=_err,
        transient=True,
        auto_refresh=threaded,
    )
    with bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, fraction: bar.update(
            task, description=one_line(what), completed=fraction, refresh=not threaded
        )


@contextmanager
def _lines(*, threaded: bool) -> Iterator[Callable[[str, float], None]]:
    """Lines such as `... estimating: 30%, 10.0 s`; none for work shorter than `EVERY_S`."""
    began = printed = time.monotonic()
    now, ended = ("starting", 0.0), threading.Event()

    def line() -> None:
        nonlocal printed
        printed = time.monotonic()
        what, fraction = now
        with suppress(OSError):
            print_beside(f"... {what}: {fraction:.0%}, {format_seconds(printed - began)}")

    def tell(what: str, fraction: float) -> None:
        nonlocal now
        now = what, fraction
        if not threaded and time.monotonic() - printed >= EVERY_S:
            line()

    def keep_telling() -> None:
        while not ended.wait(EVERY_S):
            line()

    teller = threading.Thread(target=keep_telling, daemon=True)
    if threaded:
        teller.start()
    try:
        yield tell
    finally:
        ended.set()
        if threaded:
            teller.join()
