"""Run work in a process of its own: `run(work)` gives its answer, or one error.

    run ---- pickled work ----> a fresh process, or one that a `Server` forks
     ^                                     |
     +---- progress, answer: JSON ---------+

All goes through files without names. A fresh process has this one's terminal, environment and
libraries, and none of its memory. A forked one is for code that nobody has read. The server imports
PyTorch once and runs no such code; its processes have nothing of each other's, no terminal, no
output, of the environment what computing needs, and limits on memory and time. This is no sandbox:
such code can do to files what the user can. What it says is to be read as strictly as any file.

[Note: what is left] Such code leaves no processes behind: see `contained`. The server adopts all
below it, and says that the last work has ended when no process is left. Where the system has
neither namespaces nor a way to forbid processes, that may never be, or not be seen.
"""

import faulthandler
import importlib
import json
import os
import pickle
import re
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import IO, Any, NoReturn, Self

from protrain_plan.isolated.containment import (
    INTERRUPTED,
    adopt_orphans,
    contained,
    end_with,
)
from protrain_plan.isolated.culprit import culprit_in, culprit_of
from protrain_runtime.contract.errors import OutOfMemoryError, ProtrainError
from protrain_runtime.contract.units import format_bytes

_POLL_S = 0.05
_LOOK_S = 0.25
"""How often to look at what a process takes."""
_GRACE_S = 5.0
"""For an interrupted process to end by itself, and for the system to end a killed one."""
_MAX_MESSAGE = 4 * 2**20
_MAX_REASON = 1000
_MAX_PROCESSES = 512

_ENVIRONMENT = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONHOME|PYTHONHASHSEED|PYTHONUTF8|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV"
    r"|CONDA_PREFIX|LANG|LANGUAGE|LC_[A-Z]+|TZ|TERM|TMPDIR|USER|LOGNAME|SHELL|SYSTEMROOT"
    r"|((OMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS|ATEN|BLIS|NUMEXPR|GOMP)_[A-Z0-9_]+)"
    r"|(CUDA|HIP|ROCR)_(VISIBLE_DEVICES|HOME|PATH)|CUBLAS_WORKSPACE_CONFIG|BNB_CUDA_VERSION"
    r"|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|TORCH_(CPP_LOG_LEVEL|DEVICE_BACKEND_AUTOLOAD|HOME)"
    r"|HF_(HUB_CACHE|HUB_OFFLINE|DATASETS_OFFLINE)|TRANSFORMERS_(OFFLINE|VERBOSITY)"
    r"|TOKENIZERS_PARALLELISM|MALLOC_[A-Z_]+|PROTRAIN_MODEL_PATH"
)
"""Names in the environment that a model's code needs to compute, and to find what is installed.
All others may be what a job keeps there: tokens, addresses with passwords, files that tell the next
step what to do."""

# A first Ctrl-C ends the process silently, as long as it has nothing to clean up.
_BOOTSTRAP = """
import json, signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:] = json.loads(sys.argv.pop(1))
from protrain_plan.isolated import process
getattr(process, sys.argv.pop(1))(*map(int, sys.argv[1:]))
"""

Tell = Callable[[Any], None]
"""Says something on the way; it arrives as `json` reads it."""
Work = Callable[[Tell], Any]
"""Work: it can be pickled, and its answer is JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a forked process, with all that it starts."""

    seconds: float
    memory: int


class EndedError(ProtrainError):
    """The work raised what is no ProtrainError, or its process ended without an answer.

    `code` is the exit code (minus the signal), `limit` names the one of `Limits` that was exceeded;
    `raised` says that the process is not at fault. `source` and `line` are of the user's files.
    """

    def __init__(
        self,
        message: str,
        place: tuple[str | None, int | None] = (None, None),
        *,
        code: int | None = None,
        limit: str = "",
        raised: bool = False,
    ) -> None:
        super().__init__(message, source=place[0], line=place[1])
        self.code, self.limit, self.raised = code, limit, raised


