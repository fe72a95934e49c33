"""The rules of `protrain check`: functions that return verdicts.

A function's name is the rule's code, its docstring the explanation. Rules about a plan's file come
first, then those about its profile and its model, then those about each machine; if one group
fails, later ones are not applied. Rules about budgets and the number of plans come last. A new rule
is a function here, and its name in a table at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from pathlib import Path
from typing import Any, TypeVar, get_args

from protrain_plan.checking.budgets import MachineBudget
from protrain_plan.checking.diffing import UnitGrowth, growth_in_words
from protrain_plan.checking.plan_files import Case, Files, line_of, opened, search
from protrain_plan.checking.plan_on_machine import Machines, Model, PlanOnMachine, misfit, predicted
from protrain_plan.checking.reestimate import Broken, Look, Unavailable
from protrain_plan.hardware.catalogue import hardware_names
from protrain_plan.planning.search.choices import min_memory
from protrain_plan.planning.stages.pipelines import problems_of
from protrain_plan.simulation.group import not_joined
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records import commands as records
from protrain_runtime.contract.records.hardware import Hardware, TierName
from protrain_runtime.contract.records.plan import SETTINGS, Budgets, StepSettings
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.contract.records.tree import parsed
from protrain_runtime.contract.records.words import did_you_mean, listed, number_text
from protrain_runtime.contract.units import exact_bytes, format_bytes, format_seconds

Subject = TypeVar("Subject")


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
    line: int | None = None  # of a file that cannot be read
    fix: str | None = None
    growth: tuple[UnitGrowth, ...] = ()
    excess_bytes: int | None = None
    no_plan_fits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A rule that is skipped, since an input is missing."""

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

    num_plans    plans that were checked, including those that cannot be read
    num_seen     files that were named, and files in folders that were named
    num_records  records among these files, including those that cannot be read

    With `strict`, skipped rules count as failures.
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


def ver001(files: Files) -> Verdict:
    """Plan and profile are records that this version reads.

    Records are strict: an unknown key, a missing one or a value of another kind is an error, never
    a guess. A record of a newer version needs a newer protrain-plan; one that does not read was
    edited by hand, or merged badly. JSON Schemas of all records are in schemas/.

    In a folder every YAML file is a record that has the key `protrain` at its top, however it is
    written. One that was meant as a record and cannot be read as one fails by itself, and so does
    what cannot be looked into: a link that leads out of the folder, a pipe, a folder without
    permission.
    """
    if isinstance(files.plan, RecordError):
        return _unreadable(files.plan, where="")
    if opened(files) is None:
        for path, profile in files.profiles:
            if isinstance(profile, RecordError):
                return _unreadable(profile, where=f"{path}:{profile.line}: ")
    version = parsed(files.text, None).at("version").read(int)
    return Passed(found=f"version {version}")


def _unreadable(error: RecordError, *, where: str) -> Failed:
    problem = f"{where}{error.key}: {error.message}" if error.key else f"{where}{error.message}"
    return Failed(problem=problem, line=None if where else error.line, fix=error.fix)


def prf001(files: Files) -> Verdict:
    """The profile that the plan was made from lies in its folder.

    A plan names its profile by a fingerprint of everything in it but comments. Without the profile
    the cost of the plan's decisions is unknown; with another one the plan answers a different
    question. Commit both together: protrain plan writes the plan, protrain profile the profile.
    """
    assert not isinstance(files.plan, RecordError)
    case = opened(files)
    if case is not None:
        return Passed(found=case.profile_path.name)
    wanted = files.plan.profile_fingerprint
    if not files.profiles:
        problem = f"no profile in {files.path.parent}"
        fix = f"add the profile with the fingerprint {wanted} next to the plan"
    else:
        names = listed([path.name for path, _ in files.profiles], "or")
        problem = f"the plan was made from the profile {wanted}, which is not {names}"
        path, profile = files.profiles[0]
        assert isinstance(profile, Profile), "VER001 holds"
        other = Case(path=files.path, plan=files.plan, profile_path=path, profile=profile)
        fix = plan_again(other)
    return Failed(problem=problem, key="profile_fingerprint", fix=fix)


