"""Events in a step: several forwards, micro-batches, norms, loss scales, exceptions.

As plain PyTorch has it, or one clear error.
"""

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.adapters import adapted
from protrain_plan.models.building import seeded
from protrain_runtime import restore
from protrain_runtime.contract.records.adapters import parse_lora
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Schedule,
    Updates,
)
from tests.support.cards import every_device
from tests.support.hostile_models import Block, batch_of, does, next_token, stack, tokens_of
from tests.support.messages import Speaker
from tests.support.runtime_cases import (
    ADAMW,
    BATCH,
    CATALOGUE,
    LARGE,
    SEQUENCE,
    Factory,
    Subject,
    ahead,
    assert_bitwise,
    copied,
    decided,
    decision_name,
    delays,
    device,
    differences,
    mixed,
    slow_updates,
)
from tests.support.scenario import Looking, Loop, Run, Scenario, Script, Units, refusal
from tests.support.thinning import thinned

TIERS: tuple[TierName, ...] = ("disk", "host")
BOTH: tuple[Updates, ...] = ("in backward", "after backward")
ROUNDS = [(1, False), (1, True), (2, False)]
"""Micro-batches of a step, and whether its updates run ahead of the norm."""


def mixture(tier: TierName, units: Units) -> Units:
    found = mixed(units, random.Random(5), tier, stepped=False)
    return (replace(found[0], states=Placement(tier=tier)), *found[1:])


def some_offloaded(tier: TierName, units: Units, *, speculate: bool = False) -> Units:
    """Every second unit's states on the device, the others below it."""
    places: tuple[Placement, ...] = (
        Placement(tier=tier),
        PERSISTENT,
        Placement(tier=tier, keep_gathered=True),
    )
    schedule = Schedule(forward_lead=1, backward_lead=1, update_drain=1)
    found = tuple(
        replace(unit, states=place, schedule=schedule)
        for unit, place in zip(units, itertools.cycle(places), strict=False)
    )
    return ahead(found) if speculate else found


def tried(
    script: Script = Loop(),  # noqa: B008
    *,
    updates: Updates = "after backward",
    micro_batches: int = 1,
    tier: TierName = "disk",
    speculate: bool = False,
    **options: Any,
) -> Scenario:
    """Some states on the device and some below it."""
    options.setdefault("units", partial(some_offloaded, tier, speculate=speculate))
    settings = {"updates": updates, "micro_batches": micro_batches}
    return Scenario(script=script, settings=settings, **options)


# --- micro-batches --------------------------------------------------------------------------------


class InterruptedBlockError(Exception):
    pass


def interrupt(*_: object) -> NoReturn:
    raise InterruptedBlockError


def evaluated_and_saved(run: Run, number: int) -> None:
    run.look(100 + number)
    run.seen += copied(list(run.model.state_dict().values()))
    run.optimizer.state_dict()


def looked_between(run: Run, *, updates: Updates) -> None:
    """Evaluation and checkpoints between micro-batches."""
    for number in range(6):
        run.backward(number)
        if number % 2 == 0 or updates == "after backward":
            evaluated_and_saved(run, number)
        if number % 2:
            run.update()


def dropped(run: Run, *, by_model: bool) -> None:
    """`zero_grad` gives a sum up, and the next micro-batch is a step's first."""
    for number in range(2):
        run.backward(50 + number)
        run.seen.pop()
        (run.model if by_model else run.optimizer).zero_grad()
        run.backward(2 * number)
        run.backward(2 * number + 1)
        run.update()


def interrupted_forward(run: Run) -> None:
    """It costs that micro-batch alone: sums of those before it stay."""
    for number in range(4):
        if number % 2:
            block = run.model.get_submodule("model.layers.2.mlp")
            handle = block.register_forward_pre_hook(interrupt)
            with pytest.raises(InterruptedBlockError):
                run.backward(number)
            handle.remove()
        run.backward(number)
        if number % 2:
            run.update()


