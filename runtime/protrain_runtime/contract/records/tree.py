"""YAML text -> plain values, read strictly: nothing is guessed, and errors name file, line and key.

JSON and TOML are read within limits, too: no input takes long.

YAML 1.1 takes `12:30` for an integer, `no` for false and `1e9` for a text, and PyYAML the second of
two equal keys. Here numbers are decimal, and what other programs read as something else is `Odd`,
which no field takes.
"""

import json
import math
import operator
import re
import tomllib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect

from protrain_runtime.contract.errors import MAX_SHOWN, ProtrainError, RecordError, cut
from protrain_runtime.contract.records.limits import MAX_TEXT, SMALLEST
from protrain_runtime.contract.records.words import (
    did_you_mean,
    listed,
    number_text,
    refused_character,
    unseen,
)

T = TypeVar("T")
Path = tuple[str | int, ...]
"""Keys and indices that lead to a value."""

MAX_NODES = 50_000
"""Keys, values, lists and mappings in a file: what a second is enough to read."""
MAX_DEPTH = 20
"""Lists and mappings in one another; those of a record are seven at most."""
_MOST_DEPTH, _MAX_DIRECTIVES, _OF_A_DOCUMENT = 100, 10, 10
"""The most nodes of anybody's file; a document counts as so many."""
_MAX_JSON, _MAX_TOML, _MAX_DOTS = 1_000_000, 20_000, 10_000
"""Keys and values of a JSON text and of a TOML text, and dots of the latter."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # an eighth of the time

_BREAKS = "\t\n"
"""Characters that a text of several lines may have."""

_SCALAR = re.compile(
    r"(?P<truth>true|false)|(?P<integer>[-+]?(?:0|[1-9][0-9_]*))"
    r"|(?P<number>[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?)"
    r"|(?P<nothing>~|null|Null|NULL|)"
    r"|(?P<boolean>yes|Yes|YES|no|No|NO|True|TRUE|False|FALSE|on|On|ON|off|Off|OFF)"
    r"|(?P<other>[-+]?(?:0b[0-1_]+|0[0-7_]+|0x[0-9a-fA-F_]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))"
)
"""Words that are no text without quotes, as in YAML 1.1, but for dates and base 60."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A value that readers of YAML disagree about, or that has no limits, or none."""

    text: str
    words: str = "{}"

    def __str__(self) -> str:
        return self.words.format(cut(self.text))


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """The values of a YAML text, or the part of them that lies at `path`."""

    text: str
    source: str | None
    data: Any
    path: Path = ()

    def at(self, *path: str | int) -> "Document":
        """The part that lies at a path from here."""
        data = self.data
        for part in path:
            data = data[part]
        return Document(self.text, self.source, data, (*self.path, *path))

    @property
    def line(self) -> int | None:
        """The line where this begins; None if unknown."""
        return _line_at(self.text, self.path)

    def error(self, problem: str, fix: str | None = None, *, at: Path = ()) -> RecordError:
        """An error about this, or about the value at a path from here."""
        path = (*self.path, *at)
        line, key = _line_at(self.text, path), key_of(path)
        return RecordError(problem, source=self.source, line=line, key=key, fix=fix)

    def expected(self, what: str, fix: str | None = None) -> RecordError:
        """An error that says what was expected here, and what was found."""
        match self.data:
            case str():
                # A whole file that is no record is not quoted.
                found = repr(cut(self.data)) if self.path else "a single value"
            case bool():
                found = f"the boolean {str(self.data).lower()}"
            case list():
                found = f"a list of {len(self.data)}"
            case dict():
                found = "a mapping"
            case None:
                found = "nothing"
            case _:
                found = cut(str(self.data))
        return self.error(f"expected {what}, got {found}", fix)

    @contextmanager
    def located(self, fix: str | None = None) -> Iterator[None]:
        """Errors of a part are errors about this, with a fix where they have none."""
        try:
            yield
        except RecordError:
            raise
        except ProtrainError as error:
            raise self.error(error.message, error.fix or fix) from None

    def read(self, kind: type[T], *, strict: bool = True) -> T:
        """These values as one of a type that msgspec knows; RecordError where they are none."""
        try:
            return msgspec.convert(self.data, kind, strict=strict)
        except msgspec.ValidationError as error:
            raise _refusal(self, kind, str(error)) from None

    def mapping(self) -> "dict[str, Document]":
        """The values of a mapping by key, whatever the keys."""
        return {key: self.at(key) for key in self.read(dict[str, Any])}

    def headed(self, kind: str, expected: int) -> "Document":
        """The same as a file of this kind; RecordError where its header says otherwise."""
        values = self.mapping()
        if "protrain" not in values:
            raise self.error("missing key 'protrain'", f"start the file with protrain: {kind}")
        if (found := values["protrain"].data) != kind:
            what = f"a {kind}" if kind in ("plan", "profile") else kind
            raise values["protrain"].expected(what, did_you_mean(str(found), [kind]))
        if "version" not in values:
            raise self.error("missing key 'version'", f"write version: {expected}")
        version = values["version"].read(int)
        if version > expected:
            problem = f"version {version} is newer than this program, which reads {expected}"
            raise values["version"].error(problem, "update protrain-plan")
        if version < expected:
            fix = f"make the {kind} again" if version > 0 else None
            raise values["version"].expected(f"version {expected}", fix)
        return self


