"""Options that commands share, and how their texts are read."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from protrain_plan.errors import ProtrainError
from protrain_plan.records.hardware import Hardware
from protrain_plan.units import parse_bytes

if TYPE_CHECKING:
    import torch

Name = TypeVar("Name", bound=str)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="The profile that the plan was made from; default: profile.yaml beside the plan.",
        show_default=False,
    ),
]
SpillOption = Annotated[
    Path | None,
    typer.Option(
        "--spill-directory",
        help="Where a disk tier keeps its unnamed file; default: the system's temporary files.",
    ),
]


def size(option: str, text: str | None, default: int) -> int:
    """The bytes that an option's text says; ProtrainError, naming it, for another text."""
    if text is None:
        return default
    try:
        return parse_bytes(text)
    except ProtrainError as error:
        raise ProtrainError(error.message, key=option, fix=error.fix) from None


def integers(option: str, text: str) -> tuple[int, ...]:
    """`1,4,16` as numbers of at least one; ProtrainError, naming the option, for another text."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ProtrainError(f"expected numbers such as 1,4,16, got {text!r}", key=option)
    return numbers


def choice(option: str, text: str, known: tuple[Name, ...]) -> Name:
    """The text where it is one of those known; ProtrainError, naming the option, otherwise."""
    for value in known:
        if text == value:
            return value
    raise ProtrainError(
        f"expected {', '.join(known[:-1])} or {known[-1]}, got {text!r}", key=option
    )


def found_device(text: str) -> "torch.device":
    """The device that `--device` names, with its index; ProtrainError where it cannot be had."""
    from protrain_runtime import devices  # torch loads here

    try:
        return devices.found(text)
    except ProtrainError as error:
        raise ProtrainError(error.message, key="--device", fix=error.fix) from None


def refuse_host_memory(text: str | None, machines: Sequence[Hardware]) -> None:
    """ProtrainError for `--host-memory` where no machine has any below its device."""
    if text is not None and all(tier.name != "host" for m in machines for tier in m.tiers):
        raise ProtrainError(
            "a CPU machine computes in its host memory, and has none below that",
            key="--host-memory",
            fix="--device-memory says how much of it there is",
        )


def writable(path: Path, *, option: str = "-o") -> None:
    """Refuse at once what could not be written after minutes of work."""
    directory = path.parent
    if path.is_dir():
        raise ProtrainError("is a directory", source=str(path), fix=f"name a file with {option}")
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise ProtrainError(
            "the directory is missing or cannot be written",
            source=str(directory),
            fix=f"name a file in another directory with {option}",
        )