def interrupted_backward(run: Run, *, micro_batches: int) -> None:
    """It costs that step alone where updates come after."""
    for number in range(3):
        block = run.model.get_submodule("model.layers.1.mlp")
        handle = block.register_full_backward_hook(interrupt)
        with pytest.raises(InterruptedBlockError):
            run.backward(number)
        handle.remove()
        run.optimizer.zero_grad()
        for part in range(micro_batches):
            run.backward(number + part)
        run.update()


def clipped_between(run: Run) -> None:
    for number in range(6):
        run.backward(number)
        run.clip(0.1)
        if number % 2:
            run.update()


def restored_before_the_step(run: Run) -> None:
    """`restore` gives waiting gradients back."""
    run.backward(0)
    run.clip(0.05)
    if run.planned:
        restore(run.model)
    run.optimizer.step()


@dataclass(frozen=True)
class Row:
    script: Script
    updates: Updates = "after backward"
    micro_batches: int = 2


SCRIPTS: dict[str, Row] = {
    # As an epoch's last step, which has fewer.
    "fewer": Row(Loop(num_steps=3)),
    "more": Row(Loop(num_steps=3, micro_batches=3)),
}
for one in BOTH:
    SCRIPTS |= {
        f"looked between, {one}": Row(partial(looked_between, updates=one), one),
        f"dropped by the optimizer, {one}": Row(partial(dropped, by_model=False), one),
        f"dropped by the model, {one}": Row(partial(dropped, by_model=True), one),
        f"interrupted in forward, {one}": Row(interrupted_forward, one),
    }
for count in (1, 2):
    failing = partial(interrupted_backward, micro_batches=count)
    SCRIPTS[f"interrupted in backward, {count}"] = Row(failing, micro_batches=count)
    SCRIPTS[f"restored, {count}"] = Row(restored_before_the_step, micro_batches=count)


@pytest.mark.nightly("*emulated*")
@pytest.mark.nightly(by_day=18)
@every_device
@pytest.mark.parametrize(("name", "tier"), thinned([*SCRIPTS], TIERS, every=2))
def test_a_script_of_micro_batches_trains_like_plain_pytorch(
    name: str, tier: TierName, tmp_path: Path
) -> None:
    row = SCRIPTS[name]
    tried(
        row.script,
        updates=row.updates,
        micro_batches=row.micro_batches,
        units=partial(mixture, tier),
    ).assert_like_plain(tmp_path)


def all_on_host(units: Units) -> Units:
    return decided(units, KEEP, Placement(tier="host"))


@every_device
def test_sums_that_are_clipped_between_micro_batches_are_those_of_plain_pytorch(
    tmp_path: Path,
) -> None:
    tried(clipped_between, micro_batches=2, units=all_on_host).assert_like_plain(tmp_path)


def test_gradients_wait_for_a_free_buffer_before_they_arrive_to_be_added(tmp_path: Path) -> None:
    tried(
        Loop(num_steps=1, micro_batches=2),
        updates="in backward",
        micro_batches=2,
        units=all_on_host,
        options={"lane_delay": slow_updates},  # gradients arrive long before those before are added
    ).assert_like_plain(tmp_path)


@every_device
def test_other_numbers_of_micro_batches_than_planned_are_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    """A step after fewer, and one more before it; all that was added stays."""
    run = tried(updates="in backward", micro_batches=4, units=partial(mixture, "disk")).start(
        tmp_path
    )
    before = copied(run.model.state_dict())
    for number in range(2):
        run.backward(number)
    assert_says(refusal(run.optimizer.step))
    assert list(differences(run.model.state_dict(), before, "parameters")) == []
    for number in range(2, 4):
        run.backward(number)
    assert_says(refusal(partial(run.backward, 4)))
    run.optimizer.step()