def checked(value: float | str, kind: Any, key: str) -> float:
    """The number that a value says, of a type with limits; RecordError, naming the key, if none."""
    document = Document("", None, value, (key,))
    found: float = document.read(kind, strict=False)
    if isinstance(_far(found, ""), Odd):
        raise document.expected("0, or a number that is not next to it")
    return found


def key_of(path: Sequence[str | int]) -> str | None:
    """`units[3].name`, None for the whole."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".") or None


# --- YAML -----------------------------------------------------------------------------------------


def parsed(text: str, source: str | None) -> Document:
    """The values that a whole file holds; RecordError for no YAML, or a character of `unseen`."""
    events = _events(text, is_record=True)

    def refused(event: Any, path: Path, problem: str, fix: str | None = None) -> RecordError:
        line, key = event.start_mark.line + 1, key_of(path)
        return RecordError(problem, source=source, line=line, key=key, fix=fix)

    def value(event: Any, path: Path) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            if unseen(event.value, but=_BREAKS):
                raise refused(event, path, refused_character(event.value, but=_BREAKS))
            return _plain(event.value) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(value(event, (*path, len(items))))
            return items
        found: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise refused(event, path, "expected a text as the key")
            if unseen(key := event.value):
                raise refused(event, path, refused_character(key))
            if len(key) > MAX_TEXT:
                raise refused(event, path, f"expected a key of at most {MAX_TEXT} characters")
            if key in found:
                problem = f"the key {cut(key)!r} appears twice"
                raise refused(event, path, problem, "remove one of them")
            found[key] = value(next(events), (*path, key))
        return found

    with _readable(text, source):
        for event in events:
            if isinstance(event, yaml.NodeEvent):
                found = Document(text, source, value(event, ()))
                deque(events, maxlen=0)  # there is no other document
                return found
    raise RecordError("the file is empty", source=source)


def documents(text: str) -> tuple[yaml.Node, ...] | None:
    """The documents of whosever YAML it is, with aliases and tags; None where it cannot be read."""
    with suppress(RecordError), _readable(text, None):
        deque(_events(text), maxlen=0)  # within limits, as what follows needs it
        return tuple(yaml.compose_all(text, Loader=_LOADER))
    return None


def _events(text: str, *, is_record: bool = False) -> Iterator[Any]:
    """The events of a text, of few and not nested deeply; of a record's, all that it may have."""
    most = MAX_DEPTH if is_record else _MOST_DEPTH
    depth = count = num_documents = 0
    if len(re.findall("^%", text, re.MULTILINE)) > _MAX_DIRECTIVES:
        raise yaml.MarkedYAMLError(problem=f"more than {_MAX_DIRECTIVES} directives")
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        num_documents += isinstance(event, yaml.DocumentStartEvent)
        count += isinstance(event, yaml.NodeEvent)
        if depth > most:
            problem = f"nested more than {most} deep"
        elif count + _OF_A_DOCUMENT * num_documents > MAX_NODES:
            problem = f"more than {MAX_NODES} keys and values"
        elif is_record and num_documents > 1:
            problem = "but found another document"
        elif is_record and isinstance(event, yaml.AliasEvent):
            problem = "aliases are not allowed"
        elif is_record and getattr(event, "tag", None) is not None:
            problem = "tags are not allowed"
        else:
            yield event
            continue
        mark: Any = event.start_mark
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


