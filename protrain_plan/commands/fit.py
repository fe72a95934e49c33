"""`protrain fit`: whether models train on machines that need not be there, and how fast."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protrain_plan.commands.options import (
    DTYPE,
    PRECISION,
    SEQ_LEN,
    AccumulateOption,
    AllowOption,
    ClipOption,
    ClipShareOption,
    CompileOption,
    DTypeOption,
    JobsOption,
    JsonOption,
    LoraOption,
    ModelArgument,
    NoCacheOption,
    OptimizerArgsOption,
    OptimizerOption,
    PrecisionOption,
    QuantizeOption,
    UpdatesOption,
    choice,
    integers,
    leaves_named,
    machine_with,
    prices_of,
    refuse_batches,
    refuse_host_memory,
    step_settings,
)
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.measuring import Progress
    from protrain_plan.planning.questions.objectives import Fit, Question
    from protrain_runtime.contract.records.hardware import Hardware


def fit(
    model: ModelArgument,
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
    precision: PrecisionOption = PRECISION,
    lora: LoraOption = None,
    quantize: QuantizeOption = None,
    compile_blocks: CompileOption = False,
    optimizer: OptimizerOption = "adamw",
    optimizer_args: OptimizerArgsOption = None,
    allow: AllowOption = None,
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
    sweep: Annotated[
        str | None,
        typer.Option(
            help="One of host, device, disk, link, num-devices, and its values: doubles in a range"
            " such as host=64GiB..1TiB, or link=pcie-4,64GB/s."
        ),
    ] = None,
    what_helps: Annotated[
        bool,
        typer.Option(
            "--what-helps",
            help="Say what more memory, a faster link, larger batches and states of 8 bits are"
            " worth. Each takes as long as an answer.",
        ),
    ] = False,
    price: Annotated[
        str | None,
        typer.Option(
            help="Of a device for an hour, or one of each machine by comma; default: that of the"
            " machine's file. Adds the columns hours and cost."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="More columns, by comma: mfu (model FLOPs utilisation), and hours, cost and energy"
            " of a billion tokens."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a page with the chart of tokens per second against memory."),
    ] = None,
    jobs: JobsOption = None,
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model trains on machines, how fast and what binds. No GPU, no file needed.

    Bytes are exact for the operators that run, seconds are estimates from data-sheet rates.

    Examples: protrain fit llama-3.1-8b --on rtx-4090,a100-80gb --seq-len 2048,8192
    | protrain fit llama-3.1-8b --on h200 --compare --price 2.49
    | protrain fit llama-3.1-8b --on h100-sxm --num-devices 8 --global-batch 64
    | protrain fit llama-3.1-8b --on rtx-3090 --precision pure --lora r=16 --quantize nf4
    | protrain fit llama-3.1-8b --on rtx-4090 --sweep host=64GiB..512GiB
    """
    from protrain_plan.commands.cells import Cells
    from protrain_plan.commands.measuring import requests_for
    from protrain_plan.commands.output import JsonList, destination, progress, show
    from protrain_plan.commands.sweeping import read_sweep, show_help, show_sweep
    from protrain_plan.presentation.plans import CELLS, fit_json, fits_json, fits_text
    from protrain_plan.presentation.report.fit_page import fit_page
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_runtime.contract.program.group import group_on
    from protrain_runtime.contract.records.files import replace_text

    read = (model, *on.split(","))
    page = None if report is None else destination(report, option="--report", inputs=read)
    settings = step_settings(updates, clip=clip, clip_share=clip_share)
    machines = [machine_with(name.strip(), host_memory, disk) for name in on.split(",")]
    refuse_host_memory(host_memory, machines)
    refuse_batches(global_batch, batch_size, accumulate)
    prices = prices_of(price, machines)
    shown = _columns(columns, machines, prices, price=price)
    # A price is no part of what is estimated.
    machines = [replace(machine, price_per_hour=0.0) for machine in machines]
    swept = None if sweep is None else read_sweep(sweep)
    if swept is not None:
        swept.refuse_missing(machines)
        others: dict[str, object] = {"--what-helps": what_helps, "--compare": compare}
        others |= {"--report": page, "--price": price, "--columns": columns}
        for option, given in others.items():
            if given:
                raise ProtrainError("--sweep prints a table of its own", key=option)
    requests = requests_for(
        model,
        integers("--seq-len", seq_len),
        integers("--batch-size", batch_size or "1"),
        dtype=dtype,
        precision=precision,
        lora=lora,
        quantize=quantize,
        compile_blocks=compile_blocks,
        optimizer=optimizer,
        optimizer_args=optimizer_args,
        allow=leaves_named(allow),
    )
    cells = Cells(
        requests=requests,
        machines=machines,
        groups=[
            (place, group_on(machine, count))
            for place, machine in enumerate(machines)
            for count in (swept and swept.counts) or integers("--num-devices", num_devices)
        ],
        device_memory=device_memory,
        host_memory=host_memory,
        disk=disk,
        settings=settings,
        cache=EstimateCache(off=no_cache),
        jobs=jobs,
    )
    with progress(quiet=as_json) as tell:
        tell("estimating", 0.0)
        questions: list[Question] = []
        fits: list[Fit] = []
        in_order = [prices[place] for _ in requests for place, _ in cells.groups]
        # What others change when all are known is printed at the end.
        at_once = as_json and not (compare or what_helps or swept)
        cells_json = JsonList(CELLS, len(in_order)) if at_once else None
        if swept is not None:
            questions = cells.questions(tell, micro_batches=accumulate, global_batch=global_batch)
        else:
            with closing(
                cells.answers(
                    partial(_fitted, compare=compare),
                    tell,
                    micro_batches=accumulate,
                    global_batch=global_batch,
                )
            ) as answers:
                for (question, one), price_of_one in zip(answers, in_order, strict=True):
                    questions.append(question)
                    fits.append(_priced(one, price_of_one))
                    if cells_json:
                        cells_json.add(fit_json(fits[-1]))
        lighter = []
        if compare or what_helps:
            lighter = cells.with_states_of_8_bits(questions, tell)
        if compare and lighter:
            fits = _with_8_bits(fits, lighter, tell, jobs=jobs)
    if swept is not None:
        show_sweep(swept, questions, as_json=as_json, jobs=jobs)
        return
    if page is not None:
        replace_text(page, fit_page(fits, columns=shown))
    written = () if report is None else (report,)
    if what_helps:
        show_help(
            fits,
            questions,
            lighter,
            as_json=as_json,
            written=written,
            columns=shown,
            jobs=jobs,
        )
    elif cells_json is None:
        show(as_json, fits_json(fits), lambda: fits_text(fits, *written, columns=shown))
    if all(one.verdict == "does not fit" for one in fits):
        raise typer.Exit(3)


