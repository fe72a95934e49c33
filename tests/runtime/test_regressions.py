"""Faults that random models and the matrix found once: each a case of its own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_runtime import with_master_weights
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    Activations,
    Placement,
    Schedule,
)
from protrain_runtime.contract.records.profile import Form
from protrain_runtime.states.update_rules import UpdateRules
from tests.support.cards import every_device
from tests.support.hostile_models import WIDTH, batch_of, does, next_token, stack
from tests.support.random_models import Shape
from tests.support.random_training import subject
from tests.support.runtime_cases import (
    RECOMPUTED,
    Subject,
    decided,
    decision_name,
    differences,
)
from tests.support.scenario import Loop, Scenario, Units

NORMED = Shape(blocks=("batch norm",) * 3, between=("nothing",) * 3)


def trained(shape: Shape, *decision: Any, **options: Any) -> Scenario:
    """Three steps of a random model, all of whose units have one decision."""
    return Scenario(
        model=subject(shape),
        units=lambda units: decided(units, *decision),
        script=Loop(num_steps=3),
        **options,
    )


@pytest.mark.nightly(by_day=6)
@every_device
@pytest.mark.parametrize("form", RECOMPUTED)
def test_products_that_were_swapped_may_be_written_to(form: Form, tmp_path: Path) -> None:
    """As `F.linear(...).mul_(0.5)` does in the recomputation."""
    shape = Shape(blocks=("in place",) * 2, between=("nothing",) * 2)
    decision = Activations(tier="disk", form=form)
    trained(shape, decision, PERSISTENT).assert_like_plain(tmp_path)


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
    tried = trained(shape, KEEP, Placement(tier=tier), factory=factory, piece_bytes=1_100)
    halved = replace(tried.subject, change=lambda model: model.to(torch.bfloat16))
    replace(tried, model=halved).assert_like_plain(tmp_path)


class WholeNorm(torch.optim.SGD):
    """Steps of length one for each parameter, as LARS makes them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


OFFLOADED = (KEEP, Placement(tier="disk"))


def test_a_parameter_whose_update_needs_all_of_it_is_never_cut(tmp_path: Path) -> None:
    """A small one goes through the optimizer as a whole; of a large one that is not tried."""
    whole = partial(WholeNorm, lr=0.1)
    large = UpdateRules(whole).of(torch.float32, torch.Size([1024, 1024]))
    assert large.reason == "one element's update depends on others"
    trained(NORMED, *OFFLOADED, factory=whole, piece_bytes=256).assert_like_plain(tmp_path)


def with_a_loss(block: Any, hidden: Tensor) -> Tensor:
    """Keeps a loss of its own beside what it hands on, made after that."""
    out = torch.tanh(block.computed(hidden)) + hidden
    block.loss = torch.sigmoid(block.router(hidden)).square().mean()
    return out


def penalized(stack: Any, hidden: Tensor, step: int) -> Tensor:
    stack.penalties = []
    for number, block in enumerate(stack.blocks):
        hidden = block(hidden)
        if number % 2:
            stack.penalties.append(stack.blocks[number - 1].inner.weight.square().mean())
    return hidden


def with_losses(stack: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Autograd comes to what was computed last first, before it comes to what blocks hand on.

    So it comes to a loss that a block has made at its end, and to a penalty on a block's parameter
    that was made between later blocks.
    """
    aside = [*stack.penalties, *(block.loss for block in stack.blocks)]
    return next_token(stack, hidden, tokens) + torch.stack(aside).sum()


ASIDE = does(with_a_loss, router=partial(nn.Linear, WIDTH, WIDTH))


@pytest.mark.nightly(by_day=8)
@every_device
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (KEEP, Placement(tier="disk")),
        (Activations(tier="disk"), PERSISTENT),
        (Activations(tier="disk"), Placement(tier="host", keep_gathered=True)),
    ],
    ids=decision_name,
)
@pytest.mark.parametrize("lead", [0, 1])
def test_what_is_computed_beside_a_unit_waits_for_its_slot_in_backward(
    activations: Activations, states: Placement, lead: int, tmp_path: Path
) -> None:
    schedule = Schedule(forward_lead=lead, backward_lead=lead, swap_lead=lead)
    Scenario(
        model=Subject(stack(ASIDE, 5, run=penalized, ends=with_losses), batch_of),
        units=lambda units: decided(units, activations, states, schedule),
        script=Loop(num_steps=4),
        options={"lane_delay": lambda: 0.01},
    ).assert_like_plain(tmp_path)


def spared(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Computes what nobody uses, too."""
    return hidden + torch.tanh(block.inner(hidden))[..., :WIDTH], torch.tanh(block.spare(hidden))


def remembering(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Remembers its weights from step to step."""
    block.held = block.inner.weight.detach().t()
    return spared(block, hidden)


def reads_memory(stack: Any, hidden: Tensor, step: int) -> Tensor:
    held = [block.held for block in stack.blocks]
    hidden = hidden * (1 + sum(each.square().mean() for each in held if each is not None))
    for block in stack.blocks:
        hidden, _ = block(hidden)
    return hidden


def with_memory(*run: Callable[..., Any]) -> Subject:
    """Blocks that do so, one after the other."""
    spare = partial(nn.Linear, WIDTH, WIDTH)
    blocks = [does(each, held=lambda: None, spare=spare) for each in run]
    return Subject(stack(blocks, run=reads_memory), batch_of)


@pytest.mark.nightly("lite-*", "mlp-*", "attn-*")
@every_device
@pytest.mark.parametrize("form", ["keep", *RECOMPUTED])
def test_views_that_are_held_from_step_to_step_are_refused(form: Form, tmp_path: Path) -> None:
    """With the way to do it; what autograd has left of a second run is no such view."""
    activations = KEEP if form == "keep" else Activations(form=form)

    def planned(units: Units) -> Units:
        return decided(units, activations, Placement(tier="host"))

    def pinned(units: Units) -> Units:
        held = decided(units, activations, PERSISTENT)
        pairs = zip(planned(units), held, strict=True)
        return tuple(own if own.name == "blocks.1" else unit for unit, own in pairs)

    model = with_memory(spared, remembering, spared, spared)
    asked = Scenario(model=model, units=planned, script=Loop(num_steps=3))
    run = asked.start(tmp_path)
    with pytest.raises(RuntimeError, match=r"from step to step .* --pin \"blocks.1: persistent"):
        asked.played(run)
    replace(asked, units=pinned).assert_like_plain(tmp_path / "pinned")
    replace(asked, model=with_memory(*[spared] * 4)).assert_like_plain(tmp_path / "unused")
