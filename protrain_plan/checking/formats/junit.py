"""A report as JUnit XML: a suite per plan, a case per rule and machine."""

import itertools
from xml.etree import ElementTree as ET

from protrain_plan.checking.formats.wording import said, title, with_fix
from protrain_plan.checking.verdicts import Failed, Finding, Report, Skipped


def junit(report: Report) -> str:
    """The document that GitLab, Jenkins and others show as test results."""
    suites = ET.Element("testsuites", {"name": "protrain check"} | _counts(report.findings))
    del suites.attrib["skipped"]  # Jenkins' xunit plugin refuses it here
    for plan, found in itertools.groupby(report.findings, key=lambda finding: finding.plan):
        findings = tuple(found)
        suite = ET.SubElement(suites, "testsuite", {"name": plan} | _counts(findings))
        for finding in findings:
            case = ET.SubElement(suite, "testcase", classname=plan, name=title(finding))
            match finding.verdict:
                case Failed(problem=problem):
                    failure = ET.SubElement(
                        case, "failure", message=problem, type=finding.rule.code
                    )
                    failure.text = f"{plan}:{finding.line}: {with_fix(finding)}"
                case Skipped(reason=reason):
                    ET.SubElement(case, "skipped", message=reason)
                case _:
                    ET.SubElement(case, "system-out").text = said(finding)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode")


def _counts(findings: tuple[Finding, ...]) -> dict[str, str]:
    failed = sum(isinstance(finding.verdict, Failed) for finding in findings)
    skipped = sum(isinstance(finding.verdict, Skipped) for finding in findings)
    return {
        "tests": str(len(findings)),
        "failures": str(failed),
        "errors": "0",
        "skipped": str(skipped),
    }
