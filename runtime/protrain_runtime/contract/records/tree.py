"""Text -> YAML nodes, read strictly: nothing is guessed, and each value knows its line and key.

And JSON and TOML, within the same limits: nothing that somebody wrote takes long to read.

PyYAML follows YAML 1.1, where `12:30` is an integer, `no` is false, `1e9` is a text and the second
of two equal keys wins. Here nodes are never turned into Python objects by what they look like:
the reader asks each one for what the record needs, and what it finds instead is an error.
"""

import difflib
import json
import math
import re
import tomllib
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

import yaml
from yaml.composer import ComposerError

from protrain_runtime.contract.errors import MAX_SHOWN, RecordError, cut

_MAP, _SEQ, _STR, _INT, _FLOAT, _BOOL, _NULL = (
    f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null")
)


MAX_NODES, _MAX_JSON, _MAX_TOML = 50_000, 1_000_000, 20_000
"""Keys, values, lists and mappings in a file: what a second is enough to read."""
MAX_DEPTH = 20
"""Lists and mappings in one another; those of a record are seven at most."""
_MOST_DEPTH, _MAX_DIRECTIVES, _OF_A_DOCUMENT = 100, 10, 10
"""The most nodes of anybody's file; a document counts as so many."""
MAX_TEXT = 1_000
"""Characters of a text, of which nothing else is said, and of a key."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader up to nodes, within limits; `strays` are what others may have, and no record.

    Plain scalars are resolved as in YAML 1.1, so that what other programs would read as something
    else is not taken for a text, with two exceptions: there are no dates and no base 60.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML fills it through the class)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.num_nodes = self.depth = self.num_directives = 0
        self.strays: list[ComposerError] = []

    def scan_directive(self) -> yaml.DirectiveToken:
        self.num_directives += 1
        if self.num_directives > _MAX_DIRECTIVES:
            problem = f"more than {_MAX_DIRECTIVES} directives"
            raise ComposerError(problem=problem, problem_mark=self.get_mark())
        return super().scan_directive()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        assert isinstance(event.start_mark, yaml.Mark)
        self.num_nodes += 1
        too_many = f"more than {MAX_NODES} keys and values"
        for problem, is_so, is_so_for_all in (
            (
                f"nested more than {MAX_DEPTH} deep",
                self.depth > MAX_DEPTH,
                self.depth > _MOST_DEPTH,
            ),
            (too_many, self.num_nodes > MAX_NODES, True),
            ("aliases are not allowed", isinstance(event, yaml.AliasEvent), False),
            ("tags are not allowed", getattr(event, "tag", None) is not None, False),
        ):
            error = ComposerError(problem=problem, problem_mark=event.start_mark)
            if is_so and is_so_for_all:
                raise error
            if is_so:
                self.strays.append(error)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in (
    (
        _BOOL,
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        "yYnNtTfFoO",
    ),
    (_INT, r"[-+]?(?:0b[0-1_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", "-+0123456789"),
    (
        _FLOAT,
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _StrictLoader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))

_DESCRIPTIONS = {
    _STR: "the text {!r}",
    _BOOL: "the boolean {}",
    _NULL: "nothing",
    _SEQ: "a list",
    _MAP: "a mapping",
}
_MAX_CHOICES = 1_000
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A YAML node, with the file and the key path (such as `units[3].name`) that it has there."""

    node: yaml.Node
    source: str | None
    key: str | None

    def error(self, problem: str, fix: str | None = None) -> RecordError:
        """An error about this value."""
        line = self.node.start_mark.line + 1
        return RecordError(problem, source=self.source, line=line, key=self.key, fix=fix)

    def expected(self, what: str, fix: str | None = None) -> RecordError:
        """An error that says what was expected here, and what was found."""
        value = self.node.value
        found = _DESCRIPTIONS.get(self.node.tag, "{}")
        found = found.format(cut(value) if isinstance(value, str) else value)
        if self.key is None and isinstance(value, str):
            found = "a single value"  # a whole file that is no record is not quoted
        return self.error(f"expected {what}, got {found}", fix)

    def mapping(self, known: Collection[str], optional: Collection[str] = ()) -> "dict[str, Node]":
        """The values of a mapping by key: all the `known` keys, only those, each once."""
        values = self.any_mapping()
        for key, value in values.items():
            if key not in known:
                unknown = replace(self, node=value.node)
                raise unknown.error(
                    f"unknown key {cut(key)!r}",
                    did_you_mean(key, known) or f"the keys are {listed(known, 'and')}",
                )
        for key in known:
            if key not in values and key not in optional:
                raise self.error(f"missing key {key!r}")
        return values

    def any_mapping(self) -> "dict[str, Node]":
        """The values of a mapping by key, whatever the keys, each once."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.expected("a mapping")
        values: dict[str, Node] = {}
        for key_node, node in self.node.value:
            where = replace(self, node=key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise where.expected("a text as the key")
            key = key_node.value
            if unseen(key):
                raise where.error(refused_character(key))
            if len(key) > MAX_TEXT:
                raise where.error(f"expected a key of at most {MAX_TEXT} characters")
            if key in values:
                raise where.error(f"the key {cut(key)!r} stands here twice", "remove one of them")
            path = key if self.key is None else f"{self.key}.{key}"
            values[key] = replace(self, node=node, key=path)
        return values

    def sequence(self, most: int = MAX_NODES) -> "list[Node]":
        """The items of a list, at most so many."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.expected("a list")
        if (count := len(self.node.value)) > most:
            raise self.error(f"expected a list of at most {most}, got {count}")
        return [
            replace(self, node=node, key=f"{self.key}[{i}]")
            for i, node in enumerate(self.node.value)
        ]

    @property
    def num_nodes(self) -> int:
        """The keys and values in here, itself included."""
        return sum(1 for _ in _nodes(self.node))

    def is_text(self) -> bool:
        """Whether this is a text."""
        return self.node.tag == _STR

    def text(self, most: int = MAX_TEXT, *, lines: bool = False) -> str:
        """The text, of at most so many characters; with `lines`, it may have several."""
        if self.node.tag == _STR:
            text = str(self.node.value)
            if not lines and unseen(text):
                raise self.error(refused_character(text))
            if len(text) > most:
                raise self.error(
                    f"expected a text of at most {most} characters, got {len(text)} of them"
                )
            return text
        scalar = isinstance(self.node, yaml.ScalarNode) and self.node.tag != _NULL
        raise self.expected(
            "a text", f"put it in quotes: '{cut(self.node.value)}'" if scalar else None
        )

    def boolean(self) -> bool:
        """True or false, in these two words."""
        if self.node.tag == _BOOL and self.node.value in ("true", "false"):
            return bool(self.node.value == "true")
        raise self.expected("true or false")

    def integer(self, what: str = "an integer") -> int:
        """The decimal integer."""
        if self.node.tag != _INT or _DECIMAL.fullmatch(self.node.value) is None:
            raise self.expected(what, self.meant_integer())
        digits = self.node.value.replace("_", "")
        if len(digits) > 20 or abs(int(digits)) > _MAX_INTEGER:
            raise self.expected("an integer below 2**63")
        return int(digits)

    def number(self) -> float:
        """The finite number."""
        if self.node.tag == _INT:
            return float(self.integer("a number"))
        if self.node.tag != _FLOAT:
            meant = _meant(self.node)
            raise self.expected(
                "a number", None if meant is None else f"write {number_text(meant)}"
            )
        digits = self.node.value.replace("_", "").lower()
        if "inf" in digits or "nan" in digits or not math.isfinite(float(digits)):
            raise self.expected("a finite number")
        return float(digits)

    def meant_integer(self) -> str | None:
        """Say how to write the integer that this text means, if it means one."""
        number = _meant(self.node)
        if number is None or not number.is_integer() or abs(number) > 2**53:
            return None
        return f"write {int(number)}"


