"""Plans with their profiles, found in files.

A plan names its profile by fingerprint; the profile lies in the plan's folder, under any name.

[Note: what is a record] A YAML file in a folder is a record if the key `protrain` stands at its
top, as the one reader of records sees it. A file that has this key for a more lenient reader (in
another encoding, with a tag or an alias, in a second document, in capitals), or that speaks of
protrain and is no YAML at all, was meant as a plan: it fails. Other files are ignored.

[Note: links] A folder's files are those that lie in it, and those in the repository that it links
to. What a link leads to elsewhere is not what is reviewed with the folder: it fails. So does a plan
that was named, or a profile beside it.
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
"""Largest file in which that word is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A plan's file and the profiles in its folder, read as far as possible.

    Of another record that cannot be read there is the error alone.
    """

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
    num_seen: int  # files that were named, and those of folders that were
    num_records: int  # among them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A file as it was found: of another kind than a plan or a profile, `record` is None."""

    kind: str | None  # None: no record, or one that does not say which (an error then)
    text: str = ""
    record: Plan | Profile | RecordError | None = None


def search(paths: Sequence[Path]) -> Search:
    """Read the files, which are plans, and all records in the folders at any depth.

    ProtrainError where a path is missing, or a folder has no plan.
    See [Note: what is a record] and [Note: links].
    """
    for path in paths:
        if not os.path.lexists(path):
            raise ProtrainError("no such file or folder", source=str(path))
    folders = {path for path in paths if os.path.isdir(path)}  # noqa: PTH112  (it never raises)
    within = tuple(folders)
    seen: dict[Path, _Seen] = {}
    named: set[Path] = set()  # besides these, what lies beside a plan is seen
    found: dict[Path, Files] = {}
    for path in paths:
        if path not in folders:  # a plan, because it was named
            # The folder of one that lies elsewhere was named, too.
            is_here = Path(os.path.abspath(path)).is_relative_to(repository())  # noqa: PTH100
            beside = () if is_here else (path.parent,)
            try:
                if (problem := leads_out(path, *beside)) is not None:
                    raise _failure(problem, path)
                found[path] = read_files(path, seen, (path.parent,))
            except RecordError as error:
                found[path] = Files(path=path, text="", plan=error, profiles=())
            continue
        entries = sorted(_entries(path, within), key=lambda entry: entry[0])
        named.update(file for file, _ in entries)
        for file, problem in entries:
            seen[file] = (
                _look_at(file, within)
                if problem is None
                else _Seen(kind=None, record=_failure(problem, file))
            )
        plans = [file for file, _ in entries if isinstance(seen[file].record, Plan | RecordError)]
        if not plans:
            fix = "write one with protrain plan -o, or name another folder"
            raise ProtrainError("no plan in this folder", source=str(path), fix=fix)
        for file in plans:
            one, is_plan = seen[file], seen[file].kind == "plan"
            assert isinstance(one.record, Plan | RecordError)
            if file not in found:
                profiles = _profiles_beside(file, seen, within) if is_plan else ()
                found[file] = Files(
                    path=file, text=one.text, plan=one.record, profiles=profiles, is_plan=is_plan
                )
    records = [path for path in named if seen[path].kind or seen[path].record]
    return Search(
        files=tuple(found.values()),
        num_seen=len({*named, *found}),
        num_records=len({*records, *found}),
    )


def read_files(
    path: Path, seen: dict[Path, _Seen] | None = None, within: Sequence[Path] = ()
) -> Files:
    """Return the plan and its folder's profiles; RecordError if the plan's file is no text.

    What was `seen` already is not read again. For `within` see `_look_at`.
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
    """The plan with its profile, None where one of them is missing."""
    if isinstance(files.plan, RecordError):
        return None
    for path, profile in files.profiles:
        if isinstance(profile, Profile) and fingerprint(profile) == files.plan.profile_fingerprint:
            return Case(path=files.path, plan=files.plan, profile_path=path, profile=profile)
    return None


def line_of(text: str, key: str | None) -> int:
    """The line of a key such as `prediction.peak_bytes`, or of the last part of it there is."""
    with suppress(RecordError):
        if key:
            return replace(parsed(text, None), path=tuple(key.split("."))).line or 1
    return 1


def _profiles_beside(
    path: Path, seen: dict[Path, _Seen], within: Sequence[Path]
) -> tuple[tuple[Path, Profile | RecordError], ...]:
    """The profiles in a plan's folder, and the records there that may have been one."""
    try:
        files = sorted(path.parent.iterdir())
    except OSError:
        files = []
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


# --- the files of a folder ------------------------------------------------------------------------


def _entries(folder: Path, within: Sequence[Path]) -> Iterator[tuple[Path, str | None]]:
    """The YAML files at any depth, and whatever else is in a file's or a folder's place, with why.

    A folder is entered once, and by its own name rather than by a link's.
    """
    waiting, links, entered = [folder], list[Path](), set[str]()
    while waiting or links:
        above = waiting.pop() if waiting else links.pop(0)
        real = os.path.realpath(above)
        if real in entered:
            continue
        entered.add(real)
        if (problem := leads_out(real, *within)) is not None:
            yield above, problem.replace("this file lies", "this link points")
            continue
        try:
            with os.scandir(above) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            yield above, f"cannot read this folder: {error.strerror}"
            continue
        for entry in entries:
            path, is_yaml = above / entry.name, entry.name.lower().endswith(_SUFFIXES)
            if not os.path.isdir(entry):  # noqa: PTH112
                if is_yaml:
                    yield path, None
            elif entry.name != ".git":  # nothing in there is part of a commit
                if is_yaml:
                    yield path, "this is a directory, not a file"
                (links if entry.is_symlink() else waiting).append(path)


def _look_at(path: Path, within: Sequence[Path]) -> _Seen:
    """Read a file as what it is; with folders, links lead into one of them or the repository."""
    try:
        if not _speaks_of_us(path):
            return _Seen(kind=None)
        text = read_text(path)
    except RecordError as error:
        return _Seen(kind=None, record=error)
    found = documents(text)
    # What cannot be read was meant as one, see [Note: what is a record].
    if found is not None and not any(map(_is_ours, found)):
        return _Seen(kind=None)
    if within and (problem := leads_out(path, *within)) is not None:
        return _Seen(kind=None, record=_failure(problem, path))
    kind, record, source = None, None, str(path)
    try:
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


# --- what looks like a record ---------------------------------------------------------------------

_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})"
    r"|(?:\r\n|[\r\n\x85\u2028\u2029])[ \t]*)"
)


def _speaks_of_us(path: Path) -> bool:
    """Return whether the word stands in a regular file, in any encoding and however it is escaped.

    Never blocks. RecordError for anything but a regular file, and for one too large.
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
        problem = (
            f"this file is larger than the {format_bytes(_MAX_BYTES)} that protrain check reads"
        )
        raise RecordError(problem, source=str(path))
    content = content.replace(b"\0", b"")  # without, ASCII is what UTF-16 and -32 are
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return _KEY in as_seen(text) or (
        "\\" in text and _KEY in as_seen(_ESCAPE.sub(_unescaped, text))
    )


def _unescaped(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    number = int(digits, 16) if digits else 0x110000
    return chr(number) if number < 0x110000 else ""


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
