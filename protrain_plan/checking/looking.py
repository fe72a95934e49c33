"""The model as its source is today: what it is, and what it costs by an estimate without a device.

Nobody has read its code: each model is looked at in a process of its own, with limits.

    check ---- which model ----> server (PyTorch is imported, no model's code runs)
      |                            | forks
      +---- records, as text ----> the model's process

PyTorch is imported when a model is looked at, and not before. That takes longer than most models
do, so that one process does it for all of them. A model's process has nothing of the others', no
terminal, no output, of the environment what computing needs, a limit on its memory and one on its
time. What comes back is data, which is read as strictly as any file. The model's code says what the
model is: it can lie about that, and about nothing else.

This is no sandbox: a model's code can do to files what the user can. All records were read before
it runs.

[Note: what is left] A model's code leaves no processes behind: see `contained`. The server adopts
all below it, and says that a model has ended when none is left. Where the system has neither
namespaces nor a way to forbid processes, that may never be, or not be seen: the check says so.
"""

import faulthandler
import importlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Self, get_args

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.importing import models_path
from protrain_plan.models.model_code import (
    Containment,
    adopt_orphans,
    contained,
    culprit_in,
    culprit_of,
    end_with,
)
from protrain_plan.models.presets import parse_config, preset_names, read_config
from protrain_plan.profiling.estimate_cache import EstimateCache, EstimateRequest, processes_at_once
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records import (
    dumps_hardware,
    dumps_profile,
    loads_hardware,
    loads_profile,
)
from protrain_runtime.contract.records.files import leads_out, refuse_outside
from protrain_runtime.contract.records.hardware import Hardware, is_accelerator
from protrain_runtime.contract.records.profile import Profile, Workload
from protrain_runtime.contract.units import format_bytes

_POLL_S = 0.25
_GRACE_S = 10.0
"""For what takes no time, unless somebody prevents it."""
_START_S = 600.0
"""For importing PyTorch, from a slow disk."""
_MAX_ANSWER = 4 * 2**20
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

_SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from protrain_plan.checking.looking import serve
serve(int(sys.argv[1]), int(sys.argv[2]))
"""

_NEEDED = ("protrain_plan.profiling.estimated", "protrain_plan.models.sources")
_OF_CONFIGURATIONS = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")
_OF_ADAPTERS = ("peft",)
_OF_QUANTISED = ("bitsandbytes",)

Message = dict[str, Any]

_MEND = "mend the model, or its configuration"
_SUBSTITUTES = {False: "cpu", True: "h100-sxm"}
"""Machines of the catalogue that lend their rates to one whose own are not known, by whether it has
an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Why a model, or an estimate of it, cannot be had here: something is not installed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Why a model whose source is here cannot be built from it, or not be estimated."""

    reason: str
    fix: str = _MEND


Estimate = Profile | Broken | Unavailable


@dataclass(frozen=True, kw_only=True)
class Today:
    """A workload's model, built from its source as that is now.

    `changed_keys` are those of the configuration that differ from the profiled one.
    """

    model_fingerprint: str
    changed_keys: tuple[str, ...]
    estimate: Callable[[Hardware], Estimate] = field(repr=False)
    _profiles: dict[Hardware, Estimate] = field(default_factory=dict, repr=False)

    def profile(self, hardware: Hardware) -> Estimate:
        """The estimate for a machine, made once."""
        if hardware not in self._profiles:
            self._profiles[hardware] = self.estimate(hardware)
        return self._profiles[hardware]


Look = Callable[[Profile], Today | Broken | Unavailable]


def look_away(profile: Profile) -> Unavailable:  # noqa: ARG001 (the signature of `look`)
    """No model is looked at: the records alone are checked."""
    return Unavailable(reason="models are not looked at (--records-only)")


def not_estimated(reason: str, profile: Profile, *, refused: bool, unknown: bool) -> Estimate:
    """What it means that there is no estimate.

    A model that was measured may be one that cannot be estimated, and says so (`refused`); one that
    was estimated can be again, on every machine that is not `unknown`.
    """
    reason = f"no estimate: {reason}"
    if unknown or (refused and profile.method == "measured"):
        return Unavailable(reason=reason)
    return Broken(reason=reason)


def unknown(hardware: Hardware) -> str | None:
    """Why nothing can be estimated for a machine from here, whatever the model."""
    from protrain_plan.profiling.estimated import refuse_unknown

    try:
        refuse_unknown(hardware)
    except ProtrainError as error:
        return error.message
    return None


class Rebuilt:
    """A profiled model, built from its source as that is now: this runs its code.

    Without weights where its kind allows that. A preset and a configuration's file are read anew;
    where the file is gone, the configuration in the record is built with today's code; with
    `config`, as JSON, that one is. Paths and modules count from the working directory. Raises what
    the model's code raises.
    """

    def __init__(self, profile: Profile, config: str | None = None) -> None:
        from protrain_plan.models.sources import load_source
        from protrain_runtime.diagnostics.matching import model_fingerprint

        workload = profile.workload
        if config is None:
            config = "" if _is_here(workload.model) else workload.model_config
        self._profile = profile
        self._source = load_source(workload.model, model_config=config)
        model = self._source.build(
            dtype=workload.dtype,
            device="meta",
            seed=workload.seed,
            precision=workload.precision,
            adapter=workload.adapter,
            quantize=workload.quantize,
        )
        self.fingerprint = model_fingerprint(model)
        self.changed_keys = changed_keys(workload.model_config, self._source.model_config)

    def estimate(self, hardware: Hardware) -> Profile:
        """What the model costs on a machine."""
        from protrain_plan.profiling.estimated import estimate

        workload = self._profile.workload
        # Bytes do not depend on rates: those of any machine do where its own are not known.
        rates = (
            hardware.rates
            or load_hardware(_SUBSTITUTES[is_accelerator(hardware.device.kind)]).rates
        )
        found = estimate(
            self._source,
            batch_size=workload.batch_size,
            seq_len=workload.seq_len,
            dtype=workload.dtype,
            precision=workload.precision,
            adapter=workload.adapter,
            quantize=workload.quantize,
            compile=workload.compile,
            optimizer=self._profile.optimizer.name,
            allow=self._profile.allowed,
            hardware=replace(hardware, rates=rates),
            seed=workload.seed,
        )
        return replace(found, hardware=hardware)


def changed_keys(recorded: str, now: str) -> tuple[str, ...]:
    """The keys in which two configurations, as JSON, differ."""
    if recorded == now:
        return ()
    before, after = (json.loads(text) if text else {} for text in (recorded, now))
    keys = {**before, **after}
    return tuple(key for key in keys if before.get(key) != after.get(key))


def missing(workload: Workload) -> str | None:
    """What is not there of what the model is built with, in words. Imports nothing of it."""
    name = workload.model
    if find_spec("torch") is None:
        return "torch is not installed"
    if not workload.model_config:  # a factory's
        module = name.rpartition(":")[0]
        if module.endswith(".py"):
            return None if Path(module).is_file() else f"{name}: there is no such file here"
        package = module.partition(".")[0]
        if PathFinder.find_spec(package, [str(Path.cwd()), *models_path(), *sys.path]) is None:
            return f"{name}: there is no module {package!r} here"
    elif find_spec("transformers") is None:
        return "transformers is not installed"
    return None


def _is_here(name: str) -> bool:
    """Whether the configuration called so can be read anew; factories have none.

    A file that is not the repository's is nobody's to change: what was recorded counts.
    """
    return name in preset_names() or (os.path.exists(name) and leads_out(name) is None)  # noqa: PTH110


def said(error: BaseException) -> str:
    """What an error says, on one line and without the fix."""
    if not isinstance(error, ProtrainError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return " ".join(str(ProtrainError(error.message, source=error.source, key=error.key)).split())


# --- looking at it, from here ---------------------------------------------------------------------


class Looking:
    """A `Look` from here at processes of their own, as long as it is `open`.

    Each may take so many seconds, and so many bytes of memory. What was answered before is taken
    from the cache, as long as no code has run that is not the installed libraries'.
    """

    def __init__(self, *, seconds: float, memory: int, cache: EstimateCache) -> None:
        self._seconds, self._memory, self._cache = seconds, memory, cache
        self._fingerprints: dict[EstimateRequest, str | Broken] = {}
        self._estimates: dict[tuple[EstimateRequest, Hardware], Estimate] = {}
        self.containments: set[Containment] = set()  # of the models' processes

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Models are looked at inside; what their processes leave behind ends with it."""
        with ExitStack() as ending:
            home = ending.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            self._home = home
            self._bench = self._new_bench()
            ending.callback(self._bench.stop)
            ending.callback(self._bench.end)
            yield self

    def __call__(self, profile: Profile) -> Today | Broken | Unavailable:
        if (reason := missing(profile.workload)) is not None:
            return Unavailable(reason=reason)
        try:
            question = _question(profile)
        except ProtrainError as error:
            return Broken(reason=_shown(said(error)))
        if question is None:
            self._cache.close()
            model = self._bench.begin(profile)
            if isinstance(model, Broken):
                return model
            return Today(
                model_fingerprint=model.fingerprint,
                changed_keys=model.changed_keys,
                estimate=lambda hardware: model.estimate(profile, hardware),
            )
        fingerprint = self._fingerprint(question, profile, self._bench)
        if isinstance(fingerprint, Broken):
            return fingerprint
        return Today(
            model_fingerprint=fingerprint,
            changed_keys=changed_keys(profile.workload.model_config, question.config),
            estimate=lambda hardware: self._estimate(question, profile, hardware, self._bench),
        )

    def prepare(self, profiles: Iterable[Profile], progress: Callable[[str, float], None]) -> None:
        """Look at models whose code is the libraries' alone, several at once, and before others'.

        Each question is asked once. What is found waits for the calls.
        """
        asked: dict[EstimateRequest, list[Profile]] = {}
        for profile in profiles:
            with suppress(ProtrainError):  # told when it is looked at
                if missing(profile.workload) is None and (question := _question(profile)):
                    asked.setdefault(question, []).append(profile)
        if not asked:
            return
        benches = [self._new_bench() for _ in range(processes_at_once(len(asked)))]
        free = SimpleQueue[_Bench]()
        for bench in benches:
            free.put(bench)

        def look(question: EstimateRequest) -> None:
            bench = free.get()
            try:
                for profile in asked[question]:
                    # What the rules are going to ask: the estimate only if they need one.
                    fingerprint = self._fingerprint(question, profile, bench)
                    if isinstance(fingerprint, str) and (
                        profile.method == "estimated"
                        or fingerprint != profile.model_fingerprint
                        or changed_keys(profile.workload.model_config, question.config)
                    ):
                        self._estimate(question, profile, profile.hardware, bench)
            finally:
                bench.end()
                free.put(bench)

        with ThreadPoolExecutor(len(benches)) as pool:
            try:
                for number, _ in enumerate(pool.map(look, asked)):
                    progress("looking at models", number / len(asked))
            finally:  # where this was interrupted, threads wait for what does not come any more
                pool.shutdown(wait=False, cancel_futures=True)
                for bench in benches:
                    bench.stop()

    def _new_bench(self) -> "_Bench":
        return _Bench(self._seconds, self._memory, self._home, self.containments)

    def _fingerprint(
        self, question: EstimateRequest, profile: Profile, bench: "_Bench"
    ) -> str | Broken:
        found = self._fingerprints.get(question) or self._cache.fingerprint(question)
        if found is None:
            model = bench.begin(profile, question)
            found = model if isinstance(model, Broken) else model.fingerprint
            if isinstance(found, str):
                self._cache.keep_fingerprint(question, found)
        self._fingerprints[question] = found
        return found

    def _estimate(
        self, question: EstimateRequest, profile: Profile, hardware: Hardware, bench: "_Bench"
    ) -> Estimate:
        found = self._estimates.get((question, hardware)) or self._cache.profile(question, hardware)
        if found is None:
            model = bench.begin(profile, question)
            found = model if isinstance(model, Broken) else model.estimate(profile, hardware)
            if isinstance(found, Profile):
                self._cache.keep_profile(question, found)
        self._estimates[question, hardware] = found
        return found


