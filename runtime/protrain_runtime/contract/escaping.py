"""Names are data: how what a file, a model or an argument says becomes text that is only read.

A name may hold anything: escapes of a terminal, an override of the reading direction, a line break
and a command for the job in whose log it is printed. Every text for people goes through here once,
on its way into its format; what programs read (JSON, paths in annotations) keeps names
as they are, in that format's own escapes.
"""

import re

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
# A command for a CI job at a line's start, after blanks and colours: ::error::
_COMMAND = re.compile(r"^((?:[^\S\n]|\x1b\[[0-9;]*m)*):(?=:)", re.MULTILINE)


def one_line(text: str) -> str:
    r"""The text with an escape for what cannot be seen, as in `repr`: `\x1b`, `\n`, `\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lines(text: str) -> str:
    """The same for a text of several lines, none of which is a command for a CI job."""
    return without_commands("\n".join(map(one_line, text.split("\n"))))


def as_printed(text: str) -> str:
    """Lines with colours, as they are about to be printed, from any source."""
    pieces = _COLOUR.split(text)  # every second one is a colour
    pieces[::2] = ["\n".join(map(one_line, piece.split("\n"))) for piece in pieces[::2]]
    return without_commands("".join(pieces))


def without_commands(text: str) -> str:
    """The lines, none of which begins like a command for a CI job; done last."""
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
