"""`protrain fit`."""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from protrain_plan.commands.options import (
    ClipOption,
    JsonOption,
    NoCacheOption,
    UpdatesOption,
    choice,
    integers,
    refuse_host_memory,
    size,
    updates_of,
)

if TYPE_CHECKING:
    from protrain_plan.records.hardware import Hardware, TierName

GAP = 0.02
"""Plans this close to the bound are good enough for a table."""


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
    seq_len: Annotated[str, typer.Option(help="Tokens per sequence, one or more.")] = "2048",
    batch_size: Annotated[str, typer.Option(help="Sequences per batch, one or more.")] = "1",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    precision: Annotated[
        str,
        typer.Option(
            help="pure: everything in --dtype; master: the optimizer keeps float32 parameters;"
            " autocast: float32 parameters, computed with in --dtype."
        ),
    ] = "master",
    lora: Annotated[str | None, typer.Option(help="Train adapters alone, such as r=16.")] = None,
    optimizer: Annotated[str, typer.Option(help="The optimizer whose states count.")] = "adamw",
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
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches per update.")] = 1,
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model trains on machines, how fast and what binds. No GPU, no file needed.

    Bytes are exact for the operators that run, seconds are estimates from data-sheet rates.

    Examples: protrain fit llama-3.1-8b --on rtx-4090,a100-80gb --seq-len 2048,8192
    | protrain fit qwen2.5-7b --on rtx-3090 --lora r=16 --host-memory 64GiB
    """
    from protrain_plan.commands.measuring import ProfileRequest, estimated
    from protrain_plan.commands.output import progress, show
    from protrain_plan.hardware.catalogue import load_hardware
    from protrain_plan.planning.questions.objectives import Question
    from protrain_plan.planning.questions.objectives import fit as fitted
    from protrain_plan.planning.search.improving import Effort
    from protrain_plan.presentation.plans import fits_json, fits_text
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_plan.program.group import group_on, profile_of_rank
    from protrain_plan.records.plan import Budgets
    from protrain_plan.records.profile import DType, Precision

    machines = [
        _sized(load_hardware(name.strip()), host_memory=host_memory, disk=disk)
        for name in on.split(",")
    ]
    refuse_host_memory(host_memory, machines)
    lengths, batches = integers("--seq-len", seq_len), integers("--batch-size", batch_size)
    groups = [
        (place, group_on(machine, count))
        for place, machine in enumerate(machines)
        for count in integers("--num-devices", num_devices)
    ]
    dtype_name: DType = choice("--dtype", dtype, get_args(DType))
    precision_name: Precision = choice("--precision", precision, get_args(Precision))
    if dtype_name == "float32" and precision_name == "master":
        precision_name = "pure"  # the parameters are the float32 ones
    sizes = list(itertools.product(lengths, batches))
    requests = [
        ProfileRequest(
            model=model,
            batch_size=batch,
            seq_len=length,
            dtype=dtype_name,
            precision=precision_name,
            lora=lora,
            optimizer=optimizer,
        )
        for length, batch in sizes
    ]
    fits = []
    with progress(quiet=as_json) as report:
        report("estimating", 0.0)
        profiles = estimated(requests, machines, report, EstimateCache(off=no_cache))
        for number, (length, batch) in enumerate(sizes):
            where = f"{batch} x {length} tokens"
            for cell, (place, group) in enumerate(groups):
                record = profiles[number][place]
                machine = profile_of_rank(record, group).hardware
                done = (number + (1 + cell) / (1 + len(groups))) / len(sizes)
                report(f"{where} on {machine.name}: planning", done)
                # What was asked for is a node's; what a machine has by itself may be a device's.
                host = size("--host-memory", host_memory, -1) // group.in_node
                below = size("--disk", disk, -1) // group.in_node
                question = Question(
                    profile=record,
                    group=group,
                    replicas=group.replica_counts,
                    budgets=Budgets(
                        device=size("--device-memory", device_memory, machine.device.memory_bytes),
                        host=host if host >= 0 else _capacity(machine, "host"),
                        disk=below if below >= 0 else _capacity(machine, "disk"),
                    ),
                    updates=updates_of(updates, clip=clip),
                    micro_batches=accumulate,
                )
                fits.append(fitted(question, effort=Effort(gap_target=GAP)))
    show(as_json, fits_json(fits), lambda: fits_text(fits))
    if all(one.verdict == "does not fit" for one in fits):
        raise typer.Exit(3)


def _capacity(machine: "Hardware", tier: "TierName") -> int:
    return sum(t.capacity_bytes for t in machine.tiers if t.name == tier)


def _sized(machine: "Hardware", *, host_memory: str | None, disk: str | None) -> "Hardware":
    """The machine with as much below the device as was asked for."""
    wanted = {"host": size("--host-memory", host_memory, -1), "disk": size("--disk", disk, -1)}
    tiers = tuple(
        tier if wanted[tier.name] < 0 else replace(tier, capacity_bytes=wanted[tier.name])
        for tier in machine.tiers
    )
    return replace(machine, tiers=tiers)
