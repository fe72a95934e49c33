"""Messages of the program in one catalogue: tests/golden/messages.json.

A test asks `assert_says(error)`, or `assert_says.refused(call)`, and its words are looked up by the
test's file and name; where it asks several times, in that order. `pytest --write-golden FILES`
writes down what is said today: a change of wording is that command, and one file to review. What a
test promises apart from words, an error's type, its key, whether it says what to do, the test
asserts itself.
"""

import fcntl
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from protrain_runtime.contract.errors import ProtrainError

CATALOGUE = Path(__file__).parents[1] / "golden/messages.json"

Said = str | list["Said"]
"""A message, or several."""

Messages = dict[str, dict[str, list[Said]]]
"""By file and test, what is said, in the order of the questions."""


def words(what: object, places: Mapping[str, str]) -> Said:
    """The message, with the places of this run (folders) by their names; an error's type first."""
    if isinstance(what, BaseException):
        return words(f"{type(what).__name__}: {what}", places)
    if isinstance(what, str):
        for place, name in places.items():
            what = what.replace(place, name)
        return what
    assert isinstance(what, Sequence), f"neither a message nor several: {what!r}"
    return [words(each, places) for each in what]


@cache
def catalogue() -> Messages:
    found: Messages = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return found


def write(file: str, test: str, said: list[Said]) -> None:
    """Put a test's messages into the catalogue; other workers write there, too."""
    with CATALOGUE.open("r+", encoding="utf-8") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        found: Messages = json.load(opened)
        found.setdefault(file, {})[test] = said
        text = text_of(found)
        opened.seek(0)
        opened.write(text)
        opened.truncate()


def text_of(messages: Messages) -> str:
    """The catalogue's JSON: a message is a line, with its test's name where it is the only one."""

    def line(test: str, said: list[Said]) -> str:
        text = json.dumps(said[0]) if len(said) == 1 else json.dumps(said, indent=3)
        return f"  {json.dumps(test)}: " + (f"[{text}]" if len(said) == 1 else text)

    files = (
        f" {json.dumps(file)}: {{\n"
        + ",\n".join(line(test, said) for test, said in sorted(tests.items()))
        + "\n }"
        for file, tests in sorted(messages.items())
    )
    return "{\n" + ",\n".join(files) + "\n}\n"


class Speaker:
    """A test's questions to the catalogue."""

    def __init__(self, file: str, test: str, places: Mapping[str, str], *, writes: bool) -> None:
        self._file, self._test, self._places, self._writes = file, test, places, writes
        self._said: list[Said] = []

    def __call__(self, what: object) -> None:
        said = words(what, self._places)
        number = len(self._said)
        self._said.append(said)
        if not self._writes:
            expected = catalogue().get(self._file, {}).get(self._test, [])
            assert number < len(expected), f"not in the catalogue (--write-golden): {said}"
            assert said == expected[number]

    def refused(self, call: Callable[..., object], *args: Any, **options: Any) -> ProtrainError:
        """The error that a call ends with, whose words are looked up."""
        with pytest.raises(ProtrainError) as caught:
            call(*args, **options)
        self(caught.value)
        return caught.value

    def end(self) -> None:
        if self._writes and self._said:
            write(self._file, self._test, self._said)
