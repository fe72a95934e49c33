"""The simulated step on a terminal: `protrain show` draws it, `protrain simulate` sums it up."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult

from protrain_plan.presentation.plans import fastest, other_results, other_steps
from protrain_plan.presentation.report.page import workload_text
from protrain_plan.presentation.report.step import Bar, Step, Wait, bars, memory, waits
from protrain_plan.presentation.terminal import Text, table_of
from protrain_plan.simulation.report import in_words, part_in_words
from protrain_plan.simulation.wear import wear_lines
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.program.program import COMPUTE
from protrain_runtime.contract.records.decisions import WORDINGS
from protrain_runtime.contract.units import format_bytes, format_range, format_seconds

NARROWEST, WIDEST = 60, 132
LABEL = 16  # columns to the left of every strip
VALUE = 12  # columns to its right
CHART_ROWS = 6
CROWDED = 1.5
"""A chart reaches up to the budget, unless that is at least this many times the peak."""
CRUMB = 5e-3
"""Share of a chart's height below which a kind of bytes has no row."""

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*%#"
WAITING = "x"
MIXED = "*"

KIND_MARKS = {
    "context": ("c", "black on bright_black"),
    "base": ("b", "black on white"),
    "staging": ("t", "black on bright_blue"),
    "states": ("s", "white on blue"),
    "gradients": ("g", "white on red"),
    "activations": ("a", "black on yellow"),
    "buffers": ("u", "black on cyan"),
    "fetched ahead": ("f", "black on green"),
    "leaving": ("l", "white on magenta"),
}
"""Letter and colours of each kind of bytes on the device."""
LETTER_STYLES = {
    "K": "yellow",
    **dict.fromkeys("RrBbd", "green"),
    **dict.fromkeys("Ss", "magenta"),
    **dict.fromkeys("IiOoD", "cyan"),
    "P": "blue",
}


