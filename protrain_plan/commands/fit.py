"""`protrain fit`: whether models train on machines that need not be there, and how fast."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from protrain_plan.commands.options import (
    DTYPE,
    PRECISION,
    SEQ_LEN,
    AccumulateOption,
    ClipOption,
    ClipShareOption,
    DTypeOption,
    JsonOption,
    NoCacheOption,
    OptimizerArgsOption,
    OptimizerOption,
    UpdatesOption,
    choice,
    clip_share_of,
    integers,
    machine_with,
    precision_of,
    refuse_batches,
    refuse_host_memory,
    updates_of,
)

if TYPE_CHECKING:
    from protrain_plan.commands.cells import Cells
    from protrain_plan.commands.measuring import Progress
    from protrain_plan.planning.questions.objectives import Fit, Question

OF_8_BITS = {"adamw": "adamw8bit"}
"""By optimizer, the one that `--compare` names beside it."""


def fit(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset's name, a Hugging Face config.json (file or folder),"
            " or package.module:factory (path/to/file.py:factory).",
            show_default=False,
        ),
    ],
    on: Annotated[
        str, typer.Option("--on", help="Machines: names of the catalogue or YAML files, by comma.")
    ],
    seq_len: Annotated[str, typer.Option(help="Tokens per sequence, one or more.")] = str(SEQ_LEN),
    batch_size: Annotated[
        str | None,
        typer.Option(help="Sequences per batch, one or more. Default: 1.", show_default=False),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences per update over all devices: the best batch and number of"
            " micro-batches are found.",
        ),
    ] = None,
    dtype: DTypeOption = DTYPE,
    precision: Annotated[
        str,
        typer.Option(
            help="pure: everything in --dtype; master: the optimizer keeps float32 parameters;"
            " autocast: float32 parameters, computed with in --dtype."
        ),
    ] = PRECISION,
    lora: Annotated[
        str | None, typer.Option(help="Train adapters alone, such as r=16: see profile.")
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="Pack the layers below adapters: nf4 or int8 (with --lora).")
    ] = None,
    optimizer: OptimizerOption = "adamw",
    optimizer_args: OptimizerArgsOption = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Of the device; default: all of the machine's.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory; default: typical.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk space; default: typical.")] = None,
    num_devices: Annotated[
        str, typer.Option(help="Devices that train one model, each with such a batch; or several.")
    ] = "1",
    updates: UpdatesOption = None,
    clip: ClipOption = False,
    clip_share: ClipShareOption = None,
    accumulate: AccumulateOption = 1,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Below each answer, what it is without a planner (plain PyTorch, checkpointing,"
            " ZeRO-Offload, FSDP2), and with 8-bit states where a plan is needed.",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a page with the chart of tokens per second against memory."),
    ] = None,
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model trains on machines, how fast and what binds. No GPU, no file needed.

    Bytes are exact for the operators that run, seconds are estimates from data-sheet rates.

    Examples: protrain fit llama-3.1-8b --on rtx-4090,a100-80gb --seq-len 2048,8192
    | protrain fit llama-3.1-8b --on h200 --compare
    | protrain fit llama-3.1-8b --on h100-sxm --num-devices 8 --global-batch 64
    | protrain fit llama-3.1-8b --on rtx-3090 --precision pure --lora r=16 --quantize nf4
    """
    from protrain_plan.commands.cells import Cells
    from protrain_plan.commands.measuring import ProfileRequest
    from protrain_plan.commands.output import destination, progress, show
    from protrain_plan.presentation.plans import fits_json, fits_text
    from protrain_plan.presentation.report.fit_page import fit_page
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_plan.program.group import group_on
    from protrain_plan.records.files import replace_text
    from protrain_plan.records.profile import DType

    page = None if report is None else destination(report, option="--report")
    when = updates_of(updates, clip=clip)
    machines = [machine_with(name.strip(), host_memory, disk) for name in on.split(",")]
    refuse_host_memory(host_memory, machines)
    dtype_name: DType = choice("--dtype", dtype, get_args(DType))
    refuse_batches(global_batch, batch_size, accumulate)
    requests = [
        ProfileRequest(
            model=model,
            batch_size=batch,
            seq_len=length,
            dtype=dtype_name,
            precision=precision_of(precision, dtype_name),
            lora=lora,
            quantize=quantize,
            optimizer=optimizer,
            optimizer_args=optimizer_args,
        )
        for length, batch in itertools.product(
            integers("--seq-len", seq_len), integers("--batch-size", batch_size or "1")
        )
    ]
    cells = Cells(
        requests=requests,
        machines=machines,
        groups=[
            (place, group_on(machine, count))
            for place, machine in enumerate(machines)
            for count in integers("--num-devices", num_devices)
        ],
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        updates=when,
        clip_share=clip_share_of(clip_share, when),
        cache=EstimateCache(off=no_cache),
    )
    with progress(quiet=as_json) as tell:
        tell("estimating", 0.0)
        questions = cells.questions(tell, micro_batches=accumulate, global_batch=global_batch)
        fits = _answers(questions, tell, compare=compare)
        if compare and lora is None and optimizer in OF_8_BITS and find_spec("bitsandbytes"):
            fits = _with_8_bits(fits, questions, cells, tell)
    if page is not None:
        replace_text(page, fit_page(fits))
    written = () if report is None else (report,)
    show(as_json, fits_json(fits), lambda: fits_text(fits, *written))
    if all(one.verdict == "does not fit" for one in fits):
        raise typer.Exit(3)


def _answers(
    questions: "Sequence[Question]", report: "Progress", *, compare: bool = False
) -> "list[Fit]":
    from protrain_plan.commands.processes import answers_of
    from protrain_plan.profiling.estimate_cache import processes_at_once

    fits: list[Fit] = []
    answer = partial(_fitted, compare=compare)
    with answers_of(answer, questions, at_once=processes_at_once(len(questions))) as found:
        for question in questions:
            asked_of = question.profile.workload
            where = f"{asked_of.batch_size} x {asked_of.seq_len} tokens"
            on_machine = question.profile.hardware.name
            done = (1 + len(fits)) / (1 + len(questions))
            report(f"{where} on {on_machine}: planning", done)
            fits.append(next(found))
    return fits


def _with_8_bits(
    fits: "Sequence[Fit]", questions: "Sequence[Question]", cells: "Cells", report: "Progress"
) -> "list[Fit]":
    """The answers beside those with 8-bit states, where plain PyTorch does not fit."""
    from protrain_plan.planning.questions.alternatives import planned

    of_8_bits = OF_8_BITS[cells.requests[0].optimizer]
    found = list(fits)
    needing = [number for number, one in enumerate(fits) if one.verdict != "fits"]
    asked = cells.with_optimizer([questions[number] for number in needing], of_8_bits, report)
    for number, other in zip(needing, _answers(asked, report), strict=True):
        if other.solved is not None:
            beside = planned(of_8_bits, other.solved.plan)
            found[number] = replace(
                found[number], alternatives=(*found[number].alternatives, beside)
            )
    return found


def _fitted(question: "Question", *, compare: bool) -> "Fit":
    from protrain_plan.commands.cells import GAP
    from protrain_plan.planning.questions import objectives
    from protrain_plan.planning.search.improving import Effort

    return objectives.fit(question, effort=Effort(gap_target=GAP), compare=compare)