@contextmanager
def _readable(text: str, source: str | None) -> Iterator[None]:
    """RecordError for what PyYAML says of a text."""
    line: int | None = None
    try:
        yield
        return
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark or error.context_mark
        line = mark and mark.line + 1
        problem = error.problem or error.context or ""
    except yaml.reader.ReaderError as error:
        problem = f"the character #x{error.character:04x} is not allowed"
        line = text.encode()[: error.position].count(b"\n") + 1
    except UnicodeEncodeError as error:
        problem = f"the character {error.object[error.start]!a} is not allowed"
    except (ValueError, OverflowError):  # PyYAML's own: a version of 5,000 digits
        problem = "a number in it is too large"
    raise RecordError(f"not readable as YAML: {problem}", source=source, line=line)


def _plain(text: str) -> Any:
    """The value of a text without quotes."""
    found = _SCALAR.fullmatch(text)
    match found and found.lastgroup:
        case None:
            return text
        case "truth":
            return text == "true"
        case "integer" if len(text) <= MAX_SHOWN:
            return int(text.replace("_", ""))
        case "number" if math.isfinite(number := float(text.replace("_", ""))):
            return _far(number, text)
        case kind:
            return Odd(text, {"nothing": "nothing", "boolean": "the boolean {}"}.get(kind, "{}"))


def _far(number: float, text: str) -> float | Odd:
    """The number, where it is 0 or not next to it."""
    return Odd(text, "{}, next to 0") if 0 < abs(number) < SMALLEST else number


@lru_cache(maxsize=2)  # a plan and its profile are asked for lines again and again
def _nodes(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=_LOADER)  # of a text that was read, and so within limits


def _line_at(text: str, path: Path) -> int | None:
    """The line of the value at a path, or of the last one on the way to it that is there."""
    if not text:
        return None
    node = _nodes(text)
    assert node is not None
    for part in path:
        match node, part:
            case yaml.MappingNode(), str():
                inner = [value for key, value in node.value if key.value == part]
            case yaml.SequenceNode(), int():
                inner = node.value[part : part + 1]
            case _:
                inner = []
        if not inner:
            break
        node = inner[0]
    return node.start_mark.line + 1


# --- JSON and TOML --------------------------------------------------------------------------------


def parsed_json(
    text: str | bytes, source: str | None, *, most: int = _MAX_JSON, **hooks: Any
) -> Any:
    """Parse a JSON text of at most so many keys and values; RecordError where it is none."""
    line: int | None = None
    try:
        if isinstance(text, bytes):
            text = text.decode()
        if sum(map(text.count, ",[{:")) > most:
            raise ValueError(f"more than {most} keys and values")
        return json.loads(text, **hooks)
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except json.JSONDecodeError as error:
        problem, line = error.msg, error.lineno
    except (RecursionError, ValueError) as error:
        problem = _unreadable(error)
    raise RecordError(f"not readable as JSON: {problem}", source=source, line=line) from None


