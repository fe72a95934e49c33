"""`measure`: a profile of a model on the device that it runs on."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from protrain_plan.hardware.interference import fused_adamw, update_speeds
from protrain_plan.hardware.probe import probe
from protrain_plan.models.batches import Batch
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling import passes
from protrain_plan.profiling.discovery import FoundUnit, discover
from protrain_plan.profiling.execution import undisturbed
from protrain_plan.profiling.rehearsal import context_bytes
from protrain_plan.records.hardware import DeviceKind
from protrain_plan.records.plan import Keep, Persistent, UnitPlan
from protrain_plan.records.profile import (
    DType,
    Form,
    FormCost,
    OptimizerCost,
    Profile,
    Unit,
    Workload,
)
from protrain_runtime.boundaries import tensors_in
from protrain_runtime.chunks import Chunk, make_chunk
from protrain_runtime.fingerprint import model_fingerprint
from protrain_runtime.layout import unit_parameters
from protrain_runtime.measure import MemoryMeter, Segment, storage_bytes
from protrain_runtime.pieces import elementwise_states

Progress = Callable[[str, float], None]
"""Told what is being done, and the fraction that is done."""


def measure(
    source: ModelSource,
    *,
    batch_size: int,
    seq_len: int,
    dtype: DType,
    device: DeviceKind,
    seed: int,
    num_steps: int,
    spill_directory: Path,
    text: Path | None,
    progress: Progress,
) -> Profile:
    """Build the model, run it, and write down what it costs.

    ProtrainError where the model cannot be built or run, or the machine cannot be probed.
    """
    progress("building the model", 0.0)
    model = source.build(dtype=dtype, device=device, seed=seed)
    batches = source.batches(
        batch_size=batch_size, seq_len=seq_len, device=device, text=text, seed=seed
    )
    workload = Workload(
        model=source.name,
        model_config=source.model_config,
        batch_size=batch_size,
        seq_len=seq_len,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    return measure_model(
        model,
        batches,
        workload=workload,
        num_steps=num_steps,
        spill_directory=spill_directory,
        progress=progress,
    )


def measure_model(
    model: nn.Module,
    batches: Iterator[Batch],
    *,
    workload: Workload,
    num_steps: int,
    spill_directory: Path,
    progress: Progress,
) -> Profile:
    """The profile of a model that is there. Leaves it, its gradients and the random state alone."""
    with _gradients_aside(model), undisturbed(model):
        batch = next(batches)
        progress("finding units", 0.05)
        found = discover(model, batch)
        modules = [unit.module for unit in found]
        forms: tuple[Form, ...] = ("keep", "full")
        passes.training_step(model, batch)  # fills caches that the first step makes
        passes.drop_gradients(model)
        progress("finding what is saved", 0.1)
        held_inputs = passes.shared_input_bytes(model, modules, batch)
        keep = passes.saved_bytes(model, modules, batch, "keep")
        own_inputs = [unit.own_inputs for unit in keep]
        full = passes.saved_bytes(model, modules, batch, "full", own_inputs=own_inputs)
        saved: dict[Form, list[passes.SavedBytes]] = {"keep": keep, "full": full}
        chunks = _chunks(model, found)
        progress("rehearsing a planned step", 0.15)
        context = context_bytes(
            model, batch, _described(found, chunks, saved["keep"]), workload, spill_directory
        )
        progress("counting bytes", 0.2)
        memory = {form: passes.memory_segments(model, modules, batch, form) for form in forms}
        units = _units(found, chunks, saved, memory)
        seconds: dict[Form, list[list[float]]] = {}
        total, done = len(forms) * (num_steps + 1), 0

        def tick() -> None:
            nonlocal done
            done += 1
            progress("timing steps", 0.25 + 0.45 * done / total)

        for form in forms:
            seconds[form] = passes.slot_seconds(
                model, modules, batches, form, num_steps=num_steps, tick=tick
            )
    progress("probing the machine", 0.7)
    hardware = probe(
        workload.device,
        spill_directory=spill_directory,
        context_bytes=context,
        dtype=workload.dtype,
    )
    progress("timing the optimizer", 0.95)
    # AdamW counts steps in one fp32 scalar per parameter, cloned while its update is in flight;
    # losses and their gradients are a few scalars more.
    scalars = 8 * sum(len(chunk.slices) for chunk in chunks) + 256
    profile = Profile(
        workload=workload,
        hardware=hardware,
        method="measured",
        model_fingerprint=model_fingerprint(model),
        optimizer=_optimizer(workload),
        base_bytes=storage_bytes([*model.buffers(), *tensors_in(batch)]) + scalars + held_inputs,
        units=_timed(units, seconds),
    )
    progress("done", 1.0)
    return profile


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """Without gradients inside, with the same ones as before afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    passes.drop_gradients(model)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _listed(unit: FoundUnit) -> tuple[str, ...]:
    """The parameters to name in the record: all of a part's, and a block's from elsewhere."""
    if unit.kind == "part":
        return tuple(sorted(unit.parameters))
    inside = tuple(name for name in unit.parameters if not name.startswith(f"{unit.name}."))
    return tuple(sorted(inside))


def _chunks(model: nn.Module, found: Sequence[FoundUnit]) -> list[Chunk]:
    shape = [(unit.kind, unit.name, _listed(unit)) for unit in found]
    parameters = unit_parameters(model, shape)
    owner = {name: index for index, unit in enumerate(parameters) for name, _ in unit}
    users: list[list[int]] = [[index] for index in range(len(found))]
    for index, unit in enumerate(found):
        for name in unit.also_uses:
            if index not in users[owner[name]]:
                users[owner[name]].append(index)
    return [
        make_chunk(index, unit, tuple(users[index]) if unit else ())
        for index, unit in enumerate(parameters)
    ]


