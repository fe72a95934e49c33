"""`measure`: a profile of a model on its device."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Unpack

import torch
from torch import nn

from protrain_plan.hardware.overheads import measure_overheads
from protrain_plan.hardware.probe import BRIEF, Progress, Watch, probe
from protrain_plan.hardware.speeds import Stepped, update_speeds
from protrain_plan.models.batches import Batch, first_of, of_one_size, with_batch_sizes
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling.compiling import compilation_since, compiled_so_far
from protrain_plan.profiling.memory import passes
from protrain_plan.profiling.memory.block_classes import (
    BlockClasses,
    equal_blocks,
    filled,
    stubs_in_place,
)
from protrain_plan.profiling.memory.lasting import other_bytes
from protrain_plan.profiling.memory.unit_bytes import (
    ModelStructure,
    analyze_units,
    measure_bytes,
    without_falls,
)
from protrain_plan.profiling.optimizer_cost import optimizer_cost, refuse_sparse, told_of_steps
from protrain_plan.profiling.rehearsal import Rehearsal, Reserve, rehearse
from protrain_plan.profiling.structure import discovery, whereabouts
from protrain_plan.profiling.structure.parameters import refuse_parameters
from protrain_plan.profiling.structure.rerun import run_once
from protrain_plan.profiling.tally import timed
from protrain_plan.profiling.unit_by_unit import (
    SHARE_OF_FREE_MEMORY,
    Options,
    Sketch,
    build_sparsely,
    free_bytes,
    in_its_dtype,
    sketched,
    workload_of,
)
from protrain_plan.simulation.timeline import simulated_seconds
from protrain_runtime.activations.compiled import are_compiled, compile_each, refuse_compiled_around
from protrain_runtime.activations.own_caches import switch_off_caches
from protrain_runtime.activations.own_checkpoints import switch_off_checkpointing
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.records.forms import FORMS, allowed_forms
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.profile import (
    Compilation,
    Form,
    OptimizerCost,
    Profile,
    Repetitions,
    Unit,
    Workload,
)
from protrain_runtime.contract.units import four_digits
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import device_of
from protrain_runtime.diagnostics.matching import model_fingerprint, model_tensors
from protrain_runtime.states.absent import holding_nothing
from protrain_runtime.states.quantized import settle_quantized


def measure(
    source: ModelSource,
    workload: Workload,
    *,
    device: torch.device | str,
    num_steps: int | None,
    spill_directory: Path,
    unit_by_unit: bool = False,
    machine: Hardware | None = None,
    disk_watch: Watch = BRIEF,
    **options: Unpack[Options],
) -> Profile:
    """Build the model, run it, and record its costs.

    A model too large for the device's free memory is measured unit by unit (see `unit_by_unit`),
    others on request. The record notes PyTorch's setting for deterministic kernels. `machine` is
    this one, if already probed; else its disk is written for `disk_watch` before it is measured.
    ProtrainError if the device is missing, the model cannot be built or run, or the machine cannot
    be probed.
    """
    where = devices.found(str(device))
    deterministic = torch.are_deterministic_algorithms_enabled()
    workload = workload_of(source, workload, where.type, deterministic=deterministic)
    text = options.get("text")
    progress: Progress = options.get("progress", lambda *_: None)
    progress("looking at the model", 0.0)
    sketch: Sketch | None = None
    try:
        sketch = sketched(source, workload, text=text)
    except Exception:
        if unit_by_unit:
            raise
        # A model whose code fails on fake tensors is measured whole, and reports its errors there.
    if sketch is not None and not unit_by_unit:
        fits = sketch.whole_bytes <= SHARE_OF_FREE_MEMORY * free_bytes(where)
        sketch = None if fits else sketch
    progress("building the model", 0.02)
    if sketch is not None:
        model, found, batches = build_sparsely(source, workload, sketch, device=where, text=text)
        sketch = replace(sketch, found=found)
    else:
        model = source.build(workload, device=where)
        batches = source.batches(workload, text=text, device=where)
    return measure_model(
        model,
        batches,
        workload=in_its_dtype(workload, source),
        optimizer=options.get("optimizer", DEFAULT_OPTIMIZER),
        allow=options.get("allow", ()),
        num_steps=num_steps,
        spill_directory=spill_directory,
        progress=progress,
        running=sketch,
        machine=machine,
        disk_watch=disk_watch,
    )


def measure_model(
    model: nn.Module,
    batches: Iterator[Batch],
    *,
    workload: Workload,
    num_steps: int | None,
    spill_directory: Path,
    progress: Progress,
    optimizer: str = DEFAULT_OPTIMIZER,
    allow: tuple[str, ...] = (),
    running: Sketch | None = None,
    machine: Hardware | None = None,
    cost: OptimizerCost | None = None,
    disk_watch: Watch = BRIEF,
) -> Profile:
    """The profile of an existing model. Leaves it, its gradients and the random state unchanged.

    `num_steps` are timed per form of activations (None: see `passes.slot_seconds`). `running`
    selects the units that run, if not all: the others' parameters may be on `meta`. `machine` is
    this one, and `cost` the optimizer's on it, if already measured.
    """
    refuse_parameters(model, source=workload.model)
    compiled_before = compiled_so_far()
    let_pack = settle_quantized(model)
    device = device_of(model)
    # What a script has on an accelerator is not free there when a plan is held against its room.
    others = other_bytes(model) if devices.on_host(device) else 0
    with ExitStack() as stack:
        stack.callback(let_pack)
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
        model.zero_grad()
        stack.enter_context(discovery.undisturbed(model))
        stack.callback(switch_off_checkpointing(model))
        stack.callback(switch_off_caches(model))
        batch = first_of(batches, source=workload.model)
        measuring = _Measuring(
            model=model,
            batch=batch,
            batches=of_one_size(batches, batch),
            workload=with_batch_sizes(workload, model, batch),
            optimizer=optimizer,
            allow=allow,
            running=running,
            progress=progress,
            after_s=_PROBING_S if machine is None else 0.0,
            reserve=Reserve(device),
        )
        measuring.find_units(stack)
        structure = measuring.analyzed()
        rehearsal = measuring.rehearsed(structure, spill_directory, timed=num_steps != 1)
        viewed = dict.fromkeys(rehearsal.held_views, HELD_VIEW)
        structure = replace(structure, stays={**viewed, **structure.stays})
        fixed_bytes = structure.fixed_bytes + measuring.reserve.library_bytes()
        measuring.tell("counting bytes", 0.2)
        with stubs_in_place(measuring.found, measuring.classes):
            units, left_bytes = measure_bytes(model, batch, structure, measuring.reserve.meter)
        units = without_falls(filled(units, measuring.classes))
        seconds, launching = measuring.slot_seconds(units, structure.kept, num_steps)
    progress, workload = measuring.tell, measuring.workload
    if machine is None:
        progress("probing the machine", 0.7)
        machine = probe(
            device, spill_directory=spill_directory, dtype=workload.dtype, watch=disk_watch
        )
    if cost is None:
        progress("timing the optimizer", 0.95)
        known_s = machine.rates.host_piece_s if machine.rates else 0.0
        sparse = bool(measuring.sparse)
        cost = _optimizer(workload, optimizer, model, spill_directory, known_s, sparse=sparse)
    compilation = compilation_since(compiled_before)
    unseen = compiler_bytes(compilation) if devices.on_host(device) else 0
    held = replace(
        machine.device,
        context_bytes=rehearsal.context_bytes + unseen,
        allocator_bytes=measuring.reserve.most_bytes,
    )
    units = timed(units, seconds, launching, _alike(units, measuring.block_classes))
    profile = Profile(
        workload=workload,
        hardware=replace(machine, device=held),
        method="measured",
        model_fingerprint=model_fingerprint(model),
        optimizer=cost,
        base_bytes=structure.base_bytes + others + left_bytes,
        units=told_of_steps(units, workload, cost),
        tensors=model_tensors(model),
        fixed_bytes=fixed_bytes,
        varies=str(measuring.varies or ""),
        allowed=allow,
    )
    progress("done", 1.0)
    repeated = _repetitions(seconds, rehearsal, profile)
    return replace(profile, repetitions=repeated, compilation=compilation)


@dataclass(kw_only=True)
class _Measuring:
    """The steps of a measured profile on a model and its first batch, in order."""

    model: nn.Module
    batch: Batch
    batches: Iterator[Batch]
    workload: Workload
    optimizer: str
    allow: tuple[str, ...]
    running: Sketch | None
    progress: Progress
    after_s: float  # what follows the steps takes
    ends: float = 0.0  # expected, on the monotonic clock
    reserve: Reserve

    def tell(self, what: str, fraction: float) -> None:
        """Report a pass, with its estimated end once a step's time is known."""
        left = self.ends - time.monotonic()
        self.progress(whereabouts.with_rest(what, left) if left > 1 else what, fraction)

    def expect(self, seconds: float) -> None:
        """Set the expected seconds of the remaining steps."""
        self.ends = time.monotonic() + seconds + self.after_s

    def find_units(self, stack: ExitStack) -> None:
        """Find and compile the units, with stubs for those that do not run until the stack ends."""
        self.tell("finding units", 0.05)
        model, batch = self.model, self.batch
        if (running := self.running) is None:
            start, execution = discovery.fullest(model, batch)
            self.found = discovery.discover(model, batch, execution)
            self.block_classes = BlockClasses(tuple(range(len(self.found))), {})
            self.varies = discovery.variation(model, execution, self.batches)
        else:
            start = discovery.Start(running.seed, discovery.plain_attributes(model))
            self.varies = None
            self.found, self.block_classes = running.found, running.block_classes
            if running.varies:  # all units run
                execution = discovery.record_execution(model, batch, start)
                self.varies = discovery.variation(model, execution, self.batches)
        stack.enter_context(discovery.starting_from(model, start))
        refuse_compiled_around(model, (unit.module for unit in self.found))
        blocks = {unit.name: unit.module for unit in self.found if unit.module is not None}
        if are_compiled(blocks):
            self.workload = replace(self.workload, compile="blocks")
        elif self.workload.compile:
            stack.callback(compile_each(blocks))
        stack.enter_context(stubs_in_place(self.found, self.block_classes))
        stack.enter_context(whereabouts.naming([unit.name for unit in self.found]))
        self.modules = [unit.module for unit in self.found]
        # A first step fills caches, and reveals sparse gradients.
        watch = passes.SlotWatch(lambda *_: None)
        with passes.watched(model, self.modules, "keep", watch), self.reserve.watching():
            passes.training_step(model, batch)
        grads = ((name, parameter.grad) for name, parameter in model.named_parameters())
        self.sparse = {n for n, g in grads if g is not None and g.layout != torch.strided}
        model.zero_grad()
        refuse_sparse(self.sparse, self.optimizer, self.workload)

    def analyzed(self) -> ModelStructure:
        """The bytes that units save, by form."""
        self.tell("finding what is saved", 0.1)
        began = time.monotonic()
        once = run_once(self.model, self.found, self.batch)
        step_s = max(time.monotonic() - began, 1e-3)
        many = _STEPS_BESIDES + len(FORMS) / 2 * passes.sampled_steps(step_s)
        self.expect(many * step_s)
        # Bytes of equal blocks are counted once; seconds are the whole model's. Blocks' saved
        # tensors are visible only below the compiler: all compiled ones run.
        compiled = bool(self.workload.compile)
        if self.running is None and not compiled and self.varies is None:
            self.classes = equal_blocks(self.model, self.found, self.batch, alone=once)
        else:
            self.classes = self.block_classes
        with stubs_in_place(self.found, self.classes):
            return analyze_units(
                self.model,
                self.batch,
                self.found,
                device=self.workload.device,
                forms=allowed_forms(self.allow, compiled=compiled),
                optimizer=self.optimizer,
                precision=self.workload.precision,
                once=once,
                variation=self.varies,
            )

    def rehearsed(
        self, structure: ModelStructure, spill_directory: Path, *, timed: bool
    ) -> Rehearsal:
        """A rehearsal of a run, with a `timed` step if all units run."""
        self.tell(whereabouts.REHEARSING, 0.15)
        by_rows = {
            chunk.unit
            for chunk in structure.chunks
            if any(part.name in self.sparse for part in chunk.slices)
        }
        units = [  # with the inputs of those that ran
            replace(unit, own_inputs=structure.units[ran].own_inputs)
            for unit, ran in zip(structure.units, self.classes.representatives, strict=True)
        ]
        with holding_nothing(self.model, device_of(self.model)):  # of units that do not run
            return rehearse(
                self.model,
                self.batch,
                units,
                self.workload,
                spill_directory,
                self.reserve,
                optimizer=self.optimizer,
                absent=[*self.block_classes.outputs],
                staying=structure.stays.keys() | by_rows,
                swapped_bytes=sum(sum(saved.pieces) for saved in structure.saved["keep"]),
                timed=timed and self.running is None,
            )

    def slot_seconds(
        self, units: Sequence[Unit], kept: Set[int], num_steps: int | None
    ) -> tuple[passes.SlotSeconds, passes.SlotSeconds]:
        """Seconds of slots in all of the units' forms, and of the launching thread."""
        measured = {cost.form for unit in units for cost in unit.forms}
        began = time.monotonic()

        def tick(done: float) -> None:
            self.expect((time.monotonic() - began) * (1 / done - 1))
            self.tell("timing steps", 0.25 + 0.45 * done)

        # Kinds of batches run different blocks: the first runs all.
        kinds = self.varies is not None and not self.varies.by_values
        return passes.slot_seconds(
            self.model,
            self.modules,
            repeat(self.batch) if kinds else self.batches,
            [form for form in FORMS if form in measured],
            num_steps=num_steps,
            tick=tick,
            kept=kept,
        )


