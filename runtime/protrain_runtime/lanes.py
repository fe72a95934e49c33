"""Lanes: queues of work that run beside compute, one item at a time, in order.

A lane is a worker thread where Python must act (files, the optimizer on the host, every lane of a
CPU machine) and a CUDA stream where the hardware copies by itself. Submitting returns a `Ticket`;
waiting for it is the only way in which compute and lanes meet.
"""

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Protocol

import torch

from protrain_plan.errors import ProtrainError
from protrain_plan.program import pinned_bytes

WAIT_LIMIT_S = 600.0
"""No transfer of one chunk takes ten minutes; a wait that does is a fault, not a slow disk."""

PATIENCE_S = 10.0
"""What a collective that fails may take to find out which rank is missing, and more."""

LONGEST_NAP_S = 1e-3
"""Between two looks at a CUDA event: what a wait for one may take too long, at most."""

STACK_BYTES = 2 * 2**20
"""A lane calls nothing deep, and a stack counts against a limit on the process's memory."""


HUGE_PAGES_FROM = 4 * 2**20
"""Buffers that surely hold a huge page of 2 MiB. Reading 14 MiB from the page cache into a fresh
buffer ran at 1.9 GB/s without and 4.4-5.0 GB/s with them (see docs/decisions.md)."""


class LaneError(ProtrainError, RuntimeError):
    """Work on a lane failed, or did not end in time; a failure's cause is chained."""


class Ticket(Protocol):
    """The end of one item of work."""

    def done(self) -> bool:
        """Whether the work has ended, without waiting."""
        ...

    def wait(self) -> None:
        """Make compute that is submitted from now on wait for the work."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the work has ended."""
        ...


class ThreadTicket:
    """The end of work on a worker thread; `wait` and `synchronize` raise LaneError if it failed."""

    def __init__(self, what: str, lane: str, limit_s: float) -> None:
        self._what, self._lane, self._limit_s = what, lane, limit_s
        self._event = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Called by the lane, once."""
        self._error = error
        self._event.set()

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if not self._event.wait(self._limit_s):
            raise _too_late(self._what, self._lane, self._limit_s)
        if self._error is not None:
            cause, failed = self._error, f"{self._what} failed on lane '{self._lane}'"
            if isinstance(cause, ProtrainError):
                message = f"{failed}: {cause.message}"
                raise LaneError(message, source=cause.source, fix=cause.fix) from cause
            raise LaneError(f"{failed}: {cause}") from cause


class StreamTicket:
    """The end of work on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event, what: str, lane: str, limit_s: float) -> None:
        self._event = event
        self._what, self._lane, self._limit_s = what, lane, limit_s

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        # The event's own `synchronize` has no limit. Naps grow with the wait, a twentieth of it.
        start = time.perf_counter()
        while not self._event.query():
            waited = time.perf_counter() - start
            if waited > self._limit_s:
                raise _too_late(self._what, self._lane, self._limit_s)
            time.sleep(min(LONGEST_NAP_S, waited / 20))


def _too_late(what: str, lane: str, limit_s: float) -> LaneError:
    return LaneError(
        f"{what} did not end on lane '{lane}' within {limit_s:g} s",
        fix="see whether the device or the disk hangs; where they are slow, pass a larger"
        " wait_limit_s= to prepare()",
    )


