"""A difference of plans as text, as Markdown for a pull request, and as plain data."""

from collections.abc import Iterable
from itertools import takewhile

from rich.console import Group, RenderableType

from protrain_plan.checking.diffing import PlanDiff, in_words
from protrain_plan.presentation.terminal import Text, table_of
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.escaping import in_code, in_code_block

ABSENT = "(not there)"
_DATA = {"layers": (0,), "given": (1, 2)}
"""Columns that are data, by a table's first head; the others are words and numbers of ours."""

Row = tuple[str, ...]


def diff_text(diff: PlanDiff) -> RenderableType:
    """Return what `protrain diff` prints.

    A common beginning of all units' names is left out: `base_model.model.` of adapters' models. Two
    parts of each name stay, as in layers.0, which `protrain plan --pin` takes, too.
    """
    heads = [change.units.split(".")[:-2] for change in diff.decisions]
    columns = zip(*heads, strict=False)  # as far as the shortest goes
    shared = takewhile(lambda parts: len(set(parts)) == 1, columns)
    parts: list[RenderableType] = [Text(in_words(diff))]
    for head, rows in _tables(diff, prefix="".join(f"{part}." for part, *_ in shared)):
        table = table_of(*head, words=range(len(head)))
        for row in rows:
            table.add_row(*map(Text, row))
        parts += ["", table]
    return Group(*parts)


def diff_markdown(diff: PlanDiff, *, title: str) -> str:
    """Return what `protrain diff --format markdown` prints: a comment for a pull request.

    Text from plans is formatted as code, so that it contains no mentions or links.
    """
    lines = [_heading(title), "", in_words(diff)]
    for head, rows in _tables(diff):
        data = _DATA.get(head[0], ())
        lines += ["", _row(head), _row(("---",) * len(head))]
        for row in rows:
            cells = (in_code(one) if at in data else one for at, one in enumerate(row))
            lines.append(_row(cells))
    return "\n".join(lines)


def error_markdown(error: ProtrainError, *, title: str) -> str:
    """Return the Markdown for a plan that cannot be read."""
    return f"{_heading(title)}\n\nIt cannot be compared:\n\n{in_code_block(str(error))}"


def _heading(title: str) -> str:
    return f"### Memory plan {in_code(title)}"


def _tables(diff: PlanDiff, *, prefix: str = "") -> list[tuple[Row, list[Row]]]:
    amounts = [(a.name, a.text(a.before), a.text(a.after), a.change) for a in diff.amounts]
    tables: dict[Row, list[Row]] = {
        ("predicted", "before", "after", "change"): [*amounts],
        ("layers", "before", "after"): [
            (change.units.removeprefix(prefix), change.before or ABSENT, change.after or ABSENT)
            for change in diff.decisions
        ],
        ("given", "before", "after"): [(one.name, one.before, one.after) for one in diff.facts],
    }
    return [(head, rows) for head, rows in tables.items() if rows]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
