"""`train`: run a profiled model on real text, plainly or under a plan, and measure the run.

The optimizer is the profile's.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from protrain_plan.models.batches import Batch, byte_tokens, call_model, loss_of
from protrain_plan.models.building import kernels
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.presentation.terminal import fields_of
from protrain_plan.profiling.compiling import compilation_since, compiled_so_far, compiled_whole
from protrain_plan.profiling.unit_by_unit import SHARE_OF_FREE_MEMORY, free_bytes
from protrain_runtime.activations.trees import tensors_in
from protrain_runtime.checkpoint.folders import check_writable
from protrain_runtime.checkpoint.loading import load, read_extra
from protrain_runtime.checkpoint.saving import save
from protrain_runtime.checkpoint.weights import Weights
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.recording import Recording
from protrain_runtime.contract.records.folding import unfolded
from protrain_runtime.contract.records.hardware import is_accelerator
from protrain_runtime.contract.records.plan import Plan, TierBytes
from protrain_runtime.contract.records.profile import Compilation, Profile
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.device import explained_exhaustion
from protrain_runtime.devices.memory_meter import device_of, storage_bytes
from protrain_runtime.devices.preflight import room_here
from protrain_runtime.devices.stores import memory_of
from protrain_runtime.diagnostics.out_of_memory import explain_memory
from protrain_runtime.diagnostics.recording import Recorder, measure_step, record
from protrain_runtime.engine.engine import Observer
from protrain_runtime.model.prepared import below_device, parameter_values
from protrain_runtime.preparation import compile_blocks, prepare
from protrain_runtime.ranks.group import check_ranks
from protrain_runtime.states.absent import absent_parameters, give_places, without_parameters
from protrain_runtime.states.host_steps import stepping_as
from protrain_runtime.states.quantized import pack_absent

if TYPE_CHECKING:
    from protrain_plan.commands.run import RunOptions

CLIP_NORM = 1.0
"""Norm that gradients are clipped to under plans with updates after backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's results. Peaks are None if the run was too short to measure them.

    `first_step` is the number of steps that were done when it resumed. `measured_peak_bytes.device`
    counts tensors in the last step; `.context` is the maximum that the process held besides them
    (CPU), at the starts of slots in that step; `slot_bytes` are the device's peaks in every slot of
    a planned run's last step, and in the update after them.
    """

    first_step: int
    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # of every step that was not measured for memory
    parameters_sha256: str
    measured_peak_bytes: TierBytes | None
    slot_bytes: tuple[int, ...]
    recording: Recording | None = None  # of the last timed step, if wanted
    compilation: Compilation | None = None  # by PyTorch's compiler, in all steps

    @property
    def step_seconds(self) -> float:
        """The median of the steps after the first."""
        return statistics.median(self.seconds[1:] or self.seconds)


def train(
    plan: Plan,
    options: "RunOptions",
    *,
    plain: bool,
    compared: bool = False,
    report: Callable[[str, float], None] = lambda *_: None,
    rank: int = 0,
    profile: Callable[[], Profile | None] = lambda: None,
) -> Run:
    """Build the plan's model and train it until all steps are done; `plain`: plain PyTorch.

    A resumed run computes the same as an unbroken one. The loss of a step is the mean of the plan's
    micro-batches; if the plan updates after backward, gradients are clipped to CLIP_NORM. `profile`
    finds the plan's profile, for messages when memory runs out. A recorded run has times of the
    last step but one, and bytes of the last. With several devices this is rank `rank`, and `plain`
    is DistributedDataParallel. A run that is `compared` has no checkpoints, and no bytes are
    counted; a plain one then updates the plan's host-updated parameters on the host. Raises
    ProtrainError if the model cannot be built, the plan is for another model, memory runs out, or a
    checkpoint cannot be read or written.
    """
    workload, weights, group = plan.workload, options.weights, plan.group
    report(f"{'plain' if plain else 'planned'}: preparing", 0.0)
    # All ranks have what rank 0 saves.
    save_to = None if compared or (plain and rank > 0) else options.save
    if save_to is not None and rank == 0:  # ranks may not look at the same time
        check_writable(save_to)
    source = load_source(workload.model, model_config=workload.model_config)
    factory = optimizer_factory(plan.optimizer)  # refuse a wrong name at once
    device = devices.found(options.device or workload.device)
    if device.type != workload.device:
        problem = f"the plan is for a device of type '{workload.device}', and '{device}' is none"
        raise ProtrainError(problem, key="--device", fix="profile and plan for that device")
    fix = "plan with a smaller --device-memory than the limit, and run that plan"
    if plain:
        fix = "plan this workload for the available memory, and run the plan"
    with ExitStack() as running:
        running.enter_context(devices.current(device))
        if is_accelerator(device.type):
            running.enter_context(kernels(deterministic=workload.deterministic))
        running.enter_context(explained_exhaustion(fix=fix))
        build = partial(source.build, workload)
        several = plain and group.num_devices > 1
        optimizer: torch.optim.Optimizer
        if plain:
            model, optimizer = _plainly(plan, build, device, weights, compared=compared)
            if several:
                check_ranks(plan, None)
        else:
            model, optimizer = prepare(
                _to_prepare(plan, build, device, weights),
                plan,
                weights=weights,
                optimizer=factory,
                spill_directory=options.spill_directory,
                check=options.asked,
                watch=False,  # the last step is measured
            )
        # The rank's batches, out of the needed batches of all ranks.
        batches = source.batches(workload, text=options.text, device=device)
        needed = options.steps * plan.settings.micro_batches * group.num_devices
        batches = _enough(batches, needed, source=workload.model)
        batches = islice(batches, rank, None, group.num_devices)
        torch.manual_seed(workload.seed + rank)  # of dropout
        trainer = _Trainer(
            plan=plan,
            model=model,
            call=DistributedDataParallel(model) if several else model,
            optimizer=optimizer,
            options=options,
            save_to=save_to,
            training=_training(plan, options.text),
            plain=plain,
            compared=compared,
        )
        if several and workload.compile:
            running.enter_context(compiled_whole())
        with explain_memory(model, profile):
            return trainer.run(batches, report)


def _plainly(
    plan: Plan,
    build: Callable[..., nn.Module],
    device: torch.device,
    weights: Path | None,
    *,
    compared: bool,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer of plain PyTorch, whole on the device."""
    if weights is None:
        model = build(device=device)
    else:  # the values of a planned model that it is compared with
        with without_parameters():
            model = build(device=device)
        absent = absent_parameters(model)
        pack_absent(model)
        give_places(model, device, set())
        Weights(weights, absent).fill(model, None)
    make = optimizer_factory(plan.optimizer, plan.workload.precision)
    if compared:
        make = stepping_as(plan, model, make)
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    if plan.workload.compile:
        compile_blocks(model, plan)
    return model, optimizer