class LeftError(ProtrainError):
    """Processes that a process started do not end. See [Note: what is left]."""


def run(
    work: Work,
    *,
    server: "Server | None" = None,
    imports: Iterable[str] = (),
    name: str = "its process",
    hear: Tell = lambda _: None,
) -> Any:
    """The answer of work that is done in a fresh process, or one that the server forks.

    The server imports what is there of `imports` first. What the work tells is `hear`d; ValueError
    there refuses it. Raises the ProtrainError that the work raises, EndedError and LeftError.
    """
    limits = server.limits if server else None
    with ExitStack() as files:
        ends = [files.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        pickle.dump((sys.argv, work), ends[0])
        ends[0].seek(0)
        process: Popen[bytes] | _Forked
        if server is None:
            process = _started("work", *ends)
        else:
            process = files.enter_context(server.fork(ends, imports))
        try:
            return _followed(process, ends[1], ends[2], limits, name, hear)
        except BaseException as error:
            if server is None and not isinstance(error, ProtrainError):
                process.send_signal(signal.SIGINT)  # as a terminal does
            raise
        finally:
            if server is not None or not _ends(process, _GRACE_S):
                process.kill()
            if not _ends(process, 2 * _GRACE_S) and server is not None:
                server.stop()
                raise LeftError("processes of a model's code do not end", fix="run none of it")


def _followed(
    process: "Popen[bytes] | _Forked",
    said: IO[bytes],
    dump: IO[bytes],
    limits: Limits | None,
    name: str,
    hear: Tell,
) -> Any:
    read, looked, began = 0, 0.0, time.monotonic()
    while True:
        code = process.poll()  # before all that it said is read
        text = os.pread(said.fileno(), _MAX_MESSAGE, read)
        *lines, rest = text.split(b"\n")
        read += len(text) - len(rest)
        try:
            for line in lines:
                match json.loads(line):
                    case {"told": told}:
                        hear(told)
                    case {"answer": answer}:
                        return answer
                    case {"failed": [str(kind), str(message), *parts, number]}:
                        source, key, fix = (part and str(part) for part in parts)
                        at = number if isinstance(number, int) else None
                        if kind == "raised":
                            raise EndedError(message, (source, at), raised=True)
                        failed = OutOfMemoryError if kind == "memory" else ProtrainError
                        raise failed(message, source=source, line=at, key=key, fix=fix)
                    case _:
                        raise ValueError
            if len(rest) == _MAX_MESSAGE:
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise EndedError(f"{name} answers in place of protrain") from None
        if code is not None and not (limits and -code in (signal.SIGXCPU, signal.SIGALRM)):
            raise _death(code, name, dump)
        now = time.monotonic()
        if limits is not None and (code is not None or now - began > limits.seconds):
            process.send_signal(signal.SIGABRT)  # it tells where it is; a second one would cut that
            _ends(process, _GRACE_S)
            message = f"{name} was not done after {limits.seconds:g} s"
            raise EndedError(message, _place(dump), limit="seconds")
        if limits is not None and now - looked > _LOOK_S:
            processes, looked = [process.pid, *_descendants(process.pid)], now
            if len(processes) > _MAX_PROCESSES:
                raise EndedError(f"{name} started more than {_MAX_PROCESSES} processes")
            if sum(map(_memory_of, processes)) > limits.memory:
                message = f"{name} took more than {format_bytes(limits.memory)} of memory"
                raise EndedError(message, limit="memory")
        if not lines:
            _ends(process, _POLL_S)


def _death(code: int, name: str, dump: IO[bytes]) -> EndedError:
    if code >= 0:
        return EndedError(f"{name} ended with exit code {code}", code=code)
    signal_name = f"signal {-code}"
    if -code in set(signal.Signals):
        signal_name = f"{signal.Signals(-code).name} ({str(signal.strsignal(-code)).lower()})"
    return EndedError(f"{name} died: {signal_name}", _place(dump), code=code)


def _place(dump: IO[bytes]) -> tuple[str | None, int | None]:
    return culprit_in(os.pread(dump.fileno(), 2**16, 0).decode(errors="replace"))


def _ends(process: "Popen[bytes] | _Forked", seconds: float) -> bool:
    """Whether the process ends within the time."""
    until = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > until:
            return False
        time.sleep(min(seconds, 0.02))
    return True


# --- processes, from here -------------------------------------------------------------------------


def _started(function: str, *files: Any, **options: Any) -> Popen[bytes]:
    """A new Python that calls a function of this module with this process and descriptors."""
    ends = [file.fileno() for file in files]
    python = (sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions))
    path = json.dumps([folder for folder in sys.path if folder])
    arguments = (path, function, *map(str, (os.getpid(), *ends)))
    return Popen([*python, "-c", _BOOTSTRAP, *arguments], pass_fds=ends, **options)


