"""What commands print, and where: results, progress bars, the first Ctrl-C."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# No emoji: `package.module:factory: ...` is a message, not a picture of a factory.
out, err = Console(emoji=False), Console(stderr=True, emoji=False)


def show(as_json: bool, data: object, text: Callable[[], RenderableType]) -> None:
    """Print a result: as one JSON object, or for people."""
    if as_json:
        print_json(data)
    else:
        print_rendered(text())


def print_rendered(text: RenderableType, *, highlight: bool = True) -> None:
    """Print for people; in a pipe without the blanks that fill lines up on a terminal."""
    if out.is_terminal:
        out.print(text, highlight=highlight)
        return
    with out.capture() as printed:
        out.print(text, highlight=highlight)
    print_text("\n".join(line.rstrip() for line in printed.get().splitlines()))


def print_json(data: object) -> None:
    """Print plain data as one JSON object."""
    print_text(json.dumps(data, indent=2))


def print_text(text: str) -> None:
    """Print lines as they are: for programs, and never wrapped."""
    sys.stdout.write(text + "\n")


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


@contextmanager
def progress(*, quiet: bool, threaded: bool = True) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, shown on a terminal only and gone when the work is done.

    A thread keeps it going, but where the process's memory is measured or promised: the stack of a
    thread counts as data, 8 MiB of it.
    """
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        auto_refresh=threaded,
        disable=quiet or not err.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=1.0)

        def tell(what: str, fraction: float) -> None:
            bar.update(task, description=what, completed=fraction, refresh=not threaded)

        yield tell
