"""The answers of `protrain fit` as one HTML file: a row of bars for each way to train.

Tokens per second stand beside memory, and the reason beside both. The file has no script, and needs
no network.
"""

import html
from collections.abc import Sequence
from functools import partial
from string import Template

from protrain_plan.planning.questions.answers import Alternative, Fit
from protrain_plan.presentation.plans import (
    TIGHT,
    WHOLE_SUMS,
    cell_text,
    gibibytes,
    headroom_of,
    other_results,
    spared_disk,
    ways,
)
from protrain_plan.presentation.profiles import trust
from protrain_plan.presentation.report.page import hash_source, part
from protrain_plan.presentation.spending import heads_of, in_words, spending_cells
from protrain_plan.simulation.wear import wear_lines
from protrain_runtime.contract import __version__
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.units import format_bytes

_BEYOND = 1.6
"""Bars of memory end at this many times the largest budget, so that those below stay readable."""


def fit_page(fits: Sequence[Fit], *, columns: Sequence[str] = ()) -> str:
    """The page: a group of rows for each cell, with the `columns` besides."""
    style = part("page.css") + part("fit.css")
    workload = fits[0].profile.workload
    said = [workload.dtype, f"{workload.precision} precision", fits[0].profile.optimizer.name]
    said += [text for text in (workload.adapter, workload.quantize) if text]
    said += ["compiled blocks"] * bool(workload.compile)
    machines = dict.fromkeys(fit.profile.hardware for fit in fits)
    every = [(fit, way) for fit in fits for way in ways(fit)]
    notes = headroom_of(fits)
    notes += [WHOLE_SUMS] * any(one.adds_shards for fit in fits for one in fit.alternatives)
    notes += [TIGHT] * any(way.is_tight for _, way in every)
    notes += in_words(columns)
    notes += [f"{machine.name}: {trust(machine)}" for machine in machines]
    fastest = max((_rate(fit, way) for fit, way in every), default=0.0)
    needed = [way.peak_bytes.on_device for _, way in every]
    largest = max(fit.question.budgets.device for fit in fits)
    widest = max(largest, min(max(needed), _BEYOND * largest))
    heads = ["", "tokens per second", *heads_of(columns), "memory of one device", "host", "disk"]
    heads.append("what makes up the step, or is missing")
    return _PAGE.substitute(
        policy=f"default-src 'none'; style-src '{hash_source(style)}'; img-src data:",
        style=style,
        title=_text(f"{workload.model}: does it fit?"),
        workload=_text(", ".join(said)),
        heads="".join(f'<th scope="col">{_text(head)}</th>' for head in heads),
        cells="\n".join(
            _cell_rows(fit, heads, columns, fastest=fastest, widest=widest) for fit in fits
        ),
        notes="".join(f"<p>{_text(note)}</p>" for note in notes),
        program=f"protrain-plan {__version__}",
    )


_cell = partial(cell_text, after=", ")


def _text(text: str) -> str:
    return html.escape(one_line(text))


def _rate(fit: Fit, way: Alternative) -> float:
    return fit.tokens_per_step / way.step_seconds if way.step_seconds else 0.0


def _cell_rows(
    fit: Fit,
    heads: Sequence[str],
    columns: Sequence[str],
    *,
    fastest: float,
    widest: float,
) -> str:
    """A cell's heading and its rows; bars are shares of the `fastest` and of the `widest`."""
    limit = fit.question.budgets.device
    has = f'<span class="muted">{format_bytes(limit)} of a device</span>'
    heading = f'<th colspan="{len(heads)}" scope="rowgroup">{_text(_cell(fit))} {has}</th>'
    rows = [f'<tr class="cell">{heading}</tr>']
    for way in ways(fit):
        rate, size = _rate(fit, way), way.peak_bytes.on_device
        kind, why = "other", [way.binds]
        if way.name == "plan":
            kind = "plan"
            if fit.solved is not None:
                plan = fit.solved.plan
                why += other_results(plan) + wear_lines(plan, fit.profile) + spared_disk(fit.solved)
        held = [("made", min(size, limit) / widest), ("over", min(size, widest) / widest)]
        fits = way.step_seconds is not None
        told, (device, *below) = (
            f"{rate:,.0f}" if fits else "does not fit",
            gibibytes(way.peak_bytes),
        )
        cells = [
            told + _bar([("made", rate / fastest)] if fits else []),
            *spending_cells(fit.spending(way.step_seconds), columns),
            device + _bar(held, mark=limit / widest if size else None),
            *below,
            "<br>".join(_text("lacks " * (not fits) + line) for line in why),
        ]
        values = "".join(
            f'<td data-head="{_text(head)}">{cell}</td>'
            for head, cell in zip(heads[1:], cells, strict=True)
        )
        name = way.name + ", sums in shards" * way.adds_shards
        name = _text(name + ", checkpointed" * way.checkpointing + ", tight" * way.is_tight)
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


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><div><h1>$title</h1><p class="muted">$workload</p></div></header>
<main>
<section><table class="fits">
<thead><tr>$heads</tr></thead>
$cells
</table>
<p class="muted hint">All bars of a column have one scale. The upright line is what may be used of
the device; what is beyond it does not fit, and the longest bars are cut.</p></section>
<section class="muted">$notes<p>All figures are predictions: $program.</p></section>
</main>
</body>
</html>
""")