def _question(profile: Profile) -> EstimateRequest | None:
    """What a check asks of a model whose code is the libraries' alone; None of others.

    ProtrainError where a file holds no configuration.
    """
    workload = profile.workload
    if _is_here(workload.model) or not workload.model_config:
        if workload.model not in preset_names():
            refuse_outside(workload.model.partition(":")[0])
        config = read_config(workload.model)
    else:
        config = parse_config(workload.model_config, where=workload.model)
    return EstimateRequest.of(workload, profile.optimizer.name, config, profile.allowed)


_NO_ANSWER = Broken(reason="its code answers in place of protrain")


def _shown(text: str) -> str:
    """A text of the model's as a part of one line of ours."""
    one_line = " ".join(text.split())
    printable = "".join(c if c.isprintable() else "?" for c in one_line)
    return printable if len(printable) <= _MAX_REASON else f"{printable[:_MAX_REASON]}..."


# --- messages -------------------------------------------------------------------------------------


class _Line:
    """A socket through which JSON objects go, one a line."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._received = b""

    def send(self, message: Message, *, seconds: float | None = None) -> None:
        """OSError where the other side is gone, or does not read for so long."""
        self.end.settimeout(seconds)
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> Message | None:
        """The next message, None where there is none within the time.

        EOFError where there will be none, ValueError where something else comes than messages.
        """
        while b"\n" not in self._received:
            if len(self._received) > _MAX_ANSWER:
                raise ValueError
            if not select.select([self.end], [], [], seconds)[0]:
                return None
            try:
                more = self.end.recv(2**16)
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except RecursionError:
            raise ValueError from None
        if not isinstance(message, dict):
            raise ValueError
        return message


# --- the server, from here ------------------------------------------------------------------------


class _Bench:
    """The server, which forks the models' processes, and the model that it has: for one thread.

    `home` is an empty folder for the code's own; `containments` are noted.
    """

    def __init__(
        self, seconds: float, memory: int, home: str, containments: set[Containment]
    ) -> None:
        self.seconds, self.memory, self._home = seconds, memory, home
        self.containments = containments
        self.ended: int | None = None  # how the model's process did
        self._server: subprocess.Popen[bytes] | None = None
        self._model: _Model | None = None
        self._question: EstimateRequest | None = None

    def begin(self, profile: Profile, question: EstimateRequest | None = None) -> "_Model | Broken":
        """The model of a profile, built in a process of its own; what was there before ends.

        A model that was begun for the same question goes on. Broken where what it needs cannot be
        imported, or it cannot be built.
        """
        if question is not None and question == self._question and self._model is not None:
            return self._model
        self.end()
        if not self._is_alive():
            self._start()
        # What to import before the model's code: nothing of it, and the same for many models.
        workload = profile.workload
        configured = _OF_CONFIGURATIONS if workload.model_config else ()
        modules = [*_NEEDED, *configured, *(_OF_ADAPTERS if workload.adapter else ())]
        modules += _OF_QUANTISED if workload.quantize else ()
        ours, theirs = socket.socketpair()
        dump = tempfile.TemporaryFile()  # noqa: SIM115  (the model's, as long as it lives)
        request = {"modules": modules, "seconds": self.seconds, "memory": self.memory}
        try:
            with theirs:
                content = json.dumps(request).encode()
                socket.send_fds(self._line.end, [content], [theirs.fileno(), dump.fileno()])
            self.ended = None
            answer = self._line.receive(_START_S) or {"failed": "nothing happens"}
        except (OSError, EOFError, ValueError):
            answer = {"failed": "the process for models cannot start"}
        match answer:
            case {"pid": int(pid)}:
                self._model, self._question = _Model(self, pid, _Line(ours), dump), question
            case _:
                ours.close()
                dump.close()
                self.stop()
                fix = "protrain profile tells more"
                return Broken(reason=_shown(str(answer.get("failed"))), fix=fix)
        built = self._model.build(profile, None if question is None else question.config)
        if isinstance(built, Broken):
            self._question = None
        return built

    def end(self) -> None:
        """End the last model's process, and all that it left behind. See [Note: what is left]."""
        if self._model is not None:
            model, self._model = self._model, None
            model.end()

    def unknown(self, hardware: Hardware) -> bool:
        """Whether nothing can be estimated for the machine from here: not for the model to say."""
        try:
            self._line.send({"hardware": dumps_hardware(hardware)}, seconds=_GRACE_S)
            while (told := self._line.receive(_GRACE_S)) is not None:
                if "unknown" in told:
                    return bool(told["unknown"])
                self.ended = told.get("ended")
        except (OSError, EOFError, ValueError):
            pass
        return False

    def hear(self, seconds: float) -> bool:
        """Wait for the end of the model's process, and tell whether it is there."""
        with suppress(OSError, EOFError, ValueError):
            while self.ended is None and (told := self._line.receive(seconds)) is not None:
                self.ended = told.get("ended")
        return self.ended is not None or not self._is_alive()

    def processes(self) -> list[int]:
        """The model's, as far as the system tells."""
        assert self._server is not None
        return _descendants(self._server.pid)

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._line.end.close()

    def _is_alive(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            path = json.dumps([folder for folder in sys.path if folder])
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER, path, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment(),
                start_new_session=True,  # no terminal, and no Ctrl-C but through its parent
            )
        self._line = _Line(ours)

    def _environment(self) -> dict[str, str]:
        """What the models' code has of the environment, and where caches without tokens are."""
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        hub = Path(os.environ.get("HF_HOME") or caches / "huggingface")
        needed = {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
        found = {"HF_HUB_CACHE": str(hub / "hub"), "TORCH_HOME": str(caches / "torch")}
        return found | needed | {"HOME": self._home}


class _Model:
    def __init__(self, bench: _Bench, pid: int, line: _Line, dump: IO[bytes]) -> None:
        self._bench, self._memory = bench, bench.memory
        self._pid, self._line, self._dump = pid, line, dump
        self._left = bench.seconds
        self._broken: Broken | None = None

    def build(self, profile: Profile, config: str | None) -> "_Model | Broken":
        """Let the model be built, of the configuration if one is given: this, or why it is not."""
        answer = self._ask({"profile": dumps_profile(profile), "argv": sys.argv, "config": config})
        if isinstance(answer, dict) and answer.get("contained") in get_args(Containment):
            self._contained: Containment = answer["contained"]  # before any code of the model's
            self._bench.containments.add(self._contained)
            answer = self._ask({})
        match answer:
            case Broken():
                return answer
            case {"fingerprint": str(fingerprint), "changed": list(changed)}:
                self.fingerprint = _shown(fingerprint)
                self.changed_keys = tuple(_shown(str(key)) for key in changed)
                return self
            case {"failed": str(reason)}:
                return Broken(reason=_shown(reason), fix=self._fix(reason))
            case _:
                return _NO_ANSWER

    def estimate(self, profile: Profile, hardware: Hardware) -> Estimate:
        """What the model says that it costs on a machine."""
        answer = self._ask({"hardware": dumps_hardware(hardware)})
        match answer:
            case Broken():
                return answer
            case {"profile": str(text)}:
                try:
                    found = loads_profile(text)
                except RecordError as error:
                    return Broken(reason=f"its estimate is no profile: {_shown(said(error))}")
                return replace(found, hardware=hardware, method="estimated")
            case {"failed": str(reason), "refused": bool(refused)}:
                found_none = not_estimated(
                    _shown(reason), profile, refused=refused, unknown=self._bench.unknown(hardware)
                )
                if isinstance(found_none, Broken):
                    return replace(found_none, fix=self._fix(reason))
                return found_none
            case _:
                return _NO_ANSWER

    def _fix(self, reason: str) -> str:
        if "MemoryError" in reason or "allocate memory" in reason:
            return f"--model-memory, if it needs more than {format_bytes(self._memory)}"
        if "[Errno 1]" in reason and self._contained == "no processes":
            return "start no process: this system has no namespaces in which those could be held"
        return _MEND

    def _ask(self, message: Message) -> Message | Broken:
        """The answer; Broken, from then on, where the process does not live to give one."""
        if self._broken is None:
            began = time.monotonic()
            try:
                answer = self._answer(message, until=began + self._left)
            except (OSError, ValueError):
                answer = _NO_ANSWER
            self._left -= time.monotonic() - began
            if not isinstance(answer, Broken):
                return answer
            self._broken = answer
            self.end()
        return self._broken

    def _answer(self, message: Message, *, until: float) -> Message | Broken:
        with suppress(ConnectionError):  # it may have died: that is told below
            self._line.send(message, seconds=max(_POLL_S, until - time.monotonic()))
        while True:
            try:
                answer = self._line.receive(_POLL_S)
            except EOFError:
                return self._death()
            if answer is not None:
                return answer
            if self._bench.hear(0):
                # What it said before is still on the line; others may hold the line open.
                with suppress(EOFError):
                    answer = self._line.receive(0)
                return self._death() if answer is None else answer
            if time.monotonic() > until:
                return self._overtime()
            processes = self._bench.processes()
            if len(processes) > _MAX_PROCESSES:
                return Broken(reason=f"its code started more than {_MAX_PROCESSES} processes")
            if _exceeds(processes, self._memory):
                size = format_bytes(self._memory)
                fix = f"--model-memory, if it needs more than {size}"
                return Broken(reason=f"its code took more than {size} of memory", fix=fix)

    def _death(self) -> Broken:
        self._bench.hear(_GRACE_S)
        code = self._bench.ended
        if code is None:
            return Broken(reason="its code ended the process that started it")
        if code >= 0:
            return Broken(reason=f"its code ended the process with exit code {code}")
        if -code in (signal.SIGXCPU, signal.SIGALRM):
            return self._overtime()
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Broken(reason=f"its process died: {name}{self._place()}")

    def _overtime(self) -> Broken:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGABRT)  # tells where it is, if it can
        self._bench.hear(1.0)
        seconds = f"{self._bench.seconds:g} s"
        fix = f"--time-limit, if it needs more than {seconds}"
        return Broken(reason=f"it was not done after {seconds}{self._place()}", fix=fix)

    def _place(self) -> str:
        self._dump.seek(0)
        file, line = culprit_in(self._dump.read(2**16).decode(errors="replace"))
        return "" if file is None else f" (at {_shown(file)}:{line})"

    def end(self) -> None:
        """End the process and what it started; ProtrainError where that does not end.

        See [Note: what is left].
        """
        self._line.end.close()
        for end in (os.kill, os.killpg) if not self._bench.hear(0) else ():
            with suppress(OSError):
                end(self._pid, signal.SIGKILL)
        if not self._bench.hear(_GRACE_S):
            self._bench.stop()
            fix = "--records-only looks at no model"
            raise ProtrainError("processes of a model's code do not end", fix=fix)


