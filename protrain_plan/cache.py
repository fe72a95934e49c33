"""Cached results: files in the user's cache folder, named after all that they depend on.

[Note: what the name holds] The whole question, the bytes of our own source files, and of the
libraries that answer it the version and the checksums of the installed files. Who edits an
installed library by hand is not seen, but for one that is installed as editable, or shadowed by
another folder of the same name: then nothing is kept.

[Note: who is believed] An entry is data: it is read by its types and their limits, and has a
checksum over its name and its content, so that a damaged or renamed one is made anew. The checksum
is no secret: anyone who can write to the folder can write answers. So the folder must belong to the
user alone, outside the working directory and its repository.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import msgspec

from protrain_runtime.contract import __version__
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records.files import read_text, replace_text

T = TypeVar("T")

SWITCH = "PROTRAIN_NO_CACHE"
"""The environment variable that switches the cache off, whatever its value."""

_MOST_BYTES = 64 * 2**20
"""All entries of a folder together: some thousands. The oldest go first."""
_ENTRY = re.compile(r"[0-9a-f]{64}\.txt")


class Kept:
    """Texts by questions, in a folder of their own. None where that is not the user's alone.

    `libraries` compute the answers, and `optional` ones where they are installed, by environment
    variables whose names begin with one of the `settings`.
    """

    name: ClassVar[str]
    libraries: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, off: bool = False) -> None:
        self._folder = None if off or SWITCH in os.environ else _folder(self.name)
        found = None if self._folder is None else _installation(self.libraries, self.optional)
        facts = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(self.settings))
        self._installed = None if found is None else [*found, *facts]

    @property
    def is_off(self) -> bool:
        """Whether nothing is read or written."""
        return self._folder is None or self._installed is None

    def _entry(self, question: str) -> tuple[Path, str] | None:
        """Where an answer is kept, and its name. See [Note: what the name holds]."""
        if self._folder is None or self._installed is None:
            return None
        name = _digest(json.dumps([question, self._installed]))
        return self._folder / f"{name}.txt", name

    def _read(self, question: str) -> str | None:
        if (entry := self._entry(question)) is None:
            return None
        path, name = entry
        try:
            checksum, _, content = read_text(path).partition("\n")
        except RecordError:
            return None
        if checksum != _digest(name + content):
            return None
        with suppress(OSError):
            os.utime(path)  # the oldest is the one that was not asked for
        return content

    def _write(self, question: str, content: str) -> None:
        if (entry := self._entry(question)) is None:
            return
        path, name = entry
        with suppress(RecordError, OSError):  # a full disk is no reason to fail
            replace_text(path, f"{_digest(name + content)}\n{content}")
            # The oldest entries go, beyond `_MOST_BYTES`.
            files = os.scandir(path.parent)
            found = [(file.stat(), file.path) for file in files if _ENTRY.fullmatch(file.name)]
            size = sum(status.st_size for status, _ in found)
            for status, old in sorted(found, key=lambda entry: entry[0].st_mtime):
                if size > _MOST_BYTES:
                    Path(old).unlink(missing_ok=True)
                    size -= status.st_size


def _folder(name: str) -> Path | None:
    """The folder, made where it is missing; None where it is not the user's alone."""
    try:
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        above = named if named.is_absolute() else Path.home() / ".cache"
        folder = Path(os.path.realpath(above / "protrain-plan" / name))
        here = Path.cwd()
        repositories = [at for at in (here, *here.parents) if (at / ".git").exists()]
        if any(folder.is_relative_to(at) for at in (here, *repositories)):
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # no home, or one that cannot be written to
        return None
    return folder if status.st_uid == os.geteuid() and not status.st_mode & 0o022 else None


@lru_cache
def _installation(libraries: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[str] | None:
    """The installed packages, as texts; None where the installer's notes do not tell."""
    facts = [__version__, sys.version, platform.machine()]
    for package in ("protrain_plan", "protrain_runtime"):
        spec = find_spec(package)
        folders = (spec.submodule_search_locations if spec else None) or ()
        facts += [_digest_of_files(Path(folder)) for folder in folders]
    for name in (*libraries, *optional):
        if name in optional and find_spec(name) is None:
            continue
        if (found := installed(name)) is None:
            return None
        facts += [name, *found]
    return facts


def installed(name: str) -> tuple[str, str] | None:
    """A package's version and the digest of its files; None where the installer does not tell."""
    spec = find_spec(name)
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    record, origin = found.read_text("RECORD"), spec.origin if spec else None
    editable = '"editable": true' in (found.read_text("direct_url.json") or "")
    if record is None or origin is None or editable:
        return None
    if not Path(origin).is_relative_to(str(found.locate_file(name))):
        return None
    return found.version, _digest(record)


@lru_cache
def _digest_of_files(folder: Path) -> str:
    paths: Iterable[Path] = (p for p in folder.rglob("*") if p.suffix in (".py", ".yaml", ".json"))
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


# --- records as text -----------------------------------------------------------------------------


def dumped(record: Any, **others: object) -> str:
    """A record as JSON by the types of its fields, with `others` in the place of some."""
    data = {field.name: getattr(record, field.name) for field in fields(record)}
    return msgspec.json.encode(data | others).decode()


def loaded(kind: type[T], text: str, **readers: Callable[[Any], Any]) -> T:
    """Read a record, some fields by a function of their own; RecordError for another."""
    hints = get_type_hints(kind)
    try:
        data = msgspec.json.decode(text)
        read = {name: partial(msgspec.convert, type=hint) for name, hint in hints.items()} | readers
        return kind(**{name: read[name](value) for name, value in data.items()})
    except (AttributeError, KeyError, TypeError, msgspec.MsgspecError, RecordError) as error:
        raise RecordError(f"not readable as {kind.__name__}: {error}") from None
