"""What is no tensor of a model: `training.pt` of a checkpoint, as `torch.save` packs it.

It is read with `torch.load(weights_only=True)`, which calls nothing but what PyTorch, or the user
with `torch.serialization.add_safe_globals`, has on a list. That list lets a small file take all
memory, so what it would do is looked at first.

[Note: what a small file could take] An archive may be compressed, or name the same bytes many
times: every record has to be stored as it is, and all together are no more than the file. What
PyTorch reads is an archive written anew from these records: another reader could find others in
the same bytes. Of the pickle in it, only calls with such arguments are let through as saving
writes: `bytearray(10**11)` is none, nor is a tensor larger than its storage, which PyTorch makes
larger then, nor a codec that doubles what it is given.
"""

import io
import random
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.storage import _storage_type_to_dtype_map

from protrain_plan.errors import ProtrainError
from protrain_runtime.checkpoint.pickled import Named, Pairs, Reader

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
    for key, is_right in _PARTS.items():
        if key in read and not is_right(read[key]):
            raise ProtrainError("this is not what a save writes", source=source, key=key, fix=_FIX)
    if "random" in read:
        check_random(read["random"], source)
    return dict(read)


def unpack_random(packed: bytes, source: str) -> dict[str, Any]:
    """The random states of a rank, which it packed by themselves. ProtrainError as `unpack`."""
    try:
        read: dict[str, Any] = torch.load(_archive(packed), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - as above
        raise ProtrainError("the file is damaged", source=source, key="random", fix=_FIX) from None
    check_random(read, source)
    return read


def check_random(states: object, source: str) -> None:
    """ProtrainError for random states that generators do not take; those in use stay as they are.

    Of the states of accelerators this is their type alone.
    """
    try:
        match states:
            case {"torch": torch.Tensor() as own, "python": tuple(python), **others}:
                torch.Generator().set_state(own)
                random.Random().setstate(python)
                if not isinstance(python[2], float | None):
                    raise TypeError
            case _:
                raise TypeError
        if not all(isinstance(kind, str) and _are_states(of) for kind, of in others.items()):
            raise TypeError
    except (TypeError, ValueError, IndexError, RuntimeError, OverflowError):
        raise ProtrainError(
            "these are no states of random generators", source=source, key="random", fix=_FIX
        ) from None


def _are_states(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(state, torch.Tensor)
        and state.dtype == torch.uint8
        and state.device.type == "cpu"
        and state.layout == torch.strided
        and state.dim() == 1
        for state in value
    )


def _is_optimizer(value: object) -> bool:
    match value:
        case {
            "class": str(),
            "options": list(options),
            "groups": list(groups),
            "states": dict(states),
        }:
            return (
                _all_are(str, options)
                and all(_is_group(group) for group in groups)
                and _all_are(str, states)
                and all(isinstance(s, dict) and _all_are(str, s) for s in states.values())
            )
        case _:
            return False


def _is_group(value: object) -> bool:
    match value:
        case {"params": list(names), **options}:
            return _all_are(str, names) and _all_are(str, options)
        case _:
            return False


def _all_are(kind: type, values: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


_PARTS = {
    "extra": lambda value: isinstance(value, dict),
    "modules": lambda value: isinstance(value, dict) and _all_are(str, value),
    "files": lambda value: isinstance(value, list) and _all_are(str, value),
    "optimizer": _is_optimizer,
}


# --- what PyTorch may be given to read ------------------------------------------------------------


def _archive(packed: bytes) -> io.BytesIO:
    """The records of an archive in one of our own. See [Note: what a small file could take].

    Raises whatever there is to raise where it is not what saving writes.
    """
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
                if numel * _itemsize(name) <= self._sizes[f"data/{key}"]:
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


def _itemsize(storage: str) -> int:
    """Bytes of an element, by what a class of storages is called; an untyped one counts bytes."""
    return 1 if storage == "UntypedStorage" else _storage_type_to_dtype_map()[storage].itemsize


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
    """Raises for tensors that would be copied, or gone through, and are larger than what is read.

    Those with strides of zero are such: alone they take no memory.
    """
    for value in arguments:
        if _EXPANDED in (value if isinstance(value, tuple) else (value,)):
            raise ValueError("a tensor that is larger than its storage")


def _checked_view(arguments: tuple[Any, ...]) -> str:
    """What kind of tensor that is; raises where it ends behind its storage.

    A storage without a dtype counts bytes, and may still be larger by the size of an element.
    """
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
