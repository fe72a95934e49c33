"""`protrain profile`."""

from dataclasses import replace
from pathlib import Path

import typer

from protrain_plan.commands.option_records import (
    DiskOptions,
    WorkloadOptions,
    flag,
    given,
    option,
    option_record,
    output_option,
)
from protrain_plan.commands.options import (
    AllowOption,
    JsonOption,
    ModelArgument,
    NoCacheOption,
    machine_names,
    naming,
    refuse,
    refuse_of_factory,
)
from protrain_plan.commands.output import destination, print_result, progress
from protrain_plan.presentation.terminal import fields_of


@option_record
class MeasureOptions:
    """Options of a measurement on this machine."""

    device: str | None = option(
        "A device of this machine: cpu (the default), cuda, cuda:1, xpu, ..."
    )
    deterministic: bool = flag("Measure and run with PyTorch's deterministic kernels.")
    steps: int | None = option(
        "Timed steps per activation form. Default: 2 s of steps, from 3 to 15.", min=1
    )
    unit_by_unit: bool = flag(
        "Never load the whole model: run only a few of its equal blocks. Automatic if the model"
        " would take more than half of the device's free memory."
    )
    probe: bool = flag("Measure the machine again. By default its probe is cached.")
    in_process: bool = flag(
        "Measure in this process, for debuggers, not in a separate one that may crash."
    )


def profile(
    context: typer.Context,
    model: ModelArgument,
    *,
    output: Path = output_option("profile", "profile.yaml"),
    batch_size: int = option("Sequences, images or pairs per batch.", default=1, min=1),
    seq_len: int = option(
        "Tokens of text per sequence: targets, if sound or images go in.", default=512, min=1
    ),
    workload: WorkloadOptions,
    allow: AllowOption = None,
    on: str | None = option(
        "Estimate for this machine: a catalogue name (protrain hardware list) or a YAML file.",
        autocompletion=machine_names,
    ),
    interconnect: str | None = option(
        "Plan for several devices joined as in this machine: a catalogue name or a YAML file."
    ),
    measuring: MeasureOptions,
    disk: DiskOptions,
    seed: int = option("Seed of weights and text.", default=0),
    text: Path | None = option("A text file to take batches from."),
    no_cache: NoCacheOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what a model costs, block by block, in bytes and seconds.

    Measures on this machine, and says after the first step about how long that takes. With --on, it
    estimates for another machine and needs no device.

    Examples: protrain profile smollm2-135m --batch-size 1 --seq-len 256 -o profile.yaml
    | protrain profile llama-3.1-8b --on rtx-4090 --dtype bfloat16 --seq-len 4096
    | protrain profile llama-3.1-70b --on rtx-4090 --dtype bfloat16 --lora r=16 --quantize nf4
    """
    from protrain_plan.commands.measuring import estimated, measured, measured_apart
    from protrain_plan.hardware.catalogue import load_hardware
    from protrain_plan.presentation.profiles import profile_json, profile_text
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_plan.simulation.group import interconnect_of
    from protrain_runtime.contract.records import write_profile

    refuse_of_factory(context, model)
    machine = None if on is None else load_hardware(on)
    other = None if interconnect is None else load_hardware(interconnect)
    with naming("--interconnect"):
        joined = None if other is None else interconnect_of(other)
    refuse(
        (*given(measuring), *given(disk)) if machine else (),
        "applies to measured profiles; --on estimates",
    )
    target = destination(output, inputs=(model, on, interconnect, text))
    [request] = workload.requests(
        model,
        [seq_len],
        [batch_size],
        allow=allow,
        defaults=("float32", "pure"),
        **fields_of(measuring, but=("in_process",)),
        no_cache=no_cache,
        seed=seed,
        text=text,
        spill_directory=disk.spill_directory,
        disk_watch=disk.watch(),
    )
    with progress(quiet=as_json, threaded=not measuring.in_process) as report:
        if machine is not None:
            [[record]] = estimated([request], [machine], report, EstimateCache(off=no_cache))
        else:
            record = (measured if measuring.in_process else measured_apart)(request, report)
    if joined is not None:
        record = replace(record, hardware=replace(record.hardware, interconnect=joined))
    write_profile(record, target)
    print_result(as_json, profile_json(record), lambda: profile_text(record, output))
