"""Bytes that plans promise, and those that a meter counts."""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain_plan.commands.training import Run
from protrain_plan.models.sources import load_source
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.program.program import LARGE_BEGIN_BYTES, PAGE_BYTES
from protrain_runtime.contract.records import read_profile, write_profile
from protrain_runtime.contract.records.plan import Plan, UnitPlan
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import reachable, storage_bytes
from protrain_runtime.states.stand_ins import ConsumedGradient
from tests.support.runtime_cases import made_once, plan_for_profile, profiled_here
from tests.support.trained import train

PIECE_BYTES = 1 << 16
NUM_STEPS = 3  # the last one is measured

SLACK_BYTES = 4096
"""Bytes that a bound may stand above the truth where the programme's waits leave no freedom:
scalars of the optimizer and of the loss, and the alignment of pieces."""


def profile_file(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A measured profile of a model in float32, made once for all processes and test files."""

    def make(folder: Path) -> Profile:
        return profiled_here(name, folder, num_steps=2)

    return _made(tmp_path_factory, f"peaks-{name.rpartition(':')[2]}.yaml", make)


def preset_with(path: Path, name: str, **changes: int) -> str:
    """A file with a preset's configuration and these changes, as a source."""
    path.write_text(json.dumps(json.loads(load_source(name).model_config) | changes))
    return str(path)


def profile_made(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Profile]
) -> Profile:
    """A profile that is made once for all processes, with a folder to spill into."""
    return read_profile(_made(tmp_path_factory, f"{name}.yaml", make))


def _made(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Profile]) -> Path:
    def write(path: Path) -> None:
        others = bytes_of_others()  # are what a script's data would be
        record = make(path.parent)
        write_profile(replace(record, base_bytes=record.base_bytes - others), path)

    return made_once(factory, name, write)


_HELD: list[torch.Tensor] = []


def bytes_of_others() -> int:
    """Bytes of tensors that other tests have left here, as soon as they are the same twice.

    A thread that another test has ended may hold tensors for a moment longer. Those that are there
    then stay until the next call: what would be freed while a step is measured is in no sum.
    """
    _HELD.clear()
    before = -1
    while True:
        while gc.collect():  # what one collection finalizes, the next one frees
            pass
        tensors = reachable(devices.HOST)
        found = storage_bytes(one for one in tensors if not isinstance(one, ConsumedGradient))
        if found == before:
            _HELD.extend(tensors)
            return found
        before = found
        del tensors
        time.sleep(0.05)


def without_freedom(units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
    """The units with every byte gone before the next slot: what stands depends on no clock."""
    return tuple(
        replace(unit, schedule=replace(unit.schedule, swap_drain=0, update_drain=0))
        for unit in units
    )


@dataclass
class Peaks:
    """One plan's bytes per slot: what was promised and what came."""

    predicted: list[int]
    measured: list[int]
    predicted_disk: int
    measured_disk: int

    @property
    def excess(self) -> int:
        """The most that the promise stood above the truth, in any slot."""
        return max(
            predicted - measured
            for predicted, measured in zip(self.predicted, self.measured, strict=True)
        )

    @property
    def overrun(self) -> list[tuple[int, int]]:
        """Slots that took more than was promised, with how much more."""
        return [
            (slot, measured - predicted)
            for slot, (predicted, measured) in enumerate(
                zip(self.predicted, self.measured, strict=True)
            )
            if measured > predicted
        ]


def peaks(profile: Profile, units: tuple[UnitPlan, ...], spill: Path, **settings: Any) -> Peaks:
    """The bytes of a step."""
    own = {"piece_bytes": PIECE_BYTES, "optimizer": profile.optimizer.name}
    plan = plan_for_profile(profile, units, **own, **settings)
    program = program_of(plan, profile)
    run = trained(plan, spill)
    assert run.measured_peak_bytes is not None
    assert max(run.slot_bytes) == run.measured_peak_bytes.device
    return Peaks(
        predicted=[slot.total for slot in device_bytes(program)],
        measured=list(run.slot_bytes),
        predicted_disk=program.tier_bytes("disk"),
        measured_disk=run.measured_peak_bytes.disk,
    )


def trained(plan: Plan, spill: Path, others: int | None = None, **options: Any) -> Run:
    """A run, with the bytes of tensors that other tests have left in this process taken off."""
    others = bytes_of_others() if others is None else others
    run = train(plan, num_steps=NUM_STEPS, plain=False, spill_directory=spill, **options)
    peak = run.measured_peak_bytes
    assert peak is not None
    return replace(
        run,
        measured_peak_bytes=replace(peak, device=peak.device - others),
        slot_bytes=tuple(size - others for size in run.slot_bytes),
    )


def assert_within_the_promise(found: Peaks) -> None:
    assert found.overrun == []
    assert_disk_within(found.predicted_disk, found.measured_disk, num_slots=len(found.predicted))


def assert_disk_within(predicted: int, measured: int, *, num_slots: int) -> None:
    """A file takes no more than predicted, nor less but for what rounds kinds of states up."""
    kinds = 4 * num_slots  # two copies of a unit's, of up to four that AdamW's might be
    assert 0 <= predicted - measured <= kinds * (PAGE_BYTES + LARGE_BEGIN_BYTES)


def assert_equal_to_the_promise(found: Peaks) -> None:
    """In every slot, not only at the peak."""
    assert_within_the_promise(found)
    assert found.excess <= SLACK_BYTES
