"""Run work in a process of its own: `run(work)` gives its answer, or one error.

Without limits the process is fresh: it has this one's terminal and libraries, and none of its
memory. With limits it is forked from a server of `multiprocessing`, which imports once what is
named to `start_server`; it has no input and no output, and its process group is killed when it has
answered or exceeded them. This is no sandbox: either has the user's rights.
"""

import faulthandler
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from protrain_plan.isolated.ending import INTERRUPTED, end_with_parent
from protrain_plan.isolated.user_frame import Place, user_frame_in
from protrain_runtime.contract.errors import OutOfMemoryError, ProtrainError

_POLL_S = 0.05
_GRACE_S = 5.0
"""For an interrupted process to end by itself, and for one to tell where it is."""

Tell = Callable[[Any], None]
"""Says something on the way."""
Work = Callable[[Tell], Any]
"""Work: it can be pickled, and so can its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a process; that of memory holds on Linux, for each process that it starts."""

    seconds: float
    memory: int


class EndedError(ProtrainError):
    """A process ended without an answer.

    `code` is the exit code (minus the signal), `limit` names the one of `Limits` that was exceeded.
    `source` and `line` are of the user's files.
    """

    def __init__(
        self, message: str, place: Place = (None, None), *, code: int | None = None, limit: str = ""
    ) -> None:
        super().__init__(message, source=place[0], line=place[1])
        self.code, self.limit = code, limit


def start_server(imports: Iterable[str]) -> None:
    """Start the server, which imports what is there of these modules; it ends with this thread."""
    get_context("forkserver").set_forkserver_preload(["protrain_plan.isolated.server", *imports])
    with _starting_quietly():
        forkserver.ensure_running()


def run(
    work: Work,
    *,
    limits: Limits | None = None,
    name: str = "its process",
    hear: Tell = lambda _: None,
) -> Any:
    """The answer of work that is done in a process of its own.

    What the work tells is `hear`d. Raises the ProtrainError that the work raises, and EndedError.
    """
    context = get_context("spawn") if limits is None else get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    with ours, tempfile.NamedTemporaryFile() as dump:
        process = context.Process(
            target=_work, args=(work, theirs, dump.name, limits, dict(os.environ))
        )
        with theirs:
            try:
                with _starting_quietly():
                    if limits is None:
                        process.start()
                    else:
                        forkserver.ensure_running()
                if limits is not None:
                    process.start()  # waits for the server's imports
            except (OSError, EOFError) as error:  # an import ended the server
                raise EndedError(f"{name} cannot be started: {error!r}") from None
        try:
            return _followed(process, ours, Path(dump.name), limits, name, hear)
        except BaseException as error:
            if limits is None and not isinstance(error, ProtrainError):
                _send(process, signal.SIGINT)  # as a terminal does
            raise
        finally:
            if limits is None:
                process.join(_GRACE_S)
            else:
                assert process.pid
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


_lock = threading.Lock()


@contextmanager
def _starting_quietly() -> Iterator[None]:
    """Start processes that import nothing from the working directory and clean up on Ctrl-C."""
    variable = "PYTHONSAFEPATH"
    with _lock:
        resource_tracker.ensure_running()  # started later, it would unblock the signal
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        before = os.environ.get(variable)
        os.environ[variable] = "1"
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            del os.environ[variable]
            if before is not None:
                os.environ[variable] = before


def _followed(
    process: BaseProcess, said: Connection, dump: Path, limits: Limits | None, name: str, hear: Tell
) -> Any:
    began = time.monotonic()
    while True:
        code = process.exitcode  # before all that it said is read
        received: tuple[str, Any] = "", None
        try:
            if said.poll(_POLL_S if code is None else 0):
                received = said.recv()
        except (EOFError, OSError):
            process.join(_GRACE_S)
            code = process.exitcode
        kind, content = received
        if kind == "answer":
            return content
        if kind == "report":
            hear(content)
            continue
        if kind:
            failed = OutOfMemoryError if kind == "out of memory" else ProtrainError
            raise failed(content.pop("message"), **content)
        if code is not None:
            if code >= 0:
                raise EndedError(f"{name} ended with exit code {code}", code=code)
            died = f"signal {-code}"
            if -code in set(signal.Signals):
                died = f"{signal.Signals(-code).name} ({str(signal.strsignal(-code)).lower()})"
            raise EndedError(f"{name} died: {died}", user_frame_in(dump), code=code)
        if limits is not None and time.monotonic() - began > limits.seconds:
            _send(process, signal.SIGABRT)  # it tells where it is
            process.join(_GRACE_S)
            message = f"{name} did not finish within {limits.seconds:g} s"
            raise EndedError(message, user_frame_in(dump), limit="seconds")


def _send(process: BaseProcess, number: signal.Signals) -> None:
    if process.exitcode is None and process.pid:
        with suppress(OSError):
            os.kill(process.pid, number)


# --- the other side -------------------------------------------------------------------------------


def _work(
    work: Work, said: Connection, dump: str, limits: Limits | None, environment: dict[str, str]
) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    stack = Path(dump).open("wb")  # noqa: SIM115  (as long as the process lives)
    faulthandler.enable(stack, all_threads=False)
    if limits is not None:
        # A process group without input and output, with so much memory for each process: the data
        # segment is limited, not the address space, which drivers reserve by the gigabyte.
        os.setsid()
        with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
            for descriptor in range(3):
                os.dup2(nothing.fileno(), descriptor)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = limits.memory if hard == resource.RLIM_INFINITY else min(limits.memory, hard)
        with suppress(ValueError, OSError):  # a system may not have this one
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    elif signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        said.send(("answer", work(lambda facts: said.send(("report", facts)))))
    except ProtrainError as error:
        # Its own class may not be known on the other side, and would import PyTorch there.
        kind = "out of memory" if error.exit_code == OutOfMemoryError.exit_code else "failed"
        parts = ("message", "source", "line", "key", "fix")
        said.send((kind, {part: getattr(error, part) for part in parts}))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _interrupt(*_: object) -> None:
    """Clean up at the first Ctrl-C; a second one would cut that short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
