"""Rules about what a plan takes of a machine. See `rules`."""

from dataclasses import dataclass

from protrain_plan.checking.budgets import MachineBudget
from protrain_plan.checking.growing import UnitGrowth, in_words
from protrain_plan.checking.predicting import not_joined, problem_of, tiers_used
from protrain_plan.checking.reestimating import Unavailable
from protrain_plan.checking.remaking import plan_again, plan_command
from protrain_plan.checking.situations import Situation
from protrain_plan.checking.targets import Limit
from protrain_plan.checking.verdicts import Failed, Passed, Skipped, Verdict
from protrain_plan.planning.leanest import leanest
from protrain_plan.records.hardware import TierName
from protrain_plan.records.tree import did_you_mean
from protrain_plan.simulation.ranks import Group
from protrain_plan.units import format_bytes, format_seconds


def hdw001(situation: Situation) -> Verdict:
    """The machine has what the plan uses.

    Its device is of the kind that the plan was made for, since a programme for an accelerator and
    one for a CPU differ, it has every tier that a decision names, its devices are joined where the
    plan is for several, and the budgets are not above what it has.
    """
    case, machine = situation.case, situation.target.hardware
    planned_for = case.profile.hardware.device.kind
    if machine.device.kind != planned_for:
        problem = f"the plan is for a {planned_for} device, and this one is {machine.device.kind}"
        fix = f"profile and plan the model for {machine.name}"
        return Failed(problem=problem, key="workload.device", fix=fix)
    there = [tier.name for tier in machine.tiers]
    missing = [tier for tier in tiers_used(case.plan) if tier not in there]
    if missing:
        problem = f"the plan uses {' and '.join(missing)}, which this machine does not have"
        fix = f"profile and plan the model for {machine.name}"
        return Failed(problem=problem, key="units", fix=fix)
    if (reason := not_joined(case.plan, machine)) is not None:
        problem = f"the plan is for {Group.of(case.plan)}: {reason}"
        return Failed(problem=problem, key="num_devices", fix=plan_again(case))
    if (budget := situation.target.budget) is not None:
        asked = {"device": budget.device, "host": budget.host, "disk": budget.disk}
        has = [("device", machine.device.memory_bytes)]
        has += [(tier.name, tier.capacity_bytes) for tier in machine.tiers]
        for name, size in has:
            limit = asked[name]
            if limit is not None and limit > size:
                problem = (
                    f"the {name} budget of {format_bytes(limit)} in {budget.source} is above the"
                    f" {format_bytes(size)} that there are"
                )
                return Failed(problem=problem, key="budgets", fix=f"lower it in {budget.source}")
    return Passed(found=machine.device.name)


def mem001(situation: Situation) -> Verdict:
    """The predicted device peak is within the budget.

    The peak is an upper bound on tensors, with what the process holds besides (an accelerator's
    context and what its allocator holds beyond the tensors, the interpreter). The budget is that of
    budgets.yaml or pyproject.toml for the machine, less its headroom; without one, the plan's own,
    or all memory of a machine that the plan was not made for. Where the model changed, the peak is
    the estimate of today's model under the plan's decisions, and the message names the layers that
    grew.
    """
    limit = situation.target.device
    if situation.misfit is not None:
        return _undecided(situation, limit)
    predicted_now = situation.predicted
    if predicted_now.device <= limit.bytes:
        return Passed(found=f"{format_bytes(predicted_now.device)} of {format_bytes(limit.bytes)}")
    peak = predicted_now.peak_bytes
    text = (
        f"the predicted peak of {format_bytes(predicted_now.device)}"
        f" ({format_bytes(peak.device)} of tensors,"
        f" {format_bytes(peak.on_device - peak.device)} besides)"
    )
    return _over(situation, text, predicted_now.device, limit)


def host001(situation: Situation) -> Verdict:
    """The predicted host memory is within the budget.

    Host memory is what offloaded states, swapped activations and the host's optimizer take, pinned.
    The budget is found as for MEM001.
    """
    return _below_device(situation, "host", situation.target.host)


def disk001(situation: Situation) -> Verdict:
    """The predicted disk space is within the budget.

    Disk space is what offloaded states and swapped activations take in the spill file. The budget
    is found as for MEM001.
    """
    return _below_device(situation, "disk", situation.target.disk)


