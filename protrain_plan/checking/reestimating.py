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
    """Why a model whose source is here cannot be built from it."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Today:
    """A workload's model, built from its source as that is now.

    `changed_keys` are those of the configuration that differ from the profiled one.
    """

    model_fingerprint: str
    changed_keys: tuple[str, ...]
    estimate: Callable[[Hardware], Profile] = field(repr=False)
    _profiles: dict[Hardware, Profile | Unavailable] = field(default_factory=dict, repr=False)

    def profile(self, hardware: Hardware) -> Profile | Unavailable:
        """The estimate for a machine, made once."""
        if hardware not in self._profiles:
            try:
                self._profiles[hardware] = self.estimate(hardware)
            except Exception as error:  # noqa: BLE001 (a model's own code may fail in any way)
                self._profiles[hardware] = Unavailable(reason=f"no estimate: {_said(error)}")
        return self._profiles[hardware]


Look = Callable[[Profile], Today | Broken | Unavailable]


def look_away(profile: Profile) -> Unavailable:  # noqa: ARG001 (the signature of `look`)
    """No model is looked at: the records alone are checked."""
    return Unavailable(reason="models are not looked at (--records-only)")


def look(profile: Profile) -> Today | Broken | Unavailable:
    """Build the profiled model from its source, without weights where its kind allows that.

    A preset and a configuration's file are read anew; where the file is gone, the configuration in
    the record is built with today's code. Paths and modules count from the working directory.
    """
    workload = profile.workload
    if (missing := _missing(workload)) is not None:
        return Unavailable(reason=missing)
    from protrain_plan.models.sources import load_source
    from protrain_plan.profiling.estimated import estimate
    from protrain_runtime.fingerprint import model_fingerprint

    recorded = "" if _is_here(workload.model) else workload.model_config
    try:
        source = load_source(workload.model, model_config=recorded)
        model = source.build(
            dtype=workload.dtype,
            device="meta",
            seed=workload.seed,
            precision=workload.precision,
            adapter=workload.adapter,
        )
    except Exception as error:  # noqa: BLE001 (a model's own code may fail in any way)
        return Broken(reason=_said(error))

    def estimated(hardware: Hardware) -> Profile:
        # Bytes do not depend on rates: those of any machine do where its own are not known.
        rates = (
            hardware.rates
            or load_hardware(_SUBSTITUTES[is_accelerator(hardware.device.kind)]).rates
        )
        found = estimate(
            source,
            batch_size=workload.batch_size,
            seq_len=workload.seq_len,
            dtype=workload.dtype,
            precision=workload.precision,
            adapter=workload.adapter,
            optimizer=profile.optimizer.name,
            hardware=replace(hardware, rates=rates),
            seed=workload.seed,
            text=None,
            progress=lambda *_: None,
        )
        return replace(found, hardware=hardware)

    return Today(
        model_fingerprint=model_fingerprint(model),
        changed_keys=_changed(workload.model_config, source.model_config),
        estimate=estimated,
    )


def _changed(recorded: str, now: str) -> tuple[str, ...]:
    """The keys in which two configurations, as JSON, differ."""
    if recorded == now:
        return ()
    before, after = (json.loads(text) if text else {} for text in (recorded, now))
    keys = {**before, **after}
    return tuple(key for key in keys if before.get(key) != after.get(key))


def _missing(workload: Workload) -> str | None:
    """What is not there of what the model is built with, in words."""
    name = workload.model
    if find_spec("torch") is None:
        return "torch is not installed"
    if _is_factory(workload):
        module = name.rpartition(":")[0]
        if module.endswith(".py"):
            return None if Path(module).is_file() else f"{name}: there is no such file here"
        package = module.partition(".")[0]
        if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
            return f"{name}: there is no module {package!r} here"
    elif find_spec("transformers") is None:
        return "transformers is not installed"
    return None


def _is_factory(workload: Workload) -> bool:
    return not workload.model_config


def _is_here(name: str) -> bool:
    """Whether the configuration called so can be read anew; factories have none."""
    from protrain_plan.models.presets import preset_names

    return name in preset_names() or Path(name).exists()


def _said(error: Exception) -> str:
    """What an error says, on one line and without the fix."""
    if not isinstance(error, ProtrainError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return " ".join(str(ProtrainError(error.message, source=error.source, key=error.key)).split())