def _columns(
    text: str | None, machines: "Sequence[Hardware]", prices: Sequence[float], *, price: str | None
) -> tuple[str, ...]:
    """The columns that are asked for; ProtrainError for an unknown one, and one without values."""
    from protrain_plan.presentation.spending import COLUMNS

    names = () if text is None else tuple(name.strip() for name in text.split(","))
    names = tuple(dict.fromkeys((*names, *(("hours", "cost") if price else ()))))
    for name in names:
        choice("--columns", name, tuple(COLUMNS))
    if "cost" in names and not any(prices):
        raise ProtrainError(
            "no machine has a price", key="--columns", fix="say that of a device: --price 2.49"
        )
    if "energy" in names and not any(machine.power_w for machine in machines):
        raise ProtrainError(
            "no machine says what its device takes",
            key="--columns",
            fix="write power_w, in watts, into the machine's file",
        )
    return names


def _priced(fit: "Fit", price: float) -> "Fit":
    hardware = replace(fit.profile.hardware, price_per_hour=price)
    return replace(fit, profile=replace(fit.profile, hardware=hardware))


def _with_8_bits(
    fits: "Sequence[Fit]", lighter: "Sequence[Question]", tell: "Progress", *, jobs: int | None
) -> "list[Fit]":
    """The answers beside those with 8-bit states, where plain PyTorch does not fit."""
    from protrain_plan.commands.cells import answered
    from protrain_plan.planning.questions.alternatives import planned

    found = list(fits)
    needing = [number for number, one in enumerate(fits) if one.verdict != "fits"]
    answer = partial(_fitted, compare=False)
    others = answered([lighter[number] for number in needing], answer, tell, jobs=jobs)
    for number, (_, other) in zip(needing, others, strict=True):
        if other.solved is not None:
            beside = planned(other.profile.optimizer.name, other.solved.plan, other.profile)
            alternatives = (*found[number].alternatives, beside)
            found[number] = replace(found[number], alternatives=alternatives)
    return found


def _fitted(question: "Question", *, compare: bool) -> "Fit":
    from protrain_plan.commands.cells import GAP
    from protrain_plan.planning.questions import objectives
    from protrain_plan.planning.search.improving import Effort

    return objectives.fit(question, effort=Effort(gap_target=GAP, fine=False), compare=compare)
