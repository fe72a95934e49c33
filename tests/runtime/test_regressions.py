"""What random models and the matrix have found once: each a case of its own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_runtime import prepare, with_master_weights
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Schedule,
    Swap,
    SwapInput,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import Form
from protrain_runtime.model.prepared import engine_of
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.random_models import Shape, random_batch, random_model
from tests.support.random_training import Loop
from tests.support.runtime_cases import (
    ADAMW,
    RECOMPUTED,
    assert_bitwise,
    attached,
    decided,
    decision_name,
    device,
    differences,
    on_device,
    plan_for,
    units_of,
)

NORMED = Shape(blocks=("batch norm",) * 3, between=("nothing",) * 3)


def normed_units() -> tuple[UnitPlan, ...]:
    return units_of(random_model(NORMED), random_batch(0))


@every_device
@pytest.mark.parametrize("form", RECOMPUTED)
def test_running_statistics_are_updated_once_where_a_block_is_recomputed(
    form: Form, tmp_path: Path
) -> None:
    reference = random_model(NORMED)
    expected = Loop().train(reference, ADAMW(reference.parameters()))
    for decision in (Recompute(form=form), SwapInput(tier="disk", form=form)):
        model = random_model(NORMED)
        units = decided(normed_units(), decision, Offload(tier="disk"))
        buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
        model, optimizer = prepare(
            model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
        )
        found = Loop().train(model, optimizer)
        assert list(differences(found.parameters, expected.parameters, "parameters")) == []
        assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers


@every_device
@pytest.mark.parametrize("form", RECOMPUTED)
def test_products_that_were_swapped_may_be_written_to(form: Form, tmp_path: Path) -> None:
    """As `F.linear(...).mul_(0.5)` does in the recomputation."""
    shape = Shape(blocks=("in place",) * 2, between=("nothing",) * 2)
    reference = random_model(shape)
    expected = Loop().train(reference, ADAMW(reference.parameters()))
    model = random_model(shape)
    decision = SwapInput(tier="disk", form=form)
    units = decided(units_of(random_model(shape), random_batch(0)), decision, Persistent())
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    assert_bitwise(Loop().train(model, optimizer), expected)


def test_states_with_numbers_of_their_own_load_unrounded_into_master_precision() -> None:
    """NAdam's product of momenta, which torch.optim casts to the parameter's dtype."""
    factory = with_master_weights(partial(torch.optim.NAdam, lr=1e-3))
    (first, second) = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    one, other = factory([first]), factory([second])
    for _ in range(3):
        first.grad = torch.full_like(first, 0.3)
        one.step()
    other.load_state_dict(one.state_dict())
    assert one.state[first]["mu_product"].dtype == torch.float32
    assert list(differences(other.state_dict(), one.state_dict(), "states")) == []


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_pieces_are_cut_where_kernels_give_the_bits_of_the_whole(
    tier: TierName, tmp_path: Path
) -> None:
    """SGD on bfloat16 rounds the ends of ranges of odd lengths in another way."""
    shape = Shape(blocks=("linear",) * 2, between=("nothing",) * 2, unused=True)
    factory = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)

    def model() -> nn.Module:
        return random_model(shape).to(torch.bfloat16)

    reference = model()
    expected = Loop().train(reference, factory(reference.parameters()))
    units = decided(units_of(random_model(shape), random_batch(0)), Keep(), Offload(tier=tier))
    planned = model()
    plan = plan_for(planned, units, piece_bytes=1_100)
    planned, optimizer = prepare(planned, plan, optimizer=factory, spill_directory=tmp_path)
    assert_bitwise(Loop().train(planned, optimizer), expected)


class WholeNorm(torch.optim.SGD):
    """Steps of length one for each parameter, as LARS makes them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


FIX = (
    "\n  fix: an elementwise optimizer, such as AdamW or SGD; or a plan whose states stay on the"
    " device"
)


def offloading() -> tuple[nn.Module, tuple[UnitPlan, ...]]:
    return random_model(NORMED), decided(normed_units(), Keep(), Offload(tier="disk"))


def test_optimizers_that_look_at_whole_parameters_are_refused(tmp_path: Path) -> None:
    model, units = offloading()
    before = attached(model)
    with pytest.raises(ProtrainError) as caught:
        prepare(
            model, plan_for(model, units), optimizer=torch.optim.Adafactor, spill_directory=tmp_path
        )
    assert str(caught.value) == (
        "optimizer: the optimizer cannot update 'embedding.weight' in pieces: its 'row_var' is of"
        f" the whole parameter{FIX}"
    )
    assert attached(model) == before


