"""Errors that a user can mend. Our own mistakes are assertions; outcomes are types."""

from typing import ClassVar

from protrain_runtime.contract.escaping import lines, one_line, without_commands

MAX_SHOWN = 60
"""Characters of a text that a message quotes."""


def cut(text: str) -> str:
    """A text as messages quote it, no longer than a line."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


class ProtrainError(Exception):
    """Something that a user can mend: where it is, what is wrong, and how to mend it.

    Renders as

        plans/a.yaml:14: units[3].activations: expected keep or recompute, got 'kep'
          fix: did you mean 'keep'?

    with the parts that are known, and with escapes for what of them cannot be seen. `source` is a
    file, `key` the path of a key inside it. The command line ends with `exit_code`.
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
    """A file that cannot be read as the record it should hold, or that cannot be written."""


class OutOfMemoryError(ProtrainError):
    """Memory of the machine, or of a limit, that was too small."""

    exit_code = 4
