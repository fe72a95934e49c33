"""`protrain profile`."""

import tempfile
from pathlib import Path
from typing import Annotated, get_args

import typer

from protrain_plan import rendering
from protrain_plan.commands.options import JsonOption, SpillOption, choice, writable
from protrain_plan.commands.output import progress, show
from protrain_plan.records import write_profile
from protrain_plan.records.hardware import DeviceKind
from protrain_plan.records.profile import DType

EXAMPLES = "Example: protrain profile smollm2-135m --batch-size 1 --seq-len 256 -o profile.yaml"


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset's name, a Hugging Face config.json (file or folder),"
            " or package.module:factory.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The profile to write.")] = Path(
        "profile.yaml"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per batch.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per form of activations.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and text.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A text file to take batches from.")] = None,
    spill_directory: SpillOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record what a model costs on this machine, unit by unit, in bytes and seconds."""
    dtype_name: DType = choice("--dtype", dtype, get_args(DType))
    device_name: DeviceKind = choice("--device", device, get_args(DeviceKind))
    writable(output)
    # Torch loads here, so that --help and planning need not wait for it.
    from protrain_plan.models.sources import load_source
    from protrain_plan.profiling.measured import measure
    from protrain_runtime.measure import return_freed_memory

    source = load_source(model)
    if device_name == "cpu":
        return_freed_memory()
    with progress(quiet=as_json) as report:
        record = measure(
            source,
            batch_size=batch_size,
            seq_len=seq_len,
            dtype=dtype_name,
            device=device_name,
            seed=seed,
            num_steps=steps,
            spill_directory=spill_directory or Path(tempfile.gettempdir()),
            text=text,
            progress=report,
        )
    write_profile(record, output)
    show(as_json, rendering.profile_json(record), lambda: rendering.profile_text(record, output))
