"""`protrain run`."""

import os
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protrain_plan.commands.options import JsonOption, PlanArgument, SpillOption, size
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_runtime.contract.program.memory import Excess
    from protrain_runtime.preparation import Check
    from protrain_runtime.ranks.group import Launched


def run(
    plan: PlanArgument,
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
    compile_blocks: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Only where the plan compiles its blocks, which it does without this option, too:"
            " a plan is of the bytes that were profiled.",
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare the first three steps with a plain copy's, and stop where a bit differs.",
        ),
    ] = False,
    check_spills: Annotated[
        bool,
        typer.Option(
            "--check-spills",
            help="Compare what comes back from host memory and disk with what went there, and stop"
            " where a bit differs.",
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
    """Train the planned model on real text, and show measured beside predicted memory.

    Examples: protrain run plan.yaml --steps 10 --verify
    | protrain run plan.yaml --record recording.json
    """
    from protrain_plan.checking.plan_files import opened, read_files
    from protrain_plan.commands.output import destination, progress, show
    from protrain_plan.presentation.plans import run_json, run_text
    from protrain_runtime.contract.program.memory import exceeded
    from protrain_runtime.contract.program.recording import write_recording
    from protrain_runtime.contract.records import fingerprint, read_plan
    from protrain_runtime.contract.records.commands import profile_command
    from protrain_runtime.contract.records.hardware import is_accelerator
    from protrain_runtime.contract.records.profile import Profile

    with ExitStack() as started:
        who: Launched | None = None
        if int(os.environ.get("WORLD_SIZE", "1")) != 1:  # by a launcher, with other ranks
            from protrain_runtime.ranks.group import launched

            who = launched()
            started.enter_context(who.together("protrain run"))
        record = read_plan(plan)
        if compile_blocks and not record.workload.compile:
            workload = replace(record.workload, compile="blocks")
            how = {"optimizer": record.optimizer, "output": "profile.yaml"}
            raise ProtrainError(
                f"{plan} was planned for blocks that are not compiled, which save other bytes",
                key="--compile",
                fix="profile with it and plan again:"
                f" {profile_command(workload, **how, allow=record.allowed)}",
            )
        accelerated = is_accelerator(record.workload.device)
        if verify and accelerated and not record.workload.deterministic:
            raise ProtrainError(
                "the plan's kernels may give other bits in every run, such as those of attention's"
                " backward, which add up in any order",
                key="--verify",
                fix="profile with --deterministic, plan again, and verify that plan",
            )
        if plain and verify:
            raise ProtrainError("--verify runs plain PyTorch too", fix="leave --plain out")
        if save_every is not None and save is None:
            problem = "there is no directory to save to"
            raise ProtrainError(problem, key="--save-every", fix="--save DIR")
        if recording is not None and plain:
            raise ProtrainError("--record is of a planned step", fix="leave --plain out")
        target = None
        if recording is not None:
            given = (plan, plan.parent / "profile.yaml", record.workload.model, text)
            target = destination(recording, option="--record", inputs=given)
        if plain and (check or check_spills):
            option = "--check" if check else "--check-spills"
            raise ProtrainError(f"{option} is of planned steps", fix="leave --plain out")
        if check and check_spills:
            raise ProtrainError("--check and --check-spills are two runs", fix="name one of them")
        asked: Check | None = "bitwise" if check else "spills" if check_spills else None
        if memory_limit is not None:
            most = size("--memory-limit", memory_limit, 0)
            try:
                import resource
            except ImportError as error:
                raise ProtrainError("needs Linux", key="--memory-limit") from error
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        from protrain_plan.commands.training import NO_CHECKPOINTS, Checkpoints, Run, train
        from protrain_runtime.devices.memory_meter import return_freed_memory

        if not accelerated:
            return_freed_memory()
        rank = 0
        if who is not None:
            rank = who.rank
            who.agree(
                "protrain run",
                {
                    "plan": fingerprint(record),
                    "--steps": str(steps),
                    "--plain": str(plain),
                    "--verify": str(verify),
                    "--save": str(save),
                    "--save-every": str(save_every),
                    "--resume": str(resume),
                    "--check": str(asked),
                    "--record": str(recording),
                },
            )

        def beside() -> Profile | None:
            case = opened(read_files(plan))
            return case.profile if case else None

        def trained(*, plain: bool, compared: bool = False) -> Run:
            label = "plain" if plain else "planned"

            def on_step(step: int, loss: float) -> None:
                report(f"{label}: step {step + 1} of {steps}, loss {loss:.4f}", (step + 1) / steps)

            report(f"{label}: preparing", 0.0)
            return train(
                record,
                num_steps=steps,
                plain=plain,
                text=text,
                spill_directory=spill_directory,
                check=None if plain else asked,
                recorded=recording is not None and not plain,
                on_step=on_step,
                checkpoints=NO_CHECKPOINTS if compared else checkpoints,
                rank=rank,
                profile=beside,
                device=device,
                measured=not compared,
                compared=compared,
            )

        checkpoints = Checkpoints(resume=resume, directory=save, every=save_every)
        with (
            nullcontext() if who is None else who.joined(record.workload.device),
            progress(quiet=as_json or rank > 0, threaded=False) as report,
        ):
            result = trained(plain=plain)
            # Only its losses and parameters are compared: nothing is measured.
            reference = trained(plain=True, compared=True) if verify else None
    if rank > 0:  # one speaks for all
        return
    # A plain copy that is compared with stands beside the first steps.
    from protrain_runtime.diagnostics.checking import CHECKED_STEPS

    alone = not plain and not (check and steps - result.first_step <= CHECKED_STEPS)
    measured = result.measured_peak_bytes if alone else None
    overruns: tuple[Excess, ...] = ()
    if measured is not None:
        # What the allocator held is shown; a limit on it is the device's to hold.
        tensors = replace(measured, allocator=0)
        overruns = exceeded(record, tensors, result.slot_bytes, beside())
    if target is not None and result.recording is not None:
        write_recording(result.recording, target)
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