def root(text: str, source: str | None) -> Node:
    """The value that a whole file holds; RecordError for no YAML, or a character of `unseen`."""
    nodes, failure = _composed(text)
    try:
        if failure is not None:
            raise failure
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problem = error.problem or error.context
        raise RecordError(f"not readable as YAML: {problem}", source=source, line=line) from None
    except yaml.reader.ReaderError as error:
        problem = f"not readable as YAML: the character #x{error.character:04x} is not allowed"
        line = text.count("\n", 0, error.position) + 1
        raise RecordError(problem, source=source, line=line) from None
    except (ValueError, OverflowError):  # PyYAML's own: "\UFFFFFFFF", a version of 5,000 digits
        problem = "not readable as YAML: a number in it is too large"
        raise RecordError(problem, source=source) from None
    if not nodes:
        raise RecordError("the file is empty", source=source)
    node = nodes[0]
    value = Node(node=node, source=source, key=None)
    scalars = (inner for inner in _nodes(node) if isinstance(inner, yaml.ScalarNode))
    if any(unseen(scalar.value, but=_BREAKS) for scalar in scalars):
        where = next(text for text in _texts(value) if unseen(text.node.value, but=_BREAKS))
        raise where.error(refused_character(where.node.value, but=_BREAKS))
    return value


