"""The commands that make a committed profile and its plan anew: what a failed rule says to do."""

import shlex

from protrain_plan.checking.cases import Case
from protrain_plan.hardware.catalogue import hardware_names
from protrain_plan.records import commands as records
from protrain_plan.records.plan import Budgets
from protrain_plan.simulation.ranks import Group
from protrain_plan.units import exact_bytes


def plan_again(case: Case) -> str:
    """How to make the plan anew, within its own budgets."""
    return f"plan it again: {plan_command(case, case.plan.budgets)}"


def plan_command(case: Case, budgets: Budgets) -> str:
    """`protrain plan` as the plan was asked for, within these budgets."""
    plan, group = case.plan, Group.of(case.plan)
    words = ["protrain", "plan", str(case.profile_path)]
    words += ["--device-memory", exact_bytes(budgets.device)]
    options = {"host": ("--host-memory", budgets.host), "disk": ("--disk", budgets.disk)}
    for tier in case.profile.hardware.tiers:
        option, size = options[tier.name]
        if size != tier.capacity_bytes:  # what the planner takes by itself
            words += [option, exact_bytes(size * group.in_node)]
    words += group.options
    if plan.updates == "after backward":
        words.append("--clip")
    if plan.micro_batches > 1:
        words += ["--accumulate", str(plan.micro_batches)]
    return shlex.join([*words, "-o", str(case.path)])


def profile_command(case: Case) -> str:
    """`protrain profile` as the profile was asked for."""
    profile, path = case.profile, str(case.profile_path)
    on = None
    if profile.method == "estimated":
        known = profile.hardware.name in hardware_names()
        on = profile.hardware.name if known else path
    return records.profile_command(
        profile.workload, optimizer=profile.optimizer.name, output=path, on=on
    )