def _described(
    found: Sequence[FoundUnit], chunks: Sequence[Chunk], saved: Sequence[passes.SavedBytes]
) -> list[UnitPlan]:
    """What the units are, as a plan says it, with nothing decided."""
    return [
        UnitPlan(
            name=unit.name,
            kind=unit.kind,
            parameters=_listed(unit),
            also_used_by=tuple(found[user].name for user in chunk.used_by if user != index),
            own_inputs=own.own_inputs,
            activations=Keep(),
            states=Persistent(),
        )
        for index, (unit, chunk, own) in enumerate(zip(found, chunks, saved, strict=True))
    ]


def _units(
    found: Sequence[FoundUnit],
    chunks: Sequence[Chunk],
    saved: dict[Form, list[passes.SavedBytes]],
    memory: dict[Form, tuple[Segment, ...]],
) -> list[Unit]:
    count = len(found)
    units: list[Unit] = []
    per_parameter = _state_bytes(chunks)
    for index, unit in enumerate(found):
        size = chunks[index].size(per_parameter)
        forms: list[FormCost] = []
        for form, cuts in memory.items():
            before = cuts[index].start_bytes
            level = cuts[index + 1].start_bytes
            backward = cuts[2 * count - 1 - index]
            # Gradients of units that ran before in backward stand in this pass; a plan says
            # what becomes of them. A tied one stands from its last use on.
            gradients = sum(
                chunk.gradient_bytes
                for chunk in chunks
                if chunk.used_by and max(chunk.used_by) > index
            )
            pieces = saved[form][index].pieces
            forms.append(
                FormCost(
                    form=form,
                    forward_peak_bytes=cuts[index].peak_bytes - before,
                    kept_bytes=level - before,
                    backward_peak_bytes=backward.peak_bytes - level - gradients,
                    swappable_bytes=saved[form][index].swappable_bytes,
                    swap_pieces=pieces if len(pieces) > 1 else (),
                    forward_s=0.0,
                    backward_s=0.0,
                )
            )
        if unit.kind == "part":
            forms = [_either(forms)]
        units.append(
            Unit(
                name=unit.name,
                kind=unit.kind,
                num_parameters=size.num_parameters,
                parameter_bytes=size.parameter_bytes,
                gradient_bytes=size.gradient_bytes,
                state_bytes=size.state_bytes,
                used_by=size.used_by,
                parameter_pieces=size.parameter_pieces,
                gradient_pieces=size.gradient_pieces,
                forms=tuple(forms),
                parameters=_listed(unit),
                own_inputs=saved["keep"][index].own_inputs if unit.kind == "block" else (0,),
            )
        )
    return units


def _either(forms: Sequence[FormCost]) -> FormCost:
    """A part's costs whatever forms the blocks have.

    A block that is recomputed may hold inputs that several units share, which otherwise end with
    the model's forward.
    """
    return replace(
        forms[0],
        forward_peak_bytes=max(form.forward_peak_bytes for form in forms),
        kept_bytes=max(form.kept_bytes for form in forms),
        backward_peak_bytes=max(form.backward_peak_bytes for form in forms),
    )


def _state_bytes(chunks: Sequence[Chunk]) -> dict[torch.dtype, int]:
    dtypes = {part.dtype for chunk in chunks for part in chunk.slices}
    return {
        dtype: sum(state.itemsize for state in elementwise_states(fused_adamw, dtype).values())
        for dtype in dtypes
    }


def _optimizer(workload: Workload) -> OptimizerCost:
    host, device = update_speeds(workload.dtype, device=workload.device)
    parameter = nn.Parameter(torch.zeros(2**20, device=workload.device))
    stepper = fused_adamw([parameter])
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        with MemoryMeter(workload.device) as meter:
            meter.mark("step")
            stepper.step()
    segment = meter.segments[0]
    extra = segment.peak_bytes - segment.start_bytes
    return OptimizerCost(
        name="adamw",
        host_parameters_per_s=_rounded(host),
        device_parameters_per_s=_rounded(device),
        workspace_fraction=_rounded(extra / (parameter.numel() * parameter.itemsize)),
    )


def _timed(units: Sequence[Unit], seconds: dict[Form, list[list[float]]]) -> tuple[Unit, ...]:
    """The units with the medians of their slots' seconds.

    Blocks of equal parameters and saved bytes are one class, and share the median over them all.
    """
    count = len(units)
    classes: dict[object, list[int]] = {}
    for index, unit in enumerate(units):
        saved = tuple(form.swappable_bytes for form in unit.forms)
        alike = (unit.num_parameters, unit.parameter_bytes, saved)
        classes.setdefault(alike if unit.kind == "block" else index, []).append(index)
    timed = list(units)
    for members in classes.values():
        for index in members:
            forms = tuple(
                replace(
                    form,
                    forward_s=_median(seconds[form.form], members),
                    backward_s=_median(seconds[form.form], [2 * count - 1 - m for m in members]),
                )
                for form in units[index].forms
            )
            timed[index] = replace(units[index], forms=forms)
    return tuple(timed)


def _median(steps: Sequence[Sequence[float]], slots: Sequence[int]) -> float:
    return _rounded(statistics.median(step[slot] for step in steps for slot in slots))


def _rounded(value: float) -> float:
    """Four significant digits: more would only be noise in a diff."""
    return float(f"{value:.4g}")
