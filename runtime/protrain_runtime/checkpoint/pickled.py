"""Pickles that others wrote, as plain data: nothing in them is imported, called or run.

`pickle` makes what the file says, out of any function that can be imported. Here a pickle's names
are compared with a list, and what it would make of them is written down: `Made`. Only instructions
that PyTorch's checkpoints have are known; numbers have 8 bytes at most, mappings stay lists of
pairs, and there is no recursion, so that a file takes memory and time in proportion to its size.

What is no tensor of a model is in `training.pt`, as `torch.save` packs it. It is read with
`torch.load(weights_only=True)`, which calls nothing but what PyTorch, or the user with
`torch.serialization.add_safe_globals`, has on a list. That list lets a small file take all memory,
so another kind of `Reader` looks first at what is named, called and stored there.

[Note: what a small file could take] An archive may be compressed, or name the same bytes many
times: every record has to be stored as it is, and all together are no more than the file. What
PyTorch reads is an archive written anew from these records: another reader could find others in
the same bytes. Of the pickle in it, only calls with such arguments are let through as saving
writes: `bytearray(10**11)` is none, nor is a tensor larger than its storage, which PyTorch makes
larger then, nor a codec that doubles what it is given.
"""

import io
import itertools
import random
import struct
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch.storage import _storage_type_to_dtype_map

from protrain_runtime.contract.errors import ProtrainError

Name = tuple[str, str]
"""A module and what it calls something."""

STORED = ("", "stored elsewhere")
"""The name of a `Made` for what the pickle's writer put elsewhere: its arguments say where."""