@pytest.mark.nightly("emulated")
@every_device
def test_a_smaller_batch_trains_and_a_larger_one_is_refused(
    tmp_path: Path, assert_says: Speaker
) -> None:
    asked = Scenario(units=partial(mixture, "disk"), settings={"model_config": "{}"})
    run = asked.start(tmp_path)
    for sizes in [(BATCH, SEQUENCE), (1, SEQUENCE), (BATCH, 8)]:
        tokens = torch.zeros(sizes, dtype=torch.int64, device=device())
        run.model(input_ids=tokens, labels=tokens).loss.backward()
        run.update()
    for sizes in [(BATCH + 1, 8), (1, SEQUENCE + 1)]:
        tokens = torch.zeros(sizes, dtype=torch.int64, device=device())
        assert_says(refusal(partial(run.model, input_ids=tokens, labels=tokens)))
        with torch.no_grad():
            run.model(input_ids=tokens)


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.nightly("rounds0-disk-2.0-None-emulated", "rounds35-host-inf-False-emulated")
@every_device
@pytest.mark.parametrize(
    ("rounds", "tier", "norm_type", "foreach"),
    thinned(ROUNDS, TIERS, [2.0, 1.0, float("inf")], [None, False], every=6),
)
def test_norms_and_clipped_steps_match_plain_torch_bitwise(
    rounds: tuple[int, bool], tier: TierName, norm_type: float, foreach: bool | None, tmp_path: Path
) -> None:
    micro_batches, speculate = rounds

    def script(run: Run) -> None:
        for step in range(2):
            for part in range(micro_batches):
                run.backward(2 * step + part)
            for norm in (0.05, 0.01):  # the second is of gradients that are scaled already
                run.clip(norm, norm_type=norm_type, foreach=foreach)
            run.update()

    tried(script, tier=tier, micro_batches=micro_batches, speculate=speculate).assert_like_plain(
        tmp_path
    )


@pytest.mark.parametrize("speculate", [False, True])
def test_a_learning_rate_may_change_until_the_step(tmp_path: Path, *, speculate: bool) -> None:
    def script(run: Run) -> None:
        run.backward(0)
        run.optimizer.param_groups[0]["lr"] = 5e-4
        run.optimizer.step()

    tried(script, speculate=speculate).assert_like_plain(tmp_path)


@pytest.mark.nightly("after-removed-emulated", "ahead-removed-emulated")
@every_device
@pytest.mark.parametrize("replaces", [False, True], ids=["removed", "replaced"])
@pytest.mark.parametrize("speculate", [False, True], ids=["after", "ahead"])
def test_a_gradient_that_its_owner_removed_or_replaced_counts_as_such(
    tmp_path: Path, *, speculate: bool, replaces: bool
) -> None:
    def change(run: Run, number: int) -> None:
        for place, parameter in enumerate(run.model.parameters()):
            if place % 3 == number:
                parameter.grad = None
            elif replaces and place % 3 == (number + 1) % 3:
                parameter.grad = torch.full_like(parameter, 0.5)

    tier: TierName = "disk" if device().type == "cpu" else "host"
    script = Loop(num_steps=3, between=change)
    tried(script, tier=tier, speculate=speculate).assert_like_plain(tmp_path)


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize(
    ("tier", "rounds", "clips", "fused"),
    thinned(TIERS, ROUNDS, [False, True], [False, True], every=2),
)
def test_a_gradient_scaler_unscales_clips_and_skips_as_in_plain_torch_bitwise(
    tier: TierName, rounds: tuple[int, bool], clips: bool, fused: bool, tmp_path: Path
) -> None:
    """The first scale overflows: that step is skipped, and the next one has a smaller scale."""
    micro_batches, speculate = rounds
    factors = (1.0, 1.0) if fused else (1.5, 0.7)  # plain PyTorch divides in the fused kernel

    def script(run: Run) -> None:
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=factors[0] * 2.0**127, backoff_factor=factors[1] * 2**-60
        )
        for step in range(4):
            for part in range(micro_batches):
                run.backward(micro_batches * step + part, weigh=scaler.scale)
            if clips:
                scaler.unscale_(run.optimizer)
                run.clip(0.05)
                run.seen[-1] = run.seen[-1].nan_to_num()
            before = copied(run.model.state_dict())
            scaler.step(run.optimizer)
            assert (list(differences(run.model.state_dict(), before, "")) != []) == (step > 0)
            scaler.update()
            run.seen.append(scaler.get_scale())
            run.optimizer.zero_grad()

    tried(
        script,
        tier=tier,
        micro_batches=micro_batches,
        factory=partial(torch.optim.AdamW, lr=1e-3, fused=fused),
        speculate=speculate,
    ).assert_like_plain(tmp_path)


