"""Recordings of steps: memory slot by slot, and times of slots and moves.

`measure_step` and `record` observe steps on request; a `Watch` compares a training loop's first
steps with their plan. An accelerator's allocator counts by itself; its peak statistics restart at
every slot. On a CPU the profiler counts, which costs a step several times its seconds, and lasting
memory: there a watch is opt-in, and does nothing if the process has a limit, or another profiler
runs.
"""

import gc
import resource
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import nn

from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import exceeded
from protrain_runtime.contract.program.recording import Recording
from protrain_runtime.contract.records import fingerprint
from protrain_runtime.contract.records.commands import profile_command
from protrain_runtime.contract.records.plan import Plan, TierBytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import (
    MemoryMeter,
    Segment,
    device_of,
    process_memory,
    reachable,
    storage_bytes,
    storages_of,
)
from protrain_runtime.engine.engine import Engine, Observer
from protrain_runtime.engine.step_times import StepTimes
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import below_device, engine_of, prepared_of
from protrain_runtime.states.stand_ins import ConsumedGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes in one step.

    device_bytes   the peak of tensors on the device
    slot_bytes     that of every slot, and of the optimizer's step after them; without an engine
                   only the last one is separate
    context_bytes  on a CPU, what the process held besides tensors, at most, at the marks
    """

    device_bytes: int
    slot_bytes: tuple[int, ...]
    context_bytes: int


def measure_step(
    model: nn.Module, step: Callable[[Observer], None], *, besides_bytes: int = 0
) -> StepMemory:
    """Run `step` once and count its bytes, without `besides_bytes` of unrelated tensors.

    `step` calls its argument with "update" before the optimizer's step. Counting takes time and
    then some memory: measure one step, the last of a run.
    """
    device = device_of(model)
    engine = engine_of(model)
    gc.collect()
    meter = _meter(model, device, besides_bytes=besides_bytes)
    held: list[int] = []  # the whole process's, at the marks

    def observe(what: str) -> None:
        meter.mark(what)
        held.append(process_memory().data_bytes - besides_bytes if device.type == "cpu" else 0)

    if engine is not None:
        engine.observer = observe
    try:
        with meter:
            observe("start")
            step(observe)
    finally:
        if engine is not None:
            engine.observer = None
    segments = meter.segments
    return StepMemory(
        device_bytes=max(segment.peak_bytes for segment in segments),
        slot_bytes=slot_peaks(segments),
        context_bytes=max(
            data - segment.start_bytes for data, segment in zip(held, segments, strict=True)
        )
        if device.type == "cpu"
        else 0,
    )


def slot_peaks(segments: Sequence[Segment]) -> tuple[int, ...]:
    """The peaks of every slot, and of the update, from an engine's labelled segments."""
    slots: dict[str, int] = {}  # micro-batches share them
    for segment in segments:
        if segment.label.startswith(("slot", "update")):
            slots[segment.label] = max(segment.peak_bytes, slots.get(segment.label, 0))
    return tuple(slots.values())


def _meter(model: nn.Module, device: torch.device, *, besides_bytes: int = 0) -> MemoryMeter:
    """Make a meter of all tensors on `device` that Python can reach, without a CPU's host tier."""
    if not devices.on_host(device):
        start = torch.accelerator.memory_allocated(device)
        return MemoryMeter(device, start_bytes=start - besides_bytes)
    # Stand-ins for gradients have a few bytes each.
    found = [t for t in reachable(device) if not isinstance(t, ConsumedGradient)]
    start = storage_bytes(found) - below_device(model)[0]
    standing = storages_of(found).values()
    return MemoryMeter(device, start_bytes=start - besides_bytes, standing=standing)


