"""`protrain show`, `simulate`, `report`, `diff` and `export`: commands that read plans."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Group

from protrain_plan.commands.option_records import flag, option, output_option
from protrain_plan.commands.options import (
    JsonOption,
    PlanArgument,
    PointsOption,
    ProfileOption,
    choice,
)
from protrain_plan.commands.output import (
    destination,
    print_json,
    print_rendered,
    print_result,
    print_text,
)
from protrain_plan.presentation.terminal import Text, fields_of, wrote
from protrain_runtime.contract.errors import ProtrainError, RecordError

DiffFormat = Literal["text", "json", "markdown"]


StageOption = Annotated[
    int | None, typer.Option(help="A stage of the plan's pipeline, counted from 0.")
]


def show(
    plan: PlanArgument,
    profile: ProfileOption = None,
    stage: StageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a plan on one screen: decisions, memory over the step, transfers and waits.

    A pipeline is shown with all stages over time, or with the step of one --stage.

    Example: protrain show plans/smollm2-135m-cpu-1100MiB/plan.yaml
    """
    from protrain_plan.presentation.report.page import step_data
    from protrain_plan.presentation.report.screen import Screen
    from protrain_plan.presentation.report.stages import StagesScreen
    from protrain_plan.presentation.report.step import read_step

    step = read_step(plan, profile, stage=stage)
    screen = StagesScreen if step.of_stages and stage is None else Screen
    print_result(as_json, step_data(step), lambda: screen(step=step))


