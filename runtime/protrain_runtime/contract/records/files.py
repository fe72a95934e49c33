"""Files that are whole at every moment: the old one or the new one, never a part of either.

A new file is written as `.NAME.RANDOM.tmp` beside the old one, and then takes its place in one
step. A writer that is killed in between leaves that temporary file.
"""

import os
import re
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.units import format_bytes

MAX_FILE_BYTES = 2 * 2**20
"""The largest file of a record: a hundred times the largest known, and a second to read."""


def read_text(path: str | Path, *, most_bytes: int = MAX_FILE_BYTES) -> str:
    """The UTF-8 text in the file; RecordError where there is none, or more than `most_bytes`."""
    try:
        return read_bytes(path, most_bytes=most_bytes).decode()
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: the byte 0x{error.object[error.start]:02x} at {error.start}"
        raise RecordError(problem, source=str(path)) from None


def read_bytes(path: str | Path, *, most_bytes: int) -> bytes:
    """Read the file; RecordError where it cannot be read, or holds more than `most_bytes`.

    No more than that is read, whatever the file says of its size: devices never end, and files
    grow. Pipes of a shell and standard input may be named (/dev/fd/63, /dev/stdin); a named pipe
    elsewhere is refused, which might wait for its writer for ever.
    """
    try:
        # Opening a pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", closefd=True) as file:  # noqa: PTH123  (it is open already)
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError
            # The pipe of an open descriptor has its writer.
            is_open = os.path.realpath(path).startswith(("/dev/", "/proc/"))
            if stat.S_ISFIFO(found.st_mode) and not is_open:
                raise RecordError("this is a named pipe, not a file", source=str(path))
            if stat.S_ISBLK(found.st_mode):
                raise RecordError("this is a device, not a file", source=str(path))
            os.set_blocking(descriptor, True)
            content, room = bytearray(), 0 if found.st_size > most_bytes else most_bytes + 1
            # Piece by piece: one read of so many bytes would take the memory for all.
            while len(content) < room and (piece := file.read(min(2**16, room - len(content)))):
                content += piece
            if max(found.st_size, len(content)) > most_bytes:
                raise RecordError(
                    f"this file is larger than the {format_bytes(most_bytes)} limit",
                    source=str(path),
                )
            return bytes(content)
    except FileNotFoundError:
        raise RecordError("no such file", source=str(path)) from None
    except IsADirectoryError:
        raise RecordError("this is a directory, not a file", source=str(path)) from None
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot be read: {_reason(error)}", source=str(path)) from None


def replace_text(path: str | Path, text: str) -> None:
    """Write the file anew, at once: at no moment is it missing or incomplete.

    A link is followed; an old file's permissions stay, and its owner if permitted. Other hard links
    keep what the old file held. What is no file of the disk is written into: a device, a pipe, a
    descriptor that is open here (/dev/stdout, /dev/fd/3).

    RecordError where it cannot be written; then, as after an interruption, an old file is
    untouched.
    """
    try:
        content = text.encode()
        if _written_into(path, content):
            return
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise RecordError("this is a directory, not a file", source=str(path))
        if not target.parent.is_dir():
            fix = f"mkdir -p {shlex.quote(str(Path(path).parent))}"
            problem = "the directory of this file does not exist"
            raise RecordError(problem, source=str(path), fix=fix)
        _replace(target, content)
    except UnicodeEncodeError as error:
        problem = f"is not text: {error.object[error.start]!a} at {error.start}"
        raise RecordError(problem, source=str(path)) from None
    except (OSError, ValueError) as error:
        # Its cause says whether it was a broken pipe.
        raise RecordError(f"cannot be written: {_reason(error)}", source=str(path)) from error


def descriptor_of(path: str | Path) -> int | None:
    """The open descriptor of this process that a path names, as /dev/stdout does; None of others.

    To open such a path would open the file behind it anew: at its start, and not where the shell
    has redirected the descriptor to.
    """
    own = (f"/proc/{os.getpid()}/fd", "/dev/fd")
    name = Path(path)
    with suppress(OSError, ValueError):  # no such name: writing it will say why
        for _ in range(_MOST_LINKS):
            name = Path(os.path.realpath(name.parent), name.name)
            if str(name) == "/dev/stdout":
                return STANDARD_OUTPUT
            if str(name.parent) in own:
                return int(name.name) if re.fullmatch("[0-9]{1,9}", name.name) else None
            name = name.parent / name.readlink()  # OSError where it is no link
    return None


def keep_standard_output() -> None:
    """Leave standard output to the file written there; print to standard error."""
    _kept[STANDARD_OUTPUT] = os.dup(STANDARD_OUTPUT)
    os.dup2(_STANDARD_ERROR, STANDARD_OUTPUT)


STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2
_kept: dict[int, int] = {}  # where a descriptor is now
_MOST_LINKS = 40  # as the system follows


def is_special(path: str | Path) -> bool:
    """Whether something is there that is neither a file of the disk nor a directory."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _written_into(path: str | Path, content: bytes) -> bool:
    """Write into what must not be replaced; whether this is such."""
    descriptor = descriptor_of(path)
    if descriptor is not None:
        opened = os.dup(_kept.get(descriptor, descriptor))
    elif is_special(path):
        opened = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    else:
        return False
    with os.fdopen(opened, "wb") as file:
        if descriptor is None and stat.S_ISREG(os.fstat(opened).st_mode):
            return False  # it has become a file meanwhile, which is replaced
        file.write(content)
    return True


def _replace(target: Path, content: bytes) -> None:
    """Write a file beside `target` and move it there."""
    old = target.stat() if target.exists() else None
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    created = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, created, 0o600 if old else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if old is not None:
                with suppress(PermissionError):
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, old.st_mode & 0o777)  # last: a new owner takes it away
            os.fsync(descriptor)  # before the name: a crash must not leave a name without bytes
        temporary.replace(target)
    except BaseException:  # an interruption too
        temporary.unlink(missing_ok=True)
        raise


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
