"""The index of a checkpoint, which joins a folder's files.

    {"protrain_checksum": "5f0c2a11",   the CRC-32 of all that follows
     "metadata": {"total_size": 96, "protrain_format": 4},
     "weight_map": {"head.weight": "protrain-save-3/model-00001-of-00001.safetensors"},
     "protrain": {
         "folder": "protrain-save-3",   all other files are there
         "files": {FILE: {"num_bytes": 864, "header": CRC, "checksum": CRC}, ...},
         "training": {...}}}            everything but tensors: see `training`

Each file's header lists its tensors, as in any safetensors file. For a part of a tensor, {"parts":
{NAME: {"first": 12, "shape": [4, 6], "order": [0, 1]}}} follows the file's checksums: its first
element, and the whole tensor's dimensions. The metadata and the map of weights are Hugging Face's
index, for its readers if parts are whole tensors. Contents are validated before use: parts cover
their tensor, and tensors their file, no name leads out of the directory, and nothing takes memory
that the files do not fill.
"""

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from protrain_runtime.checkpoint.entries import Entry, FileRow, entries_in, joined
from protrain_runtime.checkpoint.files import (
    MAX_JSON_BYTES,
    Sums,
    damaged,
    opened,
    parsed,
    shown,
    verify,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.model.prepared import meet
from protrain_runtime.ranks.group import Ranks

INDEX = "model.safetensors.index.json"
FOLDER = re.compile(r"protrain-save-([0-9]+)")
FORMAT = 4
SINGLE_FILE = "model.safetensors"  # readers of Hugging Face's layout prefer it to an index
_FILE = re.compile(r"((?:rank-[0-9]+-)?(model|optimizer|training))-[0-9]+-of-([0-9]+)\.safetensors")
_SEAL = b'{"protrain_checksum": "%08x", '


class _Own(msgspec.Struct, frozen=True):
    """Our part of an index."""

    folder: Annotated[str, Meta(pattern=rf"^{FOLDER.pattern}\Z")]
    files: dict[Annotated[str, Meta(pattern=rf"^{_FILE.pattern}\Z")], FileRow]
    training: dict[str, Any]


class _Index(msgspec.Struct, frozen=True):
    """An index in Hugging Face's layout, with our additions."""

    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}
    protrain: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    protrain_checksum: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def seal(content: Mapping[str, Any]) -> bytes:
    """The text of our index, beginning with the checksum of the rest."""
    text = json.dumps(content).encode()[1:]
    return _SEAL % zlib.crc32(text) + text


def path_in(directory: Path, file: str, *, linked: bool = False) -> Path:
    """A file of a checkpoint, perhaps `linked`; ProtrainError if outside."""
    parts = file.split("/")
    if not all(parts) or not {".", ".."}.isdisjoint(parts) or "\0" in file:
        problem = f"{shown(file)} does not lie in the directory of the checkpoint"
        raise damaged(directory / INDEX, problem)
    path = directory / file
    try:
        end = (path.parent if linked else path).resolve()
        inside = end.is_relative_to(directory.resolve())
    except (OSError, RuntimeError, ValueError):  # circular links; not a valid file name
        inside = False
    if not inside:
        raise ProtrainError(
            "a link leads out of the directory of the checkpoint",
            source=shown(str(path)),
            fix="copy the checkpoint with what its links lead to: cp -rL",
        )
    return path


def found_index(directory: Path) -> Path | None:
    """The index of a directory, ours or in Hugging Face's layout; None without a checkpoint."""
    for name in (SINGLE_FILE, INDEX):
        try:
            if (directory / name).exists():
                return directory / name
        except (OSError, ValueError):  # no permission, or a zero byte in the name
            pass
    return None


