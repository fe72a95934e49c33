"""A report as annotations: lines that a workflow of GitHub Actions shows beside the files."""

from pathlib import Path

from protrain_plan.checking.formats.wording import counted_from, summary, title, with_fix
from protrain_plan.checking.verdicts import Failed, Finding, Report, Skipped


def github(report: Report, *, root: Path) -> str:
    """One workflow command for each rule that failed or could not be checked, and a summary.

    Files are counted from the repository's root, wherever in it the check runs.
    """
    commands = [
        _annotation(finding, root)
        for finding in report.findings
        if isinstance(finding.verdict, Failed | Skipped)
    ]
    return "\n".join([*commands, summary(report)])


def _annotation(finding: Finding, root: Path) -> str:
    kind = "error" if isinstance(finding.verdict, Failed) else "notice"
    properties = {
        "file": counted_from(root, finding.plan),
        "line": str(finding.line),
        "title": f"{title(finding)}: {finding.rule.title}",
    }
    listed = ",".join(f"{name}={_escaped(value)}" for name, value in properties.items())
    return f"::{kind} {listed}::{_message(with_fix(finding))}"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
