"""A model larger than the device, measured unit by unit: of equal blocks few are there and run.

Fake tensors tell the units and their classes. Then the model is built with its parameters on
`meta`, those of the units that run are made, and stubs take the other blocks' places
(`block_classes`). What runs is real, so that bytes and seconds are measured as on the whole model.
"""

import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.hardware.operators import allocator_of
from protrain_plan.hardware.probe import Progress, host_memory_bytes, processor_name
from protrain_plan.models.batches import Batch
from protrain_plan.models.building import remake_tensors, seeded, without_parameters
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling.memory.block_classes import (
    BlockClasses,
    equal_blocks,
    filled,
    stubs_in_place,
)
from protrain_plan.profiling.memory.fake_meter import FakeMeter
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure import whereabouts
from protrain_plan.profiling.structure.discovery import (
    FoundUnit,
    discover,
    fullest,
    starting_from,
    undisturbed,
)
from protrain_plan.profiling.structure.faking import fake_batch, fake_model, faking, without_values
from protrain_plan.profiling.structure.rerun import run_once
from protrain_plan.records.hardware import Device
from protrain_plan.records.profile import Unit, Workload
from protrain_plan.units import format_bytes
from protrain_runtime.activations.recompute import switch_off_checkpointing
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import process_memory
from protrain_runtime.states.layout import refuse_parameters

SHARE_OF_FREE_MEMORY = 0.5
"""A model that takes more of it in a plain step is measured unit by unit. Both ways give the same
bytes, so that caution costs nothing; and on a CPU machine the rehearsal's spill file passes through
the page cache, which has to find room beside the model."""

_INIT_STD = 0.02
"""Of the matrices that are made up: GPT-2's, with which values stay finite in the few that run."""


def built(
    source: ModelSource, workload: Workload, *, device: torch.device = devices.HOST
) -> nn.Module:
    """The source's model as the workload says."""
    return source.build(
        dtype=workload.dtype,
        precision=workload.precision,
        adapter=workload.adapter,
        device=device,
        seed=workload.seed,
    )


