"""Blame the user's own frame: errors of a model's code as one message, with a line of theirs."""

import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from traceback import walk_tb

from protrain_runtime.contract.errors import ProtrainError

_MOST_CALLS = 12
"""Calls that a report of our own mistake names."""

Line = tuple[str, int]
"""A file, as Python names it, and a line of it."""
Place = tuple[str | None, int | None]
"""A file of the user's and a line of it; (None, None) if unknown."""


@contextmanager
def explained(
    place: Callable[[], object], *, planned: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """ProtrainError for what the model's code raises inside, with its line and the place then.

    Of our own code a RuntimeError is a refusal, which says what to do; all else is our mistake, and
    reported as such. A `planned` model has already run without a plan, so that what it raises now
    is not reported as its fault.
    """
    try:
        yield
    except (ProtrainError, KeyboardInterrupt):
        raise
    except BaseException as error:
        lines = lines_of(error)
        ours = os.path.realpath(lines[0][0]).startswith(_OURS)
        said = words_of(error).strip()
        what = f"raised {type(error).__name__}" + (f": {said}" if said else "")
        if ours and not isinstance(error, RuntimeError):
            calls = [f"{Path(file).name}:{line}" for file, line in lines[:_MOST_CALLS]]
            raise ProtrainError(
                indent(f"protrain itself {what},{place()}".rstrip(","), "    ").strip(),
                source=lines[0][0],
                line=lines[0][1],
                fix="the model is not at fault: please report it, with the model and these calls: "
                + " < ".join(calls),
            ) from error
        source, number = user_frame(lines)
        if isinstance(error, SystemExit):
            what = f"ended the program: sys.exit({said})"
        message, mend = f"the model's code {what}", "fix the cause; "
        if ours:
            message, mend = f"the model cannot be measured: {said}", ""
        elif "saved tensor hooks" in said:  # of which PyTorch says so inside torch.func.grad
            mend = "profiles and plans need these hooks: use torch.func.jvp or jacfwd instead; "
        elif planned():
            message = f"the model ran by itself, and under a plan its code {what}"
            mend = "if it does not raise that without a plan, please report it, with the model; "
        raise ProtrainError(
            indent(f"{message},{place()}".rstrip(","), "    ").strip(),
            source=source,
            line=number,
            fix=f"{mend}--in-process measures where a debugger can stop",
        ) from error


def words_of(error: BaseException) -> str:
    """The words of an error: of a class of the user's, whose own code may fail."""
    try:
        return str(error)
    except Exception as inner:  # noqa: BLE001 (whatever it is)
        return f"its words raised {type(inner).__name__}"


def user_frame_in(dump: Path) -> Place:
    """The `user_frame` in a file with the stack that Python wrote after a signal."""
    text = dump.read_text(errors="replace")
    lines = re.findall(r'^  File "(.+)", line ([0-9]{1,9}) in ', text, re.MULTILINE)
    return user_frame((file, int(line)) for file, line in lines)


def lines_of(error: BaseException) -> list[Line]:
    """Where an error was raised, innermost first."""
    found = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return found[::-1]


def user_frame(lines: Iterable[Line]) -> Place:
    """The first line in a user's file, else in a library of models; else (None, None)."""
    file, number = min(lines, key=_distance, default=("", 0))
    if _distance((file, number)) == _ENGINE:
        return None, None
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file, number


def _folders(*found: str | None) -> tuple[str, ...]:
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in found if folder)


def _package(name: str) -> str | None:
    """Where a package is, without importing it."""
    spec = find_spec(name)
    return str(Path(spec.origin).parent) if spec and spec.origin else None


_OURS = _folders(_package("protrain_plan"), _package("protrain_runtime"))
_TORCH = _folders(_package("torch"))
_INSTALLED = _folders(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_PYTHON = _folders(sysconfig.get_path("stdlib"))
_ENGINE = 2


def _distance(line: Line) -> int:
    """How far a file is from the user's: 1 for an installed library, `_ENGINE` for what runs it."""
    path = os.path.realpath(line[0])
    if path.startswith((*_OURS, *_TORCH)) or not Path(path).is_file():
        return _ENGINE
    if path.startswith(_INSTALLED):  # it may lie in Python's own folder
        return 1
    return _ENGINE if path.startswith(_PYTHON) else 0
