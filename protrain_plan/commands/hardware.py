"""`protrain hardware`: the catalogue of machines, and the probe that measures this one."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from protrain_plan.commands.options import JsonOption, SpillOption, found_device, writable
from protrain_plan.commands.output import progress, show
from protrain_plan.hardware.catalogue import hardware_names, load_hardware
from protrain_plan.records import write_hardware
from protrain_plan.records.hardware import Hardware, is_accelerator
from protrain_plan.rendering.machines import (
    machine_json,
    machine_text,
    machines_json,
    machines_text,
    probed_text,
)

HELP = "The machines that estimates are for: those of the catalogue, and this one, measured."
EXAMPLES = (
    "Examples: protrain hardware list | protrain hardware show rtx-4090"
    " | protrain hardware probe -o my-machine.yaml"
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@app.command("list", epilog="Example: protrain hardware list --json")
def list_machines(as_json: JsonOption = False) -> None:
    """List the machines of the catalogue."""
    machines = [load_hardware(name) for name in hardware_names()]
    show(as_json, machines_json(machines), lambda: machines_text(machines))


@app.command(
    "show", epilog="Examples: protrain hardware show h100-sxm | ... show my-machine.yaml --json"
)
def show_machine(
    name: Annotated[
        str,
        typer.Argument(
            help="A name of the catalogue, or a YAML file of hardware or of a profile.",
            show_default=False,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Say what a machine offers, and where the numbers are from."""
    machine = load_hardware(name)
    show(as_json, machine_json(machine), lambda: machine_text(machine))


@app.command(
    epilog="Examples: protrain hardware probe -o my-machine.yaml --name my-machine"
    " | torchrun --nproc-per-node 4 --no-python protrain hardware probe --device cuda"
)
def probe(
    output: Annotated[Path, typer.Option("-o", "--output", help="The hardware to write.")] = Path(
        "hardware.yaml"
    ),
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, xpu, ...: a device of this machine.")
    ] = "cpu",
    name: Annotated[
        str | None, typer.Option(help="Its name; default: such as cpu-2, after the threads.")
    ] = None,
    spill_directory: SpillOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine, about ten seconds, and write it as hardware.

    Under torchrun, what joins the ranks too; rank 0 writes.
    """
    writable(output)
    # Torch loads here, so that the catalogue need not wait for it.
    from protrain_plan.hardware.joined import Rank, probe_with_ranks
    from protrain_plan.hardware.probe import probe as measured
    from protrain_runtime.measure import return_freed_memory

    where = found_device(device)
    if not is_accelerator(where.type):
        return_freed_memory()
    rank, directory = Rank.launched(), spill_directory or Path(tempfile.gettempdir())
    machine: Hardware | None
    with progress(quiet=as_json or (rank is not None and rank.number > 0)) as report:
        if rank is None:
            machine = measured(where, spill_directory=directory, name=name, progress=report)
        else:
            machine = probe_with_ranks(
                where, rank, spill_directory=directory, name=name, progress=report
            )
    if machine is None:
        return
    write_hardware(machine, output)
    show(
        as_json,
        machine_json(machine),
        lambda: probed_text(machine, output),
    )
