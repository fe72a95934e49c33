"""Reading a checkpoint of several ranks: which part of which tensor lies where in its files.

    tensors.json    NAME: dtype, shape, and parts: [offsets, sizes, file, start, length]
    .metadata       the same as torch.distributed.checkpoint pickles it, for its own readers
    __1_0.distcp    what rank 1 wrote: one archive of `torch.save` after the other, one for a part

Older checkpoints have `.metadata` alone, and no sums. Whatever is read here is compared with what
it may be before it is used: a tensor's parts cover its elements once, a file's parts its bytes, and
what an archive says of itself is what the list says of it. Nothing is unpickled by `pickle` (see
`pickled`), and no memory is taken that the files do not fill.
"""

import itertools
import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch.storage import _storage_type_to_dtype_map

from protrain_runtime.checkpoint.files import (
    SUMS,
    Entry,
    Sums,
    damaged,
    dtype_name,
    is_sealed,
    parse_json,
    read_regular,
    read_sums,
    verify,
)
from protrain_runtime.checkpoint.folders import POINTER, RANKS_FOLDER, is_of_one_device
from protrain_runtime.checkpoint.pickled import (
    STORED,
    Made,
    Name,
    Named,
    Pairs,
    read_pickle,
    unpack,
    unpack_random,
)
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.ranks.group import Ranks
from protrain_runtime.states.values import Held, Shared, Value

TENSORS = "tensors.json"
METADATA = ".metadata"
MAX_LIST_BYTES = 2**26
"""What a file that only says where tensors lie may have: some hundred thousand parts."""

READ_BYTES = 2**28
"""What is read at once, before it goes to where it belongs."""

_DATA = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_MAX_NUMBER = 2**62
_MAX_DIMENSIONS = 64
_MAX_DIRECTORY_BYTES = 2**16  # of an archive with one tensor

_STORAGES = {
    name: dtype for name, dtype in _storage_type_to_dtype_map().items() if "q" not in str(dtype)
}
"""What `torch.save` calls the elements of a storage. Others it names by their dtype."""

_DTYPES = {dtype_name(dtype): dtype for dtype in _STORAGES.values()}
_DTYPES |= {  # newer ones, without storages of their own
    name: getattr(torch, name) for name in dir(torch) if re.match(r"uint(16|32|64)$|float8_", name)
}

