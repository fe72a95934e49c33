"""The answers of `protrain fit` as one HTML file: a chart of tokens per second against memory.

The chart is drawn here, once: the file has no script, and needs no network.
"""

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files
from math import ceil, floor, log10
from string import Template
from typing import NamedTuple

from protrain_plan.planning.questions.answers import Fit
from protrain_plan.presentation.plans import (
    TIGHT,
    cell_text,
    gibibytes,
    headroom_of,
    other_results,
    spared_disk,
)
from protrain_plan.presentation.profiles import trust
from protrain_plan.presentation.spending import heads_of, in_words, spending_cells
from protrain_plan.simulation.wear import wear_lines
from protrain_runtime.contract import __version__
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.records.plan import TierBytes

_GIB = 2**30
_WIDTH, _HEIGHT = 1000, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 18, 64
_COLOURS = ("states", "gradients", "buffers", "activations", "leaving", "fetched", "update")
"""Variables of the style sheet, by cell."""

_STYLE = """
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--text); font-size: 12px; }
svg .axis { fill: var(--muted); }
svg .grid { stroke: var(--grid); }
svg .limit { stroke-dasharray: 4 4; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
td.plan { font-weight: 650; }
"""


class _Point(NamedTuple):
    """One way to train in one cell; `tokens_per_s` is None where it does not fit."""

    cell: int
    name: str
    is_plan: bool
    tokens_per_s: float | None
    peak: TierBytes | None
    tight: bool


def fit_page(fits: Sequence[Fit], *, columns: Sequence[str] = ()) -> str:
    """The page: the chart, and the table that it was drawn from, with the `columns` besides."""
    style = files("protrain_plan.presentation.report").joinpath("page.css").read_text("utf-8")
    style += _STYLE
    known = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    points = list(_points(fits))
    workload = fits[0].profile.workload
    said = [workload.dtype, f"{workload.precision} precision", fits[0].profile.optimizer.name]
    said += [text for text in (workload.adapter, workload.quantize) if text]
    said += ["compiled blocks"] * bool(workload.compile)
    machines = dict.fromkeys(fit.profile.hardware for fit in fits)
    plans = [(_cell(fit), fit.solved.plan) for fit in fits if fit.solved is not None]
    notes = [f"{cell}: {told}" for cell, plan in plans for told in other_results(plan)]
    notes += [
        f"{_cell(fit)}: {told}"
        for fit in fits
        if fit.solved
        for told in (*wear_lines(fit.solved.plan, fit.profile), *spared_disk(fit.solved))
    ]
    notes += headroom_of(fits)
    notes += [TIGHT] * any(point.tight for point in points)
    notes += in_words(columns)
    notes += [f"{machine.name}: {trust(machine)}" for machine in machines]
    return _PAGE.substitute(
        policy=f"default-src 'none'; style-src 'sha256-{known}'; img-src data:",
        style=style,
        title=_text(f"{workload.model}: does it fit?"),
        workload=_text(", ".join(said)),
        chart=_chart(fits, points),
        heads="".join(f"<th>{_text(head)}</th>" for head in heads_of(columns)),
        rows="\n".join(_row(fits, point, columns) for point in points),
        notes="".join(f"<p>{_text(note)}</p>" for note in notes),
        program=f"protrain-plan {__version__}",
    )


_cell = partial(cell_text, after=", ")


def _text(text: str) -> str:
    return html.escape(one_line(text))


def _points(fits: Sequence[Fit]) -> Iterator[_Point]:
    for cell, fit in enumerate(fits):
        peak = fit.solved.plan.prediction.peak_bytes if fit.solved else None
        yield _Point(cell, "plan", True, fit.tokens_per_s, peak, fit.is_tight)
        for other in fit.alternatives:
            name = other.name + ", checkpointed" * other.checkpointing
            tokens = other.step_seconds and fit.tokens_per_step / other.step_seconds
            yield _Point(cell, name, False, tokens, other.peak_bytes, other.is_tight)


def _row(fits: Sequence[Fit], point: _Point, columns: Sequence[str]) -> str:
    tokens = "does not fit" if point.tokens_per_s is None else f"{point.tokens_per_s:,.0f}"
    fit = fits[point.cell]
    seconds = point.tokens_per_s and fit.tokens_per_step / point.tokens_per_s
    cells = [tokens, *spending_cells(fit.spending(seconds), columns), *gibibytes(point.peak)]
    named = f"<td{' class=plan' * point.is_plan}>{_text(point.name + ', tight' * point.tight)}</td>"
    values = "".join(f"<td>{value}</td>" for value in cells)
    return f"<tr><td>{_text(_cell(fit))}</td>{named}{values}</tr>"


