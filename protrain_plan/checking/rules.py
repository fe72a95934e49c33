"""The rules. A function's name is its code, its docstring the explanation, its answer a verdict.

A plan's file comes first, then what it says of its profile and of the model, then what it takes of
each machine. Where one stage fails, the later ones have nothing to speak of. Budgets come last.
"""

from collections.abc import Callable

from protrain_plan.checking import machine_rules, plan_rules
from protrain_plan.checking.cases import Files
from protrain_plan.checking.situations import Model, Situation
from protrain_plan.checking.verdicts import Rule, Verdict
from protrain_plan.errors import ProtrainError
from protrain_plan.records.tree import did_you_mean

FILE_RULES: tuple[Callable[[Files], Verdict], ...] = (plan_rules.ver001, plan_rules.prf001)
MODEL_RULES: tuple[Callable[[Model], Verdict], ...] = (
    plan_rules.pln001,
    plan_rules.sim001,
    plan_rules.sim002,
    plan_rules.fpr001,
)
MACHINE_RULES: tuple[Callable[[Situation], Verdict], ...] = (
    machine_rules.hdw001,
    machine_rules.mem001,
    machine_rules.host001,
    machine_rules.disk001,
    machine_rules.time001,
)
BUDGET_RULE: Callable[[machine_rules.Guard], Verdict] = machine_rules.bud001

RULES: dict[str, Rule] = {
    rule.code: rule
    for rule in (
        *map(Rule.of, FILE_RULES),
        *map(Rule.of, MODEL_RULES),
        *map(Rule.of, MACHINE_RULES),
        Rule.of(BUDGET_RULE),
    )
}


def explained(code: str) -> Rule:
    """The rule with the code, in any case; ProtrainError, with the nearest one, where none has."""
    if code.upper() not in RULES:
        fix = did_you_mean(code.upper(), RULES) or f"the rules are {', '.join(RULES)}"
        raise ProtrainError(f"there is no rule {code!r}", key="--explain", fix=fix)
    return RULES[code.upper()]
