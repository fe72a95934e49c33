"""All rules on all plans."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from protrain_plan.checking.budgets import MachineBudget
from protrain_plan.checking.plan_files import Files, line_of, opened, search
from protrain_plan.checking.plan_on_machine import (
    Machines,
    Model,
    PlanOnMachine,
    by_machine,
    targets,
)
from protrain_plan.checking.reestimating import Look
from protrain_plan.checking.rules import (
    BUDGET_RULE,
    COUNT_RULE,
    FILE_RULES,
    MACHINE_RULES,
    MODEL_RULES,
    Count,
    Guard,
)
from protrain_plan.checking.verdicts import Failed, Finding, Passed, Report, Rule, Verdict
from protrain_plan.errors import ProtrainError
from protrain_plan.records.hardware import Hardware
from protrain_plan.records.profile import Profile

Subject = TypeVar("Subject")


def check(
    plans: Sequence[Path],
    *,
    look: Look,
    budgets: Mapping[str, MachineBudget],
    on: Sequence[Hardware] = (),
    strict: bool = False,
    expect: int | None = None,
    prepare: Callable[[Sequence[Profile]], object] = lambda _: None,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> Report:
    """Hold the plans, and those in folders, against all rules.

    `look` finds today's model of a profile; `prepare` is told before whose models those will be.
    Each plan is checked on its own machine and those whose budgets name it, or on the machines in
    `on` instead. With `expect`, so many plans have to be there. ProtrainError where a machine is
    not known, a path is missing or a folder has no plan.
    """
    findings: list[Finding] = []
    # Everything is read before any model's code runs, which could write files.
    found, known = search(plans), by_machine(budgets)
    machines = Machines(known, [files.path for files in found.files])
    prepare([case.profile for case in map(opened, found.files) if case is not None])
    for number, files in enumerate(found.files):
        progress(str(files.path), number / len(found.files))
        findings += _Check(files).findings(look, machines, on)
    if not on:
        findings += _unused(known, findings)
    num_plans = sum(files.is_plan for files in found.files)
    if expect is not None:
        count = COUNT_RULE(Count(expected=expect, found=num_plans))
        findings.append(Finding(rule=Rule.of(COUNT_RULE), plan=str(plans[0]), verdict=count))
    return Report(
        findings=tuple(findings),
        num_plans=num_plans,
        num_records=found.num_records,
        num_seen=found.num_seen,
        strict=strict,
    )


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
            rule = Rule.of(BUDGET_RULE)
            yield Finding(rule=rule, plan=budget.source, machine=machine, verdict=verdict)


class _Check:
    """One plan's findings, stage by stage; a stage that fails ends what depends on it."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.found: list[Finding] = []

    def findings(self, look: Look, machines: Machines, on: Sequence[Hardware]) -> list[Finding]:
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
        for target in targets(case, machines, on):
            name = target.hardware.name
            situation = PlanOnMachine(model=model, target=target)
            has_all, *limits = MACHINE_RULES
            if self._holds(has_all, situation, machine=name):
                for machine_rule in limits:
                    self._holds(machine_rule, situation, machine=name)
        return self.found

    def _holds(
        self, check: Callable[[Subject], Verdict], subject: Subject, *, machine: str | None = None
    ) -> bool:
        try:
            verdict = check(subject)
        except Exception as error:  # noqa: BLE001  (a mistake of ours is no reason to pass)
            ours = not isinstance(error, ProtrainError)
            reason = f"a mistake of protrain's: {error!r}" if ours else str(error)
            verdict = Failed(problem=f"this cannot be checked: {reason}")
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
