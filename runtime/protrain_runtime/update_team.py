"""The threads that update chunks in host memory, and the ranges that they share out.

An optimizer in host memory is bound by what one processor can read and write. Ranges of a piece are
updated by several at once, each range by an optimizer of the user's class on a thread with one
intra-op thread: PyTorch's own threads would cut tensors elsewhere, and beside compute.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from protrain_plan.program import PIECE_ALIGNMENT
from protrain_runtime.devices import on_host
from protrain_runtime.lanes import STACK_BYTES, take_one_thread

SMALLEST_RANGE = 2**17
"""Elements that are worth a thread: about 150 us of AdamW's step, several times what handing a
range to a thread and back takes (`benchmarks/results/updates.md`)."""

LONGEST_SPAN = 2**20
"""Elements that an optimizer steps on as one parameter: 4 MiB of float32, so that what it needs
besides (a float32 gradient, the temporaries of a plain loop) is no fresh memory, whose pages the
system clears first: twice as fast with master weights, three times as fast in a loop of operators
(`benchmarks/results/updates.md`). Runs of a quarter cost a fused step up to a tenth."""


def spare_threads(device: torch.device) -> int:
    """How many threads update chunks in host memory, at least 1.

    Beside an accelerator: the threads that this process has, but for one that launches its work. On
    a CPU the processors compute: one thread updates beside them.
    """
    return 1 if on_host(device) else max(1, torch.get_num_threads() - 1)


class Span(NamedTuple):
    """Elements of one of several tensors."""

    tensor: int
    start: int
    stop: int


class UpdateTeam:
    """The update lane's thread, and `num_threads` - 1 that help it.

    Made by a thread with the process's own number of intra-op threads.
    """

    def __init__(
        self, num_threads: int = 1, *, smallest: int = SMALLEST_RANGE, longest: int = LONGEST_SPAN
    ) -> None:
        self.num_threads, self.longest = num_threads, longest
        self._smallest = smallest
        self._helpers = _helpers(num_threads - 1) if num_threads > 1 else None

    def ranges(self, lengths: Sequence[int]) -> list[list[Span]]:
        """What each thread works on, of tensors of these lengths: all of their elements once.

        About as much each, and nothing smaller than is worth a thread.
        """
        most = max(1, sum(lengths) // self._smallest)
        return ranges(lengths, min(self.num_threads, most), longest=self.longest)

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Do all of them, the first here; what one raises is raised when all have ended."""
        assert len(tasks) <= self.num_threads
        others = [self._helpers.submit(task) for task in tasks[1:]] if self._helpers else []
        try:
            for task in tasks[:1]:
                task()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """Let the threads end."""
        if self._helpers is not None:
            self._helpers.shutdown()


def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that have started: each sets its own number of intra-op threads when it does."""
    num_threads = torch.get_num_threads()
    usual = threading.stack_size(STACK_BYTES)
    everyone = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, "protrain update", initializer=take_one_thread)
    for _ in range(count):
        pool.submit(everyone.wait)
    everyone.wait()
    threading.stack_size(usual)
    # The helpers' number also became the default of threads to come.
    torch.set_num_threads(num_threads)
    return pool


def ranges(lengths: Sequence[int], count: int, *, longest: int) -> list[list[Span]]:
    """At most `count` ranges of about equal numbers of elements, over tensors of these lengths.

    Tensors are cut at multiples of PIECE_ALIGNMENT, and so that no span is longer than `longest`,
    which is one.
    """
    ends = [sum(lengths) * number // count for number in range(1, count + 1)]
    shares: list[list[Span]] = [[] for _ in ends]
    number = done = 0
    for tensor, length in enumerate(lengths):
        start = 0
        while start < length:
            room = ends[number] - (done + start)
            rest = length - start
            taken = rest if room >= rest else room // PIECE_ALIGNMENT * PIECE_ALIGNMENT
            if taken <= 0:
                number += 1
                continue
            stop = start + min(taken, longest)
            shares[number].append(Span(tensor, start, stop))
            start = stop
        done += length
    return [share for share in shares if share]
