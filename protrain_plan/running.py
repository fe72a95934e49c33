"""`train`: run a profiled model on real text, plainly or under a plan, and measure the run.

The optimizer is the one whose states the profile counted.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_plan.records.plan import Plan, TierBytes
from protrain_runtime.boundaries import tensors_in
from protrain_runtime.engine import Observer
from protrain_runtime.exhaustion import explained_exhaustion
from protrain_runtime.masters import with_master_weights
from protrain_runtime.measure import storage_bytes
from protrain_runtime.preparation import below_device, parameter_values, prepare
from protrain_runtime.recording import measure_step
from protrain_runtime.stores import memory_of

CLIP_NORM = 1.0
"""What gradients are clipped to, as one norm, under plans that leave room for it."""

OnStep = Callable[[int, float], None]
"""Told of every step: its number and its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's results. Peaks are None where the run was too short to measure them.

    `measured_peak_bytes.device` counts tensors, in the last step; `.context` is the most that
    the process held besides them (CPU), at the starts of slots in that step; `slot_bytes` are the
    device's peaks in every slot of a planned run's last step, and in the update after them.
    """

    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # of every step that was not measured for memory
    parameters_sha256: str
    measured_peak_bytes: TierBytes | None
    slot_bytes: tuple[int, ...]

    @property
    def step_seconds(self) -> float:
        """The median of the steps after the first."""
        return statistics.median(self.seconds[1:] or self.seconds)


def train(
    plan: Plan,
    *,
    num_steps: int,
    plain: bool,
    text: Path | None,
    spill_directory: Path | None,
    on_step: OnStep = lambda *_: None,
) -> Run:
    """Build the plan's model and train it for `num_steps`; `plain` runs ordinary PyTorch.

    A step has the plan's micro-batches, its loss is their mean; where the plan updates after
    backward, gradients are clipped to CLIP_NORM.
    ProtrainError where the model cannot be built, the plan is not for it, or memory ran out.
    """
    workload = plan.workload
    source = load_source(workload.model, model_config=workload.model_config)
    factory = optimizer_factory(plan.optimizer)
    with explained_exhaustion(
        fix="plan this workload for the memory there is, and run the plan"
        if plain
        else "plan with a smaller --device-memory than the limit, and run that plan"
    ):
        model = source.build(
            dtype=workload.dtype,
            precision=workload.precision,
            adapter=workload.adapter,
            device=workload.device,
            seed=workload.seed,
        )
        batches = source.batches(
            batch_size=workload.batch_size,
            seq_len=workload.seq_len,
            dtype=workload.dtype,
            precision=workload.precision,
            device=workload.device,
            text=text,
            seed=workload.seed,
        )
        optimizer: torch.optim.Optimizer
        if plain:
            masters = workload.precision == "master"
            make = with_master_weights(factory) if masters else factory
            optimizer = make(p for p in model.parameters() if p.requires_grad)
        else:
            model, optimizer = prepare(
                model, plan, optimizer=factory, spill_directory=spill_directory
            )
        torch.manual_seed(workload.seed)  # of dropout
        return _Trainer(plan, model, optimizer).run(batches, num_steps, on_step)


class _Trainer:
    def __init__(self, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._plan, self._model, self._optimizer = plan, model, optimizer
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._peak: TierBytes | None = None
        self._slots: tuple[int, ...] = ()

    def run(self, batches: Iterator[Batch], num_steps: int, on_step: OnStep) -> Run:
        for step in range(num_steps):
            micro_batches = list(islice(batches, self._plan.micro_batches))
            if 0 < step == num_steps - 1:
                # The last one: what a memory meter leaves behind would count in steps after it.
                self._measured_step(micro_batches)
            else:
                start = time.perf_counter()
                self._step(micro_batches)
                self._seconds.append(time.perf_counter() - start)
            on_step(step, self._losses[-1])
        return Run(
            losses=tuple(self._losses),
            seconds=tuple(self._seconds),
            parameters_sha256=digest(self._model),
            measured_peak_bytes=self._peak,
            slot_bytes=self._slots,
        )

    def _step(self, micro_batches: Sequence[Batch], observe: Observer | None = None) -> None:
        total = 0.0
        for batch in micro_batches:
            loss = loss_of(call_model(self._model, batch)) / len(micro_batches)
            loss.backward()
            total += loss.item()
        if observe is not None:
            observe("update")
        if self._plan.updates == "after backward":
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._losses.append(total)

    def _measured_step(self, micro_batches: Sequence[Batch]) -> None:
        # A loop loads one batch after the other; here all are there, since a meter does not see
        # the end of what was there before it.
        others = storage_bytes(tensors_in(micro_batches[1:]))
        memory = measure_step(
            self._model, lambda observe: self._step(micro_batches, observe), besides_bytes=others
        )
        host, disk = below_device(self._model)
        self._slots = memory.slot_bytes
        self._peak = TierBytes(
            device=memory.device_bytes, context=memory.context_bytes, host=host, disk=disk
        )


def digest(model: nn.Module) -> str:
    """SHA-256 over all parameters' names and bytes, in the model's order."""
    sha = hashlib.sha256()
    for name, value in parameter_values(model):
        sha.update(name.encode())
        sha.update(memory_of(value.cpu().contiguous().view(-1).view(torch.uint8)))
    return sha.hexdigest()
