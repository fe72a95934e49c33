"""`protrain plan` and `protrain fit`: the fastest plans for a profile, and for models by name."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protrain_plan.commands.options import (
    AccumulateOption,
    ClipOption,
    ClipShareOption,
    DTypeOption,
    JsonOption,
    LoraOption,
    ModelArgument,
    NoCacheOption,
    OptimizerArgsOption,
    OptimizerOption,
    PointsOption,
    PrecisionOption,
    QuantizeOption,
    UpdatesOption,
    budgets_of,
    choice,
    clip_share_of,
    integers,
    refuse_host_memory,
    size,
    updates_of,
)
from protrain_plan.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.planning.questions.growth import Quantity
    from protrain_plan.planning.questions.objectives import Fit, Question

QUANTITIES: "tuple[Quantity, ...]" = ("batch-size", "seq-len")
GAP = 0.02
"""Plans this close to the bound are good enough for a table."""


def plan(
    profile: Annotated[Path, typer.Argument(help="A profile.", show_default=False)],
    device_memory: Annotated[
        str | None,
        typer.Option(help="The most that the process may take of the device, such as 1.5GiB."),
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="The most pinned host memory.")] = None,
    disk: Annotated[str | None, typer.Option(help="The most disk space.")] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The plan to write; - is standard output.")
    ] = Path("plan.yaml"),
    pin: Annotated[
        list[str] | None,
        typer.Option(help="Fix decisions: 'layers.0-3: recompute'. May be given several times."),
    ] = None,
    pins: Annotated[Path | None, typer.Option(help="A YAML file of such decisions.")] = None,
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
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Let blocks take an activation option that is not exact; the plan says so."
            " May be given several times."
        ),
    ] = None,
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
    as_json: JsonOption = False,
) -> None:
    """Find the fastest step within the budgets, and write it as a plan.

    Without an option, a tier's budget is all of it that the profile saw. Of several devices, each
    takes its part of the node's host memory and disk. Ctrl-C ends the search with the best plan so
    far.

    Examples: protrain plan profile.yaml --device-memory 1.5GiB --disk 20GiB -o plan.yaml
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
    from protrain_plan.records import read_profile, write_plan

    target = output if pareto else destination(output)  # a front is printed
    lp_target = None if lp is None else destination(lp, option="--lp")
    from protrain_plan.planning.model.fluid import Fluid
    from protrain_plan.planning.model.options import parse_pin, read_pins
    from protrain_plan.planning.questions.objectives import Objective, Question, ask
    from protrain_plan.planning.questions.planner import SOLVERS, Solver
    from protrain_plan.planning.search.improving import Effort
    from protrain_plan.program.group import group_on, profile_of_rank

    solver_name: Solver = choice("--solver", solver, SOLVERS)
    asked = {
        "--max-slowdown": max_slowdown is not None,
        "--maximize": maximize is not None,
        "--pareto": pareto,
    }
    objectives = [option for option, is_asked in asked.items() if is_asked]
    if len(objectives) > 1:
        raise ProtrainError(f"{objectives[0]} and {objectives[1]} ask for different things")
    when = updates_of(updates, clip=clip)
    record = read_profile(profile)
    refuse_host_memory(host_memory, [record.hardware])
    group = group_on(record.hardware, num_devices, num_nodes=nodes, num_replicas=replicas or 1)
    question = Question(
        profile=record,
        group=group,
        replicas=group.replica_counts if replicas is None else (),
        budgets=budgets_of(
            profile_of_rank(record, group).hardware, group, device_memory, host_memory, disk
        ),
        updates=when,
        clip_share=clip_share_of(clip_share, when),
        micro_batches=accumulate,
        allow=tuple(allow or ()),
        overlap_steps=overlap,
        pins=(*(read_pins(pins) if pins else ()), *(parse_pin(text) for text in pin or ())),
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
        write_plan(answer.solved.plan, target)
    explanation = None
    if explain and answer.solved is not None:
        from protrain_plan.planning.explain.explaining import explain as explained

        explanation = explained(answer.profile, answer.solved.plan)
    show(
        as_json, answer_json(answer, explanation), lambda: answer_text(answer, explanation, output)
    )
    if answer.infeasible is not None:
        raise typer.Exit(3)


def fit(
    model: ModelArgument,
    on: Annotated[
        str, typer.Option("--on", help="Machines: names of the catalogue or YAML files, by comma.")
    ],
    seq_len: Annotated[str, typer.Option(help="Tokens per sequence, one or more.")] = "2048",
    batch_size: Annotated[str, typer.Option(help="Sequences per batch, one or more.")] = "1",
    dtype: DTypeOption = "bfloat16",
    precision: PrecisionOption = "master",
    lora: LoraOption = None,
    quantize: QuantizeOption = None,
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
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model trains on machines, how fast and what binds. No GPU, no file needed.

    Bytes are exact for the operators that run, seconds are estimates from data-sheet rates.

    Examples: protrain fit llama-3.1-8b --on rtx-4090,a100-80gb --seq-len 2048,8192
    | protrain fit qwen2.5-7b --on rtx-3090 --lora r=16 --host-memory 64GiB
    | protrain fit llama-3.1-8b --on rtx-3090 --precision pure --lora r=16 --quantize nf4
    | protrain fit llama-3.1-8b --on rtx-4090 --sweep host=64GiB..512GiB
    """
    from protrain_plan.commands.measuring import estimated, requests_for
    from protrain_plan.commands.output import progress, show
    from protrain_plan.commands.processes import answers_of
    from protrain_plan.commands.sweeping import lighter_states, read_sweep, show_help, show_sweep
    from protrain_plan.hardware.catalogue import load_hardware
    from protrain_plan.planning.questions.objectives import Question
    from protrain_plan.presentation.plans import fits_json, fits_text
    from protrain_plan.profiling.estimate_cache import EstimateCache, processes_at_once
    from protrain_plan.program.group import group_on, profile_of_rank

    when = updates_of(updates, clip=clip)
    swept = None if sweep is None else read_sweep(sweep)
    share = clip_share_of(clip_share, when)
    machines = []
    for name in on.split(","):
        machine = load_hardware(name.strip())  # with as much below its device as was asked for
        asked = {"host": size("--host-memory", host_memory, -1), "disk": size("--disk", disk, -1)}
        tiers = tuple(
            tier if asked[tier.name] < 0 else replace(tier, capacity_bytes=asked[tier.name])
            for tier in machine.tiers
        )
        machines.append(replace(machine, tiers=tiers))
    refuse_host_memory(host_memory, machines)
    if swept is not None:
        swept.refuse_missing(machines)
    lengths, batches = integers("--seq-len", seq_len), integers("--batch-size", batch_size)
    groups = [
        (place, group_on(machine, count))
        for place, machine in enumerate(machines)
        for count in (swept and swept.counts) or integers("--num-devices", num_devices)
    ]
    requests = requests_for(
        model,
        lengths,
        batches,
        dtype=dtype,
        precision=precision,
        lora=lora,
        quantize=quantize,
        optimizer=optimizer,
        optimizer_args=optimizer_args,
    )
    fits: list[Fit] = []
    with progress(quiet=as_json) as report:
        report("estimating", 0.0)
        profiles = estimated(requests, machines, report, EstimateCache(off=no_cache))
        questions: list[Question] = []
        for request, (place, group) in itertools.product(range(len(requests)), groups):
            record = profiles[request][place]
            machine = profile_of_rank(record, group).hardware
            questions.append(
                Question(
                    profile=record,
                    group=group,
                    replicas=group.replica_counts,
                    budgets=budgets_of(machine, group, device_memory, host_memory, disk),
                    updates=when,
                    clip_share=share,
                    micro_batches=accumulate,
                )
            )
    if swept is not None:
        show_sweep(swept, questions, as_json=as_json)
        return
    at_once = processes_at_once(len(questions))
    with (
        progress(quiet=as_json) as report,
        answers_of(_fitted, questions, at_once=at_once) as found,
    ):
        for question in questions:
            asked_of = question.profile.workload
            where = f"{asked_of.batch_size} x {asked_of.seq_len} tokens"
            on_machine = question.profile.hardware.name
            done = (1 + len(fits)) / (1 + len(questions))
            report(f"{where} on {on_machine}: planning", done)
            fits.append(next(found))
    if what_helps:
        show_help(fits, questions, lighter_states(requests, machines, no_cache), as_json=as_json)
    else:
        show(as_json, fits_json(fits), lambda: fits_text(fits))
    if all(one.verdict == "does not fit" for one in fits):
        raise typer.Exit(3)


def _fitted(question: "Question") -> "Fit":
    from protrain_plan.planning.questions import objectives
    from protrain_plan.planning.search.improving import Effort

    return objectives.fit(question, effort=Effort(gap_target=GAP))
