"""`--stages`: the best number of pipeline stages for a model, from its profile or its name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protrain_plan.commands.option_records import option, option_record
from protrain_plan.commands.options import integers, refuse_batches
from protrain_plan.commands.output import interruptible, print_result, progress
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.cells import Cells, Row
    from protrain_plan.commands.measuring import ProfileRequest
    from protrain_plan.commands.option_records import BudgetOptions
    from protrain_plan.planning.questions.answer_cache import AnswerCache
    from protrain_plan.planning.questions.answers import Answer, Question
    from protrain_plan.planning.search.improving import Effort, Progress
    from protrain_plan.planning.stages.answer import StagesAnswer, StagesQuestion
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_runtime.contract.records.hardware import Hardware
    from protrain_runtime.contract.records.plan import StepSettings
    from protrain_runtime.contract.records.profile import Profile

SIZES = (1, 2, 4, 8)
"""Sequences per micro-batch of estimated models: pipelines want small ones."""


@option_record
class StageOptions:
    """Stages of a pipeline."""

    stages: str | None = option(
        "Stages of a pipeline, or auto: the fastest number for --global-batch, where to cut, and"
        " whether it is worth it."
    )

    def numbers(self) -> tuple[int, ...] | None:
        """The numbers to choose from (none: all), if stages are wanted."""
        if self.stages in (None, "auto"):
            return () if self.stages else None
        return integers("--stages", self.stages or "", "--stages auto tries all possible numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A question about stages; `estimate` makes the profile of a batch that is interpolated.

    Profiles of the smallest and of the largest batch are estimates; others are interpolated.
    """

    question: "StagesQuestion"
    estimate: "Callable[[int], Profile] | None" = None

    def answer(self, effort: "Effort", progress: "Progress | None" = None) -> "StagesAnswer":
        """The answer, whose batch is estimated, not interpolated."""
        from protrain_plan.planning.stages.answer import plan_stages, planned_again

        answer = plan_stages(self.question, effort=effort, progress=progress)
        sizes = set(self.between)
        while self.estimate and (best := answer.best) and best.shape.batch in sizes:
            answer = planned_again(answer, self.estimate(best.shape.batch), effort)
            sizes.remove(best.shape.batch)
        return answer

    @property
    def between(self) -> list[int]:
        """Batches whose profiles are interpolated."""
        return sorted(self.question.profiles)[1:-1]

    @property
    def base(self) -> "Question":
        """The question about one stage, with the smallest micro-batches."""
        from protrain_plan.planning.questions.answers import Question

        asked = self.question
        size, profile = min(asked.profiles.items())
        many = max(1, asked.global_batch // (size * asked.settings.group.num_devices))
        settings, budgets = replace(asked.settings, micro_batches=many), asked.budgets
        return Question(profile=profile, budgets=budgets, settings=settings, allow=asked.allow)

    @property
    def others(self) -> "tuple[Question, ...]":
        """The questions about one stage, with larger micro-batches."""
        return tuple(
            replace(self, question=replace(self.question, profiles={size: profile})).base
            for size, profile in sorted(self.question.profiles.items())[1:]
        )

    def about(self, found: "Answer") -> "Question":
        """The question of an answer: with its micro-batches, on the devices of a stage."""
        if found.solved is None:
            return self.base
        size, profile = found.solved.plan.workload.batch_size, None
        if self.estimate and size in self.between:
            profile = self.estimate(size)
        profile, settings = profile or self.question.profiles[size], found.solved.plan.settings
        return replace(self.base, profile=profile, settings=settings)


def staged_answer(kept: "AnswerCache", asked: Staged) -> "Answer":
    """The answer about stages, cached or computed, in any process."""
    base = asked.base
    found = kept.answer(base, "stages", asked.question)
    if found is not None:
        return replace(found, question=asked.about(found))

    from protrain_plan.planning.outcome import STAGES, Solved
    from protrain_plan.planning.questions.answers import Answer
    from protrain_plan.planning.questions.objectives import fit, plain_bytes
    from protrain_plan.planning.search.improving import Effort

    answer = asked.answer(Effort())
    if (best := answer.best) is None:
        found = fit(base, effort=Effort())
    else:
        solved = Solved(
            plan=best.plan(answer.lower_bound_seconds),
            status="feasible",
            gap=answer.gap or 0.0,
            stall_seconds=max(best.run.idle) * best.step_seconds,
            solve_seconds=0.0,
            solver=STAGES,
        )
        words = f"{best.shape}; {answer.worth} (gap {solved.gap:.1%})"
        needed = plain_bytes(base.problem())
        found = Answer(question=base, solved=solved, bottleneck=words, plain_bytes=needed)
    kept.keep(found, "stages", asked.question)
    return replace(found, question=asked.about(found))


def refuse_without_global_batch(
    global_batch: int | None, batch_size: str | int | None, micro_batches: int
) -> None:
    """Raise ProtrainError without a global batch, or with another batch size as well."""
    if global_batch is None:
        problem = "a pipeline divides the sequences of an update into micro-batches"
        raise ProtrainError(problem, key="--stages", fix="give their number: --global-batch 128")
    refuse_batches(global_batch, batch_size, micro_batches)


def about_stages(
    profiles: "Mapping[int, Profile]",
    budgets: "BudgetOptions",
    settings: "StepSettings",
    global_batch: int,
    numbers: tuple[int, ...],
    allow: tuple[str, ...],
    estimate: "Callable[[int], Profile] | None",
) -> Staged:
    """The question about stages on the devices of `settings`, each with budgets of its own.

    Raises ProtrainError for settings that stages do not have.
    """
    from protrain_plan.planning.stages.answer import StagesQuestion
    from protrain_runtime.contract.records.plan import DISK_GAIN

    if settings.disk_gain != DISK_GAIN:
        problem = "stages use the disk only where no plan fits without it"
        raise ProtrainError(problem, key="--disk-gain", fix="leave it out, or --stages")
    question = StagesQuestion(
        profiles=profiles,
        budgets=budgets.of(next(iter(profiles.values())), settings.group),
        settings=replace(settings, micro_batches=1),
        global_batch=global_batch,
        stages=numbers,
        allow=allow,
    )
    return Staged(question=question, estimate=estimate)


def plan_in_stages(
    asked: Staged, explain: bool, output: Path, beside: Path | None, *, as_json: bool
) -> None:
    """Answer `plan --stages`, and write the plan, and an estimated profile to `beside`."""
    from protrain_plan.planning.questions.answers import Objective
    from protrain_plan.planning.questions.objectives import ask
    from protrain_plan.planning.search.improving import Effort
    from protrain_plan.planning.stages.assumed import assumptions
    from protrain_plan.presentation.plans import search_text
    from protrain_plan.presentation.staging import stages_json, stages_text
    from protrain_runtime.contract.records import write_plan, write_profile

    with interruptible() as interrupted, progress(quiet=as_json) as report:
        effort = Effort(stopped=interrupted.is_set)
        answer = asked.answer(effort, lambda *found: report(search_text(*found), 0.5))
        assumed = assumptions(asked.question, effort) if explain else ()
        of_one = None
        if answer.best is None and 1 in answer.bounds:
            of_one = ask(asked.base, Objective(), effort=effort).infeasible
    written: list[Path] = []
    if answer.best is not None and (plan := answer.plan) is not None:
        if beside is not None:
            write_profile(answer.best.pipeline.profile, beside)
        write_plan(plan, output)
        written = [output] if beside is None else [output, beside]
    data = stages_json(answer, assumed, of_one)
    print_result(as_json, data, lambda: stages_text(answer, assumed, written, of_one))
    if answer.best is None:
        raise typer.Exit(3)


def _estimate(
    request: "ProfileRequest",
    listed: "Hardware",
    machine: "Hardware",
    cache: "EstimateCache",
    size: int,
) -> "Profile":
    """The profile of a batch of this size on a machine, from the estimate for a listed one."""
    from protrain_plan.commands.measuring import estimated

    [[made]] = estimated([request.sized(size)], [listed], lambda *_: None, cache, jobs=1)
    return replace(made, hardware=machine)


def staged_on(
    cells: "Cells", row: "Row", progress: "Callable[[str, float], None]"
) -> "Iterator[Staged]":
    """Yield the questions about a row on the devices of each offer.

    The first and the last batch are estimated; others are interpolated.
    """
    from protrain_plan.commands.measuring import estimated
    from protrain_plan.planning.questions.growth import between

    assert cells.global_batch is not None
    request, cache = row.request, cells.cache
    sizes = tuple(size for size in cells.sizes if size <= cells.global_batch) or cells.sizes
    ends = list(dict.fromkeys((sizes[0], sizes[-1])))
    listed = list(dict.fromkeys(offer.listed for offer in cells.offers))
    made = estimated([request.sized(size) for size in ends], listed, progress, cache)
    known = dict(zip(ends, made, strict=True))
    by_size = {
        size: known.get(size)
        or [between(low, high, size) for low, high in zip(made[0], made[-1], strict=True)]
        for size in sizes
    }
    for offer in cells.offers:
        number, machine = listed.index(offer.listed), offer.machine
        profiles = {n: replace(found[number], hardware=machine) for n, found in by_size.items()}
        settings = replace(row.step, group=offer.group)
        asked = (cells.budgets, settings, cells.global_batch, cells.stages or (), request.allow)
        estimate = partial(_estimate, request, offer.listed, machine, cache)
        yield about_stages(profiles, *asked, estimate)