class _Labels:
    """Finds each label a line of its own: below the last one that it would cover."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float]] = []  # from, to, height

    def place(self, left: float, height: float, name: str) -> float:
        """The height of a label that begins at `left`, at `height` or further down."""
        right = left + 6.5 * len(name)

        def covers(line: tuple[float, float, float]) -> bool:
            return line[0] < right and left < line[1] and abs(line[2] - height) < 13

        while any(map(covers, self._taken)):
            height += 13
        self._taken.append((left, right, height))
        return round(height, 1)


def _chart(fits: Sequence[Fit], points: Sequence[_Point]) -> str:
    """Device memory to the right, tokens per second upwards by powers of ten.

    A ring is an alternative, a disc a plan, and a cross on the axis what does not fit. A broken
    line is what a machine has.
    """
    rates = [point.tokens_per_s for point in points if point.tokens_per_s] or [1.0]
    low, high = floor(log10(min(rates))), ceil(log10(max(rates)) + 1e-9)
    needed = [point.peak.on_device for point in points if point.peak]
    limits = [fit.profile.hardware.device.memory_bytes for fit in fits]
    most = 1.05 * max([*needed, *limits]) / _GIB
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(num_bytes: float) -> float:
        return round(_LEFT + (right - _LEFT) * num_bytes / _GIB / most, 1)

    def y(rate: float) -> float:
        share = (log10(rate) - low) / (high - low)
        return round(bottom - (bottom - _TOP) * share, 1)

    drawn: list[str] = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        said = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        drawn.append(
            f'<text class="axis" x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{said}</text>'
        )
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if most / s <= 12)
    for number in range(0, ceil(most), step):
        at = x(number * _GIB)
        drawn.append(
            f'<text class="axis" x="{at}" y="{bottom + 18}" text-anchor="middle">{number}</text>'
        )
    drawn.append(
        f'<text class="axis" x="{(_LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">'
        "GiB of one device, predicted</text>"
    )
    drawn.append(
        f'<text class="axis" x="{_LEFT}" y="{_TOP - 6}">tokens per second, predicted</text>'
    )
    for cell, fit in enumerate(fits):
        colour = f"var(--{_COLOURS[cell % len(_COLOURS)]})"
        at = x(fit.profile.hardware.device.memory_bytes)
        drawn.append(
            f'<line class="limit" stroke="{colour}" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>'
        )
        name_at = _LEFT + cell % 4 * (right - _LEFT) / 4
        row = _HEIGHT - 14 + 14 * (cell // 4)
        drawn.append(
            f'<circle cx="{name_at + 6}" cy="{row - 4}" r="5" fill="{colour}"/>'
            f'<text x="{name_at + 16}" y="{row}">{_text(_cell(fit))}</text>'
        )
    labels = _Labels()
    for point in points:
        if point.peak is None:
            continue
        colour = f"var(--{_COLOURS[point.cell % len(_COLOURS)]})"
        across, title = x(point.peak.on_device), f"<title>{_text(point.name)}</title>"
        if point.tokens_per_s is None:
            drawn.append(
                f'<g>{title}<path stroke="{colour}" stroke-width="2"'
                f' d="M{across - 4} {bottom - 4}l8 8m0 -8l-8 8"/></g>'
            )
            continue
        up = y(point.tokens_per_s)
        fill = colour if point.is_plan else "none"
        drawn.append(
            f'<g>{title}<circle cx="{across}" cy="{up}" r="{7 if point.is_plan else 5}"'
            f' fill="{fill}" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{across + 10}" y="{labels.place(across + 10, up + 4, point.name)}">'
            f"{_text(point.name)}</text></g>"
        )
    rows = 14 * ((len(fits) - 1) // 4)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + rows}" role="img"'
        f' aria-label="Tokens per second against device memory">{"".join(drawn)}</svg>'
    )


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
<section>$chart
<p class="muted hint">A disc is a plan, a ring what it is without a planner, a cross what does not
fit; a broken line is the memory of a machine.</p></section>
<section><table>
<thead><tr><th>machine and batch</th><th></th><th>tokens/s</th>$heads<th>device</th><th>host</th>
<th>disk</th></tr></thead>
<tbody>
$rows
</tbody></table></section>
<section class="muted">$notes<p>All figures are predictions: $program.</p></section>
</main>
</body>
</html>
""")
