"""`protrain export`."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.text import Text

from protrain_plan.commands.options import JsonOption, choice, writable
from protrain_plan.commands.output import out, print_json
from protrain_plan.records import read_plan
from protrain_plan.records.files import replace_text

EXAMPLES = "Example: protrain export plan.yaml --to deepspeed -o ds_config.json"


def export(
    plan: Annotated[Path, typer.Argument(help="A plan.", show_default=False)],
    to: Annotated[str, typer.Option(help="deepspeed, fsdp2 (Accelerate), torchtune or trl.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The file to write; default: named after the tool."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write another tool's nearest configuration, and list what it cannot express."""
    from protrain_plan.checking.exporting import Tool
    from protrain_plan.checking.exporting import export as exported

    tool: Tool = choice("--to", to, get_args(Tool))
    found = exported(read_plan(plan), tool)
    path = output or Path(found.file_name)
    writable(path)
    replace_text(path, found.text)
    if as_json:
        print_json({"file": str(path), "cannot_express": list(found.losses)})
        return
    out.print(Text(f"wrote {path}"))
    if found.losses:
        out.print(Text("what it cannot express:"))
        for loss in found.losses:
            out.print(Text(f"- {loss}"))