def pln001(model: Model) -> Verdict:
    """The plan decides about the units of its profile, and nothing that they cannot do.

    Every unit has its decisions, in execution order, described as the profile describes it; a part
    between blocks keeps its activations, and no decision names a tier that the machine lacks.
    """
    case = model.case
    if (problem := misfit(case.plan, case.profile)) is not None:
        return _stale(case, problem, "units")
    for key in ("model_fingerprint", "workload"):
        if getattr(case.plan, key) != getattr(case.profile, key):
            what = key.removesuffix("_fingerprint")
            return _stale(case, f"the plan and its profile name different {what}s", key)
    return Passed(found=f"{len(case.plan.units)} units")


def _stale(case: Case, problem: str, key: str) -> Failed:
    """A problem that planning again solves."""
    return Failed(problem=problem, key=key, fix=plan_again(case))


def exa001(model: Model) -> Verdict:
    """The plan computes what plain PyTorch does, or the repository allows the difference.

    A plan whose activation options round differently, or are approximate, says `exact: false` and
    lists what it was allowed. The repository has to list the same: `allow = ["rounding"]` in
    `[tool.protrain]` of pyproject.toml, or `allow: [rounding]` in budgets.yaml. A new plan thus
    never changes results unnoticed.
    """
    plan = model.case.plan
    if not (missing := [word for word in plan.allowed if word not in model.allow]):
        return Passed(found=plan.exactness)
    return Failed(
        problem=f"the plan uses {listed(missing, 'and')}, which the repository does not allow: its"
        f" results differ from plain PyTorch ({plan.exactness})",
        key="allowed",
        fix="plan without --allow, or add it to allow in [tool.protrain]",
    )


def sim001(model: Model) -> Verdict:
    """The recorded prediction follows from the profile and the plan.

    Simulated once more, the decisions give the recorded seconds and the recorded peak of every
    tier, exactly. They do not if decisions or numbers were edited by hand, or if this version
    predicts differently from the one that made the plan.
    """
    case = model.case
    recorded, found = case.plan.prediction, predicted(case.plan, case.profile)
    for tier in ("device", "context", "host", "disk"):
        before, now = getattr(recorded.peak_bytes, tier), getattr(found.peak_bytes, tier)
        if before != now:
            problem = f"the recorded peak is {before} bytes ({tier}), the computed one {now}"
            return _stale(case, problem, "prediction.peak_bytes")
    before_s, now_s = recorded.step_seconds, found.step_seconds
    if before_s != now_s:
        problem = f"the recorded step is {before_s!r} s, the computed one {now_s!r} s"
        return _stale(case, problem, "prediction.step_seconds")
    stages = case.plan.pipeline.stages if case.plan.pipeline else ()
    for stage, (before, now) in enumerate(zip(stages, found.stages, strict=True)):
        if before != now:
            problem = f"the recorded values of stage {stage} differ from the computed ones"
            return _stale(case, problem, "pipeline.stages")
    if recorded.lower_bound_seconds > before_s:
        problem = "the recorded lower bound exceeds the step time"
        return _stale(case, problem, "prediction.lower_bound_seconds")
    return Passed()


def sim002(model: Model) -> Verdict:
    """The plan's program cannot deadlock.

    Moves and slots wait for each other as the decisions say. Leads that a planner chose never make
    them wait in a circle; this rule is for plans that were edited by hand.
    """
    # A program whose moves wait for earlier moves only cannot deadlock.
    for of_stage, own in problems_of(model.case.plan, model.case.profile):
        program = of_stage.program(own.units)
        submitted: set[int] = set()
        waiting: list[int] = []  # moves that are waited for, or wait, before they can start
        for slot in program.slots:
            for waits, then in ((slot.drained, slot.submit), (slot.ready, slot.finish)):
                waiting += [number for number in waits if number not in submitted]
                for number in then:
                    waiting += [number] * (not submitted.issuperset(program.moves[number].after))
                    submitted.add(number)
        if waiting:
            names = ", ".join(map(program.move_name, waiting))
            return _stale(model.case, f"these moves wait for each other: {names}", "units")
    return Passed()


