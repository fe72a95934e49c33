"""The pages of the reference that are made from the code (held by tests/project/test_docs.py)."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer.main

from docs.json_schema import SCHEMAS
from protrain_plan.cli import app
from protrain_plan.commands.help import ROWS, place
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

CLASSES: dict[str, type] = {
    kind.__name__: kind
    for module in (hardware, profile, plan)
    for kind in vars(module).values()
    if inspect.isclass(kind) and kind.__module__ == module.__name__
}
TITLES = {"hardware": "Hardware", "profile": "Profile", "plan": "Plan"}

CLI = """\
# Commands

Each command, its options and the first sentence of their help, made from the command line itself.
`protrain COMMAND --help` has the rest; of the longest, `--help-all`. All commands but `report` and
`hardware copy` take `--json`.

Exit codes: 0 done, 1 a verification or a rule failed, 2 a mistake in the input, 3 no plan fits,
4 out of memory, 130 interrupted, 141 the reader of the output has closed it. `--json` prints one
object on standard output (`fit` one per cell) and nothing else. Progress goes to standard error,
every five seconds where that is no terminal. Invisible characters are escaped (`\\x1b`).

Output files are replaced atomically; devices and pipes are written into. `-` is standard output;
messages then go to standard error.
"""
FILES = """\
# Files

protrain reads four kinds of YAML files: hardware, profiles, plans and budgets. An unknown key, a
missing key or a value of another kind is an error with file, line and key. Every file begins with
`protrain: KIND` and its version: 3, or 1 for budgets. Earlier versions are refused. A size is a
whole number of bytes or a text such as `1.5GiB`. [Prices](../how-to/machines.md) have no such head.

`?` marks an optional key. JSON Schemas with all types and ranges are in `schemas/`; editors use one
where the first line is `# yaml-language-server: $schema=PATH`. Equal consecutive units are one
entry with `names: layers.0-11` in place of `name`. [Rules and budgets](../checks.md#budgets) has
the keys of budgets, and docstrings in `runtime/protrain_runtime/contract/records/` explain the keys
of profiles.

## Limits

A file beyond one of these limits is an error with the key and the number:

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
`inf`, `nan`, control characters, direction marks, zero-width characters and surrogates are refused.
"""
WHOLE = {
    *(name for name, kind in CLASSES.items() if kind.__module__ == hardware.__name__),
    *("StepSettings", "UnitPlan"),
}
"""Records that users write or review: the page has all about each, of others the first sentence."""
MEASURED = {name for name, kind in CLASSES.items() if kind.__module__ == profile.__name__} - {
    "Profile",
    "Workload",
}
"""Records that no user writes, left to schemas and docstrings."""
MANY = 12
"""Choices that are listed; more are a table of another page."""
LONG = 12
"""Words of a sentence about an option that stands as a whole."""


# --- commands -------------------------------------------------------------------------------------


def cli_page() -> str:
    """docs/reference/cli.md."""
    group: Any = typer.main.get_command(app)
    return "\n".join((CLI, *_commands(group, "protrain", {})))


def _commands(group: Any, path: str, told: dict[str, set[str]]) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}", told)
        else:
            yield from _command(command, f"{path} {name}", told)


def _command(command: Any, path: str, told: dict[str, set[str]]) -> Iterator[str]:
    """A command's section; options of earlier commands in `told` are named alone."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [
        p for p in sorted(command.params, key=place) if p not in arguments and p.name != "as_json"
    ]
    words = [_argument(argument) for argument in arguments]
    yield f"## `{' '.join((path, *words))}`\n"
    yield f"{inspect.cleandoc(command.help).split(chr(10) * 2)[0]}\n"
    for argument, word in zip(arguments, words, strict=True):
        if argument.help not in told:
            yield f"- `{word}`: {_meaning(argument)}"
        told[argument.help] = set()
    mine = {f"{_option(option)}: {option.help}": option for option in options}
    before = set().union(*told.values())
    yield from (
        f"- `{_option(one)}`: {_meaning(one)}" for key, one in mine.items() if key not in before
    )
    again = {key for key in mine if key in before}
    whole = [name for name, keys in told.items() if len(keys) > MANY and keys <= again]
    again -= set().union(*(told[name] for name in whole))
    names = [f"all of `{name}`" for name in whole]
    names += [f"`{max(one.opts, key=len)}`" for key, one in mine.items() if key in again]
    yield f"\nAs above: {', '.join(names)}.\n" if names else ""
    told[path] = set(mine)
    _, example, *_ = command.epilog.split("\n")
    yield f"    {example}\n"


