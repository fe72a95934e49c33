"""Options that commands share, and readers of their texts.

The help imports the modules of all commands: at their tops they import only declarations of
options, and the rest in functions.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.units import typed_bytes

if TYPE_CHECKING:
    import torch

    from protrain_runtime.contract.records.hardware import Hardware

Name = TypeVar("Name", bound=str)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="The plan's profile. Default: profile.yaml in the plan's folder.",
        show_default=False,
    ),
]


def model_names(incomplete: str) -> list[str]:
    """Names of models with this beginning, for shells."""
    from protrain_plan.models.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete.lower())]


def machine_names(incomplete: str) -> list[str]:
    """Names of machines with this beginning after the last comma, for shells."""
    from protrain_plan.hardware.catalogue import hardware_names

    before, comma, last = incomplete.rpartition(",")
    names = [name for name in hardware_names() if name.startswith(last.lower())]
    return [f"{before}{comma}{name}" for name in names]


ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A model's name (protrain models lists them), a Hugging Face config.json (file or"
        " folder), or a factory: package.module:function or path/to/file.py:function.",
        show_default=False,
        autocompletion=model_names,
    ),
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Allow inexact forms: rounding, int8-activations, low-rank-activations. Repeatable.",
        show_default=False,
    ),
]
NoCacheOption = Annotated[
    bool,
    typer.Option("--no-cache", help="Ignore cached plans and estimates (PROTRAIN_NO_CACHE=1)."),
]
PlanArgument = Annotated[Path, typer.Argument(help="A plan.", show_default=False)]
PointsOption = Annotated[int, typer.Option(min=2, help="Plans on the --pareto front.")]
SpillOption = Annotated[
    Path | None,
    typer.Option("--spill-directory", help="Directory for states on disk. Default: the system's."),
]


SEQ_LEN = 2048
"""Default of tokens per sequence."""


def refuse(options: Iterable[str], why: str, fix: str | None = None) -> None:
    """ProtrainError for the first of the options, if there is one."""
    for option in options:
        raise ProtrainError(why, key=option, fix=fix)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Add an option's name to errors raised inside."""
    try:
        yield
    except ProtrainError as error:
        raise ProtrainError(error.message, key=option, fix=error.fix) from None


def size(option: str, text: str | None, default: int) -> int:
    """Return an option's text in bytes; ProtrainError with its name for another text."""
    if text is None:
        return default
    with naming(option):
        return typed_bytes(text)


def part(option: str, text: str | None, setting: str) -> float:
    """Return `25%` or `0.25` as a number, or a setting's default; ProtrainError for other texts."""
    from protrain_runtime.contract.records.plan import StepSettings
    from protrain_runtime.contract.records.schema import hints
    from protrain_runtime.contract.records.tree import checked

    if text is None:
        return float(getattr(StepSettings(), setting))
    value: float | str = text
    with suppress(ValueError):
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    return checked(value, hints(StepSettings)[setting], option)


def separated(texts: list[str] | None) -> list[str]:
    """The parts of an option that takes commas and may be repeated."""
    return [part.strip() for text in texts or () for part in text.split(",")]


def integers(option: str, text: str, fix: str | None = None) -> tuple[int, ...]:
    """`1,4,16` as numbers of at least one; ProtrainError with the option for another text."""
    with suppress(ValueError):
        numbers = tuple(int(part) for part in text.split(","))
        if min(numbers) >= 1:
            return numbers
    raise ProtrainError(f"expected numbers such as 1,4,16, got {text!r}", key=option, fix=fix)


def prices_of(text: str | None, machines: "Sequence[Hardware]") -> list[float]:
    """`--price` for each machine, or the machine's own; ProtrainError for other texts."""
    from protrain_runtime.contract.records.limits import Price
    from protrain_runtime.contract.records.tree import checked

    if text is None:
        return [machine.price_per_hour for machine in machines]
    parts = text.split(",")
    if len(parts) not in (1, len(machines)):
        problem = f"{len(parts)} prices were given for {len(machines)} machines"
        fix = "give one for all, or one for each, in the order of --on"
        raise ProtrainError(problem, key="--price", fix=fix)
    prices = [checked(part, Price, "--price") for part in parts]
    return prices if len(parts) == len(machines) else prices * len(machines)


def choice(option: str, text: str, known: tuple[Name, ...]) -> Name:
    """Return a known text; ProtrainError with the option for an unknown one."""
    for value in known:
        if text == value:
            return value
    expected = f"{', '.join(known[:-1])} or {known[-1]}"
    raise ProtrainError(f"expected {expected}, got {text!r}", key=option)


def opt_ins_named(given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the values of `--allow`, each once and in order; ProtrainError for unknown ones."""
    from protrain_runtime.contract.records.forms import FORMS, opt_ins_of
    from protrain_runtime.contract.records.words import did_you_mean, listed

    known = opt_ins_of(FORMS)
    for name in given or ():
        if name not in known:
            fix = did_you_mean(name, known) or f"there is {listed(known, 'and')}"
            raise ProtrainError(f"unknown value {name!r}", key="--allow", fix=fix)
    return tuple(word for word in known if word in (given or ()))


def on_command_line(context: typer.Context) -> list[str]:
    """Parameters on the command line, even with default values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def refuse_of_factory(context: typer.Context, model: str, given: Iterable[str] = ()) -> None:
    """ProtrainError for a factory with options of batches, typed or `given` by --set."""
    from protrain_plan.models.presets import is_factory

    names = ("--" + name.replace("_", "-") for name in (*on_command_line(context), *given))
    ours = ("--batch-size", "--seq-len", "--global-batch", "--text")
    problem = f"{cut(model)} is a factory, which makes its own batches"
    wrong = (name for name in names if name in ours and is_factory(model))
    refuse(wrong, problem, "omit it, and set the sizes in the factory")


def found_device(text: str) -> "torch.device":
    """Return the device that `--device` names; ProtrainError if it is unavailable."""
    from protrain_runtime.devices import device  # torch loads here

    with naming("--device"):
        return device.found(text)


def refuse_batches(global_batch: int | None, batch_size: object, accumulate: int) -> None:
    """ProtrainError if a global batch is given with an option that it replaces."""
    given = {"--batch-size": batch_size, "--accumulate": accumulate > 1}
    found = [option for option, is_given in given.items() if is_given and global_batch is not None]
    refuse(found, "--global-batch finds it")
