"""A model on machines that need not be there: what is estimated, and what is then asked.

Of a global batch the best micro-batch is found. Estimates of the smallest one and of about the
largest that fits tell what others take (`growth.between`). The one that is the fastest then has an
estimate of its own, so that what is answered is no interpolation.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TypeVar

from protrain_plan.commands.answering import BestBatch
from protrain_plan.commands.measuring import Estimates, ProfileRequest, Progress, estimated
from protrain_plan.commands.option_records import BudgetOptions
from protrain_plan.isolated.pool import answers_of, pipelined, processes_at_once, workers
from protrain_plan.planning.questions.answers import Question
from protrain_plan.planning.questions.kept_answers import AnswerCache
from protrain_plan.profiling.estimate_cache import EstimateCache
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import DeviceGroup, StepSettings
from protrain_runtime.contract.records.profile import Profile

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_PLANNING = ("protrain_plan.planning.questions.objectives", "highspy")
"""Imports of a process that is to plan, while models are estimated."""

STATES_OF_8_BITS = {"adamw": "adamw8bit"}
"""Optimizers, and the same with states of 8 bits: another optimizer, with results of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Every request on every group of devices: a group has the number of its machine.

    With a `global_batch`, requests have a batch of one, and each question the batch and the
    micro-batches of the fastest update of so many sequences. Where a model fits with no batch,
    it is asked about with one sequence. `jobs` processes work at once, None: one a core.
    """

    requests: Sequence[ProfileRequest]
    machines: Sequence[Hardware]
    groups: Sequence[tuple[int, DeviceGroup]]
    budgets: BudgetOptions
    settings: StepSettings
    cache: EstimateCache
    global_batch: int | None = None
    jobs: int | None = None

    def questions(self, progress: Progress) -> list[Question]:
        """Return the questions of every request and group, in this order.

        ProtrainError where devices cannot have equal parts of a global batch.
        """
        if self.global_batch is not None:
            return self._best(progress, self.global_batch)
        profiles = estimated(self.requests, self.machines, progress, self.cache, jobs=self.jobs)
        return [one for each in profiles for one in self._of_groups(each)]

    def _of_groups(self, profiles: Sequence[Profile]) -> list[Question]:
        """The questions about each group, of the profiles of one request."""
        return [self._question(profiles[place], group) for place, group in self.groups]

    @property
    def kept(self) -> AnswerCache:
        """Cached answers."""
        return AnswerCache(off=self.cache.is_off)

    def answers(
        self,
        answer: Callable[[Question], Answer],
        progress: Progress,
        known: Callable[[Question], Answer | None],
    ) -> Generator[tuple[Question, Answer], None, None]:
        """Yield the questions in order, each with its answer, as soon as those before are known."""
        if self.global_batch is not None:
            best = self._best(progress, self.global_batch)
            found = answered(best, answer, progress, planning, known, jobs=self.jobs)
            yield from zip(best, found, strict=True)
            return
        estimates = Estimates(self.requests, self.machines, self.cache)
        count = len(self.requests) * len(self.groups)
        at_once = processes_at_once(count, self.jobs)
        here = estimates.made_here(at_once=at_once)
        share = 1 / (count + max(1, estimates.num_missing))

        def estimating(what: str, fraction: float) -> None:
            progress(what, max(at, share * fraction))

        at = 0.0

        def told(answered: int, asked: Question | None) -> None:
            nonlocal at
            at = answered / count
            progress(planning(asked) if asked else "estimating", at)

        with workers(at_once, imports=_PLANNING if estimates.num_missing else ()) as start:
            works = [
                estimates.work(number, estimating if here else None)
                for number in range(len(self.requests))
            ]
            yield from pipelined(
                start,
                works,
                lambda number, made: self._of_groups(estimates.learnt(number, made)),
                answer,
                known=known,
                at_once=at_once,
                learn_here=here,
                told=told,
            )

    def _best(self, progress: Progress, global_batch: int) -> list[Question]:
        from protrain_plan.planning.questions.growth import between, largest_of
        from protrain_plan.planning.questions.shopping import divisors

        for _, group in self.groups:
            if global_batch % group.num_devices:
                raise ProtrainError(
                    f"{global_batch} sequences are no equal parts for {group.num_devices} devices",
                    key="--global-batch",
                )
        kept = self.kept
        known: dict[tuple[int, int], list[Profile]] = {}  # by request and batch size, per machine

        def learn(wanted: Iterable[tuple[int, int]]) -> None:
            new = [pair for pair in dict.fromkeys(wanted) if pair not in known]
            sized = [self.requests[request].sized(size) for request, size in new]
            profiles = estimated(sized, self.machines, progress, self.cache, jobs=self.jobs)
            known.update(zip(new, profiles, strict=True))

        every = range(len(self.requests))
        learn((request, 1) for request in every)
        cells = [
            (request, place, group, global_batch // group.num_devices)
            for request in every
            for place, group in self.groups
        ]
        sizes: list[tuple[int, ...]] = []
        ends = dict.fromkeys(every, 1)
        for request, place, group, part in cells:
            question = self._question(known[request, 1][place], group)
            if (most := kept.number("largest", question)) is None:
                most = largest_of(question, "batch-size") or 0
                kept.keep_number(most, "largest", question)
            # What fits is known in proportion alone: one more is looked at.
            open_to_it = divisors(part)
            count = sum(size <= most for size in open_to_it) + 1
            sizes.append(open_to_it[:count])
            ends[request] = max(ends[request], sizes[-1][-1])
        learn(ends.items())
        candidates: list[list[Question]] = []
        for (request, place, group, part), tried in zip(cells, sizes, strict=True):
            low, high = known[request, 1][place], known[request, ends[request]][place]
            candidates.append(
                [self._question(between(low, high, size), group, part // size) for size in tried]
            )
        best, words = BestBatch(kept=kept), "looking for the best micro-batches"
        numbers = answered(candidates, best, progress, lambda _: words, best.known, jobs=self.jobs)
        chosen = [tried[number] for tried, number in zip(sizes, numbers, strict=True)]
        learn((cell[0], size) for cell, size in zip(cells, chosen, strict=True))
        return [
            self._question(known[request, size][place], group, part // size)
            for (request, place, group, part), size in zip(cells, chosen, strict=True)
        ]

    def with_states_of_8_bits(
        self, questions: Sequence[Question], progress: Progress
    ) -> list[Question]:
        """Return the same questions with such an optimizer.

        None of them where there is none, its package is missing, or adapters have few states.
        """
        asked = self.requests[0]
        optimizer = STATES_OF_8_BITS.get(asked.optimizer)
        adapter, missing = asked.workload.adapter, not find_spec("bitsandbytes")
        if not optimizer or asked.optimizer_args or adapter or missing:
            return []
        workloads = [question.profile.workload for question in questions]
        wanted = list(dict.fromkeys((w.seq_len, w.batch_size) for w in workloads))
        requests = [
            replace(
                asked,
                workload=replace(asked.workload, seq_len=length, batch_size=size),
                optimizer=optimizer,
            )
            for length, size in wanted
        ]
        profiles = estimated(requests, self.machines, progress, self.cache, jobs=self.jobs)
        known = dict(zip(wanted, profiles, strict=True))
        places = [self.machines.index(question.profile.hardware) for question in questions]
        return [
            replace(question, profile=known[workload.seq_len, workload.batch_size][place])
            for question, workload, place in zip(questions, workloads, places, strict=True)
        ]

    def _question(
        self, profile: Profile, group: DeviceGroup, micro_batches: int | None = None
    ) -> Question:
        many = micro_batches or self.settings.micro_batches
        return Question(
            profile=profile,
            settings=replace(self.settings, group=group, micro_batches=many),
            replicas=group.replica_counts if group.num_replicas == 1 else (),
            budgets=self.budgets.of(profile, group),
            allow=self.requests[0].allow,
        )


def answered(
    asked: Sequence[Asked],
    answer: Callable[[Asked], Answer],
    progress: Progress,
    words: Callable[[Asked], str],
    known: Callable[[Asked], Answer | None] = lambda _: None,
    *,
    jobs: int | None,
) -> Generator[Answer, None, None]:
    """Yield the answers in order, those that are not `known` from `jobs` processes at once.

    `words` say what is asked.
    """
    before = [known(one) for one in asked]
    missing = [one for one, found in zip(asked, before, strict=True) if found is None]

    def told(waiting: Sequence[Asked]) -> None:
        if waiting:
            progress(words(waiting[0]), 1 - len(waiting) / len(asked))

    told(missing)
    with answers_of(answer, missing, jobs=jobs, told=told) as made:
        for found in before:
            yield next(made) if found is None else found


def planning(question: Question) -> str:
    """Return what is done with a question, in words."""
    workload = question.profile.workload
    where = f"{workload.batch_size} x {workload.seq_len} tokens"
    return f"planning {where} on {question.profile.hardware.name}"
