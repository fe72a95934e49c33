"""Questions that several processes answer at once."""

import heapq
import importlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context
from typing import Any, Generic, Protocol, TypeVar

from protrain_plan.commands.output import quiet_libraries
from protrain_plan.garbage import collected_seldom
from protrain_plan.models.model_code import end_with
from protrain_runtime.contract.errors import ProtrainError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Learnt = TypeVar("Learnt")


class Start(Protocol):
    """Has a process work on something; or does it here and now, where there are no others."""

    def __call__(self, work: Callable[[], Answer], /) -> "Future[Answer]": ...


@contextmanager
def workers(at_once: int, *, imports: Iterable[str] = ()) -> Iterator[Start]:
    """So many processes, which end with this one or the block; none where it is one at a time.

    They are started anew: threads of the solver and of the progress bar would be missing in a fork.
    Until there is work they import these modules. ProtrainError where one dies.
    """
    if at_once == 1:
        yield _here
        return
    pool = ProcessPoolExecutor(
        at_once, get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        if names := tuple(imports):
            for _ in range(at_once):
                pool.submit(_import, names)
        yield pool.submit
    except BrokenProcessPool:
        raise ProtrainError(
            "a process that planned died, perhaps because memory ran out",
            fix="ask of fewer machines, lengths and batches at once, or --jobs 1",
        ) from None
    finally:
        for process in active_children():  # of a pool that is to answer no more
            process.terminate()
        pool.shutdown(cancel_futures=True)


@contextmanager
def answers_of(
    function: Callable[[Asked], Answer], questions: Sequence[Asked], *, at_once: int
) -> Iterator[Iterator[Answer]]:
    """The answers in order, from so many processes at once. Errors as of `workers`."""
    if at_once == 1:
        yield map(function, questions)
        return
    with workers(at_once) as start:
        futures = [start(partial(function, question)) for question in questions]
        yield (future.result() for future in futures)


def pipelined(
    start: Start,
    learns: Sequence[Callable[[], Learnt]],
    questions: Callable[[int, Learnt], Sequence[Asked]],
    answer: Callable[[Asked], Answer],
    *,
    at_once: int,
    learn_here: bool,
) -> Iterator[tuple[Asked, Answer]]:
    """What is first to be learnt, then asked; the questions in order, each with its answer.

    An answer comes as soon as it is known and those before are. Of what has been learnt all is
    asked before more is learnt, so that the first ones come soon. `learn_here`: in this process
    alone, beside the others' answers. An error is raised in the order of what it is of.
    """
    line = _Pipeline(start, learns, questions, answer, at_once=at_once, learn_here=learn_here)
    for number in range(len(learns)):
        for place, question in enumerate(line.asked_of(number)):
            yield question, line.answer_to((number, place))


class _Pipeline(Generic[Learnt, Asked, Answer]):
    """What runs of a pipeline, what is still to be begun, and what is known.

    Questions go by the number of what was learnt and their own.
    """

    def __init__(
        self,
        start: Start,
        learns: Sequence[Callable[[], Learnt]],
        questions: Callable[[int, Learnt], Sequence[Asked]],
        answer: Callable[[Asked], Answer],
        *,
        at_once: int,
        learn_here: bool,
    ) -> None:
        self._start, self._learns, self._questions, self._answer = start, learns, questions, answer
        self._at_once, self._learn_here = at_once, learn_here
        self._to_learn = deque(range(len(learns)))
        self._to_ask: list[tuple[int, int]] = []  # a heap
        self._learning: dict[Future[Learnt], int] = {}
        self._answering: dict[Future[Answer], tuple[int, int]] = {}
        self._asked: dict[int, Sequence[Asked]] = {}
        self._failed: dict[int, BaseException] = {}
        self._answered: dict[tuple[int, int], Future[Answer]] = {}

    def asked_of(self, number: int) -> Sequence[Asked]:
        """The questions about what is learnt first, second, ...; or the error of learning it."""
        self._work_until(lambda: number in self._asked or number in self._failed)
        if number in self._failed:
            raise self._failed[number]
        return self._asked[number]

    def answer_to(self, place: tuple[int, int]) -> Answer:
        """The answer to a question, once; or its error."""
        self._work_until(lambda: place in self._answered)
        return self._answered.pop(place).result()

    def _work_until(self, known: Callable[[], bool]) -> None:
        while True:
            self._collect()
            found = known()
            # No process is idle while something is told; where this one does all, that goes first.
            if self._at_once > 1 or not found:
                self._begin_more()
            if found:
                return
            running: list[Future[Any]] = [*self._learning, *self._answering]
            if any(one.done() for one in running):
                continue
            if self._learn_here and self._to_learn:
                number = self._to_learn.popleft()
                self._learning[_here(self._learns[number])] = number
            else:
                wait(running, return_when=FIRST_COMPLETED)

    def _begin_more(self) -> None:
        """As much as may run at once, questions first."""
        while len(self._learning) + len(self._answering) < self._at_once:
            if self._to_ask:
                number, place = heapq.heappop(self._to_ask)
                work = partial(self._answer, self._asked[number][place])
                self._answering[self._start(work)] = number, place
            elif self._to_learn and not self._learn_here:
                number = self._to_learn.popleft()
                self._learning[self._start(self._learns[number])] = number
            else:
                return

    def _collect(self) -> None:
        """Note what has ended."""
        for answered in [one for one in self._answering if one.done()]:
            self._answered[self._answering.pop(answered)] = answered
        for learnt in [one for one in self._learning if one.done()]:
            number = self._learning.pop(learnt)
            if (error := learnt.exception()) is not None:
                self._failed[number] = error
                self._to_learn.clear()  # none of those after it is told
                continue
            asked = self._questions(number, learnt.result())
            self._asked[number] = asked
            for place in range(len(asked)):
                heapq.heappush(self._to_ask, (number, place))


def _here(work: Callable[[], Answer]) -> "Future[Answer]":
    future: Future[Answer] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 (raised by who asks for the result)
        future.set_exception(error)
    return future


def _begin(parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # silently, where the other one says why
    quiet_libraries()


def _import(names: Iterable[str]) -> None:
    with collected_seldom():
        for name in names:
            importlib.import_module(name)