def time001(situation: Situation) -> Verdict:
    """The predicted step has not become slower than the budget allows.

    `step_seconds` of a machine's budget is the most that a predicted step may take, and `slowdown`
    how much slower than the plan's own prediction it may become. Without either the rule holds.
    `slowdown` is about the machine that the plan was made for. Seconds of another machine are
    estimated; estimated and measured ones are not compared, so that a model that changed since it
    was measured has to be measured again.
    """
    target, case = situation.target, situation.case
    budget = target.budget
    if budget is None or (budget.step_seconds is None and budget.slowdown is None):
        return Passed(found="no budget")
    if situation.misfit is not None:
        return Skipped(reason=f"the plan is for another model: {situation.misfit}")
    now = situation.seconds
    if isinstance(now, Unavailable):
        return Skipped(reason=now.reason)
    limits: list[tuple[float, str]] = []
    if budget.step_seconds is not None:
        limits.append((budget.step_seconds, f"the budget in {budget.source}"))
    if budget.slowdown is not None and target.own:
        recorded = case.plan.prediction.step_seconds
        allowed = recorded * (1 + budget.slowdown)
        words = f"{100 * budget.slowdown:g}% above the plan's {format_seconds(recorded)}"
        limits.append((allowed, words))
    for seconds, source in limits:
        if now > seconds:
            problem = (
                f"the predicted step of {format_seconds(now)} exceeds"
                f" {format_seconds(seconds)}, {source}"
            )
            key = "prediction.step_seconds"
            return Failed(problem=problem, key=key, fix=plan_again(case))
    return Passed(found=format_seconds(now))


def _below_device(situation: Situation, tier: TierName, limit: Limit) -> Verdict:
    if situation.misfit is not None:
        return Skipped(reason=f"the plan is for another model: {situation.misfit}")
    used: int = getattr(situation.predicted.peak_bytes, tier)
    if used <= limit.bytes:
        found = f"{format_bytes(used)} of {format_bytes(limit.bytes)}" if used else "none needed"
        return Passed(found=found)
    what = {"host": "host memory", "disk": "disk space"}[tier]
    return _over(situation, f"the predicted {what} of {format_bytes(used)}", used, limit)


def _over(situation: Situation, text: str, used: int, limit: Limit) -> Failed:
    """That a tier's limit is exceeded, which layers grew, and whether planning again would help."""
    grown = tuple(unit for unit in situation.model.growth if unit.total_bytes > 0)
    problem = (
        f"{text} exceeds {format_bytes(limit.bytes)} ({limit.source})"
        f" by {format_bytes(used - limit.bytes)}"
    )
    return _with_remedy(situation, problem, "prediction.peak_bytes", grown, used - limit.bytes)


def _undecided(situation: Situation, limit: Limit) -> Verdict:
    """Today's model has other units than the plan: only whether some plan fits can be said."""
    if (reason := not_joined(situation.case.plan, situation.target.hardware)) is not None:
        return Skipped(reason=reason)
    problem = f"the plan is for another model: {situation.misfit}"
    failed = _with_remedy(situation, problem, "units", situation.model.growth, None)
    if not failed.no_plan_fits:
        return Skipped(reason=f"{problem}; another plan fits {format_bytes(limit.bytes)}")
    return failed


def _with_remedy(
    situation: Situation,
    problem: str,
    key: str,
    grown: tuple[UnitGrowth, ...],
    excess_bytes: int | None,
) -> Failed:
    if grown:
        problem += f"; since it was profiled: {in_words(grown)}"
    case, limits = situation.case, situation.target.budgets
    asked = problem_of(case.plan, situation.profile, limits)
    lean = leanest(asked)
    none_fits = lean is None or lean.bytes > asked.device
    if none_fits:
        at_least = ""
        if lean is not None:
            needed = lean.bytes + asked.profile.hardware.device.besides_bytes
            at_least = f": the leanest needs {format_bytes(needed)} of the device"
        fix = f"no plan of this workload fits{at_least}"
    else:
        again = "profile it again, then " if situation.model.changed else ""
        fix = f"another plan fits: {again}{plan_command(case, limits)}"
    return Failed(
        problem=problem,
        key=key,
        fix=fix,
        growth=grown,
        excess_bytes=excess_bytes,
        no_plan_fits=none_fits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A budget, and the machines on which plans were checked."""

    budget: MachineBudget
    machine: str
    machines: frozenset[str]


def bud001(guard: Guard) -> Verdict:
    """Every budget is held against some plan.

    A budget is for plans that were made for its machine, and for those that its `plans` name. One
    that has neither guards nothing: its machine's name may be mistaken, or the plans are not among
    those that are checked. With --on, budgets of other machines are not looked at.
    """
    if guard.machine in guard.machines:
        return Passed()
    reason = "no plan that is checked was made for this machine"
    if guard.budget.plans:
        reason += f", or matches {' or '.join(guard.budget.plans)}"
    near = did_you_mean(guard.machine, sorted(guard.machines))
    return Skipped(reason=f"{reason}; {near}" if near else reason)
