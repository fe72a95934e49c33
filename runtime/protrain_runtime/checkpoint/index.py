"""The index of a checkpoint, which makes the files of a folder one, and what it says.

    {"protrain_checksum": "5f0c2a11",   the CRC-32 of all that follows
     "metadata": {"total_size": 96, "protrain_format": 3},
     "weight_map": {"head.weight": "protrain-save-3/model-00001-of-00001.safetensors", ...},
     "protrain": {
         "folder": "protrain-save-3",   all other files are there
         "headers": {FILE: [BYTES, CRC], ...},
         "tensors": {"model": {NAME: TENSOR, ...}, "optimizer": {...}, "training": {...}},
         "training": {...}}}            all that is no tensor: see `training`

    TENSOR = {"dtype": "F32", "shape": [4, 6], "parts": [[FILE, START, FIRST, COUNT, CRC], ...]}

A part is COUNT of the tensor's elements from FIRST on, at byte START of a safetensors file. The
metadata and the map of weights are Hugging Face's index: its readers can follow it where parts are
whole tensors. What a file says is compared with what it may be before it is used: parts cover their
tensor, and tensors their file, no name leads out of the directory, and nothing takes memory that
the files do not fill.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from protrain_runtime.checkpoint.entries import Entry, Part, are_numbers, parsed
from protrain_runtime.checkpoint.files import (
    DTYPES,
    Range,
    damaged,
    opened,
    parsed_json,
    read_header,
    read_json,
    shown,
    verify,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.ranks.group import Ranks

INDEX = "model.safetensors.index.json"
FOLDER = re.compile(r"protrain-save-([0-9]{1,9})")
FORMAT = 3
SINGLE_FILE = "model.safetensors"  # readers of Hugging Face's layout take it before any index
_FILE = re.compile(r"[a-z0-9-]+\.safetensors")
_SEAL = b'{"protrain_checksum": "%08x", '


def seal(content: Mapping[str, Any]) -> bytes:
    """The text of an index of ours, which begins with the checksum of the rest."""
    text = json.dumps(content).encode()[1:]
    return _SEAL % zlib.crc32(text) + text


def path_in(directory: Path, file: str, *, linked: bool = False) -> Path:
    """A file of a checkpoint, that may be `linked`; ProtrainError where it is elsewhere."""
    parts = file.split("/")
    if not all(parts) or not {".", ".."}.isdisjoint(parts) or "\0" in file:
        problem = f"{shown(file)} does not lie in the directory of the checkpoint"
        raise damaged(directory / INDEX, problem)
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


def found_index(directory: Path) -> Path | None:
    """Find the file that makes a directory a checkpoint, of ours or in Hugging Face's layout."""
    for name in (SINGLE_FILE, INDEX):
        try:
            if (directory / name).exists():
                return directory / name
        except (OSError, ValueError):  # one may not look, or the name has a zero byte
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
                f"there is no checkpoint: {INDEX} cannot be read: {reason}",
                source=str(directory),
                fix="name a folder of safetensors files, or one that protrain_runtime.save"
                " (or --save) wrote",
            ) from None
        self.directory, self.index, self.folder = directory, index, ""
        self.training: dict[str, Any] = {}
        self.files: dict[str, str] | None = None  # by tensor; None where a single file has all
        self._asked: dict[Path, list[Range]] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}  # of files without checksums
        if index.name == SINGLE_FILE:
            return
        text, read = read_json(index)
        match read:
            case {"weight_map": dict(files), **more} if all(
                isinstance(file, str) for file in files.values()
            ):
                self.files, metadata = files, more.get("metadata", {})
            case _:
                metadata = None
        if not isinstance(metadata, dict):
            raise damaged(index, "this is no index of safetensors files")
        # One of ours says so in many places, so that no damage lets it look like another's.
        signs = (*read, *metadata, *files.values())
        if "protrain" in read or any(s.startswith(("protrain_", "protrain-save-")) for s in signs):
            self._read_own(text, metadata, read.get("protrain"))

    def _read_own(self, text: bytes, metadata: Mapping[str, Any], own: Any) -> None:
        number = 2 if "protrain_save" in metadata else metadata.get("protrain_format", FORMAT)
        if number != FORMAT:
            raise ProtrainError(
                f"the checkpoint has format {number}, this protrain-plan reads {FORMAT}",
                source=str(self.index),
                fix="load it with the version that wrote it",
            )
        rest = text[len(_SEAL % 0) :]
        if text != _SEAL % zlib.crc32(rest) + rest:
            raise damaged(self.index, "the file is damaged: its checksum is another")
        match own:
            case {
                "folder": str(folder),
                "headers": dict(headers),
                "tensors": {"model": dict(), "optimizer": dict(), "training": dict()} as tensors,
                "training": dict(training),
            } if FOLDER.fullmatch(folder) and all(map(_FILE.fullmatch, headers)):
                self.folder, self.training = folder, training
                self._headers, self._tensors = headers, tensors
            case _:
                raise damaged(self.index, "the file is damaged: it does not say what lies where")

    def entries(self, kind: str) -> dict[str, Entry]:
        """The tensors of a kind: "model", "optimizer" or "training"; ProtrainError if lacking."""
        if not self.folder:
            return {entry.name: entry for entry in self._of_others()} if kind == "model" else {}
        found: dict[str, Entry] = {}
        ranges: dict[Path, list[Range]] = {}
        folder = self.directory / self.folder
        for name, listed in self._tensors[kind].items():
            try:
                entry = found[name] = parsed(name, listed, folder, self._headers)
            except ValueError as error:
                problem = f"the file is damaged: {shown(name)} {error}"
                raise damaged(self.index, problem) from None
            for part in entry.parts:
                size = part.count * entry.dtype.itemsize
                ranges.setdefault(part.path, []).append(
                    Range(name, part.start, size, part.checksum or 0)
                )
        of_kind = re.compile(rf"(rank-[0-9]+-)?{kind}-[0-9]+-of-[0-9]+\.safetensors")
        for file in sorted(filter(of_kind.fullmatch, self._headers)):
            if folder / file not in ranges:
                raise damaged(self.index, f"the file is damaged: no tensor lies in {file}")
        for path, of_file in ranges.items():
            row = self._headers[path.name]
            if not are_numbers(row, 2):
                raise damaged(self.index, f"the file is damaged: {path.name} has no header")
            of_file.append(Range("the header", 0, *row))
            of_file.sort(key=lambda range_: (range_.start, range_.num_bytes))
            end = 0
            for range_ in of_file:
                if range_.start != end:
                    problem = f"the file is damaged: {shown(range_.what)} begins elsewhere"
                    raise damaged(self.index, problem)
                end += range_.num_bytes
            with opened(path_in(self.directory, f"{self.folder}/{path.name}")) as file:
                size = os.fstat(file.fileno()).st_size
            if size != end:
                problem = "is cut off" if size < end else "goes on behind its end"
                raise damaged(path, f"the file {problem}: it has {size} bytes instead of {end}")
        self._asked |= ranges
        return found

    def _of_others(self) -> Iterator[Entry]:
        """The tensors in files of others, whose bytes nothing is compared with."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ProtrainError(
                "safetensors is needed to read files that protrain did not write",
                source=str(self.index),
                fix="pip install safetensors",
            ) from None
        for file in sorted({*(self.files or {SINGLE_FILE: SINGLE_FILE}).values()}):
            path = path_in(self.directory, file, linked=True)
            with opened(path) as header:
                self._stamps[path] = _stamp(header)
                text = read_header(header)
                position = header.tell()
            try:
                parsed_json(path, text)  # which takes no key twice, as the package does
                with safe_open(path, framework="np") as content:
                    for name in content.offset_keys():
                        tensor = content.get_slice(name)
                        shape, dtype = torch.Size(tensor.get_shape()), DTYPES[tensor.get_dtype()]
                        part = Part(path, position, 0, shape.numel(), None)
                        order = tuple(range(len(shape)))
                        if self.files is None or self.files.get(name) == file:
                            yield Entry(name, dtype, shape, order, (part,))
                        position += shape.numel() * dtype.itemsize
            except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
                problem = f"this is no safetensors file: {error}"
                raise damaged(path, problem) from None
            except KeyError as error:
                raise damaged(
                    path, f"{shown(name)} has the dtype {error}, which is not known"
                ) from None

    def refuse_changed(self) -> None:
        """ProtrainError where a file without checksums is another one than when it was opened."""
        for path, stamp in self._stamps.items():
            with opened(path) as file:
                if _stamp(file) != stamp:
                    raise damaged(path, "the file was written to while it was read")

    def verify(self, ranks: Ranks | None, where: Callable[[str], str]) -> None:
        """Compare files with their sums, a part on each rank; ProtrainError for others."""
        paths = sorted(self._asked)
        own = paths[ranks.rank :: ranks.count] if ranks else paths
        verify({path: self._asked[path] for path in own}, where)


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """A file's identity, its size and when it was written."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
