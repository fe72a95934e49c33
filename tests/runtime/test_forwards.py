"""Several forwards in a step, and forwards that generate: as plain PyTorch, or one clear error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.adapters import adapted
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.building import seeded
from protrain_runtime import prepare
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Placement,
    Recompute,
    Schedule,
    Swap,
    SwapInput,
    UnitPlan,
)
from protrain_runtime.model.prepared import engine_of
from tests.support.cards import every_device
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    LARGE,
    assert_bitwise,
    batch,
    build,
    decided,
    decision_name,
    delays,
    described,
    differences,
    outcome,
    plan_for,
    step,
    units_of,
)
from tests.support.thinning import thinned

NAME = "llama-tied"
ONE_BACKWARD = (
    "backward ran through a forward that was not the last one: under a plan every forward has its"
    " backward before the next begins. Where one loss compares several inputs, give them to one"
    " forward, as one batch"
)
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Any]]


def prepared(
    folder: Path,
    *,
    units: tuple[UnitPlan, ...] | None = None,
    lane_delay: Callable[[], float] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(NAME)
    units = units or decided(described(NAME), Swap(tier="disk"), Offload(tier="disk"))
    plan = with_settings(plan_for(model, units), updates="after backward")
    return prepare(model, plan, optimizer=ADAMW, spill_directory=folder, lane_delay=lane_delay)


def assert_same(
    loop: Loop,
    folder: Path,
    *,
    units: tuple[UnitPlan, ...] | None = None,
    lane_delay: Callable[[], float] | None = None,
) -> None:
    """The loop, plainly and under a plan."""
    reference = build(NAME)
    plainly = ADAMW(reference.parameters())
    expected = loop(reference, plainly)
    model, optimizer = prepared(folder, units=units, lane_delay=lane_delay)
    found = loop(model, optimizer)
    assert list(differences(found, expected, "seen")) == []
    assert_bitwise(outcome(model, optimizer, []), outcome(reference, plainly, []))


@every_device
@pytest.mark.parametrize("use_cache", [False, True])
def test_generating_between_steps_changes_nothing(use_cache: bool, tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        generate: Any = model.generate
        seen: list[Any] = []
        for number in range(3):
            seen.append(step(NAME, model, optimizer, number))
            prompt = torch.arange(16).reshape(2, 8)
            seen.append(
                generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=4,
                    pad_token_id=0,
                    use_cache=use_cache,
                )
            )
        return seen

    assert_same(loop, tmp_path)


def pair_loss(outputs: list[Any]) -> Tensor:
    """As contrastive losses do: of both outputs at once."""
    one, other = (output.logits.float().mean(dim=(1, 2)) for output in outputs)
    loss: Tensor = (one - other).square().mean()
    return loss


def refused(folder: Path, use: Callable[[nn.Module], None]) -> None:
    """The use is one error, and the steps after it are those of plain PyTorch."""
    reference = build(NAME)
    plainly = ADAMW(reference.parameters())
    expected = outcome(reference, plainly, [step(NAME, reference, plainly, n) for n in range(2)])
    model, optimizer = prepared(folder)
    losses = [step(NAME, model, optimizer, 0)]
    with pytest.raises(RuntimeError) as caught:
        use(model)
    assert str(caught.value) == ONE_BACKWARD
    optimizer.zero_grad()
    losses.append(step(NAME, model, optimizer, 1))
    assert_bitwise(outcome(model, optimizer, losses), expected)


@every_device
def test_two_forwards_and_one_backward_is_one_error(tmp_path: Path) -> None:
    def contrast(model: nn.Module) -> None:
        pair_loss([call_model(model, batch(NAME, number)) for number in (5, 6)]).backward()

    refused(tmp_path, contrast)


def looked_at(looking: Callable[[], Any], model: nn.Module, number: int) -> Tensor:
    with looking():
        loss: Tensor = loss_of(call_model(model, batch(NAME, number)))
        return loss.clone()


def compared_with_itself(looking: Callable[[], Any]) -> Loop:
    """As losses do that ask the model without its adapters what it would have said."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for number in range(3):
            loss = loss_of(call_model(model, batch(NAME, number)))
            reference = [looked_at(looking, model, number + more) for more in (10, 20)]
            margin = loss - sum(reference)
            (margin * margin).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [*reference, margin.detach()]
        return seen

    return loop


