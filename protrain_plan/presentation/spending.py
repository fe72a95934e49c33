"""What speeds mean for a bill (`planning/questions/spending.py`), as columns and as keys."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from protrain_plan.planning.questions.spending import Spending


class Column(NamedTuple):
    """A column that `--columns` names: its head, its key in JSON, its value, the value as text.

    `words` say below the table what it is.
    """

    head: str
    key: str
    value: "Callable[[Spending], float | None]"
    text: Callable[[float], str]
    words: str


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


COLUMNS = {
    "mfu": Column(
        "MFU",
        "model_flops_utilisation",
        lambda one: one.mfu,
        "{:.1%}".format,
        "FLOPs of forward and backward, without recomputation, over the device's peak rate",
    ),
    "hours": Column(
        "hours",
        "hours_per_billion_tokens",
        lambda one: one.hours,
        _amount,
        "of a billion tokens",
    ),
    "cost": Column(
        "cost",
        "cost_per_billion_tokens",
        lambda one: one.cost,
        _amount,
        "of a billion tokens, all devices together",
    ),
    "energy": Column(
        "kWh",
        "kwh_per_billion_tokens",
        lambda one: one.energy_kwh,
        _amount,
        "of a billion tokens, the boards of all devices at the most that they take",
    ),
}
"""By the names that `--columns` takes."""


def spending_json(found: "Spending | None") -> dict[str, float | None]:
    """All of it; what is not known is null."""
    return {
        column.key: None if found is None else column.value(found) for column in COLUMNS.values()
    }


def spending_cells(found: "Spending | None", columns: Sequence[str]) -> list[str]:
    """The texts of these columns; `-` for what is not known, or of what does not fit."""
    values = [COLUMNS[name].value(found) if found else None for name in columns]
    return [
        "-" if value is None else COLUMNS[name].text(value)
        for name, value in zip(columns, values, strict=True)
    ]


def heads_of(columns: Sequence[str]) -> list[str]:
    """What stands above the columns."""
    return [COLUMNS[name].head for name in columns]


def in_words(columns: Sequence[str]) -> list[str]:
    """What the columns are, a line each."""
    return [f"{COLUMNS[name].head}: {COLUMNS[name].words}" for name in columns]
