"""The commands that make a committed profile and its plan anew: what a failed rule says to do."""

import shlex

from protrain_plan.checking.cases import Case
from protrain_plan.hardware.catalogue import hardware_names
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
    words += _unless("1", "--accumulate", str(plan.micro_batches))
    return shlex.join([*words, "-o", str(case.path)])


def profile_command(case: Case) -> str:
    """`protrain profile` as the profile was asked for.

    How it was measured (steps, unit by unit) and on which text is not in a record.
    """
    workload, hardware = case.profile.workload, case.profile.hardware
    words = ["protrain", "profile", workload.model]
    if case.profile.method == "estimated":
        known = hardware.name in hardware_names()
        words += ["--on", hardware.name if known else str(case.profile_path)]
    else:
        words += _unless("cpu", "--device", workload.device)
        words += ["--deterministic"] if workload.deterministic else []
    if workload.model_config:  # a factory's batches are its own
        words += ["--batch-size", str(workload.batch_size), "--seq-len", str(workload.seq_len)]
    words += _unless("float32", "--dtype", workload.dtype)
    words += _unless("pure", "--precision", workload.precision)
    words += _unless("", "--lora", ",".join(workload.adapter.split()[1:]))
    words += _unless("adamw", "--optimizer", case.profile.optimizer.name)
    words += _unless("0", "--seed", str(workload.seed))
    return shlex.join([*words, "-o", str(case.profile_path)])


def _unless(default: str, option: str, value: str) -> list[str]:
    """An option with its value, where that is not the default."""
    return [] if value == default else [option, value]
