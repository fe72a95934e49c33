"""Bytes that plans promise, and those that a meter counts."""

import gc
import time
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.records import write_profile
from protrain_plan.records.plan import UnitPlan
from protrain_runtime.devices import device as devices
from protrain_runtime.devices.memory_meter import reachable, storage_bytes
from protrain_runtime.states.stand_ins import ConsumedGradient
from tests.support.runtime_cases import made_once, profiled_here

SLACK_BYTES = 4096
"""What a bound may stand above the truth where the programme's waits leave no freedom: scalars of
the optimizer and of the loss, and the alignment of pieces."""


def profile_file(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A measured profile of a model in float32, made once for all processes and test files."""

    def make(path: Path) -> None:
        others = bytes_of_others()  # are what a script's data would be
        record = profiled_here(name, path.parent, num_steps=2)
        write_profile(replace(record, base_bytes=record.base_bytes - others), path)

    return made_once(tmp_path_factory, f"peaks-{name.rpartition(':')[2]}.yaml", make)


def bytes_of_others() -> int:
    """Of tensors that other tests have left in this process, as soon as they are the same twice.

    A thread that another test has ended may hold tensors for a moment longer.
    """
    before = -1
    while True:
        while gc.collect():  # what one collection finalizes, the next one frees
            pass
        tensors = reachable(devices.HOST)
        found = storage_bytes(one for one in tensors if not isinstance(one, ConsumedGradient))
        if found == before:
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
