"""A check's report in every format: a function for each."""

import itertools
import os
from pathlib import Path
from typing import Any
from unicodedata import category

from rich.console import Group, RenderableType
from rich.padding import Padding

from protrain_plan.checking.rules import Failed, Finding, Passed, Report, Rule, Skipped
from protrain_plan.presentation.terminal import Table, Text, fields_of
from protrain_runtime.contract.escaping import lines, one_line

VERDICTS: dict[str, type[Passed] | type[Failed] | type[Skipped]] = {
    "passed": Passed,
    "failed": Failed,
    "skipped": Skipped,
}


def said(finding: Finding) -> str:
    """The finding in one line; for a rule that holds, its own sentence or a number."""
    match finding.verdict:
        case Passed(found=found):
            return found or finding.rule.title
        case Failed(problem=problem):
            return problem
        case Skipped(reason=reason):
            return reason


def summary(report: Report) -> str:
    """Counts of rules: `11 passed, 1 failed, 1 skipped in 1 plan`."""
    counts = [
        f"{len(found)} {word}"
        for word, kind in VERDICTS.items()
        if (found := report.with_verdict(kind)) or kind is Passed
    ]
    return f"{', '.join(counts)} in {report.num_plans} plan{'s' * (report.num_plans != 1)}"


def counted(report: Report) -> str:
    """Counts of files: `3 files seen, 2 records checked, 1 failed`."""
    seen, records = report.num_seen, report.num_records
    files = f"{seen} file{'s' * (seen != 1)} seen"
    return f"{files}, {records} record{'s' * (records != 1)} checked, {report.num_failed} failed"


_MARKS = {
    Passed: Text("ok", style="green"),
    Failed: Text("FAIL", style="bold red"),
    Skipped: Text("skip", style="yellow"),
}


def text(report: Report) -> RenderableType:
    """The report for people: counts, and the findings on each plan but rules that simply hold."""
    style = "green" if report.exit_code == 0 else "red"
    parts: list[RenderableType] = [Text(summary(report), style=style)]
    for plan, found in itertools.groupby(report.findings, key=lambda finding: finding.plan):
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for machine, of_machine in itertools.groupby(found, key=lambda finding: finding.machine):
            if machine is not None:
                table.add_row("on", "", Text(machine, style="bold"))
            for finding in of_machine:
                verdict = finding.verdict
                if machine is None and isinstance(verdict, Passed):
                    continue
                table.add_row(_MARKS[type(verdict)], finding.rule.code, said(finding))
                if isinstance(verdict, Failed) and verdict.fix:
                    table.add_row("", "", Text(f"fix: {verdict.fix}"))
        parts += ["", Text(plan, style="bold"), Padding(table, (0, 0, 0, 2))]
    return Group(*parts, "", Text(counted(report), style=style))


def explanation(rule: Rule) -> RenderableType:
    """Return what `protrain check --explain CODE` prints."""
    paragraphs = (Text(line) for line in rule.explanation.split("\n"))
    return Group(Text(rule.code, style="bold"), *paragraphs)


def plain_data(report: Report) -> dict[str, Any]:
    """The report for programs: the exit code, counts and every finding."""
    words = {kind: word for word, kind in VERDICTS.items()}
    findings = [
        {
            "code": finding.rule.code,
            "rule": finding.rule.title,
            **fields_of(finding, "plan", "line", "machine"),
            "verdict": words[type(finding.verdict)],
            **fields_of(finding.verdict, but=("key", "line")),
        }
        for finding in report.findings
    ]
    return {
        **fields_of(report, "exit_code"),
        **{word: len(report.with_verdict(kind)) for word, kind in VERDICTS.items()},
        "files_seen": report.num_seen,
        "records_checked": report.num_records,
        "plans_checked": report.num_plans,
        "files_failed": report.num_failed,
        "findings": findings,
    }


def github(report: Report, *, root: Path) -> str:
    """Return annotations, which GitHub Actions shows in the files.

    There is a workflow command for each rule that failed or was skipped, and a summary. Paths are
    relative to the repository's `root`.
    """
    commands, above = list[str](), Path(os.path.abspath(root))  # noqa: PTH100
    for finding in report.findings:
        if isinstance(finding.verdict, Passed):
            continue
        kind = "error" if isinstance(finding.verdict, Failed) else "notice"
        path, absolute = finding.plan, Path(os.path.abspath(finding.plan))  # noqa: PTH100
        if absolute.is_relative_to(above):
            path = absolute.relative_to(above).as_posix()
        # GitHub compares the file's own name; characters that steer a terminal are escaped.
        path = "".join(
            one_line(c) if c not in "\r\n" and category(c).startswith("C") else c for c in path
        )
        machine = "" if finding.machine is None else f" on {finding.machine}"
        name = one_line(f"{finding.rule.code}{machine}: {finding.rule.title}")
        properties = {"file": path, "line": str(finding.line), "title": name}
        escaped = {key: _escaped(value, ":", ",") for key, value in properties.items()}
        listed = ",".join(f"{key}={value}" for key, value in escaped.items())
        message = said(finding)
        if isinstance(finding.verdict, Failed) and finding.verdict.fix:
            message += f"\nfix: {finding.verdict.fix}"
        commands.append(f"::{kind} {listed}::{_escaped(lines(message))}")
    totals = f"{summary(report)}; {counted(report)}"
    return "\n".join([*commands, f"::notice title=protrain check::{_escaped(totals)}"])


def _escaped(text: str, *more: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in ("%", "\r", "\n", *more) else c for c in text)
