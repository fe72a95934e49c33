"""The accuracy benchmark's processes: profile a specimen, count a plan's bytes, time plans.

Each is a process of its own, so that what one leaves behind does not count in another.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy_cases import PLAN_KINDS, SPECIMENS, PlanKind, plan_of
from benchmarks.zoo import Specimen
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.optimizers import DEFAULT_OPTIMIZER, optimizer_factory
from protrain_plan.profiling.measured import measure_model
from protrain_plan.simulation.timeline import simulate
from protrain_runtime import prepare, restore
from protrain_runtime.activations.own_checkpoints import switch_off_checkpointing
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records import (
    read_plan,
    read_profile,
    write_plan,
    write_profile,
)
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.plan import Plan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.memory_meter import (
    process_memory,
    reset_peak_rss,
    return_freed_memory,
    storage_bytes,
)
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer
from protrain_runtime.states.master_weights import with_master_weights
from protrain_runtime.states.stand_ins import ConsumedGradient
from tests.support.estimates import estimate

NUM_WARM_STEPS, NUM_STEPS = 2, 9
SAMPLED_S = 2.0
MOST_REPEATS = 4
"""Short steps vary more and cost less to repeat: as many times the steps asked for, at most, until
a plan has been timed for so long."""

MEASURED = Path("measured.yaml")
ESTIMATED = Path("estimated.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Bytes of one planned step. Slots are told apart where there is an engine.

    `slot_under` and `slot_over` are the most that a slot took more, and less, than predicted from
    the measured profile. `system_peak` is the process's peak of resident bytes in a step, `ledger`
    the resident bytes besides tensors before that step, and the measured peak of tensors.
    """

    measured: int
    predicted: int
    estimated: int | None
    slot_under: int
    slot_over: int
    worst_slot: int
    estimated_slot_under: int | None
    context_predicted: int
    context_measured: int
    system_peak: int
    ledger: int
    system_rise: int
    ledger_rise: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeResult:
    """Seconds of one plan's steps, which took turns with plain ones in one process.

    Predicted from the profile measured in the same process, and estimated from the machine's rates.
    """

    planned: tuple[float, ...]
    plain: tuple[float, ...]
    predicted: float
    predicted_plain: float
    estimated: float | None
    load: float

    @property
    def measured(self) -> float:
        return statistics.median(self.planned)

    @property
    def measured_plain(self) -> float:
        return statistics.median(self.plain)

    @property
    def slowdown(self) -> float:
        """Planned by plain, the median over pairs of steps that followed each other."""
        pairs = zip(self.planned, self.plain, strict=True)
        return statistics.median(planned / plain for planned, plain in pairs)

    @property
    def noise(self) -> float:
        """How far a slowdown of plain steps by plain ones, in the same turns, is from 1."""
        pairs = zip(self.plain[::2], self.plain[1::2], strict=False)
        ratios = [one / other for one, other in pairs]
        return abs(statistics.median(ratios) - 1) if ratios else 0.0


# --- profiles -------------------------------------------------------------------------------------


def profiles(name: str) -> dict[str, Any]:
    """Both profiles of a specimen and its plans, as files in a folder; how the profiles differ."""
    return_freed_memory()
    specimen, folder = SPECIMENS[name], Path(name)
    folder.mkdir(exist_ok=True)
    started = time.perf_counter()
    measured = _measured(specimen, load_hardware("cpu"), folder, num_steps=1)
    between = time.perf_counter()
    estimated, refused = None, ""
    try:
        estimated = _estimated(specimen)
    except ProtrainError as error:
        refused = error.message
    ended = time.perf_counter()
    write_profile(measured, folder / MEASURED)
    if estimated is not None:
        write_profile(estimated, folder / ESTIMATED)
    for kind in PLAN_KINDS:
        write_plan(plan_of(kind, measured), folder / f"{kind}.yaml")
    return {
        "num_parameters": sum(unit.num_parameters for unit in measured.units),
        "num_units": len(measured.units),
        "num_forms": sum(len(unit.forms) for unit in measured.units),
        "base_difference": estimated.base_bytes - measured.base_bytes if estimated else 0,
        "differences": list(_differences(measured, estimated)) if estimated else [],
        "missing": list(_missing(measured, estimated)) if estimated else [],
        "profile_seconds": between - started,
        "estimate_seconds": ended - between,
        "refused": refused,
    }


