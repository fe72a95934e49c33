"""Answers that were found before: what `plan` and `fit` ask is planned once.

[Note: what is kept] Answers as JSON by their types, without their questions. Planning is
deterministic, so that an answer by the same name is the one that would be found again. Where a time
limit or Ctrl-C ended the search, it depends on the machine, and is not kept.

`kept` says what the names hold, and who is believed.
"""

from contextlib import suppress
from dataclasses import replace

from protrain_plan.cache import Kept, dumped, loaded
from protrain_plan.planning.questions.answers import Answer, Question
from protrain_runtime.contract.errors import RecordError


class AnswerCache(Kept):
    """Answers by questions, and by what else is `asked`: the objective and the effort, as texts."""

    def __init__(self, *, off: bool = False) -> None:
        super().__init__("answers", ("highspy", "pulp"), off=off)

    def answer(self, question: Question, *asked: object) -> Answer | None:
        """Return an answer, None where it is not known."""
        text = self._read(_named(question, asked))
        with suppress(RecordError):  # written by another hand
            return None if text is None else loaded(Answer, text, question=lambda _: question)
        return None

    def keep(self, found: Answer, *asked: object) -> None:
        """Keep an answer."""
        known = found.solved and replace(found.solved, kept=True)
        self._write(_named(found.question, asked), dumped(found, question=None, solved=known))

    def number(self, *asked: object) -> int | None:
        """Return the number that was found before."""
        text = self._read(repr(asked))
        return int(text) if text and text.isdecimal() else None

    def keep_number(self, found: int, *asked: object) -> None:
        """Keep a number."""
        self._write(repr(asked), str(found))


def _named(question: Question, asked: tuple[object, ...]) -> str:
    """All that an answer depends on: the texts of records have every field, to the last bit."""
    return repr((question, asked))
