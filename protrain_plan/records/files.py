"""Files that are whole at every moment: the old one or the new one, never a part of either.

[Note: leftovers] A new file is written under the name `.NAME.PID.tmp` beside the old one and then
takes its place in one step. A writer that is killed in between leaves that temporary file; the
next writer of NAME removes it if no process with that id is alive.
"""

import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from protrain_plan.errors import RecordError

_lock = threading.Lock()  # threads of one process would share a temporary name


def read_text(path: str | Path) -> str:
    """The UTF-8 text in the file; RecordError where there is none."""
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: the byte 0x{error.object[error.start]:02x} at {error.start}"
        raise RecordError(problem, source=str(path)) from None
    except FileNotFoundError:
        raise RecordError("there is no such file", source=str(path)) from None
    except IsADirectoryError:
        raise RecordError("this is a directory, not a file", source=str(path)) from None
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot be read: {_reason(error)}", source=str(path)) from None


def replace_text(path: str | Path, text: str) -> None:
    """Write the file anew, at once: at no moment is it missing or incomplete.

    A link is followed, and the permissions of an old file stay. RecordError where the file cannot
    be written; then, as after an interruption, the old file is untouched.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise RecordError("this is a directory, not a file", source=str(path))
    if not target.parent.is_dir():
        fix = f"mkdir -p {Path(path).parent}"
        raise RecordError("the directory of this file does not exist", source=str(path), fix=fix)
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        with _lock:
            _sweep(target)
            _write_and_replace(temporary, target, text.encode())
    except OSError as error:
        raise RecordError(f"cannot be written: {_reason(error)}", source=str(path)) from None


def _write_and_replace(temporary: Path, target: Path, content: bytes) -> None:
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            with suppress(FileNotFoundError):  # no old file whose permissions would stay
                temporary.chmod(target.stat().st_mode & 0o777)
            os.fsync(file.fileno())  # before the name: a crash must not leave a name without bytes
        temporary.replace(target)
    except BaseException:  # an interruption too
        with suppress(OSError):
            temporary.unlink()
        raise


def _sweep(target: Path) -> None:
    """Remove what killed writers of `target` have left. See [Note: leftovers]."""
    name = re.compile(rf"\.{re.escape(target.name)}\.([0-9]{{1,9}})\.tmp")
    for leftover in target.parent.iterdir():
        match = name.fullmatch(leftover.name)
        if match is not None and not _is_alive(int(match[1])):
            with suppress(OSError):  # someone else's file, or someone else has swept it
                leftover.unlink()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except OSError:
        return True  # alive, and someone else's
    return True


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
