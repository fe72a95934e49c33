"""Questions that several processes answer at once, with code of our own."""

import heapq
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

from protrain_plan.garbage import collected_seldom
from protrain_plan.isolated.ending import end_with_parent
from protrain_plan.isolated.quiet import quiet_libraries
from protrain_runtime.contract.errors import ProtrainError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Learnt = TypeVar("Learnt")

_BYTES_EACH = 2 * 2**30
"""Memory of a process that estimates: PyTorch and transformers, and a model without values."""


class Start(Protocol):
    """Has a process work on something; or does it here and now, where there are no others."""

    def __call__(self, work: Callable[[], Answer], /) -> "Future[Answer]": ...


def processes_at_once(most: int, jobs: int | None = None) -> int:
    """How many processes may estimate at the same time, as far as memory goes.

    `jobs`, or one a core.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    free = most * _BYTES_EACH
    with suppress(OSError, AttributeError):
        told = re.search(r"^MemAvailable: +([0-9]+) kB", Path("/proc/meminfo").read_text(), re.M)
        free = 1024 * int(told[1]) if told else free
    return max(1, min(most, jobs or cores, free // _BYTES_EACH))


@contextmanager
def workers(at_once: int, *, imports: Iterable[str] = ()) -> Iterator[Start]:
    """So many processes, which end with this one or the block; none where it is one at a time.

    They are started anew: threads of the solver and of the progress bar would be missing in a fork.
    Until there is work they import these modules. ProtrainError where one dies.
    """
    if at_once == 1:
        yield _here
        return
    pool = ProcessPoolExecutor(at_once, get_context("spawn"), initializer=_begin)
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
    function: Callable[[Asked], Answer],
    questions: Sequence[Asked],
    *,
    jobs: int | None,
    told: Callable[[Sequence[Asked]], None] = lambda _: None,
) -> Iterator[Iterator[Answer]]:
    """The answers in order, from at most `jobs` processes at once. Errors as of `workers`.

    Those that are open yet are `told` as soon as one is answered.
    """
    at_once = processes_at_once(len(questions), jobs)
    waiting = dict(enumerate(questions))

    def ended(number: int, answer: Answer) -> Answer:
        waiting.pop(number, None)
        told(tuple(waiting.values()))
        return answer

    if at_once == 1:
        yield (ended(number, function(question)) for number, question in enumerate(questions))
        return
    with workers(at_once) as start:
        futures = [start(partial(function, question)) for question in questions]
        for number, future in enumerate(futures):
            future.add_done_callback(partial(ended, number))
        yield (future.result() for future in futures)


def pipelined(
    start: Start,
    learns: Sequence[Callable[[], Learnt]],
    questions: Callable[[int, Learnt], Sequence[Asked]],
    answer: Callable[[Asked], Answer],
    *,
    known: Callable[[Asked], Answer | None] = lambda _: None,
    at_once: int,
    learn_here: bool,
    told: Callable[[int, Asked | None], None] = lambda *_: None,
) -> Iterator[tuple[Asked, Answer]]:
    """Things to be learnt first, then asked; the questions in order, each with its answer.

    An answer comes as soon as it is known and those before are. Of what has been learnt all is
    asked before more is learnt, so that the first ones come soon; where an answer is `known`
    already, no process is asked. `learn_here`: in this process alone, beside the others' answers.
    How many answers there are is `told` as soon as that changes, and what is asked then.
    An error is raised in the order of what it is of.
    """
    # A task is whether it is to learn, the number of what is learnt, and that of a question about
    # it: of a heap, questions come first.
    waiting = [(True, number, 0) for number in range(len(learns))]
    running: dict[Future[Any], tuple[bool, int, int]] = {}
    ended: dict[tuple[bool, int, int], Future[Any]] = {}
    asked: dict[int, Sequence[Asked]] = {}
    answered = 0

    def tell(*tasks: tuple[bool, int, int]) -> None:
        asking = (asked[n][place] for learning, n, place in tasks if not learning)
        told(answered, next(asking, None))

    def begin(start: Start) -> None:
        task = learning, number, place = heapq.heappop(waiting)
        work = learns[number] if learning else partial(answer, asked[number][place])
        tell(*running.values(), task)
        running[start(work)] = task

    def collect() -> None:
        nonlocal answered
        for future in [one for one in running if one.done()]:
            task = learning, number, _ = running.pop(future)
            ended[task] = future
            answered += not learning
            if learning and future.exception() is not None:
                waiting[:] = sorted(other for other in waiting if not other[0])  # none is told
            elif learning:
                asked[number] = questions(number, future.result())
                for place, question in enumerate(asked[number]):
                    if (before := known(question)) is None:
                        heapq.heappush(waiting, (False, number, place))
                    else:
                        ended[False, number, place] = Future()
                        ended[False, number, place].set_result(before)
                        answered += 1
            tell(*running.values())

    def result_of(task: tuple[bool, int, int]) -> Any:
        while True:
            collect()
            # No process is idle while something is told; where this one does all, that goes first.
            while (
                (at_once > 1 or task not in ended)
                and (waiting and len(running) < at_once)
                and not (learn_here and waiting[0][0])
            ):
                begin(start)
            if task in ended:
                return ended.pop(task).result()
            if any(one.done() for one in running):
                continue
            if learn_here and waiting and waiting[0][0]:
                begin(_here)
            else:
                wait(running, return_when=FIRST_COMPLETED)

    for number in range(len(learns)):
        result_of((True, number, 0))
        for place, question in enumerate(asked[number]):
            yield question, result_of((False, number, place))


def _here(work: Callable[[], Answer]) -> "Future[Answer]":
    future: Future[Answer] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 (raised by who asks for the result)
        future.set_exception(error)
    return future


def _begin() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # silently, where the other one says why
    quiet_libraries()


def _import(names: Iterable[str]) -> None:
    with collected_seldom():
        for name in names:
            importlib.import_module(name)