HELD_VIEW = "a view of its parameters is held after their slot"


_STEPS_BESIDES, _PROBING_S = 30, 25.0
"""Rehearsed and counted steps, in units of the first one, and the probe's seconds: measured with
`tiny-llama` and `smollm2-135m` on two busy cores. About half of all forms are measured."""


_COMPILER_BYTES = 64 * 2**20
"""Bytes that a process holds more where PyTorch's cache has no graph: 39 MiB of SmolLM2 135M's one
(443.0 MiB besides tensors in a cold run, 404.1 in a warm one), and up to 48 MiB with two threads
(PyTorch 2.13 on an x86 machine)."""
_GRAPH_BYTES = 16 * 2**20  # per further graph; fewer were measured


def compiler_bytes(found: Compilation | None) -> int:
    """Bytes of a cold run's compiler that this process's cache avoided: a run may be cold."""
    if found is None or found.cache not in ("warm", "partly"):
        return 0
    return _COMPILER_BYTES + (found.num_graphs - 1) * _GRAPH_BYTES


def _optimizer(
    workload: Workload,
    name: str,
    model: nn.Module,
    spill_directory: Path,
    known_s: float,
    *,
    sparse: bool,
) -> OptimizerCost:
    """Its speeds on the model's tensor sizes, measured like the default optimizer's `known_s`."""
    where = device_of(model)
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    stepped = Stepped(workload.dtype, name, workload.precision)
    host, device = update_speeds(stepped, shapes, device=where)
    cost = optimizer_cost(model, workload, name, device=where, sparse=sparse)
    # Whole-parameter updates do not step on pieces.
    pieces = name if cost.block else DEFAULT_OPTIMIZER
    piece_s = known_s if pieces == DEFAULT_OPTIMIZER else 0.0
    piece_s = piece_s or measure_overheads(spill_directory, device=where, optimizer=pieces).piece_s
    return replace(
        cost,
        host_parameters_per_s=four_digits(host),
        device_parameters_per_s=four_digits(device),
        host_piece_s=four_digits(piece_s),
    )


