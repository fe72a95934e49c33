"""Plans with their profiles, found in files.

A plan names its profile by fingerprint; the profile lies in the plan's folder, under any name.

[Note: what is a record] A YAML file in a folder is a record if the key `protrain` stands at its
top, as the reader of records sees it. A file that has this key for a more lenient reader (in
another encoding, with a tag or an alias, in a second document, in capitals), or that mentions
protrain and is not YAML, was meant as a plan: it fails. Other files are ignored.

[Note: links] A folder's files are those in it, and files of the repository that it links to. Links
to other places are not reviewed with the folder: they fail. So does a plan that was named, or a
profile beside it, if it lies elsewhere.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from protrain_plan.checking.budgets import read_limits
from protrain_plan.checking.reviewed import leads_out, repository
from protrain_plan.planning.model.options import read_pins
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records import fingerprint, loads_hardware, loads_plan, loads_profile
from protrain_runtime.contract.records.files import read_text
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.reader import kind_of
from protrain_runtime.contract.records.tree import documents, parsed
from protrain_runtime.contract.records.words import as_seen, did_you_mean, listed
from protrain_runtime.contract.units import format_bytes

_SUFFIXES = (".yaml", ".yml")
_READERS: dict[str, Callable[[str, str], object]] = {
    "plan": loads_plan,
    "profile": loads_profile,
    "hardware": loads_hardware,
    "budgets": lambda _, path: read_limits(Path(path)),
    "pins": lambda _, path: read_pins(path),
}
_KEY = "protrain"
_MAX_BYTES = 16 * 2**20
"""Largest file in which the word is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A plan's file and the profiles in its folder, or the errors of what cannot be read."""

    path: Path
    text: str
    plan: Plan | RecordError
    profiles: tuple[tuple[Path, Profile | RecordError], ...]
    is_plan: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and the profile that it was made from."""

    path: Path
    plan: Plan
    profile_path: Path
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Files that were found: plans, and records that cannot be read, each once and in order."""

    files: tuple[Files, ...]
    num_seen: int  # files that were named, and files in folders that were named
    num_records: int  # records among these files


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A file that was found; `record` is None if it is neither a plan nor a profile."""

    kind: str | None  # None: no record, or one of an unknown kind (then `record` is an error)
    text: str = ""
    record: Plan | Profile | RecordError | None = None


def search(paths: Sequence[Path]) -> Search:
    """Read the files, which are plans, and all records in the folders at any depth.

    Raises ProtrainError if a path is missing, or a folder has no plan.
    See [Note: what is a record] and [Note: links].
    """
    for path in paths:
        if not os.path.lexists(path):
            raise ProtrainError("no such file or folder", source=str(path))
    folders = {path for path in paths if os.path.isdir(path)}  # noqa: PTH112  (it never raises)
    within = tuple(folders)
    seen: dict[Path, _Seen] = {}
    named: set[Path] = set()  # besides these, files beside a plan are seen
    found: dict[Path, Files] = {}
    for path in paths:
        if path not in folders:  # a plan, because it was named
            # The folder of a plan that lies elsewhere was named, too.
            is_here = Path(os.path.abspath(path)).is_relative_to(repository())  # noqa: PTH100
            beside = () if is_here else (path.parent,)
            try:
                if (problem := leads_out(path, *beside)) is not None:
                    raise _failure(problem, path)
                found[path] = read_files(path, seen, (path.parent,))
            except RecordError as error:
                found[path] = Files(path=path, text="", plan=error, profiles=())
            continue
        here = dict(sorted(_entries(path, within), key=lambda entry: entry[0]))
        seen |= {file: one or _look_at(file, within) for file, one in here.items()}
        named |= here.keys()
        is_empty = True
        for file in here:
            one, is_plan = seen[file], seen[file].kind == "plan"
            if not isinstance(one.record, Plan | RecordError):
                continue
            is_empty = False
            if file not in found:
                profiles = _profiles_beside(file, seen, within) if is_plan else ()
                found[file] = Files(
                    path=file, text=one.text, plan=one.record, profiles=profiles, is_plan=is_plan
                )
        if is_empty:
            fix = "write one with protrain plan -o, or name another folder"
            raise ProtrainError("no plan in this folder", source=str(path), fix=fix)
    records = [path for path in named if seen[path].kind or seen[path].record]
    return Search(
        files=tuple(found.values()),
        num_seen=len({*named, *found}),
        num_records=len({*records, *found}),
    )


def read_files(
    path: Path, seen: dict[Path, _Seen] | None = None, within: Sequence[Path] = ()
) -> Files:
    """Return the plan and its folder's profiles; RecordError if the plan's file is not text.

    Files in `seen` are not read again. For `within` see `_look_at`.
    """
    text = read_text(path)
    plan: Plan | RecordError
    try:
        plan = loads_plan(text, str(path))
    except RecordError as error:
        plan = error
    profiles = _profiles_beside(path, {} if seen is None else seen, within)
    return Files(path=path, text=text, plan=plan, profiles=profiles)


def opened(files: Files) -> Case | None:
    """The plan with its profile; None if one of them is missing."""
    if isinstance(files.plan, RecordError):
        return None
    for path, profile in files.profiles:
        if isinstance(profile, Profile) and fingerprint(profile) == files.plan.profile_fingerprint:
            return Case(path=files.path, plan=files.plan, profile_path=path, profile=profile)
    return None


def line_of(text: str, key: str | None) -> int:
    """The line of a key such as `prediction.peak_bytes`, or of its last part that exists."""
    with suppress(RecordError):
        if key:
            return replace(parsed(text, None), path=tuple(key.split("."))).line or 1
    return 1


def _profiles_beside(
    path: Path, seen: dict[Path, _Seen], within: Sequence[Path]
) -> tuple[tuple[Path, Profile | RecordError], ...]:
    """The profiles in a plan's folder, and the records there that may have been one."""
    files: list[Path] = []
    with suppress(OSError):
        files = sorted(path.parent.iterdir())
    found: list[tuple[Path, Profile | RecordError]] = []
    for file in files:
        if file == path or not file.name.lower().endswith(_SUFFIXES) or os.path.isdir(file):  # noqa: PTH112
            continue
        if file not in seen:
            seen[file] = _look_at(file, within)
        record = seen[file].record
        if isinstance(record, Profile | RecordError) and seen[file].kind in ("profile", None):
            found.append((file, record))
    return tuple(found)


