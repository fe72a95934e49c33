"""A check's report in every format: `FORMATS` has a function for each."""

import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unicodedata import category
from urllib.parse import quote
from xml.etree import ElementTree as ET

from rich.console import Group, RenderableType
from rich.padding import Padding

from protrain_plan.checking.rules import RULES, Failed, Finding, Passed, Report, Rule, Skipped
from protrain_plan.presentation.terminal import Table, Text
from protrain_runtime.contract import __version__
from protrain_runtime.contract.escaping import lines, one_line

VERDICTS: dict[str, type[Passed] | type[Failed] | type[Skipped]] = {
    "passed": Passed,
    "failed": Failed,
    "skipped": Skipped,
}


def title(finding: Finding) -> str:
    """The rule's code, and the machine where it is about one: `MEM001 on rtx-4090`."""
    code = finding.rule.code
    return code if finding.machine is None else f"{code} on {finding.machine}"


def said(finding: Finding) -> str:
    """Say what was found, in one line; for a rule that holds, its own sentence or a number."""
    match finding.verdict:
        case Passed(found=found):
            return found or finding.rule.title
        case Failed(problem=problem):
            return problem
        case Skipped(reason=reason):
            return reason


def with_fix(finding: Finding) -> str:
    """Say the same, with the way to mend it on a line of its own."""
    verdict = finding.verdict
    if isinstance(verdict, Failed) and verdict.fix:
        return f"{said(finding)}\nfix: {verdict.fix}"
    return said(finding)


def summary(report: Report) -> str:
    """Count the rules that hold: `11 passed, 1 failed, 1 skipped in 1 plan`."""
    counts = [
        f"{len(found)} {word}"
        for word, kind in VERDICTS.items()
        if (found := report.with_verdict(kind)) or kind is Passed
    ]
    return f"{', '.join(counts)} in {report.num_plans} plan{'s' * (report.num_plans != 1)}"


def counted(report: Report) -> str:
    """Count the files: `3 files seen, 2 records checked, 1 failed`."""
    return (
        f"{report.num_seen} file{'s' * (report.num_seen != 1)} seen,"
        f" {report.num_records} record{'s' * (report.num_records != 1)} checked,"
        f" {report.num_failed} failed"
    )


def counted_from(root: Path, path: str) -> str:
    """A path of the working directory as counted from a folder above it; others as they are."""
    absolute, above = Path(os.path.abspath(path)), Path(os.path.abspath(root))  # noqa: PTH100
    return absolute.relative_to(above).as_posix() if absolute.is_relative_to(above) else path


_MARKS = {
    Passed: Text("ok", style="green"),
    Failed: Text("FAIL", style="bold red"),
    Skipped: Text("skip", style="yellow"),
}


def text(report: Report) -> RenderableType:
    """For people: a line per rule, failures with the way to mend them."""
    parts: list[RenderableType] = []
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
                table.add_row(_MARKS[type(verdict)], finding.rule.code, said(finding))
                if isinstance(verdict, Failed) and verdict.fix:
                    table.add_row("", "", Text(f"fix: {verdict.fix}"))
        parts += [Text(plan, style="bold"), Padding(table, (0, 0, 1, 2))]
    style = "green" if report.exit_code == 0 else "red"
    return Group(*parts, *(Text(line(report), style=style) for line in (summary, counted)))


def explanation(rule: Rule) -> RenderableType:
    """Return what `protrain check --explain CODE` prints."""
    paragraphs = (Text(line) for line in rule.explanation.split("\n"))
    return Group(Text(rule.code, style="bold"), *paragraphs)


def plain_data(report: Report) -> dict[str, Any]:
    """For programs: the exit code, counts and every finding."""
    findings: list[dict[str, Any]] = []
    for finding in report.findings:
        data = {
            "code": finding.rule.code,
            "rule": finding.rule.title,
            "plan": finding.plan,
            "line": finding.line,
            "machine": finding.machine,
        }
        match finding.verdict:
            case Passed(found=found):
                data |= {"verdict": "passed", "found": found}
            case Skipped(reason=reason):
                data |= {"verdict": "skipped", "reason": reason}
            case Failed() as failed:
                told = asdict(failed)
                keys = ("problem", "fix", "excess_bytes", "no_plan_fits", "growth")
                data |= {"verdict": "failed", **{key: told[key] for key in keys}}
        findings.append(data)
    return {
        "exit_code": report.exit_code,
        **{word: len(report.with_verdict(kind)) for word, kind in VERDICTS.items()},
        "files_seen": report.num_seen,
        "records_checked": report.num_records,
        "plans_checked": report.num_plans,
        "files_failed": report.num_failed,
        "findings": findings,
    }


