"""Training on several ranks equals DistributedDataParallel on the same batches."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Recompute,
    Swap,
    UnitPlan,
)
from tests.support import odd_optimizers
from tests.support.plan_settings import with_settings
from tests.support.ranks_cases import ranks_on_every_device_at_night
from tests.support.ranks_loops import PLACES, ROUNDING, TIERS, Loop, assert_as_ddp, in_turn, several
from tests.support.runtime_cases import (
    FRACTIONAL,
    Factory,
    activation_decisions,
    decided,
    described,
    random_schedule,
)


def mixed(name: str, seed: int) -> tuple[UnitPlan, ...]:
    """Decisions at random for every unit, on any of the tiers."""
    rng = random.Random(seed)
    return tuple(
        replace(
            unit,
            activations=rng.choice(activation_decisions(rng.choice(("host", "disk"))))
            if unit.kind == "block"
            else Keep(),
            states=rng.choice(PLACES),
            schedule=random_schedule(rng),
        )
        for unit in described(name)
    )


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@ranks_on_every_device_at_night
@pytest.mark.parametrize("name", ["llama-tied", slow("llama"), slow("gpt2"), slow("functional")])
def test_two_ranks_match_ddp_bitwise_in_every_placement(name: str, tmp_path: Path) -> None:
    """A sum of two numbers does not depend on their order."""
    loop, units = Loop(name), described(name)
    plans = [several(loop, decided(units, Keep(), place), 2) for place in PLACES]
    assert_as_ddp(2, loop, plans, tmp_path)


@ranks_on_every_device_at_night
@pytest.mark.parametrize("micro_batches", [2, slow(1)])
def test_two_ranks_match_ddp_bitwise_with_the_loss_in_place(
    micro_batches: int, tmp_path: Path
) -> None:
    loop = Loop("llama-tied", micro_batches=micro_batches)
    *others, last = in_turn(loop.name, *PLACES)
    units = (*others, replace(last, activations=Keep(form="in place")))
    assert_as_ddp(2, loop, [several(loop, units, 2)], tmp_path)


@ranks_on_every_device_at_night
@pytest.mark.parametrize("name", [slow("gpt2"), slow("llama-tied")])
def test_two_ranks_match_ddp_bitwise_under_mixed_plans(name: str, tmp_path: Path) -> None:
    """Recomputed and swapped units, cut transfers, slow lanes."""
    loop = Loop(name)
    cut = [
        decided(described(name), Swap(tier="disk"), Offload(tier=tier), schedule)
        for tier in TIERS
        for schedule in FRACTIONAL[:1]
    ]
    plans = [several(loop, units, 2) for units in (*cut, *(mixed(name, n) for n in range(3)))]
    assert_as_ddp(2, loop, plans, tmp_path)


@ranks_on_every_device_at_night
@pytest.mark.slow
def test_two_ranks_add_micro_batches_up_as_ddp_does_bitwise(tmp_path: Path) -> None:
    loop = Loop("gpt2", micro_batches=3)
    plans = [several(loop, in_turn(loop.name, *PLACES), 2), several(loop, mixed("gpt2", 7), 2)]
    plans.append(with_settings(plans[0], updates="after backward"))
    assert_as_ddp(2, loop, plans, tmp_path)


@ranks_on_every_device_at_night
@pytest.mark.parametrize("feature", ["switches modes", slow("counts in its groups in place")])
def test_two_ranks_match_ddp_bitwise_with_what_an_optimizer_writes(
    feature: str, tmp_path: Path
) -> None:
    """Into its groups, and into parameters when its mode changes."""
    loop = Loop("gpt2", factory=partial(odd_optimizers.made, features=feature))
    assert_as_ddp(2, loop, [several(loop, in_turn(loop.name, *PLACES), 2)], tmp_path)


SGD: Factory = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


@ranks_on_every_device_at_night
@pytest.mark.parametrize("factory", [SGD, slow(partial(torch.optim.Adam, lr=1e-3, foreach=False))])
def test_two_ranks_match_ddp_bitwise_with_other_optimizers(
    factory: Factory, tmp_path: Path
) -> None:
    loop = Loop(factory=factory)
    assert_as_ddp(2, loop, [several(loop, in_turn(loop.name, *PLACES), 2)], tmp_path)


@pytest.mark.slow
@ranks_on_every_device_at_night
@pytest.mark.parametrize("micro_batches", [2, slow(1)])
def test_two_ranks_clip_one_norm(micro_batches: int, tmp_path: Path) -> None:
    """A norm of parts is rounded otherwise than that of the whole."""
    loop = Loop("functional", clips=True, double=True, micro_batches=micro_batches)
    plans = [several(loop, in_turn(loop.name, *PLACES), 2)]
    plans += [several(loop, decided(described(loop.name), Keep(), p), 2) for p in PLACES[1:4]]
    assert_as_ddp(2, loop, plans, tmp_path, tolerance=ROUNDING)


@ranks_on_every_device_at_night
def test_two_replicas_share_nothing_and_match_ddp_bitwise(tmp_path: Path) -> None:
    loop = Loop()
    plans = [several(loop, in_turn(loop.name, *PLACES), 2, num_replicas=2)]
    assert_as_ddp(2, loop, plans, tmp_path)


@ranks_on_every_device_at_night
@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_four_ranks_match_ddp_within_the_rounding_of_sums(
    num_replicas: int, tmp_path: Path
) -> None:
    """The order of four summands depends on where in a buffer they lie."""
    loop = Loop("functional", double=True)
    placed = [in_turn(loop.name, *PLACES), mixed(loop.name, 3), mixed(loop.name, 4)]
    plans = [several(loop, units, 4, num_replicas=num_replicas) for units in placed]
    assert_as_ddp(4, loop, plans, tmp_path, tolerance=ROUNDING)


@pytest.mark.slow
def test_recomputed_llama_on_four_ranks_matches_ddp(tmp_path: Path) -> None:
    loop = Loop(double=True)
    units = decided(described(loop.name), Recompute(), Offload(tier="disk"))
    assert_as_ddp(4, loop, [several(loop, units, 4)], tmp_path, tolerance=ROUNDING)
