"""Answers that were found before: what `plan` and `fit` ask is planned once.

[Note: what is kept] Plans as records, with what is told beside them, as JSON by the types of
answers. What a question has (its profile, the program of its plan) is no part of it. Planning is
deterministic, so that an answer by the same name is the one that would be found again. Where a time
limit or Ctrl-C ended the search, it depends on the machine, and nobody may keep it.

`kept` says what the names hold, and who is believed.
"""

from contextlib import suppress
from typing import Any, TypeVar

from protrain_plan.kept import Kept, dumped, loaded
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.questions.answers import Answer, Fit, Question
from protrain_runtime.contract.errors import RecordError

A = TypeVar("A", Answer, Fit)

_OF_QUESTIONS = {Fit: ("question",), Answer: ("profile", "program")}
"""Fields of answers that are made of their questions."""

_INSTEAD: dict[type, dict[str, object]] = {Solved: {"kept": True}}
"""Fields that are others when an answer is known."""


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
        text = dumped(found, left_out=_OF_QUESTIONS, instead=_INSTEAD)
        self._write(_named(type(found), question, asked), text)

    def number(self, *asked: object) -> int | None:
        """Return the number that was found before."""
        text = self._read(repr(asked))
        return int(text) if text and text.isdecimal() else None

    def keep_number(self, found: int, *asked: object) -> None:
        """Let a number be known."""
        self._write(repr(asked), str(found))

    def _found(self, kind: type[A], given: Any, question: Question, asked: Any) -> A | None:
        text = self._read(_named(kind, question, asked))
        with suppress(RecordError):  # written by another hand
            return None if text is None else loaded(kind, text, **given)
        return None


def _named(kind: type, question: Question, asked: tuple[object, ...]) -> str:
    """All that an answer depends on: the texts of records have every field, to the last bit."""
    return repr((kind.__name__, question, asked))