def fpr001(model: Model) -> Verdict:
    """The model's code and configuration still give what was profiled.

    The model is built again from its source, without weights, and its fingerprint (modules,
    parameters, shapes, types) and configuration are compared with the profile's. Where the profile
    is an estimate, it is estimated once more, and bytes that differ fail too; a measured one holds
    as long as fingerprint and configuration do. The message names the layers that take more or
    less than before. A model that can no longer be built, or estimated, fails; where what builds it
    is not installed, the rule is skipped. The model's code runs in a process of its own: if that
    ends, dies, or takes more time or memory than it is given, the rule fails.
    """
    case, today = model.case, model.today
    if isinstance(today, Unavailable):
        return Skipped(reason=today.reason)
    if isinstance(today, Broken):
        problem = f"the model cannot be built: {today.reason}"
        return Failed(problem=problem, key="workload", fix=today.fix)
    grown = model.growth
    estimated = model.profile.method == "estimated"
    found = today.profile(case.profile.hardware) if estimated or model.changed else None
    if model.changed:
        keys = today.changed_keys
        problem = f"the configuration changed ({', '.join(keys)})" if keys else "the model changed"
        if grown:
            problem += f": {growth_in_words(grown)}"
        elif isinstance(found, Broken):
            problem += f", and can no longer be estimated: {found.reason}"
        elif isinstance(found, Profile):
            problem += ", and its bytes are unchanged"
    elif grown:
        problem = f"the same model now takes different bytes: {growth_in_words(grown)}"
    elif isinstance(found, Broken):
        problem = f"the model can no longer be estimated: {found.reason}"
        return Failed(problem=problem, key="workload", fix=found.fix)
    elif isinstance(found, Unavailable):
        return Skipped(reason=found.reason)
    else:
        return Passed(found=case.profile.model_fingerprint)
    again = profile_command(case.profile, str(case.profile_path))
    commands = f"{again} && {plan_command(case, case.plan.budgets)}"
    fix = f"profile and plan it again, and commit both: {commands}"
    return Failed(problem=problem, key="model_fingerprint", fix=fix, growth=grown)


def num001(expected: int, found: int) -> Verdict:
    """As many plans are checked as are expected.

    With --expect N, so that a plan that is moved away, renamed or written so that it is no longer
    one is missed. Records that cannot be read as plans do not count. Without it nothing is
    expected.
    """
    if found == expected:
        return Passed(found=f"{found} plans")
    problem = f"expected {expected} plans, checked {found}"
    return Failed(problem=problem, fix="restore the missing plans, or change --expect")


def hdw001(situation: PlanOnMachine) -> Verdict:
    """The machine has what the plan uses.

    Its device is of the kind that the plan was made for, since programs for accelerators and for
    CPUs differ, it has every tier that a decision names, its devices are joined where the plan is
    for several, and the budgets are not above what it has.
    """
    case, machine = situation.case, situation.hardware
    planned_for = case.profile.hardware.device.kind
    fix = f"profile and plan the model for {machine.name}"
    if machine.device.kind != planned_for:
        problem = f"the plan is for a {planned_for} device, and this one is {machine.device.kind}"
        return Failed(problem=problem, key="workload.device", fix=fix)
    decisions = [one for unit in case.plan.units for one in (unit.activations, unit.states)]
    used = {getattr(decision, "tier", None) for decision in decisions}
    there = [tier.name for tier in machine.tiers]
    missing = [tier for tier in get_args(TierName) if tier in used and tier not in there]
    if missing:
        problem = f"the plan uses {' and '.join(missing)}, which this machine lacks"
        return Failed(problem=problem, key="units", fix=fix)
    if (reason := not_joined(case.plan, machine)) is not None:
        problem = f"the plan is for {case.plan.group}: {reason}"
        return _stale(case, problem, "settings.group.num_devices")
    has = {"device": machine.device.memory_bytes}
    has |= {tier.name: tier.capacity_bytes for tier in machine.tiers}
    source = situation.budget and situation.budget.source
    for name, size in has.items():
        limit: int | None = getattr(situation.budget, name, None)
        if limit is not None and limit > size:
            most = format_bytes(size)
            problem = f"the {name} budget of {format_bytes(limit)} in {source} exceeds the {most}"
            return Failed(
                problem=f"{problem} available", key="budgets", fix=f"lower it in {source}"
            )
    return Passed(found=machine.device.name)


