"""Plans with their profiles, found in files.

A plan names its profile by fingerprint; the profile lies in the plan's folder, under any name.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protrain_plan.errors import ProtrainError, RecordError
from protrain_plan.records import fingerprint, loads_plan, loads_profile
from protrain_plan.records.files import read_text
from protrain_plan.records.plan import Plan
from protrain_plan.records.profile import Profile
from protrain_plan.records.tree import Value, root

_HEADER = re.compile(r"^protrain:[ \t]*(?P<kind>[a-z]+)[ \t]*(?:#.*)?$", re.MULTILINE)
_PATTERNS = ("*.yaml", "*.yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A plan's file and the profiles beside it, read as far as they can be."""

    path: Path
    text: str
    plan: Plan | RecordError
    profiles: tuple[tuple[Path, Profile | RecordError], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan and the profile that it was made from."""

    path: Path
    plan: Plan
    profile_path: Path
    profile: Profile


def find_plans(paths: Sequence[Path]) -> list[Path]:
    """The plans among the files and, at any depth, in the folders; each once, in order.

    ProtrainError where a path is missing, or a folder has no plan.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            plans = [file for file in _yaml_files(path, "**/") if _kind(file) == "plan"]
            if not plans:
                fix = "write one with protrain plan -o, or name another folder"
                raise ProtrainError("there is no plan in this folder", source=str(path), fix=fix)
            found.update(dict.fromkeys(plans))
        elif path.exists():
            found[path] = None
        else:
            raise ProtrainError("there is no such file or folder", source=str(path))
    return list(found)


def read_files(path: Path) -> Files:
    """The plan and what lies beside it; RecordError where the plan's file is no text."""
    text = read_text(path)
    plan: Plan | RecordError
    try:
        plan = loads_plan(text, str(path))
    except RecordError as error:
        plan = error
    profiles = [
        (file, _profile(file)) for file in _yaml_files(path.parent) if _kind(file) == "profile"
    ]
    return Files(path=path, text=text, plan=plan, profiles=tuple(profiles))


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
    line = 1
    try:
        value: Value = root(text, None)
        for part in key.split(".") if key else ():
            value = value.any_mapping()[part]
            line = value.node.start_mark.line + 1
    except (RecordError, KeyError):
        pass
    return line


def _profile(path: Path) -> Profile | RecordError:
    try:
        return loads_profile(read_text(path), str(path))
    except RecordError as error:
        return error


def _yaml_files(folder: Path, prefix: str = "") -> Iterator[Path]:
    files = {file for pattern in _PATTERNS for file in folder.glob(prefix + pattern)}
    return (file for file in sorted(files) if file.is_file())


def _kind(path: Path) -> str | None:
    """What the file says that it is; None for other YAML files, and those that are no text."""
    try:
        match = _HEADER.search(read_text(path))
    except RecordError:
        return None
    return match["kind"] if match else None
