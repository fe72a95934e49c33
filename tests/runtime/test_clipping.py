"""What stands between backward and the optimizer's step: norms, loss scales, missing gradients."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import prepare
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Persistent,
    Placement,
    Schedule,
    UnitPlan,
    Updates,
)
from protrain_runtime.states.stand_ins import OffloadedGradient
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    Factory,
    assert_bitwise,
    batch,
    build,
    copied,
    described,
    device,
    differences,
    outcome,
    plan_for,
    speculative,
)
from tests.support.thinning import thinned

NAME = "llama-tied"
ROUNDS = [(1, False), (1, True), (2, False)]
"""Micro-batches of a step, and whether its updates run ahead of the norm."""
Step = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]


def some_offloaded(units: tuple[UnitPlan, ...], tier: TierName) -> tuple[UnitPlan, ...]:
    """Every second unit's states on the device, the others below it."""
    places: tuple[Placement, ...] = (
        Offload(tier=tier),
        Persistent(),
        Offload(tier=tier, keep_gathered=True),
    )
    schedule = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
    return tuple(
        replace(unit, states=place, schedule=schedule)
        for unit, place in zip(units, itertools.cycle(places), strict=False)
    )


def prepared(
    spill: Path,
    *,
    tier: TierName = "disk",
    micro_batches: int = 1,
    factory: Factory = ADAMW,
    ahead: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(NAME)
    plan = with_settings(
        plan_for(model, some_offloaded(described(NAME), tier)),
        updates="after backward",
        micro_batches=micro_batches,
    )
    plan = speculative(plan) if ahead else plan
    return prepare(model, plan, optimizer=factory, spill_directory=spill)


def backward(model: nn.Module, number: int, scale: Tensor | float = 1.0) -> Tensor:
    loss = loss_of(call_model(model, batch(NAME, number)))
    (loss * scale).backward()
    return loss.detach()


# --- norms ----------------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize(
    ("rounds", "tier", "norm_type", "foreach"),
    thinned(ROUNDS, ["disk", "host"], [2.0, 1.0, float("inf")], [None, False], every=6),
)
def test_norms_and_clipped_steps_match_plain_torch_bitwise(
    rounds: tuple[int, bool],
    tier: TierName,
    norm_type: float,
    foreach: bool | None,
    tmp_path: Path,
) -> None:
    micro_batches, ahead = rounds

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for step in range(2):
            seen += [backward(model, 2 * step + n) for n in range(micro_batches)]
            clip = partial(torch.nn.utils.clip_grad_norm_, norm_type=norm_type, foreach=foreach)
            # Twice: the second is of gradients that are scaled already.
            seen += [clip(model.parameters(), 0.05), clip(model.parameters(), 0.01)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    reference = build(NAME)
    plainly = ADAMW(reference.parameters())
    expected = outcome(reference, plainly, loop(reference, plainly))
    model, optimizer = prepared(tmp_path, tier=tier, micro_batches=micro_batches, ahead=ahead)
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)