_RECORDS = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = ("torch", "Size")
_METADATA_NAMES: frozenset[Name] = frozenset(
    {
        *(
            (_RECORDS, name)
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        _STORAGE_INFO,
        _SIZE,
        *(("torch", name) for name in _DTYPES),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # in Python 3.13
    }
)
_REBUILD, _REBUILD_BY_DTYPE = "_rebuild_tensor_v2", "_rebuild_tensor_v3"
_UNTYPED = ("torch.storage", "UntypedStorage")
_ARCHIVE_NAMES: frozenset[Name] = frozenset(
    {
        STORED,
        ("torch._utils", _REBUILD),
        ("torch._utils", _REBUILD_BY_DTYPE),
        ("collections", "OrderedDict"),
        _UNTYPED,
        *(("torch", name) for name in (*_STORAGES, *_DTYPES)),
    }
)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor's elements that follow each other, in an archive of its own."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int  # bytes from the start of the file
    length: int  # bytes


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a folder, whole."""

    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[Part, ...]


def described(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """A part of a tensor, for people and for the sums: `model.head.weight [0:8, 0:24]`."""
    ranges = (f"{offset}:{offset + size}" for offset, size in zip(offsets, sizes, strict=True))
    return f"{name} [{', '.join(ranges)}]"


def tensor_of(description: str) -> str:
    """The name of the tensor of which `described` told a part; the text itself for others."""
    return description.rpartition(" [")[0] or description


# ---- what is in a folder ----------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, int]:
    """The files of a folder and their bytes. ProtrainError for a link, or anything but a file."""
    found: dict[str, int] = {}
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise damaged(folder, "this is no directory of its own")
        for entry in os.scandir(folder):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(folder / entry.name, "this is no file of the checkpoint")
            found[entry.name] = status.st_size
    except OSError as error:
        raise damaged(folder, f"cannot be read: {error.strerror}") from None
    return found


def compare_files(folder: Path, found: Collection[str], expected: Collection[str]) -> None:
    """ProtrainError where a folder's files are not those that belong to the checkpoint."""
    for name in sorted({*expected} - {*found}):
        raise damaged(folder / name, "the file is missing")
    for name in sorted({*found} - {*expected}):
        raise damaged(folder / name, "this is no file of the checkpoint")


def checked(listed: Any, files: Mapping[str, int]) -> dict[str, SavedTensor]:
    """The tensors of a list. ValueError where they are not whole, or not all that files have."""
    tensors = {name: _tensor(name, listed[name]) for name in _mapping(listed, None)}
    by_file: dict[str, list[Part]] = {}
    for tensor in tensors.values():
        for part in tensor.parts:
            by_file.setdefault(part.file, []).append(part)
    for file, parts in by_file.items():
        end = 0
        for part in sorted(parts, key=lambda part: part.start):
            if part.start != end:
                raise ValueError(f"the parts in {file} overlap, or leave gaps")
            end += part.length
        if end != files.get(file, end):  # one that is missing is told by `compare_files`
            raise ValueError(f"{file} has {files[file]} bytes instead of {end}")
    return tensors


def _tensor(name: str, listed: Any) -> SavedTensor:
    fields = _mapping(listed, {"dtype", "shape", "parts"})
    dtype = _DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{name!r} has no dtype that is known")
    shape = _numbers(fields["shape"], name)
    rows, parts = fields["parts"], list[tuple[int, Part]]()
    if not isinstance(rows, list):
        raise ValueError(f"{name!r} has no list of parts")
    if not all(isinstance(row, list) and len(row) == 5 for row in rows):
        raise ValueError(f"{name!r} has a part that is none")
    for offsets, sizes, file, start, length in rows:
        part = Part(_numbers(offsets, name), _numbers(sizes, name), file, start, length)
        _numbers([start, length], name)
        if not isinstance(file, str) or not _DATA.fullmatch(file):
            raise ValueError(f"{name!r} lies in no file of the checkpoint")
        if math.prod(part.sizes) * dtype.itemsize > length:
            raise ValueError(f"a part of {name!r} has more bytes than its range in {file}")
        if not len(shape) == len(part.offsets) == len(part.sizes):
            raise ValueError(f"a part of {name!r} has other dimensions")
        # The index of its first element, which the others have to follow: from the last dimension.
        first, stride, whole = 0, 1, True
        for extent, offset, size in reversed([*zip(shape, part.offsets, part.sizes, strict=True)]):
            if offset + size > extent or (size > 1 and not whole):
                raise ValueError(f"a part of {name!r} is no range of its elements")
            first += offset * stride
            stride *= extent
            whole = whole and size == extent
        parts.append((first, part))
    parts.sort(key=lambda found: found[0])
    counts = [math.prod(part.sizes) for _, part in parts]
    ends = list(itertools.accumulate(counts))
    if [first for first, _ in parts] != [0, *ends[:-1]] or ends[-1] != math.prod(shape):
        raise ValueError(f"the parts of {name!r} overlap, or leave gaps")
    if len(parts) > 1 and 0 in counts:
        raise ValueError(f"{name!r} has a part without elements")
    return SavedTensor(dtype, torch.Size(shape), tuple(part for _, part in parts))


def _mapping(found: Any, keys: set[str] | None) -> dict[str, Any]:
    if not isinstance(found, dict) or (keys is not None and found.keys() != keys):
        raise ValueError(f"expected a mapping with {', '.join(sorted(keys or {'names'}))}")
    for name in found:
        if not name.isascii():
            name.encode()  # as a file or a message would
    return found


def _numbers(found: Any, name: str) -> tuple[int, ...]:
    if not isinstance(found, list | tuple) or len(found) > _MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has no list of numbers where there should be one")
    if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in found):
        raise ValueError(f"{name!r} has a number that is none, or is out of range")
    return tuple(found)