def _to_prepare(
    plan: Plan, build: Callable[..., nn.Module], device: torch.device, weights: Path | None
) -> nn.Module | Callable[[], nn.Module]:
    """The model; its maker if its values come from files or it would take much room."""
    if weights is not None:
        return partial(build, device=device)
    # A process's limit may be the plan's peak, which has no room for a whole model.
    if room_here(device, Path()).data_limit is not None:
        return build
    total = 0  # bytes of parameters and buffers
    for content in unfolded(plan.tensors).values():
        if content.startswith("tied to "):
            continue
        shape, dtype, *_ = content.split()
        sizes = () if shape == "scalar" else map(int, shape.split("x"))
        total += prod(sizes) * getattr(torch, dtype).itemsize
    return build if total > SHARE_OF_FREE_MEMORY * free_bytes(device) else build(device=device)


def _enough(batches: Iterator[Batch], needed: int, *, source: str) -> Iterator[Batch]:
    """Yield `needed` batches; ProtrainError after the last one if there are fewer."""
    number = 0
    for batch in islice(batches, needed):
        yield batch
        number += 1
    if number < needed:
        raise ProtrainError(
            f"the factory returned {number} batches, but training needs {needed}",
            source=source,
            fix="fewer --steps, or return a re-iterable object from the factory, such as a"
            " list or a DataLoader, in place of an iterator",
        )


def _training(plan: Plan, text: Path | None) -> dict[str, object]:
    """Facts about the computation, under any plan, that a run and its checkpoint share."""
    names = (
        *("model", "model_config", "adapter", "quantize", "compile", "dtype", "precision"),
        *("batch_size", "seq_len", "seed"),
    )
    found: dict[str, object] = {name: getattr(plan.workload, name) for name in names}
    found |= fields_of(plan, "optimizer") | fields_of(plan.settings, "updates", "micro_batches")
    found |= fields_of(plan.group, "num_devices")
    found["text"] = "" if text is None else hashlib.sha256(byte_tokens(text)).hexdigest()
    left_out = {"quantize": "", "compile": "", "num_devices": 1}  # keys that came later
    return {name: value for name, value in found.items() if value != left_out.get(name)}


