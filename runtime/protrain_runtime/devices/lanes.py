"""Lanes: queues of work that run beside compute, one item at a time, in order.

A lane is a worker thread for Python work (files, host optimizers, all lanes of a CPU machine) and a
stream for copies by hardware. Submitting returns a `Ticket`; waits for it are the only
synchronisation of compute and lanes.
"""

import ctypes
import mmap
import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import torch

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import pinned_bytes
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.device import explained_exhaustion

WAIT_LIMIT_S = 600.0
"""A chunk's transfer never takes ten minutes; a longer wait is a fault, not a slow disk."""

PATIENCE_S = 10.0
"""Seconds for a failing collective to find the missing rank."""

LONGEST_NAP_S = 1e-3
"""Between polls of an event: the most that a wait overshoots."""

STACK_BYTES = 2 * 2**20
"""Lanes call nothing deep, and stacks count against a limit on the process's memory."""


HUGE_PAGES_FROM = 4 * 2**20
"""Buffers that surely hold a huge page of 2 MiB. Reading 14 MiB from the page cache into a fresh
buffer ran at 1.9 GB/s without and 4.4-5.0 GB/s with them (see docs/decisions.md)."""


class LaneError(ProtrainError, RuntimeError):
    """Work on a lane failed, or did not end in time; a failure's cause is chained."""


class ThreadTicket:
    """The end of work on a worker thread; `wait` and `synchronize` raise LaneError if it failed."""

    def __init__(self, what: str, lane: str, limit_s: float) -> None:
        self._what, self._lane, self._limit_s = what, lane, limit_s
        self._ended, self._running = False, threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Called by the lane, once."""
        self._error, self._ended = error, True
        self._running.release()

    def issued(self) -> bool:
        """Whether `wait` returns at once: the work has ended, or is on a stream."""
        return self._ended

    def wait(self) -> None:
        """Make this thread's later work on its current stream wait for this work."""
        self.synchronize()

    def synchronize(self) -> None:
        """Block the calling thread until the work has ended."""
        if not self._ended:
            if not self._running.acquire(timeout=self._limit_s):
                raise _too_late(self._what, self._lane, self._limit_s)
            self._running.release()  # for other waiters
        if self._error is not None:
            cause, failed = self._error, f"{self._what} failed on lane '{self._lane}'"
            if isinstance(cause, ProtrainError):
                message = f"{failed}: {cause.message}"
                raise LaneError(message, source=cause.source, fix=cause.fix) from cause
            raise LaneError(f"{failed}: {cause}") from cause


@dataclass(eq=False)
class StreamTicket:
    """The end of work on a stream: an event, once the work is submitted."""

    what: str
    lane: str
    device: torch.device
    limit_s: float
    submitted: ThreadTicket | None  # if the lane's thread submits the work
    _event: torch.Event | None = field(default=None, init=False)

    def issue(self, event: torch.Event | None, error: BaseException | None = None) -> None:
        """Called by the lane, once: `event` follows the work, or the work failed."""
        self._event = event
        if self.submitted is not None:
            self.submitted.finish(error)

    def issued(self) -> bool:
        """See `ThreadTicket.issued`."""
        return self.submitted is None or self.submitted.issued()

    def wait(self) -> None:
        devices.current_stream(self.device).wait_event(self._end())

    def synchronize(self) -> None:
        # The event's own `synchronize` has no limit. Naps grow to a twentieth of the wait.
        event = self._end()
        with devices.current(self.device):
            if event.query():
                return
            start = time.perf_counter()
            while not event.query():
                waited = time.perf_counter() - start
                if waited > self.limit_s:
                    raise _too_late(self.what, self.lane, self.limit_s)
                time.sleep(min(LONGEST_NAP_S, waited / 20))

    def _end(self) -> torch.Event:
        if self._event is None:
            assert self.submitted is not None
            self.submitted.synchronize()
        assert self._event is not None
        return self._event


Ticket = ThreadTicket | StreamTicket
"""The end of one item of work."""


def _too_late(what: str, lane: str, limit_s: float) -> LaneError:
    return LaneError(
        f"{what} did not end on lane '{lane}' within {limit_s:g} s",
        fix="see whether the device or the disk hangs; where they are slow, pass a larger"
        " wait_limit_s= to prepare()",
    )


_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def forks() -> int:
    """The number of forks that led to this process; unlike its id, without a system call."""
    return _forks