class Server:
    """Forks processes with limits that have imported PyTorch, for as long as the block lasts.

    Several threads may run work by it. `containments` are what held its processes.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.containments: set[str] = set()
        self._process: Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._home.cleanup()

    def start(self) -> Popen[bytes]:
        """Let it be there; from a thread that lives longer, for the system ends it with that."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._control, theirs = socket.socketpair()
            options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), DEVNULL)
            with theirs:  # a session of its own: no terminal, and no Ctrl-C but through its parent
                self._process = _started(
                    *("serve", theirs), env=self._environment(), start_new_session=True, **options
                )
        return self._process

    def stop(self) -> None:
        """End it, and with it what it forked."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._control.close()

    def fork(self, ends: Sequence[IO[bytes]], imports: Iterable[str]) -> "_Forked":
        """A new process, with files for its work, what it says, and Python's stack.

        How it ends comes through a socket: such code may open files of processes outside.
        """
        request = json.dumps({"imports": list(imports), "limits": asdict(self.limits)})
        ours, theirs = socket.socketpair()
        forked = _Forked(ours)
        with self._lock, theirs:
            self.start()
            files = [*(end.fileno() for end in ends), theirs.fileno()]
            with suppress(OSError):  # it may have ended: then nothing comes
                socket.send_fds(self._control, [request.encode()], files)
            theirs.close()
            while not _ends(forked, 0) and not forked.pid:
                time.sleep(0.01)
        if forked.pid:
            self.containments.add(forked.containment)
        return forked

    def _environment(self) -> Mapping[str, str]:
        """The variables of the environment that code has, and where caches without tokens are."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        hub = Path(os.environ.get("HF_HOME") or caches / "huggingface")
        needed = {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
        found = {"HF_HUB_CACHE": str(hub / "hub"), "TORCH_HOME": str(caches / "torch")}
        return found | needed | {"HOME": self._home.name}


class _Forked:
    """A process of the server's; as much of `Popen` as is asked of it."""

    def __init__(self, status: socket.socket) -> None:
        self._status, self._told = status, b""
        self.pid, self.containment = 0, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._status.close()

    def poll(self) -> int | None:
        # It tells who it is and what holds it before it runs any work; the server tells its code.
        is_lost = False
        while not is_lost and select.select([self._status], [], [], 0)[0]:
            more = self._status.recv(99)
            self._told, is_lost = self._told + more, not more
        told, _, code = self._told.decode().partition("\n")
        if told:
            pid, self.containment = told.split(maxsplit=1)
            self.pid = int(pid)
        if code:
            return int(code)
        return -signal.SIGKILL if is_lost else None  # the server is gone, and took all along

    def send_signal(self, number: int) -> None:
        self._send(os.kill, number)

    def kill(self) -> None:
        self._send(os.kill, signal.SIGKILL)
        self._send(os.killpg, signal.SIGKILL)

    def _send(self, send: Callable[[int, int], None], number: int) -> None:
        self.poll()
        if self.pid and b"\n" not in self._told:  # where the server is lost, it may live
            with suppress(OSError):
                send(self.pid, number)


def _descendants(root: int) -> list[int]:
    """All living processes below this one; none where the system has no /proc."""
    below: dict[int, list[int]] = {}
    with suppress(OSError):
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                pid = int(folder.name)
                # Bytes: a process may give itself a name that is no text.
                told = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if told[0] not in (b"Z", b"X"):
                    below.setdefault(int(told[1]), []).append(pid)
    found, waiting = list[int](), [root]
    while waiting:
        children = below.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _memory_of(pid: int) -> int:
    """The bytes that a process holds, those that it shares in equal parts."""
    with suppress(OSError):
        told = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", told, re.MULTILINE)))
    return 0


# --- the other side -------------------------------------------------------------------------------


def work(parent: int, asked: int, said: int, dump: int) -> None:
    """Do the work of a fresh process."""
    end_with(parent)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        _answer(asked, said, dump, (Exception, SystemExit))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _interrupt(*_: object) -> None:
    """Let the first Ctrl-C clean up; a second one would cut that short."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def serve(parent: int, end: int) -> None:
    """Fork a process for each request, and tell how it ends. See [Note: what is left]."""
    end_with(parent)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as code expects it
    control = socket.socket(fileno=end)
    running: dict[int, int] = {}  # where to tell of each
    codes: dict[int, int] = {}
    while True:
        some_are_left = True
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in running:
                    codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:  # of what they started neither
            some_are_left = False
        if not some_are_left or len(codes) < len(running):
            for pid, code in codes.items():
                with suppress(OSError):  # nobody may ask any more
                    os.write(running[pid], f"\n{code}".encode())
                os.close(running.pop(pid))
            codes.clear()
        if not select.select([control], [], [], 0.02 if running else None)[0]:
            continue
        content, descriptors, _, _ = socket.recv_fds(control, 2**16, 4)
        if not content:
            os._exit(0)
        request = json.loads(content)
        for name in request["imports"]:
            with suppress(Exception):  # the work itself says what is wrong with one that it needs
                importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            control.close()
            for other in running.values():
                os.close(other)
            _forked(Limits(**request["limits"]), *descriptors)
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        running[pid] = descriptors[3]


def _forked(limits: Limits, asked: int, said: int, dump: int, status: int) -> NoReturn:
    try:
        pid, server = os.getpid(), os.getppid()
        os.setsid()  # a signal to its group is one to itself
        end_with(server)
        _limit(limits)
        os.write(status, f"{pid} {contained()}".encode())
        os.close(status)
        _answer(asked, said, dump, (BaseException,))
    except BaseException:  # noqa: BLE001  (nothing goes on after it)
        os._exit(1)
    os._exit(0)


def _limit(limits: Limits) -> None:
    """Let the system refuse what is above the limits, in every process that comes of this one."""
    seconds = limits.seconds * (os.cpu_count() or 1)
    for limit, most in (
        (resource.RLIMIT_DATA, limits.memory),
        (resource.RLIMIT_FSIZE, limits.memory),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # a system may not have this one
            resource.setrlimit(limit, (most, most))
    with suppress(OSError):  # where memory runs out all the same, this process is the first to go
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer(asked: int, said: int, dump: int, caught: tuple[type[BaseException], ...]) -> None:
    """Do the work, and say its answer or its error."""
    faulthandler.enable(dump, all_threads=False)
    with open(asked, "rb") as file:
        sys.argv[:], todo = pickle.load(file)  # noqa: S301  (of the process that started this one)

    def say(**message: Any) -> None:
        os.write(said, f"{json.dumps(message)}\n".encode())

    try:
        say(answer=todo(lambda told: say(told=told)))
    except ProtrainError as error:
        # Its own class may not be known on the other side, and would import PyTorch there.
        kind = "memory" if error.exit_code == OutOfMemoryError.exit_code else "refused"
        say(failed=[kind, error.message, error.source, error.key, error.fix, error.line])
    except caught as error:
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            words = f"its code ended the program: sys.exit({error.code!r})"
        source, number = culprit_of(error)
        say(failed=["raised", words[:_MAX_REASON], source, None, None, number])
