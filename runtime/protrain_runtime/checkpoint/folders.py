"""A checkpoint on disk: a directory that is complete at every moment.

    DIR/model.safetensors.index.json       the places of tensors: see `index`
    DIR/protrain-save-3/model-00001-of-00002.safetensors      parameters and buffers
    DIR/protrain-save-3/optimizer-00001-of-00004.safetensors  NAME.KEY: a state of a parameter
    DIR/protrain-save-3/training-00001-of-00001.safetensors   other tensors
    DIR/protrain-save-3/rank-1-model-...                      of several ranks: rank 1's part

[Note: one index] A save writes its own folder and then atomically replaces the index, which makes
it the checkpoint. Until then the index names the previous folder, which is removed after. A killed
writer leaves a folder without an index; the next writer removes it. A directory cannot be replaced
atomically everywhere, and may hold the user's files, such as `config.json`.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protrain_runtime.checkpoint.index import FOLDER, INDEX, Saved, found_index, seal
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.files import replace_text

ROOM = "make room there, or save to another directory; what was saved before is whole"
ELSEWHERE = "save to another directory"


def check_writable(directory: Path) -> None:
    """Make the directory, and fail now on whatever a save would fail on after hours of training."""
    with next_save(directory) as folder:
        shutil.rmtree(folder)


@contextmanager
def next_save(directory: Path) -> Iterator[Path]:
    """Make a save's new folder, removed if the block fails; ProtrainError if in use.

    Removes folders that no index names. See [Note: one index].
    """
    with locked(directory):
        current = _current(directory)
        for folder in _folders(directory):
            if folder.name != current:
                shutil.rmtree(folder)
        for path in directory.glob(f".{INDEX}.*.tmp"):  # of a killed writer's index
            path.unlink()
        # Other things, such as a link, may have a number, or a folder that is gone.
        names = [current or "", *(path.name for path in directory.iterdir())]
        taken = [int(match[1]) for match in map(FOLDER.fullmatch, names) if match]
        folder = directory / f"protrain-save-{max(taken, default=0) + 1}"
        folder.mkdir()
        try:
            yield folder
        except BaseException:  # interruptions, too
            if _current(directory) != folder.name:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory and lock it against other processes; ProtrainError if impossible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # One process saves here at a time; the system unlocks it however that one ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
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
            f"the checkpoint cannot be written: {error.strerror}", source=str(directory), fix=ROOM
        ) from error


def commit(folder: Path, content: Mapping[str, Any]) -> None:
    """Make a complete folder its directory's checkpoint by an index; remove others."""
    directory = folder.parent
    sync(folder)
    sync(directory)  # the folder's name before its index
    replace_text(directory / INDEX, seal(content).decode())
    sync(directory)
    for old in _folders(directory):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)  # the next save tries again


def _current(directory: Path) -> str | None:
    """The folder that the index names; ProtrainError for a foreign checkpoint."""
    index = found_index(directory)
    if index is None:
        return None
    try:
        folder = Saved(directory).folder
    except ProtrainError as error:
        error.fix = ELSEWHERE
        raise
    if not folder:
        raise ProtrainError(
            "the directory holds a checkpoint that protrain did not write",
            source=str(index),
            fix=ELSEWHERE,
        )
    return folder


def _folders(directory: Path) -> list[Path]:
    """Folders of saves, complete or not; not links, which lead elsewhere."""
    with os.scandir(directory) as entries:
        return [
            directory / entry.name
            for entry in entries
            if FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def sync(directory: Path) -> None:
    """Make a directory's names survive a machine crash."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
