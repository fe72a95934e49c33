"""Text and tables for a terminal, made of data: never markup, and one line for each text.

Everything that is printed for people is made of these; `commands/output.py` prints it, and records
inside plain data as JSON.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import rich.table
import rich.text
from rich.console import RenderableType
from rich.style import Style

from protrain_runtime.contract.escaping import one_line


def fields_of(record: Any, *names: str, but: Collection[str] = ()) -> dict[str, Any]:
    """A record's fields, or its attributes of these `names`, as keys of an answer; none of None."""
    taken = names or [field.name for field in fields(record)] if record is not None else ()
    return {name: getattr(record, name) for name in taken if name not in but}


def plain(data: Any, words: Callable[[str], str] = str) -> Any:
    """Return records as their fields, texts as `words` has them, and infinite numbers as null."""
    match data:
        case str():
            return words(data)
        case dict():
            return {plain(key, words): plain(value, words) for key, value in data.items()}
        case tuple() if hasattr(data, "_asdict"):  # a named one
            return plain(data._asdict(), words)
        case list() | tuple():
            return [plain(value, words) for value in data]
        case float():
            return data if isfinite(data) else None
        case _ if is_dataclass(data):
            return plain(fields_of(data), words)
        case _:
            return data


class Text(rich.text.Text):
    """A line in which what cannot be seen is shown as an escape."""

    def __init__(self, text: str = "", style: str | Style = "", **options: Any) -> None:
        super().__init__(one_line(text), style, **options)

    def append(
        self, text: rich.text.Text | str, style: str | Style | None = None
    ) -> rich.text.Text:
        return super().append(one_line(text) if isinstance(text, str) else text, style)


class Table(rich.table.Table):
    """A table whose heads and cells are such texts."""

    def add_column(
        self, header: RenderableType = "", footer: RenderableType = "", **options: Any
    ) -> None:
        super().add_column(_cell(header), footer, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_cell, cells), **options)


def _cell(content: RenderableType | None) -> Any:
    return Text(content) if isinstance(content, str) else content


def table_of(*columns: str, words: Sequence[int] = (0,)) -> Table:
    """A table without lines; the columns in `words` hold words, the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in words else "right", overflow="fold")
    return table


def wrote(path: Path) -> Text:
    """The file that was written, as it was named; `-` is standard output."""
    return Text("wrote to standard output" if str(path) == "-" else f"wrote {path}")
