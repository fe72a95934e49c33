"""A report as SARIF 2.1.0 (OASIS), which code hosts show beside the lines of a pull request."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from protrain_plan import __version__
from protrain_plan.checking.formats.wording import counted_from, title, with_fix
from protrain_plan.checking.rules import RULES
from protrain_plan.checking.verdicts import Failed, Finding, Report, Skipped

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def sarif(report: Report, *, root: Path) -> dict[str, Any]:
    """The log: all rules, and a result for each one that failed or could not be checked.

    Files are counted from the repository's root, as code hosts take them.
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
    results = [
        _result(finding, root)
        for finding in report.findings
        if isinstance(finding.verdict, Failed | Skipped)
    ]
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: Finding, root: Path) -> dict[str, Any]:
    failed = isinstance(finding.verdict, Failed)
    path = Path(counted_from(root, finding.plan))
    return {
        "ruleId": finding.rule.code,
        "ruleIndex": list(RULES).index(finding.rule.code),
        "kind": "fail" if failed else "notApplicable",
        "level": "error" if failed else "none",
        "message": {"text": f"{title(finding)}: {with_fix(finding)}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {
                        "uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())
                    },
                    "region": {"startLine": finding.line},
                }
            }
        ],
    }
