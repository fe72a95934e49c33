"""The pages of the reference that are made from the code (held by tests/project/test_docs.py)."""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import typer.main

from protrain_plan.checking.json_schema import SCHEMAS
from protrain_plan.cli import app
from protrain_plan.models.batches import MAX_TEXT_BYTES
from protrain_plan.models.building import MAX_PARAMETERS, MAX_TENSORS
from protrain_plan.models.sources import MAX_LAYERS
from protrain_runtime.contract.program import recording
from protrain_runtime.contract.program.program import MAX_PIECES_OF_STATES
from protrain_runtime.contract.records import hardware, plan, profile
from protrain_runtime.contract.records.files import MAX_FILE_BYTES
from protrain_runtime.contract.records.limits import MAX_TEXT, MAX_UNFOLDED, MAX_UNITS
from protrain_runtime.contract.records.tree import MAX_DEPTH, MAX_NODES
from protrain_runtime.contract.units import format_bytes

Json = dict[str, Any]

VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
CLASSES: dict[str, type] = {
    kind.__name__: kind
    for module in (hardware, profile, plan)
    for kind in vars(module).values()
    if inspect.isclass(kind) and kind.__module__ == module.__name__
}
TITLES = {"hardware": "Hardware", "profile": "Profile", "plan": "Plan"}

CLI = """\
# Commands

What `protrain COMMAND --help` says, in one page. It is made from the command line itself.

Exit codes: 0 done, 1 a verification or a rule failed, 2 a mistake in the input, 3 no plan fits,
4 out of memory, 130 interrupted, 141 nobody reads what is printed. Errors are one message that
names file, key, problem and fix; `--json` prints one object on the standard output and nothing
else; `fit` prints one a line for each cell, and `hardware search` for each machine, when it is
known. What takes more than five seconds says on standard error how far it is: with a bar on a
terminal, elsewhere every five seconds in a line that begins with `...`. Names are shown as they
are, with escapes such as `\\x1b` for what cannot be seen.

A file that an option names is replaced at once: at no moment is it missing or incomplete. Links are
followed, and permissions stay. A device, a pipe or an open descriptor is written into: `/dev/null`,
`>(gzip > plan.gz)`, `/dev/fd/3`. `-`, like `/dev/stdout`, is standard output, which then holds the
file alone; everything else goes to standard error.
"""
FILES = """\
# Files

Four kinds of YAML files are read: what a machine offers, what a model costs on it, a plan, and
budgets for [`protrain check`](../checks.md). They are read strictly: an unknown key, a missing one
or a value of another kind is an error that names file, line and key. Every file begins with
`protrain: KIND` and its version: 3, or 1 for budgets. Records of earlier versions are made again. A
size is a whole number of bytes or a text such as `1.5GiB`. What machines cost is a list without
such a head, for one command: [Choose a machine](../how-to/choose-a-machine.md).

The lists are made from the JSON Schemas in `schemas/` and the texts from the code that reads the
files. Editors check a file as it is written when its first line is
`# yaml-language-server: $schema=PATH`. Units that are
equal and stand in a row are one entry with `names: layers.0-11` in the place of `name`.

## Limits

A file from somebody else takes no more than seconds and some memory: what is beyond these limits is
an error that names the key and the number, and no file ends a command in any other way. At most:

"""
LIMITS = {
    "a file": format_bytes(MAX_FILE_BYTES),
    "a recording": format_bytes(recording.MAX_FILE_BYTES),
    "a text to train on": format_bytes(MAX_TEXT_BYTES),
    "keys and values of a file": MAX_NODES,
    "lists and mappings in one another": MAX_DEPTH,
    "characters of a name, a key and most texts": MAX_TEXT,
    "units, runs unfolded": MAX_UNITS,
    "keys and values of all units, runs unfolded": MAX_UNFOLDED,
    "pieces in which states on disk move": MAX_PIECES_OF_STATES,
    "layers of a `config.json`": MAX_LAYERS,
    "parameters of a `config.json`": f"{MAX_PARAMETERS:.0e}, in {MAX_TENSORS} tensors",
}
CHARACTERS = """
The range of each number is in its schema; `inf` and `nan` are none. Control characters, marks of
direction, characters of no width and surrogates are refused in every text, with the character's
number: what one reads in a file is what it says.
"""
BUDGETS = """\
## Machines of a budgets file

Below `budgets`, or in `pyproject.toml` below `[tool.protrain.budgets]`, every machine has the keys
that [`protrain check`](../checks.md#budgets) explains.
"""


# --- commands -------------------------------------------------------------------------------------


def cli_page() -> str:
    """docs/reference/cli.md."""
    group: Any = typer.main.get_command(app)
    return "\n".join((CLI, *_commands(group, "protrain", set())))