@dataclass(kw_only=True)
class _Trainer:
    plan: Plan
    model: nn.Module
    call: nn.Module  # the model, or its wrapper on several devices
    optimizer: torch.optim.Optimizer
    options: "RunOptions"
    save_to: Path | None
    training: Mapping[str, object]
    plain: bool
    compared: bool
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: TierBytes | None = None
    slots: tuple[int, ...] = ()

    def run(self, batches: Iterator[Batch], report: Callable[[str, float], None]) -> Run:
        num_steps, every = self.options.steps, self.options.save_every
        first, compiled_before = self._resume(batches), compiled_so_far()
        records = self.options.recording is not None and not self.plain
        recorder: Recorder | None = None
        last_timed = max(num_steps - 2, first)
        for step in range(first, num_steps):
            micro_batches = list(islice(batches, self.plan.settings.micro_batches))
            if not self.compared and first < step == num_steps - 1:
                # Only the last one: remains of a memory meter would count in steps after it.
                self._measured_step(micro_batches)
            else:
                with ExitStack() as recorded:
                    if records and step == last_timed:
                        recorder = recorded.enter_context(record(self.model))
                    start = time.perf_counter()
                    self._step(micro_batches)
                    self.seconds.append(time.perf_counter() - start)
            done = step + 1
            kind = "plain" if self.plain else "planned"
            said = f"{kind}: step {done} of {num_steps}, loss {self.losses[-1]:.4f}"
            report(said, done / num_steps)
            is_due = done == num_steps or (every is not None and done % every == 0)
            if self.save_to is not None and is_due:
                extra = {"step": done, "training": self.training}
                save(self.model, self.optimizer, self.save_to, extra=extra)
        return Run(
            first_step=first,
            losses=tuple(self.losses),
            seconds=tuple(self.seconds),
            parameters_sha256=digest(self.model),
            measured_peak_bytes=self.peak,
            slot_bytes=self.slots,
            recording=recorder.recording(slot_bytes=self.slots) if recorder else None,
            compilation=compilation_since(compiled_before),
        )

    def _resume(self, batches: Iterator[Batch]) -> int:
        """Continue from the checkpoint; returns the number of steps that it has done."""
        directory, num_steps = self.options.resume, self.options.steps
        if directory is None or self.compared:
            return 0
        extra, source = read_extra(directory), str(directory)
        done, training = extra.get("step"), extra.get("training")
        if not isinstance(done, int) or not isinstance(training, dict):
            problem = "the checkpoint was not written by protrain run"
            fix = "load it in the script that wrote it, with protrain_runtime.load"
            raise ProtrainError(problem, source=source, fix=fix)
        if keys := [key for key, value in self.training.items() if training.get(key) != value]:
            problem = f"the checkpoint is from a different training run: {', '.join(keys)} differ"
            fix = "resume it with a plan for the same training, and the same --text"
            raise ProtrainError(problem, source=source, fix=fix)
        if done >= num_steps:
            problem = f"the checkpoint has {done} steps done: none of {num_steps} are left"
            fix = "--steps counts from the first step: use a larger number"
            raise ProtrainError(problem, source=source, fix=fix)
        for _ in islice(batches, done * self.plan.settings.micro_batches):
            pass  # batches of the steps before
        load(self.model, self.optimizer, directory)  # random states, too: last
        return done

    def _step(self, micro_batches: Sequence[Batch], observe: Observer | None = None) -> None:
        total = 0.0
        for number, batch in enumerate(micro_batches, start=1):
            ddp = self.call if isinstance(self.call, DistributedDataParallel) else None
            with ddp.no_sync() if ddp and number < len(micro_batches) else nullcontext():
                loss = loss_of(call_model(self.call, batch)) / len(micro_batches)
                loss.backward()
            total += loss.item()
        if observe is not None:
            observe("update")
        if self.plan.settings.updates == "after backward":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total)

    def _measured_step(self, micro_batches: Sequence[Batch]) -> None:
        # A loop loads one batch after the other; here all are loaded, since a meter does not see
        # the end of tensors from before it.
        others = storage_bytes(tensors_in(micro_batches[1:]))

        def step(observe: Observer) -> None:
            self._step(micro_batches, observe)
            if isinstance(self.call, DistributedDataParallel):
                # DistributedDataParallel waits for the results of its collectives, and gloo's
                # thread still notes their end then: after the profiler stopped, in freed memory.
                torch.distributed.barrier()
                time.sleep(0.1)

        memory = measure_step(self.model, step, besides_bytes=others)
        host, disk = below_device(self.model)
        device = device_of(self.model)
        reserved = 0 if devices.on_host(device) else torch.accelerator.max_memory_reserved(device)
        self.slots = memory.slot_bytes
        self.peak = TierBytes(
            device=memory.device_bytes,
            context=memory.context_bytes,
            allocator=max(0, reserved - memory.device_bytes),
            host=host,
            disk=disk,
        )


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters' names and bytes, in the model's order."""
    sha = hashlib.sha256()
    for name, value in parameter_values(model):
        sha.update(name.encode())
        sha.update(memory_of(value.cpu().contiguous().view(-1).view(torch.uint8)))
    return sha.hexdigest()