def _entries(folder: Path, within: Sequence[Path]) -> Iterator[tuple[Path, _Seen | None]]:
    """Yield the YAML files at any depth, and, with errors, what stands in a file's place.

    Folders are entered once, by their own names rather than by a link's.
    """
    waiting, links, entered = [folder], list[Path](), set[str]()
    while waiting or links:
        above = waiting.pop() if waiting else links.pop(0)
        real = os.path.realpath(above)
        if real in entered:
            continue
        entered.add(real)
        if (problem := leads_out(real, *within)) is not None:
            yield above, _failed(problem.replace("this file lies", "this link points"), above)
            continue
        try:
            with os.scandir(above) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            yield above, _failed(f"cannot read this folder: {error.strerror}", above)
            continue
        for entry in entries:
            path, is_yaml = above / entry.name, entry.name.lower().endswith(_SUFFIXES)
            if not os.path.isdir(entry):  # noqa: PTH112
                if is_yaml:
                    yield path, None
            elif entry.name != ".git":  # nothing in there is part of a commit
                if is_yaml:
                    yield path, _failed("this is a directory, not a file", path)
                (links if entry.is_symlink() else waiting).append(path)


def _look_at(path: Path, within: Sequence[Path]) -> _Seen:
    """Read a file; with `within`, it has to lie in one of these folders or the repository."""
    kind, text, source = None, "", str(path)
    record: object
    try:
        if not _speaks_of_us(path):
            return _Seen(kind=None)
        text = read_text(path)
        found = documents(text)
        # A file that cannot be read was meant as a record, see [Note: what is a record].
        if found is not None and not any(map(_is_ours, found)):
            return _Seen(kind=None)
        if within and (problem := leads_out(path, *within)) is not None:
            return _failed(problem, path)
        kind_found = kind_of(text, source)
        if kind_found is None:
            problem = f"missing key {_KEY!r}, which is not written so"
            raise RecordError(problem, source=source, fix=f"write it as {_KEY}: plan")
        if kind_found not in _READERS:
            raise RecordError(
                f"expected {listed(_READERS, 'or')}, got {kind_found!r}",
                source=source,
                line=line_of(text, _KEY),
                key=_KEY,
                fix=did_you_mean(kind_found, _READERS),
            )
        kind = kind_found
        record = _READERS[kind](text, source)
    except RecordError as error:
        record = error
    ours = record if isinstance(record, Plan | Profile | RecordError) else None
    return _Seen(kind=kind, text=text, record=ours)


def _failure(problem: str, path: Path) -> RecordError:
    fix = "replace it with the file itself, or remove it"
    return RecordError(problem, source=str(path), fix=fix)


def _failed(problem: str, path: Path) -> _Seen:
    return _Seen(kind=None, record=_failure(problem, path))


_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})"
    r"|(?:\r\n|[\r\n\x85\u2028\u2029])[ \t]*)"
)


def _speaks_of_us(path: Path) -> bool:
    """Return whether the word is in a regular file, in any encoding and with any escapes.

    Never blocks. Raises RecordError for anything but a regular file, and for one too large.
    """
    try:
        # A pipe would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123  (it is open already)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RecordError("this is a pipe or a device, not a file", source=str(path))
            content = b"" if status.st_size > _MAX_BYTES else file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise RecordError(f"cannot be read: {error.strerror}", source=str(path)) from None
    if max(status.st_size, len(content)) > _MAX_BYTES:
        most = format_bytes(_MAX_BYTES)
        problem = f"this file is larger than the {most} that protrain check reads"
        raise RecordError(problem, source=str(path))
    content = content.replace(b"\0", b"")  # without these, UTF-16 and -32 read as ASCII
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")

    def unescaped(escape: re.Match[str]) -> str:
        number = int(escape[1] or escape[2] or escape[3] or "110000", 16)
        return chr(number) if number < 0x110000 else ""

    return _KEY in as_seen(text) or ("\\" in text and _KEY in as_seen(_ESCAPE.sub(unescaped, text)))


def _is_ours(document: yaml.Node) -> bool:
    """Return whether a mapping, or one in a list, has the key, by itself or by a merge (`<<`)."""
    waiting, met = [document], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in met:  # reached through an alias
            continue
        met.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and as_seen(key.value).strip() == _KEY:
                return True
            if key.value == "<<":
                waiting.append(value)
    return False