# --- parameters without gradients -----------------------------------------------------------------


def by_bits(stack: Any, hidden: Tensor, step: int) -> Tensor:
    """The step says which expert a batch meets in each block."""
    for number, block in enumerate(stack.blocks):
        hidden = block(hidden, step >> number & 1)
    return hidden


ROUTED = Subject(
    stack(
        # A batch meets one of two experts.
        does(lambda b, x, other: b.other(x) if other else Block.forward(b, x), other=Block),
        depth=3,
        run=by_bits,
        ends=lambda s, x, tokens: next_token(s, x.to(s.head.weight.dtype), tokens),
    ),
    batch_of,
)


def halved_in_part(model: nn.Module) -> None:
    for path in ("blocks", "embedding"):
        model.get_submodule(path).bfloat16()


@every_device
@pytest.mark.parametrize("tier", TIERS)
def test_gradients_of_two_dtypes_are_clipped_as_in_plain_torch_bitwise(
    tier: TierName, tmp_path: Path
) -> None:
    """A device multiplies bfloat16 gradients by a factor of float32 that it rounds, a CPU not."""
    tried(
        Loop(num_steps=3, clips=0.05),
        model=replace(ROUTED, change=halved_in_part),
        tier=tier,
    ).assert_like_plain(tmp_path)


