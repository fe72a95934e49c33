"""Files of checkpoints as they are read and written: regular ones, and their checksums.

The sums are CRC-32, as `zlib` computes it. They find damage: any change within 32 bits that follow
each other, and any other with a chance of one in 2**32 to miss it. They are no protection against
people, who can change the sums as well.
"""

import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from protrain_plan.errors import ProtrainError
from protrain_plan.program.program import SAVING_BYTES

SUMS = "checksums.json"
MAX_JSON_BYTES = 100_000_000  # what the format of safetensors allows a header
_KEY = "protrain_checksum"
_SEAL = re.compile(rb'"protrain_checksum": "([0-9a-f]{8})"')
_UNSEALED = b'"protrain_checksum": "00000000"'
_MAX_THREADS = 4  # reading and summing go on beside each other; more only compete for the disk
_BUFFER_BYTES = SAVING_BYTES // _MAX_THREADS
_MAX_SHOWN = 200  # characters of a name
_DAMAGED = "load another checkpoint"


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file that follow those of the range before."""

    what: str  # the tensor that lies there; "the header" and the like for what is none
    num_bytes: int
    checksum: int


Sums = Mapping[str, Sequence[Range]]
"""The ranges of each file, from its first byte to its last."""


class Summed:
    """A file that is written from front to back, and summed as it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.ranges: list[Range] = []

    def begin(self, what: str) -> None:
        """Say what the bytes are that follow."""
        self.ranges.append(Range(what, 0, 0))

    def write(self, data: bytes | memoryview) -> int:
        """Write and sum bytes; returns how many."""
        view = memoryview(data).cast("B")
        last = self.ranges.pop()
        checksum = last.checksum
        for start in range(0, len(view), _BUFFER_BYTES):  # written while caches have it
            piece = view[start : start + _BUFFER_BYTES]
            checksum = zlib.crc32(piece, checksum)
            self._file.write(piece)
        self.ranges.append(Range(last.what, last.num_bytes + len(view), checksum))
        return len(view)

    # What torch.distributed.checkpoint asks of a file besides.

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


@contextmanager
def new_file(path: Path, first: str) -> Iterator[Summed]:
    """A file that was not there, on the disk when this ends; what it has `first` is begun.

    OSError where the disk refuses.
    """
    with path.open("xb") as file:
        summed = Summed(file)
        summed.begin(first)
        yield summed
        file.flush()
        os.fsync(file.fileno())


# --- regular files, and JSON in them --------------------------------------------------------------


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. ProtrainError where it cannot be read, or is a pipe or a device."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            # A pipe that took the file's place meanwhile lets nobody wait.
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise damaged(path, f"cannot be read: {reason}") from None
    raise damaged(path, "this is no regular file")


def read_regular(path: Path, *, max_bytes: int = sys.maxsize) -> bytes:
    """The whole of a file. ProtrainError as `open_regular`, or where it is larger."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise damaged(path, f"the file has {size} bytes: more than {max_bytes} are not read")
        try:
            return file.read(size + 1)
        except (OSError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or "it does not fit in memory"
            raise damaged(path, f"cannot be read: {reason}") from None


def parse_json(text: bytes) -> Any:
    """What a JSON text says, whose keys are unique and text. ValueError where it is none."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    "".join(found).encode()  # raises for halves of characters, which nobody can print
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def shown(name: str) -> str:
    """A name from a file as printable text."""
    name = name if len(name) <= _MAX_SHOWN else name[:_MAX_SHOWN] + "..."
    return name if name.isprintable() else ascii(name)


# --- sealed texts, and files of sums --------------------------------------------------------------


def seal(content: Mapping[str, Any]) -> bytes:
    """The content as JSON text; "" under the key `protrain_checksum`, at any depth, is its sum."""
    text = json.dumps(content, indent=2).encode() + b"\n"
    text = text.replace(f'"{_KEY}": ""'.encode(), _UNSEALED)
    return text.replace(_UNSEALED, f'"{_KEY}": "{zlib.crc32(text):08x}"'.encode())


def is_sealed(text: bytes) -> bool:
    """Whether a text of `seal` is as it was written."""
    found = _SEAL.findall(text)
    return len(found) == 1 and zlib.crc32(_SEAL.sub(_UNSEALED, text)) == int(found[0], 16)


