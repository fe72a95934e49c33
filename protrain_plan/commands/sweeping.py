"""`protrain fit --sweep` and `--what-helps`: the same question on machines that differ a little."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from protrain_plan.commands.options import choice, size
from protrain_runtime.contract.errors import ProtrainError, cut
from protrain_runtime.contract.records.hardware import PCIE, Hardware
from protrain_runtime.contract.records.limits import MAX_COUNT

if TYPE_CHECKING:
    from protrain_plan.commands.cells import Cells
    from protrain_plan.commands.measuring import Progress
    from protrain_plan.planning.questions.answers import Fit, Question
    from protrain_plan.planning.questions.shopping import Resource, Tried, Variation

Swept = Literal["host", "device", "disk", "link", "num-devices"]
SWEPT: tuple[Swept, ...] = ("host", "device", "disk", "link", "num-devices")
MOST_VALUES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A resource and its values, ascending: bytes, bytes per second, or numbers of devices."""

    resource: Swept
    values: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices, where these are swept."""
        return tuple(map(int, self.values)) if self.resource == "num-devices" else ()

    def refuse_missing(self, machines: Sequence[Hardware]) -> None:
        """ProtrainError where a machine does not have what is swept."""
        from protrain_plan.planning.questions.shopping import refuse_missing

        if self.resource != "num-devices":
            for machine in machines:
                refuse_missing(machine, self.resource)

    def series(self, questions: Sequence["Question"]) -> "list[tuple[Question, ...]]":
        """The questions of each line of answers; those of numbers of devices are there already."""
        from protrain_plan.planning.questions.shopping import with_resource

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
    if resource not in ("link", "num-devices"):
        return size("--sweep", text, 0)
    if resource == "num-devices":
        value: float = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
        expected = f"a number of devices from 1 to {MAX_COUNT}"
        if value > MAX_COUNT:
            value = 0
    else:
        expected = f"{', '.join(PCIE)} or a speed such as 12GB/s"
        per_s = text.removesuffix("/s")
        value = PCIE[text] if text in PCIE else size("--sweep", per_s, 0) if per_s != text else 0
    if value <= 0:
        raise ProtrainError(f"expected {expected}, got {cut(text)!r}", key="--sweep")
    return value


def sweep_lines(sweep: Sweep, cells: "Cells", tell: "Progress") -> "Iterator[list[dict[str, Any]]]":
    """Yield the rows of each line of answers; each line is planned by itself."""
    from protrain_plan.commands.answering import Sweeping
    from protrain_plan.commands.cells import answered
    from protrain_plan.presentation.choosing import sweep_json

    series = sweep.series(cells.questions(tell))
    sweep_of, told = Sweeping(kept=cells.kept), "planning"
    for line in answered(series, sweep_of, tell, lambda _: told, sweep_of.known, jobs=cells.jobs):
        pairs = zip(sweep.values, line, strict=True)
        yield [sweep_json(sweep.resource, value, one) for value, one in pairs]


def helping(
    fits: Sequence["Fit"], lighter: Sequence["Question"], tell: "Progress", *, jobs: int | None
) -> "Iterator[list[Tried]]":
    """Yield for each answer what other machines and questions would change.

    `lighter` are the same questions with 8-bit states, if there are any.
    """
    from protrain_plan.commands.cells import answered
    from protrain_plan.hardware.catalogue import hardware_names, load_hardware
    from protrain_plan.planning.questions.shopping import Variation, changes

    devices = [load_hardware(name).device for name in hardware_names()]
    sizes = sorted({device.memory_bytes for device in devices if device.kind != "cpu"})
    asked: list[tuple[int, Fit, Variation]] = []
    for place, fit in enumerate(fits):
        # On a CPU the device's memory is the host's.
        others = sizes if fit.profile.hardware.device.kind != "cpu" else ()
        asked += ((place, fit, one) for one in changes(fit.question, device_sizes=others))
        if lighter:
            words = f"states of 8 bits (--optimizer {lighter[place].profile.optimizer.name})"
            change = Variation(name="states of 8 bits", words=words, question=lighter[place])
            asked.append((place, fit, change))
    answers = answered(asked, _helped, tell, lambda one: one[2].words, jobs=jobs)
    for number in range(len(fits)):
        yield [next(answers) for place, *_ in asked if place == number]


def _helped(asked: "tuple[int, Fit, Variation]") -> "Tried":
    from protrain_plan.commands.answering import GAP
    from protrain_plan.planning.questions.shopping import helped

    return helped(asked[1], asked[2], gap=GAP)
