"""The stages of a pipeline on a terminal: rows over time, a table, and decisions."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import RenderableType

from protrain_plan.planning.stages.schedule import StageSpan
from protrain_plan.presentation.plans import fastest
from protrain_plan.presentation.report.screen import Screen
from protrain_plan.presentation.staging import decisions_text, layout_text, pace_text, stages_table
from protrain_plan.presentation.terminal import Text
from protrain_runtime.contract.units import format_seconds

FILLS = {
    "forward": ("\N{LIGHT SHADE}", "-", "cyan"),
    "backward": ("\N{DARK SHADE}", "=", "green"),
    "update": ("u", "u", "blue"),
}
"""Fillings of boxes, on terminals and in ASCII, and their colours."""
NARROW, ROOMY, CUT = 3, 6, 3
"""Columns of a micro-batch, forward and backward. With less than NARROW, only the beginning and the
end of the step are drawn, with ROOMY, and CUT columns between them."""
SEVERAL = "\N{MEDIUM SHADE}", "+", ""
"""The same for a column with several boxes that are too small."""


Mark = tuple[str, str]
"""Characters and their style."""


class StagesScreen(Screen):
    """Output of `protrain show` for all stages; `step` is that of one of them."""

    label, value = 9, 6

    def _lines(self) -> Iterator[RenderableType]:
        of = self.step.of_stages
        assert of is not None
        found, stages = of.pipeline, of.pipeline.stages
        yield from self._head()
        above = f"at most {of.plan.gap:.2%} above {fastest(of.plan)}{layout_text(found)}"
        yield from self._sentence(pace_text(found), above)
        yield Text()
        windows = self._windows()
        boxes: list[Text] = []
        for s, idle in enumerate(found.run.idle):
            spans = [span for span in found.run.spans if span.stage == s]
            boxes.append(self._strip(self._boxes(spans, *window) for window in windows))
            yield self._row(f"stage {s}", boxes[-1], f"{idle:.0%}")
        ends = [(format_seconds(start), format_seconds(end), n) for start, end, n in windows]
        scale = self._strip([(start + end.rjust(n - len(start)), "")] for start, end, n in ends)
        yield self._row("", scale)
        forward, backward, update = (self._fill(kind) for kind in FILLS)
        several = self._fill(None)
        legend = [
            f"0{forward} forward of micro-batch 0",
            f"0{backward} its backward",
            f"{update} update",
            *([f"{several} several"] if any(several in row.plain for row in boxes) else []),
            "blank: waits",
        ]
        yield from self._wrapped(legend)
        yield Text()
        yield stages_table(found)
        yield Text()
        for words, run in groupby(enumerate(stages), lambda one: decisions_text(one[1].plan)):
            numbers = [s for s, _ in run]
            last = f"-{numbers[-1]}" if len(numbers) > 1 else ""
            yield from self._sentence(f"stage{'s' * bool(last)} {numbers[0]}{last}: {words}")
        yield from self._sentence(f"the step of one stage: --stage {of.stage}")

    def _fill(self, kind: str | None) -> str:
        return (SEVERAL if kind is None else FILLS[kind])[self.ascii_only]

    def _windows(self) -> list[tuple[float, float, int]]:
        """The shown times with their columns: the step, or its beginning and its end."""
        assert self.step.of_stages is not None
        found = self.step.of_stages.pipeline
        step_s = found.run.step_seconds
        cycle_s = max(stage.seconds.cycle_s for stage in found.stages)
        if self.columns * cycle_s >= NARROW * step_s:
            return [(0.0, step_s, self.columns)]
        half = (self.columns - CUT) // 2
        shown_s = half * cycle_s / ROOMY
        return [(0.0, shown_s, half), (step_s - shown_s, step_s, half)]

    def _boxes(
        self, spans: Iterable[StageSpan], start_s: float, end_s: float, count: int
    ) -> list[Mark]:
        """A row of `count` columns: boxes, with numbers of micro-batches if these have room."""
        row = [(" ", "")] * count
        several: list[int] = []
        for span in spans:
            if span.end_s <= start_s or span.start_s >= end_s:
                continue
            first, last = (
                min(count, max(0, round((t - start_s) / (end_s - start_s) * count)))
                for t in (span.start_s, span.end_s)
            )
            if first == last and span.action is None:  # an update is always visible
                first = min(first, count - 1)
                last = first + 1
            if first == last:
                several.append(min(first, count - 1))
            number = str(span.action.micro_batch) if span.action else ""
            fill, style = self._fill(span.kind), FILLS[span.kind][-1]
            box = number.ljust(last - first, fill) if len(number) < last - first else ""
            row[first:last] = [(mark, style) for mark in box or fill * (last - first)]
        for column in several:
            if row[column][0] == " ":
                row[column] = self._fill(None), SEVERAL[-1]
        return row

    def _strip(self, windows: Iterable[Iterable[Mark]]) -> Text:
        """The marks of all windows, with dots where the step is cut."""
        strip = Text()
        for number, marks in enumerate(windows):
            strip.append(f"{self.dots:^{CUT}}" if number else "")
            for mark in marks:
                strip.append(*mark)
        return strip
