"""`protrain models` and `protrain hardware`: catalogues, and the probe of a machine."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from protrain_plan.commands.option_records import DiskOptions, option, output_option
from protrain_plan.commands.options import JsonOption, found_device, machine_names
from protrain_plan.commands.output import destination, print_rendered, print_result, progress
from protrain_plan.presentation.terminal import wrote

MachineArgument = Annotated[
    str,
    typer.Argument(
        help="A catalogue name, or a YAML file of hardware or of a profile.",
        show_default=False,
        autocompletion=machine_names,
    ),
]
HELP = "Machines to estimate for: those of the catalogue, or this one, measured."
EXAMPLES = "Examples:\nprotrain hardware list\nprotrain hardware probe -o my-machine.yaml"


def models(as_json: JsonOption = False) -> None:
    """List the published models that are known by name (without their weights).

    Example: protrain models
    """
    from protrain_plan.models.presets import presets
    from protrain_plan.presentation.profiles import presets_text

    listed = presets()
    print_result(as_json, {"models": listed}, lambda: presets_text(listed))


def list_machines(as_json: JsonOption = False) -> None:
    """List the machines of the catalogue.

    Example: protrain hardware list --json
    """
    from protrain_plan.hardware.catalogue import hardware_names, load_hardware
    from protrain_plan.presentation.profiles import machines_text

    machines = [load_hardware(name) for name in hardware_names()]
    print_result(as_json, {"machines": machines}, lambda: machines_text(machines))


def show_machine(name: MachineArgument, as_json: JsonOption = False) -> None:
    """Show a machine's memory and speeds, and where the numbers come from.

    Examples: protrain hardware show h100-sxm | protrain hardware show my-machine.yaml --json
    """
    from protrain_plan.hardware.catalogue import load_hardware
    from protrain_plan.presentation.profiles import machine_text

    machine = load_hardware(name)
    print_result(as_json, machine, lambda: machine_text(machine))


def copy(name: MachineArgument, output: Path = output_option("hardware", "hardware.yaml")) -> None:
    """Write a machine to a file, whose numbers you can change and which --on takes.

    Example: protrain hardware copy rtx-4090 -o my-machine.yaml
    """
    from protrain_plan.hardware.catalogue import load_hardware
    from protrain_runtime.contract.records import write_hardware

    write_hardware(load_hardware(name), destination(output, inputs=(name,)))
    print_rendered(wrote(output))


def probe(
    *,
    output: Path = output_option("hardware", "hardware.yaml"),
    device: str = option("A device of this machine: cpu, cuda, cuda:1, xpu, ...", default="cpu"),
    name: str | None = option("Name of the machine. Default: like cpu-2, with its threads."),
    disk: DiskOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine in about fifteen seconds, and write it to a file that --on takes.

    Under torchrun it also measures the links between ranks, and rank 0 writes.

    Examples: protrain hardware probe -o my-machine.yaml --name my-machine
    | torchrun --nproc-per-node 4 --no-python protrain hardware probe --device cuda
    """
    from protrain_plan.presentation.profiles import machine_text
    from protrain_runtime.contract.records import write_hardware
    from protrain_runtime.contract.records.hardware import is_accelerator

    target = destination(output)  # before torch loads
    import tempfile

    watched = disk.watch()
    from protrain_plan.hardware.probe import Rank, Watch, probe_with_ranks
    from protrain_plan.hardware.probe import probe as measured
    from protrain_runtime.devices.memory_meter import return_freed_memory

    watch = Watch(*watched)
    where = found_device(device)
    if not is_accelerator(where.type):
        return_freed_memory()
    rank, directory = Rank.launched(), disk.spill_directory or Path(tempfile.gettempdir())
    with progress(quiet=as_json, rank=rank.number if rank else 0) as report:
        measure = measured if rank is None else partial(probe_with_ranks, rank=rank)
        machine = measure(where, spill_directory=directory, name=name, watch=watch, progress=report)
    if machine is None:
        return
    write_hardware(machine, target)
    print_result(as_json, machine, lambda: machine_text(machine, written=output))