def test_a_parameter_whose_update_needs_all_of_it_is_never_cut(tmp_path: Path) -> None:
    """A small one goes through the optimizer as a whole; of a large one that is not tried."""
    whole = partial(WholeNorm, lr=0.1)
    large = UpdateRules(whole).of(torch.float32, torch.Size([1024, 1024]))
    assert large.reason == "one element's update depends on others"
    reference, (model, units) = random_model(NORMED), offloading()
    expected = Loop().train(reference, whole(reference.parameters()))
    plan = plan_for(model, units, piece_bytes=256)
    planned, optimizer = prepare(model, plan, optimizer=whole, spill_directory=tmp_path)
    found = Loop().train(planned, optimizer)
    assert list(differences(found.losses, expected.losses, "losses")) == []
    assert list(differences(found.parameters, expected.parameters, "parameters")) == []


def test_optimizers_that_look_at_whole_parameters_follow_plans_that_offload_no_states(
    tmp_path: Path,
) -> None:
    reference = random_model(NORMED)
    expected = Loop().train(reference, torch.optim.Adafactor(reference.parameters()))
    model = random_model(NORMED)
    units = decided(normed_units(), Recompute(), Persistent())
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=torch.optim.Adafactor, spill_directory=tmp_path
    )
    assert engine_of(model) is not None
    found = Loop().train(model, optimizer)
    assert list(differences(found.losses, expected.losses, "losses")) == []
    assert list(differences(found.parameters, expected.parameters, "parameters")) == []


def test_offloaded_parameters_of_two_dtypes_are_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    model, units = offloading()
    model.get_submodule("blocks.1.norm").to(torch.float64)
    with pytest.raises(ProtrainError) as caught:
        prepare(model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path)
    assert_says(caught.value)


class Aside(nn.Module):
    """A block that keeps a loss of its own beside what it hands on, made after that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.router = nn.Linear(64, 64), nn.Linear(64, 64)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.inner(x)) + x
        self.loss = torch.sigmoid(self.router(x)).square().mean()
        return out


class WithLossesAside(nn.Module):
    """Autograd comes to what was computed last first, before it comes to what blocks hand on.

    So it comes to a loss that a block has made at its end, and to a penalty on a block's parameter
    that was made between later blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(Aside() for _ in range(5))
        self.head = nn.Linear(64, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        blocks = [block for block in self.blocks if isinstance(block, Aside)]
        x, penalties = self.embedding(input_ids), list[Tensor]()
        for number, block in enumerate(blocks):
            x = block(x)
            if number % 2:
                penalties.append(blocks[number - 1].inner.weight.square().mean())
        logits = self.head(x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
        aside = [block.loss for block in blocks if block.loss is not None]
        return loss + torch.stack([*penalties, *aside]).sum()


@every_device
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (Keep(), Offload(tier="disk")),
        (Swap(tier="disk"), Persistent()),
        (Swap(tier="disk"), Offload(tier="host", keep_gathered=True)),
    ],
    ids=decision_name,
)
@pytest.mark.parametrize("lead", [0, 1])
def test_what_is_computed_beside_a_unit_waits_for_its_slot_in_backward(
    activations: Activations, states: Placement, lead: int, tmp_path: Path
) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        found = []
        for number in range(4):
            data = torch.Generator().manual_seed(number)
            tokens = torch.randint(50, (4, 32), generator=data).to(device())
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [value.cpu() for value in (*found, *model.state_dict().values())]

    reference = WithLossesAside().to(device())
    expected = trained(reference, ADAMW(reference.parameters()))
    with on_device("cpu"):
        described = units_of(
            WithLossesAside(), {"input_ids": torch.zeros(4, 32, dtype=torch.int64)}
        )
    schedule = Schedule(forward_lead=lead, backward_lead=lead, swap_lead=lead)
    model: nn.Module = WithLossesAside().to(device())
    plan = plan_for(model, decided(described, activations, states, schedule))
    model, optimizer = prepare(
        model, plan, optimizer=ADAMW, spill_directory=tmp_path, lane_delay=lambda: 0.01
    )
    found = trained(model, optimizer)
    assert all(map(torch.equal, found, expected))
