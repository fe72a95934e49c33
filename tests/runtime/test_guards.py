"""Uses of a planned model that would silently compute something else are refused, in full words."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare, restore
from protrain_runtime.contract.records.plan import (
    STEPPED,
    Keep,
    Offload,
    Persistent,
    Recompute,
    Swap,
)
from protrain_runtime.model.optimizer import PlannedOptimizer
from tests.support.messages import Speaker
from tests.support.runtime_cases import (
    ADAMW,
    batch,
    build,
    decided,
    described,
    plan_for,
)

NAME = "llama-tied"
BETWEEN = (
    " between backward() and optimizer.step(): this plan updates parameters during"
    " backward, so every backward needs its step"
)

Planned = tuple[nn.Module, PlannedOptimizer]


@pytest.fixture(params=[Offload(tier="disk"), STEPPED], ids=["disk", "device"])
def planned(request: pytest.FixtureRequest, tmp_path: Path) -> Planned:
    """A model that backward updates, whose states are all on disk or on the device, after one."""
    model = build(NAME)
    plan = plan_for(model, decided(described(NAME), Keep(), request.param))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    backward(model)
    return model, optimizer


def backward(model: nn.Module, between: Callable[[], object] = lambda: None) -> None:
    loss = loss_of(call_model(model, batch(NAME, 0)))
    between()
    loss.backward()


def clip(planned: Planned) -> None:
    torch.nn.utils.clip_grad_norm_(planned[0].parameters(), 1.0)


def unscale(planned: Planned) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(planned[1])


def look(planned: Planned) -> None:
    gradients = [p.grad for p in planned[0].parameters() if p.grad is not None]
    sum(gradient.sum() for gradient in gradients)


@pytest.mark.parametrize("use", [clip, unscale, look])
def test_a_gradient_that_was_taken_cannot_be_used(
    use: Callable[[Planned], None], planned: Planned, assert_says: Speaker
) -> None:
    with pytest.raises(RuntimeError) as caught:
        use(planned)
    assert_says(caught.value)
    planned[1].step()
    planned[1].zero_grad()
    assert all(p.grad is None for p in planned[0].parameters())


def evaluate(planned: Planned) -> None:
    with torch.no_grad():
        call_model(planned[0], batch(NAME, 1))


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda planned: backward(planned[0]), "a second forward began"),
        (evaluate, "the model was evaluated"),
        (lambda planned: planned[0].state_dict(), "state_dict() was called"),
        (lambda planned: planned[1].state_dict(), "optimizer.state_dict() was called"),
    ],
    ids=["forward", "evaluation", "state dict", "optimizer's state dict"],
)
def test_between_backward_and_step_nothing_is_read(
    use: Callable[[Planned], object], what: str, planned: Planned
) -> None:
    with pytest.raises(RuntimeError) as caught:
        use(planned)
    assert str(caught.value) == what + BETWEEN
    planned[1].step()
    planned[1].zero_grad()
    use(planned)  # after the step it is allowed


def test_options_that_change_too_late_are_refused(planned: Planned, assert_says: Speaker) -> None:
    _, optimizer = planned
    before = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 2 * before
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert_says(caught.value)
    optimizer.param_groups[0]["lr"] = before
    optimizer.step()


def test_groups_cannot_be_added_after_prepare(planned: Planned, assert_says: Speaker) -> None:
    with pytest.raises(RuntimeError) as caught:
        planned[1].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert_says(caught.value)


def test_accumulation_is_plain_where_no_states_are_offloaded(tmp_path: Path) -> None:
    """Two backwards and one step equal plain PyTorch's under a plan that only swaps."""
    results = []
    for swaps in (False, True):
        model = build(NAME)
        optimizer: torch.optim.Optimizer = ADAMW(model.parameters())
        if swaps:
            plan = plan_for(model, decided(described(NAME), Swap(tier="disk"), Persistent()))
            model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
        for number in range(4):
            backward(model)
            if number % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(plain, planned) for plain, planned in zip(*results, strict=True))


def test_restore_gives_back_a_forward_that_an_instance_had(tmp_path: Path) -> None:
    """As packages leave them that wrap modules on the instance."""
    model = build(NAME)
    block = model.get_submodule("model.layers.1")
    mine = block.forward
    block.forward = mine  # on the instance from now on
    units = decided(described(NAME), Recompute(), Offload(tier="disk"))
    model, _ = prepare(model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path)
    assert block.__dict__["forward"] is not mine
    restore(model)
    assert block.__dict__["forward"] is mine
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("held", [False, True], ids=["leaves", "stays"])
def test_a_write_to_a_saved_activation_is_refused_as_in_plain_pytorch(
    held: bool, tmp_path: Path
) -> None:
    """While it leaves, or before backward where somebody holds it, so that it stays."""
    seen: list[torch.Tensor] = []

    def write(_: nn.Module, inputs: tuple[torch.Tensor], __: object) -> None:
        if held:
            seen.append(inputs[0])
        else:
            inputs[0].detach().mul_(2)

    for planned in (False, True):
        model = build(NAME)
        model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(write)
        if planned:
            plan = plan_for(model, decided(described(NAME), Swap(tier="disk"), Persistent()))
            model, _ = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
        with pytest.raises(RuntimeError, match=r"in place after it was|by an inplace operation"):
            backward(model, between=lambda: [tensor.detach().mul_(2) for tensor in seen])
        seen.clear()


def test_a_forward_that_writes_to_a_parameter_that_leaves_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model = build(NAME)

    def write(module: nn.Module, *_: object) -> None:
        module.get_parameter("weight").detach().mul_(2)

    model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(write)
    plan = plan_for(model, decided(described(NAME), Keep(), Offload(tier="disk")))
    model, _ = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    with pytest.raises(RuntimeError) as caught:
        call_model(model, batch(NAME, 0))
    assert_says(caught.value)
