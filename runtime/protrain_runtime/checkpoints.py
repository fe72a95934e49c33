"""A checkpoint on the disk: a directory that is whole at every moment.

    DIR/model.safetensors.index.json       which file has which tensor, as Hugging Face writes it
    DIR/protrain-save-3/model-00001-of-00002.safetensors      parameters and buffers
    DIR/protrain-save-3/optimizer-00001-of-00004.safetensors  NAME.KEY: a state of a parameter
    DIR/protrain-save-3/training.pt                           what else there is to resume from

[Note: one index] A save writes a folder of its own and then replaces the index, in one step: that
makes it the checkpoint. Until then the index names the folder before, which is removed after. A
writer that is killed leaves a folder that no index names; the next writer removes it. A directory
cannot be replaced by another in one step everywhere, and may hold files of the user, such as
`config.json`.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protrain_plan.errors import ProtrainError
from protrain_plan.records.files import replace_text
from protrain_runtime.tensor_files import read_entries

INDEX = "model.safetensors.index.json"
TRAINING = "training.pt"
POINTER = "protrain-distributed.json"  # the index of several ranks: see `distributed_checkpoints`
_FOLDER = re.compile(r"protrain-save-([0-9]{1,9})")
_SINGLE_FILE = "model.safetensors"  # readers of Hugging Face's layout take it before any index


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What the index says. `folder` is None where something else than `save` wrote it."""

    weight_map: Mapping[str, str]  # name -> file, from the directory
    folder: str | None


def read_index(directory: Path) -> Index:
    """The checkpoint in a directory. ProtrainError where there is none, or no readable one."""
    if (directory / _SINGLE_FILE).exists():
        entries = read_entries(directory / _SINGLE_FILE)
        return Index(weight_map=dict.fromkeys(entries, _SINGLE_FILE), folder=None)
    path = directory / INDEX
    try:
        read: dict[str, Any] = json.loads(path.read_bytes())
        weight_map: dict[str, Any] = dict(read["weight_map"])
        folder = read.get("metadata", {}).get("protrain_save")
    except OSError as error:
        raise ProtrainError(
            f"there is no checkpoint: {INDEX} cannot be read: {error.strerror}",
            source=str(directory),
            fix="name a directory that protrain_runtime.save (or --save) wrote",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ProtrainError("this is no index of safetensors files", source=str(path)) from None
    if not all(isinstance(file, str) for file in (*weight_map.values(), folder or "")):
        raise ProtrainError("this is no index of safetensors files", source=str(path))
    return Index(weight_map=weight_map, folder=folder)


def is_distributed(directory: Path) -> bool:
    """Whether several ranks saved there."""
    return (directory / POINTER).exists()


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
        with _locked(directory):
            current = _current(directory)
            for folder in _folders(directory):
                if folder.name != current:  # See [Note: one index]
                    shutil.rmtree(folder)
            match = _FOLDER.fullmatch(current or "")
            folder = directory / f"protrain-save-{int(match[1]) + 1 if match else 1}"
            folder.mkdir()
            try:
                yield folder
            except BaseException:  # an interruption too
                if _current(directory) != folder.name:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        raise ProtrainError(
            f"the checkpoint cannot be written: {error.strerror}",
            source=str(directory),
            fix="make room there, or save to another directory; what was saved before is whole",
        ) from error


def commit(folder: Path, weight_map: Mapping[str, str], *, total_bytes: int) -> None:
    """Make the folder of files the checkpoint of its directory; OSError where the disk refuses."""
    directory = folder.parent
    _sync(folder)
    index = {
        "metadata": {"total_size": total_bytes, "protrain_save": folder.name},
        "weight_map": {name: f"{folder.name}/{file}" for name, file in weight_map.items()},
    }
    _sync(directory)  # the folder's name before the index that names it
    replace_text(directory / INDEX, json.dumps(index, indent=2) + "\n")
    _sync(directory)
    for old in _folders(directory):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)  # the next save tries again


def _current(directory: Path) -> str | None:
    """The folder that the index names; ProtrainError where the checkpoint is not ours."""
    single, index = directory / _SINGLE_FILE, directory / INDEX
    if not single.exists() and not index.exists():
        return None
    folder = read_index(directory).folder
    if folder is None:
        raise ProtrainError(
            "the directory holds a checkpoint that protrain did not write",
            source=str(single if single.exists() else index),
            fix="save to another directory",
        )
    return folder


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _FOLDER.fullmatch(path.name)]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Only one process saves into a directory; the system unlocks it however that one ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ProtrainError(
            "another process is saving here",
            source=str(directory),
            fix="wait until it has ended, or save to another directory",
        ) from None
    finally:
        os.close(descriptor)


def _sync(directory: Path) -> None:
    """Let names in a directory outlive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
