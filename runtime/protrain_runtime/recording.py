"""What memory a step took, slot by slot, under a plan or without one."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from protrain_runtime.engine import Observer
from protrain_runtime.measure import MemoryMeter, device_of, process_memory, storage_bytes
from protrain_runtime.preparation import below_device, engine_of
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
    meter = MemoryMeter(device, start_bytes=_live_bytes(model, device) - besides_bytes)
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
    slots: dict[str, int] = {}  # micro-batches meet the same ones
    for segment in segments:
        if segment.label.startswith(("slot", "update")):
            slots[segment.label] = max(segment.peak_bytes, slots.get(segment.label, 0))
    return StepMemory(
        device_bytes=max(segment.peak_bytes for segment in segments),
        slot_bytes=tuple(slots.values()),
        context_bytes=max(
            data - segment.start_bytes for data, segment in zip(held, segments, strict=True)
        )
        if device.type == "cpu"
        else 0,
    )


def _live_bytes(model: nn.Module, device: torch.device) -> int:
    """Bytes of all tensors on `device` that Python can reach, each storage once.

    On a CPU the buffers of a host tier are told apart from the device's tensors.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    kinds = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors = [t for t in kinds if not isinstance(t, TakenGradient)]  # a few bytes each
    host, _ = below_device(model)
    return storage_bytes(t for t in tensors if t.device == device and not t.is_sparse) - host
