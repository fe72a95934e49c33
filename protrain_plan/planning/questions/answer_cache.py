"""Cached answers: questions of `plan` and `fit` are planned once.

[Note: what is kept] Answers as JSON by their types, without their questions. Planning is
deterministic: an answer by the same name would be found again. If a time limit or Ctrl-C ended the
search, the answer depends on the machine and is not cached.

`cache` says what the names contain, and whose files are trusted.
"""

from contextlib import suppress
from dataclasses import replace

from protrain_plan.cache import Kept, dumped, loaded
from protrain_plan.planning.questions.answers import Answer, Question
from protrain_runtime.contract.errors import RecordError


class AnswerCache(Kept):
    """Answers by question and by `asked`: the objective and the effort, as texts."""

    name = "answers"
    libraries = ("highspy", "pulp")

    def answer(self, question: Question, *asked: object) -> Answer | None:
        """A cached answer; None if unknown."""
        text = self._read(_named(question, asked))
        with suppress(RecordError):  # not written by us
            return None if text is None else loaded(Answer, text, question=lambda _: question)
        return None

    def keep(self, found: Answer, *asked: object) -> None:
        known = found.solved and replace(found.solved, kept=True)
        self._write(_named(found.question, asked), dumped(found, question=None, solved=known))

    def number(self, *asked: object) -> int | None:
        text = self._read(repr(asked))
        return int(text) if text and text.isdecimal() else None

    def keep_number(self, found: int, *asked: object) -> None:
        self._write(repr(asked), str(found))


def _named(question: Question, asked: tuple[object, ...]) -> str:
    """Everything that an answer depends on: records' texts have every field, to the last bit."""
    return repr((question, asked))