MAX_STEPS = 2**23


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle would make by calling something of this name, and would give this state."""

    name: Name
    arguments: Any
    state: Any = None


@dataclass(slots=True, eq=False)
class Named:
    """Something that a pickle only names, such as a dtype."""

    name: Name


class Pairs(list[tuple[Any, Any]]):
    """A mapping, as it was written: keys may be anything, and come twice."""


def read_pickle(data: bytes, names: Collection[Name]) -> Any:
    """What a pickle holds: numbers, texts, tuples, lists, `Pairs`, `Named` and `Made`.

    ValueError for a damaged one, for instructions that are not known here, and for other names.
    """
    return Reader(data, names).read(MAX_STEPS)


class Reader:
    """The machine that a pickle's instructions are for, with a stack since the last mark."""

    PROTOCOLS: ClassVar[Collection[int]] = range(6)
    MAX_INTEGER_BYTES: ClassVar[int] = 8
    SURROGATES: ClassVar[str] = "strict"  # how texts with halves of characters are decoded

    def __init__(self, data: bytes, names: Collection[Name]) -> None:
        self._data, self._names = data, names
        self.position = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}

    def read(self, max_steps: int) -> Any:
        """What the pickle holds; ValueError as `read_pickle`."""
        try:
            for _ in range(max_steps):
                step = _STEPS.get(code := self.take(1)[0])
                if code == _STOP:
                    break
                if step is None:
                    raise ValueError(f"it has the instruction 0x{code:02x}")
                step(self)
            else:
                raise ValueError(f"it has more than {max_steps} instructions")
            (result,) = self.stack
        except (IndexError, KeyError, struct.error, UnicodeDecodeError):
            raise ValueError("it is damaged") from None
        if self.outer or self.position != len(self._data):
            raise ValueError("it is damaged")
        return result

    def take(self, count: int) -> bytes:
        """The bytes that come next."""
        start, self.position = self.position, self.position + count
        if self.position > len(self._data):
            raise ValueError("it is cut off")
        return self._data[start : self.position]

    def number(self, layout: str) -> Any:
        """The number that comes next, as `struct` describes it."""
        (found,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return found

    def text(self, layout: str) -> str:
        """The text that comes next, behind its length."""
        return self.take(self.number(layout)).decode(errors=self.SURROGATES)

    def line(self) -> str:
        """A text up to the end of its line."""
        end = self._data.find(b"\n", self.position) + 1
        return self.take(max(end - self.position, 1))[:-1].decode()

    def pop_to_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.outer.pop()
        return found

    def pop(self, count: int) -> list[Any]:
        """The last values, in the order in which they were pushed."""
        if len(self.stack) < count:
            raise IndexError
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def name(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("it is damaged")
        if (module, name) not in self._names:
            raise ValueError(f"it names {f'{module}.{name}'!r}")
        self.stack.append(Named((module, name)))

    def make(self) -> None:
        called, arguments = self.pop(2)
        if type(called) is not Named or type(arguments) is not tuple:
            raise ValueError("it calls what is no name")
        self.stack.append(Made(called.name, arguments))

    def stored(self) -> None:
        if STORED not in self._names:
            raise ValueError("it has something that is stored elsewhere")
        self.stack.append(Made(STORED, *self.pop(1)))

    def set_state(self) -> None:
        (state,) = self.pop(1)
        made = self.stack[-1]
        if type(made) is not Made or made.state is not None:
            raise ValueError("it changes what it did not make")
        made.state = state

    def add(self, kind: type[list[Any]], values: list[Any]) -> None:
        """Put values behind those of the list before them."""
        found = self.stack[-1]
        if type(found) is not kind:
            raise ValueError("it adds to what is no list or mapping of its own")
        found += values

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []


def _pairs(values: list[Any]) -> list[tuple[Any, Any]]:
    if len(values) % 2:
        raise IndexError
    return list(zip(values[::2], values[1::2], strict=True))


def _integer(reader: Reader) -> int:
    count = reader.take(1)[0]
    if count > reader.MAX_INTEGER_BYTES:
        raise ValueError("it has a number that is too large")
    return int.from_bytes(reader.take(count), "little", signed=True)


def _protocol(reader: Reader) -> None:
    if reader.take(1)[0] not in reader.PROTOCOLS:
        raise ValueError("it has another format")


def _pushed(value: Callable[[Reader], object]) -> Callable[[Reader], object]:
    def step(reader: Reader) -> None:
        found = value(reader)  # which may change what the stack is
        reader.stack.append(found)

    return step


_STOP = ord(".")
_STEPS: dict[int, Callable[[Reader], object]] = {
    # Bytes that pickletools describes, as `pickle` writes them for what PyTorch saves.
    0x80: _protocol,
    0x95: lambda r: r.take(8),  # how long a frame is: all of the file is here
    ord("N"): _pushed(lambda _: None),
    0x88: _pushed(lambda _: True),
    0x89: _pushed(lambda _: False),
    ord("K"): _pushed(lambda r: r.number("<B")),
    ord("M"): _pushed(lambda r: r.number("<H")),
    ord("J"): _pushed(lambda r: r.number("<i")),
    0x8A: _pushed(_integer),
    ord("G"): _pushed(lambda r: r.number(">d")),
    ord("U"): _pushed(lambda r: r.take(r.number("<B"))),
    0x8C: _pushed(lambda r: r.text("<B")),
    ord("X"): _pushed(lambda r: r.text("<I")),
    ord("("): lambda r: r.mark(),
    ord(")"): _pushed(lambda _: ()),
    ord("t"): _pushed(lambda r: tuple(r.pop_to_mark())),
    0x85: _pushed(lambda r: tuple(r.pop(1))),
    0x86: _pushed(lambda r: tuple(r.pop(2))),
    0x87: _pushed(lambda r: tuple(r.pop(3))),
    ord("]"): _pushed(lambda _: []),
    ord("a"): lambda r: r.add(list, r.pop(1)),
    ord("e"): lambda r: r.add(list, r.pop_to_mark()),
    ord("}"): _pushed(lambda _: Pairs()),
    ord("s"): lambda r: r.add(Pairs, _pairs(r.pop(2))),
    ord("u"): lambda r: r.add(Pairs, _pairs(r.pop_to_mark())),
    0x94: lambda r: r.put(len(r.memo)),
    ord("q"): lambda r: r.put(r.number("<B")),
    ord("r"): lambda r: r.put(r.number("<I")),
    ord("h"): _pushed(lambda r: r.memo[r.number("<B")]),
    ord("j"): _pushed(lambda r: r.memo[r.number("<I")]),
    ord("c"): lambda r: r.name(r.line(), r.line()),
    0x93: lambda r: r.name(*r.pop(2)),
    ord("R"): lambda r: r.make(),
    0x81: lambda r: r.make(),
    ord("b"): lambda r: r.set_state(),
    ord("Q"): lambda r: r.stored(),
}


# --- training.pt ----------------------------------------------------------------------------------

VERSION = 1
_FIX = "load another checkpoint"


def pack(training: Mapping[str, Any]) -> bytes:
    """The bytes of training.pt. ProtrainError for what could not be read back without its code."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(training), buffer)
        packed = buffer.getvalue()
        torch.load(_archive(packed), weights_only=True)
    except Exception as error:  # of any class whose objects are in there
        raise ProtrainError(
            f"this cannot be saved: {str(error).splitlines()[0]}",
            key="extra",
            fix="put numbers, texts, tensors, lists, tuples and dicts into extra=",
        ) from error
    return packed


def unpack(packed: bytes, source: str) -> dict[str, Any]:
    """What `pack` packed. ProtrainError where it is damaged, or not what a checkpoint has."""
    try:
        archive = _archive(packed)
        del packed  # if nobody else has it, both are not there with what is read from them
        read = torch.load(archive, weights_only=True, map_location="cpu")
        version = read["version"]
    except Exception:  # noqa: BLE001 - of any damage, there are many
        raise ProtrainError("the file is damaged", source=source, fix=_FIX) from None
    if type(version) is not int or version != VERSION:
        shown = version if type(version) is int else f"of type {type(version).__name__}"
        raise ProtrainError(
            f"the checkpoint has version {shown}, this protrain-plan reads {VERSION}",
            source=source,
            fix="load it with the version that wrote it",
        )
    for key in ("extra", "modules", "files", "optimizer"):
        if key in read and not _is_written(key, read[key]):
            raise ProtrainError("this is not what a save writes", source=source, key=key, fix=_FIX)
    if "random" in read:
        _check_random(read["random"], source)
    return dict(read)


def unpack_random(packed: bytes, source: str) -> dict[str, Any]:
    """The random states of a rank, which it packed by themselves. ProtrainError as `unpack`."""
    try:
        read: dict[str, Any] = torch.load(_archive(packed), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - as above
        raise ProtrainError("the file is damaged", source=source, key="random", fix=_FIX) from None
    _check_random(read, source)
    return read


def _check_random(states: object, source: str) -> None:
    """ProtrainError for states that generators do not take; of accelerators' by type alone."""
    try:
        match states:
            case {"torch": torch.Tensor() as own, "python": tuple(python), **others}:
                torch.Generator().set_state(own)
                random.Random().setstate(python)
                if not isinstance(python[2], float | None):
                    raise TypeError
            case _:
                raise TypeError
        of_devices: dict[Any, Any] = others
        if not _all_are(str, of_devices) or not _all_are(list, of_devices.values()):
            raise TypeError
        for state in itertools.chain.from_iterable(of_devices.values()):
            if not (
                isinstance(state, torch.Tensor)
                and state.dtype == torch.uint8
                and state.device.type == "cpu"
                and state.layout == torch.strided
                and state.dim() == 1
            ):
                raise TypeError
    except (TypeError, ValueError, IndexError, RuntimeError, OverflowError):
        raise ProtrainError(
            "these are no states of random generators", source=source, key="random", fix=_FIX
        ) from None


def _is_written(key: str, value: object) -> bool:
    """Whether a part of training.pt is of the form that a save writes."""
    match key, value:
        case "extra", dict():
            return True
        case ("modules", dict(names)) | ("files", list(names)):
            return _all_are(str, names)
        case (
            "optimizer",
            {
                "class": str(),
                "options": list(options),
                "groups": list(groups),
                "states": dict(states),
            },
        ):
            return (
                _all_are(str, [*options, *states])
                and _all_are(dict, [*groups, *states.values()])
                and all(isinstance(group.get("params"), list) for group in groups)
                and all(_all_are(str, [*group["params"], *group]) for group in groups)
                and all(_all_are(str, state) for state in states.values())
            )
        case _:
            return False


def _all_are(kind: type, values: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


# --- what PyTorch may be given to read ------------------------------------------------------------


def _archive(packed: bytes) -> io.BytesIO:
    """The records in an archive of our own: see [Note: what a small file could take]. It raises."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive, zipfile.ZipFile(written, "w") as copy:
        members = archive.infolist()
        names = [member.filename.partition("/")[2] for member in members]
        stored = all(
            member.compress_type == zipfile.ZIP_STORED and member.compress_size == member.file_size
            for member in members
        )
        sizes = {n: member.file_size for n, member in zip(names, members, strict=True)}
        if not stored or len(sizes) != len(members) or sum(sizes.values()) > len(packed):
            raise ValueError("this is no archive of torch.save")
        if "constants.pkl" in names:
            raise ValueError("this is a program")
        for name, member in zip(names, members, strict=True):
            record = archive.read(member)
            if name == "data.pkl":
                _Checker(record, sizes).read(len(record))
            copy.writestr(f"archive/{name}", record)
    written.seek(0)
    return written


@dataclass(frozen=True, slots=True)
class _Storage:
    """Memory of tensors, in a record of the archive."""

    numel: int


@dataclass(frozen=True, slots=True)
class _Result:
    """What a call gives, whose contents do not matter."""

    what: str


_EXPANDED = _Result("expanded tensor")


# What PyTorch has on its own list. What is not here it refuses by itself, or the user listed it.
_BUILTINS = {
    *("_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set"),
    *("collections.Counter", "collections.OrderedDict"),
}
_TORCH = {
    *("torch", "torch.storage", "torch._utils", "torch._tensor", "torch.nn.parameter"),
    *("torch.sparse", "torch.cuda", "torch.cuda.sparse"),
}
_HARMLESS = {
    *("torch.Size", "torch.device", "torch.nn.parameter.Parameter"),
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_wrapper_subclass",
}
_VIEWS = {
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_qtensor",
}


class _Checker(Reader):
    """Goes through a pickle without doing what it says. ValueError where no save writes it."""

    PROTOCOLS = (2,)  # what torch.save writes, and torch.load does not warn of
    MAX_INTEGER_BYTES = 255  # what `extra` has may be any number
    SURROGATES = "surrogatepass"

    def __init__(self, data: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(data, ())
        self._sizes = sizes  # of the archive's records

    def name(self, module: object, name: object) -> None:
        key = NAME_MAPPING.get((f"{module}", f"{name}"), (f"{module}", f"{name}"))
        self.stack.append(Named((IMPORT_MAPPING.get(key[0], key[0]), key[1])))

    def make(self) -> None:
        self.stack.append(_called(*self.pop(2)))

    def stored(self) -> None:
        (identity,) = self.pop(1)
        match identity:
            case ("storage", Named(name=(_, name)), str(key), str(), int(numel)) if numel >= 0:
                untyped = name == "UntypedStorage"  # it counts bytes
                itemsize = 1 if untyped else _storage_type_to_dtype_map()[name].itemsize
                if numel * itemsize <= self._sizes[f"data/{key}"]:
                    self.stack.append(_Storage(numel))
                    return
            case _:
                pass
        raise ValueError("a storage that is not in the archive")

    def set_state(self) -> None:
        (state,) = self.pop(1)
        if isinstance(state, tuple) and state and isinstance(state[0], _Storage):
            _checked_view(state)

    def add(self, kind: type[list[Any]], values: list[Any]) -> None:
        """To whatever it is: what is in there was looked at when it was made."""


def _called(function: Any, arguments: Any) -> _Result:
    """What a call gives, if it is one that saving writes."""
    if not isinstance(function, Named) or not isinstance(arguments, tuple):
        raise ValueError("a call of nothing")
    called_name = ".".join(function.name)
    match (called_name, arguments):
        case ("_codecs.encode", (str(), "latin1")):
            return _Result("bytes")
        case ("builtins.bytearray", () | (_Result(what="bytes"),)):
            pass
        case ("builtins.set" | "collections.OrderedDict", () | (list(),)):
            pass
        case ("collections.Counter", () | (Pairs(),)):
            pass
        case ("builtins.complex", (float(), float())):
            pass
        case ("torch._tensor._rebuild_from_type_v2", (called, _, tuple(others), *_)):
            return _called(called, others)
        case ("torch._utils._rebuild_parameter", (_Result() as tensor, *_)):
            return tensor
        case (name, _) if name in _VIEWS:
            _check_no_expanded(arguments)
            return _Result(_checked_view(arguments))
        case (name, _) if name in _HARMLESS:
            _check_no_expanded(arguments)
        case (name, _) if name in _BUILTINS or name.rpartition(".")[0] in _TORCH:
            raise ValueError(f"a call of {name}")
        case _:
            pass
    return _Result(called_name)


def _check_no_expanded(arguments: tuple[Any, ...]) -> None:
    """Tensors with strides of zero take no memory, until they are copied, or gone through."""
    for value in arguments:
        if _EXPANDED in (value if isinstance(value, tuple) else (value,)):
            raise ValueError("a tensor that is larger than its storage")


def _checked_view(arguments: tuple[Any, ...]) -> str:
    """What kind of tensor that is; raises where it ends behind its storage."""
    # A storage without a dtype counts bytes, and may still be larger by the size of an element.
    match arguments:
        case (_Storage(numel=numel), int(offset), tuple(size), tuple(stride), *_):
            counts = (offset, *size, *stride)
            if len(size) == len(stride) and all(type(n) is int and n >= 0 for n in counts):
                last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
                if 0 in size or last < numel:
                    return "tensor" if prod(size) <= numel else _EXPANDED.what
        case _:
            pass
    raise ValueError("a tensor that is larger than its storage")