def refuse_forked(process: int, what: str) -> None:
    """LaneError in a process other than `process` (`forks`): a fork has none of its threads."""
    if forks() != process:
        raise LaneError(
            f"{what} cannot be done in a forked process, which has none of the threads that do it",
            fix="call it in the process that called prepare()",
        )


def only_here(undo: Callable[[], object]) -> Callable[[], None]:
    """`undo`, which does nothing in forks of this process."""
    process = forks()

    def run() -> None:
        if forks() == process:
            undo()

    return run


def overridden(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an instance's attribute; returns the undo."""
    held = vars(owner)
    before = {name: held[name]} if name in held else {}
    held[name] = value

    def undo() -> None:
        held.pop(name, None)
        held.update(before)

    return undo


def off_workers(close: Callable[[], object]) -> None:
    """Run `close`, on its own thread if the caller is a runtime thread that collects garbage."""
    if threading.current_thread().name.startswith(OWN_THREADS):
        threading.Thread(target=close, name=f"{OWN_THREADS}end").start()
    else:
        close()


OWN_THREADS = "protrain "
"""The prefix of the runtime's thread names."""


class ThreadLane:
    """A lane on a worker thread.

    `device` is the accelerator that the work may use, and `num_threads` its intra-op threads.
    `delay` returns seconds to sleep before each item: in tests it makes a missing wait show as a
    wrong number.
    """

    def __init__(
        self,
        name: str,
        *,
        delay: Callable[[], float] | None = None,
        device: torch.device | None = None,
        num_threads: int = 1,
        limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.name = name
        self.on_stream = False
        self._process = forks()
        self._delay, self._limit_s, self._device = delay, limit_s, device
        self._num_threads = num_threads
        # With an accelerator, copies run on the lane's own stream.
        self._stream = None if device is None else torch.Stream(device=device)
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread = started(f"protrain {name}", self._run, device=device)

    def submit(self, what: str, work: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        """Queue `work`, to start after earlier work and all of `after`.

        It also starts after the calling thread's earlier work on the device: sources are written,
        and reused buffers of compute's allocator are free. The calling thread continues at once.
        `what` names the work in errors.
        """
        refuse_forked(self._process, what)
        ticket = ThreadTicket(what, self.name, self._limit_s)
        fence = None if self._device is None else devices.record_event(self._device)
        self._queue.put(_Item(work, after, fence, ticket.finish))
        return ticket

    def close(self) -> None:
        """Finish queued work, then end the lane."""
        self._queue.put(None)
        self._thread.join(self._limit_s)

    def _run(self) -> None:
        take_threads(self._num_threads)
        while (item := self._queue.get()) is not None:
            error: BaseException | None = None
            try:
                if self._delay is not None:
                    time.sleep(self._delay())
                for other in item.after:
                    other.synchronize()
                self._do(item)
            except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
                error = raised
            # Work and its references are dropped first: the engine frees, not the lane.
            finish = item.finish
            del item
            finish(error)

    def _do(self, item: "_Item") -> None:
        if self._stream is None or item.fence is None:
            item.work()
            return
        with self._stream:
            # Copies wait on the stream for compute's earlier work; work in host memory alone need
            # not.
            self._stream.wait_event(item.fence)
            item.work()
        self._stream.synchronize()


class _Item(NamedTuple):
    """Work in a lane's queue. `fence` follows compute's earlier work."""

    work: Callable[[], None]
    after: Sequence[Ticket]
    fence: torch.Event | None
    finish: Callable[[BaseException | None], None]


def started(
    name: str, run: Callable[[], None], *, device: torch.device | None = None
) -> threading.Thread:
    """A thread with a small stack; `device` is its current one."""

    def run_there() -> None:
        with devices.current(device or devices.HOST):
            run()

    thread = threading.Thread(target=run_there, name=name, daemon=True)
    usual = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


def started_pool(
    count: int,
    name: str,
    *,
    stack_bytes: int = STACK_BYTES,
    initializer: Callable[[], None] | None = None,
) -> ThreadPoolExecutor:
    """A pool of `count` such threads, all started."""
    everyone = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, f"{OWN_THREADS}{name}", initializer)
    usual = threading.stack_size(stack_bytes)
    try:
        for _ in range(count):
            pool.submit(everyone.wait)
    finally:
        threading.stack_size(usual)
    everyone.wait()
    return pool


class StreamLane:
    """A lane on a stream of its own.

    The compute thread submits work to the stream, unless it follows unfinished work of a thread (a
    disk read, a sum on the host): then a thread of the lane waits and submits.
    """

    def __init__(self, name: str, device: torch.device, *, limit_s: float) -> None:
        self.name = name
        self.on_stream = True
        self._process = forks()
        self._device, self._limit_s = device, limit_s
        self._stream = torch.Stream(device=device)
        self._queue: SimpleQueue[tuple[_Item, StreamTicket] | None] = SimpleQueue()
        self._waiting: StreamTicket | None = None  # the last one left to the thread
        self._thread: threading.Thread | None = None

    def submit(self, what: str, work: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        refuse_forked(self._process, what)
        item = _Item(work, after, devices.record_event(self._device), lambda _: None)
        if self._waiting is not None and self._waiting.issued():
            self._waiting = None
        now = self._waiting is None and all(other.issued() for other in after)
        by_thread = None if now else ThreadTicket(what, self.name, self._limit_s)
        ticket = StreamTicket(what, self.name, self._device, self._limit_s, by_thread)
        if now:
            ticket.issue(self._issue(item))
            return ticket
        if self._thread is None:
            self._thread = started(f"protrain {self.name}", self._run, device=self._device)
        self._waiting = ticket
        self._queue.put((item, ticket))
        return ticket

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(self._limit_s)
        self._stream.synchronize()

    def _issue(self, item: _Item) -> torch.Event:
        assert item.fence is not None
        self._stream.wait_event(item.fence)
        with self._stream:
            for other in item.after:
                other.wait()
            item.work()
            return self._stream.record_event()

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            item, ticket = queued
            event: torch.Event | None = None
            error: BaseException | None = None
            try:
                event = self._issue(item)
            except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
                error = raised
            del item, queued
            ticket.issue(event, error)
            del ticket


WorkLane = ThreadLane | StreamLane
"""A lane for the engine's work; `on_stream`: work only queues copies, which run later."""


def private_pages(num_bytes: int) -> mmap.mmap:
    """Fresh pages to pin: huge ones on Linux, and not for forked processes.

    Shared pages are never huge: 1 GiB of them took 48 ms to pin and 210 ms to fill, against 25 and
    33 (an H200's host). A fork would share private pages until either process writes and gets a
    copy elsewhere, while the device continues with the first.
    """
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    if num_bytes >= HUGE_PAGES_FROM:
        with suppress(OSError):  # the kernel lacks them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def ask_for_huge_pages(buffer: torch.Tensor) -> None:
    """Ask Linux to back a CPU buffer with huge pages: fewer page faults."""
    advise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
    if advise is None:
        return
    page = mmap.PAGESIZE
    start = -(-buffer.data_ptr() // page) * page
    end = (buffer.data_ptr() + buffer.numel()) // page * page
    advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


SWITCH_INTERVAL_S = 5e-4
"""Python's threads take turns of at most this while a plan launches work on an accelerator. With
its usual 5 ms, a lane's thread that computes in Python keeps the launching one waiting as long as
many kernels take."""


class Backend:
    """Differences of host and accelerator memory; a wait beyond `limit_s` is a fault."""

    def __init__(
        self,
        device: torch.device,
        *,
        delay: Callable[[], float] | None = None,
        limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.device = device
        self.on_host = devices.on_host(device)
        self._delay, self._limit_s = delay, limit_s

    def empty(self, num_bytes: int) -> torch.Tensor:
        """A new buffer on the device.  # uint8 [num_bytes]"""
        if torch.is_inference_mode_enabled():  # for parameters, in any forward
            with torch.inference_mode(mode=False):
                return self.empty(num_bytes)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self.on_host and num_bytes >= HUGE_PAGES_FROM:
            ask_for_huge_pages(buffer)
        return buffer

    @property
    def resizes(self) -> bool:
        """Whether the device is an accelerator on which PyTorch resizes storages."""
        if not self.on_host:
            with suppress(RuntimeError):
                self.empty(1).untyped_storage().resize_(0)
                return True
        return False

    def empty_host(self, num_bytes: int) -> torch.Tensor:
        """A new host buffer, pinned beside an accelerator.  # uint8 [num_bytes]

        Whole pages only, if the device type can pin pages: PyTorch's pinned allocator rounds up to
        powers of two. OutOfMemoryError if the system refuses.
        """
        if self.on_host or not num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8)
        with explained_exhaustion(
            fix="raise the limit (ulimit -l), or plan with a smaller --host-memory",
            what=f"{format_bytes(num_bytes)} of host memory cannot be pinned",
        ):
            if devices.of_type(self.device).pin is None:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            pages = private_pages(pinned_bytes(num_bytes))
            buffer = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
            unpin = devices.pin(self.device, buffer.data_ptr(), len(pages))
        # The pages live as long as a view of them, but are pinned only while the buffer lives.
        weakref.finalize(buffer, only_here(unpin))
        return buffer

    def map_common(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        """Memory that processes share by a file, for reading.  # uint8 [num_bytes], whole pages

        Pinned if the device type can pin pages, which requires writable ones.
        """
        pins = not self.on_host and devices.of_type(self.device).pin is not None
        access = mmap.PROT_READ | (mmap.PROT_WRITE if pins else 0)
        pages = mmap.mmap(descriptor, num_bytes, prot=access)
        with warnings.catch_warnings(action="ignore"):  # on read-only memory
            buffer = torch.frombuffer(pages, dtype=torch.uint8)
        if pins:
            with explained_exhaustion(
                fix="raise the limit (ulimit -l), or plan without a common copy",
                what=f"{format_bytes(num_bytes)} of a common copy cannot be pinned",
            ):
                unpin = devices.pin(self.device, buffer.data_ptr(), num_bytes)
            weakref.finalize(buffer, only_here(unpin))
        return buffer

    def lane(
        self, name: str, *, on_device: bool, patient: bool = False, num_threads: int = 1
    ) -> WorkLane:
        """A lane; `on_device` if the device's copy engines can do its work.

        Others have `num_threads` for PyTorch's operators. A `patient` one's work has its own time
        limit, which is to report lateness first.
        """
        limit_s = self._limit_s * (2 if patient else 1) + (PATIENCE_S if patient else 0)
        if on_device and not self.on_host:
            return StreamLane(name, self.device, limit_s=limit_s)
        threads = torch.get_num_threads()
        device = None if self.on_host else self.device
        lane = ThreadLane(
            name, delay=self._delay, device=device, num_threads=num_threads, limit_s=limit_s
        )
        lane.submit("the start", nothing, ()).synchronize()
        # Setting the worker's number also changed the default of later threads.
        torch.set_num_threads(threads)
        return lane


def take_threads(number: int = 1) -> None:
    """Limit the calling thread's intra-op threads: more would contend with compute's.

    The current number is read first: otherwise a thread takes the process's number at first use.
    Setting it also changes the number for later threads: this thread's starter restores it.
    """
    torch.get_num_threads()
    torch.set_num_threads(number)


def nothing() -> None:
    """Work that does nothing: it ends after all earlier work."""


@dataclass(eq=False)
class Buffers:
    """Makes buffers on the device, reusing those given up at a slot's boundary.

    On a CPU a fresh buffer costs a page fault per page, in the lane that fills it: reading a chunk
    from the page cache then runs at a third of its speed (docs/decisions.md, *Buffers are handed
    on*). Blocks are alike, so a chunk that leaves has buffers of the sizes that the next fetch
    needs. Buffers unused at that boundary are freed before it ends. An accelerator's allocator
    caches blocks itself.
    """

    backend: Backend
    _spare: list[torch.Tensor] = field(default_factory=list[torch.Tensor], init=False)

    def new(self, num_bytes: int) -> torch.Tensor:
        """A buffer of that size, with any content.  # uint8 [num_bytes]"""
        for place, buffer in enumerate(self._spare):
            if buffer.numel() == num_bytes:
                return self._spare.pop(place)
        return self.backend.empty(num_bytes)

    def give_up(self, buffers: Iterable[torch.Tensor]) -> None:
        """Reuse these buffers, except those that are still referenced elsewhere."""
        if self.backend.on_host:
            self._spare += [buffer for buffer in buffers if not is_held(buffer)]

    def keep_for(self, sizes: Iterable[int]) -> None:
        """Free spare buffers beyond one for each of `sizes`."""
        if not self._spare:
            return
        wanted, kept = Counter(sizes), list[torch.Tensor]()
        for buffer in self._spare:
            if wanted[buffer.numel()]:
                wanted[buffer.numel()] -= 1
                kept.append(buffer)
        self._spare = kept


def is_held(buffer: torch.Tensor) -> bool:
    """Whether another tensor has the buffer's storage, such as a parameter's view."""
    return num_holders(buffer.untyped_storage()) > 1


def num_holders(storage: torch.UntypedStorage) -> int:
    """The number of tensors that hold a storage, besides the argument."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
