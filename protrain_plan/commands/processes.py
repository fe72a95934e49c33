"""Questions that several processes answer at once."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import TypeVar

from protrain_plan.errors import ProtrainError
from protrain_plan.models.model_code import end_with

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@contextmanager
def answers_of(
    function: Callable[[Asked], Answer], questions: Sequence[Asked], *, at_once: int
) -> Iterator[Iterator[Answer]]:
    """The answers in order, from so many processes at once, which end with this one or the block.

    They are started anew: threads of the solver and of the progress bar would be missing in a fork.
    """
    if at_once == 1:
        yield map(function, questions)
        return
    pool = ProcessPoolExecutor(
        at_once, get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    )
    try:
        yield pool.map(function, questions)
    except BrokenProcessPool:
        raise ProtrainError(
            "a process that planned died, perhaps because memory ran out",
            fix="ask of fewer machines, lengths and batches at once",
        ) from None
    finally:
        for process in active_children():  # of a pool that is to answer no more
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # silently, where the other one says why
