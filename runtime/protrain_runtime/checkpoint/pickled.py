"""Pickles that others wrote, as plain data: nothing in them is imported, called or run.

`pickle` makes what the file says, out of any function that can be imported. Here a pickle's names
are compared with a list, and what it would make of them is written down: `Made`. Only instructions
that PyTorch's checkpoints have are known; numbers have 8 bytes at most, mappings stay lists of
pairs, and there is no recursion, so that a file takes memory and time in proportion to its size.
A `Reader` of another kind may look at what is named, called and stored instead (`training_state`).
"""

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

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