def _argument(argument: Any) -> str:
    many = "..." if argument.nargs == -1 else ""
    word = f"{argument.name.upper()}{many}"
    return word if argument.required else f"[{word}]"


def _option(option: Any) -> str:
    names, value = ", ".join(sorted(option.opts, key=len)), ROWS[place(option)][2]
    return names if option.is_flag else f"{names} {value or option.metavar}"


def _meaning(parameter: Any) -> str:
    words = _brief(re.sub(r"\s+", " ", parameter.help or ""))
    value = parameter.default
    if value is None or isinstance(value, bool) or parameter.show_default is False:
        return words
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return f"{words} (`{value}`)"


def _brief(text: str) -> str:
    """The first sentence, of a long one its first part; all of choices (`pure: ...`)."""
    if re.match(r"\w+: ", text):
        return text.removesuffix(".")
    sentence = re.split(r"\. (?=[A-Z0-9])", text)[0].removesuffix(".")
    return re.split("[:;] (?!or )", sentence)[0] if len(sentence.split()) > LONG else sentence


# --- files ----------------------------------------------------------------------------------------


def files_page() -> str:
    """docs/reference/files.md."""
    lines = [FILES.rstrip() + "\n"]
    limits = ((what, f"{n:,}" if isinstance(n, int) else n) for what, n in LIMITS.items())
    lines += [f"{'; '.join(f'{what}: {number}' for what, number in limits)}.", CHARACTERS]
    described: set[str] = set()
    for name, title in TITLES.items():
        schema = SCHEMAS[name]()
        for part, fields in {title: schema, **schema["$defs"]}.items():
            if part not in described | MEASURED:
                described.add(part)
                lines += [
                    f"##{'' if part in TITLES.values() else '#'} {part}\n",
                    *_record(part, fields),
                ]
    return "\n".join(lines)


def _record(name: str, schema: Json) -> Iterator[str]:
    kinds = (CLASSES[name], plan.Schedule) if name == "UnitPlan" else (CLASSES[name],)
    if name in WHOLE:
        yield from (f"{_words(kind)}\n" for kind in kinds)
    else:
        yield f"{_brief(_words(kinds[0]).partition(chr(10) * 2)[0])}.\n"
    comments: dict[str, str] = {}
    for kind in kinds:
        comments |= dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(kind), re.M))
    yield from _keys(schema, comments)


def _words(record: type) -> str:
    """A class's docstring; what it indents is a table or a formula, and stays as it is."""
    paragraphs = inspect.cleandoc(record.__doc__ or "").split("\n\n")
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs)


def _paragraph(text: str) -> str:
    aligned = "   " in text or text.startswith(" ")
    return f"```text\n{inspect.cleandoc(text)}\n```" if aligned else text


def _keys(schema: Json, comments: Mapping[str, str]) -> Iterator[str]:
    """The keys in a sentence, with their records, choices and the comments beside the fields."""
    required = schema.get("required", [])
    keys = []
    for key, value in schema["properties"].items():
        if key not in ("protrain", "version"):
            words = filter(None, (_value(value), comments.get(key)))
            about = "; ".join(words)
            name = f"`{key}`" if key in required else f"`{key}`?"
            keys.append(f"{name} ({about})" if about else name)
    yield f"Keys: {', '.join(keys)}.\n"


def _value(schema: Json) -> str:
    """The record or the choices of a value; empty where key and comment say enough."""
    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            return "" if name in MEASURED else f"[{name}](#{name.lower()})"
        case {"enum": values} if len(values) > MANY:
            return "[decisions](../design.md#what-a-plan-decides)"
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values if value)
        case {"type": "array", "items": items}:
            return _value(items)
        case {"anyOf": choices}:
            return " or ".join(filter(None, map(_value, choices)))
        case _:
            return ""
