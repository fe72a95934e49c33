"""`check="bitwise"`: silent where all is well, a stop where a bit is not."""

import gc
import random
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_runtime import full_parameters, load, save
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import RECOMPUTE, Placement, Updates
from protrain_runtime.diagnostics.checking import CHECKED_STEPS, DifferenceError
from protrain_runtime.model.prepared import prepared_of
from tests.support.functional_model import FunctionalBlock
from tests.support.runtime_cases import CATALOGUE, decided, described, mixed, weight_decay_groups
from tests.support.scenario import Loop, Run, Scenario, Units, refusal, restored

NAME = "llama-tied"
UNITS = len(described(NAME))
TIERS: tuple[TierName, ...] = ("host", "disk")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


# --- a plain copy beside the plan -----------------------------------------------------------------

STOP = (
    "\n  fix: see whether the model computes the same twice (torch.use_deterministic_algorithms)"
    " and keeps no state between forwards; report it if it does"
)


def copied_beside(model: Any = NAME, updates: Updates = "in backward", **options: Any) -> Scenario:
    return Scenario(
        model=model,
        units=options.pop("units", partial(all_on_disk)),
        settings={"updates": updates, **options.pop("settings", {})},
        options={"check": "bitwise"},
        **options,
    )


def all_on_disk(units: Units) -> Units:
    return decided(units, RECOMPUTE, Placement(tier="disk"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "functional"])
def test_a_checked_run_is_the_plain_run(name: str, tmp_path: Path) -> None:
    """gpt2 has dropout: the copy's random numbers are the model's, and cost it none."""
    copied_beside(
        name, units=lambda units: mixed(units, random.Random(3), "disk", "host")
    ).assert_like_plain(tmp_path, restored)


@pytest.mark.nightly
@pytest.mark.parametrize("updates", ["in backward", "after backward"])
def test_micro_batches_clipping_groups_and_schedules_are_checked_too(
    updates: Updates, tmp_path: Path
) -> None:
    script = Loop(
        num_steps=CHECKED_STEPS,
        micro_batches=2,
        clips=0.1 if updates == "after backward" else None,
        scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    )
    copied_beside(
        updates=updates, settings={"micro_batches": 2}, groups=weight_decay_groups, script=script
    ).assert_like_plain(tmp_path)


def with_closures(run: Run) -> None:
    for number in range(CHECKED_STEPS):

        def closure(number: int = number) -> float:
            run.backward(number)
            return 0.0

        run.optimizer.step(closure)
        run.optimizer.zero_grad()


def in_autocast(run: Run) -> None:
    """Forwards are cast by the loop, and steps are outside of that."""
    for number in range(CHECKED_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.loss(number)
        loss.backward()
        run.seen.append(loss.detach())
        run.update()


def scaled_in_place(run: Run) -> None:
    """The Trainer of transformers scales the loss so."""
    for number in range(CHECKED_STEPS):
        loss = run.loss(number)
        loss *= 0.5
        loss.backward()
        run.seen.append(loss.detach())
        run.update()


@pytest.mark.nightly(but=("scaled_in_place",))
@pytest.mark.parametrize("script", [with_closures, in_autocast, scaled_in_place])
def test_the_copy_does_what_the_loop_does(script: Callable[[Run], None], tmp_path: Path) -> None:
    copied_beside("functional", script=script).assert_like_plain(tmp_path)


class CountingBlock(FunctionalBlock):
    """Computes something else in every forward: recomputed, it is not the same."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden + self.calls)


def counting(model: nn.Module) -> None:
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    blocks[1] = CountingBlock(96)


@pytest.mark.parametrize(
    ("updates", "what"), [("in backward", "parameter"), ("after backward", "gradient of")]
)
def test_a_block_that_computes_something_else_again_is_stopped(
    updates: Updates, what: str, tmp_path: Path
) -> None:
    """Its own seven gradients are wrong, those of the block before, and that of the embedding."""
    functional = CATALOGUE["functional"]
    asked = copied_beside(
        replace(functional, change=counting), updates, units=all_on_disk(functional.units())
    )
    assert str(refusal(partial(asked.start(tmp_path).step, 0), DifferenceError)) == (
        f"step 1 differs from plain PyTorch: {what} embedding and of 14 more" + STOP
    )


def loading_state_dicts(run: Run) -> None:
    run.step(0)
    model, optimizer = run.subject.build(1).state_dict(), deepcopy(run.optimizer.state_dict())
    run.step(1)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    run.step(2)


def loading_checkpoints(run: Run, folder: Path) -> None:
    run.step(0)
    save(run.model, run.optimizer, folder)
    run.step(1)
    load(run.model, run.optimizer, folder)
    run.step(2)


@pytest.mark.nightly
@pytest.mark.parametrize("whole", [True, False])
def test_the_copy_loads_what_the_model_loads(whole: bool, tmp_path: Path) -> None:
    script = partial(loading_checkpoints, folder=tmp_path / "saved")
    copied_beside("functional", script=script if whole else loading_state_dicts).assert_like_plain(
        tmp_path
    )


def test_parameters_that_somebody_else_changes_are_a_difference(tmp_path: Path) -> None:
    """Such a change is no step: the next forward's output differs from the copy's."""
    run = copied_beside("functional").start(tmp_path)
    run.step(0)
    with full_parameters(run.model, modify=True), torch.no_grad():
        next(run.model.parameters()).mul_(2)
    assert str(refusal(partial(run.step, 1), DifferenceError)) == (
        "step 2 differs from plain PyTorch: output 1 of the forward" + STOP
    )


@pytest.mark.nightly
def test_the_copy_is_gone_when_the_check_has_ended(tmp_path: Path) -> None:
    run = copied_beside("functional").start(tmp_path)
    prepared = prepared_of(run.model)
    assert prepared is not None
    copies = [weakref.ref(one) for one in prepared.plain() or ()]
    assert len(copies) == 2
    for number in range(CHECKED_STEPS):
        run.step(number)
    gc.collect()
    assert [one() for one in copies] == [None, None]


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    asked = Scenario(options={"check": "spills"})
    error = refusal(partial(asked.start, tmp_path), ProtrainError)
    assert (error.key, error.message) == ("check", "there is no check 'spills'")
