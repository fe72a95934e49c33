"""A report for programs: plain data for `--json`."""

from dataclasses import asdict
from typing import Any

from protrain_plan.checking.verdicts import Failed, Finding, Passed, Report, Skipped


def plain_data(report: Report) -> dict[str, Any]:
    """What `protrain check --json` prints: the exit code, counts and every finding."""
    return {
        "exit_code": report.exit_code,
        "passed": len(report.with_verdict(Passed)),
        "failed": len(report.with_verdict(Failed)),
        "skipped": len(report.with_verdict(Skipped)),
        "findings": [_finding(finding) for finding in report.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    head = {
        "code": finding.rule.code,
        "rule": finding.rule.title,
        "plan": finding.plan,
        "line": finding.line,
        "machine": finding.machine,
    }
    match finding.verdict:
        case Passed(found=found):
            return head | {"verdict": "passed", "found": found}
        case Skipped(reason=reason):
            return head | {"verdict": "skipped", "reason": reason}
        case Failed() as failed:
            return head | {
                "verdict": "failed",
                "problem": failed.problem,
                "fix": failed.fix,
                "excess_bytes": failed.excess_bytes,
                "no_plan_fits": failed.no_plan_fits,
                "growth": [asdict(unit) for unit in failed.growth],
            }
