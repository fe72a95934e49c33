"""Models estimated without memory for them, or measured, with workloads by keywords."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch
from protrain_plan.models.sources import ModelSource, load_source
from protrain_plan.profiling import measured
from protrain_plan.profiling.estimated import tallies
from protrain_plan.profiling.memory import passes
from protrain_plan.profiling.memory.fake_meter import NUMBER_BYTES
from protrain_plan.profiling.memory.unit_bytes import ModelStructure, analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.contract.records.hardware import Device, DeviceKind, Hardware
from protrain_runtime.contract.records.profile import FormCost, Profile, Unit, Workload
from protrain_runtime.devices.memory_meter import MemoryMeter
from tests.support.configs import CONFIGS, SMALL

_USUAL = {"batch_size": 1, "seq_len": 1, "dtype": "float32"}


def asked(source: ModelSource, **options: Any) -> tuple[Workload, dict[str, Any]]:
    """The workload that some of the options say, and the others."""
    names = {field.name for field in fields(Workload)} - {"device"}
    workload: dict[str, Any] = {"model": source.name, "seed": 0}
    workload |= {name: options.pop(name) for name in names & options.keys()}
    return Workload(model_config=source.model_config, device="cpu", **workload), options


def model_of(source: ModelSource, device: torch.device | str = "cpu", **workload: Any) -> nn.Module:
    """The source's model, by default as in one sequence of a token of float32."""
    return source.build(asked(source, **_USUAL | workload)[0], device=device)


def batches_of(
    source: ModelSource,
    text: Path | None = None,
    device: torch.device | str = "cpu",
    **workload: Any,
) -> Iterator[Batch]:
    return source.batches(asked(source, **_USUAL | workload)[0], text=text, device=device)


def estimate(source: ModelSource, *, hardware: Hardware, **options: Any) -> Profile:
    return estimates(source, machines=[hardware], **options)[0]


def estimates(
    source: ModelSource, *, machines: Sequence[Hardware], **options: Any
) -> list[Profile]:
    workload, others = asked(source, **options)
    made = tallies(source, workload, machines=machines, **others)
    return [tally.on(machine) for tally, machine in zip(made, machines, strict=True)]


def measure(source: ModelSource, **options: Any) -> Profile:
    workload, others = asked(source, **options)
    return measured.measure(source, workload, **others)


def machine(name: str = "cpu") -> Hardware:
    hardware = load_hardware(name)
    return replace(hardware, device=replace(hardware.device, num_threads=torch.get_num_threads()))


def small_source(name: str, **changes: object) -> ModelSource:
    """A published architecture at small sizes."""
    return load_source(name, model_config=json.dumps({**SMALL, **CONFIGS[name], **changes}))


def device(kind: DeviceKind = "cpu", name: str = "") -> Device:
    """One that is not here, unless it is named so."""
    threads = torch.get_num_threads()
    return Device(kind=kind, name=name, memory_bytes=0, context_bytes=0, num_threads=threads)


def bytes_alone(unit: Unit, real: Unit) -> Unit:
    """The unit without seconds, nor the Python number that recomputation may take more or not."""
    forms: list[FormCost] = []
    for form, other in zip(unit.forms, real.forms, strict=True):
        excess = form.forward_peak_bytes - other.forward_peak_bytes
        allowed = (0,) if form.form == "keep" else (0, NUMBER_BYTES)
        peak = form.forward_peak_bytes - (excess if excess in allowed else 0)
        forms.append(replace(form, forward_peak_bytes=peak, forward_s=0.0, backward_s=0.0))
    return replace(unit, forms=tuple(forms))


def weighed(
    model: nn.Module,
    batch: Batch,
    meter: passes.MeterFactory = MemoryMeter,
    *,
    warm: bool = False,
    **own: Any,
) -> tuple[list[Unit], ModelStructure]:
    """Bytes of a model's units, and what stands beside them; `warm`: after a step, for caches."""
    found = discover(model, batch)
    if warm:
        passes.training_step(model, batch)
        model.zero_grad()
    anatomy = analyze_units(model, batch, found, **own)
    return measure_bytes(model, batch, anatomy, meter)[0], anatomy