@every_device
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_gradients_of_two_dtypes_are_clipped_as_in_plain_torch_bitwise(
    tier: TierName, tmp_path: Path
) -> None:
    """A device multiplies bfloat16 gradients by a factor of float32 that it rounds, a CPU not."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(3):
            tokens = torch.arange(32, device=device()).view(2, 16) + number
            loss = model(tokens)
            loss.backward()
            seen.append(loss.detach())
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    def built() -> Routed:
        model = routed()
        model.blocks.bfloat16()
        model.embed.bfloat16()
        return model

    reference = built()
    plainly = ADAMW(reference.parameters())
    expected = outcome(reference, plainly, loop(reference, plainly))
    planned = built()
    plan = plan_for(planned, some_offloaded(routed_units(), tier))
    plan = replace(plan, settings=replace(plan.settings, updates="after backward"))
    model, optimizer = prepare(planned, plan, optimizer=ADAMW, spill_directory=tmp_path)
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_learning_rate_may_change_until_the_step(tmp_path: Path, *, ahead: bool) -> None:
    results = []
    for planned in (False, True):
        model = build(NAME)
        optimizer: torch.optim.Optimizer = ADAMW(model.parameters())
        if planned:
            model, optimizer = prepared(tmp_path, ahead=ahead)
        backward(model, 0)
        optimizer.param_groups[0]["lr"] = 5e-4
        optimizer.step()
        results.append(outcome(model, optimizer, []))
    assert_bitwise(results[1], results[0])


@pytest.mark.parametrize("replaces", [False, True], ids=["removed", "replaced"])
@pytest.mark.parametrize("ahead", [False, True], ids=["after", "ahead"])
def test_a_gradient_that_its_owner_removed_or_replaced_counts_as_such(
    tmp_path: Path, *, ahead: bool, replaces: bool
) -> None:
    results = []
    for planned in (False, True):
        model = build(NAME)
        optimizer: torch.optim.Optimizer = ADAMW(model.parameters())
        if planned:
            model, optimizer = prepared(tmp_path, ahead=ahead)
        for number in range(3):
            backward(model, number)
            for place, parameter in enumerate(model.parameters()):
                if place % 3 == number:
                    parameter.grad = None
                elif replaces and place % 3 == (number + 1) % 3:
                    parameter.grad = torch.full(parameter.shape, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append(outcome(model, optimizer, []))
    assert_bitwise(results[1], results[0])


USES: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda gradient: gradient.sum(),
    "clamp_": lambda gradient: gradient.clamp_(-1, 1),
    "detach": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "zero_": lambda gradient: gradient.zero_(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_other_uses_of_a_waiting_gradient_are_refused(
    use: Callable[[Tensor], object],
    tmp_path: Path,
    assert_says: Speaker,
) -> None:
    model, _ = prepared(tmp_path)
    backward(model, 0)
    gradients = [parameter.grad for parameter in model.parameters()]
    waiting = [gradient for gradient in gradients if isinstance(gradient, OffloadedGradient)]
    assert 0 < len(waiting) < len(gradients)
    with pytest.raises(RuntimeError) as caught:
        use(waiting[0])
    assert_says(caught.value)
    assert repr(waiting[0]) == "OffloadedGradient()"
    own = next(p for p in model.parameters() if p.grad is waiting[0])
    assert (waiting[0].shape, waiting[0].dtype) == (own.shape, own.dtype)


# --- loss scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "rounds", "clips"), thinned(["disk", "host"], ROUNDS, [False, True], every=2)
)
def test_a_gradient_scaler_unscales_clips_and_skips_as_in_plain_torch_bitwise(
    tier: TierName, rounds: tuple[int, bool], clips: bool, tmp_path: Path
) -> None:
    """The first scale overflows: that step is skipped, and the next one has a smaller scale."""
    micro_batches, ahead = rounds

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=3 * 2.0**126, backoff_factor=0.7 * 2**-60)
        seen: list[Tensor] = []
        for step in range(4):
            for number in range(micro_batches):
                loss = loss_of(call_model(model, batch(NAME, micro_batches * step + number)))
                scaler.scale(loss).backward()
                seen.append(loss.detach())
            if clips:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                seen.append(norm.nan_to_num())
            before = copied(model.state_dict())
            scaler.step(optimizer)
            changed = list(differences(model.state_dict(), before, "")) != []
            assert changed == (step > 0)
            scaler.update()
            seen.append(torch.tensor(scaler.get_scale()))
            optimizer.zero_grad()
        return seen

    factory = partial(torch.optim.AdamW, lr=1e-3)
    reference = build(NAME)
    plainly = factory(reference.parameters())
    expected = outcome(reference, plainly, loop(reference, plainly))
    model, optimizer = prepared(
        tmp_path, tier=tier, micro_batches=micro_batches, factory=factory, ahead=ahead
    )
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)


# --- parameters without gradients -----------------------------------------------------------------


class Experts(nn.Module):
    """A residual block with two experts, of which a batch meets one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, hidden: Tensor, expert: int) -> Tensor:  # [batch, sequence, width], twice
        result: Tensor = hidden + self.experts[expert](self.norm(hidden))
        return result


class Routed(nn.Module):
    """Blocks of experts; the first token says which expert all of a batch meets in each block."""

    def __init__(self, width: int = 48, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Experts(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:  # int64 [batch, sequence] -> []
        hidden = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, (int(tokens[0, 0]) >> number) & 1)
        logits = self.head(hidden.to(self.head.weight.dtype))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def routed() -> Routed:
    torch.manual_seed(0)
    return Routed().to(device())


def routed_units() -> tuple[UnitPlan, ...]:
    def unit(name: str, *parameters: str) -> UnitPlan:
        return UnitPlan(
            name=name,
            kind="part" if parameters else "block",
            activations=Keep(),
            states=Persistent(),
            parameters=parameters,
        )

    blocks = [unit(f"blocks.{number}") for number in range(3)]
    return (unit("embed", "embed.weight"), *blocks, unit("head", "head.bias", "head.weight"))


OPTIMIZERS: dict[str, Factory] = {
    "adamw": ADAMW,
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize(
    ("tier", "rounds", "updates"),
    thinned(["disk", "host"], ROUNDS, ["in backward", "after backward"], every=2),
)
@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_without_gradients_are_left_alone_bitwise(
    tier: TierName,
    rounds: tuple[int, bool],
    updates: Updates,
    factory: Factory,
    tmp_path: Path,
) -> None:
    """Some experts get a gradient in one micro-batch, some in another, some in none of a step."""
    micro_batches, ahead = rounds
    rng = random.Random(0)
    routes = [rng.randrange(8) for _ in range(5 * micro_batches)]
    routes[:micro_batches] = [0] * micro_batches  # the other experts have no states for a while

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        generator = torch.Generator().manual_seed(0)
        for number, route in enumerate(routes):
            tokens = torch.randint(64, (2, 16), generator=generator)
            tokens[0, 0] = route
            loss = model(tokens)
            loss.backward()
            seen.append(loss.detach())
            if (number + 1) % micro_batches == 0:
                if updates == "after backward":
                    seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
        return seen

    reference = routed()
    plainly = factory(reference.parameters())
    expected = outcome(reference, plainly, loop(reference, plainly))
    assert len(plainly.state) == len(list(reference.parameters())), "every expert had its turn"

    model: nn.Module = routed()
    plan = plan_for(model, some_offloaded(routed_units(), tier), piece_bytes=3_000)
    plan = replace(
        plan, settings=replace(plan.settings, updates=updates, micro_batches=micro_batches)
    )
    if ahead and updates == "after backward":
        plan = speculative(plan)
    model, optimizer = prepare(
        model,
        plan,
        optimizer=factory,
        spill_directory=tmp_path,
        lane_delay=lambda: rng.random() * 0.001,
    )
    assert_bitwise(outcome(model, optimizer, loop(model, optimizer)), expected)
