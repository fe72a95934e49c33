"""What is printed where no plan fits."""

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from protrain_plan.rendering.tables import table_of
from protrain_plan.units import format_bytes

if TYPE_CHECKING:
    from protrain_plan.planning.outcome import Infeasible


def infeasible_json(answer: "Infeasible") -> dict[str, Any]:
    """What `protrain plan --json` prints where no plan fits."""
    return {
        "status": "infeasible",
        "tier": answer.tier,
        "slot": answer.slot,
        "occupants": dict(answer.occupants),
        "budget_bytes": answer.budget_bytes,
        "shortfall_bytes": answer.shortfall_bytes,
        "smallest_budget_bytes": answer.smallest_budget_bytes,
        "proven_budget_bytes": answer.proven_budget_bytes,
        "largest_batch_size": answer.largest_batch_size,
        "largest_seq_len": answer.largest_seq_len,
        "advice": list(answer.advice),
    }


def infeasible_text(answer: "Infeasible") -> RenderableType:
    """What `protrain plan` prints where no plan fits."""
    head = Text(
        f"no plan fits: {format_bytes(answer.shortfall_bytes)} more {answer.tier} memory is needed"
        f" than the {format_bytes(answer.budget_bytes)} of the budget"
    )
    table = table_of(answer.slot, "bytes")
    for kind, size in answer.occupants:
        table.add_row(kind, format_bytes(size))
    advice = [Text(f"- {line}") for line in (*answer.advice, *_sizes_that_fit(answer))]
    return Group(head, "", table, "", *advice)


def _sizes_that_fit(answer: "Infeasible") -> list[str]:
    if answer.largest_batch_size is None and answer.largest_seq_len is None:
        return ["no batch size and no sequence length fits"]
    lines: list[str] = []
    if answer.largest_batch_size is not None:
        lines.append(f"the largest batch that fits is {answer.largest_batch_size}")
    if answer.largest_seq_len is not None:
        lines.append(f"the longest sequence that fits is {answer.largest_seq_len} tokens")
    return [f"{line} (if bytes grow in proportion)" for line in lines]
