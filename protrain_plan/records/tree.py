"""Text -> YAML nodes, read strictly: nothing is guessed, and every value knows where it stands.

PyYAML follows YAML 1.1, where `12:30` is an integer, `no` is false, `1e9` is a text and the second
of two equal keys wins. Here nodes are never turned into Python objects by what they look like:
the reader asks each one for what the record needs, and what it finds instead is an error.
"""

import difflib
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal

import yaml
from yaml.composer import ComposerError

from protrain_plan.errors import RecordError

_MAP, _SEQ, _STR, _INT, _FLOAT, _BOOL, _NULL = (
    f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null")
)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader up to nodes, without aliases and tags, which no record needs.

    Plain scalars are resolved as in YAML 1.1, so that what other programs would read as something
    else is not taken for a text, with two exceptions: there are no dates and no base 60.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML fills it through the class)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        assert isinstance(event.start_mark, yaml.Mark)
        if isinstance(event, yaml.AliasEvent):
            raise ComposerError(problem="aliases are not allowed", problem_mark=event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise ComposerError(problem="tags are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


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
_MAX_SHOWN = 60
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A YAML node, with the file and the key path (such as `units[3].name`) where it stands."""

    node: yaml.Node
    source: str | None
    key: str | None

    def error(self, problem: str, fix: str | None = None) -> RecordError:
        """An error about this value."""
        line = self.node.start_mark.line + 1
        return RecordError(problem, source=self.source, line=line, key=self.key, fix=fix)

    def expected(self, what: str, fix: str | None = None) -> RecordError:
        """An error that says what was expected here, and what was found."""
        return self.error(f"expected {what}, got {self._described()}", fix)

    def _described(self) -> str:
        value = self.node.value
        if isinstance(value, str) and len(value) > _MAX_SHOWN:
            value = value[: _MAX_SHOWN - 3] + "..."
        return _DESCRIPTIONS.get(self.node.tag, "{}").format(value)

    def mapping(self, known: Collection[str], optional: Collection[str] = ()) -> "dict[str, Value]":
        """The values of a mapping by key: all the `known` keys, only those, each once."""
        values = self.any_mapping()
        for key, value in values.items():
            if key not in known:
                unknown = Value(node=value.node, source=self.source, key=self.key)
                raise unknown.error(
                    f"unknown key {key!r}",
                    did_you_mean(key, known) or f"the keys are {listed(known, 'and')}",
                )
        for key in known:
            if key not in values and key not in optional:
                raise self.error(f"missing key {key!r}")
        return values

    def any_mapping(self) -> "dict[str, Value]":
        """The values of a mapping by key, whatever the keys, each once."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.expected("a mapping")
        values: dict[str, Value] = {}
        for key_node, node in self.node.value:
            where = Value(node=key_node, source=self.source, key=self.key)
            if not isinstance(key_node, yaml.ScalarNode):
                raise where.expected("a text as the key")
            key = key_node.value
            if key in values:
                raise where.error(f"the key {key!r} stands here twice", "remove one of them")
            path = key if self.key is None else f"{self.key}.{key}"
            values[key] = Value(node=node, source=self.source, key=path)
        return values

    def sequence(self) -> "list[Value]":
        """The items of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.expected("a list")
        return [
            Value(node=node, source=self.source, key=f"{self.key}[{i}]")
            for i, node in enumerate(self.node.value)
        ]

    def is_text(self) -> bool:
        """Whether this is a text."""
        return self.node.tag == _STR

    def is_integer(self) -> bool:
        """Whether this looks like an integer of YAML 1.1, in any base."""
        return self.node.tag == _INT

    def text(self) -> str:
        """The text."""
        if self.node.tag == _STR:
            return str(self.node.value)
        scalar = isinstance(self.node, yaml.ScalarNode) and self.node.tag != _NULL
        raise self.expected("a text", f"put it in quotes: '{self.node.value}'" if scalar else None)

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
            raise self.expected("a number", self._as_number())
        digits = self.node.value.replace("_", "").lower()
        if "inf" in digits or "nan" in digits or not math.isfinite(float(digits)):
            raise self.expected("a finite number")
        return float(digits)

    def _as_number(self) -> str | None:
        """How to write the number that this text means, if it means one."""
        if (number := _meant(self.node)) is None:
            return None
        return f"write {number_text(number)}"

    def meant_integer(self) -> str | None:
        """How to write the integer that this text means, if it means one."""
        number = _meant(self.node)
        if number is None or not number.is_integer() or abs(number) > 2**53:
            return None
        return f"write {int(number)}"


def root(text: str, source: str | None) -> Value:
    """The value that a whole file holds; RecordError where the text is not YAML, or empty."""
    try:
        node = yaml.compose(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problem = error.problem or error.context
        raise RecordError(f"not readable as YAML: {problem}", source=source, line=line) from None
    except yaml.reader.ReaderError as error:
        problem = f"not readable as YAML: the character #x{error.character:04x} is not allowed"
        line = text.count("\n", 0, error.position) + 1
        raise RecordError(problem, source=source, line=line) from None
    except RecursionError:
        raise RecordError("not readable as YAML: nested too deeply", source=source) from None
    if node is None:
        raise RecordError("the file is empty", source=source)
    return Value(node=node, source=source, key=None)


def number_text(number: float) -> str:
    """The number as text that YAML 1.1 reads as a float, and that reads back exactly.

    The shorter of 13400000000.0 and 1.34e+10. YAML 1.1 wants the point and the sign.
    """
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
    first = {choice.split()[0]: choice for choice in reversed(list(whole)) if choice.split()}
    for candidates in (whole, first):
        if close := difflib.get_close_matches(word, candidates, n=1):
            return f"did you mean {candidates[close[0]]!r}?"
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
