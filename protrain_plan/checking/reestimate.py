"""Today's models: built from their current source, and estimated without a device.

A model's code runs with the user's rights, in a separate process with limits. Only that process
imports PyTorch. All records are read before it starts.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from multiprocessing import active_children
from multiprocessing.pool import ThreadPool
from pathlib import Path

from protrain_plan.checking.reviewed import leads_out, refuse_outside
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.isolated.pool import processes_at_once
from protrain_plan.isolated.process import EndedError, Limits, Tell, run, start_server
from protrain_plan.isolated.user_frame import lines_of, user_frame, words_of
from protrain_plan.models.presets import parse_config, preset_names, read_config
from protrain_plan.profiling.estimate_cache import EstimateCache, EstimateRequest
from protrain_plan.profiling.tally import Tally
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import Hardware, is_accelerator
from protrain_runtime.contract.records.profile import Profile, Workload
from protrain_runtime.contract.units import format_bytes

_MAX_REASON = 1000
_IMPORTS = (
    *("protrain_plan.profiling.estimated", "protrain_plan.models.sources"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
)
"""Imports before a model's code; the last two for one of transformers."""
_SUBSTITUTES = {False: "cpu", True: "h100-sxm"}
"""Machines whose rates serve for a machine without rates, by whether it has an accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """Reason why a model or its estimate is unavailable: something is not installed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Reason why a model cannot be built or estimated from its source."""

    reason: str
    fix: str = "fix the model or its configuration"


Estimate = Profile | Broken | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Today:
    """A workload's model, built from today's source; `profile` estimates it."""

    model_fingerprint: str
    changed_keys: tuple[str, ...]  # keys of the configuration that changed since the profile
    profile: Callable[[Hardware], Estimate] = field(repr=False)


Look = Callable[[Profile], Today | Broken | Unavailable]


def look_away(profile: Profile) -> Unavailable:  # noqa: ARG001 (the signature of `look`)
    """Build no model: only the records are checked."""
    return Unavailable(reason="models are skipped (--records-only)")


def changed_keys(recorded: str, now: str) -> tuple[str, ...]:
    """The keys in which two configurations, as JSON, differ."""
    if recorded == now:
        return ()
    before, after = (json.loads(text) if text else {} for text in (recorded, now))
    return tuple(key for key in {**before, **after} if before.get(key) != after.get(key))


def missing(workload: Workload) -> str | None:
    """Say what is missing to build the model. Imports nothing of it."""
    name = workload.model
    if find_spec("torch") is None:
        return "torch is not installed"
    if not workload.model_config:  # a factory's
        module = name.rpartition(":")[0]
        if module.endswith(".py"):
            return None if Path(module).is_file() else f"{name}: no such file here"
        package = module.partition(".")[0]
        if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            return f"{name}: no module {package!r} here"
    elif find_spec("transformers") is None:
        return "transformers is not installed"
    return None


def said(error: BaseException) -> str:
    """Return an error's message on one line, with the user's line that raised it, without a fix."""
    if isinstance(error, ProtrainError):
        words = str(ProtrainError(error.message, source=error.source, key=error.key))
        return " ".join(words.split())
    words = f"{type(error).__name__}: {words_of(error)}"
    if isinstance(error, SystemExit):
        words = f"its code exited: sys.exit({error.code!r})"
    return " ".join(words.split())[:_MAX_REASON] + _at(*user_frame(lines_of(error)))


def _at(source: str | None, line: int | None) -> str:
    return f" (at {source}:{line})" if source else ""


def _needs_estimate(profile: Profile, fingerprint: str, changed: tuple[str, ...]) -> bool:
    """Return whether rules need an estimate: the model changed, or was estimated before."""
    is_new = fingerprint != profile.model_fingerprint or bool(changed)
    return is_new or profile.method == "estimated"


def reestimated(
    profile: Profile, config: str, on: Hardware | None, tell: Tell
) -> Tally | Estimate | None:
    """Build a profiled model from today's source, and tell its fingerprint.

    Returns its tally on a machine, or on the profile's if rules need one. Runs the model's code, of
    the configuration in `config` or of a factory, without weights if possible. Paths and modules
    are relative to the working directory.
    """
    workload, machine = profile.workload, on or profile.hardware
    try:
        from protrain_plan.models.sources import load_source
        from protrain_plan.profiling.estimated import refuse_unknown, tallies
        from protrain_runtime.diagnostics.matching import model_fingerprint

        source = load_source(workload.model, model_config=config)
        fingerprint = model_fingerprint(source.build(workload, device="meta"))
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a model's code may fail in any way)
        return Broken(reason=said(error))
    tell(fingerprint)
    changed = changed_keys(workload.model_config, config)
    if on is None and not _needs_estimate(profile, fingerprint, changed):
        return None
    optimizer, machines = profile.optimizer.name, [_rated(machine)]
    try:
        return tallies(
            source, workload, optimizer=optimizer, allow=profile.allowed, machines=machines
        )[0]
    except (Exception, SystemExit) as error:  # noqa: BLE001
        reason = f"no estimate: {said(error)}"
        try:
            refuse_unknown(machine)
        except ProtrainError:
            return Unavailable(reason=reason)
        # A measured model may be impossible to estimate, and says so; an estimated one can be
        # estimated again, on every machine whose operators are known.
        if isinstance(error, ProtrainError) and profile.method == "measured":
            return Unavailable(reason=reason)
        return Broken(reason=reason)


def _rated(machine: Hardware) -> Hardware:
    """The machine with rates: bytes do not depend on them, so any rates serve if it has none."""
    substitute = _SUBSTITUTES[is_accelerator(machine.device.kind)]
    return replace(machine, rates=machine.rates or load_hardware(substitute).rates)


@dataclass(slots=True)
class _Known:
    """Answers about a model with a configuration; `broken` is why there are no more."""

    question: EstimateRequest | None
    config: str  # as JSON; empty for a factory
    fingerprint: str | None = None
    tally: Tally | None = None
    estimates: dict[Hardware, Estimate] = field(default_factory=dict)
    broken: Broken | Unavailable | None = None


@dataclass(eq=False)
class Reestimates:
    """A `Look` that runs models in separate processes, with limits on seconds and bytes of memory.

    Answers about models whose code comes from installed libraries are cached.
    """

    limits: Limits
    cache: EstimateCache
    _known: dict[EstimateRequest, _Known] = field(
        default_factory=dict[EstimateRequest, _Known], init=False
    )

    def __call__(self, profile: Profile) -> Today | Broken | Unavailable:
        if (reason := missing(profile.workload)) is not None:
            return Unavailable(reason=reason)
        try:
            question, config = question_of(profile)
        except ProtrainError as error:
            return Broken(reason=said(error))
        known = _Known(question, config)
        if question is not None:
            known = self._known.setdefault(question, known)
            known.fingerprint = known.fingerprint or self.cache.fingerprint(question)
        if known.fingerprint is None and known.broken is None:
            self._look(profile, known)
        if known.fingerprint is None:
            assert known.broken is not None
            return known.broken
        return Today(
            model_fingerprint=known.fingerprint,
            changed_keys=changed_keys(profile.workload.model_config, config),
            profile=partial(self._profile, profile, known),
        )

    def prepare(self, profiles: Iterable[Profile], progress: Callable[[str, float], None]) -> None:
        """Look at models of installed libraries, several at once; later calls find the answers."""
        asked: dict[EstimateRequest | None, list[Profile]] = {}
        there = [profile for profile in profiles if missing(profile.workload) is None]
        for profile in there:
            with suppress(ProtrainError):  # reported when the profile is checked
                asked.setdefault(question_of(profile)[0], []).append(profile)
        asked.pop(None, None)  # the code is not that of a library
        if there:
            of_transformers = any(profile.workload.model_config for profile in there)
            start_server(_IMPORTS[: None if of_transformers else 2])

        def look(profiles: Iterable[Profile]) -> None:
            for profile in profiles:
                today = self(profile)
                if not isinstance(today, Today):
                    continue
                if _needs_estimate(profile, today.model_fingerprint, today.changed_keys):
                    today.profile(profile.hardware)

        # Its threads are daemons: an interrupted check does not wait for them.
        with ThreadPool(processes_at_once(max(len(asked), 1))) as pool:
            try:
                for number, _ in enumerate(pool.imap(look, asked.values())):
                    progress("looking at models", number / len(asked))
            except BaseException:
                for process in active_children():
                    process.kill()
                raise

    def _profile(self, profile: Profile, known: _Known, on: Hardware) -> Estimate:
        if profile.beside is not None:
            return Unavailable(reason="estimates with a frozen model beside are not repeated")
        if on not in known.estimates:
            tally, kind = known.tally, on.device.kind
            tally = tally or (self.cache.tally(known.question) if known.question else None)
            if tally and is_accelerator(kind) and tally.profile.workload.device == kind:
                known.estimates[on] = replace(tally.on(_rated(on)), hardware=on)
            elif known.broken is None:
                self._look(profile, known, on)
        found = known.estimates.get(on) or known.broken
        assert found is not None
        return found

    def _look(self, profile: Profile, known: _Known, on: Hardware | None = None) -> None:
        """Run the model's code, and store its answer in `known`."""
        machine = on or profile.hardware
        try:
            work = partial(reestimated, profile, known.config, on)
            hear = partial(setattr, known, "fingerprint")
            found = run(work, limits=self.limits, hear=hear)
        except ProtrainError as error:  # of a process that ended
            reason = error.message + _at(error.source, error.line)
            known.broken = self._with_fix(Broken(reason=reason))
            if isinstance(error, EndedError) and error.limit == "seconds":
                fix = f"--time-limit, if it needs more than {self.limits.seconds:g} s"
                known.broken = replace(known.broken, fix=fix)
            return
        if isinstance(found, Tally):
            known.tally = found
            known.estimates[machine] = replace(found.profile, hardware=machine, method="estimated")
        elif isinstance(found, Broken):
            found = self._with_fix(found)
        if known.fingerprint is None:
            known.broken = found
        elif isinstance(found, Broken | Unavailable):
            known.estimates[machine] = found
        if known.question is not None and known.fingerprint is not None:
            self.cache.keep_fingerprint(known.question, known.fingerprint)
            if isinstance(found, Tally):
                self.cache.keep_tally(known.question, found)

    def _with_fix(self, found: Broken) -> Broken:
        if "MemoryError" in found.reason or "allocate memory" in found.reason:
            limit = format_bytes(self.limits.memory)
            return replace(found, fix=f"--model-memory, if it needs more than {limit}")
        return found


def question_of(profile: Profile) -> tuple[EstimateRequest | None, str]:
    """The cache's question about a model whose code comes from libraries, and its configuration.

    A preset or a configuration file is read again; if the file is gone, the recorded configuration
    counts. Raises ProtrainError for a file without a configuration.
    """
    workload, name = profile.workload, profile.workload.model
    # A file outside the repository cannot be changed by it: the recorded one counts.
    is_here = os.path.exists(name) and leads_out(name) is None  # noqa: PTH110
    if name in preset_names():
        config = read_config(name)
    elif is_here or not workload.model_config:
        refuse_outside(name.partition(":")[0])
        config = read_config(name)
    else:
        config = parse_config(workload.model_config, where=name)
    text = "" if config is None else json.dumps(config, sort_keys=True, separators=(",", ":"))
    return EstimateRequest.of(workload, profile.optimizer.name, config, profile.allowed), text
