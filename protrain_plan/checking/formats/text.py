"""A report for people: one line per rule, failures with the way to mend them."""

import itertools

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from protrain_plan.checking.formats.wording import said, summary
from protrain_plan.checking.verdicts import Failed, Finding, Passed, Report, Rule, Skipped


def text(report: Report) -> RenderableType:
    """What `protrain check` prints."""
    parts: list[RenderableType] = []
    for plan, found in itertools.groupby(report.findings, key=lambda finding: finding.plan):
        parts += [Text(plan, style="bold"), Padding(_table(list(found)), (0, 0, 1, 2))]
    style = "green" if report.exit_code == 0 else "red"
    return Group(*parts, Text(summary(report), style=style))


def explanation(rule: Rule) -> RenderableType:
    """What `protrain check --explain CODE` prints."""
    return Group(Text(rule.code, style="bold"), Text(rule.explanation))


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for machine, found in itertools.groupby(findings, key=lambda finding: finding.machine):
        if machine is not None:
            table.add_row("on", "", Text(machine, style="bold"))
        for finding in found:
            table.add_row(_mark(finding), finding.rule.code, said(finding))
            verdict = finding.verdict
            if isinstance(verdict, Failed) and verdict.fix:
                table.add_row("", "", Text(f"fix: {verdict.fix}"))
    return table


def _mark(finding: Finding) -> Text:
    match finding.verdict:
        case Passed():
            return Text("ok", style="green")
        case Failed():
            return Text("FAIL", style="bold red")
        case Skipped():
            return Text("skip", style="yellow")