def _alike(units: Sequence[Unit], block_classes: BlockClasses) -> list[list[int]]:
    """For each unit those that ran of its class: blocks of equal parameters and saved bytes."""
    classes: dict[object, list[int]] = defaultdict(list)
    members: list[list[int]] = []
    for index, representative in enumerate(block_classes.representatives):
        unit = units[representative]
        saved_bytes = tuple(form.swappable_bytes for form in unit.forms)
        alike = (unit.num_parameters, unit.parameter_bytes, saved_bytes)
        members.append(classes[alike if unit.kind == "block" else index])
        if representative == index:
            members[-1].append(index)
    return members


def _repetitions(
    seconds: dict[Form, list[list[float]]], rehearsal: Rehearsal, profile: Profile
) -> Repetitions | None:
    """The spread of whole steps' times; None if each form ran once."""
    steps = [[sum(slots) for slots in repeated] for repeated in seconds.values()]
    if len(steps[0]) < 2:
        return None
    ratios = [one / statistics.median(repeated) for repeated in steps for one in repeated]
    planned = 0.0
    if rehearsal.step_seconds is not None:
        simulated, _ = simulated_seconds(program_of(rehearsal.plan, profile))
        planned = four_digits(rehearsal.step_seconds / simulated)
    return Repetitions(
        num_steps=len(ratios),
        low=four_digits(min(ratios)),
        high=four_digits(max(ratios)),
        planned=planned,
    )