def mem001(situation: PlanOnMachine) -> Verdict:
    """The predicted device peak is within the budget.

    The peak is an upper bound on tensors, with what the process holds besides (an accelerator's
    context and what its allocator holds beyond the tensors, the interpreter). The budget is that of
    budgets.yaml or pyproject.toml for the machine, less its headroom; without one, the plan's own,
    or all memory of a machine that the plan was not made for. Where the model changed, the peak is
    the estimate of today's model under the plan's decisions, and the message names the layers that
    grew.
    """
    if situation.misfit is not None:  # then only whether some plan fits can be said
        if (reason := not_joined(situation.case.plan, situation.hardware)) is not None:
            return Skipped(reason=reason)
        problem = f"the plan is for a different model: {situation.misfit}"
        if situation.case.plan.pipeline is not None:  # its stages are unknown
            return Skipped(reason=problem)
        failed = Failed(problem=problem, key="units", growth=situation.model.growth)
        failed = _with_remedy(situation, failed)
        if failed.no_plan_fits:
            return failed
        limit = format_bytes(situation.limits["device"].bytes)
        return Skipped(reason=f"{problem}; another plan fits {limit}")
    peak = situation.predicted.peak_bytes
    used, besides = peak.on_device, peak.on_device - peak.device
    parts = f" ({format_bytes(peak.device)} of tensors, {format_bytes(besides)} besides)"
    return _within(situation, "device", "peak", used, parts)


def host001(situation: PlanOnMachine) -> Verdict:
    """The predicted host memory is within the budget.

    Host memory is what offloaded states, swapped activations and the host's optimizer take, pinned.
    The budget is found as for MEM001.
    """
    return _below_device(situation, "host", "host memory")


def disk001(situation: PlanOnMachine) -> Verdict:
    """The predicted disk space is within the budget.

    Disk space is what offloaded states and swapped activations take in the spill file. The budget
    is found as for MEM001.
    """
    return _below_device(situation, "disk", "disk space")


def time001(situation: PlanOnMachine) -> Verdict:
    """The predicted step has not become slower than the budget allows.

    `step_seconds` of a machine's budget is the most that a predicted step may take, and `slowdown`
    how much slower than the plan's own prediction it may become. Without either the rule holds.
    `slowdown` is about the machine that the plan was made for. Seconds of another machine are
    estimated; estimated and measured ones are not compared, so that a model that changed since it
    was measured has to be measured again.
    """
    case, budget = situation.case, situation.budget
    if budget is None or (budget.step_seconds is None and budget.slowdown is None):
        return Passed(found="no budget")
    if situation.misfit is not None:
        return Skipped(reason=f"the plan is for a different model: {situation.misfit}")
    now = situation.seconds
    if isinstance(now, Unavailable):
        return Skipped(reason=now.reason)
    if isinstance(now, Broken):
        return Failed(problem=now.reason, key="workload", fix=now.fix)
    limits = [(budget.step_seconds, f"the budget in {budget.source}")]
    if budget.slowdown is not None and situation.own:
        recorded = case.plan.prediction.step_seconds
        words = f"{100 * budget.slowdown:g}% above the plan's {format_seconds(recorded)}"
        limits.append((recorded * (1 + budget.slowdown), words))
    for seconds, source in limits:
        if seconds is not None and now > seconds:
            took, most = format_seconds(now), format_seconds(seconds)
            problem = f"the predicted step of {took} exceeds {most}, {source}"
            return _stale(case, problem, "prediction.step_seconds")
    return Passed(found=format_seconds(now))


def _below_device(situation: PlanOnMachine, tier: TierName, what: str) -> Verdict:
    if situation.misfit is not None:
        return Skipped(reason=f"the plan is for a different model: {situation.misfit}")
    used: int = getattr(situation.predicted.peak_bytes, tier)
    return _within(situation, tier, what, used) if used else Passed(found="none needed")


def _within(situation: PlanOnMachine, tier: str, what: str, used: int, parts: str = "") -> Verdict:
    """The verdict on a limit: by how much it is exceeded, layers that grew, and a remedy."""
    limit = situation.limits[tier]
    most, excess = format_bytes(limit.bytes), used - limit.bytes
    if excess <= 0:
        return Passed(found=f"{format_bytes(used)} of {most}")
    grown = tuple(unit for unit in situation.model.growth if unit.total_bytes > 0)
    problem = (
        f"the predicted {what} of {format_bytes(used)}{parts} exceeds {most} ({limit.source})"
        f" by {format_bytes(excess)}"
    )
    failed = Failed(problem=problem, key="prediction.peak_bytes", growth=grown, excess_bytes=excess)
    return _with_remedy(situation, failed)


