"""Options that commands share, and how their texts are read.

Every command's module is imported for the help of all: it imports at its top what declares options,
and the rest where it runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.units import parse_bytes

if TYPE_CHECKING:
    import torch

    from protrain_runtime.contract.records.hardware import Hardware
    from protrain_runtime.contract.records.plan import Budgets, DeviceGroup, StepSettings, Updates

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
ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A preset's name, a Hugging Face config.json (file or folder),"
        " or package.module:factory (path/to/file.py:factory).",
        show_default=False,
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="pure: everything in --dtype; master: the optimizer keeps float32 parameters;"
        " autocast: float32 parameters, computed with in --dtype."
    ),
]
LoraOption = Annotated[
    str | None, typer.Option(help="Train adapters alone, such as r=16: see profile.")
]
QuantizeOption = Annotated[
    str | None, typer.Option(help="Pack the layers below adapters: nf4 or int8 (with --lora).")
]
CompileOption = Annotated[
    bool,
    typer.Option("--compile", help="Each block compiled by itself (torch.compile): see profile."),
]
DiskSecondsOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="How long the disk is written before it is measured, past the page cache: many are"
        " slower after their first gigabytes.",
    ),
]
DISK_SECONDS = 2.0
DiskBytesOption = Annotated[str, typer.Option(help="The most that is written meanwhile.")]
DISK_BYTES = "2GiB"
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Let activations wait in forms that are not exact: rounding, int8-activations,"
        " low-rank-activations. The plan says so. May be given several times.",
        show_default=False,
    ),
]
NoCacheOption = Annotated[
    bool,
    typer.Option(
        "--no-cache", help="Make estimates anew, and keep none (nor with PROTRAIN_NO_CACHE=1)."
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes that work at once. Default: one a core.", show_default=False
    ),
]
PlanArgument = Annotated[Path, typer.Argument(help="A plan.", show_default=False)]
DTypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
AccumulateOption = Annotated[int, typer.Option(min=1, help="Micro-batches per update.")]
PointsOption = Annotated[int, typer.Option(min=2, help="Budgets that --pareto plans for.")]
UpdatesOption = Annotated[
    str | None,
    typer.Option(
        help="in-backward, the default; or after-backward, as clipping by the global norm needs:"
        " updates then wait for it, or run ahead to a second copy of the states.",
    ),
]
ClipOption = Annotated[
    bool, typer.Option("--clip", help="The short form of --updates after-backward.")
]
ClipShareOption = Annotated[
    float | None,
    typer.Option(
        help="The part of all steps whose gradients are scaled, by clipping or by a loss scaler:"
        " these do updates that ran ahead again. 1: none runs ahead. Default: 0.05.",
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


SEQ_LEN, DTYPE, PRECISION = 2048, "bfloat16", "master"
"""What a model is asked about with, where nothing is said: its own dtype, and float32 states."""


def machine_with(name: str, host_memory: str | None, disk: str | None) -> "Hardware":
    """A machine of the catalogue or of a file, with as much below its device as was asked for."""
    from protrain_plan.hardware.catalogue import load_hardware

    machine = load_hardware(name)
    asked = {"host": size("--host-memory", host_memory, -1), "disk": size("--disk", disk, -1)}
    tiers = tuple(
        tier if asked[tier.name] < 0 else replace(tier, capacity_bytes=asked[tier.name])
        for tier in machine.tiers
    )
    return replace(machine, tiers=tiers)


def size(option: str, text: str | None, default: int) -> int:
    """The bytes that an option's text says; ProtrainError, naming it, for another text."""
    if text is None:
        return default
    try:
        return parse_bytes(text)
    except ProtrainError as error:
        raise ProtrainError(error.message, key=option, fix=error.fix) from None


def budgets_of(
    machine: "Hardware",
    group: "DeviceGroup",
    device: str | None,
    host: str | None,
    disk: str | None,
) -> "Budgets":
    """A device's budgets: what was asked for, of host memory and disk for its node, or all it has.

    `machine` is the device's part of its node.
    """
    from protrain_runtime.contract.records.plan import Budgets

    there = {tier.name: tier.capacity_bytes * group.in_node for tier in machine.tiers}
    return Budgets(
        device=size("--device-memory", device, machine.device.memory_bytes),
        host=size("--host-memory", host, there.get("host", 0)) // group.in_node,
        disk=size("--disk", disk, there.get("disk", 0)) // group.in_node,
    )


