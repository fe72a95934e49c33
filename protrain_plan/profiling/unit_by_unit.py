"""A model larger than the device, measured unit by unit: of equal blocks few are there and run.

Fake tensors tell the units and their classes. Then the model is built with its parameters on
`meta`, those of the units that run are made, and stubs take the other blocks' places
(`block_classes`). What runs is real, so that bytes and seconds are measured as on the whole model.
Estimates go by the same look at fake tensors (`sketch_and_model`).
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TypedDict

import torch
from torch import nn

from protrain_plan.garbage import USUAL, collected
from protrain_plan.hardware.operators import allocator_of
from protrain_plan.hardware.probe import Progress, host_memory_bytes, processor_name
from protrain_plan.models.batches import Batch, first_of
from protrain_plan.models.building import TORCH_DTYPES, remake_tensors, seeded
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER
from protrain_plan.models.quantizing import drawn
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling.memory.block_classes import (
    BlockClasses,
    equal_blocks,
    filled,
    stubs_in_place,
)
from protrain_plan.profiling.memory.fake_meter import FakeMeter
from protrain_plan.profiling.memory.passes import MeterFactory
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure import discovery, whereabouts
from protrain_plan.profiling.structure.discovery import FoundUnit
from protrain_plan.profiling.structure.faking import fake_batch, fake_model, faking, without_values
from protrain_plan.profiling.structure.parameters import refuse_parameters
from protrain_plan.profiling.structure.rerun import run_once
from protrain_runtime.activations.compiled import refuse_compiled_around
from protrain_runtime.activations.own_caches import switch_off_caches
from protrain_runtime.activations.own_checkpoints import switch_off_checkpointing
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import Device, DeviceKind
from protrain_runtime.contract.records.profile import Form, Unit, Workload
from protrain_runtime.contract.units import format_bytes
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.preflight import free_host_bytes
from protrain_runtime.states.absent import without_parameters
from protrain_runtime.states.quantized import packed_layers

SHARE_OF_FREE_MEMORY = 0.5
"""A model that takes more of it in a plain step is measured unit by unit. Both ways give the same
bytes, so that caution costs nothing; and on a CPU machine the rehearsal's spill file passes through
the page cache, which has to find room beside the model."""

_INIT_STD = 0.02
"""Deviation of made-up matrices: GPT-2's, with which values stay finite."""


class Options(TypedDict, total=False):
    """Options of profilers besides the workload."""

    optimizer: str
    allow: tuple[str, ...]
    text: Path | None
    progress: Progress


def workload_of(
    source: ModelSource, workload: Workload, device: DeviceKind, *, deterministic: bool = False
) -> Workload:
    """The workload with the source's model on a device of this type; no batch was seen yet."""
    return replace(
        workload,
        model=source.name,
        model_config=source.model_config,
        device=device,
        deterministic=deterministic,
        inputs=(),
    )


