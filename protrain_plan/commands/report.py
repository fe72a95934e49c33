"""`protrain report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protrain_plan.commands.options import ProfileOption, writable
from protrain_plan.commands.output import interruptible, out, progress
from protrain_plan.records.files import replace_text

if TYPE_CHECKING:
    from protrain_plan.reporting.data import FrontPoint
    from protrain_plan.reporting.step import Step

EXAMPLES = (
    "Examples: protrain report plan.yaml -o report.html"
    " | protrain report plan.yaml --pareto --recording recording.json"
)


def report(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path(
        "report.html"
    ),
    profile: ProfileOption = None,
    recording: Annotated[
        Path | None, typer.Option(help="A recorded step of the plan, to lay over the simulated.")
    ] = None,
    pareto: Annotated[
        bool,
        typer.Option("--pareto", help="With the front of memory against time: plans for each."),
    ] = False,
    points: Annotated[int, typer.Option(min=2, help="Budgets that --pareto plans for.")] = 8,
) -> None:
    """Write a plan's step as a page for a browser: one file, which needs no network."""
    writable(output)
    from protrain_plan.reporting.page import page_text
    from protrain_plan.reporting.step import read_step
    from protrain_plan.simulation.recording import check_recording, read_recording

    step = read_step(plan, profile)
    recorded = None
    if recording is not None:
        recorded = read_recording(recording)
        check_recording(recorded, step.plan, step.program, str(recording))
    front = _front(step, points) if pareto else ()
    replace_text(output, page_text(step, recording=recorded, front=front))
    out.print(f"wrote {output}", highlight=False, markup=False, soft_wrap=True)


def _front(step: "Step", points: int) -> "tuple[FrontPoint, ...]":
    """The front up to all of the device, with the plan's other budgets."""
    from dataclasses import replace

    from protrain_plan.planning.objectives import Objective, Question, ask
    from protrain_plan.planning.search import Effort
    from protrain_plan.rendering.answers import search_text
    from protrain_plan.reporting.data import FrontPoint
    from protrain_plan.simulation.ranks import Group

    plan, device = step.plan, step.profile.hardware.device
    budgets = replace(plan.budgets, device=max(plan.budgets.device, device.memory_bytes))
    question = Question(
        profile=step.profile,
        budgets=budgets,
        piece_bytes=plan.piece_bytes,
        updates=plan.updates,
        micro_batches=plan.micro_batches,
        group=Group.of(plan),
    )
    with progress(quiet=False) as tell, interruptible() as interrupted:
        answer = ask(
            question,
            Objective(pareto_points=points),
            effort=Effort(stopped=interrupted.is_set),
            progress=lambda *found: tell(search_text(*found), 0.5),
        )
    return tuple(
        FrontPoint(point.device_bytes, point.solved.plan.prediction.step_seconds, point.solved.gap)
        for point in answer.front
    )