# --- processes, as the system tells them ----------------------------------------------------------


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


def _exceeds(processes: list[int], num_bytes: int) -> bool:
    """Whether the processes hold more bytes than that, what they share counted once."""
    # The first sum counts it for each, and costs less to ask for: mostly it is small enough.
    for keys, file in ((("RssAnon:", "RssShmem:"), "status"), (("Pss:",), "smaps_rollup")):
        total = 0
        for pid in processes:
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
                    if line.startswith(keys):
                        total += 1024 * int(line.split()[1])
        if total <= num_bytes:
            return False
    return True


# --- the server, and a model's process ------------------------------------------------------------


def serve(end: int, parent: int) -> None:
    """Fork a process for each model that is asked for, and tell how it ends."""
    end_with(parent)
    adopt_orphans()
    control, model, code = socket.socket(fileno=end), 0, 0
    line = _Line(control)
    while True:
        try:
            while model and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == model:
                    code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:  # none is left, of what it started neither
            model = 0
            line.send({"ended": code})
        if not select.select([control], [], [], 0.02 if model else None)[0]:
            continue
        content, descriptors, _, _ = socket.recv_fds(control, 2**16, 2)
        if not content:
            os._exit(0)
        request = json.loads(content)
        if "hardware" in request:
            line.send({"unknown": unknown(loads_hardware(request["hardware"])) is not None})
            continue
        theirs, dump = descriptors
        problem = None
        for name in request["modules"]:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  (a broken installation may raise anything)
                if name in _NEEDED:
                    problem = said(error)
                    break
        if problem is None:
            model = _fork(control, theirs, dump, request["seconds"], request["memory"])
        line.send({"pid": model} if problem is None else {"failed": problem})
        os.close(theirs)
        os.close(dump)