@dataclass(eq=False)
class Recorder:
    """The record of the last complete step in `record`."""

    times: StepTimes
    plan: Plan

    def recording(self, *, slot_bytes: Sequence[int] = ()) -> Recording:
        """The step's slots and moves, with measured `slot_bytes`; RuntimeError without a step."""
        if self.times.last is None:
            raise RuntimeError("nothing was recorded: no step has ended")
        events, step_seconds = self.times.last
        return Recording(
            plan_fingerprint=fingerprint(self.plan),
            step_seconds=step_seconds,
            events=events,
            slot_bytes=tuple(slot_bytes),
        )


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Record times of steps' slots and moves, by the names of the simulated timeline.

        with protrain_runtime.record(model) as recorder:
            ...  # a step or more
        write_recording(recorder.recording(), "recording.json")

    A step is a planned one up to the end of `optimizer.step()`; with micro-batches, the last one
    and the update. ProtrainError for models without a plan, or with one that keeps everything:
    nothing runs beside compute.
    """
    prepared = prepared_of(model)
    if prepared is None:
        raise ProtrainError("the model follows no plan", fix="call prepare(model, plan, ...) first")
    if (engine := prepared.engine) is None:
        raise ProtrainError(
            "nothing to record: this plan keeps everything on the device, so that plain PyTorch is"
            " what runs"
        )
    if engine.recorder is not None:
        raise RuntimeError("the model is being recorded already")
    engine.recorder = StepTimes(engine.program, device_of(model))
    try:
        yield Recorder(engine.recorder, prepared.plan)
    finally:
        engine.recorder = None


_FIRST, _LAST = 1, 2
"""The step watched, from 0: from the second on, all optimizer states exist."""


class Watch:
    """Warns once if the second step, or third on an accelerator, exceeds its planned bytes."""

    def __init__(
        self, model: nn.Module, plan: Plan, engine: Engine, optimizer: PlannedOptimizer
    ) -> None:
        self._plan, self._device = plan, device_of(model)
        self._last = _FIRST if devices.on_host(self._device) else _LAST
        # The engine holds this; a dropped model is freed at once.
        self._model, self._engine = weakref.ref(model), weakref.ref(engine)
        self._num_steps = 0
        self._evaluations = 0  # calls of the model in this step other than its forwards
        self._meter: MemoryMeter | None = None
        engine.observer = self._observe
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self._observe("update")),
            optimizer.register_step_post_hook(lambda *_: self._end_step()),
        )

    def stop(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        engine = self._engine()
        if engine is not None and engine.observer == self._observe:
            engine.observer = None
        meter, self._meter = self._meter, None
        if meter is not None:
            with suppress(Exception):
                meter.__exit__(None, None, None)

    def _observe(self, what: str) -> None:
        try:
            if what == "slot 0" and self._meter is None and self._num_steps >= _FIRST:
                model = self._model()
                if model is None or not _may_count(self._device):
                    self.stop()
                    return
                meter = _meter(model, self._device)
                meter.__enter__()
                self._meter, self._evaluations = meter, 0
            elif what in ("begin", "slot 0"):
                self._evaluations += 1 if what == "begin" else -1
            if self._meter is not None:
                self._meter.mark(what)
        except Exception:  # noqa: BLE001 (training goes on)
            self.stop()

    def _end_step(self) -> None:
        self._num_steps += 1
        meter, self._meter = self._meter, None
        said = None
        try:
            if meter is not None:
                meter.__exit__(None, None, None)
                if not self._evaluations:  # planned separately (`plan --explain`)
                    said = self._said(meter)
        except Exception:  # noqa: BLE001 (training goes on)
            self.stop()
        if said is not None or self._num_steps > self._last:
            self.stop()
        if said is not None:
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    def _said(self, meter: MemoryMeter) -> str | None:
        plan = self._plan
        peak = TierBytes(
            device=max(segment.peak_bytes for segment in meter.segments), context=0, host=0, disk=0
        )
        found = exceeded(plan, peak, slot_peaks(meter.segments))
        if not found:
            return None
        command = profile_command(plan.workload, optimizer=plan.optimizer, output="profile.yaml")
        return (
            f"step {self._num_steps} took more memory than its plan promises, with all tensors of"
            f" this process on {self._device}: {found[0]}. If no other tensors of yours are there,"
            f" measure and plan again: {command}. prepare(..., watch=False) does not look"
        )


def _may_count(device: torch.device) -> bool:
    """Whether bytes can be counted without harm to the process."""
    if not devices.on_host(device):
        return True
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return limit == resource.RLIM_INFINITY and not torch._C._autograd._profiler_enabled()