def in_its_dtype(workload: Workload, source: ModelSource) -> Workload:
    """The workload in the dtype of most of the model, where that has several of its own."""
    found = [name for name, dtype in TORCH_DTYPES.items() if dtype == source.mixed]
    return replace(workload, dtype=found[0]) if found and workload.precision == "pure" else workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A model as fake tensors show it: its units with their bytes, and which need to run."""

    found: tuple[FoundUnit, ...]  # without modules: those of the fake model are gone
    block_classes: BlockClasses
    units: list[Unit]  # without seconds; true of those that run
    base_bytes: int  # with what a step leaves to the next one
    fixed_bytes: int
    seed: int  # with which a forward runs all blocks
    varies: str = ""  # as in the profile

    @property
    def whole_bytes(self) -> int:
        """The most bytes that a plain step of the whole model takes, without optimizer states.

        Parameters, gradients and kept activations of all units, and the largest peak above them.
        """
        units = filled(self.units, self.block_classes)
        forms = [unit.forms[0] for unit in units]
        kept = sum(unit.parameter_bytes + unit.gradient_bytes for unit in units)
        kept += sum(form.kept_bytes for form in forms)
        return kept + max(max(f.forward_peak_bytes, f.backward_peak_bytes) for f in forms)


def sketched(source: ModelSource, workload: Workload, *, text: Path | None) -> Sketch:
    """Look at the source's model without memory for its parameters, in the form `keep` alone.

    ProtrainError where it cannot be built, or its code looks at values of tensors.
    """
    given = first_of(source.batches(workload, text=text), source=source.name)
    device = Device(
        kind=workload.device,
        name=processor_name(),
        memory_bytes=0,
        context_bytes=0,
        num_threads=torch.get_num_threads(),
    )
    meter = partial(FakeMeter, allocator_of(device))
    return sketch_and_model(source, workload, given, meter, forms=("keep",))[0]


def sketch_and_model(
    source: ModelSource,
    workload: Workload,
    given: Batch,
    meter: MeterFactory,
    *,
    forms: Sequence[Form] | None = None,
    optimizer: str = DEFAULT_OPTIMIZER,
    progress: Progress = lambda *_: None,
) -> tuple[Sketch, nn.Module]:
    """The sketch of a source's model on fake tensors, with `forms` and `meter`, and the model."""
    with ExitStack() as stack:
        # Every step collects garbage before it is counted, and would look through a million
        # objects, libraries' mostly. Garbage of before is no part of the count, and stays.
        if not gc.get_freeze_count():
            stack.callback(gc.unfreeze)
        gc.freeze()
        stack.enter_context(collected(USUAL))
        mode = stack.enter_context(faking(workload.device))
        stack.enter_context(without_values(source.name))
        progress("building the model", 0.05)
        model = fake_model(source, workload)
        refuse_parameters(model, source=source.name)
        switch_off_checkpointing(model)
        switch_off_caches(model)
        batch = fake_batch(mode, given)
        gc.freeze()  # what building has imported, too
        with discovery.undisturbed(model):
            progress("finding units", 0.2)
            start, execution = discovery.fullest(model, batch)
            stack.enter_context(discovery.starting_from(model, start))
            found = discovery.discover(model, batch, execution)
            refuse_compiled_around(model, (unit.module for unit in found))
            once = run_once(model, found, batch)
            varies = None
            if execution.steers:
                varies = discovery.variation(model, execution, repeat(batch))
            alone = once if varies is None else range(len(found))
            block_classes = equal_blocks(model, found, batch, alone=alone)
            stack.enter_context(stubs_in_place(found, block_classes))
            stack.enter_context(whereabouts.naming([unit.name for unit in found]))
            progress("finding what is saved", 0.4)
            structure = analyze_units(
                model,
                batch,
                found,
                device=workload.device,
                forms=forms,
                optimizer=optimizer,
                precision=workload.precision,
                once=once,
                variation=varies,
            )
            progress("counting bytes and operations", 0.6)
            units, left_bytes = measure_bytes(model, batch, structure, meter)
            sketch = Sketch(
                found=tuple(replace(unit, module=None) for unit in found),
                block_classes=block_classes,
                units=units,
                base_bytes=structure.base_bytes + left_bytes,
                fixed_bytes=structure.fixed_bytes,
                seed=start.seed,
                varies=str(varies or ""),
            )
    return sketch, model


def build_sparsely(
    source: ModelSource,
    workload: Workload,
    sketch: Sketch,
    *,
    device: torch.device = devices.HOST,
    text: Path | None,
) -> tuple[nn.Module, tuple[FoundUnit, ...], Iterator[Batch]]:
    """The model with parameters of those units alone that run, its units, and batches for it.

    Parameters are random, by the workload's seed; all others are on `meta`, and all buffers as the
    model makes them. ProtrainError where a single unit's do not fit the device.
    """
    free = free_bytes(device)
    units = filled(sketch.units, sketch.block_classes)
    largest = max(units, key=lambda unit: unit.parameter_bytes + unit.gradient_bytes)
    needed = largest.parameter_bytes + largest.gradient_bytes
    if needed > free:
        raise ProtrainError(
            f"{largest.name} alone has {format_bytes(needed)} of parameters and gradients, and"
            f" {format_bytes(free)} of the device are free: it can be neither measured nor trained"
            " there",
            source=source.name,
            fix="a device with more memory, a narrower --dtype, or adapters (--lora)",
        )
    with without_parameters(adapters=False):
        model = source.build(workload)
        batches = source.batches(workload, text=text, device=device)
    found = tuple(
        replace(unit, module=model.get_submodule(unit.name) if unit.kind == "block" else None)
        for unit in sketch.found
    )
    absent = {name for unit in sketch.block_classes.outputs for name in found[unit].parameters}
    left = {parameter for name, parameter in model.named_parameters() if name in absent}
    with seeded(workload.seed):
        for _, layer in packed_layers(model):
            if layer.weight not in left:
                drawn(layer, std=_INIT_STD, device=device)
    left |= {layer.weight for _, layer in packed_layers(model)}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if tensor in left:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(device)
        values = torch.empty_like(tensor, device=device, requires_grad=False)
        # Vectors are ones: norms scale by them.
        return values.fill_(1) if values.dim() < 2 else values.normal_(std=_INIT_STD)

    with seeded(workload.seed):
        remake_tensors(model, make)
    return model, found, batches


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still take on the device.

    On a CPU machine: what the system can give without swapping, or a limit on the process leaves
    (`RLIMIT_DATA`, a container's memory).
    """
    if not devices.on_host(device):
        return devices.room_bytes(device)
    return min(host_memory_bytes(), free_host_bytes())
