"""The model as its source is today: what it is, and what it costs by an estimate without a device.

Nobody has read its code: each model is looked at in a process of its own with limits, which a
server that has PyTorch forks. PyTorch is imported when a model is looked at, and not before. What
comes back is a record as text, which is read as strictly as any file. The model's code says what
the model is: it can lie about that, and about nothing else. All records were read before it runs.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.isolated.pool import processes_at_once
from protrain_plan.isolated.process import EndedError, LeftError, Limits, Server, Tell, run
from protrain_plan.kept import dumped
from protrain_plan.models.importing import models_path
from protrain_plan.models.presets import parse_config, preset_names, read_config
from protrain_plan.profiling.estimate_cache import EstimateCache, EstimateRequest
from protrain_plan.profiling.tally import loads_tally
from protrain_runtime.contract.errors import ProtrainError, RecordError
from protrain_runtime.contract.records.files import leads_out, refuse_outside
from protrain_runtime.contract.records.hardware import Hardware, is_accelerator
from protrain_runtime.contract.records.profile import Profile, Workload
from protrain_runtime.contract.units import format_bytes

_MAX_REASON = 1000
_MEND = "mend the model, or its configuration"
_SUBSTITUTES = {False: "cpu", True: "h100-sxm"}
"""Machines of the catalogue that lend their rates to one whose own are not known, by whether it has
an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Reason why a model, or its estimate, cannot be had here: something is not installed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Reason why a model whose source is here cannot be built or estimated."""

    reason: str
    fix: str = _MEND


Estimate = Profile | Broken | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Today:
    """A workload's model, built from its source as that is now; `profile` estimates it.

    `changed_keys` are those of the configuration that differ from the profiled one.
    """

    model_fingerprint: str
    changed_keys: tuple[str, ...]
    profile: Callable[[Hardware], Estimate] = field(repr=False)


Look = Callable[[Profile], Today | Broken | Unavailable]


def look_away(profile: Profile) -> Unavailable:  # noqa: ARG001 (the signature of `look`)
    """No model is looked at: the records alone are checked."""
    return Unavailable(reason="models are not looked at (--records-only)")


def not_estimated(broken: Broken, profile: Profile, *, refused: bool, unknown: bool) -> Estimate:
    """Return what a missing estimate means.

    A model that was measured may be one that cannot be estimated, and says so (`refused`); one that
    was estimated can be again, on every machine that is not `unknown`.
    """
    reason = f"no estimate: {broken.reason}"
    if unknown or (refused and profile.method == "measured"):
        return Unavailable(reason=reason)
    return replace(broken, reason=reason)


def unknown(hardware: Hardware, _: Tell | None = None) -> bool:
    """Return whether nothing can be estimated for a machine from here."""
    from protrain_plan.profiling.estimated import refuse_unknown

    try:
        refuse_unknown(hardware)
    except ProtrainError:
        return True
    return False


def changed_keys(recorded: str, now: str) -> tuple[str, ...]:
    """The keys in which two configurations, as JSON, differ."""
    if recorded == now:
        return ()
    before, after = (json.loads(text) if text else {} for text in (recorded, now))
    keys = {**before, **after}
    return tuple(key for key in keys if before.get(key) != after.get(key))


def missing(workload: Workload) -> str | None:
    """Say what is missing to build the model. Imports nothing of it."""
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
    """Return whether the configuration called so can be read anew; factories have none.

    A file that is not the repository's is nobody's to change: what was recorded counts.
    """
    return name in preset_names() or (os.path.exists(name) and leads_out(name) is None)  # noqa: PTH110


def said(error: BaseException) -> str:
    """Return an error's words on one line, without the fix."""
    if not isinstance(error, ProtrainError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return " ".join(str(ProtrainError(error.message, source=error.source, key=error.key)).split())


def _is_asked_for(profile: Profile, fingerprint: str, changed: Iterable[str]) -> bool:
    """Return whether rules ask for an estimate of a model that is now this one."""
    changes = fingerprint != profile.model_fingerprint or bool(changed)
    return changes or profile.method == "estimated"


def looked_at(profile: Profile, config: str | None, on: Hardware | None, tell: Tell) -> str | None:
    """Build a profiled model from its source as that is now, and tell what it is.

    The answer is its tally on a machine, or on the profile's if rules ask for one. This runs the
    model's code, and raises what that raises; without weights where its kind allows that. A preset
    and a configuration's file are read anew; where the file is gone, the configuration in the
    record is built with today's code; with `config`, as JSON, that one is. Paths and modules count
    from the working directory.
    """
    from protrain_plan.models.sources import load_source
    from protrain_plan.profiling.estimated import tallies
    from protrain_runtime.diagnostics.matching import model_fingerprint

    workload, machine = profile.workload, on or profile.hardware
    names = ("dtype", "seed", "precision", "adapter", "quantize")
    options: dict[str, Any] = {name: getattr(workload, name) for name in names}
    if config is None:
        config = "" if _is_here(workload.model) else workload.model_config
    source = load_source(workload.model, model_config=config)
    fingerprint = model_fingerprint(source.build(device="meta", **options))
    changed = changed_keys(workload.model_config, source.model_config)
    tell({"fingerprint": fingerprint, "changed": changed})
    if on is None and not _is_asked_for(profile, fingerprint, changed):
        return None
    (found,) = tallies(
        source,
        batch_size=workload.batch_size,
        seq_len=workload.seq_len,
        compile=workload.compile,
        optimizer=profile.optimizer.name,
        allow=profile.allowed,
        machines=[_rated(machine)],
        **options,
    )
    return dumped(found)


def _rated(machine: Hardware) -> Hardware:
    """Bytes do not depend on rates: those of any machine do where its own are not known."""
    substitute = _SUBSTITUTES[is_accelerator(machine.device.kind)]
    return replace(machine, rates=machine.rates or load_hardware(substitute).rates)


# --- looking at it, from here ---------------------------------------------------------------------


@dataclass(slots=True)
class _Known:
    """Answers of a model's process; `broken` is why it says no more."""

    fingerprint: str | None = None
    changed_keys: tuple[str, ...] = ()
    estimates: dict[Hardware, Estimate] = field(default_factory=dict)
    broken: Broken | None = None


class Looking:
    """A `Look` from here at processes of their own, as long as it is `open`.

    Each may take so many seconds, and so many bytes of memory. What was answered before is taken
    from the cache, as long as no code has run that is not the installed libraries'.
    """

    def __init__(self, *, seconds: float, memory: int, cache: EstimateCache) -> None:
        self._cache, self._known = cache, dict[EstimateRequest, _Known]()
        self._server = Server(Limits(seconds=seconds, memory=memory))
        self.containments = self._server.containments

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Models are looked at inside; what their processes leave behind ends with it."""
        with self._server:
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
            known = _Known()
        else:
            known = self._known.setdefault(question, _Known())
            known.fingerprint = known.fingerprint or self._cache.fingerprint(question)
        if known.fingerprint is None and known.broken is None:
            self._look(profile, question, known)
        if known.fingerprint is None:
            assert known.broken is not None
            return known.broken
        return Today(
            model_fingerprint=known.fingerprint,
            changed_keys=known.changed_keys
            if question is None
            else changed_keys(profile.workload.model_config, question.workload.model_config),
            profile=partial(self._profile, profile, question, known),
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

        def look(profiles: Iterable[Profile]) -> None:
            for profile in profiles:
                today = self(profile)
                if isinstance(today, Today) and _is_asked_for(
                    profile, today.model_fingerprint, today.changed_keys
                ):
                    today.profile(profile.hardware)

        self._server.start()
        with ThreadPoolExecutor(processes_at_once(len(asked))) as pool:
            try:
                for number, _ in enumerate(pool.map(look, asked.values())):
                    progress("looking at models", number / len(asked))
            except BaseException:  # threads wait for what does not come any more
                pool.shutdown(wait=False, cancel_futures=True)
                self._server.stop()
                raise

    def _profile(
        self, profile: Profile, question: EstimateRequest | None, known: _Known, on: Hardware
    ) -> Estimate:
        if profile.beside is not None:
            return Unavailable(reason="estimates beside a frozen model are not made again")
        tally = self._cache.tally(question) if question and on not in known.estimates else None
        if tally and tally.profile.workload.device == on.device.kind:
            known.estimates[on] = replace(tally.on(_rated(on)), hardware=on)
        if on not in known.estimates and known.broken is None:
            self._look(profile, question, known, on)
        return known.estimates.get(on) or known.broken or _NO_ANSWER

    def _look(
        self,
        profile: Profile,
        question: EstimateRequest | None,
        known: _Known,
        on: Hardware | None = None,
    ) -> None:
        """Run the model's code, and note what it says."""
        heard, made = False, None

        def hear(told: object) -> None:
            nonlocal heard
            match told:
                case {"fingerprint": str(fingerprint), "changed": list(keys)} if not heard:
                    heard = True
                    known.fingerprint = known.fingerprint or _shown(fingerprint)
                    known.changed_keys = tuple(_shown(str(key)) for key in keys)
                case _:
                    raise ValueError

        machine = on or profile.hardware
        work = partial(
            looked_at, profile, None if question is None else question.workload.model_config, on
        )
        imports = _imported_before(profile.workload)
        try:
            text = run(work, server=self._server, imports=imports, hear=hear)
            if text is not None:
                made = loads_tally(str(text))
                found = replace(made.profile, hardware=machine, method="estimated")
                known.estimates[machine] = found
            elif on is not None or not heard:
                known.broken = _NO_ANSWER
        except RecordError as error:
            reason = f"its estimate is no profile: {_shown(said(error))}"
            known.estimates[machine] = Broken(reason=reason)
        except LeftError as error:
            error.fix = "--records-only looks at no model"
            raise
        except ProtrainError as error:
            broken, refused = self._broken(error), not isinstance(error, EndedError)
            if not heard or (isinstance(error, EndedError) and not error.raised):
                known.broken = broken
            else:
                known.estimates[machine] = not_estimated(
                    broken, profile, refused=refused, unknown=self._is_unknown(machine)
                )
        if question is not None and heard and known.fingerprint is not None:
            self._cache.keep_fingerprint(question, known.fingerprint)
            if made is not None:
                self._cache.keep_tally(question, made)

    def _is_unknown(self, hardware: Hardware) -> bool:
        """Ask a process that runs no model's code: it is not for the model to say."""
        with suppress(ProtrainError):
            return bool(run(partial(unknown, hardware), server=self._server))
        return False

    def _broken(self, error: ProtrainError) -> Broken:
        """An error as one line of a report, with what mends it."""
        reason, limit, limits = said(error), "", self._server.limits
        if isinstance(error, EndedError):
            place = f" (at {error.source}:{error.line})" if error.source else ""
            reason, limit = f"{error.message}{place}", error.limit
        if limit == "memory" or "MemoryError" in reason or "allocate memory" in reason:
            fix = f"--model-memory, if it needs more than {format_bytes(limits.memory)}"
        elif limit == "seconds":
            fix = f"--time-limit, if it needs more than {limits.seconds:g} s"
        elif "[Errno 1]" in reason and "no processes" in self.containments:
            fix = "start no process: this system has no namespaces in which those could be held"
        else:
            fix = _MEND
        return Broken(reason=_shown(reason), fix=fix)


def _imported_before(workload: Workload) -> list[str]:
    """Modules to import before the model's code: none of it, and the same for many models."""
    needed = ["protrain_plan.profiling.estimated", "protrain_plan.models.sources"]
    if workload.model_config:
        needed += ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"]
    return needed + ["peft"] * bool(workload.adapter) + ["bitsandbytes"] * bool(workload.quantize)


def _question(profile: Profile) -> EstimateRequest | None:
    """Return the question about a model whose code is the libraries' alone; None for others.

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


_NO_ANSWER = Broken(reason="its process answers in place of protrain")


def _shown(text: str) -> str:
    """A text of the model's as a part of one line of ours."""
    one_line = " ".join(text.split())
    printable = "".join(c if c.isprintable() else "?" for c in one_line)
    return printable if len(printable) <= _MAX_REASON else f"{printable[:_MAX_REASON]}..."
