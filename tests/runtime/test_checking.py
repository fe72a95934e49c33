"""`check="bitwise"`: silent where all is well, and a stop where a bit is not."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.plan import Offload, Recompute, Updates
from protrain_runtime.diagnostics.checking import CHECKED_STEPS, DifferenceError
from protrain_runtime.model.optimizer import PlannedOptimizer
from tests.support.functional_model import FunctionalBlock
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    assert_bitwise,
    attached,
    batch,
    build,
    decided,
    described,
    mixed,
    plain,
    plan_for,
    step,
    train,
    weight_decay_groups,
)

STOP = (
    "\n  fix: see whether the model computes the same twice (torch.use_deterministic_algorithms)"
    " and keeps no state between forwards; report it if it does"
)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "functional"])
def test_a_checked_run_is_the_plain_run(name: str, tmp_path: Path) -> None:
    """gpt2 has dropout: the copy's random numbers are the model's, and cost it none."""
    model = build(name)
    before = attached(model)
    plan = plan_for(model, mixed(described(name), random.Random(3), "disk", "host"))
    model, optimizer = prepare(
        model, plan, optimizer=ADAMW, spill_directory=tmp_path, check="bitwise"
    )
    assert_bitwise(train(name, model, optimizer), plain(name))
    restore(model)
    assert attached(model) == before


@pytest.mark.parametrize("updates", ["in backward", "after backward"])
def test_micro_batches_clipping_groups_and_schedules_are_checked_too(
    updates: Updates, tmp_path: Path
) -> None:
    name = "llama-tied"
    model = build(name)
    units = decided(described(name), Recompute(), Offload(tier="disk"))
    plan = with_settings(plan_for(model, units), updates=updates, micro_batches=2)
    model, optimizer = prepare(
        model,
        plan,
        optimizer=ADAMW,
        param_groups=weight_decay_groups(model),
        spill_directory=tmp_path,
        check="bitwise",
    )
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(2 * CHECKED_STEPS):
        (loss_of(call_model(model, batch(name, number))) / 2).backward()
        if number % 2:
            if updates == "after backward":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()


class CountingBlock(FunctionalBlock):
    """Computes something else in every forward: recomputed, it is not the same."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(hidden + self.calls)


def prepared(
    model: nn.Module, folder: Path, updates: Updates = "in backward"
) -> tuple[nn.Module, PlannedOptimizer]:
    units = decided(described("functional"), Recompute(), Offload(tier="disk"))
    plan = with_settings(plan_for(model, units), updates=updates)
    return prepare(model, plan, optimizer=ADAMW, spill_directory=folder, check="bitwise")


@pytest.mark.parametrize(
    ("updates", "what"), [("in backward", "parameter"), ("after backward", "gradient of")]
)
def test_a_block_that_computes_something_else_again_is_stopped(
    updates: Updates, what: str, tmp_path: Path
) -> None:
    """Its own seven gradients are wrong, those of the block before, and that of the embedding."""
    model = build("functional")
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    blocks[1] = CountingBlock(96)
    model, optimizer = prepared(model, tmp_path, updates)
    with pytest.raises(DifferenceError) as caught:
        step("functional", model, optimizer, 0)
    assert str(caught.value) == (
        f"step 1 differs from plain PyTorch: {what} embedding and of 14 more" + STOP
    )


def test_parameters_that_somebody_else_changes_are_a_difference(tmp_path: Path) -> None:
    """Loading other weights is not a step: the next forward's output differs from the copy's."""
    model = build("functional")
    model, optimizer = prepared(model, tmp_path)
    step("functional", model, optimizer, 0)
    model.load_state_dict(build("functional", seed=1).state_dict())
    with pytest.raises(DifferenceError) as caught:
        step("functional", model, optimizer, 1)
    assert str(caught.value) == (
        "step 2 differs from plain PyTorch: output 1 of the forward" + STOP
    )
