"""Answers that were found before: what `plan` and `fit` ask is planned once.

[Note: what is kept] Plans as records, with what is told beside them, as JSON by the types of
answers. What a question has (its profile, the program of its plan) is no part of it. Planning is
deterministic, so that an answer by the same name is the one that would be found again. Where a time
limit or Ctrl-C ended the search, it depends on the machine, and nobody may keep it.

`kept` says what the names hold, and who is believed.
"""

import json
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from protrain_plan.kept import Kept
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.answers import Answer, Fit, Question
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records.decisions import ACTIVATIONS, STATES, WORDINGS
from protrain_runtime.contract.records.plan import Activations, Placement, Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.reader import loads
from protrain_runtime.contract.records.tree import parsed_json
from protrain_runtime.contract.records.writer import dumps

A = TypeVar("A", Answer, Fit)

_OF_QUESTIONS = {Fit: ("question",), Answer: ("profile", "program")}
"""Fields of answers that are made of their questions."""

_WRONG = (RecordError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of `_value` where data are not of its type."""


class AnswerCache(Kept):
    """Answers by questions, and by what else is `asked`: the objective and the effort, as texts."""

    def __init__(self, *, off: bool = False) -> None:
        super().__init__("answers", ("highspy", "pulp"), off=off)

    def fit(self, question: Question, *asked: object) -> Fit | None:
        """Return the answer of `objectives.fit`, None where it is not known."""
        return self._found(Fit, {"question": question}, question, asked)

    def answer(self, question: Question, *asked: object) -> Answer | None:
        """Return the answer of `objectives.ask`, without what is made of the question."""
        return self._found(Answer, {"profile": question.profile}, question, asked)

    def keep(self, found: Fit | Answer, question: Question, *asked: object) -> None:
        """Let an answer be known."""
        self._write(_named(type(found), question, asked), json.dumps(_data(found)))

    def number(self, *asked: object) -> int | None:
        """Return the number that was found before."""
        text = self._read(repr(asked))
        return int(text) if text and text.isdecimal() else None

    def keep_number(self, found: int, *asked: object) -> None:
        """Let a number be known."""
        self._write(repr(asked), str(found))

    def _found(self, kind: type[A], given: Any, question: Question, asked: Any) -> A | None:
        text = self._read(_named(kind, question, asked))
        try:
            return None if text is None else kind(**_fields(kind, parsed_json(text, None)), **given)
        except _WRONG:
            return None  # written by another hand


def _named(kind: type, question: Question, asked: tuple[object, ...]) -> str:
    """All that an answer depends on: the texts of records have every field, to the last bit."""
    return repr((kind.__name__, question, asked))


def _data(value: Any) -> Any:
    """Return a value as JSON has it; a plan or a profile as the text of its file."""
    if isinstance(value, Plan | Profile):
        return dumps(value)
    if isinstance(value, get_args(Activations) + get_args(Placement)):
        return WORDINGS[value].phrase
    if is_dataclass(value):
        left_out = _OF_QUESTIONS.get(type(value), ())
        names = [f.name for f in fields(value) if f.name not in left_out]
        known = {"kept": True} if isinstance(value, Solved) else {}
        return {name: _data(getattr(value, name)) for name in names} | known
    return [_data(item) for item in value] if isinstance(value, tuple) else value


def _fields(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: _value(hints[name], item) for name, item in data.items()}


def _value(hint: Any, data: Any) -> Any:
    """Read a value of a type; an error of `_WRONG` where it is of another."""
    if hint in (Plan, Profile):
        return loads(hint, data)
    if hint == Activations:
        return ACTIVATIONS[data]
    if hint == Placement:
        return STATES[data]
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        items = kinds[:1] * len(data) if kinds[-1] is Ellipsis else kinds
        return tuple(_value(kind, item) for kind, item in zip(items, data, strict=True))
    if get_origin(hint) is Literal:
        return kinds[kinds.index(data)]
    for kind in kinds:  # one of several types
        with suppress(*_WRONG):
            return _value(kind, data)
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(**_fields(hint, data))
    if type(data) is hint or (hint is float and type(data) is int):
        return data
    raise TypeError
