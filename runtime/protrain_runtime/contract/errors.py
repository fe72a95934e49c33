"""Errors that users can fix. Our own mistakes are assertions; outcomes are types."""

from typing import ClassVar

from protrain_runtime.contract.escaping import lines, one_line, without_commands

MAX_SHOWN = 60
"""Characters of a text quoted in a message."""


def cut(text: str) -> str:
    """A text as quoted in messages, cut to a line."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


class ProtrainError(Exception):
    """An error that a user can fix: place, problem and fix.

    Renders as

        plans/a.yaml:14: units[3].activations: expected keep or recompute, got 'kep'
          fix: did you mean 'keep'?

    with the known parts, and with invisible characters escaped. `source` is a file, `key` a key's
    path in it. The command line ends with `exit_code`.
    """

    exit_code: ClassVar[int] = 2

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        line: int | None = None,
        key: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.source = source
        self.line = line
        self.key = key
        self.fix = fix

    def __str__(self) -> str:
        source = self.source
        if source is not None and self.line is not None:
            source = f"{source}:{self.line}"
        where = [one_line(part) for part in (source, self.key) if part]
        text = ": ".join((*where, lines(self.message)) if self.message else where)
        return without_commands(text if self.fix is None else f"{text}\n  fix: {lines(self.fix)}")


class RecordError(ProtrainError):
    """A file that is not a valid record, or cannot be written."""


class OutOfMemoryError(ProtrainError):
    """The machine's memory, or a limit, was too small."""

    exit_code = 4