OPTIMIZERS: dict[str, Factory] = {
    "adamw": ADAMW,
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


@pytest.mark.nightly(by_day=2)
@pytest.mark.parametrize(("tier", "rounds", "updates"), thinned(TIERS, ROUNDS, BOTH, every=2))
@pytest.mark.parametrize("factory", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_without_gradients_are_left_alone_bitwise(
    tier: TierName, rounds: tuple[int, bool], updates: Updates, factory: Factory, tmp_path: Path
) -> None:
    """Some experts get a gradient in one micro-batch, some in another, some in none of a step."""
    micro_batches, speculate = rounds
    rng = random.Random(0)
    routes = [rng.randrange(8) for _ in range(5 * micro_batches)]
    routes[:micro_batches] = [0] * micro_batches  # the other experts have no states for a while
    clipped = updates == "after backward"
    asked = tried(
        Loop(micro_batches=micro_batches, clips=0.5 if clipped else None),
        model=replace(ROUTED, batches=lambda n: {"tokens": tokens_of(n), "step": routes[n]}),
        tier=tier,
        speculate=speculate and clipped,
        updates=updates,
        micro_batches=micro_batches,
        piece_bytes=3_000,
        factory=factory,
        options={"lane_delay": lambda: rng.random() * 0.001},
    )
    plain = asked.start()
    asked.played(plain)
    every = list(plain.model.parameters())
    assert len(plain.optimizer.state) == len(every), "every expert had its turn"
    asked.assert_like_plain(tmp_path)


# --- several forwards -----------------------------------------------------------------------------


def swapping(
    activations: Activations = Activations(tier="disk"),  # noqa: B008
    states: Placement = Placement(tier="disk"),  # noqa: B008
    lead: float = 0,
) -> Callable[[Units], Units]:
    schedule = Schedule(forward_lead=lead, backward_lead=lead, swap_lead=lead)
    return lambda units: decided(units, activations, states, schedule)


@pytest.mark.nightly(but=("llama-tied-False-cuda", "t5-True-cpu"))
@every_device
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("model", ["llama-tied", "t5"])
def test_generating_between_steps_changes_nothing(
    model: str, use_cache: bool, tmp_path: Path
) -> None:
    """An encoder is called once, by itself."""

    def script(run: Run) -> None:
        generate: Any = run.model.generate
        prompt = torch.arange(16).reshape(2, 8)
        asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "pad_token_id": 0}
        for number in range(3):
            run.step(number)
            run.seen.append(generate(prompt, use_cache=use_cache, **asked))

    tried(script, model=model, units=swapping()).assert_like_plain(tmp_path)


def failed_in_between(run: Run) -> None:
    """An evaluation that fails gives the step up."""
    loss = run.loss(5)
    block = run.model.get_submodule("model.layers.2")
    broken = block.register_forward_pre_hook(interrupt)
    with suppress(InterruptedBlockError):
        run.look(6)
    broken.remove()
    loss.backward()


@pytest.mark.nightly("emulated")
@every_device
def test_a_backward_of_several_forwards_is_one_error(tmp_path: Path, assert_says: Speaker) -> None:
    """Losses of two forwards at once are asked of `test_fixes`."""
    asked = tried(lambda run: run.step(0, 1), units=swapping())
    run = asked.start(tmp_path)
    torch.manual_seed(1)
    run.step(0)
    assert_says(refusal(partial(failed_in_between, run)))
    run.optimizer.zero_grad()
    run.step(1)
    assert_bitwise(run.outcome(), asked.plain())


@pytest.mark.nightly(by_day=6)
@every_device
@pytest.mark.parametrize(
    ("lead", "looking"), thinned([0, 1, LARGE], [torch.no_grad, torch.inference_mode], every=4)
)
@pytest.mark.parametrize(
    ("activations", "states"),
    [
        (Activations(tier="disk"), Placement(tier="disk")),
        (RECOMPUTE, Placement(tier="host", keep_gathered=True)),
        (Activations(form="full", tier="host"), Placement(tier="host")),
        (KEEP, Placement(tier="disk")),
    ],
    ids=decision_name,
)
def test_the_model_is_evaluated_between_its_forward_and_its_backward(
    activations: Activations, states: Placement, lead: int, looking: Looking, tmp_path: Path
) -> None:
    """As losses do that ask the model without its adapters what it would have said."""

    def script(run: Run) -> None:
        for number in range(3):
            loss = run.loss(number)
            run.look(number + 10, number + 20, mode=looking)
            margin = loss - sum(run.seen[-2:])
            (margin * margin).backward()
            run.update()
            run.seen.append(margin.detach())

    units, options = swapping(activations, states, lead), {"lane_delay": delays(lead)}
    tried(script, units=units, options=options).assert_like_plain(tmp_path)


@every_device
def test_an_evaluation_leaves_what_the_backward_waits_for(tmp_path: Path) -> None:
    """Chunks that were on the device stay there, chunks that were not do not come to stay."""
    gathered = swapping(KEEP, Placement(tier="host", keep_gathered=True), 1)
    run = tried(units=gathered).start(tmp_path)

    def on_device() -> list[tuple[list[int], list[int]]]:
        return [(sorted(c.buffers), sorted(c.hollow)) for c in run.engine._offloaded]

    loss = run.loss(0)
    before = on_device()
    run.look(1)
    assert on_device() == before
    loss.backward()
    run.update()
    run.loss(2)  # nobody has it any more: nothing of it is held
    run.look(1)
    assert not any(chunk.buffers for chunk in run.engine._offloaded)


def lora() -> Any:
    with seeded(0):
        return adapted(CATALOGUE["llama-tied"].build(), str(parse_lora("r=2")), source="")


LORA = Subject(lora, CATALOGUE["llama-tied"].batches)


def preferred(run: Run) -> None:
    """The order of direct preference optimization: policy, reference, backward."""
    for number in range(4):
        policy = run.loss(number)
        with run.model.disable_adapter():  # type: ignore[operator]
            run.look(number)
        loss = -nn.functional.logsigmoid(run.seen[-1] - policy)
        loss.backward()
        run.update()
        run.seen.append(loss.detach())


@pytest.mark.nightly(by_day=6)
@every_device
@pytest.mark.parametrize(
    ("activations", "states"),
    thinned(
        [RECOMPUTE, Activations(tier="disk")],
        [Placement(tier="disk"), Placement(tier="host", keep_gathered=True)],
        every=2,
    ),
    ids=decision_name,
)
def test_a_preference_loss_asks_the_model_without_its_adapters(
    activations: Activations, states: Placement, tmp_path: Path
) -> None:
    units = swapping(activations, states, 1)
    asked = tried(preferred, model=LORA, units=units, updates="in backward")
    asked.assert_like_plain(tmp_path)