def integers(option: str, text: str) -> tuple[int, ...]:
    """`1,4,16` as numbers of at least one; ProtrainError, naming the option, for another text."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ProtrainError(f"expected numbers such as 1,4,16, got {text!r}", key=option)
    return numbers


def prices_of(text: str | None, machines: "Sequence[Hardware]") -> list[float]:
    """`--price` for each machine, or the machine's own; ProtrainError for what is no price."""
    from protrain_runtime.contract.records.schema import PRICES

    if text is None:
        return [machine.price_per_hour for machine in machines]
    parts = text.split(",")
    if len(parts) not in (1, len(machines)):
        raise ProtrainError(
            f"{len(parts)} prices were given for {len(machines)} machines",
            key="--price",
            fix="give one for all, or one for each, in the order of --on",
        )
    try:
        prices = [float(part) for part in parts]
    except ValueError:
        prices = [-1.0]
    if not all(price in PRICES for price in prices):
        raise ProtrainError(
            f"expected a price for an hour {PRICES}, such as 2.49, got {text!r}", key="--price"
        )
    return prices if len(parts) == len(machines) else prices * len(machines)


def choice(option: str, text: str, known: tuple[Name, ...]) -> Name:
    """The text where it is one of those known; ProtrainError, naming the option, otherwise."""
    for value in known:
        if text == value:
            return value
    raise ProtrainError(
        f"expected {', '.join(known[:-1])} or {known[-1]}, got {text!r}", key=option
    )


def leaves_named(given: Sequence[str] | None) -> tuple[str, ...]:
    """What `--allow` names, each once and in order; ProtrainError where one is not known."""
    from protrain_runtime.contract.records.forms import FORMS, leaves_of
    from protrain_runtime.contract.records.tree import did_you_mean, listed

    known = leaves_of(FORMS)
    for name in given or ():
        if name not in known:
            raise ProtrainError(
                f"expected leave for what is not exact, got {name!r}",
                key="--allow",
                fix=did_you_mean(name, known) or f"there is {listed(known, 'and')}",
            )
    return tuple(leave for leave in known if leave in (given or ()))


def step_settings(updates: str | None, *, clip: bool, clip_share: float | None) -> "StepSettings":
    """The step that `--updates`, `--clip` and `--clip-share` ask for; ProtrainError if none is."""
    from protrain_plan.planning.model.problem import OVERLAPPING
    from protrain_runtime.contract.records.plan import StepSettings
    from protrain_runtime.contract.records.schema import limits_of

    after = (
        clip
        or choice("--updates", updates or "in-backward", ("in-backward", "after-backward"))
        == "after-backward"
    )
    if clip and updates == "in-backward":
        raise ProtrainError("--clip is --updates after-backward", key="--updates")
    if not after and clip_share is not None:
        raise ProtrainError(
            "it is for updates after backward", key="--clip-share", fix="add --clip"
        )
    if clip_share is None:
        clip_share = OVERLAPPING.clip_share
    elif clip_share not in (limits := limits_of(StepSettings, "clip_share")):
        raise ProtrainError(
            f"expected a part of all steps {limits}, got {clip_share:g}", key="--clip-share"
        )
    when: Updates = "after backward" if after else "in backward"
    return replace(OVERLAPPING, updates=when, clip_share=clip_share)


def found_device(text: str) -> "torch.device":
    """The device that `--device` names, with its index; ProtrainError where it cannot be had."""
    from protrain_runtime.devices import device  # torch loads here

    try:
        return device.found(text)
    except ProtrainError as error:
        raise ProtrainError(error.message, key="--device", fix=error.fix) from None


def refuse_host_memory(text: str | None, machines: "Sequence[Hardware]") -> None:
    """ProtrainError for `--host-memory` where no machine has any below its device."""
    if text is not None and all(tier.name != "host" for m in machines for tier in m.tiers):
        raise ProtrainError(
            "a CPU machine computes in its host memory, and has none below that",
            key="--host-memory",
            fix="--device-memory says how much of it there is",
        )


def refuse_batches(global_batch: int | None, batch_size: object, accumulate: int) -> None:
    """ProtrainError where a global batch is given with what it finds."""
    if global_batch is not None:
        for option, given in (("--batch-size", batch_size), ("--accumulate", accumulate > 1)):
            if given:
                raise ProtrainError("--global-batch finds it", key=option)


OptimizerOption = Annotated[
    str,
    typer.Option(
        help="adamw, sgd, adamw8bit, adafactor, ... (a wrong name lists all), or your own:"
        " package.module:Class, path/to/file.py:function."
    ),
]
OptimizerArgsOption = Annotated[
    str | None,
    typer.Option(help="Options of the optimizer as Python has them: 'lr=1e-3, betas=(0.9, 0.95)'."),
]
