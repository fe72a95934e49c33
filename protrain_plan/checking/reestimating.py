"""The model as its source is today: what it is, and what it costs by an estimate without a device.

PyTorch is imported when a model is looked at, and not before.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from protrain_plan.errors import ProtrainError
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import JsonObject, parse_config, preset_names, read_config
from protrain_plan.records.hardware import Hardware, is_accelerator
from protrain_plan.records.profile import Profile, Workload

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
    fix: str = "mend the model, or its configuration"


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
            optimizer=self._profile.optimizer.name,
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
        if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            return f"{name}: there is no module {package!r} here"
    elif find_spec("transformers") is None:
        return "transformers is not installed"
    return None


def config_of(workload: Workload) -> JsonObject | None:
    """The configuration that the model is built with today, None of a factory's.

    ProtrainError where a file holds none.
    """
    if _is_here(workload.model) or not workload.model_config:
        return read_config(workload.model)
    return parse_config(workload.model_config, where=workload.model)


def _is_here(name: str) -> bool:
    """Whether the configuration called so can be read anew; factories have none."""
    return name in preset_names() or Path(name).exists()


def said(error: BaseException) -> str:
    """What an error says, on one line and without the fix."""
    if not isinstance(error, ProtrainError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return " ".join(str(ProtrainError(error.message, source=error.source, key=error.key)).split())