def parsed_toml(text: str, source: str) -> dict[str, Any]:
    """Parse a TOML text, not nested deeply, of few dots; RecordError where it is none."""
    try:
        if text.count(".") > _MAX_DOTS:  # a key of n parts takes tomllib n ** 2
            raise ValueError(f"more than {_MAX_DOTS} dots")
        inner: list[Any] = [found := tomllib.loads(text)]
        count = depth = 0
        while inner:
            values = (one.values() if isinstance(one, dict) else one for one in inner)
            level = [value for some in values for value in some]
            inner = [value for value in level if isinstance(value, dict | list)]
            count, depth = count + len(level), depth + 1
            if count > _MAX_TOML or depth > MAX_DEPTH:
                raise ValueError(
                    f"more than {_MAX_TOML} values, or nested more than {MAX_DEPTH} deep"
                )
        return found
    except (RecursionError, ValueError) as error:
        problem = _unreadable(error)
    raise RecordError(f"not readable as TOML: {problem}", source=source)


def _unreadable(error: Exception) -> str:
    """Say what a parser of Python's library found wrong."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number is too long" if "integer string conversion" in str(error) else str(error)


# --- what msgspec refuses -------------------------------------------------------------------------


_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "int | str": "a size such as 1536MiB",
    "out of range": "a number of fewer digits",
}
"""Words for what msgspec calls types."""


def _refusal(document: Document, kind: Any, problem: str) -> RecordError:
    """Msgspec's own words, with the value that was found, and a fix."""
    problem = problem.replace("Number out of range", "Expected `out of range`")
    said, _, where = problem.partition(" - at `$")
    expected: Any = inspect.type_info(kind)
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", where):
        document = document.at(key or int(index))
        expected = _keys(expected)[key] if key else getattr(expected, "type", expected).item_type
    if said.startswith("Object"):
        key, keys = said.split("`")[1], _keys(expected)
        if "missing" in said:
            return document.error(f"missing key {key!r}")
        near = did_you_mean(key, keys) or f"the keys are {listed(keys, 'and')}"
        error = document.error(f"unknown key {cut(key)!r}", near, at=(key,))
        error.key = key_of(document.path)
        return error
    words = (getattr(expected, "extra_json_schema", None) or {}).get("description")
    expected, value = getattr(expected, "type", expected), document.data
    kinds = getattr(expected, "types", (expected,))  # of a union
    choices = [str(word) for one in kinds for word in getattr(one, "values", ()) if word]
    fix: str | None = None
    if choices:
        words = words or "a number or " * (len(kinds) > 1) + listed(choices, "or")
        is_text = isinstance(value, str)
        fix = did_you_mean(value, sorted(choices, key=len)) if is_text else None
    elif not isinstance(expected, inspect.StrType):
        fix = meant(value, expected)
    elif not (words or isinstance(value, str | list | dict)):
        text = value.text if isinstance(value, Odd) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        fix = None if value is None or not text else f"put it in quotes: '{text}'"
    said = re.sub("`(.+?)`", lambda found: _NAMES.get(found[1], found[1]), said).partition(", ")[0]
    return document.expected(words or said.removeprefix("Expected "), fix)


def _keys(kind: Any) -> dict[str, inspect.Type]:
    return {field.encode_name: field.type for field in getattr(kind, "type", kind).fields}


def meant(value: Any, kind: Any) -> str | None:
    """Say how to write the number that a text means, or a number where an integer should be.

    None where the field, whose type msgspec has inspected, would not take that number.
    """
    kind = getattr(kind, "type", kind)
    kinds = [getattr(one, "type", one) for one in getattr(kind, "types", (kind,))]
    numeric = next((one for one in kinds if isinstance(one, _NUMERIC)), None)
    whole = isinstance(numeric, inspect.IntType)
    try:
        number = float(value) if type(value) in ((str, float) if whole else (str,)) else math.nan
    except ValueError:
        return None
    if numeric is None or not math.isfinite(number) or isinstance(_far(number, ""), Odd):
        return None
    if whole and (not number.is_integer() or abs(number) > 2**53):
        return None
    limits = ("ge", operator.ge), ("gt", operator.gt), ("le", operator.le), ("lt", operator.lt)
    bounds = ((holds, getattr(numeric, name)) for name, holds in limits)
    if not all(bound is None or holds(number, bound) for holds, bound in bounds):
        return None
    return f"write {int(number) if whole else number_text(number)}"


_NUMERIC = (inspect.IntType, inspect.FloatType)
