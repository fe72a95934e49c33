"""Objectives of users: the fastest step, the least memory for a speed, a front.

And whether a workload trains on a machine at all, how fast, and what binds (`fit`).

[Note: more is never slower] A plan for less memory is a plan for more, with as many bytes and as
many seconds. So a search begins with the decisions that are known for less, and their plan is the
answer where no faster one is found; unless it needs the disk where there is memory now, and the
disk is not worth it (see `disk`). For a faster link it begins with those for the slower one, and
no more is promised: a move that ends earlier can stand in another's way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from protrain_plan.planning.explain.explaining import lanes_in_a_line
from protrain_plan.planning.model.fluid import Fluid
from protrain_plan.planning.model.problem import Choice, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.alternatives import alternatives, bucket_bytes
from protrain_plan.planning.questions.answers import Answer, LeastMemory, Objective, Point, Question
from protrain_plan.planning.questions.disk import solve_sparing
from protrain_plan.planning.questions.growth import largest_of
from protrain_plan.planning.questions.planner import Hint, problem_of, proven, solve_problem, within
from protrain_plan.planning.search.baselines import keeping
from protrain_plan.planning.search.choices import has_plan, min_memory
from protrain_plan.planning.search.evaluation import Evaluator
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.records.forms import ROUNDING
from protrain_runtime.contract.units import format_bytes

FIRST_STEP = 0.002
"""First increase of the budget in the search for the least memory."""

BISECTIONS = 4

SHARDED = (
    "with --allow rounding a plan fits: every micro-batch's gradients are reduced, as FSDP2 reduces"
    " them, and their sums are added up in shards"
)
"""Advice if whole gradients do not fit."""


def ask(
    question: Question,
    objective: Objective,
    *,
    effort: Effort,
    report: Callable[[Point], None] | None = None,
    hints: Sequence[Hint] = (),
) -> Answer:
    """The answer to a question, from `hints`; points of a front are reported as found."""
    problems = question.problems()
    ours = replace(effort, solver="milp")  # baselines are for the fastest step
    answer = Answer(question=question)
    outcome: Solved | Infeasible | LeastMemory | tuple[Point, ...]
    if (slowdown := objective.max_slowdown) is not None:
        outcome = least_memory(problems, max_slowdown=slowdown, effort=ours)
    elif (points := objective.pareto_points) is not None:
        outcome = pareto(problems, num_points=points, effort=ours, report=report)
    else:
        outcome = solve_sparing(problems, effort=effort, hints=hints)
    if isinstance(outcome, LeastMemory):
        answer, outcome = replace(answer, least_memory=outcome), outcome.solved
    elif isinstance(outcome, tuple):
        answer, outcome = replace(answer, front=outcome), outcome[-1].solved
    if isinstance(outcome, Infeasible):
        if sharded := question.adding_shards():
            found = ask(sharded, objective, effort=effort, report=report, hints=hints)
            return replace(found, question=question)
        batch, sequence = largest_of(question, "batch-size"), largest_of(question, "seq-len")
        advice = outcome.advice
        allowed = replace(question, allow=(*question.allow, ROUNDING))
        if (sharded := allowed.adding_shards()) and has_plan(sharded.problem()):
            advice = (*advice, SHARDED)
        summed = question.settings.micro_batches > 1 and not question.settings.adds_shards
        if batch is None and summed:
            settings = replace(question.settings, micro_batches=1)
            if one := largest_of(replace(question, settings=settings), "batch-size"):
                advice = (
                    *advice,
                    f"with one micro-batch per update, up to {one} sequences on"
                    " each device fit: of several, gradients add up whole on each device",
                )
        outcome = replace(
            outcome, advice=advice, largest_batch_size=batch, largest_seq_len=sequence
        )
        return replace(answer, infeasible=outcome)
    if question.pins and objective == Objective():
        unpinned = replace(question, pins=()).problems()
        free = solve_sparing(unpinned, effort=ours, hints=[outcome.plan.units])
        assert isinstance(free, Solved), "a plan with pins fits, so one without them does"
        answer = replace(answer, seconds_without_pins=free.step_seconds)
    problem = problem_of(outcome, problems)
    kept = keeping(problem, Evaluator(problem))
    return replace(answer, solved=outcome, kept_seconds=kept.seconds if kept else None)


def least_memory(
    problems: Sequence[Problem], *, max_slowdown: float, effort: Effort
) -> LeastMemory | Infeasible:
    """The least device memory for a step of `max_slowdown` times the fastest within the budgets.

    The fluid model's least budget at that speed is the bound and the start; plans for budgets above
    show the cost of whole moves.
    """
    fastest = solve_sparing(problems, effort=effort)
    if isinstance(fastest, Infeasible):
        return fastest
    fewest = problems[0]
    step = fastest.step_seconds
    limit_s = step * max_slowdown
    besides = fewest.profile.hardware.device.besides_bytes
    least = 0
    if not effort.spent():
        least = int(min(Fluid(one).least_bytes(limit_s, effort.spent) for one in problems))
    best, best_bytes = fastest, _needed(fastest)
    hints = [fastest.plan.units]
    inner = replace(effort, enough_s=limit_s)

    def planned(device: int) -> bool:
        nonlocal best, best_bytes
        found = solve_sparing(within(problems, device), effort=inner, hints=hints)
        if isinstance(found, Solved):
            hints.append(found.plan.units)
        if isinstance(found, Infeasible) or found.step_seconds > limit_s:
            return False
        if _needed(found) < best_bytes:
            best, best_bytes = found, _needed(found)
        return True

    low = max(least, getattr(min_memory(fewest, stopped=effort.spent), "bytes", 0))
    grow, high = FIRST_STEP, low
    while not effort.spent() and high < best_bytes and not planned(high):
        low, high = high, int(high * (1 + grow))
        grow *= 2
    for _ in range(BISECTIONS):
        middle = (low + min(high, best_bytes)) // 2
        if middle <= low * (1 + FIRST_STEP) or effort.spent():
            break
        if planned(middle):
            high = middle
        else:
            low = middle
    return LeastMemory(
        solved=best,
        limit_seconds=limit_s,
        fastest_seconds=step,
        lower_bound_bytes=min(least, best_bytes) + besides,
    )


def _needed(solved: Solved) -> int:
    return solved.plan.prediction.peak_bytes.device


def pareto(
    problems: Sequence[Problem],
    *,
    num_points: int,
    effort: Effort,
    report: Callable[[Point], None] | None = None,
) -> tuple[Point, ...] | Infeasible:
    """Plans from the least memory up to the budgets, each faster than the smaller ones.

    Budgets are in equal ratios between the least and the largest useful one; dominated plans are
    omitted. Each point is reported as found.
    """
    problem = problems[0]  # with the fewest replicas, which need least
    besides = problem.profile.hardware.device.besides_bytes
    lean = min_memory(problem, stopped=effort.spent)
    if lean is None or lean.bytes > problem.device:
        found = solve_problem(problem, effort=effort)
        if isinstance(found, Infeasible):
            return found
        # The time was over before a choice was lean enough; that for a plan is a little longer.
        point = Point(device_bytes=_needed(found) + besides, solved=found)
        if report:
            report(point)
        return (point,)
    plain: Choice = ((0, 0),) * problem.count
    largest = max(lean.bytes, min(problem.device, max(problem.static_bytes(plain))))
    points: list[Point] = []
    hints: Sequence[Hint] = ()
    for number in range(num_points):
        share = number / max(1, num_points - 1)
        device = round(lean.bytes * (largest / lean.bytes) ** share)
        if effort.spent() and points:
            break
        found = solve_sparing(within(problems, device), effort=effort, hints=hints)
        if isinstance(found, Infeasible):
            continue  # rounding of the least budget
        hints = (found.plan.units,)
        step = found.step_seconds
        if not points or step < points[-1].solved.step_seconds:
            points.append(Point(device_bytes=_needed(found) + besides, solved=found))
            if report:
                report(points[-1])
    return tuple(points)


def fit(
    question: Question, *, effort: Effort, compare: bool = False, known: Answer | None = None
) -> Answer:
    """Plan the question's profile, and name the bottleneck; with `compare`, beside alternatives.

    If an alternative is faster by more than the accepted gap, the search restarts from it: with
    opt-in sums in shards, if it has them. The search also starts from the plan of a `known` answer
    for the same step, and is not slower if that has less memory: see [Note: more is never slower].
    """
    problems = question.problems()
    before, is_for_less = (known.solved, known.is_for_less(question)) if known else (None, None)
    hints = [before.plan.units] if before and is_for_less is not None else []
    answer = ask(question, Objective(), effort=effort, hints=hints)
    others = alternatives(problems) if compare else ()
    for asked in filter(None, (question, question.adding_shards())):
        if (step_s := answer.step_seconds) is None:
            break
        hints = [
            one.units
            for one in others
            if one.adds_shards == asked.settings.adds_shards
            and (one.step_seconds or inf) < step_s / (1 + effort.gap_target)
        ]
        if hints:
            again = ask(asked, Objective(), effort=effort, hints=hints)
            if (again.step_seconds or inf) < step_s:
                answer = again
    found = answer.solved or answer.infeasible
    assert found is not None
    if before and is_for_less:
        seconds = before.step_seconds
        least = problem_of(before, problems).compute_seconds
        worth = 1.0
        if isinstance(found, Solved):
            least = found.bound_seconds
            worth += question.settings.disk_gain * (before.uses_disk and not found.uses_disk)
        if isinstance(found, Infeasible) or seconds * worth < found.step_seconds:
            plan = replace(before.plan, budgets=question.budgets)
            found = proven(replace(before, plan=plan), least, effort)
    if isinstance(found, Infeasible):
        lacks = format_bytes(found.shortfall_bytes)
        solved, problem = None, problems[0]
        bottleneck = f"needs {lacks} more {found.tier} memory, in {found.slot}"
    else:
        solved, problem = found, problem_of(found, problems)
        bottleneck = lanes_in_a_line(problem, problem.choice_of(found.plan.units))
    return replace(
        answer,
        question=question,
        solved=solved,
        infeasible=None if solved else answer.infeasible,
        bottleneck=bottleneck,
        plain_bytes=plain_bytes(problem),
        alternatives=others,
    )


def plain_bytes(problem: Problem) -> int:
    """Device bytes of plain PyTorch, with non-tensor bytes and DDP's buckets."""
    besides = problem.profile.hardware.device.besides_bytes
    buckets = bucket_bytes(problem.profile) if problem.settings.group.num_devices > 1 else 0
    return max(problem.static_bytes(((0, 0),) * problem.count)) + besides + buckets