@lru_cache(maxsize=2)  # a plan and its profile are asked for lines again and again
def _composed(text: str) -> tuple[tuple[yaml.Node, ...] | None, Exception | None]:
    """The documents, None where they cannot be read; and why they are no record, if so."""
    found, strays = list[yaml.Node](), list[ComposerError]()
    try:
        loader = _StrictLoader(text)
        strays = loader.strays
        while loader.check_node():
            loader.num_nodes += _OF_A_DOCUMENT
            if found:
                problem = "but found another document"
                strays.append(ComposerError(problem=problem, problem_mark=loader.get_mark()))
            node = loader.get_node()
            assert node is not None
            found.append(node)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        return None, strays[0] if strays else error
    return tuple(found), strays[0] if strays else None


def documents(text: str) -> tuple[yaml.Node, ...] | None:
    """The documents of whosever YAML it is, with aliases and tags; None where it cannot be read."""
    return _composed(text)[0]


def parsed_json(
    text: str | bytes, source: str | None, *, most: int = _MAX_JSON, **hooks: Any
) -> Any:
    """Parse a JSON text of at most so many keys and values; RecordError where it is none."""
    try:
        if isinstance(text, bytes):
            text = text.decode()
        if sum(map(text.count, ",[{:")) > most:
            raise ValueError(f"more than {most} keys and values")
        return json.loads(text, **hooks)
    except UnicodeDecodeError:
        problem, line = "not UTF-8 text", None
    except json.JSONDecodeError as error:
        problem, line = error.msg, error.lineno
    except RecursionError:
        problem, line = "nested too deeply", None
    except ValueError as error:
        is_long = "integer string conversion" in str(error)
        problem, line = "a number is too long" if is_long else str(error), None
    raise RecordError(f"not readable as JSON: {problem}", source=source, line=line) from None


def parsed_toml(text: str, source: str) -> dict[str, Any]:
    """Parse a TOML text of keys of few parts; RecordError where it is none."""
    problem, depth, parts, num_nodes = "", 0, 0, 0
    for token in _TOML.finditer(text):
        kind, found = token.lastgroup, token[0]
        depth += (found in ("[", "{")) - (found in ("]", "}"))
        parts = parts + (kind == "part") if kind in ("part", "dot", "space") else 0
        num_nodes += kind == "part" or found in ("[", "{")
        if max(depth, parts) > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
        elif num_nodes > _MAX_TOML:
            problem = f"more than {_MAX_TOML} keys and values"
        if problem:
            break
    try:
        if not problem:
            return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = str(error)
    except RecursionError:
        problem = "nested too deeply"
    except ValueError:  # an integer of thousands of digits
        problem = "a number is too long"
    raise RecordError(f"not readable as TOML: {problem}", source=source)


