"""A checkpoint on the disk: a directory that is whole at every moment.

    DIR/model.safetensors.index.json       which file has which tensor, as Hugging Face writes it
    DIR/protrain-save-3/model-00001-of-00002.safetensors      parameters and buffers
    DIR/protrain-save-3/optimizer-00001-of-00004.safetensors  NAME.KEY: a state of a parameter
    DIR/protrain-save-3/training.pt                           what else there is to resume from
    DIR/protrain-save-3/checksums.json                        of all these, tensor by tensor

[Note: one index] A save writes a folder of its own and then replaces the index, in one step: that
makes it the checkpoint. Until then the index names the folder before, which is removed after. A
writer that is killed leaves a folder that no index names; the next writer removes it. A directory
cannot be replaced by another in one step everywhere, and may hold files of the user, such as
`config.json`.

[Note: chain of checksums] The index has its own checksum and that of the file of checksums, which
has those of all other files. Before there were any (format 1), the index's metadata had two keys.
"""

import fcntl
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protrain_runtime.checkpoint.files import (
    MAX_JSON_BYTES,
    SUMS,
    damaged,
    is_sealed,
    parse_json,
    read_entries,
    read_regular,
    seal,
    shown,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import replace_text

INDEX = "model.safetensors.index.json"
TRAINING = "training.pt"
POINTER = "protrain-distributed.json"  # the index of several ranks: see `part_files`
_FORMAT = 2
_FOLDER = re.compile(r"protrain-save-([0-9]{1,9})")
RANKS_FOLDER = re.compile(r"protrain-ranks-([0-9]{1,9})")
_NUM_FOLDERS = 10**9  # that have such names
_ELSEWHERE = "save to another directory"
_SINGLE_FILE = "model.safetensors"  # readers of Hugging Face's layout take it before any index


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What the index says. `folder` is None where something else than `save` wrote it."""

    weight_map: Mapping[str, str]  # name -> file, from the directory
    folder: str | None
    sums: str | None = None  # the checksum of the file of checksums; None: there is none


def read_index(directory: Path) -> Index:
    """The checkpoint in a directory. ProtrainError where there is none, or no readable one."""
    if _exists(directory / _SINGLE_FILE):
        entries = read_entries(directory / _SINGLE_FILE)
        return Index(weight_map=dict.fromkeys(entries, _SINGLE_FILE), folder=None)
    path = directory / INDEX
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise ProtrainError(
            f"there is no checkpoint: {INDEX} cannot be read: {reason}",
            source=str(directory),
            fix="name a directory that protrain_runtime.save (or --save) wrote",
        ) from None
    text = read_regular(path, max_bytes=MAX_JSON_BYTES)
    try:
        read = parse_json(text)
        weight_map, metadata = read["weight_map"], read.get("metadata", {})
        if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
            raise TypeError
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise damaged(path, "this is no index of safetensors files") from None
    # What is ours says so in many places, so that no damage lets it look like another's.
    if any(key.startswith("protrain_") for key in metadata) or any(
        file.startswith("protrain-save-") and "/" in file for file in weight_map.values()
    ):
        return _own(path, text, metadata, weight_map)
    for file in set(weight_map.values()):
        _check_name(path, file)
    return Index(weight_map=weight_map, folder=None)


def _own(path: Path, text: bytes, metadata: Mapping[str, Any], files: Mapping[str, str]) -> Index:
    """An index that `commit` wrote, now or before there were checksums."""
    folder = metadata.get("protrain_save")
    old = metadata.keys() == {"total_size", "protrain_save"}
    if not old and not is_sealed(text):
        raise damaged(path, "the file is damaged: its checksum is another")
    if not old and metadata.get("protrain_format") != _FORMAT:
        raise ProtrainError(
            f"the checkpoint has format {metadata.get('protrain_format')}, this protrain-plan"
            f" reads {_FORMAT}",
            source=str(path),
            fix="load it with the version that wrote it",
        )
    if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
        raise damaged(path, "the file is damaged: it does not say which folder it is of")
    for file in set(files.values()):
        if not file.startswith(f"{folder}/") or "/" in file.removeprefix(f"{folder}/"):
            raise damaged(path, f"{shown(file)} is no file in {folder}")
        _check_name(path, file)
    sums = metadata.get("protrain_sums")
    if old == isinstance(sums, str) or (old and (path.parent / folder / SUMS).exists()):
        raise damaged(path, f"the file is damaged: it does not say the checksum of {SUMS}")
    return Index(weight_map=files, folder=folder, sums=sums)


def _check_name(path: Path, file: str) -> None:
    """ProtrainError where a file that an index names lies elsewhere than below the index."""
    parts = file.split("/")
    if not all(parts) or not {".", ".."}.isdisjoint(parts) or "\0" in file:
        raise damaged(path, f"{shown(file)} does not lie in the directory of the checkpoint")


def file_in(directory: Path, file: str, *, linked: bool = False) -> Path:
    """A file of a checkpoint, by its name from the directory. ProtrainError where it is elsewhere.

    `linked`: the file itself may be a link to anywhere, as files of others are in Hugging Face's
    cache; its directory may not.
    """
    _check_name(directory / INDEX, file)
    path = directory / file
    try:
        end = (path.parent if linked else path).resolve()
        inside = end.is_relative_to(directory.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle; no text, no name of a file
        inside = False
    if not inside:
        raise ProtrainError(
            "a link leads out of the directory of the checkpoint",
            source=shown(str(path)),
            fix="copy the checkpoint with what its links lead to: cp -rL",
        )
    return path


def is_distributed(directory: Path) -> bool:
    """Whether several ranks saved there."""
    return _exists(directory / POINTER)


def is_of_one_device(directory: Path) -> bool:
    """Whether one device saved there, or somebody else."""
    return _exists(directory / INDEX) or _exists(directory / _SINGLE_FILE)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # one may not look, or the name has a zero byte
        return False


def check_writable(directory: Path) -> None:
    """Make the directory, and refuse now what a save would refuse after hours of training."""
    with next_save(directory) as folder:
        shutil.rmtree(folder)


@contextmanager
def next_save(directory: Path) -> Iterator[Path]:
    """A new folder for the files of a save, which `commit` makes the checkpoint.

    It is gone again where the block does not end well. ProtrainError where the directory cannot be
    written, belongs to another checkpoint, or where another process saves there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Only one process saves here; the system unlocks it however that one ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = new_folder(directory, _FOLDER, _current(directory))
            try:
                yield folder
            except BaseException:  # an interruption too
                if _current(directory) != folder.name:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        finally:
            os.close(descriptor)
    except BlockingIOError:
        raise ProtrainError(
            "another process is saving here",
            source=str(directory),
            fix="wait until it has ended, or save to another directory",
        ) from None
    except OSError as error:
        raise ProtrainError(
            f"the checkpoint cannot be written: {error.strerror}",
            source=str(directory),
            fix="make room there, or save to another directory; what was saved before is whole",
        ) from error


def commit(folder: Path, weight_map: Mapping[str, str], *, total_bytes: int, sums: str) -> None:
    """Make the folder of files the checkpoint of its directory; OSError where the disk refuses.

    `sums` is the checksum of its file of checksums.
    """
    index = {
        "metadata": {
            "total_size": total_bytes,
            "protrain_save": folder.name,
            "protrain_format": _FORMAT,
            "protrain_sums": sums,
            "protrain_checksum": "",
        },
        "weight_map": {name: f"{folder.name}/{file}" for name, file in weight_map.items()},
    }
    put_index(folder, _FOLDER, INDEX, index)


def put_index(
    folder: Path, names: re.Pattern[str], index: str, content: Mapping[str, object]
) -> None:
    """Let an index name a folder whose files are on the disk; the folders before it go."""
    directory = folder.parent
    _sync(folder)
    _sync(directory)  # the folder's name before the index that names it
    replace_text(directory / index, seal(content).decode())
    _sync(directory)
    for old in _folders(directory, names):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)  # the next save tries again


