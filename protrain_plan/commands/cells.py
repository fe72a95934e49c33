"""A model on machines that need not be there: what is estimated, and what is then asked.

Of a global batch the best micro-batch is found. Estimates of the smallest one and of about the
largest that fits tell what others take (`growth.between`). The one that is the fastest then has an
estimate of its own, so that what is answered is no interpolation.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar

from protrain_plan.commands.answering import BestBatch, Fitting
from protrain_plan.commands.measuring import ProfileRequest, Progress, estimated
from protrain_plan.commands.option_records import BudgetOptions
from protrain_plan.commands.staging import SIZES, Staged, staged_answer, staged_on
from protrain_plan.hardware.offers import MachineOffer
from protrain_plan.isolated.pool import answers_of
from protrain_plan.planning.questions.answer_cache import AnswerCache
from protrain_plan.planning.questions.answers import Answer, Quantity, Question
from protrain_plan.planning.questions.cells import (
    GAP,
    Cell,
    Resource,
    Settings,
    Tried,
    planned,
    with_resource,
)
from protrain_plan.profiling.estimate_cache import EstimateCache
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.plan import StepSettings
from protrain_runtime.contract.records.profile import Profile

Asked = TypeVar("Asked")
Found = TypeVar("Found")

STATES_OF_8_BITS = {"adamw": "adamw8bit"}
"""Optimizers, and the same with states of 8 bits: another optimizer, with results of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload and its step, with the settings that make them differ from other rows'."""

    request: ProfileRequest
    step: StepSettings
    settings: Settings = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Every row with every offer, and each of the `values` of resources: a line of cells each.

    With a `global_batch`, requests have a batch of one, and each question the batch and the
    micro-batches of the fastest update of so many sequences. Where a model fits with no batch, it
    is asked about with one sequence. With `stages`, these are the numbers of stages to choose from
    (none: all), and `sizes` the micro-batches. `jobs` processes work at once, None: one a core.
    """

    rows: Sequence[Row]
    offers: Sequence[MachineOffer]
    budgets: BudgetOptions
    cache: EstimateCache
    values: Sequence[tuple[tuple[Resource, float], ...]] = ((),)
    global_batch: int | None = None
    stages: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = SIZES
    jobs: int | None = None

    @property
    def kept(self) -> AnswerCache:
        """Cached answers."""
        return AnswerCache(off=self.cache.is_off)

    def lines(self, progress: Progress) -> list[list[Cell]]:
        """Return the cells of every row and offer, in this order.

        ProtrainError where devices cannot have equal parts of a global batch, or a machine does not
        have what is set.
        """
        if self.stages is not None:
            find = partial(staged_answer, self.kept)
            return [
                [_cell(*at, question=one.base, answer=partial(find, one), others=one.others)]
                for at, one in zip(self._every, self.staged(progress), strict=True)
            ]
        if self.global_batch is not None:
            questions = self._best(progress, self.global_batch)
        else:
            profiles = self._profiles([row.request for row, _ in self._every], progress, {})
            asked = zip(self._every, profiles, strict=True)
            questions = [self._question(*at, profile) for at, profile in asked]
        lines: list[list[Cell]] = []
        for (row, offer), question in zip(self._every, questions, strict=True):
            lines.append([])
            for values in self.values:
                changed = question
                for resource, value in values:
                    changed = with_resource(changed, resource, value)
                lines[-1].append(_cell(row, offer, values, question=changed))
        return lines

    def answers(
        self, progress: Progress, *, compare: bool = False, helps: bool = False
    ) -> Iterator[Tried]:
        """Yield the answers in order, each line as soon as those before are known.

        Those to `compare`, and those with what `helps`, come when all are known. A single one names
        the change that gains most.
        """
        lines, fitting = self.lines(progress), Fitting(kept=self.kept, compare=compare)
        answers = answered(lines, fitting, progress, _planning, fitting.known, jobs=self.jobs)
        found: Iterable[Tried] = (
            planned(*cell)
            for line, fits in zip(lines, answers, strict=True)
            for cell in zip(line, fits, strict=True)
        )
        if not compare and not helps:
            if len(self._every) == len(self.values) == 1 and self.stages is None:
                [one] = found
                assert one.reached is not None
                found = [replace(one, best=best_change(one.reached, self.kept, progress))]
            yield from found
            return
        known = list(found)
        lighter = self._with_states_of_8_bits(known, progress)
        if compare:
            known = self._beside_8_bits(known, lighter, progress)
        yield from self._with_helps(known, lighter, progress) if helps else known

    @property
    def _every(self) -> list[tuple[Row, MachineOffer]]:
        return list(product(self.rows, self.offers))

    def _profiles(
        self,
        wanted: Sequence[ProfileRequest],
        progress: Progress,
        known: dict[ProfileRequest, list[Profile]],
    ) -> list[Profile]:
        """The profiles of requests, one for each row and offer; all listed machines are `known`."""
        listed = list(dict.fromkeys(offer.listed for offer in self.offers))
        new = [one for one in dict.fromkeys(wanted) if one not in known]
        made = estimated(new, listed, progress, self.cache, jobs=self.jobs)
        known.update(zip(new, made, strict=True))
        return [
            replace(known[request][listed.index(offer.listed)], hardware=offer.machine)
            for request, (_, offer) in zip(wanted, self._every, strict=True)
        ]

    def _best(self, progress: Progress, global_batch: int) -> list[Question]:
        """The questions about the best batch and number of micro-batches of each row and offer."""
        from protrain_plan.planning.questions.growth import between, largest_of

        for offer in self.offers:
            if global_batch % offer.group.num_devices:
                raise ProtrainError(
                    f"{global_batch} sequences cannot be divided evenly among"
                    f" {offer.group.num_devices} devices",
                    key="--global-batch",
                )
        known: dict[ProfileRequest, list[Profile]] = {}
        smallest = self._profiles([row.request for row, _ in self._every], progress, known)
        sizes: list[tuple[int, ...]] = []
        ends: dict[ProfileRequest, int] = {}
        for (row, offer), profile in zip(self._every, smallest, strict=True):
            question = self._question(row, offer, profile)
            if (most := self.kept.number("largest", question)) is None:
                most = largest_of(question, "batch-size") or 0
                self.kept.keep_number(most, "largest", question)
            # What fits is known in proportion alone: one more is looked at.
            own = global_batch // offer.group.num_devices
            open_to_it = tuple(size for size in range(1, own + 1) if own % size == 0)
            sizes.append(open_to_it[: sum(size <= most for size in open_to_it) + 1])
            ends[row.request] = max(ends.get(row.request, 1), sizes[-1][-1])
        requests = [row.request.sized(ends[row.request]) for row, _ in self._every]
        largest = self._profiles(requests, progress, known)

        def asked(number: int, size: int, profile: Profile) -> Question:
            row, offer = self._every[number]
            many = global_batch // offer.group.num_devices // size
            return self._question(row, offer, profile, many)

        candidates = [
            [asked(number, size, between(low, high, size)) for size in sizes[number]]
            for number, (low, high) in enumerate(zip(smallest, largest, strict=True))
        ]
        best, words = BestBatch(kept=self.kept), "looking for the best micro-batches"
        numbers = answered(candidates, best, progress, lambda _: words, best.known, jobs=self.jobs)
        chosen = [tried[number] for tried, number in zip(sizes, numbers, strict=True)]
        every = zip(self._every, chosen, strict=True)
        requests = [row.request.sized(size) for (row, _), size in every]
        profiles = self._profiles(requests, progress, known)
        return [asked(*one) for one in zip(range(len(chosen)), chosen, profiles, strict=True)]

    def staged(self, progress: Progress) -> list[Staged]:
        """Return the questions about stages, of every row and offer."""
        return [asked for row in self.rows for asked in staged_on(self, row, progress)]

    def sized(self, quantity: Quantity, size: int) -> "Cells":
        """Return the cells with another batch size or sequence length."""
        from protrain_plan.planning.questions.growth import sized

        rows: list[Row] = []
        for row in self.rows:
            workload = sized(row.request.workload, quantity, size)
            rows.append(replace(row, request=replace(row.request, workload=workload)))
        return replace(self, rows=rows)

    def _with_states_of_8_bits(
        self, found: Sequence[Tried], progress: Progress
    ) -> Sequence[Question]:
        """The same questions with such an optimizer.

        None of them where there is none, its package is missing, or adapters have few states.
        """
        asked = [row.request for row, _ in self._every for _ in self.values]
        if not find_spec("bitsandbytes") or any(
            one.optimizer not in STATES_OF_8_BITS or one.optimizer_args or one.workload.adapter
            for one in asked
        ):
            return ()
        requests = [
            replace(
                row.request.sized(one.cell.question.profile.workload.batch_size),
                optimizer=STATES_OF_8_BITS[row.request.optimizer],
            )
            for (row, _), one in zip(self._every, found[:: len(self.values)], strict=True)
        ]
        profiles = self._profiles(requests, progress, {})
        each = (profile for profile in profiles for _ in self.values)
        asked_of = [one.cell.question for one in found]
        return [
            replace(question, profile=replace(profile, hardware=question.profile.hardware))
            for question, profile in zip(asked_of, each, strict=True)
        ]

    def _beside_8_bits(
        self, found: Sequence[Tried], lighter: Sequence[Question], progress: Progress
    ) -> list[Tried]:
        """Add answers with 8-bit states where plain PyTorch does not fit."""
        from protrain_plan.planning.questions.alternatives import planned as beside

        asked = {
            number: [Cell(question=question)]
            for number, (one, question) in enumerate(zip(found, lighter, strict=False))
            if one.reached and one.reached.verdict != "fits"
        }
        fitting, known = Fitting(kept=self.kept), list(found)
        lines = list(asked.values())
        answers = answered(lines, fitting, progress, _planning, fitting.known, jobs=self.jobs)
        for number, (other,) in zip(asked, answers, strict=True):
            fit = known[number].reached
            if fit and other.solved:
                name, plan = other.profile.optimizer.name, other.solved.plan
                more = (*fit.alternatives, beside(name, plan, other.profile, other.bottleneck))
                known[number] = replace(known[number], reached=replace(fit, alternatives=more))
        return known

    def _with_helps(
        self, found: Sequence[Tried], lighter: Sequence[Question], progress: Progress
    ) -> Iterator[Tried]:
        """Yield the answers with those to other machines and questions, such as 8-bit states."""
        asked: list[tuple[int, Answer, Cell]] = []
        for place, one in enumerate(found):
            assert one.reached is not None
            tried = _changes(one.cell.question)
            if lighter:
                name = f"8-bit states (--optimizer {lighter[place].profile.optimizer.name})"
                tried.append(Cell(name="states of 8 bits", words=name, question=lighter[place]))
            asked += ((place, one.reached, change) for change in tried)
        answers = answered(asked, _helped, progress, lambda one: one[2].words, jobs=self.jobs)
        for number, one in enumerate(found):
            yield replace(one, helps=tuple(next(answers) for place, *_ in asked if place == number))

    def _question(
        self, row: Row, offer: MachineOffer, profile: Profile, micro_batches: int | None = None
    ) -> Question:
        many, group = micro_batches or row.step.micro_batches, offer.group
        return Question(
            profile=profile,
            settings=replace(row.step, group=group, micro_batches=many),
            replicas=group.replica_counts if group.num_replicas == 1 else (),
            budgets=self.budgets.of(profile, group),
            allow=row.request.allow,
        )


def _cell(
    row: Row, offer: MachineOffer, values: tuple[tuple[Resource, float], ...] = (), **asked: Any
) -> Cell:
    return Cell(
        settings=(*row.settings, *values),
        name=offer.name,
        price_per_hour=offer.price_per_hour,
        **asked,
    )


def best_change(base: Answer, kept: AnswerCache, progress: Progress) -> Tried | None:
    """Return the change that gains most; None where none gains much, or `base` has no plan.

    Nor is it looked for on several devices, whose plans take ten seconds each.
    """
    from protrain_plan.planning.questions import grid
    from protrain_plan.planning.questions.objectives import fit
    from protrain_plan.planning.search.improving import Effort

    def answer(change: Cell, speed: float) -> Answer:
        progress(change.words, 1.0)
        asked = GAP, "faster than", speed
        if found := kept.answer(change.question, *asked):
            return found
        effort = Effort(gap_target=GAP, below_s=change.question.tokens / speed)
        found = fit(change.question, effort=effort, known=base)
        kept.keep(found, *asked)
        return found

    if base.question.group.num_devices > 1:
        return None
    return grid.best_change(base, _changes(base.question), answer)


def _changes(question: Question) -> list[Cell]:
    """The changes that people can make, with the sizes of devices that are to be had."""
    from protrain_plan.hardware.catalogue import hardware_names, load_hardware
    from protrain_plan.planning.questions.grid import changes

    # On a CPU the device's memory is the host's.
    sizes: set[int] = set()
    if is_accelerator(question.profile.hardware.device.kind):
        devices = [load_hardware(name).device for name in hardware_names()]
        sizes = {one.memory_bytes for one in devices if is_accelerator(one.kind)}
    return [*changes(question, device_sizes=sorted(sizes))]


def _helped(asked: tuple[int, Answer, Cell]) -> Tried:
    from protrain_plan.planning.questions.grid import helped

    return helped(asked[1], asked[2])


def answered(
    asked: Sequence[Asked],
    answer: Callable[[Asked], Found],
    progress: Progress,
    words: Callable[[Asked], str],
    known: Callable[[Asked], Found | None] = lambda _: None,
    *,
    jobs: int | None,
) -> Generator[Found, None, None]:
    """Yield the answers in order, those that are not `known` from `jobs` processes at once.

    `words` say what is asked.
    """
    before = [known(one) for one in asked]
    missing = [one for one, found in zip(asked, before, strict=True) if found is None]

    def report(waiting: Sequence[Asked]) -> None:
        if waiting:
            progress(words(waiting[0]), 1 - len(waiting) / len(asked))

    report(missing)
    with answers_of(answer, missing, jobs=jobs, report=report) as made:
        for found in before:
            yield next(made) if found is None else found


def _planning(line: Sequence[Cell]) -> str:
    """Return the progress text for a line of cells."""
    question = line[0].question
    workload = question.profile.workload
    where = f"{workload.batch_size} x {workload.seq_len} tokens"
    return f"planning {where} on {question.profile.hardware.name}"