class WorkLane(Protocol):
    """What the engine asks of a lane."""

    on_stream: bool
    """Whether work only queues copies on a stream, to run later."""

    def submit(self, what: str, work: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """Queue `work`, to start when the work before it and all of `after` have ended.

        `what` names it in errors.
        """
        ...

    def close(self) -> None:
        """Let queued work end, then free the lane."""
        ...


class ThreadLane:
    """A lane on a worker thread.

    `device` is the CUDA device whose memory the work may touch. `delay`, if given, returns seconds
    to sleep before each item: a test's way to make a missing wait show up as a wrong number.
    """

    def __init__(
        self,
        name: str,
        *,
        delay: Callable[[], float] | None = None,
        device: torch.device | None = None,
        limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.name = name
        self.on_stream = False
        self._delay, self._limit_s = delay, limit_s
        # With a CUDA device, the work's copies run on a stream of the lane's own.
        self._stream = None if device is None else torch.cuda.Stream(device)
        self._queue: SimpleQueue[tuple[Callable[[], None], Sequence[Ticket], ThreadTicket] | None]
        self._queue = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"protrain {name}", daemon=True)
        usual = threading.stack_size(STACK_BYTES)
        self._thread.start()
        threading.stack_size(usual)

    def submit(self, what: str, work: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        ticket = ThreadTicket(what, self.name, self._limit_s)
        self._queue.put((work, after, ticket))
        return ticket

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(self._limit_s)

    def _run(self) -> None:
        # One intra-op thread: compute has the others, and a second team would contend with it.
        torch.set_num_threads(1)
        while (item := self._queue.get()) is not None:
            work, after, ticket = item
            error: BaseException | None = None
            try:
                if self._delay is not None:
                    time.sleep(self._delay())
                for other in after:
                    other.synchronize()
                if self._stream is None:
                    work()
                else:
                    with torch.cuda.stream(self._stream):
                        work()
                    self._stream.synchronize()
            except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
                error = raised
            # Work and what it refers to are dropped first: the engine frees, not the lane.
            del item, work, after
            ticket.finish(error)


class StreamLane:
    """A lane on a CUDA stream of its own."""

    def __init__(self, name: str, device: torch.device, *, limit_s: float) -> None:
        self.name = name
        self.on_stream = True
        self._limit_s = limit_s
        self._stream = torch.cuda.Stream(device)

    def submit(self, what: str, work: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        # The stream sees what compute has queued so far: sources are written, and buffers that
        # compute's allocator handed out are no longer in use by what had them before.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for other in after:
                other.wait()
            work()
            event = torch.cuda.Event()
            event.record()
        return StreamTicket(event, what, self.name, self._limit_s)

    def close(self) -> None:
        self._stream.synchronize()


def ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Let Linux back a CPU buffer with huge pages where it can; a hint, and elsewhere nothing.

    A lane is the first to touch a fresh buffer. With pages of 4 KiB that is most of its time.
    """
    advise = getattr(_libc(), "madvise", None) if sys.platform == "linux" else None
    if advise is None:
        return
    page = mmap.PAGESIZE
    start = -(-buffer.data_ptr() // page) * page
    end = (buffer.data_ptr() + buffer.numel()) // page * page
    advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Backend:
    """The few things that differ between a CPU and a CUDA device.

    `limit_s` is how long a wait for a lane may take before it is a fault.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        delay: Callable[[], float] | None = None,
        limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._delay, self._limit_s = delay, limit_s

    def empty(self, num_bytes: int) -> torch.Tensor:
        """A new buffer on the device.  # uint8 [num_bytes]"""
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if not self.is_cuda and num_bytes >= HUGE_PAGES_FROM:
            ask_for_huge_pages(buffer)
        return buffer

    def empty_host(self, num_bytes: int) -> torch.Tensor:
        """A new buffer in host memory, pinned where there is a device.  # uint8 [num_bytes]

        Whole pages and no more: PyTorch's own pinned allocator rounds up to powers of two.
        """
        if not self.is_cuda or not num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8)
        pages = mmap.mmap(-1, pinned_bytes(num_bytes))
        buffer = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
        address, cuda = buffer.data_ptr(), torch.cuda.cudart()
        torch.cuda.check_error(cuda.cudaHostRegister(address, len(pages), 0))
        # The pages live as long as a view of them; they stay pinned while the buffer itself lives.
        weakref.finalize(buffer, cuda.cudaHostUnregister, address)
        return buffer

    def lane(self, name: str, *, on_device: bool, patient: bool = False) -> WorkLane:
        """A lane; `on_device` where the device's copy engines can do its work.

        A `patient` one has work with a time limit of its own, which is to say first what is late.
        """
        limit_s = self._limit_s * (2 if patient else 1) + (PATIENCE_S if patient else 0)
        if self.is_cuda and on_device:
            return StreamLane(name, self.device, limit_s=limit_s)
        threads = torch.get_num_threads()
        device = self.device if self.is_cuda else None
        lane = ThreadLane(name, delay=self._delay, device=device, limit_s=limit_s)
        lane.submit("the start", nothing, ()).synchronize()
        # The worker's own number of threads also became the default of threads to come.
        torch.set_num_threads(threads)
        return lane

    def synchronize(self) -> None:
        """Block until the device has done all that was submitted to it."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def fence(self) -> tuple[Ticket, ...]:
        """The end of all compute submitted so far, for lanes on threads."""
        if not self.is_cuda:
            return ()
        event = torch.cuda.Event()
        event.record()
        return (StreamTicket(event, "compute", "compute", self._limit_s),)


def nothing() -> None:
    """Work that does nothing: it ends when all before it has."""
