"""What all formats say of a finding, in the same words."""

import os
from pathlib import Path

from protrain_plan.checking.verdicts import Failed, Finding, Passed, Report, Skipped


def title(finding: Finding) -> str:
    """The rule's code, and the machine where it is about one: `MEM001 on rtx-4090`."""
    code = finding.rule.code
    return code if finding.machine is None else f"{code} on {finding.machine}"


def said(finding: Finding) -> str:
    """What was found, in one line; for a rule that holds, its own sentence or a number."""
    match finding.verdict:
        case Passed(found=found):
            return found or finding.rule.title
        case Failed(problem=problem):
            return problem
        case Skipped(reason=reason):
            return reason


def with_fix(finding: Finding) -> str:
    """The same with the way to mend it on a line of its own."""
    verdict = finding.verdict
    if isinstance(verdict, Failed) and verdict.fix:
        return f"{said(finding)}\nfix: {verdict.fix}"
    return said(finding)


def summary(report: Report) -> str:
    """How many rules hold: `11 passed, 1 failed, 1 skipped in 1 plan`."""
    counts = [
        f"{len(found)} {word}"
        for word, kind in (("passed", Passed), ("failed", Failed), ("skipped", Skipped))
        if (found := report.with_verdict(kind)) or kind is Passed
    ]
    return f"{', '.join(counts)} in {report.num_plans} plan{'s' * (report.num_plans != 1)}"


def counted_from(root: Path, path: str) -> str:
    """A path of the working directory as counted from a folder above it; others as they are."""
    absolute, above = Path(os.path.abspath(path)), Path(os.path.abspath(root))  # noqa: PTH100
    return absolute.relative_to(above).as_posix() if absolute.is_relative_to(above) else path