class Saved:
    """A checkpoint by its index; one in Hugging Face's layout has no `folder` or `training`."""

    def __init__(self, directory: Path) -> None:
        index = found_index(directory) or directory / INDEX
        try:
            index.stat()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ProtrainError(
                f"no checkpoint found: {INDEX} cannot be read: {reason}",
                source=str(directory),
                fix="name a folder of safetensors files, or one that protrain_runtime.save"
                " (or --save) wrote",
            ) from None
        self.directory, self.index, self.folder = directory, index, ""
        self.training: dict[str, Any] = {}
        self.rows: dict[str, FileRow] = {}  # of our files, by name
        self.weight_map: dict[str, str] | None = None  # None: a single file has all
        self._stamps: dict[Path, tuple[int, ...]] = {}  # of files without checksums
        if index.name == SINGLE_FILE:
            return
        with opened(index) as file:
            text = file.read(min(MAX_JSON_BYTES, os.fstat(file.fileno()).st_size))
        try:
            found = parsed(text, _Index)
        except ValueError:
            raise damaged(index, "not an index of safetensors files") from None
        self.weight_map = found.weight_map
        # Ours have marks in many places: a damaged one never passes as foreign.
        signs = (*found.metadata, *found.weight_map.values())
        marked = any(sign.startswith(("protrain_", "protrain-save-")) for sign in signs)
        if not (marked or found.protrain or found.protrain_checksum):
            return
        metadata = found.metadata
        number = 2 if "protrain_save" in metadata else metadata.get("protrain_format", FORMAT)
        if number != FORMAT:
            raise ProtrainError(
                f"the checkpoint has format {number}, this protrain-plan reads {FORMAT}",
                source=str(self.index),
                fix="load it with the version that wrote it",
            )
        rest = text[len(_SEAL % 0) :]
        if text != _SEAL % zlib.crc32(rest) + rest:
            raise damaged(self.index, "the file is damaged: its checksum does not match")
        try:
            own = parsed(bytes(found.protrain or b""), _Own)
        except ValueError:
            problem = "the file is damaged: its contents are incomplete"
            raise damaged(self.index, problem) from None
        groups = Counter(match.group(1, 3) for match in map(_FILE.fullmatch, own.files) if match)
        if any(int(expected) != number for (_, expected), number in groups.items()):
            raise damaged(self.index, "the file is damaged: some of its files are missing")
        self.folder, self.rows, self.training = own.folder, own.files, own.training

    def entries(self, kind: str) -> dict[str, Entry]:
        """The tensors of a kind: "model", "optimizer" or "training"; ProtrainError if missing."""
        pieces: dict[str, list[Entry]] = {}
        for name, row in self._files(kind).items():
            path = path_in(self.directory, name, linked=row is None)
            with opened(path) as file:
                if row is None:
                    self._stamps[path] = _stamp(file)
                found = entries_in(path, file, row)
            for entry in found:
                in_map = (self.weight_map or {}).get(entry.name)
                if row is not None or self.weight_map is None or in_map == name:
                    pieces.setdefault(entry.name, []).append(entry)
        try:
            return {name: joined(of_name) for name, of_name in pieces.items()}
        except ValueError as error:
            raise damaged(self.index, f"the file is damaged: {error}") from None

    def _files(self, kind: str) -> dict[str, FileRow | None]:
        """The files of a kind by name; in foreign checkpoints always the model's."""
        if self.folder:
            matches = filter(None, map(_FILE.fullmatch, sorted(self.rows)))
            own = [match[0] for match in matches if match[2] == kind]
            return {f"{self.folder}/{file}": self.rows[file] for file in own}
        if kind != "model":
            return {}
        names = {SINGLE_FILE} if self.weight_map is None else set(self.weight_map.values())
        return dict.fromkeys(sorted(names))

    def verify(
        self, kinds: Iterable[str], ranks: Ranks | None = None, sums: Sums | None = None
    ) -> None:
        """Verify files, distributed over ranks; ProtrainError on all ranks for a wrong one.

        Ranges in the ranks' `sums` are not read again. A file without a sum must be the one that
        was opened.
        """
        ranges = sums.ranges if sums is not None else {}
        read = meet(ranks, "comparing checksums", ranges) if ranks else [ranges]
        rows = [file for kind in kinds for file in self._files(kind).items()]
        own = rows[ranks.rank :: ranks.count] if ranks else rows
        verify({self.directory / name: row.checksum for name, row in own if row}, read)
        for path, stamp in self._stamps.items():
            with opened(path) as file:
                if _stamp(file) != stamp:
                    raise damaged(path, "the file was written to while it was read")
        if ranks is not None:
            meet(ranks, "comparing checksums")


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """A file's identity, size and time of writing."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
