"""A model on machines that need not be present: estimates, and questions about them.

For a global batch the best micro-batch is found. Costs of micro-batches are interpolated between
estimates of the smallest one and of about the largest that fits (`growth.between`). The fastest one
is then estimated, so that no answer rests on interpolation.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
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
"""Optimizers with 8-bit states by the full ones: other optimizers, with other results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload and its step, with the settings that differ from other rows'."""

    request: ProfileRequest
    step: StepSettings
    settings: Settings = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Every row with every offer: a line of cells each, one for each of the `values` of resources.

    With a `global_batch`, requests have a batch of one, and questions have the batch and the
    micro-batches of the fastest update of so many sequences, or one sequence if no batch fits. With
    `stages`, these are the numbers of stages to choose from (empty: all), and `sizes` the
    micro-batches. `jobs` processes work at once; None: one per core.
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

        Raises ProtrainError if devices cannot have equal parts of a global batch, or if a machine
        lacks a resource that is set.
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
            questions = list(map(self._question, self._every, profiles))
        return [
            [
                _cell(*at, values, question=reduce(lambda q, v: with_resource(q, *v), values, one))
                for values in self.values
            ]
            for at, one in zip(self._every, questions, strict=True)
        ]

    def answers(
        self, progress: Progress, *, compare: bool = False, helps: bool = False
    ) -> Iterator[Tried]:
        """Yield the answers in order, each line as soon as those before are known.

        To `compare`, and to say what `helps`, all are answered first. A single answer names the
        change that gains most.
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
        """The profiles of requests, one for each row and offer; those in `known` are not made."""
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
            if global_batch % (count := offer.group.num_devices):
                problem = f"{global_batch} sequences cannot be divided evenly among {count} devices"
                raise ProtrainError(problem, key="--global-batch")
        known: dict[ProfileRequest, list[Profile]] = {}
        smallest = self._profiles([row.request for row, _ in self._every], progress, known)
        sizes: list[tuple[int, ...]] = []
        ends: dict[ProfileRequest, int] = {}
        for at, profile in zip(self._every, smallest, strict=True):
            question, request = self._question(at, profile), at[0].request
            if (most := self.kept.number("largest", question)) is None:
                most = largest_of(question, "batch-size") or 0
                self.kept.keep_number(most, "largest", question)
            # Proportion predicts the largest that fits: one size more is a candidate.
            own = global_batch // at[1].group.num_devices
            open_to_it = tuple(size for size in range(1, own + 1) if own % size == 0)
            sizes.append(open_to_it[: sum(size <= most for size in open_to_it) + 1])
            ends[request] = max(ends.get(request, 1), sizes[-1][-1])
        requests = [row.request.sized(ends[row.request]) for row, _ in self._every]
        largest = self._profiles(requests, progress, known)

        def asked(at: tuple[Row, MachineOffer], size: int, profile: Profile) -> Question:
            return self._question(at, profile, global_batch // at[1].group.num_devices // size)

        candidates = [
            [asked(at, size, between(low, high, size)) for size in tried]
            for at, tried, low, high in zip(self._every, sizes, smallest, largest, strict=True)
        ]
        best, words = BestBatch(kept=self.kept), "looking for the best micro-batches"
        numbers = answered(candidates, best, progress, lambda _: words, best.known, jobs=self.jobs)
        chosen = [tried[number] for tried, number in zip(sizes, numbers, strict=True)]
        every = zip(self._every, chosen, strict=True)
        requests = [row.request.sized(size) for (row, _), size in every]
        profiles = self._profiles(requests, progress, known)
        return list(map(asked, self._every, chosen, profiles))

    def staged(self, progress: Progress) -> list[Staged]:
        """Return the questions about stages of every row and offer."""
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
        """The same questions with an optimizer of 8-bit states.

        Empty if there is none, its package is missing, or adapters are trained, with few states.
        """
        asked = [row.request for row, _ in self._every]
        if not find_spec("bitsandbytes") or any(
            one.optimizer not in STATES_OF_8_BITS or one.optimizer_args or one.workload.adapter
            for one in asked
        ):
            return ()
        questions, count = [one.cell.question for one in found], len(self.values)
        requests = [
            replace(
                request.sized(question.profile.workload.batch_size),
                optimizer=STATES_OF_8_BITS[request.optimizer],
            )
            for request, question in zip(asked, questions[::count], strict=True)
        ]
        profiles = self._profiles(requests, progress, {})
        return [
            replace(
                question,
                profile=replace(profiles[number // count], hardware=question.profile.hardware),
            )
            for number, question in enumerate(questions)
        ]

    def _beside_8_bits(
        self, found: Sequence[Tried], lighter: Sequence[Question], progress: Progress
    ) -> list[Tried]:
        """Add answers with 8-bit states where plain PyTorch does not fit."""
        from protrain_plan.planning.questions.alternatives import planned as beside

        fits = [one.reached for one in found]
        asked = {
            number: [Cell(question=question)]
            for number, (fit, question) in enumerate(zip(fits, lighter, strict=False))
            if fit and fit.verdict != "fits"
        }
        fitting, lines = Fitting(kept=self.kept), list(asked.values())
        answers = answered(lines, fitting, progress, _planning, fitting.known, jobs=self.jobs)
        for number, (other,) in zip(asked, answers, strict=True):
            if (fit := fits[number]) and other.solved:
                name, plan = other.profile.optimizer.name, other.solved.plan
                more = (*fit.alternatives, beside(name, plan, other.profile, other.bottleneck))
                fits[number] = replace(fit, alternatives=more)
        return [replace(one, reached=fit) for one, fit in zip(found, fits, strict=True)]

    def _with_helps(
        self, found: Sequence[Tried], lighter: Sequence[Question], progress: Progress
    ) -> Iterator[Tried]:
        """Yield the answers with answers to changes, of machines or such as 8-bit states."""
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
        self, at: tuple[Row, MachineOffer], profile: Profile, micro_batches: int | None = None
    ) -> Question:
        row, group = at[0], at[1].group
        many = micro_batches or row.step.micro_batches
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
    settings, price = (*row.settings, *values), offer.price_per_hour
    return Cell(settings=settings, name=offer.name, price_per_hour=price, **asked)


def best_change(base: Answer, kept: AnswerCache, progress: Progress) -> Tried | None:
    """Return the change that gains most; None if none gains much, or `base` has no plan.

    None on several devices, too, whose plans take ten seconds each.
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
    """Changes that people can make, with the device sizes of the catalogue."""
    from protrain_plan.hardware.catalogue import hardware_names, load_hardware
    from protrain_plan.planning.questions.grid import changes

    sizes: set[int] = set()  # empty on a CPU, where the device's memory is the host's
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

    `words` are the progress text of a question.
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
    profile = line[0].question.profile
    size = f"{profile.workload.batch_size} x {profile.workload.seq_len} tokens"
    return f"planning {size} on {profile.hardware.name}"
