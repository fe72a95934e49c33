"""The answers of `protrain fit` as one HTML file: a row of bars for each way to train.

A row has tokens per second, memory and the reason. The file has no script and needs no network.
"""

import html
from collections.abc import Sequence
from string import Template

from protrain_plan.presentation.grids import (
    COLUMNS,
    Row,
    cell_text,
    gibibytes,
    notes,
    way_name,
    ways,
)
from protrain_plan.presentation.report.page import hash_source, part
from protrain_runtime.contract import __version__
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.units import format_bytes

_BEYOND = 1.6
"""Bars of memory end at this many times the largest budget, so that short ones stay readable."""


def fit_page(rows: Sequence[Row], *, columns: Sequence[str] = ()) -> str:
    """Return the page: a group of rows for each answered cell, with the extra `columns`."""
    title = f"{', '.join(dict.fromkeys(row['model'] for row in rows))}: does it fit?"
    rows = [row for row in rows if "bottleneck" in row]
    style = part("page.css") + part("fit.css")
    said = dict.fromkeys(text for row in rows for text in row["workload"].values() if text)
    every = [way for row in rows for way in ways(row)]
    fastest = max((way["tokens_per_second"] or 0.0 for way in every), default=0.0)
    needed = [way["peak_bytes"].on_device for way in every if way.get("peak_bytes")]
    largest = max((row["budget_bytes"] for row in rows), default=1)
    widest = max(largest, min(max(needed, default=0), _BEYOND * largest))
    bills = [COLUMNS[name].head for name in columns]
    heads = ["", "tokens per second", *bills, "memory of one device", "host", "disk"]
    heads.append("what makes up the step, or is missing")
    return Template(part("head.html") + part("fit.html")).substitute(
        policy=f"default-src 'none'; style-src '{hash_source(style)}'; img-src data:",
        style=style,
        title=_text(title),
        workload=_text(", ".join(said)),
        heads="".join(f'<th scope="col">{_text(head)}</th>' for head in heads),
        cells="\n".join(
            _cell_rows(row, heads, columns, fastest=fastest, widest=widest) for row in rows
        ),
        notes="".join(f"<p>{_text(note)}</p>" for note in notes(rows, columns)),
        program=f"protrain-plan {__version__}",
    )


def _text(text: str) -> str:
    return html.escape(one_line(text))


def _cell_rows(
    row: Row, heads: Sequence[str], columns: Sequence[str], *, fastest: float, widest: float
) -> str:
    """A cell's heading and its rows; bars are shares of the `fastest` and of the `widest`."""
    limit = row["budget_bytes"]
    has = f'<span class="muted">{format_bytes(limit)} of a device</span>'
    name = _text(cell_text(row, after=", "))
    heading = f'<th colspan="{len(heads)}" scope="rowgroup">{name} {has}</th>'
    rows = [f'<tr class="cell">{heading}</tr>']
    for number, way in enumerate(ways(row)):
        rate, peak = way["tokens_per_second"], way.get("peak_bytes")
        size = peak.on_device if peak else 0
        why = [way["bottleneck"], *(row["about"] if number == 0 else ())]
        held = [("made", min(size, limit) / widest), ("over", min(size, widest) / widest)]
        device, *below = gibibytes(peak)
        cells = [
            f"{rate:,.0f}{_bar([('made', rate / fastest)])}" if rate else f"does not fit{_bar([])}",
            *(COLUMNS[name].text(way) for name in columns),
            device + _bar(held, mark=limit / widest if size else None),
            *below,
            "<br>".join(_text("lacks " * (not rate) + line) for line in why),
        ]
        values = "".join(
            f'<td data-head="{_text(head)}">{cell}</td>'
            for head, cell in zip(heads[1:], cells, strict=True)
        )
        name = _text(way_name(way, way["name"], f"{way['name']}, checkpointed"))
        kind = "other" if number else "plan"
        rows.append(f'<tr class="{kind}"><th scope="row">{name}</th>{values}</tr>')
    return f"<tbody>{''.join(rows)}</tbody>"


def _bar(parts: Sequence[tuple[str, float]], *, mark: float | None = None) -> str:
    """A bar of parts, each from the end of the one before to its own share, and a mark."""
    drawn, start = "", 0.0
    for kind, end in parts:
        if end > start:
            drawn += f'<rect class="{kind}" x="{start:.2%}" width="{end - start:.2%}" y="3"/>'
        start = max(start, end)
    if mark is not None:
        drawn += f'<rect class="limit" x="{mark:.2%}"/>'
    return f'<svg class="bar" aria-hidden="true">{drawn}</svg>'
