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
from typing import Any, Protocol, TypeVar

from protrain_plan.commands.output import quiet_libraries
from protrain_plan.errors import ProtrainError
from protrain_plan.models.model_code import end_with

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
    to_learn = deque(range(len(learns)))
    to_ask: list[tuple[int, int]] = []  # a heap of places: what was learnt, and its question
    asked: list[Sequence[Asked] | None] = [None] * len(learns)
    found: dict[tuple[int, int], Future[Any]] = {}
    running: dict[Future[Any], tuple[int, int] | int] = {}
    failed: dict[int, BaseException] = {}

    def ended(place: tuple[int, int] | int, future: "Future[Any]") -> None:
        if isinstance(place, tuple):
            found[place] = future
            return
        if (error := future.exception()) is not None:
            failed[place] = error
            to_learn.clear()  # none of those after it is told
            return
        asked[place] = list(questions(place, future.result()))
        for number in range(len(asked[place] or ())):
            heapq.heappush(to_ask, (place, number))

    def start_more() -> None:
        while len(running) < at_once and (to_ask or (to_learn and not learn_here)):
            if to_ask:
                place = heapq.heappop(to_ask)
                of_place = asked[place[0]]
                assert of_place is not None, "it was learnt"
                running[start(partial(answer, of_place[place[1]]))] = place
            else:
                number = to_learn.popleft()
                running[start(learns[number])] = number

    for number in range(len(learns)):
        place = 0
        while True:
            for future in [one for one in running if one.done()]:
                ended(running.pop(future), future)
            # Before it is waited, so that no process is idle; what is here to tell goes first where
            # this process does all.
            ready = (number, place) in found
            if at_once > 1 or not ready:
                start_more()
            if not ready and any(one.done() for one in running):
                continue
            of_number = asked[number]
            if number in failed:
                raise failed[number]
            if of_number is not None and place == len(of_number):
                break
            if of_number is not None and ready:
                yield of_number[place], found.pop((number, place)).result()
                place += 1
            elif learn_here and to_learn:
                learnt = to_learn.popleft()
                ended(learnt, _here(learns[learnt]))
            elif running:
                wait(running, return_when=FIRST_COMPLETED)


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
    for name in names:
        importlib.import_module(name)
