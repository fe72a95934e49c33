"""Names are data: text from a file, a model or an argument is escaped for display.

A name may contain anything: terminal escapes, bidirectional overrides, a line break and a command
for the CI job that logs it. Every text for people passes here once; formats for programs (JSON,
paths in annotations) keep names, in the format's own escapes.
"""

import re

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
# A command for a CI job at a line's start, after blanks and colours: ::error::
_COMMAND = re.compile(r"^((?:[^\S\n]|\x1b\[[0-9;]*m)*):(?=:)", re.MULTILINE)


def one_line(text: str) -> str:
    r"""The text with invisible characters escaped as in `repr`: `\x1b`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lines(text: str) -> str:
    """`one_line` for several lines, without commands for a CI job."""
    return without_commands("\n".join(map(one_line, text.split("\n"))))


def as_printed(text: str) -> str:
    """Lines with colours, ready to print, from any source."""
    pieces = _COLOUR.split(text)  # odd ones are colours
    pieces[::2] = ["\n".join(map(one_line, piece.split("\n"))) for piece in pieces[::2]]
    return without_commands("".join(pieces))


def without_commands(text: str) -> str:
    """The lines, with commands for a CI job defused; done last."""
    return _COMMAND.sub(r"\1\\x3a", text)


def in_code(text: str) -> str:
    r"""A code span of Markdown, which no text can end, also in a cell of a table.

    A vertical bar is shown as `\x7c`: after a backslash, readers disagree whether it ends the cell.
    """
    shown = one_line(text).replace("|", r"\x7c") or " "
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    # One blank at both ends is no part of a span.
    ends = {shown[0], shown[-1]}
    space = " " if "`" in ends or (ends == {" "} and shown.strip()) else ""
    return f"{fence}{space}{shown}{space}{fence}"


def in_code_block(text: str) -> str:
    """A block of code of Markdown: every line is indented, so that none can end it."""
    return "".join(f"    {line}\n" for line in lines(text).split("\n"))
