"""A model larger than the device, measured unit by unit: of equal blocks few are there and run.

Fake tensors tell the units and their classes. Then the model is built with its parameters on
`meta`, those of the units that run are made, and stand-ins take the other blocks' places
(`elision`). What runs is real, so that bytes and seconds are measured as on the whole model.
"""

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from protrain_plan.errors import ProtrainError
from protrain_plan.hardware.probe import host_memory_bytes, processor_name
from protrain_plan.models.batches import Batch
from protrain_plan.models.building import seeded, without_parameters
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling import whereabouts
from protrain_plan.profiling.accounting import dissect, weigh
from protrain_plan.profiling.discovery import FoundUnit, discover, fullest
from protrain_plan.profiling.elision import Elision, elided, equal_blocks, filled
from protrain_plan.profiling.execution import repeating, undisturbed
from protrain_plan.profiling.faking import fake_batch, fake_model, faking, without_values
from protrain_plan.profiling.repeating import run_once
from protrain_plan.profiling.tracking import FakeMeter
from protrain_plan.profiling.workspaces import allocator_of
from protrain_plan.records.hardware import Device
from protrain_plan.records.profile import Unit, Workload
from protrain_plan.units import format_bytes
from protrain_runtime import devices
from protrain_runtime.measure import process_memory

SHARE_OF_FREE_MEMORY = 0.5
"""A model that takes more of it in a plain step is measured unit by unit. Both ways give the same
bytes, so that caution costs nothing; and on a CPU machine the rehearsal's spill file passes through
the page cache, which has to find room beside the model."""

_INIT_STD = 0.02
"""Of the matrices that are made up: GPT-2's, with which values stay finite in the few that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """What fake tensors tell of a model: its units with their bytes, and which need to run."""

    found: tuple[FoundUnit, ...]  # without modules: those of the fake model are gone
    elision: Elision
    units: tuple[Unit, ...]  # in the form `keep` alone, without seconds
    seed: int  # with which a forward runs all blocks

    @property
    def whole_bytes(self) -> int:
        """What a plain step of the whole model takes, at most; optimizer states excluded."""
        return _step_bytes(self.units)

    @property
    def running_bytes(self) -> int:
        """The same where only the units run that need to."""
        elided = set(self.elision.elided)
        return _step_bytes([u for index, u in enumerate(self.units) if index not in elided])


def _step_bytes(units: Sequence[Unit]) -> int:
    """Parameters, gradients and kept activations of all units, and the largest peak above them."""
    forms = [unit.forms[0] for unit in units]
    standing = sum(unit.parameter_bytes + unit.gradient_bytes for unit in units)
    standing += sum(form.kept_bytes for form in forms)
    return standing + max(max(f.forward_peak_bytes, f.backward_peak_bytes) for f in forms)


def sketched(source: ModelSource, workload: Workload, *, text: Path | None) -> Sketch:
    """Look at the source's model without memory for its parameters.

    ProtrainError where it cannot be built, or its code looks at values of tensors.
    """
    given = next(_batches(source, workload, text=text, device=devices.HOST))
    device = Device(
        kind=workload.device,
        name=processor_name(),
        memory_bytes=0,
        context_bytes=0,
        num_threads=torch.get_num_threads(),
    )
    with faking(workload.device) as mode, without_values(source.name):
        model = fake_model(
            source,
            dtype=workload.dtype,
            precision=workload.precision,
            adapter=workload.adapter,
            seed=workload.seed,
        )
        batch = fake_batch(mode, given)
        with undisturbed(model), ExitStack() as stack:
            start, execution = fullest(model, batch)
            stack.enter_context(repeating(model, start))
            found = discover(model, batch, execution)
            once = run_once(model, [unit.module for unit in found], batch)
            elision = equal_blocks(model, found, batch, alone=once)
            with elided(found, elision), whereabouts.naming([unit.name for unit in found]):
                anatomy = dissect(
                    model, batch, found, device=workload.device, forms=("keep",), once=once
                )
                units = weigh(model, batch, anatomy, lambda: FakeMeter(allocator_of(device)))
    return Sketch(
        found=tuple(replace(unit, module=None) for unit in found),
        elision=elision,
        units=tuple(filled(units, elision)),
        seed=start.seed,
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
        model = _built(source, workload)
        batches = _batches(source, workload, text=text, device=device)
    found = tuple(
        replace(unit, module=model.get_submodule(unit.name) if unit.kind == "block" else None)
        for unit in sketch.found
    )
    absent = {name for unit in sketch.elision.elided for name in found[unit].parameters}
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
        free = min(free, _available_bytes())
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if limit != resource.RLIM_INFINITY:
            free = min(free, limit - process_memory().data_bytes)
    return max(free, 0)


def _available_bytes() -> int:
    """What the system can give without swapping: `MemAvailable` of proc(5)."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    return int(fields["MemAvailable"].split()[0]) * 1024


def _built(source: ModelSource, workload: Workload) -> nn.Module:
    return source.build(
        dtype=workload.dtype,
        precision=workload.precision,
        adapter=workload.adapter,
        seed=workload.seed,
    )


def _batches(
    source: ModelSource, workload: Workload, *, text: Path | None, device: torch.device
) -> Iterator[Batch]:
    return source.batches(
        batch_size=workload.batch_size,
        seq_len=workload.seq_len,
        dtype=workload.dtype,
        precision=workload.precision,
        device=device,
        text=text,
        seed=workload.seed,
    )


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
    made: dict[nn.Parameter, nn.Parameter] = {
        parameter: parameter for name, parameter in model.named_parameters() if name in absent
    }
    with seeded(seed):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in made:
                    values = torch.empty_like(parameter, device=device, requires_grad=False)
                    values = values.fill_(1) if values.dim() < 2 else values.normal_(std=_INIT_STD)
                    made[parameter] = nn.Parameter(values, parameter.requires_grad)
                module._parameters[name] = made[parameter]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