def _with_remedy(situation: PlanOnMachine, failed: Failed) -> Failed:
    """Add the layers that grew, and another plan if one fits."""
    case, limits, problem = situation.case, situation.budgets, failed.problem
    if failed.growth:
        problem += f"; since it was profiled: {growth_in_words(failed.growth)}"
    again = "profile it again, then " if situation.model.changed else ""
    fix = f"another plan fits: {again}{plan_command(case, limits)}"
    failed = replace(failed, problem=problem, fix=fix)
    for stage, (asked, _) in enumerate(problems_of(case.plan, situation.profile, limits)):
        lean = min_memory(asked)
        if lean is not None and lean.bytes <= asked.device:
            continue
        at_least = ""
        if lean is not None:
            needed = lean.bytes + asked.profile.hardware.device.besides_bytes
            at_least = f": the smallest needs {format_bytes(needed)} on the device"
        if case.plan.pipeline is None:
            fix = f"no plan of this workload fits{at_least}"
            return replace(failed, fix=fix, no_plan_fits=True)
        other = plan_command(case, limits, stages="auto")  # other cuts may fit
        fix = f"no plan of stage {stage} fits{at_least}; look for other stages: {again}{other}"
        return replace(failed, fix=fix)
    return failed


def bud001(budget: MachineBudget, machine: str, machines: set[str]) -> Verdict:
    """Every budget is held against some plan.

    A budget is for plans that were made for its machine, and for those that its `plans` name. One
    that has neither guards nothing: the plans are not among those that are checked, or its
    machine's name is misspelt, which fails where a plan's machine has nearly that name. With --on,
    budgets of other machines are not looked at.
    """
    if machine in machines:
        return Passed()
    reason = "none of the checked plans is for this machine"
    if budget.plans:
        reason += f", or matches {' or '.join(budget.plans)}"
    near = did_you_mean(machine, sorted(machines))
    if near and machine not in hardware_names():
        return Failed(problem=reason, fix=near)
    return Skipped(reason=reason)


def plan_again(case: Case) -> str:
    """The command that makes the plan again, within its own budgets."""
    return f"plan it again: {plan_command(case, case.plan.budgets)}"


def plan_command(case: Case, budgets: Budgets, *, stages: str | None = None) -> str:
    """`protrain plan` with the plan's own options, these budgets, and other `stages` if given."""
    plan, group = case.plan, case.plan.whole
    words = ["--device-memory", exact_bytes(budgets.device)]
    options = {"host": ("--host-memory", budgets.host), "disk": ("--disk", budgets.disk)}
    for tier in case.profile.hardware.tiers:
        option, size = options[tier.name]
        if size != tier.capacity_bytes:  # the planner's default
            words += [option, exact_bytes(size * group.in_node)]
    counts = {"--num-devices": group.num_devices, "--nodes": group.num_nodes}
    found: tuple[str, ...] = ()
    if plan.pipeline:  # its replicas and micro-batches are found, from the global batch
        found = ("micro_batches",)
    else:
        counts["--replicas"] = group.num_replicas
    words += [word for name, count in counts.items() if count > 1 for word in (name, str(count))]
    if plan.pipeline:
        words += ["--stages", stages or str(plan.num_stages)]
        words += ["--global-batch", str(plan.global_batch)]
    for name, (_, word) in SETTINGS.items():
        value = getattr(plan.settings, name)
        if word is None or name in found or value == getattr(StepSettings(), name):
            continue
        words.append(word)
        if name.endswith("_bytes"):
            words.append(exact_bytes(value * group.in_node))
        elif not isinstance(value, str):
            words.append(number_text(value) if isinstance(value, float) else str(value))
    words += records.allow_options(plan.allowed)
    return records.command("plan", str(case.profile_path), [*words, "-o", str(case.path)])


def profile_command(profile: Profile, path: str) -> str:
    """`protrain profile` with the options that a profile in a file was made with."""
    name, on = profile.hardware.name, None
    if profile.method == "estimated":
        on = name if name in hardware_names() else path
    optimizer, allow = profile.optimizer.name, profile.allowed
    return records.profile_command(
        profile.workload, optimizer=optimizer, output=path, on=on, allow=allow
    )