def junit(report: Report) -> str:
    """JUnit XML, which GitLab, Jenkins and others show: a suite per plan, a case per rule."""
    # In the name: what else there is of the files' numbers, one reader or the other refuses here.
    name = f"protrain check: {counted(report)}"
    suites = ET.Element("testsuites", {"name": name} | _counts(report.findings))
    del suites.attrib["skipped"]  # Jenkins' xunit plugin refuses it here
    for plan, found in itertools.groupby(report.findings, key=lambda finding: finding.plan):
        findings = tuple(found)
        plan = one_line(plan)  # XML cannot hold control characters, not even as references
        suite = ET.SubElement(suites, "testsuite", {"name": plan} | _counts(findings))
        for finding in findings:
            name = one_line(title(finding))
            case = ET.SubElement(suite, "testcase", classname=plan, name=name)
            match finding.verdict:
                case Failed(problem=problem):
                    failure = ET.SubElement(
                        case, "failure", message=one_line(problem), type=finding.rule.code
                    )
                    failure.text = f"{plan}:{finding.line}: {lines(with_fix(finding))}"
                case Skipped(reason=reason):
                    ET.SubElement(case, "skipped", message=one_line(reason))
                case _:
                    ET.SubElement(case, "system-out").text = one_line(said(finding))
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode")


def _counts(findings: Sequence[Finding]) -> dict[str, str]:
    failed, skipped = (
        sum(isinstance(finding.verdict, kind) for finding in findings) for kind in (Failed, Skipped)
    )
    counts = {"tests": len(findings), "failures": failed, "errors": 0, "skipped": skipped}
    return {name: str(count) for name, count in counts.items()}


SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def sarif(report: Report, *, root: Path) -> dict[str, Any]:
    """SARIF 2.1.0 (OASIS), which code hosts show beside the lines of a pull request.

    All rules, and a result for each one that failed or could not be checked. Files are counted
    from the repository's root, as code hosts take them.
    """
    driver = {
        "name": "protrain check",
        "version": __version__,
        "rules": [
            {
                "id": rule.code,
                "shortDescription": {"text": f"{rule.title}."},
                "fullDescription": {"text": rule.explanation},
            }
            for rule in RULES.values()
        ],
    }
    results: list[dict[str, Any]] = []
    for finding in _not_passed(report):
        failed = isinstance(finding.verdict, Failed)
        path = Path(counted_from(root, finding.plan))
        # By its bytes, as the system has it.
        uri = path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))
        place = {"artifactLocation": {"uri": uri}, "region": {"startLine": finding.line}}
        # Nothing in a message is a link or stands for an argument (3.11.5 and 3.11.6 there).
        # Other brackets stay as they are: not all readers take the escapes away.
        message = lines(f"{title(finding)}: {with_fix(finding)}")
        if "](" in message:
            message = re.sub(r"([\\\[\]])", r"\\\1", message)
        if re.search(r"\{[0-9]+\}", message):
            message = message.replace("{", "{{").replace("}", "}}")
        results.append(
            {
                "ruleId": finding.rule.code,
                "ruleIndex": list(RULES).index(finding.rule.code),
                "kind": "fail" if failed else "notApplicable",
                "level": "error" if failed else "none",
                "message": {"text": message},
                "locations": [{"physicalLocation": place}],
            }
        )
    run = {
        "tool": {"driver": driver},
        "results": results,
        "columnKind": "unicodeCodePoints",
        "properties": {
            "filesSeen": report.num_seen,
            "recordsChecked": report.num_records,
            "plansChecked": report.num_plans,
            "filesFailed": report.num_failed,
        },
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def github(report: Report, *, root: Path) -> str:
    """Annotations, which a workflow of GitHub Actions shows beside the files.

    One workflow command for each rule that failed or could not be checked, and a summary.
    Files are counted from the repository's root, wherever in it the check runs.
    """
    commands: list[str] = []
    for finding in _not_passed(report):
        kind = "error" if isinstance(finding.verdict, Failed) else "notice"
        # GitHub compares the file's own name; what would steer a reader's terminal is escaped.
        path = "".join(
            one_line(c) if c not in "\r\n" and category(c).startswith("C") else c
            for c in counted_from(root, finding.plan)
        )
        name = one_line(f"{title(finding)}: {finding.rule.title}")
        properties = {"file": path, "line": str(finding.line), "title": name}
        listed = ",".join(
            f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}"
            for key, value in properties.items()
        )
        commands.append(f"::{kind} {listed}::{_escaped(lines(with_fix(finding)))}")
    totals = f"{summary(report)}; {counted(report)}"
    return "\n".join([*commands, f"::notice title=protrain check::{_escaped(totals)}"])


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _not_passed(report: Report) -> list[Finding]:
    return [one for one in report.findings if isinstance(one.verdict, Failed | Skipped)]


Format = Callable[[Report, Path], RenderableType | str | dict[str, Any]]

FORMATS: dict[str, Format] = {
    "text": lambda report, _: text(report),
    "json": lambda report, _: plain_data(report),
    "junit": lambda report, _: junit(report),
    "sarif": lambda report, root: sarif(report, root=root),
    "github": lambda report, root: github(report, root=root),
}
"""Formats by name: functions of a report and the folder that its files are counted from.

It makes text as it is, plain data that is printed as JSON, or what rich draws.
"""
