"""Rules about a plan's file, its profile and its model, wherever it runs. See `rules`."""

from protrain_plan.checking.cases import Case, Files, opened
from protrain_plan.checking.growing import in_words
from protrain_plan.checking.predicting import circle, misfit, predicted
from protrain_plan.checking.reestimating import Broken, Unavailable
from protrain_plan.checking.remaking import plan_again, plan_command, profile_command
from protrain_plan.checking.situations import Model
from protrain_plan.checking.verdicts import Failed, Passed, Skipped, Verdict
from protrain_plan.errors import RecordError
from protrain_plan.records.profile import Profile
from protrain_plan.records.schema import VERSION

# --- files ----------------------------------------------------------------------------------------


def ver001(files: Files) -> Verdict:
    """Plan and profile are records that this version reads.

    Records are strict: an unknown key, a missing one or a value of another kind is an error, never
    a guess. A record of a newer version needs a newer protrain-plan; one that does not read was
    edited by hand, or merged badly. JSON Schemas of all records are in schemas/.
    """
    if isinstance(files.plan, RecordError):
        return _unreadable(files.plan, where="")
    if opened(files) is None:
        for path, profile in files.profiles:
            if isinstance(profile, RecordError):
                return _unreadable(profile, where=f"{path}:{profile.line}: ")
    return Passed(found=f"version {VERSION}")


def _unreadable(error: RecordError, *, where: str) -> Failed:
    problem = f"{where}{error.key}: {error.message}" if error.key else f"{where}{error.message}"
    return Failed(problem=problem, line=None if where else error.line, fix=error.fix)


def prf001(files: Files) -> Verdict:
    """The profile that the plan was made from lies in its folder.

    A plan names its profile by a fingerprint of everything in it but comments. Without the profile
    nobody can tell what the plan's decisions take; with another one the plan answers a question
    that was not asked. Commit both together: protrain plan writes the plan, protrain profile the
    profile.
    """
    assert not isinstance(files.plan, RecordError)
    case = opened(files)
    if case is not None:
        return Passed(found=case.profile_path.name)
    wanted = files.plan.profile_fingerprint
    if not files.profiles:
        problem = f"there is no profile in {files.path.parent}"
        fix = f"put the profile with the fingerprint {wanted} beside the plan"
    else:
        names = " and ".join(path.name for path, _ in files.profiles)
        problem = f"the plan was made from the profile {wanted}, which {names} is not"
        path, profile = files.profiles[0]
        assert isinstance(profile, Profile), "VER001 holds"
        other = Case(path=files.path, plan=files.plan, profile_path=path, profile=profile)
        fix = plan_again(other)
    return Failed(problem=problem, key="profile_fingerprint", fix=fix)


# --- the plan and its model -----------------------------------------------------------------------


def pln001(model: Model) -> Verdict:
    """The plan decides about the units of its profile, and nothing that they cannot do.

    Every unit has its decisions, in execution order, described as the profile describes it; a part
    between blocks keeps its activations, and no decision names a tier that the machine lacks.
    """
    case = model.case
    if (problem := misfit(case.plan, case.profile)) is not None:
        return Failed(problem=problem, key="units", fix=plan_again(case))
    if case.plan.model_fingerprint != case.profile.model_fingerprint:
        problem = "the plan names another model than its profile"
        return Failed(problem=problem, key="model_fingerprint", fix=plan_again(case))
    if case.plan.workload != case.profile.workload:
        problem = "the plan names another workload than its profile"
        return Failed(problem=problem, key="workload", fix=plan_again(case))
    return Passed(found=f"{len(case.plan.units)} units")


def sim001(model: Model) -> Verdict:
    """The recorded prediction follows from the profile and the plan.

    Simulated once more, the decisions give the recorded seconds and the recorded peak of every
    tier, exactly. They do not where somebody edited decisions or numbers by hand, or where this
    version predicts otherwise than the one that made the plan.
    """
    case = model.case
    recorded, found = case.plan.prediction, predicted(case.plan, case.profile)
    for tier in ("device", "context", "host", "disk"):
        before, now = getattr(recorded.peak_bytes, tier), getattr(found.peak_bytes, tier)
        if before != now:
            problem = f"a peak of {before} bytes is recorded ({tier}), and {now} come out"
            return Failed(problem=problem, key="prediction.peak_bytes", fix=plan_again(case))
    if recorded.step_seconds != found.step_seconds:
        before_s, now_s = recorded.step_seconds, found.step_seconds
        problem = f"a step of {before_s!r} s is recorded, and {now_s!r} s come out"
        return Failed(problem=problem, key="prediction.step_seconds", fix=plan_again(case))
    if recorded.lower_bound_seconds > recorded.step_seconds:
        problem = "the recorded bound is above the step that it bounds"
        return Failed(problem=problem, key="prediction.lower_bound_seconds", fix=plan_again(case))
    return Passed()


def sim002(model: Model) -> Verdict:
    """The plan's programme can go on at every moment.

    Moves and slots wait for each other as the decisions say. Leads that a planner chose never make
    them wait in a circle; this rule is for plans that were edited by hand.
    """
    waiting = circle(model.case.plan, model.case.profile)
    if waiting:
        problem = f"these wait for each other: {', '.join(waiting)}"
        return Failed(problem=problem, key="units", fix=plan_again(model.case))
    return Passed()


def fpr001(model: Model) -> Verdict:
    """The model's code and configuration still give what was profiled.

    The model is built again from its source, without weights, and its fingerprint (modules,
    parameters, shapes, types) and configuration are compared with the profile's. Where the profile
    is an estimate, it is estimated once more, and bytes that differ fail too; a measured one holds
    as long as fingerprint and configuration do. The message names the layers that take more or
    less than before. A model that can no longer be built fails; where what builds it is not
    installed, the rule is skipped.
    """
    case, today = model.case, model.today
    if isinstance(today, Unavailable):
        return Skipped(reason=today.reason)
    if isinstance(today, Broken):
        problem = f"the model cannot be built: {today.reason}"
        return Failed(problem=problem, key="workload", fix="mend the model, or its configuration")
    grown = model.growth
    estimated = model.profile.method == "estimated"
    if model.changed:
        keys = today.changed_keys
        problem = f"the configuration changed ({', '.join(keys)})" if keys else "the model changed"
        if grown:
            problem += f": {in_words(grown)}"
        elif estimated:
            problem += ", and takes as many bytes as before"
    elif grown:
        problem = f"the same model takes other bytes than were estimated: {in_words(grown)}"
    else:
        found = today.profile(case.profile.hardware) if estimated else None
        if isinstance(found, Unavailable):
            return Skipped(reason=found.reason)
        return Passed(found=case.profile.model_fingerprint)
    commands = f"{profile_command(case)} && {plan_command(case, case.plan.budgets)}"
    fix = f"profile and plan it again, and commit both: {commands}"
    return Failed(problem=problem, key="model_fingerprint", fix=fix, growth=grown)