FILE_RULES = (ver001, prf001)
MODEL_RULES = (pln001, exa001, sim001, sim002, fpr001)
MACHINE_RULES = (hdw001, mem001, host001, disk001, time001)
_ALL: Sequence[Callable[..., Verdict]]
_ALL = (*FILE_RULES, *MODEL_RULES, *MACHINE_RULES, bud001, num001)
RULES = {rule.code: rule for rule in map(Rule.of, _ALL)}


def explained(code: str) -> Rule:
    """The rule with the code, in any case; ProtrainError, with the nearest one, where none has."""
    if code.upper() not in RULES:
        fix = did_you_mean(code.upper(), RULES) or f"the rules are {', '.join(RULES)}"
        raise ProtrainError(f"no such rule: {code!r}", key="--explain", fix=fix)
    return RULES[code.upper()]


def check(
    plans: Sequence[Path],
    *,
    look: Look,
    budgets: Mapping[str, MachineBudget],
    allow: tuple[str, ...] = (),
    on: Sequence[Hardware] = (),
    strict: bool = False,
    expect: int | None = None,
    prepare: Callable[[Sequence[Profile]], object] = lambda _: None,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> Report:
    """Hold the plans, and those in folders, against all rules.

    `look` finds today's model of a profile; `prepare` first gets the profiles it will be asked for.
    Each plan is checked on its own machine and those whose budgets name it, or on the machines in
    `on` instead. `allow` lists the approximations that the repository allows. With `expect`, so
    many plans have to be there. ProtrainError where a machine is not known, a path is missing or a
    folder has no plan.
    """
    findings: list[Finding] = []
    # Everything is read before any model's code runs, which could write files.
    found = search(plans)
    machines = Machines(budgets, [files.path for files in found.files])
    prepare([case.profile for case in map(opened, found.files) if case is not None])
    for number, files in enumerate(found.files):
        progress(str(files.path), number / len(found.files))
        findings += _findings(files, look, machines, on, allow)
    names = {one.machine for one in findings if one.machine is not None}
    readable = {one.plan for one in findings if one.machine is not None}
    # An unreadable plan may be the one of a budget: then unmatched budgets are unknown.
    if not on and readable == {one.plan for one in findings}:
        findings += [
            Finding(rule=Rule.of(bud001), plan=budget.source, machine=machine, verdict=verdict)
            for machine, budget in machines.budgets.items()
            # Budgets that guard something are not listed.
            if not isinstance(verdict := bud001(budget, machine, names), Passed)
        ]
    num_plans = sum(files.is_plan for files in found.files)
    if expect is not None:
        count = num001(expect, num_plans)
        findings.append(Finding(rule=Rule.of(num001), plan=str(plans[0]), verdict=count))
    return Report(
        findings=tuple(findings),
        num_plans=num_plans,
        num_records=found.num_records,
        num_seen=found.num_seen,
        strict=strict,
    )


def _findings(
    files: Files, look: Look, machines: Machines, on: Sequence[Hardware], allow: tuple[str, ...]
) -> list[Finding]:
    """One plan's findings, stage by stage; a stage that fails ends what depends on it."""
    found: list[Finding] = []

    def holds(
        rule: Callable[[Subject], Verdict], subject: Subject, machine: str | None = None
    ) -> bool:
        try:
            verdict = rule(subject)
        except Exception as error:  # noqa: BLE001  (a mistake of ours is no reason to pass)
            ours = not isinstance(error, ProtrainError)
            reason = f"a bug in protrain: {error!r}" if ours else str(error)
            verdict = Failed(problem=f"this cannot be checked: {reason}")
        failed = verdict if isinstance(verdict, Failed) else None
        line = (failed and failed.line) or line_of(files.text, failed.key if failed else None)
        of, plan = Rule.of(rule), str(files.path)
        found.append(Finding(rule=of, plan=plan, line=line, machine=machine, verdict=verdict))
        return failed is None

    if not all(holds(rule, files) for rule in FILE_RULES):
        return found
    case = opened(files)
    assert case is not None, "PRF001 holds"
    model = Model(case=case, today=look(case.profile), allow=allow)
    if not holds(MODEL_RULES[0], model):
        return found
    for rule in MODEL_RULES[1:]:
        holds(rule, model)
    for situation in machines.of(model, on):
        name = situation.hardware.name
        if holds(MACHINE_RULES[0], situation, name):
            for limit in MACHINE_RULES[1:]:
                holds(limit, situation, name)
    return found
