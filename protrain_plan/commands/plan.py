"""`protrain plan`: the fastest plan for a profile."""

from dataclasses import replace
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
    JsonOption,
    NoCacheOption,
    PointsOption,
    UpdatesOption,
    budgets_of,
    choice,
    leaves_named,
    machine_with,
    refuse_batches,
    refuse_host_memory,
    size,
    step_settings,
)
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.planning.questions.growth import Quantity

OF_MODEL = "A model by its name, with --on"
QUANTITIES: "tuple[Quantity, ...]" = ("batch-size", "seq-len")


def plan(
    profile: Annotated[
        str, typer.Argument(help="A profile; with --on a model, as of fit.", show_default=False)
    ],
    device_memory: Annotated[
        str | None,
        typer.Option(help="The most that the process may take of the device, such as 1.5GiB."),
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="The most pinned host memory.")] = None,
    disk: Annotated[str | None, typer.Option(help="The most disk space.")] = None,
    page_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory beside these budgets that what is on disk may fill: it is no more than"
            " that then, and goes through the page cache. Default: 0, which passes the cache by."
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="The plan to write; - is standard output. With --on also a folder, for"
            " profile.yaml and plan.yaml.",
        ),
    ] = Path("plan.yaml"),
    pin: Annotated[
        list[str] | None,
        typer.Option(help="Fix decisions: 'layers.0-3: recompute'. May be given several times."),
    ] = None,
    pins: Annotated[Path | None, typer.Option(help="A YAML file of such decisions.")] = None,
    exact_updates: Annotated[
        bool,
        typer.Option(
            "--exact-updates",
            help="On an accelerator, let no chunk be updated by the host, whose kernels round the"
            " last bits otherwise: states stay on the device, or stream to it for the update.",
        ),
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, in words.")] = False,
    max_slowdown: Annotated[
        float | None,
        typer.Option(min=1.0, help="Least device memory for a step this many times the fastest."),
    ] = None,
    maximize: Annotated[
        str | None, typer.Option(help="batch-size or seq-len: the largest that fits.")
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="The front of memory against time; writes no plan.")
    ] = False,
    points: PointsOption = 8,
    num_devices: Annotated[
        int,
        typer.Option(min=1, help="Devices that train one model, each with batches of its own."),
    ] = 1,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Nodes that they are in; default: as few as hold them."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Groups of devices that each have all of the states, shared over the group's;"
            " default: as many as are fastest.",
        ),
    ] = None,
    accumulate: AccumulateOption = 1,
    updates: UpdatesOption = None,
    clip: ClipOption = False,
    clip_share: ClipShareOption = None,
    overlap: Annotated[
        bool,
        typer.Option(help="Let updates run on into the next step's forward where that is faster."),
    ] = True,
    allow: AllowOption = None,
    solver: Annotated[
        str, typer.Option(help="milp, or to compare: four-parameter, recompute-all, offload-all.")
    ] = "milp",
    gap: Annotated[
        float, typer.Option(min=0.0, help="A plan this close to the bound is good enough.")
    ] = 0.005,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds to search at most; default: none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order in which local search tries.")] = 0,
    lp: Annotated[
        Path | None, typer.Option(help="Write the integer programme in the readable .lp format.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            help="Estimate the model's profile for a machine: a name of the catalogue, or a YAML"
            " file.",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per sequence. Default: 2048.", rich_help_panel=OF_MODEL),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences per batch. Default: 1.", rich_help_panel=OF_MODEL),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences per update over all devices: batch and micro-batches are found.",
            rich_help_panel=OF_MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Default: bfloat16.", rich_help_panel=OF_MODEL)
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="pure, master or autocast. Default: master.", rich_help_panel=OF_MODEL),
    ] = None,
    lora: Annotated[
        str | None, typer.Option(help="As of profile: r=16.", rich_help_panel=OF_MODEL)
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="As of profile: nf4 or int8.", rich_help_panel=OF_MODEL)
    ] = None,
    compile_blocks: Annotated[
        bool, typer.Option("--compile", help="As of profile.", rich_help_panel=OF_MODEL)
    ] = False,
    optimizer: Annotated[
        str | None, typer.Option(help="As of profile. Default: adamw.", rich_help_panel=OF_MODEL)
    ] = None,
    optimizer_args: Annotated[
        str | None, typer.Option(help="As of profile.", rich_help_panel=OF_MODEL)
    ] = None,
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest step within the budgets, and write it as a plan.

    Without an option, a tier's budget is all of it that the profile saw. Of several devices, each
    takes its part of the node's host memory and disk. Ctrl-C ends the search with the best plan so
    far.

    Examples: protrain plan profile.yaml --device-memory 1.5GiB --disk 20GiB -o plan.yaml
    | protrain plan llama-3.2-1b --on rtx-4090 --global-batch 32 -o plans/mine
    | protrain plan profile.yaml --pareto
    | protrain plan profile.yaml --device-memory 24GiB --maximize batch-size
    | protrain plan profile.yaml --pin 'layers.0-3: recompute' --explain
    """
    from protrain_plan.commands.output import (
        destination,
        interruptible,
        print_beside,
        progress,
        show,
    )
    from protrain_plan.presentation.plans import answer_json, answer_text, point_text, search_text
    from protrain_runtime.contract.records import read_profile, write_plan, write_profile

    of_model = {
        "--seq-len": seq_len,
        "--batch-size": batch_size,
        "--global-batch": global_batch,
        "--dtype": dtype,
        "--precision": precision,
        "--lora": lora,
        "--quantize": quantize,
        "--compile": compile_blocks or None,
        "--optimizer": optimizer,
        "--optimizer-args": optimizer_args,
    }
    for option, value in of_model.items() if on is None else ():
        if value is not None:
            raise ProtrainError(
                "a profile says it already", key=option, fix="plan a model by its name with --on"
            )
    beside = None
    if on is not None:
        output, beside = _places(output)
    given = (profile, on, pins, beside)
    target = output if pareto else destination(output, inputs=given)  # a front is printed
    lp_target = None if lp is None else destination(lp, option="--lp", inputs=(*given, output))
    if beside is not None:
        destination(beside, inputs=given[:-1])
    from protrain_plan.planning.model.fluid import Fluid
    from protrain_plan.planning.model.options import EXACT_UPDATES, parse_pin, read_pins
    from protrain_plan.planning.questions.objectives import Objective, Question, ask
    from protrain_plan.planning.questions.planner import SOLVERS, Solver
    from protrain_plan.planning.search.improving import Effort
    from protrain_runtime.contract.program.group import group_on, profile_of_rank

    solver_name: Solver = choice("--solver", solver, SOLVERS)
    asked = {
        "--max-slowdown": max_slowdown is not None,
        "--maximize": maximize is not None,
        "--pareto": pareto,
    }
    objectives = [option for option, is_asked in asked.items() if is_asked]
    if len(objectives) > 1:
        raise ProtrainError(f"{objectives[0]} and {objectives[1]} ask for different things")
    settings, leaves = step_settings(updates, clip=clip, clip_share=clip_share), leaves_named(allow)
    if on is None:
        record = read_profile(Path(profile))
        if missing := [leave for leave in leaves if leave not in record.allowed]:
            raise ProtrainError(
                f"the profile was recorded without --allow {missing[0]}, and has no such forms",
                source=profile,
                key="--allow",
                fix=f"protrain profile ... --allow {missing[0]}",
            )
    else:
        refuse_batches(global_batch, batch_size, accumulate)
        from protrain_plan.commands.cells import Cells
        from protrain_plan.commands.measuring import requests_for
        from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER
        from protrain_plan.profiling.estimate_cache import EstimateCache

        requests = requests_for(
            profile,
            [seq_len or SEQ_LEN],
            [batch_size or 1],
            dtype=dtype or DTYPE,
            precision=precision or PRECISION,
            lora=lora,
            quantize=quantize,
            compile_blocks=compile_blocks,
            optimizer=optimizer or DEFAULT_OPTIMIZER,
            optimizer_args=optimizer_args,
            allow=leaves,
        )
        machine = machine_with(on, host_memory, disk)
        cells = Cells(
            requests=requests,
            machines=[machine],
            groups=[
                (0, group_on(machine, num_devices, num_nodes=nodes, num_replicas=replicas or 1))
            ],
            device_memory=device_memory,
            host_memory=host_memory,
            disk=disk,
            settings=settings,
            cache=EstimateCache(off=no_cache),
        )
        with progress(quiet=as_json) as report:
            [estimate] = cells.questions(
                report, micro_batches=accumulate, global_batch=global_batch
            )
        record, accumulate = estimate.profile, estimate.settings.micro_batches
    refuse_host_memory(host_memory, [record.hardware])
    group = group_on(record.hardware, num_devices, num_nodes=nodes, num_replicas=replicas or 1)
    question = Question(
        profile=record,
        settings=replace(
            settings,
            group=group,
            micro_batches=accumulate,
            overlap_steps=overlap,
            page_cache_bytes=size("--page-cache", page_cache, 0) // group.in_node,
        ),
        replicas=group.replica_counts if replicas is None else (),
        budgets=budgets_of(
            profile_of_rank(record, group).hardware, group, device_memory, host_memory, disk
        ),
        allow=leaves,
        pins=(
            *(read_pins(pins) if pins else ()),
            *(parse_pin(text) for text in pin or ()),
            *([EXACT_UPDATES] if exact_updates else []),
        ),
    )
    objective = Objective(
        max_slowdown=max_slowdown,
        maximize=None if maximize is None else choice("--maximize", maximize, QUANTITIES),
        pareto_points=points if pareto else None,
    )
    with progress(quiet=as_json) as report, interruptible() as interrupted:
        if lp_target is not None:
            Fluid(question.problem()).write_lp(lp_target)
        effort = Effort(
            gap_target=gap, time_limit_s=time_limit, seed=seed, stopped=interrupted.is_set
        )
        answer = ask(
            question,
            objective,
            effort=effort,
            solver=solver_name,
            progress=lambda *found: report(search_text(*found), 0.5),
            told=None if as_json else lambda point: print_beside(point_text(point)),
        )
    if answer.solved is not None and not pareto:
        if beside is not None:
            write_profile(record, beside)
        write_plan(answer.solved.plan, target)
    explanation = None
    if explain and answer.solved is not None:
        from protrain_plan.planning.explain.explaining import explain as explained

        explanation = explained(answer.profile, answer.solved.plan)
    written = output if beside is None else beside
    show(
        as_json,
        answer_json(answer, explanation),
        lambda: answer_text(answer, explanation, *dict.fromkeys((written, output))),
    )
    if answer.infeasible is not None:
        raise typer.Exit(3)


def _places(output: Path) -> tuple[Path, Path]:
    """Where a plan and its profile go: into a folder that is named, or a plan and beside it."""
    if str(output) == "-":
        raise ProtrainError("a plan and its profile are two files", key="-o", fix="name a folder")
    if output.suffix in (".yaml", ".yml"):
        return output, output.with_name("profile.yaml")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProtrainError(f"cannot be made: {error.strerror}", source=str(output)) from None
    return output / "plan.yaml", output / "profile.yaml"
