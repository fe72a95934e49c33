"""A checkpoint on the disk: a directory that is whole at every moment.

    DIR/model.safetensors.index.json       what lies where: see `index`
    DIR/protrain-save-3/model-00001-of-00002.safetensors      parameters and buffers
    DIR/protrain-save-3/optimizer-00001-of-00004.safetensors  NAME.KEY: a state of a parameter
    DIR/protrain-save-3/training-00001-of-00001.safetensors   tensors of what else there is
    DIR/protrain-save-3/rank-1-model-...                      of several ranks: what rank 1 has

[Note: one index] A save writes a folder of its own and then replaces the index, in one step: that
makes it the checkpoint. Until then the index names the folder before, which is removed after. A
writer that is killed leaves a folder that no index names; the next writer removes it. A directory
cannot be replaced by another in one step everywhere, and may hold files of the user, such as
`config.json`.
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
    """Make the directory, and refuse now what a save would refuse after hours of training."""
    with next_save(directory) as folder:
        shutil.rmtree(folder)


@contextmanager
def next_save(directory: Path) -> Iterator[Path]:
    """Make a new folder for a save, gone again if the block fails; ProtrainError if in use.

    Those that no index names go. See [Note: one index].
    """
    with locked(directory):
        current = _current(directory)
        for folder in _folders(directory):
            if folder.name != current:
                shutil.rmtree(folder)
        for path in directory.glob(f".{INDEX}.*.tmp"):  # of an index whose writer was killed
            path.unlink()
        # A number may be taken by what is not ours, such as a link, or by a folder that is gone.
        names = [current or "", *(path.name for path in directory.iterdir())]
        taken = [int(match[1]) for match in map(FOLDER.fullmatch, names) if match]
        folder = directory / f"protrain-save-{max(taken, default=0) + 1}"
        folder.mkdir()
        try:
            yield folder
        except BaseException:  # an interruption too
            if _current(directory) != folder.name:
                shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory that no other process writes to; ProtrainError where it cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Only one process saves here; the system unlocks it however that one ends.
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
    """Make a whole folder its directory's checkpoint by an index; others go."""
    directory = folder.parent
    sync(folder)
    sync(directory)  # the folder's name before the index that names it
    replace_text(directory / INDEX, seal(content).decode())
    sync(directory)
    for old in _folders(directory):
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)  # the next save tries again


def _current(directory: Path) -> str | None:
    """The folder that the index names; ProtrainError where the checkpoint is not ours."""
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
    """List what saves have left, whole or not. A link is none of it: it leads elsewhere."""
    with os.scandir(directory) as entries:
        return [
            directory / entry.name
            for entry in entries
            if FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def sync(directory: Path) -> None:
    """Make names in a directory survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
