"""The state of a training besides tensors, as JSON: options, counters, schedules, generators.

Numbers, texts, lists and dicts with text keys are plain JSON. Other values are a dict of one entry,
whose key begins with "$" and names the type: {"$tuple": [1, 2]}. Tensors are written with the
model's; {"$tensor": "extra.scale"} refers to one. Reading makes only these types.
"""

import itertools
import math
import random
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import nn

from protrain_runtime.checkpoint.entries import fill_values
from protrain_runtime.checkpoint.files import NAMES, Sums, damaged
from protrain_runtime.checkpoint.index import Saved
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.states.values import Held, Source

_MOST_LEVELS = 100
_MOST_BITS = 10_000  # of an integer: parsing takes quadratic time in its digits


def _pairs(values: Mapping[Any, Any]) -> list[list[Any]]:
    return [list(item) for item in values.items()]


_UTF_16 = "utf-16-le", "surrogatepass"
_HALF_CHARACTERS = re.compile("[\ud800-\udfff]")


_DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_FORMS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    # By type: its mark, an encoder to a list or text, and a decoder.
    str: (  # with lone surrogates
        "$text",
        lambda text: text.encode(*_UTF_16).hex(),
        lambda text: bytes.fromhex(text).decode(*_UTF_16),
    ),
    tuple: ("$tuple", list, tuple),
    torch.Size: ("$size", list, torch.Size),
    set: ("$set", list, set),
    dict: ("$dict", _pairs, dict),  # with non-text keys
    OrderedDict: ("$ordered", _pairs, OrderedDict),
    Counter: ("$counter", _pairs, lambda pairs: Counter(dict(pairs))),
    float: ("$float", repr, float),  # not a JSON number
    complex: ("$complex", repr, complex),
    bytes: ("$bytes", bytes.hex, bytes.fromhex),
    bytearray: ("$bytearray", bytearray.hex, bytearray.fromhex),
    torch.device: ("$device", str, torch.device),
    torch.dtype: ("$dtype", str, _DTYPES.__getitem__),
}
_READERS = {mark: read for mark, _, read in _FORMS.values()}


def encoded(value: Any, key: str, tensors: dict[str, Source], level: int = 0) -> Any:
    """A value as JSON, its tensors in `tensors`; ProtrainError if it could not be read back."""

    def each(inner: Any, place: str) -> Any:
        return encoded(inner, f"{key}{place}", tensors, level + 1)

    kind, deep = type(value), level > _MOST_LEVELS  # perhaps self-containing
    if (
        value is None
        or kind is bool
        or (kind is str and not _HALF_CHARACTERS.search(value))
        or (kind is int and value.bit_length() <= _MOST_BITS)
        or (kind is float and math.isfinite(value))
    ):
        return value
    if kind is list and not deep:
        return [each(inner, f"[{number}]") for number, inner in enumerate(value)]
    if (
        kind is dict
        and not deep
        and all(type(k) is str and k.isascii() and k[:1] != "$" for k in value)
    ):
        return {k: each(inner, f".{k}") for k, inner in value.items()}
    if kind in _FORMS and not deep:
        mark, plain, _ = _FORMS[kind]
        return {mark: each(plain(value), "")}
    if (
        kind in (torch.Tensor, nn.Parameter)
        and value.dtype in NAMES
        and value.layout == torch.strided
        and not value.is_meta
    ):
        name = key
        while name in tensors:  # a text key with a dot may collide with another
            name += "'"
        tensors[name] = Held(value.detach().resolve_conj().resolve_neg())
        return {"$tensor": name}
    what = "nested too deeply" if deep else f"a {kind.__module__}.{kind.__qualname__}"
    raise ProtrainError(
        f"this cannot be saved: it is {what}",
        key=key,
        fix="use numbers, strings, dense tensors, lists, tuples and dicts",
    )


def _decoded(found: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode a value; raises its types' errors for invalid ones."""
    match found:
        case list():
            return [_decoded(each, tensors) for each in found]
        case {"$tensor": str(name)}:
            return tensors[name]
        case dict() if len(found) == 1 and (mark := next(iter(found))).startswith("$"):
            if not isinstance(found[mark], list | str):
                raise TypeError(mark)
            return _READERS[mark](_decoded(found[mark], tensors))
        case dict():
            return {key: _decoded(each, tensors) for key, each in found.items()}
        case _:
            return found


class SavedOptimizer(msgspec.Struct):
    """An optimizer without tensor states; groups name their parameters."""

    kind: str = msgspec.field(name="class")
    options: list[str]
    groups: list[dict[str, Any]]
    states: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        for group in self.groups:
            msgspec.convert(group.get("params"), list[str])


class Training(msgspec.Struct, forbid_unknown_fields=True):
    """State of a training besides the tensors of the model and its optimizer."""

    extra: dict[Any, Any] = {}
    modules: dict[str, Any] = {}
    random: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    optimizer: SavedOptimizer | None = None

    def __post_init__(self) -> None:
        for states in self.random or ():  # generators take these; of accelerators' by type alone
            match states:
                case {
                    "torch": torch.Tensor() as own,
                    "python": (_, _, float() | None) as python,
                    **others,
                }:
                    torch.Generator().set_state(own)
                    random.Random().setstate(python)
                case _:
                    raise TypeError("random")
            of_devices = msgspec.convert(others, dict[str, list[Any]])
            for state in itertools.chain.from_iterable(of_devices.values()):
                plain = isinstance(state, torch.Tensor) and state.dim() == 1
                if not plain or state.dtype != torch.uint8:
                    raise TypeError("random")


def read_training(saved: Saved) -> Training:
    """Read everything but tensors; ProtrainError if no save could have written it."""
    entries, sums = saved.entries("training"), Sums(saved.rows)
    tensors = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in entries.items()}
    fill_values([(entry, Held(tensors[name])) for name, entry in entries.items()], sums)
    saved.verify(["training"], sums=sums)
    try:
        found = {key: _decoded(value, tensors) for key, value in saved.training.items()}
        return msgspec.convert(found, Training)
    except Exception:  # noqa: BLE001 - whatever its types raise
        error = damaged(saved.index, "this is not what a save writes")
        error.key = "protrain.training"
        raise error from None