def simulate(
    plan: PlanArgument,
    profile: ProfileOption = None,
    trace: Path | None = option("Write the step as a trace for Perfetto (ui.perfetto.dev)."),
    stage: StageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan's step: what runs and moves when, and what computation waits for.

    Example: protrain simulate plan.yaml --trace trace.json
    """
    from protrain_plan.presentation.report.page import summary_json, trace_text
    from protrain_plan.presentation.report.screen import summary_text
    from protrain_plan.presentation.report.stages import StagesScreen
    from protrain_plan.presentation.report.step import read_step
    from protrain_runtime.contract.records.files import replace_text

    read = _read_for(plan, profile)
    target = trace and destination(trace, option="--trace", inputs=read)
    step = read_step(plan, profile, stage=stage)
    if target is not None:
        replace_text(target, trace_text(step, of_all=stage is None))
    of_all = step.of_stages is not None and stage is None
    screen = (lambda: StagesScreen(step=step)) if of_all else (lambda: summary_text(step))
    print_result(as_json, summary_json(step), screen)
    if trace is not None and not as_json:
        print_rendered(wrote(trace), wrap=False)


def report(
    plan: PlanArgument,
    output: Path = output_option("page", "report.html"),
    profile: ProfileOption = None,
    recording: Path | None = option("A recorded step of the plan, to show with the simulated one."),
    pareto: bool = flag("Add the Pareto front of memory and time: plans every point."),
    points: PointsOption = 8,
    stage: StageOption = None,
) -> None:
    """Write a plan's step as an HTML page: one file, which needs no network.

    Examples: protrain report plan.yaml -o report.html
    | protrain report plan.yaml --pareto --recording recording.json
    """
    from protrain_plan.presentation.report.page import page_text
    from protrain_plan.presentation.report.step import read_step
    from protrain_runtime.contract.program.compiling import program_of
    from protrain_runtime.contract.program.recording import check_recording, read_recording
    from protrain_runtime.contract.records.files import replace_text

    target = destination(output, inputs=(*_read_for(plan, profile), recording))
    step = read_step(plan, profile, stage=stage)
    if pareto and step.of_stages:
        raise ProtrainError("pipelines have no Pareto front", key="--pareto")
    recorded = None
    if recording is not None:
        recorded = read_recording(recording)
        every_move = program_of(step.plan, step.profile, clipped=True)
        check_recording(recorded, step.plan, every_move, str(recording))
    front: list[dict[str, Any]] = []
    if pareto:  # up to all of the device, with the plan's other budgets
        from protrain_plan.commands.plan import SearchOptions
        from protrain_plan.planning.questions.answer_cache import AnswerCache
        from protrain_plan.planning.questions.answers import Objective, Question
        from protrain_plan.presentation.plans import front_json

        made, device = step.plan, step.profile.hardware.device
        budgets = replace(made.budgets, device=max(made.budgets.device, device.memory_bytes))
        settings = replace(made.settings, overlap_steps=True)
        question = Question(profile=step.profile, budgets=budgets, settings=settings)
        aim = Objective(pareto_points=points)
        cache = AnswerCache(off=False)
        answer = SearchOptions().ask(question, aim, None, cache, as_json=False, lists_front=False)
        front = front_json(answer.front)
    replace_text(target, page_text(step, recording=recorded, front=front))
    print_rendered(wrote(output), wrap=False)


def _read_for(plan: Path, profile: Path | None = None) -> tuple[Path, ...]:
    """The files of a plan, which no command overwrites."""
    return plan, profile or plan.parent / "profile.yaml"


def diff(
    old: PlanArgument,
    new: Annotated[Path, typer.Argument(help="The new plan.", show_default=False)],
    output_format: str = option(
        "text, json or markdown (for a pull request).", "--format", default="text"
    ),
    title: str | None = option("Title of the Markdown. Default: the new plan's file."),
    if_plans: bool = flag("Print nothing if neither file is a plan."),
    as_json: JsonOption = False,
) -> None:
    """Say what a new plan decides differently, and how memory and time change.

    Examples: protrain diff old.yaml plan.yaml
    | protrain diff <(git show main:plans/a/plan.yaml) plans/a/plan.yaml --format markdown
    """
    from protrain_plan.checking.diffing import plan_diff
    from protrain_plan.presentation.checks import diffs
    from protrain_runtime.contract.records import loads_plan
    from protrain_runtime.contract.records.files import read_text
    from protrain_runtime.contract.records.reader import kind_of

    named = "json" if as_json else output_format
    form: DiffFormat = choice("--format", named, get_args(DiffFormat))
    plans = []
    errors, about = list[RecordError](), title or str(new)
    for path in (old, new):  # once: a shell's <(...) cannot be read again
        text = ""
        try:
            text = read_text(path)
            plans.append(loads_plan(text, str(path)))
        except RecordError as error:
            errors.append(error)
            with suppress(RecordError):
                if_plans = if_plans and kind_of(text) != "plan"
        else:
            if_plans = False
    if if_plans:
        return
    if errors:
        if form != "markdown":
            raise errors[0]
        print_text(diffs.error_markdown(errors[0], title=about))  # readable in the pull request
        raise typer.Exit(errors[0].exit_code)
    found = plan_diff(*plans)
    match form:
        case "text":
            print_rendered(diffs.diff_text(found))
        case "json":
            print_json(fields_of(found) | {"num_changed": found.num_changed})
        case "markdown":
            print_text(diffs.diff_markdown(found, title=about))


def export(
    plan: PlanArgument,
    to: Annotated[str, typer.Option(help="fsdp2 (Accelerate), trl, torchtitan or megatron.")],
    output: Path | None = option(
        "The file to write; - is standard output. Default: the tool's name.", "-o", "--output"
    ),
    as_json: JsonOption = False,
) -> None:
    """Write the nearest configuration of another tool, and list what it cannot express.

    torchtitan and megatron refuse plans with adapters, the others plans with pipeline stages.

    Example: protrain export plan.yaml --to fsdp2 -o fsdp2.yaml
    """
    from protrain_plan.presentation.exporting import EXPORTERS
    from protrain_plan.presentation.exporting import export as exported
    from protrain_runtime.contract.records import read_plan
    from protrain_runtime.contract.records.files import replace_text

    found = exported(read_plan(plan), choice("--to", to, tuple(EXPORTERS)))
    path = output or Path(found.file_name)
    replace_text(destination(path, inputs=_read_for(plan)), found.text)
    if as_json:
        print_json({"file": str(path), "cannot_express": list(found.losses)})
        return
    head = [Text("what it cannot express:")] if found.losses else []
    print_rendered(Group(wrote(path), *head, *(Text(f"- {loss}") for loss in found.losses)))