def _listed(content: bytes) -> dict[str, Any]:
    """What a pickled list says, in the form of tensors.json. ValueError where it is another one."""
    top = _state(read_pickle(content, _METADATA_NAMES), (_RECORDS, "Metadata"))
    places: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
    for index, info_ in _plain(Pairs, top["storage_data"]):
        part, info = _state(index, (_RECORDS, "MetadataIndex")), _state(info_, _STORAGE_INFO)
        if info.keys() != {"relative_path", "offset", "length"}:
            raise ValueError("a part was transformed when it was written")
        name = _plain(str, part["fqn"])
        offsets = _size(part["offset"], name)
        places[name, offsets] = [info["relative_path"], info["offset"], info["length"]]
    listed: dict[str, Any] = {}
    for key, item in _plain(Pairs, top["state_dict_metadata"]):
        name = _plain(str, key)
        tensor = _state(item, (_RECORDS, "TensorStorageMetadata"))
        properties = _made(tensor["properties"], (_RECORDS, "TensorProperties")).state
        if type(properties) is not tuple or not properties or type(properties[0]) is not Named:
            raise ValueError(f"{name!r} has no dtype")
        parts: list[Any] = []
        for chunk in tensor["chunks"] if type(tensor["chunks"]) is list else []:
            box = _state(chunk, (_RECORDS, "ChunkStorageMetadata"))
            offsets = _size(box["offsets"], name)
            place = places.pop((name, offsets), None)
            if place is None:
                raise ValueError(f"a part of {name!r} lies nowhere")
            parts.append([offsets, _size(box["sizes"], name), *place])
        if name in listed:
            raise ValueError(f"it has {name!r} twice")
        listed[name] = {
            "dtype": properties[0].name[1],
            "shape": _size(tensor["size"], name),
            "parts": parts,
        }
    if places:
        raise ValueError(f"it has places for {len(places)} parts of no tensor")
    return listed


def _made(found: Any, name: Name) -> Made:
    if type(found) is not Made or found.name != name:
        raise ValueError(f"expected {name[1]}")
    return found


def _state(found: Any, name: Name) -> dict[str, Any]:
    """The fields of a dataclass."""
    pairs = _plain(Pairs, _made(found, name).state)
    fields = {_plain(str, key): value for key, value in pairs}
    if len(fields) != len(pairs):
        raise ValueError(f"{name[1]} has a field twice")
    return _Fields(fields)


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise ValueError(f"it lacks {key}")


_Kind = TypeVar("_Kind")


def _plain(kind: type[_Kind], found: Any) -> _Kind:
    if type(found) is not kind:
        raise ValueError(f"expected a {'mapping' if kind is Pairs else 'text'}")
    return found


def _size(found: Any, name: str) -> tuple[int, ...]:
    arguments = _made(found, _SIZE).arguments
    if len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise ValueError(f"{name!r} has a size that is none")
    return _numbers(arguments[0], name)


# ---- what is in a file ------------------------------------------------------------------------


Place = tuple[int, tuple[int, ...]]
"""Where a part's elements begin in its file, and its dimensions from the outermost on."""


def _slices(first: Sequence[int], stop: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(low - zero, high - zero) for low, high, zero in zip(first, stop, origin, strict=True)
    )


def _copy(
    file: FileIO, place: Place, part: Part, comes: tuple[slice, ...], target: torch.Tensor
) -> None:
    """Copy a part's elements that lie in these slices of it, rows at a time."""
    start, order = place
    sizes = [part.sizes[dim] for dim in order]
    if not sizes or order != tuple(range(len(sizes))):
        whole = _elements(file, start, target.dtype, sizes)
        target.copy_(whole.permute([order.index(dim) for dim in range(len(sizes))])[comes])
        return
    row_bytes = math.prod(sizes[1:]) * target.dtype.itemsize
    step = max(1, READ_BYTES // row_bytes)
    for row in range(comes[0].start, comes[0].stop, step):
        count = min(step, comes[0].stop - row)
        rows = _elements(file, start + row * row_bytes, target.dtype, [count, *sizes[1:]])
        done = row - comes[0].start
        target[done : done + count].copy_(rows[(slice(None), *comes[1:])])


def _locate(file: FileIO, part: Part, dtype: torch.dtype) -> Place:
    """Where a part lies. ValueError where the archive is of another tensor, or is damaged."""
    records = _records(file, part)

    def record(name: str) -> bytes:
        start, size = records[name]
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError("the archive is damaged")
        return _read(file, start, size)

    try:
        if record("byteorder") != b"little":
            raise ValueError("it was written by a machine with another order of bytes")
        rebuilt = read_pickle(record("data.pkl"), _ARCHIVE_NAMES)
        start, size = records["data/0"]
    except KeyError as error:
        raise ValueError(f"the archive has no record {error}") from None
    # The tensor that `torch.save` described must be the part.
    by_dtype = type(rebuilt) is Made and rebuilt.name == ("torch._utils", _REBUILD_BY_DTYPE)
    made = _made(rebuilt, ("torch._utils", _REBUILD_BY_DTYPE if by_dtype else _REBUILD))
    if len(made.arguments) != 6 + by_dtype:
        raise ValueError("the archive holds no plain tensor")
    stored, first, sizes, strides = made.arguments[:4]
    place = _made(stored, STORED).arguments
    if type(place) is not tuple or len(place) != 5 or type(place[1]) is not Named:
        raise ValueError("the archive holds no plain tensor")
    kind: Name = place[1].name
    if by_dtype:
        named = made.arguments[6]
        module, name = named.name if type(named) is Named else ("", "")
        found = _DTYPES.get(name) if module == "torch" and kind == _UNTYPED else None
    else:
        found = _STORAGES.get(kind[1]) if kind[0] == "torch" else None
    sizes, strides = _numbers(sizes, "the archive"), _numbers(strides, "the archive")
    if found != dtype or sizes != part.sizes:
        what = "no tensor" if found is None else f"{dtype_name(found)} {list(sizes)}"
        expected = f"{dtype_name(dtype)} {list(part.sizes)}"
        raise ValueError(f"the archive holds {what} instead of {expected}")
    if (place[0], place[2], first) != ("storage", "0", 0) or len(sizes) != len(strides):
        raise ValueError("the archive holds no plain tensor")
    if size != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"the archive has {size} bytes of elements")
    # Dimensions of one element have any stride, and stay where they are.
    long = sorted((d for d, size in enumerate(sizes) if size > 1), key=lambda d: -strides[d])
    stride = 1
    for dim in reversed(long):
        if strides[dim] != stride:
            raise ValueError("the archive holds a tensor with gaps")
        stride *= sizes[dim]
    left = iter(long)
    return start, tuple(d if size == 1 else next(left) for d, size in enumerate(sizes))


