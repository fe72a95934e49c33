"""`protrain run`."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protrain_plan.commands.option_records import flag, option, option_record
from protrain_plan.commands.options import JsonOption, PlanArgument, SpillOption, size
from protrain_plan.commands.output import destination, print_beside, print_result, progress
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.training import Run
    from protrain_runtime.contract.program.memory import Excess
    from protrain_runtime.contract.records.plan import Plan
    from protrain_runtime.contract.records.profile import Profile
    from protrain_runtime.preparation import Check


@option_record
class RunOptions:
    """Options of a run."""

    steps: int = option("Steps in total, including those before a checkpoint.", default=5, min=1)
    text: Path | None = option("A text file to train on.")
    weights: Path | None = option(
        "A folder of safetensors files with the weights, each read to where the plan keeps it."
        " Default: random weights."
    )
    plain: bool = flag("Train with plain PyTorch, without the plan.")
    verify: bool = flag(
        "Train with and without the plan, and compare losses and parameters bitwise. Exits with 1"
        " if they differ, or if the step took more memory than predicted."
    )
    memory_limit: str | None = option("Limit this process's memory (Linux, RLIMIT_DATA).")
    save: Path | None = option("Save a checkpoint to this directory at the end.")
    save_every: int | None = option("Also save every N steps.", min=1)
    resume: Path | None = option("Resume from the checkpoint in this directory.")
    check: bool = flag(
        "Compare the first three steps with a plain copy's, and stop if a bit differs."
    )
    recording: Path | None = option("Record a step, for `protrain report --recording`.", "--record")
    device: str | None = option(
        "A device of the plan's type, such as cuda:1. Default: the current one."
    )
    spill_directory: SpillOption = None

    @property
    def asked(self) -> "Check | None":
        """Comparison during the run."""
        return "bitwise" if self.check else None

    def refuse(self, plan: "Plan") -> None:
        """ProtrainError for options that contradict one another, or the plan."""
        from protrain_runtime.contract.records.hardware import is_accelerator

        workload = plan.workload
        if self.verify and is_accelerator(workload.device) and not workload.deterministic:
            raise ProtrainError(
                "the plan's kernels may differ in the last bits from run to run, such as those of"
                " attention's backward, whose sums have no fixed order",
                key="--verify",
                fix="profile with --deterministic, plan again, and verify that plan",
            )
        if self.save_every is not None and self.save is None:
            raise ProtrainError("no directory to save to", key="--save-every", fix="--save DIR")
        asked = {
            "--verify runs plain PyTorch too": self.verify,
            "--record needs a planned step": self.recording,
            "--check needs planned steps": self.check,
        }
        for problem, is_asked in asked.items():
            if self.plain and is_asked:
                raise ProtrainError(problem, fix="leave --plain out")

    def overruns(
        self, plan: "Plan", result: "Run", profile: "Callable[[], Profile | None]"
    ) -> "tuple[Excess, ...]":
        """Return the excesses of measured over predicted memory."""
        from protrain_runtime.contract.program.memory import exceeded
        from protrain_runtime.diagnostics.checking import CHECKED_STEPS

        measured = result.measured_peak_bytes
        # With --check, a plain copy is in memory in the first steps.
        beside = self.check and self.steps - result.first_step <= CHECKED_STEPS
        if measured is None or self.plain or beside:
            return ()
        # The allocator's reserve is shown, but limited by the device alone.
        return exceeded(plan, replace(measured, allocator=0), result.slot_bytes, profile())


def run(plan: PlanArgument, options: RunOptions, as_json: JsonOption = False) -> None:
    """Train a model with its plan, and compare measured with predicted memory.

    Examples: protrain run plan.yaml --steps 10 --verify
    | protrain run plan.yaml --weights ~/models/llama-3.1-8b
    | protrain run plan.yaml --record recording.json
    """
    from protrain_plan.checking.plan_files import opened, read_files
    from protrain_plan.presentation.plans import run_json, run_text
    from protrain_runtime.contract.program.recording import write_recording
    from protrain_runtime.contract.program.requirements import refuse_pipeline
    from protrain_runtime.contract.records import fingerprint, read_plan
    from protrain_runtime.contract.records.hardware import is_accelerator

    def beside() -> "Profile | None":
        case = opened(read_files(plan))
        return case.profile if case else None

    who = None
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:  # by a launcher, with other ranks
        from protrain_plan.commands.launched import launched

        who = launched()
    record = read_plan(plan)
    refuse_pipeline(record)
    options.refuse(record)
    target = None
    if options.recording is not None:
        read = (plan, plan.parent / "profile.yaml", record.workload.model, options.text)
        target = destination(options.recording, option="--record", inputs=read)
    if options.memory_limit is not None:
        import resource

        most = size("--memory-limit", options.memory_limit, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # All is loaded before freed memory is returned, as in the process that measured.
    from protrain_plan.commands.training import train
    from protrain_runtime.devices.memory_meter import return_freed_memory

    if not is_accelerator(record.workload.device):
        return_freed_memory()
    rank = who.rank if who is not None else 0
    if who is not None:
        names = ("steps", "plain", "verify", "save", "save_every", "resume")
        facts = {f"--{n.replace('_', '-')}": str(getattr(options, n)) for n in names}
        facts |= {"--check": str(options.asked), "--record": str(options.recording)}
        who.agree("protrain run", {"plan": fingerprint(record), **facts})
    with (
        nullcontext() if who is None else who.joined(record.workload.device),
        progress(quiet=as_json, threaded=False, rank=rank) as report,
    ):
        trained = partial(train, record, options, report=report, rank=rank, profile=beside)
        result = trained(plain=options.plain)
        reference = trained(plain=True, compared=True) if options.verify else None
    if rank > 0:  # one speaks for all
        return
    overruns = options.overruns(record, result, beside)
    if target is not None and result.recording is not None:
        write_recording(result.recording, target)
    verified = None
    if reference is not None:
        same = reference.losses[result.first_step :] == result.losses  # that one did not resume
        verified = same and reference.parameters_sha256 == result.parameters_sha256
    data = run_json(
        record, result, plain=options.plain, verified=verified, overruns=overruns, profile=beside()
    )
    drawn = options.weights is None and options.resume is None
    if drawn and record.workload.model_config and not as_json:
        print_beside("trained from random weights; --weights FOLDER loads a model's")
    print_result(as_json, data, lambda: run_text(record, data))
    if options.verify and (overruns or not verified):
        raise typer.Exit(1)
