"""`protrain fit --sweep` and `--what-helps`: the same question on machines that differ a little."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from protrain_plan.commands.options import choice
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.hardware import PCIE, Hardware
from protrain_runtime.contract.records.schema import MAX_COUNT
from protrain_runtime.contract.units import parse_bytes

if TYPE_CHECKING:
    from protrain_plan.planning.questions.objectives import Fit, Question
    from protrain_plan.planning.questions.sensitivities import Change, Helped, Reached, Resource

Swept = Literal["host", "device", "disk", "link", "num-devices"]
SWEPT: tuple[Swept, ...] = ("host", "device", "disk", "link", "num-devices")
MOST_VALUES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is swept, and its values, ascending: bytes, bytes per second, or numbers of devices."""

    resource: Swept
    values: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices, where these are swept."""
        return tuple(map(int, self.values)) if self.resource == "num-devices" else ()

    def refuse_missing(self, machines: Sequence[Hardware]) -> None:
        """ProtrainError where a machine does not have what is swept."""
        from protrain_plan.planning.questions.sensitivities import refuse_missing

        if self.resource != "num-devices":
            for machine in machines:
                refuse_missing(machine, self.resource)

    def series(self, questions: Sequence["Question"]) -> "list[tuple[Question, ...]]":
        """The questions of each line of answers; those of numbers of devices are there already."""
        from protrain_plan.planning.questions.sensitivities import with_resource

        if self.resource == "num-devices":
            lines = itertools.groupby(questions, key=lambda question: id(question.profile))
            return [tuple(line) for _, line in lines]
        resource: Resource = self.resource
        return [
            tuple(with_resource(question, resource, value) for value in self.values)
            for question in questions
        ]


def read_sweep(text: str) -> Sweep:
    """`host=64GiB..1TiB` or `link=pcie-3,pcie-4`; ProtrainError for what is neither."""
    name, given, values = text.partition("=")
    if not given or not values:
        raise ProtrainError(
            f"expected what to sweep and its values, such as host=64GiB..1TiB, got {cut(text)!r}",
            key="--sweep",
        )
    resource = choice("--sweep", name.strip(), SWEPT)
    found: list[float] = []
    for part in values.split(","):
        first, several, last = part.partition("..")
        low = _value(resource, first)
        found.append(low)
        if several:
            high = _value(resource, last)
            if not 0 < low <= high:
                how = "goes up" if low else "begins above nothing"
                raise ProtrainError(
                    f"expected a range that {how}, got {cut(part)!r}", key="--sweep"
                )
            # Doubles, and the end itself.
            while 2 * found[-1] < high and len(found) <= MOST_VALUES:
                found.append(2 * found[-1])
            found.append(high)
    if len(found) > MOST_VALUES:
        raise ProtrainError(
            f"expected at most {MOST_VALUES} values, got {len(found)}", key="--sweep"
        )
    return Sweep(resource=resource, values=tuple(sorted(set(found))))


def _value(resource: Swept, text: str) -> float:
    """A size, a speed or a count; more than nothing."""
    text = text.strip()
    try:
        if resource == "num-devices":
            value: float = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
            expected = f"a number of devices from 1 to {MAX_COUNT}"
            if value > MAX_COUNT:
                value = 0
        elif resource == "link":
            expected = f"{', '.join(PCIE)} or a speed such as 12GB/s"
            per_s = text.removesuffix("/s")
            value = PCIE[text] if text in PCIE else parse_bytes(per_s) if per_s != text else 0
        else:
            expected = "a size such as 64GiB"
            value = parse_bytes(text)
    except ProtrainError as error:
        raise ProtrainError(error.message, key="--sweep", fix=error.fix) from None
    if value <= 0 and resource in ("link", "num-devices"):
        raise ProtrainError(f"expected {expected}, got {cut(text)!r}", key="--sweep")
    return value


def show_sweep(
    sweep: Sweep, questions: Sequence["Question"], *, as_json: bool, jobs: int | None = None
) -> None:
    """Plan all that is swept, and print it; each line of answers is planned by itself.

    By at most `jobs` processes at once.
    """
    from protrain_plan.commands.output import progress, show
    from protrain_plan.isolated.pool import answers_of
    from protrain_plan.presentation.choosing import sweep_json, sweep_text

    series = sweep.series(questions)
    found: list[tuple[Reached, ...]] = []
    with progress(quiet=as_json) as report:
        report("planning", 0.0)
        with answers_of(_planned, series, jobs=jobs) as answers:
            for line in answers:
                found.append(line)
                report("planning", len(found) / len(series))
    show(
        as_json,
        sweep_json(sweep.resource, sweep.values, found),
        lambda: sweep_text(sweep.resource, sweep.values, found),
    )
    if not any(one.solved for line in found for one in line):
        raise typer.Exit(3)


def _planned(questions: "tuple[Question, ...]") -> "tuple[Reached, ...]":
    from protrain_plan.commands.cells import GAP
    from protrain_plan.planning.questions.sensitivities import sweep

    return sweep(questions, gap=GAP)


def show_help(
    fits: Sequence["Fit"],
    questions: Sequence["Question"],
    lighter: Sequence["Question"],
    *,
    as_json: bool,
    written: Sequence[Path],
    columns: Sequence[str] = (),
    jobs: int | None = None,
) -> None:
    """Print the answers to questions, and below what other machines and questions would change.

    `lighter` are the same questions with 8-bit states, if there are any, `written` what is written
    besides, and `columns` those of `--columns`.
    """
    from protrain_plan.commands.output import progress, show
    from protrain_plan.hardware.catalogue import hardware_names, load_hardware
    from protrain_plan.isolated.pool import answers_of
    from protrain_plan.planning.questions.sensitivities import Change, Reached, changes
    from protrain_plan.presentation.choosing import helps_json, helps_text

    sizes = sorted(
        {
            machine.device.memory_bytes
            for machine in map(load_hardware, hardware_names())
            if machine.device.kind != "cpu"
        }
    )
    bases = [
        Reached(question=question, solved=fit.solved, infeasible=fit.infeasible)
        for question, fit in zip(questions, fits, strict=True)
    ]
    asked = [
        (base, change)
        for base in bases
        for change in changes(base.question, device_sizes=_of_its_kind(base.question, sizes))
    ]
    for base, question in zip(bases, lighter, strict=False):
        words = f"states of 8 bits (--optimizer {question.profile.optimizer.name})"
        asked.append((base, Change(what="states of 8 bits", words=words, question=question)))
    found: list[list[Helped]] = [[] for _ in bases]
    places = {id(base): place for place, base in enumerate(bases)}
    with progress(quiet=as_json) as report, answers_of(_helped, asked, jobs=jobs) as answers:
        for number, ((base, change), one) in enumerate(zip(asked, answers, strict=True)):
            report(change.words, number / len(asked))
            found[places[id(base)]].append(one)
    show(
        as_json,
        helps_json(fits, found),
        lambda: helps_text(fits, bases, found, *written, columns=columns),
    )


def _of_its_kind(question: "Question", sizes: Sequence[int]) -> Sequence[int]:
    """Sizes of memory to have in place of the device's; none where that is host memory."""
    return sizes if question.profile.hardware.device.kind != "cpu" else ()


def _helped(asked: "tuple[Reached, Change]") -> "Helped":
    from protrain_plan.commands.cells import GAP
    from protrain_plan.planning.questions.sensitivities import helped

    return helped(*asked, gap=GAP)