def _fork(control: socket.socket, end: int, dump: int, seconds: float, memory: int) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        os.setsid()  # a signal to its group is one to itself
        end_with(server)
        _limit(seconds, memory)
        faulthandler.enable(dump, all_threads=False)
        _answer(_Line(socket.socket(fileno=end)))
    except BaseException:  # noqa: BLE001  (nothing goes on after it)
        os._exit(1)
    os._exit(0)


def _limit(seconds: float, memory: int) -> None:
    """Let the system refuse what is above the limits, in every process that comes of this one."""
    processors = os.cpu_count() or 1
    for limit, most in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, memory),
        (resource.RLIMIT_CPU, int(seconds * processors) + 1),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # a system may not have this one
            resource.setrlimit(limit, (most, most))
    with suppress(OSError):  # where memory runs out all the same, this process is the first to go
        Path("/proc/self/oom_score_adj").write_text("1000")


def _answer(line: _Line) -> None:
    """Build the model, then estimate it for machines until nobody asks any more."""
    asked = line.receive()
    assert asked is not None
    line.send({"contained": contained()})
    line.receive()
    sys.argv[:] = asked["argv"]
    profile = loads_profile(asked["profile"])
    try:
        model = Rebuilt(profile, asked["config"])
    except BaseException as error:  # noqa: BLE001  (whatever the model's code raises)
        line.send({"failed": _raised(error)})
        return
    line.send({"fingerprint": model.fingerprint, "changed": list(model.changed_keys)})
    while (asked := line.receive()) is not None:
        try:
            found = dumps_profile(model.estimate(loads_hardware(asked["hardware"])))
        except BaseException as error:  # noqa: BLE001
            line.send({"failed": _raised(error), "refused": isinstance(error, ProtrainError)})
        else:
            line.send({"profile": found})


def _raised(error: BaseException) -> str:
    """What the model's code raised, and where, in at most as many words as are shown."""
    file, number = (None, None) if isinstance(error, ProtrainError) else culprit_of(error)
    place = "" if file is None else f" (at {file}:{number})"
    if isinstance(error, SystemExit):
        return f"its code ended the program: sys.exit({error.code!r:.{_MAX_REASON}}){place}"
    return f"{said(error):.{_MAX_REASON}}{place}"