class _Window:
    """An archive in a file, for `ZipFile`: its list of records is read, which is short."""

    def __init__(self, file: FileIO, part: Part) -> None:
        self._file, self._part, self._position = file, part, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_END: self._part.length}[whence]
        if self._position < 0:
            raise OSError("before the archive")  # as of a file
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._part.length - self._position)
        count = left if count < 0 else min(count, left)
        if count > _MAX_DIRECTORY_BYTES:
            raise BadZipFile
        found = _read(self._file, self._part.start + self._position, count)
        self._position += count
        return found


def _records(file: FileIO, part: Part) -> dict[str, tuple[int, int]]:
    """Where the records of a zip file lie, and their bytes; ValueError for none of torch.save."""
    try:
        with ZipFile(cast(BinaryIO, _Window(file, part))) as archive:
            members = archive.infolist()
    except (BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError, OSError):
        raise ValueError("the archive is damaged") from None
    found: dict[str, tuple[int, int]] = {}
    for member in members:
        name, size = member.filename.partition("/")[2], member.file_size
        if member.compress_type != ZIP_STORED or member.compress_size != size:
            raise ValueError("the archive is damaged, or compressed")
        if name in found or not 0 <= member.header_offset <= part.length - 30:
            raise ValueError("the archive is damaged")
        # Names and extra fields may be longer before a record than they are in the list.
        header = struct.unpack("<4s22x2H", _read(file, part.start + member.header_offset, 30))
        begin = member.header_offset + 30 + header[1] + header[2]
        if header[0] != b"PK\3\4" or begin + size > part.length:
            raise ValueError("the archive is damaged")
        found[name] = part.start + begin, size
    return found


