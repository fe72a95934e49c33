"""Cost and energy of speeds (`planning/questions/spending.py`), as columns and as keys."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from protrain_plan.planning.questions.spending import Spending


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


class Column(NamedTuple):
    """A column that `--columns` names: its head, its key in JSON, the field of `Spending`.

    `words` say below the table what it is.
    """

    head: str
    key: str
    field: str
    words: str
    text: Callable[[float], str] = _amount


COLUMNS = {
    "mfu": Column(
        "MFU",
        "model_flops_utilisation",
        "mfu",
        "FLOPs of forward and backward, without recomputation, over the device's peak rate",
        "{:.1%}".format,
    ),
    "hours": Column("hours", "hours_per_billion_tokens", "hours", "of a billion tokens"),
    "cost": Column(
        "cost", "cost_per_billion_tokens", "cost", "of a billion tokens, all devices together"
    ),
    "energy": Column(
        "kWh",
        "kwh_per_billion_tokens",
        "energy_kwh",
        "of a billion tokens, the boards of all devices at the most that they take",
    ),
}
"""By the names that `--columns` takes."""


def spending_json(found: "Spending | None") -> dict[str, float | None]:
    """Return all of it; what is not known is null."""
    return {column.key: getattr(found, column.field, None) for column in COLUMNS.values()}


def spending_cells(found: "Spending | None", columns: Sequence[str]) -> list[str]:
    """Return the texts of these columns; `-` for what is not known."""
    cells: list[str] = []
    for column in (COLUMNS[name] for name in columns):
        value = getattr(found, column.field, None)
        cells.append("-" if value is None else column.text(value))
    return cells


def heads_of(columns: Sequence[str]) -> list[str]:
    """Return the heads of the columns."""
    return [COLUMNS[name].head for name in columns]


def in_words(columns: Sequence[str]) -> list[str]:
    """Say what the columns are, a line each."""
    return [f"{COLUMNS[name].head}: {COLUMNS[name].words}" for name in columns]