def write_sums(folder: Path, sums: Sums) -> str:
    """Write the sums of a folder's files beside them; returns their own sum.

    OSError where the disk refuses.
    """
    files = {
        file: [[range_.what, range_.num_bytes, range_.checksum] for range_ in ranges]
        for file, ranges in sums.items()
    }
    text = json.dumps(files, separators=(",", ":")).encode()
    with new_file(folder / SUMS, SUMS) as file:
        file.write(text)
    return f"{zlib.crc32(text):08x}"


def read_sums(folder: Path, checksum: str) -> Sums:
    """The sums of a folder's files. ProtrainError where they are missing or damaged."""
    path = folder / SUMS
    text = read_regular(path, max_bytes=MAX_JSON_BYTES)
    if f"{zlib.crc32(text):08x}" != checksum:
        raise damaged(path, "the file is damaged: its checksum is another")
    try:
        files = parse_json(text)
        return {file: [_range(*parts) for parts in ranges] for file, ranges in files.items()}
    except (ValueError, TypeError, AttributeError):  # written so, and not by us
        raise damaged(path, "these are no checksums") from None


def _range(what: object, num_bytes: object, checksum: object) -> Range:
    if not isinstance(what, str) or type(num_bytes) is not int or type(checksum) is not int:
        raise TypeError
    return Range(what, num_bytes, checksum)


def check_sum(path: Path, content: bytes, sums: Sums) -> None:
    """Compare a file that was read at once with its sums. ProtrainError where it differs."""
    if path.name not in sums:
        raise damaged(path, f"{SUMS} does not have it")
    start = 0
    for range_ in sums[path.name]:
        part = content[start : start + range_.num_bytes]
        start += range_.num_bytes
        if len(part) != range_.num_bytes or zlib.crc32(part) != range_.checksum:
            raise damaged(path, "the file is damaged")
    if start != len(content):
        raise damaged(path, "the file goes on behind its end")


def verify(
    folder: Path,
    sums: Sums,
    *,
    where: Callable[[str], str] = shown,
    needed: Callable[[str], bool] = lambda _: True,
) -> None:
    """Read the files, several at a time, and compare. ProtrainError with the file and the tensor.

    `where` says more of a tensor, such as the unit that it belongs to; `needed`, whether it is to
    be compared. All threads together take SAVING_BYTES of buffers. Where the process's data are
    limited there is one thread: the stacks of others would count.
    """
    stop = Event()

    def check(file: str) -> ProtrainError | None:
        return _difference(folder / file, sums[file], where, needed, stop)

    num_threads = min(len(sums), _MAX_THREADS if threads_are_free() else 1)
    if num_threads <= 1:
        for file in sorted(sums):
            if (found := check(file)) is not None:
                raise found
        return
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for found in pool.map(check, sorted(sums)):
                if found is not None:
                    raise found
        finally:  # of an interruption, too
            stop.set()
            pool.shutdown(cancel_futures=True)


def threads_are_free() -> bool:
    """Whether the stacks of threads count for nothing: the process's data have no limit."""
    if not sys.platform.startswith("linux"):
        return True
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return all(limit == resource.RLIM_INFINITY for limit in limits)


def _difference(
    path: Path,
    ranges: Iterable[Range],
    where: Callable[[str], str],
    needed: Callable[[str], bool],
    stop: Event,
) -> ProtrainError | None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    try:
        with open_regular(path) as file:
            for range_ in ranges:
                if not needed(range_.what):
                    file.seek(range_.num_bytes, os.SEEK_CUR)
                    continue
                left, checksum = range_.num_bytes, 0
                while left and (count := file.readinto(buffer[: min(left, len(buffer))])):  # type: ignore[attr-defined]
                    checksum = zlib.crc32(buffer[:count], checksum)
                    left -= count
                    if stop.is_set():
                        return None
                if left:
                    return damaged(path, f"the file is cut off in {where(range_.what)}")
                if checksum != range_.checksum:
                    return damaged(path, f"{where(range_.what)} is damaged")
            if file.read(1):
                return damaged(path, "the file goes on behind its end")
    except ProtrainError as error:
        return error
    except OSError as error:
        return damaged(path, f"cannot be read: {error.strerror}")
    return None


def damaged(path: Path, problem: str) -> ProtrainError:
    """A file of a checkpoint that cannot be used."""
    return ProtrainError(problem, source=str(path), fix=_DAMAGED)