_TOML = re.compile(
    r'''(?P<long>"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?|\'{3}(?:[^']|'(?!\'\'))*+(?:\'{3})?)'''
    r"""|(?P<part>"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|[A-Za-z0-9_-]++)|(?P<dot>\.)"""
    r"""|(?P<space>[ \t]++)|(?P<note>\#[^\n]*+)|(?P<other>.)""",
    re.DOTALL,
)


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """The node and all in it, keys included."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        if isinstance(found, yaml.SequenceNode):
            waiting += found.value
        elif isinstance(found, yaml.MappingNode):
            for pair in found.value:
                waiting += pair


def _texts(value: Node) -> Iterator[Node]:
    """The keys and single values in here, in the file's order, with their places."""
    if isinstance(value.node, yaml.ScalarNode):
        yield value
    elif isinstance(value.node, yaml.MappingNode):
        for key, node in value.node.value:
            name = cut(str(key.value)) if isinstance(key, yaml.ScalarNode) else "?"
            path = name if value.key is None else f"{value.key}.{name}"
            yield from _texts(replace(value, node=key))
            yield from _texts(replace(value, node=node, key=path))
    else:
        for entry in value.sequence():
            yield from _texts(entry)


def unseen(text: str, *, but: str = "") -> str | None:
    """The first character that people would not see, or that moves what they see, if there is one.

    Control characters, surrogates, marks of direction, joiners and others of no width, separators
    of lines and paragraphs, and what Unicode says is no character. `but` are exceptions.
    """
    if text.isascii() and text.isprintable():  # nearly always, and quick
        return None
    for character in text:
        number = ord(character)
        if character not in but and (
            unicodedata.category(character) in _UNSEEN
            or _IGNORABLE.fullmatch(character)
            or number & 0xFFFE == 0xFFFE
            or 0xFDD0 <= number <= 0xFDEF
        ):
            return character
    return None


_BREAKS = "\t\n"
"""Characters that a text of several lines may have."""
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
"""Characters that may be shown as nothing (Unicode's Default_Ignorable_Code_Point), some letters;
and the Braille pattern without dots."""


def as_seen(text: str) -> str:
    """The text as people see it, without capitals."""
    return text.lower() if text.isascii() else _IGNORABLE.sub("", text).casefold()


def refused_character(text: str, *, but: str = "") -> str:
    """Say what is wrong with a text that has a character which would not be seen."""
    character = unseen(text, but=but)
    assert character is not None
    at = text.index(character)
    shown = cut(text[max(0, at - MAX_SHOWN // 2) :])
    return f"the character U+{ord(character):04X} is not allowed, in {shown!r}"


def number_text(number: float) -> str:
    """The shorter of 13400000000.0 and 1.34e+10 that YAML 1.1 reads back exactly."""
    plain = repr(float(number))  # an int is at home in a float field
    if not math.isfinite(number):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[plain]
    mantissa, exponent = f"{Decimal(plain).normalize():e}".split("e")
    scientific = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
    return plain if "e" not in plain and len(plain) <= len(scientific) else scientific


def listed(words: Iterable[str], last: str) -> str:
    """The words as an enumeration: `keep, recompute or swap`."""
    *most, final = words
    return f"{', '.join(most)} {last} {final}" if most else final


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """A fix that names the choice closest to `word`, by the whole or by its first word."""
    whole = {choice: choice for choice in choices}
    if len(word) > MAX_SHOWN or len(whole) > _MAX_CHOICES:  # takes long, and says little
        return None
    first = {choice.split()[0]: choice for choice in reversed(list(whole)) if choice.split()}
    for candidates in (whole, first):
        if close := difflib.get_close_matches(word, candidates, n=1):
            return f"did you mean {cut(candidates[close[0]])!r}?"
    return None


def _meant(node: yaml.Node) -> float | None:
    """The number that a text such as 1e9 or '12' means, or a float where an integer should be."""
    if node.tag not in (_STR, _FLOAT):
        return None
    try:
        number = float(node.value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