class Screen:
    """Output of `protrain show`, as wide as the terminal, up to WIDEST columns."""

    label, value = LABEL, VALUE

    def __init__(self, *, step: Step, width: int = WIDEST, ascii_only: bool = False) -> None:
        self.step, self.width = step, width
        self.columns = width - self.label - self.value
        step_s = step.report.step_seconds
        edges = [step_s * n / self.columns for n in range(self.columns + 1)]
        self.shares = list(pairwise(edges))  # part of the step that each column shows
        self.ascii_only = ascii_only
        self.ramp = ASCII if ascii_only else BLOCKS
        self.dots = "..." if ascii_only else "…"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, for the terminal's width and characters."""
        width = min(max(options.max_width, NARROWEST), WIDEST)
        fitted = type(self)(step=self.step, width=width, ascii_only=options.ascii_only)
        yield from fitted._lines()

    def _head(self, of: object = None) -> Iterator[Text]:
        plan, model = self.step.plan, self.step.plan.workload.model
        head = f"{model}, {of}" if of else model
        words = f"{head}: {workload_text(self.step)}, {plan.optimizer} on {plan.hardware}"
        for line in self._sentence(words):
            line.highlight_words([one_line(model)], "bold")
            yield line

    def _lines(self) -> Iterator[RenderableType]:
        plan, report = self.step.plan, self.step.report
        part = part_in_words(plan)
        yield from self._head(self.step.of_stages)
        yield from self._sentence(
            f"step {format_seconds(plan.prediction.step_seconds)}"
            f"{format_range(plan.prediction.expected_seconds)}, at most {plan.gap:.2%} above"
            f" {fastest(self.step.whole)}"
            + ("" if part else f"; compute waits {format_seconds(report.stall_seconds)}")
        )
        yield from self._sentence(*other_results(plan))
        if part:
            yield Text(f"{part}:")
        yield from self._decisions()
        yield Text()
        yield from self._memory()
        yield Text()
        yield from self._lanes()
        waited, *_ = in_words(report, plan)
        waited = f"{WAITING} {waited}" if report.stall_seconds else waited
        yield from self._sentence(waited, *wear_lines(plan, self.step.profile))

    def _decisions(self) -> Iterator[Text]:
        units = self.step.plan.units
        room = self.width - LABEL
        per_column = -(-len(units) // (2 * room))  # two lines at most
        num_columns = -(-len(units) // per_column)
        activations = [WORDINGS[unit.activations] for unit in units]
        states = [WORDINGS[unit.states] for unit in units]
        for first in range(0, num_columns, room):
            last = min(first + room, num_columns)
            if first == 0:
                marks = ("|" if n % 10 == 0 else "." if n % 5 == 0 else " " for n in range(last))
                yield self._row("", Text("".join(marks), "bright_black"))
            also = f"  from unit {first * per_column}" if first else "activations"
            for name, row in ((also, activations), ("states", states)):
                strip = Text()
                for at in range(first * per_column, last * per_column, per_column):
                    letters = {one.letter for one in row[at : at + per_column]}
                    symbol = letters.pop() if len(letters) == 1 else MIXED
                    strip.append(symbol, LETTER_STYLES.get(symbol, ""))
                yield self._row(name, strip)
        texts: dict[str, dict[str, None]] = {}
        for one in (*activations, *states):
            texts.setdefault(one.letter, {})[one.phrase] = None
        legend = [one_line(f"{letter} {' | '.join(said)}") for letter, said in texts.items()]
        if per_column > 1:
            legend.append(f"{MIXED} several (a column is {per_column} units)")
        yield from self._wrapped(legend)

    def _memory(self) -> Iterator[Text]:
        report, (device, *below) = self.step.report, memory(self.step)
        peak, totals, budget = report.peak_slot, device.totals, device.budget_bytes
        total = totals[peak]
        top = budget if total <= budget < CROWDED * total else total
        at: list[int] = []  # the fullest slot in each column's share of the step
        for start_s, end_s in self.shares:
            first = max(0, bisect_right(device.times_s, start_s) - 1)
            last = max(first, bisect_left(device.times_s, end_s) - 1)
            at.append(max(range(first, last + 1), key=totals.__getitem__))
        for row in reversed(range(CHART_ROWS)):
            line, height = Text(), top * (row + 0.5) / CHART_ROWS
            for slot in at:
                kinds, ends = device.by_kind, accumulate(s[slot] for s in device.by_kind.values())
                inside = (kind for kind, end in zip(kinds, ends, strict=True) if height < end)
                line.append(*KIND_MARKS.get(next(inside, ""), (" ", "")))  # blank above the stack
            value = {CHART_ROWS - 1: format_bytes(top), 0: "0 B"}.get(row, "")
            yield self._row("device memory" * (row == CHART_ROWS - 1), line, value)
        marks = "".join("^" if slot == peak else " " for slot in at)
        yield self._row("", Text(marks), "at the peak")
        for kind, sizes in device.by_kind.items():
            if max(sizes) >= CRUMB * top:  # a row of its own scale
                most = max(1, *(sizes[slot] for slot in at))
                strip = Text("".join(self._shade(sizes[slot] / most) for slot in at))
                letter = Text()
                letter.append(*KIND_MARKS[kind])
                letter.append(f" {kind}")
                yield self._row(letter, strip, format_bytes(sizes[peak]))
        used = "".join(
            f"; {tier.name} {format_bytes(max(tier.totals))} of {format_bytes(tier.budget_bytes)}"
            for tier in below
        )
        held_back = self.step.profile.hardware.device.allocator_bytes
        holes = f" ({format_bytes(held_back)} held back for the allocator)" if held_back else ""
        yield from self._sentence(
            f"^ the peak, {format_bytes(total)} of {format_bytes(budget)}{holes}, is in the"
            f" {report.fullest.name}{used}"
        )

    def _lanes(self) -> Iterator[Text]:
        ran = bars(self.step, self.step.timeline.spans)
        stalls = _filled(self.shares, waits(self.step))
        for lane in self.step.report.lanes:
            busy, computes = _filled(self.shares, ran.get(lane.name, ())), lane.name == COMPUTE
            line = Text()
            for fraction, waiting in zip(busy, stalls, strict=True):
                if computes and waiting >= 0.5:
                    line.append(WAITING, "red")
                else:
                    line.append(self._shade(fraction), "" if computes else "cyan")
            yield self._row(lane.name, line, f"{lane.utilisation:.1%}")
        step = format_seconds(self.step.report.step_seconds)
        yield self._row("", Text("0 s" + " " * (self.columns - 3 - len(step)) + step))

    def _shade(self, fraction: float) -> str:
        """The mark for a fraction in eighths; only zero has the mark of zero."""
        return self.ramp[max(1 if fraction > 0 else 0, round(8 * fraction))]

    def _sentence(self, *sentences: str) -> Iterator[Text]:
        for words in sentences:
            yield from self._wrapped(one_line(words).split(" "), between=" ", indent="  ")

    def _wrapped(
        self, words: Iterable[str], *, between: str = "   ", indent: str = ""
    ) -> Iterator[Text]:
        line = ""
        for word in words:
            longer = f"{line}{between}{word}" if line else word
            if line and cell_len(longer) > self.width:
                yield self._fitted(Text(line))
                longer = indent + word
            line = longer
        yield self._fitted(Text(line))

    def _row(self, label: str | Text, strip: Text, value: str = "") -> Text:
        line = Text(no_wrap=True, overflow="crop")
        line.append(label)
        line.align("left", self.label)
        line.append(strip)
        if value:
            line.append(" " * max(1, self.width - line.cell_len - len(value)) + value)
        line.rstrip()
        return line

    def _fitted(self, line: Text) -> Text:
        if line.cell_len > self.width:
            line.truncate(self.width - len(self.dots))
            line.append(self.dots)
        return line


def _filled(shares: Sequence[tuple[float, float]], spans: Iterable[Bar | Wait]) -> list[float]:
    """Return the part of each share that spans fill; they do not overlap."""
    width = shares[0][1] - shares[0][0]
    filled = [0.0] * len(shares)
    for start, end, *_ in spans:
        first = min(int(start / width), len(shares) - 1)
        last = min(int(end / width), len(shares) - 1)
        for index in range(first, last + 1):
            left, right = shares[index]
            filled[index] += max(0.0, min(end, right) - max(start, left)) / width
    return [min(1.0, fraction) for fraction in filled]


def summary_text(step: Step) -> RenderableType:
    """The lanes as a table, then sentences about the limits of time and memory."""
    report, table = step.report, table_of("", "busy", "of the step", "bytes", "moves")
    for lane in report.lanes:
        size = format_bytes(lane.bytes) if lane.bytes else ""
        busy = format_seconds(lane.busy_s), f"{lane.utilisation:.1%}"
        table.add_row(lane.name, *busy, size, f"{lane.num_moves}")
    head = f"step {format_seconds(report.step_seconds)}"
    if part := part_in_words(step.plan):
        whole = format_seconds(step.plan.prediction.step_seconds)
        head = f"{part}: {format_seconds(report.step_seconds)}; the predicted step: {whole}"
    if step.of_stages is not None:
        head = f"{step.of_stages}: {head}"
    if step.plan.group.num_devices > 1:
        head += f", on each of {step.plan.group}"
    head = "; ".join((head, *other_steps(step.plan)))
    return Group(Text(head), "", table, "", *(Text(line) for line in in_words(report, step.plan)))