def _measured(
    specimen: Specimen, machine: Hardware | None, folder: Path, *, num_steps: int | None
) -> Profile:
    model, batches = specimen.make()
    return measure_model(
        model,
        batches,
        workload=specimen.workload,
        num_steps=num_steps,
        spill_directory=folder,
        progress=lambda *_: None,
        machine=machine,
    )


def _estimated(specimen: Specimen) -> Profile:
    """On the catalogue's machine with the threads of this one, which have workspaces."""
    machine = load_hardware("cpu")
    threads = replace(machine.device, num_threads=torch.get_num_threads())
    return estimate(
        specimen.source,
        hardware=replace(machine, device=threads),
        batch_size=specimen.batch_size,
        seq_len=specimen.seq_len,
        dtype=specimen.dtype,
        precision=specimen.precision,
        adapter=specimen.adapter,
    )


def _differences(measured: Profile, estimated: Profile) -> Iterator[dict[str, Any]]:
    """Estimated less measured bytes of each form of each unit, where they are not equal."""
    for unit, other in zip(measured.units, estimated.units, strict=True):
        theirs = {cost.form: cost for cost in other.forms}
        for real in unit.forms:
            if guess := theirs.get(real.form):
                off = {
                    "kept": guess.kept_bytes - real.kept_bytes,
                    "swappable": guess.swappable_bytes - real.swappable_bytes,
                    "forward_peak": guess.forward_peak_bytes - real.forward_peak_bytes,
                    "backward_peak": guess.backward_peak_bytes - real.backward_peak_bytes,
                }
                if any(off.values()):
                    yield {"unit": unit.name, "form": real.form, **off}


def _missing(measured: Profile, estimated: Profile) -> Iterator[str]:
    for unit, other in zip(measured.units, estimated.units, strict=True):
        ours, theirs = ({cost.form for cost in u.forms} for u in (unit, other))
        for form in sorted(ours ^ theirs):
            yield f"{unit.name}: {form} {'measured' if form in ours else 'estimated'} only"


# --- bytes ----------------------------------------------------------------------------------------


def counted(name: str, kind: PlanKind) -> dict[str, Any]:
    """Steps of a plan: one for the operating system's count, then one slot by slot."""
    return_freed_memory()
    specimen, folder = SPECIMENS[name], Path(name)
    planned = read_plan(folder / f"{kind}.yaml")
    others = _live_bytes()  # what libraries made when they were imported
    with TemporaryDirectory(dir=folder) as spill:
        training = _Training(specimen, planned, Path(spill))
        for _ in range(NUM_WARM_STEPS):
            training.seconds()
        training.load()
        live = _live_bytes() - others
        reset_peak_rss()
        before = process_memory().resident_bytes
        training.step()
        system_peak = process_memory().peak_resident_bytes
        training.load()
        found = measure_step(training.model, training.step, besides_bytes=others)
        training.close()
    # Read late: what reading leaves in the Python heap is no part of a run.
    measured, estimated = read_profile(folder / MEASURED), _read_estimate(folder, planned)
    predicted = _slots(planned, measured)
    guessed = _slots(planned, estimated) if estimated else None
    told_apart = len(found.slot_bytes) == len(predicted)
    slots = found.slot_bytes if told_apart else (found.device_bytes,)
    if not told_apart:
        predicted = [max(predicted)]
        guessed = [max(guessed)] if guessed else None
    over = [most - seen for most, seen in zip(predicted, slots, strict=True)]
    return asdict(
        MemoryResult(
            measured=found.device_bytes,
            predicted=max(predicted),
            estimated=max(guessed) if guessed else None,
            slot_under=max(0, -min(over)),
            slot_over=max(over),
            worst_slot=over.index(min(over)),
            estimated_slot_under=max(
                0, *(seen - most for most, seen in zip(guessed, slots, strict=True))
            )
            if guessed
            else None,
            context_predicted=measured.hardware.device.context_bytes,
            context_measured=found.context_bytes,
            system_peak=system_peak,
            ledger=before - live + found.device_bytes,
            system_rise=system_peak - before,
            ledger_rise=found.device_bytes - live,
        )
    )


