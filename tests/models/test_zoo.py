"""Many architectures through the profiler and the runtime: units, exact training, peaks that hold.

The oracle of training is plain PyTorch, of bytes the step that ran.
"""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from benchmarks.zoo import ZOO
from protrain_plan.models.batches import Batch
from protrain_plan.models.optimizers import OPTIMIZERS
from protrain_plan.profiling.structure.discovery import discover
from tests.support.hostile_models import Hostile
from tests.support.judging import PlanName, judged, profiled
from tests.support.thinning import thinned

PLANS: tuple[PlanName, ...] = ("offloaded", "recomputed", "mixed")


@cache
def _batches(name: str) -> tuple[Iterator[Batch], list[Batch]]:
    return ZOO[name].make()[1], []


def batch_of(name: str, step: int) -> Batch:
    coming, made = _batches(name)
    while len(made) <= step:
        made.append(next(coming))
    return made[step]


def of_zoo(name: str, optimizer: str = "adamw") -> Hostile:
    return Hostile(
        lambda: ZOO[name].make()[0],
        optimizer=optimizer,
        batch=partial(batch_of, name),
        workload=ZOO[name].workload,
    )


def assert_like_plain(name: str, *plans: PlanName, optimizer: str = "adamw") -> None:
    """Bitwise, and in no slot with more bytes than were predicted."""
    found = judged(of_zoo, name, optimizer, plans=plans, seed=3)
    assert [(one.kind, one.text) for one in found] == [("like plain", "")] * len(plans)


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", ZOO)
def test_every_parameter_is_in_one_unit(name: str) -> None:
    model, batches = ZOO[name].make()
    units = discover(model, next(batches))
    found = [parameter for unit in units for parameter in unit.parameters]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    assert (units[0].kind, units[-1].kind) == ("part", "part")
    blocks = [unit for unit in units if unit.kind == "block"]
    assert len(blocks) >= 3
    inside = sum(p.numel() for unit in blocks if unit.module for p in unit.module.parameters())
    assert inside > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", tuple(ZOO)[::8])
def test_recomputed_and_offloaded_like_plain(name: str) -> None:
    assert_like_plain(name, "recomputed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_plan_like_plain(name: str) -> None:
    assert_like_plain(name, *PLANS)


@pytest.mark.nightly
def test_a_block_that_the_loss_does_not_depend_on_keeps_what_it_saves(tmp_path: Path) -> None:
    """LLaVA's last image layer, which is dropped when the forward has ended."""
    units = profiled(of_zoo("llava"), tmp_path).units
    kept = [unit.name for unit in units if unit.kind == "block" and len(unit.forms) == 1]
    assert kept == ["model.vision_tower.encoder.layers.2"]


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("optimizer", thinned(tuple(OPTIMIZERS)))
def test_every_optimizer_like_plain(optimizer: str) -> None:
    assert_like_plain("pyramid", "recomputed", optimizer=optimizer)