def _commands(group: Any, path: str, told: set[tuple[str, str]]) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}", told)
        else:
            yield from _command(command, f"{path} {name}", told)


def _command(command: Any, path: str, told: set[tuple[str, str]]) -> Iterator[str]:
    """A command's section; options that an earlier one has `told` of are named alone."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    words = [_argument(argument) for argument in arguments]
    yield f"## `{' '.join((path, *words))}`\n"
    yield f"{inspect.cleandoc(command.help)}\n"
    for argument, word in zip(arguments, words, strict=True):
        yield f"- `{word}`: {_meaning(argument)}"
    again = []
    for option in command.params:
        if option in arguments:
            continue
        if (what := (option.name, option.help)) in told:
            again.append(f"`{_option(option)}`")
        else:
            yield f"- `{_option(option)}`: {_meaning(option)}"
        told.add(what)
    yield f"\nAs above: {', '.join(again)}.\n" if again else ""
    examples = re.sub(r"^Examples?: ", "", command.epilog or "")
    if examples:
        group = path.rpartition(" ")[0]
        lines = [re.sub(r"^\.\.\.", group, line) for line in examples.split(" | ")]
        yield from ("```text", *lines, "```\n")


def _argument(argument: Any) -> str:
    many = "..." if argument.nargs == -1 else ""
    word = f"{argument.name.upper()}{many}"
    return word if argument.required else f"[{word}]"


def _option(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len))
    annotation = option.type_descriptor.annotation
    value = VALUES.get((*get_args(annotation), annotation)[0], "")
    return f"{names} {value}".rstrip()


def _meaning(parameter: Any) -> str:
    words = re.sub(r"\s+", " ", parameter.help or "").removesuffix(".")
    value = parameter.default
    if value is None or isinstance(value, bool) or parameter.show_default is False:
        return words
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return f"{words} (default: `{value}`)"


# --- files ----------------------------------------------------------------------------------------


def files_page() -> str:
    """docs/reference/files.md."""
    lines = [FILES.rstrip() + "\n"]
    for what, number in LIMITS.items():
        lines.append(f"- {what}: {f'{number:,}' if isinstance(number, int) else number}")
    lines += [CHARACTERS]
    described: set[str] = set()
    for name, title in TITLES.items():
        schema = SCHEMAS[name]()
        for part, fields in {title: schema, **schema["$defs"]}.items():
            if part not in described:
                described.add(part)
                lines += [
                    f"##{'' if part in TITLES.values() else '#'} {part}\n",
                    *_record(part, fields),
                ]
    machine = SCHEMAS["budgets"]()["$defs"]["Entry"]
    return "\n".join((*lines, BUDGETS, *_fields(machine, {})))


def _record(name: str, schema: Json) -> Iterator[str]:
    kinds = (CLASSES[name], plan.Schedule) if name == "UnitPlan" else (CLASSES[name],)
    yield from (f"{_words(kind)}\n" for kind in kinds)
    comments: dict[str, str] = {}
    for kind in kinds:
        comments |= dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(kind), re.M))
    yield from _fields(schema, comments)


def _words(record: type) -> str:
    """A class's docstring; what it indents is a table or a formula, and stays as it is."""
    paragraphs = inspect.cleandoc(record.__doc__ or "").split("\n\n")
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs)


def _paragraph(text: str) -> str:
    aligned = "   " in text or text.startswith(" ")
    return f"```text\n{inspect.cleandoc(text)}\n```" if aligned else text


def _fields(schema: Json, comments: Mapping[str, str]) -> Iterator[str]:
    """A list of keys, their values and the comments beside a record's fields."""
    required = schema.get("required", [])
    for key, value in schema["properties"].items():
        if key not in ("protrain", "version"):
            allowed = _value(value) + ("" if key in required else " (optional)")
            meaning = f"; {comments[key]}" if key in comments else ""
            yield f"- `{key}`: {allowed}{meaning}"
    yield ""


def _value(schema: Json) -> str:
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        case {"enum": values}:
            return ", ".join(f"`{value}`" if value else "empty" for value in values)
        case {"type": "array", "items": items}:
            return f"list of {_value(items)}"
        case {"description": str(words)}:
            return words
        case {"anyOf": [{"type": "integer"}, {"type": "string"}]}:
            return "size"
        case {"anyOf": choices}:
            return " or ".join(_value(choice) for choice in choices)
        case {"type": "integer"}:
            return "integer"
        case {"type": "number"}:
            return "number"
        case {"type": str(kind)}:
            return {"string": "text", "boolean": "boolean"}[kind]
        case _:
            raise ValueError(schema)
