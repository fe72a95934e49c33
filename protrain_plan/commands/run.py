"""`protrain run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from protrain_plan.checking.cases import opened, read_files
from protrain_plan.commands.options import JsonOption, SpillOption, size, writable
from protrain_plan.commands.output import progress, show
from protrain_plan.errors import ProtrainError
from protrain_plan.records import read_plan
from protrain_plan.records.hardware import is_accelerator
from protrain_plan.records.profile import Profile
from protrain_plan.rendering.runs import run_json, run_text
from protrain_plan.simulation.promises import exceeded
from protrain_plan.simulation.recording import write_recording

EXAMPLES = (
    "Examples: protrain run plan.yaml --steps 10 --verify"
    " | protrain run plan.yaml --record recording.json"
)


def run(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    steps: Annotated[
        int, typer.Option(min=1, help="Steps to train, with those before a checkpoint.")
    ] = 5,
    text: Annotated[Path | None, typer.Option(help="A text file to train on.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Ordinary PyTorch, no plan.")] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Run both, compare losses and parameters bitwise; exit with 1 where they differ,"
            " or where the step took more memory than predicted.",
        ),
    ] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Let the operating system refuse this process more memory (Linux, RLIMIT_DATA)."
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Save a checkpoint to this directory at the end.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Save every so many steps, too.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from the checkpoint in this directory.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare the first three steps with a plain copy's, and stop where a bit differs.",
        ),
    ] = False,
    recording: Annotated[
        Path | None,
        typer.Option(
            "--record", help="Write what ran when in a step, for `protrain report --recording`."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Which device of the plan's type: cuda:1. Default: the current one."),
    ] = None,
    spill_directory: SpillOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the planned model on real text, and show measured beside predicted memory."""
    record = read_plan(plan)
    if plain and verify:
        raise ProtrainError("--verify runs plain PyTorch too", fix="leave --plain out")
    if save_every is not None and save is None:
        raise ProtrainError(
            "there is no directory to save to", key="--save-every", fix="--save DIR"
        )
    if check and plain:
        raise ProtrainError("--check is of planned steps", fix="leave --plain out")
    if recording is not None:
        if plain:
            raise ProtrainError("--record is of a planned step", fix="leave --plain out")
        writable(recording, option="--record")
    if memory_limit is not None:
        _limit(size("--memory-limit", memory_limit, 0))
    from protrain_plan.running import NO_CHECKPOINTS, Checkpoints, Run, train
    from protrain_runtime.checking import CHECKED_STEPS
    from protrain_runtime.launching import joined
    from protrain_runtime.measure import return_freed_memory

    if not is_accelerator(record.workload.device):
        return_freed_memory()

    def trained(
        label: str,
        report: Callable[[str, float], None],
        *,
        plain: bool,
        checkpoints: Checkpoints = NO_CHECKPOINTS,
    ) -> Run:
        def on_step(step: int, loss: float) -> None:
            report(f"{label}: step {step + 1} of {steps}, loss {loss:.4f}", (step + 1) / steps)

        report(f"{label}: preparing", 0.0)
        return train(
            record,
            num_steps=steps,
            plain=plain,
            text=text,
            spill_directory=spill_directory,
            checked=check and not plain,
            recorded=recording is not None and not plain,
            on_step=on_step,
            checkpoints=checkpoints,
            rank=rank,
            profile=beside,
            device=device,
        )

    def beside() -> Profile | None:
        case = opened(read_files(plan))
        return case.profile if case else None

    checkpoints = Checkpoints(resume=resume, directory=save, every=save_every)

    with (
        joined(record.workload.device) as (rank, _),
        progress(quiet=as_json or rank > 0, threaded=False) as report,
    ):
        label = "plain" if plain else "planned"
        result = trained(label, report, plain=plain, checkpoints=checkpoints)
        reference = trained("plain", report, plain=True) if verify else None
    if rank > 0:  # one speaks for all
        return
    # A plain copy that is compared with stands beside the first steps.
    alone = not plain and not (check and steps - result.first_step <= CHECKED_STEPS)
    measured = result.measured_peak_bytes if alone else None
    overruns = () if measured is None else exceeded(record, measured, result.slot_bytes, beside())
    if recording is not None and result.recording is not None:
        write_recording(result.recording, recording)
    verified = None
    if reference is not None:
        same = reference.losses[result.first_step :] == result.losses  # that one had no break
        verified = same and reference.parameters_sha256 == result.parameters_sha256
    show(
        as_json,
        run_json(record, result, plain=plain, verified=verified, overruns=overruns),
        lambda: run_text(record, result, plain=plain, verified=verified, overruns=overruns),
    )
    if verify and (overruns or not verified):
        raise typer.Exit(1)


def _limit(num_bytes: int) -> None:
    try:
        import resource
    except ImportError as error:
        raise ProtrainError("needs Linux", key="--memory-limit") from error
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
