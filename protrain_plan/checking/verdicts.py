"""What a rule answers, and a whole check's report."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc
from typing import Any

from protrain_plan.checking.diffing import UnitGrowth


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The rule holds; `found` says by how much, where that is a number."""

    found: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The rule does not hold.

    key           the part of the plan's file that the problem is about
    growth        units of today's model that take more, or less, than the profile says
    excess_bytes  what is missing of the limit
    no_plan_fits  whether planning again cannot help
    """

    problem: str
    key: str | None = None
    line: int | None = None  # where it is known already: of what cannot be read
    fix: str | None = None
    growth: tuple[UnitGrowth, ...] = ()
    excess_bytes: int | None = None
    no_plan_fits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What the rule needs is not there."""

    reason: str


Verdict = Passed | Failed | Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule's code, its first sentence, and the whole explanation."""

    code: str
    title: str
    explanation: str

    @staticmethod
    def of(check: Callable[..., Any]) -> "Rule":
        """The rule that a function is: its name and its docstring."""
        docstring = getdoc(check)
        assert docstring
        paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]
        explanation, title = "\n\n".join(paragraphs), paragraphs[0].removesuffix(".")
        return Rule(code=check.__name__.upper(), title=title, explanation=explanation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule's verdict on one plan, and on one machine where the rule is about machines."""

    rule: Rule
    plan: str  # its file, as it was named or found; the budgets' own for BUD001
    verdict: Verdict
    line: int = 1  # [1..]
    machine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings on so many plans, plan by plan in the order of the rules.

    num_plans    that were checked, those that cannot be read too
    num_records  of any kind that were read, or cannot be
    num_seen     files that were looked at to find them

    With `strict`, a rule that could not be checked counts as one that failed.
    """

    findings: tuple[Finding, ...]
    num_plans: int
    num_records: int = 0
    num_seen: int = 0
    strict: bool = False

    @property
    def num_failed(self) -> int:
        """The files of which some rule failed."""
        return len({finding.plan for finding in self.with_verdict(Failed)})

    def with_verdict(self, kind: type[Passed] | type[Failed] | type[Skipped]) -> list[Finding]:
        """The findings with one kind of verdict."""
        return [finding for finding in self.findings if isinstance(finding.verdict, kind)]

    @property
    def exit_code(self) -> int:
        """0 all rules hold, 1 one does not, 3 one does not and no other plan would mend that."""
        failed = [f.verdict for f in self.findings if isinstance(f.verdict, Failed)]
        if any(verdict.no_plan_fits for verdict in failed):
            return 3
        return 1 if failed or (self.strict and self.with_verdict(Skipped)) else 0