@every_device
@pytest.mark.parametrize(
    ("lead", "looking"),
    thinned([0, 1, LARGE], [torch.no_grad, torch.inference_mode], every=4),
)
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (Swap(tier="disk"), Offload(tier="disk")),
        (Recompute(), Offload(tier="host", keep_gathered=True)),
        (SwapInput(tier="host"), Offload(tier="host")),
        (Keep(), Offload(tier="disk")),
    ],
    ids=decision_name,
)
def test_the_model_is_evaluated_between_its_forward_and_its_backward(
    activations: Activations,
    states: Placement,
    lead: int,
    looking: Callable[[], Any],
    tmp_path: Path,
) -> None:
    schedule = Schedule(forward_lead=lead, backward_lead=lead, swap_lead=lead)
    units = decided(described(NAME), activations, states, schedule)
    assert_same(compared_with_itself(looking), tmp_path, units=units, lane_delay=delays(lead))


@every_device
def test_an_evaluation_leaves_what_the_backward_waits_for(tmp_path: Path) -> None:
    """Chunks that were on the device stay there, chunks that were not do not come to stay."""
    model, _ = prepared(
        tmp_path, units=decided(described(NAME), Keep(), Offload(tier="host", keep_gathered=True))
    )
    engine = engine_of(model)
    assert engine

    def on_device() -> list[tuple[list[int], list[int]]]:
        return [(sorted(c.buffers), sorted(c.hollow)) for c in engine._offloaded]

    loss = loss_of(call_model(model, batch(NAME, 0)))
    before = on_device()
    looked_at(torch.no_grad, model, 1)
    assert on_device() == before
    loss.backward()


@every_device
def test_an_evaluation_that_fails_gives_the_step_up(tmp_path: Path) -> None:
    def fail(model: nn.Module) -> None:
        loss = loss_of(call_model(model, batch(NAME, 5)))
        broken = model.get_submodule("model.layers.2").register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            looked_at(torch.no_grad, model, 6)
        broken.remove()
        loss.backward()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    refused(tmp_path, fail)


def test_an_evaluation_after_a_forward_that_nobody_has_any_more_holds_nothing_of_it(
    tmp_path: Path,
) -> None:
    model, _ = prepared(
        tmp_path, units=decided(described(NAME), Keep(), Offload(tier="host", keep_gathered=True))
    )
    engine = engine_of(model)
    assert engine
    call_model(model, batch(NAME, 0))
    looked_at(torch.no_grad, model, 1)
    assert not any(chunk.buffers for chunk in engine._offloaded)


def adapted_model() -> Any:
    with seeded(0):
        return adapted(build(NAME), str(parse_lora("r=2")), source="")


@every_device
@pytest.mark.parametrize(
    ("activations", "states"),
    thinned(
        [Recompute(), Swap(tier="disk")],
        [Offload(tier="disk"), Offload(tier="host", keep_gathered=True)],
        every=2,
    ),
    ids=decision_name,
)
def test_a_preference_loss_asks_the_model_without_its_adapters(
    activations: Activations, states: Placement, tmp_path: Path
) -> None:
    """The order of direct preference optimization: policy, reference, backward."""

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for number in range(4):
            policy = loss_of(call_model(model, batch(NAME, number)))
            with torch.no_grad(), model.disable_adapter():
                reference = loss_of(call_model(model, batch(NAME, number)))
            loss = -nn.functional.logsigmoid(reference - policy)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [reference, loss.detach()]
        return seen

    plain = adapted_model()
    plainly = ADAMW([p for p in plain.parameters() if p.requires_grad])
    expected = loop(plain, plainly)
    model = adapted_model()
    units = decided(units_of(adapted_model(), batch(NAME, 0)), activations, states)
    model, optimizer = prepare(
        model, plan_for(model, units), optimizer=ADAMW, spill_directory=tmp_path
    )
    assert list(differences(loop(model, optimizer), expected, "seen")) == []
    assert_bitwise(outcome(model, optimizer, []), outcome(plain, plainly, []))


def test_two_inputs_in_one_forward_compare_as_ever(tmp_path: Path) -> None:
    """What the error says to do."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        for number in range(2):
            output: Any = call_model(model, batch(NAME, number))
            one, other = output.logits.float().mean(dim=(1, 2)).chunk(2)
            loss = (one - other).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        return seen

    assert_same(loop, tmp_path, units=decided(described(NAME), Recompute(), Offload(tier="disk")))
