"""Questions that several processes answer at once, with code of our own."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TypeVar

from protrain_plan.isolated.ending import end_with_parent, quiet_libraries
from protrain_runtime.contract.errors import ProtrainError

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_BYTES_EACH = 2 * 2**30
"""Memory of a process that estimates: PyTorch and transformers, and a model without values."""


def processes_at_once(most: int, jobs: int | None = None) -> int:
    """Processes that may estimate at once: `jobs`, or one per core, as memory allows."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    free = most * _BYTES_EACH
    with suppress(OSError, AttributeError):
        known = re.search(r"^MemAvailable: +([0-9]+) kB", Path("/proc/meminfo").read_text(), re.M)
        free = 1024 * int(known[1]) if known else free
    return max(1, min(most, jobs or cores, free // _BYTES_EACH))


@contextmanager
def answers_of(
    function: Callable[[Asked], Answer],
    questions: Sequence[Asked],
    *,
    jobs: int | None,
    report: Callable[[Sequence[Asked]], None] = lambda _: None,
) -> Iterator[Iterator[Answer]]:
    """The answers in order, from at most `jobs` processes at once; one at a time, from this one.

    `report` gets the open questions whenever one is answered. The processes end with this one
    or the block. They are started anew: threads of the solver and of the progress bar would be
    missing in a fork. ProtrainError where one dies.
    """
    at_once = processes_at_once(len(questions), jobs)
    waiting = dict(enumerate(questions))

    def ended(number: int, answer: Answer) -> Answer:
        waiting.pop(number, None)
        report(tuple(waiting.values()))
        return answer

    if at_once == 1:
        yield (ended(number, function(question)) for number, question in enumerate(questions))
        return
    pool = ProcessPoolExecutor(at_once, get_context("spawn"), initializer=_begin)
    try:
        futures = [pool.submit(function, question) for question in questions]
        for number, future in enumerate(futures):
            future.add_done_callback(partial(ended, number))
        yield (future.result() for future in futures)
    except BrokenProcessPool:
        raise ProtrainError(
            "a planning process died, perhaps because memory ran out",
            fix="ask of fewer machines, lengths and batches at once, or --jobs 1",
        ) from None
    finally:
        for process in active_children():  # of a pool that is to answer no more
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # silently, where the other one says why
    quiet_libraries()