def _current(directory: Path) -> str | None:
    """The folder that the index names; ProtrainError where the checkpoint is not ours."""
    if not is_of_one_device(directory):
        return None
    single, index = directory / _SINGLE_FILE, directory / INDEX
    try:
        folder = read_index(directory).folder
    except ProtrainError as error:
        error.fix = _ELSEWHERE
        raise
    if folder is None:
        raise ProtrainError(
            "the directory holds a checkpoint that protrain did not write",
            source=str(single if single.exists() else index),
            fix=_ELSEWHERE,
        )
    return folder


def new_folder(directory: Path, names: re.Pattern[str], current: str | None) -> Path:
    """A folder of the next number; those that no index names go. See [Note: one index]."""
    for folder in _folders(directory, names):
        if folder.name != current:
            shutil.rmtree(folder)
    match = names.fullmatch(current or "")
    first = int(match[1]) + 1 if match else 1
    for number in itertools.chain(range(first, _NUM_FOLDERS), range(1, first)):
        folder = directory / f"{names.pattern.partition('(')[0]}{number}"
        if not os.path.lexists(folder):  # such as a link, which is not ours
            folder.mkdir()
            return folder
    raise AssertionError("a directory has that many entries")


def _folders(directory: Path, names: re.Pattern[str]) -> list[Path]:
    """What saves have left, whole or not. A link is none of it: what it names is elsewhere."""
    with os.scandir(directory) as entries:
        return [
            directory / entry.name
            for entry in entries
            if names.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def _sync(directory: Path) -> None:
    """Let names in a directory outlive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
