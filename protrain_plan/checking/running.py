"""All rules on all plans."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from protrain_plan.checking.budgets import MachineBudget
from protrain_plan.checking.cases import Files, line_of, opened, read_files
from protrain_plan.checking.machine_rules import Guard
from protrain_plan.checking.reestimating import Look
from protrain_plan.checking.rules import BUDGET_RULE, FILE_RULES, MACHINE_RULES, MODEL_RULES
from protrain_plan.checking.situations import Model, Situation
from protrain_plan.checking.targets import by_machine, targets
from protrain_plan.checking.verdicts import Failed, Finding, Passed, Report, Rule, Verdict
from protrain_plan.records.hardware import Hardware

Subject = TypeVar("Subject")


def check(
    plans: Sequence[Path],
    *,
    look: Look,
    budgets: Mapping[str, MachineBudget],
    on: Sequence[Hardware] = (),
    strict: bool = False,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> Report:
    """Hold the plans against all rules.

    `look` finds today's model of a profile. Each plan is checked on its own machine and those
    whose budgets name it, or on the machines in `on` instead. ProtrainError where a machine is not
    known or a file is no text.
    """
    findings: list[Finding] = []
    known = by_machine(budgets)
    for number, path in enumerate(plans):
        progress(str(path), number / len(plans))
        findings += _Check(read_files(path)).findings(look, known, on)
    if not on:
        findings += _unused(known, findings)
    return Report(findings=tuple(findings), num_plans=len(plans), strict=strict)


def _unused(budgets: Mapping[str, MachineBudget], findings: Sequence[Finding]) -> Iterator[Finding]:
    """That budgets guard nothing; of those that guard something there is nothing to say.

    A plan that cannot be read may be what a budget is for: then nobody can tell.
    """
    plans = {finding.plan for finding in findings}
    machines = frozenset(finding.machine for finding in findings if finding.machine is not None)
    if plans != {finding.plan for finding in findings if finding.machine is not None}:
        return
    for machine, budget in budgets.items():
        verdict = BUDGET_RULE(Guard(budget=budget, machine=machine, machines=machines))
        if not isinstance(verdict, Passed):
            yield Finding(
                rule=Rule.of(BUDGET_RULE),
                plan=budget.source,
                line=1,
                machine=machine,
                verdict=verdict,
            )


class _Check:
    """One plan's findings, stage by stage; a stage that fails ends what depends on it."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.found: list[Finding] = []

    def findings(
        self, look: Look, budgets: Mapping[str, MachineBudget], on: Sequence[Hardware]
    ) -> list[Finding]:
        for rule in FILE_RULES:
            if not self._holds(rule, self.files):
                return self.found
        case = opened(self.files)
        assert case is not None, "PRF001 holds"
        model = Model(case=case, today=look(case.profile))
        first, *others = MODEL_RULES
        if not self._holds(first, model):
            return self.found
        for model_rule in others:
            self._holds(model_rule, model)
        for target in targets(case, budgets, on):
            name = target.hardware.name
            situation = Situation(model=model, target=target)
            has_all, *limits = MACHINE_RULES
            if self._holds(has_all, situation, machine=name):
                for machine_rule in limits:
                    self._holds(machine_rule, situation, machine=name)
        return self.found

    def _holds(
        self, check: Callable[[Subject], Verdict], subject: Subject, *, machine: str | None = None
    ) -> bool:
        verdict = check(subject)
        failed = isinstance(verdict, Failed)
        key = verdict.key if isinstance(verdict, Failed) else None
        line = verdict.line if isinstance(verdict, Failed) else None
        self.found.append(
            Finding(
                rule=Rule.of(check),
                plan=str(self.files.path),
                line=line or line_of(self.files.text, key),
                machine=machine,
                verdict=verdict,
            )
        )
        return not failed