def _slots(planned: Plan, profiled: Profile) -> list[int]:
    program = program_of(planned, profiled)
    return [slot.total for slot in device_bytes(program)]


def _read_estimate(folder: Path, planned: Plan) -> Profile | None:
    """The estimated profile, where there is one and it has all forms that the plan takes."""
    if not (folder / ESTIMATED).exists():
        return None
    estimated = read_profile(folder / ESTIMATED)
    for unit, decided in zip(estimated.units, planned.units, strict=True):
        form = getattr(decided.activations, "form", "keep")
        if form not in {cost.form for cost in unit.forms}:
            return None
    return estimated


def _live_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return storage_bytes(found for found in tensors if not isinstance(found, ConsumedGradient))


class _Training:
    """A loop over a specimen's batches, under a plan or plainly."""

    def __init__(self, specimen: Specimen, planned: Plan | None, spill: Path) -> None:
        model, self._batches = specimen.make()
        factory = optimizer_factory(DEFAULT_OPTIMIZER)
        self.model: nn.Module
        self._optimizer: torch.optim.Optimizer
        if planned is None:
            make = with_master_weights(factory) if specimen.precision == "master" else factory
            switch_off_checkpointing(model)  # as under a plan, which decides what is recomputed
            self.model = model
            self._optimizer = make(p for p in model.parameters() if p.requires_grad)
        else:
            self.model, self._optimizer = prepare(
                model, planned, optimizer=factory, spill_directory=spill
            )

    def load(self) -> None:
        """The next batch; what its making takes is the loader's."""
        self._batch: Batch = next(self._batches)

    def step(self, observe: Observer = lambda _: None) -> None:
        loss = loss_of(call_model(self.model, self._batch))
        loss.backward()
        observe("update")
        self._optimizer.step()
        self._optimizer.zero_grad()

    def seconds(self) -> float:
        self.load()
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def close(self) -> None:
        restore(self.model)


# --- seconds --------------------------------------------------------------------------------------


def timed(name: str) -> dict[str, Any]:
    """Each plan's steps in turn with plain ones, beside predictions from a fresh profile.

    The machine is probed for it, as a profile does: its speeds change from one hour to the next.
    """
    return_freed_memory()
    specimen, folder = SPECIMENS[name], Path(name)
    fresh = _measured(specimen, None, folder, num_steps=None)
    plans = {kind: read_plan(folder / f"{kind}.yaml") for kind in PLAN_KINDS}
    keep = read_plan(folder / "keep.yaml")
    results: dict[str, Any] = {}
    with TemporaryDirectory(dir=folder) as spill:
        plain = _Training(specimen, None, Path(spill))
        for kind, planned in plans.items():
            training = _Training(specimen, planned, Path(spill))
            about = 0.0
            for _ in range(NUM_WARM_STEPS):
                plain.seconds()
                about = training.seconds()
            count = min(max(NUM_STEPS, round(SAMPLED_S / about)), MOST_REPEATS * NUM_STEPS)
            estimated = _read_estimate(folder, planned)
            taken = [(training.seconds(), plain.seconds()) for _ in range(count)]
            training.close()
            result = TimeResult(
                planned=tuple(own for own, _ in taken),
                plain=tuple(other for _, other in taken),
                predicted=_predicted_seconds(planned, fresh),
                predicted_plain=_predicted_seconds(keep, fresh),
                estimated=_predicted_seconds(planned, estimated) if estimated else None,
                load=os.getloadavg()[0],
            )
            results[kind] = asdict(result)
    return results


def _predicted_seconds(planned: Plan, profiled: Profile) -> float:
    program = program_of(planned, profiled)
    return simulate(program).step_seconds