def _elements(file: FileIO, start: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
    flat = torch.empty(math.prod(sizes) * dtype.itemsize, dtype=torch.uint8)
    _fill(file, start, memory_of(flat))
    return flat.view(dtype).view(sizes)


def _read(file: FileIO, start: int, count: int) -> bytes:
    found = bytearray(count)
    _fill(file, start, memoryview(found))
    return bytes(found)


def _fill(file: FileIO, start: int, target: memoryview) -> None:
    while target:
        count = os.preadv(file.fileno(), [target], start)
        if not count:
            raise EOFError("the file is cut off")
        target, start = target[count:], start + count


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor along its dimensions; its elements are consecutive from `first` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


def boxes(shape: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """The boxes of elements first:stop in row-major order."""
    inner = torch.Size(shape[1:]).numel()
    if first >= stop:
        return
    if not shape:
        yield Box((), (), 0)
        return
    row, last = first // inner, (stop - 1) // inner
    if row == last and (first % inner or stop % inner):
        for box in boxes(shape[1:], first - row * inner, stop - row * inner):
            yield Box((row, *box.offsets), (1, *box.sizes), row * inner + box.first)
        return
    whole = -(-first // inner), stop // inner
    yield from boxes(shape, first, min(whole[0] * inner, stop)) if first % inner else ()
    if whole[0] < whole[1]:
        offsets = (whole[0], *(0 for _ in shape[1:]))
        yield Box(offsets, (whole[1] - whole[0], *shape[1:]), whole[0] * inner)
    yield from boxes(shape, whole[1] * inner, stop) if stop % inner else ()


# ---- what a load asks --------------------------------------------------------------------------


def read_pointer(directory: Path) -> tuple[str, int, str]:
    """Which folder is the checkpoint, of how many ranks, and the sum of its sums.

    That is "" where an older version wrote it. ProtrainError where there is none, where it is
    damaged, or does not say where to look.
    """
    path = directory / POINTER
    text = read_regular(path, max_bytes=MAX_LIST_BYTES)
    if is_of_one_device(directory):
        raise ProtrainError(
            "the directory holds checkpoints of one device and of several",
            source=str(directory),
            fix=f"move {POINTER}, or the other one, to a directory of its own",
        )
    read = None
    with suppress(ValueError):
        read = parse_json(text)
    match read:
        case {"protrain_save": str(folder), "num_ranks": int(count), **more}:
            sums = more.get("checksums", "")
            sealed = more.keys() == {"checksums", "protrain_checksum"} and is_sealed(text)
            summed = not more or (sealed and re.fullmatch("[0-9a-f]{8}", f"{sums}"))
            if summed and RANKS_FOLDER.fullmatch(folder) and type(count) is int and count > 0:
                return folder, count, f"{sums}"
        case _:
            pass
    raise damaged(path, "this is no index of a checkpoint, or a damaged one")


class Saved:
    """A checkpoint that several ranks saved, to be read by any number of them.

    ProtrainError where it is not whole, as far as its lists tell.
    """

    def __init__(self, directory: Path) -> None:
        folder, num_ranks, checksum = read_pointer(directory)
        self._directory, self.folder = directory, directory / folder
        files = files_of(self.folder)
        self._sums: Sums = {}
        self._asked = ["training", "random."]  # what the names of tensors begin with
        self._places: dict[Part, Place] = {}  # as far as they were looked for
        if checksum:
            self._sums = read_sums(self.folder, checksum)
            compare_files(self.folder, files, {*self._sums, SUMS})
            lists = {name: self._sums[name] for name in (METADATA, TENSORS) if name in self._sums}
            verify(self.folder, lists)
        path = self.folder / (TENSORS if TENSORS in files else METADATA)
        content = read_regular(path, max_bytes=MAX_LIST_BYTES)
        try:
            listed = parse_json(content) if path.name == TENSORS else _listed(content)
            self._tensors = checked(listed, files)
        except ValueError as error:
            problem = "" if isinstance(error, json.JSONDecodeError) else f": {error}"
            raise damaged(path, f"this is no list of a checkpoint's tensors{problem}") from None
        expected = {part.file for tensor in self._tensors.values() for part in tensor.parts}
        expected.add(METADATA)
        if checksum:
            expected |= {TENSORS, SUMS}
        compare_files(self.folder, files, expected)
        random = {name for name in self._tensors if name.startswith("random.")}
        if random != {f"random.{rank}" for rank in range(num_ranks)}:
            raise damaged(directory / POINTER, f"it is not of {num_ranks} ranks")

    def entries(self, prefix: str) -> dict[str, Entry]:
        """The tensors whose names begin so, by what follows."""
        return {
            name.removeprefix(prefix): Entry(
                path=self.folder, dtype=tensor.dtype, shape=tensor.shape, start=0, key=name
            )
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }

    def weights(self) -> dict[str, Entry | None]:
        """The parameters and buffers."""
        self._asked.append("model.")
        return dict(self.entries("model."))

    def states(self) -> dict[str, Entry]:
        """The optimizer's states that are tensors."""
        self._asked.append("optimizer.state.")
        return self.entries("optimizer.state.")

    def training(self) -> dict[str, Any]:
        """What is no tensor."""
        packed = self.packed("training")
        if packed is None:
            raise damaged(self._directory, "the checkpoint is damaged: it has no training")
        return unpack(packed, str(self._directory))

    def random_states(self, rank: int) -> dict[str, Any] | None:
        """Those of a rank; None for one that was not there."""
        packed = self.packed(f"random.{rank}")
        return None if packed is None else unpack_random(packed, str(self._directory))

    def verify(self, ranks: Ranks | None, unit_of: Callable[[str], str]) -> None:
        """Compare the bytes of the tensors that were asked for with their sums.

        Of several ranks each does so for some files. ProtrainError with the file and the tensor;
        `unit_of` says more of a tensor's name.
        """
        asked = tuple(self._asked)
        files = sorted(self._sums)[ranks.rank :: ranks.count] if ranks else sorted(self._sums)

        def where(what: str) -> str:
            name = tensor_of(what).removeprefix("model.").removeprefix("optimizer.state.")
            return what + unit_of(name)

        verify(
            self.folder,
            {file: self._sums[file] for file in files},
            needed=lambda what: tensor_of(what).startswith(asked),
            where=where,
        )

    def packed(self, name: str) -> bytes | None:
        """What was saved as bytes, compared with its sums; None where it was not."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        if tensor.dtype != torch.uint8 or len(tensor.shape) != 1:
            raise damaged(self.folder, f"{name} is no text")
        sums = {p.file: self._sums[p.file] for p in tensor.parts if p.file in self._sums}
        verify(
            self.folder,
            sums,
            needed=lambda what: tensor_of(what) == name,
            where=lambda what: what,
        )
        read = torch.empty(tensor.shape, dtype=torch.uint8)
        self._read(name, (0,), tensor.shape, read)
        return read.numpy().tobytes()

    def prepare(self, targets: Iterable[tuple[Entry, Value]]) -> None:
        """Find what `fill` is to read, and compare it with the list of tensors."""
        for entry, value in targets:
            for box, _ in boxes_of(value):
                self._read(entry.key, box.offsets, box.sizes, None)

    def fill(self, targets: Iterable[tuple[Entry, Value]]) -> None:
        """Read each entry into its value. Ranks need not meet for it."""
        for entry, value in targets:
            for box, start in boxes_of(value):
                if isinstance(value, Held):
                    self._read(entry.key, box.offsets, box.sizes, value.tensor.detach())
                    continue
                read = torch.empty(box.sizes, dtype=value.dtype)
                self._read(entry.key, box.offsets, box.sizes, read)
                flat = read.view(-1).view(torch.uint8)
                if isinstance(value, Shared):
                    assert value.local is not None
                    value.local.store.write(start, flat)
                else:
                    value.copy_from(_from(flat))

    def _read(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int], target: torch.Tensor | None
    ) -> None:
        """Fill a tensor with a box's elements; without one, find them, and compare with the list.

        ProtrainError where they cannot be read, or differ from what the list says.
        """
        tensor = self._tensors[name]
        for part in tensor.parts:
            # What the part has of the box, by its first and its last corner.
            first = [max(pair) for pair in zip(part.offsets, offsets, strict=True)]
            ends = zip(part.offsets, part.sizes, offsets, sizes, strict=True)
            stop = [min(begin + size, low + room) for begin, size, low, room in ends]
            if not all(low < high for low, high in zip(first, stop, strict=True)):
                continue
            path = self.folder / part.file
            try:
                with path.open("rb", buffering=0) as file:
                    if part not in self._places:
                        self._places[part] = _locate(file, part, tensor.dtype)
                    if target is not None:
                        comes, goes = (
                            _slices(first, stop, part.offsets),
                            _slices(first, stop, offsets),
                        )
                        _copy(file, self._places[part], part, comes, target[goes])
            except (OSError, EOFError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                problem = f"{described(name, part.offsets, part.sizes)} cannot be read: {reason}"
                raise damaged(path, problem) from None


def boxes_of(value: Value) -> Iterator[tuple[Box, int]]:
    """What this rank has of a value, with the byte of its store that each box begins at."""
    if not isinstance(value, Shared):
        yield Box(tuple(0 for _ in value.shape), tuple(value.shape), 0), 0
    elif (local := value.local) is not None:
        for box in boxes(value.shape, local.first, local.first + local.count):
            yield box, local.offset + (box.first - local.first) * value.dtype.itemsize


def _from(flat: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Fills one buffer after the other with these bytes."""
    done = 0

    def fill(target: torch.Tensor) -> None:
        nonlocal done
        target.copy_(flat[done : done + target.numel()])
        done += target.numel()

    return fill
