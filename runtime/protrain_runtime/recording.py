"""What a step took, as it ran: memory slot by slot, and when its slots and moves ran."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.records import fingerprint
from protrain_plan.records.plan import Plan
from protrain_plan.simulation.recording import Recording
from protrain_runtime import devices
from protrain_runtime.engine import Observer
from protrain_runtime.measure import (
    MemoryMeter,
    Segment,
    device_of,
    process_memory,
    reachable,
    storage_bytes,
    storages_of,
)
from protrain_runtime.prepared import below_device, engine_of, plan_of
from protrain_runtime.step_times import StepTimes
from protrain_runtime.taken import TakenGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes in one step.

    device_bytes   the peak of tensors on the device
    slot_bytes     that of every slot, and of the optimizer's step after them; without an engine
                   only the last one is told apart
    context_bytes  on a CPU, what the process held besides tensors, at most, at the marks
    """

    device_bytes: int
    slot_bytes: tuple[int, ...]
    context_bytes: int


def measure_step(
    model: nn.Module, step: Callable[[Observer], None], *, besides_bytes: int = 0
) -> StepMemory:
    """Run `step` once and count its bytes, without `besides_bytes` of tensors that stand by.

    `step` calls its argument with "update" before the optimizer's step. Counting takes time and,
    afterwards, some memory: measure one step, the last of a run.
    """
    device = device_of(model)
    engine = engine_of(model)
    gc.collect()
    standing, start = live(model, device)
    meter = MemoryMeter(device, start_bytes=start - besides_bytes, standing=standing)
    del standing
    held: list[int] = []  # by the whole process, at the marks

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
    """The peaks of every slot, and of the update, of segments under an engine's labels."""
    slots: dict[str, int] = {}  # micro-batches meet the same ones
    for segment in segments:
        if segment.label.startswith(("slot", "update")):
            slots[segment.label] = max(segment.peak_bytes, slots.get(segment.label, 0))
    return tuple(slots.values())


def live(model: nn.Module, device: torch.device) -> tuple[list[torch.UntypedStorage], int]:
    """The storages of all tensors on `device` that Python can reach, and their bytes.

    On a CPU the buffers of a host tier are told apart from the device's tensors. An accelerator's
    allocator knows its bytes.
    """
    if not devices.on_host(device):
        return [], devices.allocated_bytes(device)
    # Those that stand for gradients have a few bytes each.
    found = [t for t in reachable(device) if not isinstance(t, TakenGradient)]
    storages = storages_of(found)
    host, _ = below_device(model)
    return list(storages.values()), storage_bytes(found) - host


class Recorder:
    """What `record` saw: the last whole step that ran in it."""

    def __init__(self, times: StepTimes, plan: Plan) -> None:
        self._times, self._plan = times, plan

    def recording(self, *, slot_bytes: Sequence[int] = ()) -> Recording:
        """The step's slots and moves, with `slot_bytes` of a measured step (`measure_step`).

        RuntimeError where no step has ended.
        """
        step = self._times.last
        if step is None:
            raise RuntimeError("nothing was recorded: no step has ended")
        return Recording(
            plan_fingerprint=fingerprint(self._plan),
            step_seconds=step.step_seconds,
            events=step.events(),
            slot_bytes=tuple(slot_bytes),
        )


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Note when the slots and moves of steps run, under the names of the simulated timeline.

        with protrain_runtime.record(model) as recorder:
            ...  # a step or more
        write_recording(recorder.recording(), "recording.json")

    A step is a planned one up to the end of `optimizer.step()`; with micro-batches, the last of
    them and the update after it. ProtrainError where the model follows no plan, or one that keeps
    everything: that installs nothing, and nothing runs beside compute.
    """
    plan, engine = plan_of(model), engine_of(model)
    if plan is None:
        raise ProtrainError("the model follows no plan", fix="call prepare(model, plan, ...) first")
    if engine is None:
        raise ProtrainError(
            "nothing to record: this plan keeps everything on the device, so that plain PyTorch is"
            " what runs"
        )
    if engine.recorder is not None:
        raise RuntimeError("the model is being recorded already")
    engine.recorder = StepTimes(engine.program, device_of(model))
    try:
        yield Recorder(engine.recorder, plan)
    finally:
        engine.recorder = None
