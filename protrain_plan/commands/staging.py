"""`--stages`: in how many pipeline stages a model is trained best, from its profile or its name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protrain_plan.commands.options import SEQ_LEN, leaves_named, refuse_batches
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.measuring import ProfileRequest
    from protrain_plan.commands.option_records import BudgetOptions, WorkloadOptions
    from protrain_plan.commands.plan import GroupOptions, ModelOptions
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_runtime.contract.records.hardware import Hardware
    from protrain_runtime.contract.records.plan import DeviceGroup, StepSettings
    from protrain_runtime.contract.records.profile import Profile

LARGEST = 8
"""Sequences of a micro-batch, at most, where a model is estimated: pipelines want small ones."""


def plan_in_stages(
    named: str,
    numbers: tuple[int, ...],
    *,
    model: "ModelOptions",
    workload: "WorkloadOptions",
    budgets: "BudgetOptions",
    devices: "GroupOptions",
    settings: "Callable[[StepSettings, DeviceGroup], StepSettings]",
    base: "StepSettings",
    allow: list[str] | None,
    explain: bool,
    output: Path,
    beside: Path | None,
    as_json: bool,
) -> None:
    """Answer `plan --stages`, and write the plan; an estimated profile goes `beside` it."""
    from protrain_plan.commands.output import interruptible, progress, show
    from protrain_plan.planning.search.improving import Effort
    from protrain_plan.planning.stages.answer import StagesQuestion, plan_stages
    from protrain_plan.planning.stages.assumed import assumptions
    from protrain_plan.presentation.plans import search_text
    from protrain_plan.presentation.staging import stages_json, stages_text
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_runtime.contract.records import read_profile, write_plan, write_profile

    if model.global_batch is None:
        raise ProtrainError(
            "a pipeline divides the sequences of an update into micro-batches",
            key="--stages",
            fix="say how many there are: --global-batch 128",
        )
    refuse_batches(model.global_batch, None, base.micro_batches)
    with interruptible() as interrupted, progress(quiet=as_json) as report:
        if model.on is None:
            record = read_profile(Path(named))
            profiles: Mapping[int, Profile] = {record.workload.batch_size: record}
        else:
            sizes = [model.batch_size] if model.batch_size else _sizes(model.global_batch)
            profiles = estimated_by_size(
                workload.requests(named, [model.seq_len or SEQ_LEN], [1], allow=allow)[0],
                budgets.machine(model.on),
                sizes,
                EstimateCache(off=model.no_cache),
                report,
            )
            record = next(iter(profiles.values()))
        group = devices.on(record.hardware)
        question = StagesQuestion(
            profiles=profiles,
            budgets=budgets.of(record, group),
            settings=replace(settings(base, group), micro_batches=1),
            global_batch=model.global_batch,
            stages=numbers,
            allow=leaves_named(allow),
        )
        effort = Effort(stopped=interrupted.is_set)
        answer = plan_stages(
            question, effort=effort, progress=lambda *found: report(search_text(*found), 0.5)
        )
        assumed = assumptions(question, effort) if explain else ()
    written: list[Path] = []
    if answer.best is not None and (plan := answer.plan) is not None:
        if beside is not None:
            write_profile(answer.best.pipeline.profile, beside)
        write_plan(plan, output)
        written = [output] if beside is None else [output, beside]
    show(as_json, stages_json(answer, assumed), lambda: stages_text(answer, assumed, written))
    if answer.best is None:
        raise typer.Exit(3)


def _sizes(global_batch: int) -> list[int]:
    """Sequences of a micro-batch to try: powers of two, and no more than there are."""
    sizes = [1]
    while sizes[-1] < min(LARGEST, global_batch):
        sizes.append(2 * sizes[-1])
    return sizes


def estimated_by_size(
    request: "ProfileRequest",
    machine: "Hardware",
    sizes: Sequence[int],
    cache: "EstimateCache",
    progress: "Callable[[str, float], None]",
) -> "dict[int, Profile]":
    """Profiles of each batch size: of the first and the last estimates, of others between them."""
    from protrain_plan.commands.measuring import estimated
    from protrain_plan.planning.questions.growth import between

    ends = list(dict.fromkeys((sizes[0], sizes[-1])))
    requests = [request.sized(size) for size in ends]
    made = [one[0] for one in estimated(requests, [machine], progress, cache, jobs=None)]
    known = dict(zip(ends, made, strict=True))
    low, high = made[0], made[-1]
    return {size: known.get(size) or between(low, high, size) for size in sizes}