def batches_of(
    source: ModelSource,
    workload: Workload,
    *,
    text: Path | None,
    device: torch.device = devices.HOST,
) -> Iterator[Batch]:
    """The source's batches as the workload says."""
    return source.batches(
        batch_size=workload.batch_size,
        seq_len=workload.seq_len,
        dtype=workload.dtype,
        precision=workload.precision,
        device=device,
        text=text,
        seed=workload.seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A source's model of fake tensors, its units, and which of them need to run."""

    model: nn.Module
    batch: Batch
    found: tuple[FoundUnit, ...]
    once: Mapping[int, str]  # see `rerun`
    block_classes: BlockClasses
    seed: int  # with which a forward runs all blocks


@contextmanager
def faked(
    source: ModelSource, workload: Workload, given: Batch, *, progress: Progress = lambda *_: None
) -> Iterator[FakeModel]:
    """The source's model without memory for its parameters, undisturbed, with stubs in place."""
    with faking(workload.device) as mode, without_values(source.name):
        progress("building the model", 0.05)
        model = fake_model(
            source,
            dtype=workload.dtype,
            precision=workload.precision,
            adapter=workload.adapter,
            seed=workload.seed,
        )
        refuse_parameters(model, source=source.name)
        switch_off_checkpointing(model)
        batch = fake_batch(mode, given)
        with undisturbed(model), ExitStack() as stack:
            progress("finding units", 0.2)
            start, execution = fullest(model, batch)
            stack.enter_context(starting_from(model, start))
            found = discover(model, batch, execution)
            once = run_once(model, [unit.module for unit in found], batch)
            block_classes = equal_blocks(model, found, batch, alone=once)
            stack.enter_context(stubs_in_place(found, block_classes))
            stack.enter_context(whereabouts.naming([unit.name for unit in found]))
            yield FakeModel(
                model=model,
                batch=batch,
                found=found,
                once=once,
                block_classes=block_classes,
                seed=start.seed,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """What fake tensors tell of a model: its units with their bytes, and which need to run."""

    found: tuple[FoundUnit, ...]  # without modules: those of the fake model are gone
    block_classes: BlockClasses
    units: tuple[Unit, ...]  # in the form `keep` alone, without seconds
    seed: int  # with which a forward runs all blocks

    @property
    def whole_bytes(self) -> int:
        """What a plain step of the whole model takes, at most; optimizer states excluded.

        Parameters, gradients and kept activations of all units, and the largest peak above them.
        """
        forms = [unit.forms[0] for unit in self.units]
        kept = sum(unit.parameter_bytes + unit.gradient_bytes for unit in self.units)
        kept += sum(form.kept_bytes for form in forms)
        return kept + max(max(f.forward_peak_bytes, f.backward_peak_bytes) for f in forms)


def sketched(source: ModelSource, workload: Workload, *, text: Path | None) -> Sketch:
    """Look at the source's model without memory for its parameters.

    ProtrainError where it cannot be built, or its code looks at values of tensors.
    """
    given = next(batches_of(source, workload, text=text))
    device = Device(
        kind=workload.device,
        name=processor_name(),
        memory_bytes=0,
        context_bytes=0,
        num_threads=torch.get_num_threads(),
    )
    with faked(source, workload, given) as fake:
        structure = analyze_units(
            fake.model,
            fake.batch,
            fake.found,
            device=workload.device,
            forms=("keep",),
            once=fake.once,
        )
        meter = partial(FakeMeter, allocator_of(device))
        units = measure_bytes(fake.model, fake.batch, structure, meter).units
    return Sketch(
        found=tuple(replace(unit, module=None) for unit in fake.found),
        block_classes=fake.block_classes,
        units=tuple(filled(units, fake.block_classes)),
        seed=fake.seed,
    )


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
    _check_units(sketch, source.name, free_bytes(device))
    with without_parameters():
        model = built(source, workload)
        batches = batches_of(source, workload, text=text, device=device)
    found = tuple(
        replace(unit, module=model.get_submodule(unit.name) if unit.kind == "block" else None)
        for unit in sketch.found
    )
    absent = {name for unit in sketch.block_classes.stubbed for name in found[unit].parameters}
    _materialise(model, absent, device, workload.seed)
    return model, found, batches


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still take on the device.

    On a CPU machine: what the system has available, or a limit on the process leaves
    (`RLIMIT_DATA`, a container's memory).
    """
    if not devices.on_host(device):
        return devices.room_bytes(device)
    free = host_memory_bytes()
    if sys.platform.startswith("linux"):
        # What the system can give without swapping: `MemAvailable` of proc(5).
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free = min(free, int(fields["MemAvailable"].split()[0]) * 1024)
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - process_memory().data_bytes)
    return max(free, 0)


def _check_units(sketch: Sketch, name: str, free: int) -> None:
    largest = max(sketch.units, key=lambda unit: unit.parameter_bytes + unit.gradient_bytes)
    needed = largest.parameter_bytes + largest.gradient_bytes
    if needed > free:
        raise ProtrainError(
            f"{largest.name} alone has {format_bytes(needed)} of parameters and gradients, and"
            f" {format_bytes(free)} of the device are free: it can be neither measured nor trained"
            " there",
            source=name,
            fix="a device with more memory, a narrower --dtype, or adapters (--lora)",
        )


def _materialise(model: nn.Module, absent: set[str], device: torch.device, seed: int) -> None:
    """Give every parameter but the `absent` ones memory and values, and move buffers along.

    Matrices are drawn, and vectors are ones: norms scale by them.
    """
    left = {parameter for name, parameter in model.named_parameters() if name in absent}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if tensor in left:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(device)
        values = torch.empty_like(tensor, device=device, requires_grad=False)
        return values.fill_(1) if values.dim() < 2 else values.normal_(std=_INIT_STD)

    with seeded(seed):
        remake_tensors(model, make)
