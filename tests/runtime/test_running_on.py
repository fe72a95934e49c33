"""Updates that run ahead of the norm, or on into the next step: whoever reads waits for them.

That they train bitwise under every kind of plan is asked by test_parity_matrix, and that each wait
is needed by test_ordering.
"""

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.planning.model.options import parse_pin
from protrain_plan.planning.model.problem import OVERLAPPING, Problem
from protrain_plan.planning.outcome import Infeasible, Solved
from protrain_plan.planning.questions.planner import solve_problem
from protrain_plan.planning.search.improving import Effort
from protrain_runtime import MovingAverage, full_parameters, load, restore, save
from protrain_runtime.contract.records.hardware import TierName
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Budgets,
    Placement,
    Schedule,
    Updates,
)
from protrain_runtime.devices.lanes import LaneError
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import parameter_values
from protrain_runtime.states.stand_ins import ConsumedGradient, hollow, plainly
from protrain_runtime.states.updates import Piece
from tests.support.cards import every_device
from tests.support.messages import Speaker
from tests.support.planning_cases import decoder, gpu
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    Subject,
    ahead,
    assert_bitwise,
    copied,
    decided,
    device,
    offloads,
    slow_updates,
)
from tests.support.scenario import Loop, Run, Scenario, Script, Units, recorded, refusal
from tests.support.thinning import thinned
from tests.support.training_rows import OPTIMIZERS

OWN = CATALOGUE["llama-tied"]
AHEAD = Schedule(forward_lead=1, backward_lead=1)
LATE = Schedule(forward_lead=1, backward_lead=1, update_late=True)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


# --- ahead of the norm ----------------------------------------------------------------------------


def speculating(
    script: Script = Loop(),  # noqa: B008
    tier: TierName = "disk",
    *,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Scenario:
    """Every third unit's states on the device, those of the others updated speculatively."""
    ways: list[Placement] = [PERSISTENT, *(one for one in offloads(tier) if one.staged)]

    def units(given: Units) -> Units:
        places = itertools.cycle(ways)
        schedule = replace(AHEAD, update_drain=1)
        return ahead(replace(unit, states=next(places), schedule=schedule) for unit in given)

    return Scenario(
        script=script,
        units=units,
        settings={"updates": "after backward", "overlap_steps": True, **(settings or {})},
        piece_bytes=50_000,
        **options,
    )


def watched(optimizer: torch.optim.Optimizer) -> list[bool]:
    """By step, once it was: whether what ran ahead was done again."""
    engine = cast(PlannedOptimizer, optimizer)._engine
    assert engine is not None
    steps: list[bool] = []
    begin, again = engine.begin_update, engine._again

    def told(*, same_options: bool) -> None:
        begin(same_options=same_options)
        steps.append(bool(engine._running & again))

    engine.begin_update = told  # type: ignore[method-assign]
    return steps


def assert_done_again(asked: Scenario, folder: Path, expected: list[bool]) -> None:
    """Like plain PyTorch; by step whether updates were done again."""
    run = asked.start(folder)
    steps = watched(run.optimizer)
    assert_bitwise(asked.played(run), asked.plain())
    assert steps == expected


def clipped_by_turns(run: Run) -> None:
    for number, norm in enumerate([1e6, 0.01, 0.02, None, 1e6, 0.01]):
        run.backward(number)
        if norm is not None:
            run.clip(norm)
        run.update()


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize(
    ("tier", "overlap", "name"),
    thinned(["disk", "host"], [True, False], sorted(OPTIMIZERS), every=3),
)
def test_steps_that_are_clipped_and_others_match_plain_torch_bitwise(
    tier: TierName, overlap: bool, name: str, tmp_path: Path
) -> None:
    settings = {"overlap_steps": overlap}
    asked = speculating(clipped_by_turns, tier, factory=OPTIMIZERS[name], settings=settings)
    assert_done_again(asked, tmp_path, [False, True, True, False, False, True])


def save_states(run: Run) -> None:
    """A save has the values before the update, as in plain PyTorch."""
    run.seen += copied(run.model.state_dict()).values()


def write_parameters(run: Run) -> None:
    with torch.no_grad(), full_parameters(run.model, modify=True):
        for parameter in run.model.parameters():
            parameter.mul_(0.9)


def load_parameters(run: Run) -> None:
    run.model.load_state_dict({name: value * 0.9 for name, value in run.values().items()})


def skip_step(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(60)


def change_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.7


BETWEEN: dict[Script, bool] = {
    (lambda run: None): False,
    (lambda run: run.look(50)): False,
    skip_step: False,
    save_states: True,
    write_parameters: True,
    load_parameters: True,
    (lambda run: run.optimizer.load_state_dict(copied(run.optimizer.state_dict()))): True,
    change_rate: True,
}
"""Events between backward and the step; whether updates are done again then."""


@pytest.mark.nightly("disk")
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_what_comes_before_the_step_counts_as_in_plain_torch_bitwise(
    tier: TierName, tmp_path: Path
) -> None:
    """One of them in each step."""

    def between(run: Run, number: int) -> None:
        [*BETWEEN][number](run)

    script = Loop(num_steps=len(BETWEEN), between=between)
    assert_done_again(speculating(script, tier), tmp_path, [*BETWEEN.values()])


def freezing(every: int, place: int) -> Subject:
    def freeze(model: nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % every != place)

    return replace(OWN, change=freeze)


def test_frozen_parameters_are_the_same_in_both_copies(tmp_path: Path) -> None:
    """They are loaded once, and read from whichever copy the last update made."""

    def loaded(run: Run, number: int) -> None:
        if number == 1:
            load_parameters(run)

    script = Loop(num_steps=4, before=loaded)
    speculating(script, model=freezing(2, 1)).assert_like_plain(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("frozen", [False, True])
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, *, frozen: bool) -> None:
    """Saved after one update of each copy, and loaded where the other one is current."""

    def trained(run: Run, numbers: range) -> Run:
        for number in numbers:
            run.backward(number)
            run.clip(0.1 if number % 2 else 1e6)
            run.update()
        run.seen.clear()
        return run

    asked = speculating(model=freezing(3, 1) if frozen else OWN)
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    first = trained(asked.start(folders[0]), range(2))
    save(first.model, first.optimizer, tmp_path / "saved")
    second = trained(asked.start(folders[1]), range(3))  # other values, in the other copy
    load(second.model, second.optimizer, tmp_path / "saved")
    trained(second, range(2, 5))
    assert_bitwise(second.outcome(), trained(asked.start(), range(5)).outcome())


def test_a_step_that_fails_ahead_of_the_norm_is_given_up(tmp_path: Path) -> None:
    """The states are those before it: training goes on."""

    def failing(run: Run, number: int) -> None:
        if number == 2:
            hook = next(run.model.parameters()).register_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                run.backward(40)
            hook.remove()
            run.optimizer.zero_grad()

    speculating(Loop(num_steps=4, before=failing)).assert_like_plain(tmp_path)


def test_both_copies_are_in_the_store(tmp_path: Path) -> None:
    for chunk in speculating().start(tmp_path).engine._offloaded:
        assert chunk.spare is not None and chunk.store is not None
        for part in chunk.slices:
            size = part.num_bytes
            first, second = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
            chunk.store.read(chunk.current.place(part), first)
            chunk.store.read(chunk.spare.place(part), second)
            assert abs(chunk.current.place(part) - chunk.spare.place(part)) >= size
            assert part.trainable or torch.equal(first, second)


# --- on into the next step ------------------------------------------------------------------------


def overlapping(
    script: Script = Loop(),  # noqa: B008
    schedule: Schedule = AHEAD,
    *,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Scenario:
    tier: TierName = "disk" if device().type == "cpu" else "host"
    return Scenario(
        script=script,
        units=lambda units: decided(units, RECOMPUTE, Placement(tier=tier), schedule),
        settings={"overlap_steps": True, **(settings or {})},
        options={"lane_delay": slow_updates},
        **options,
    )


def running(run: Run) -> int:
    """Moves of the last step that nobody has waited for."""
    return len(run.engine._carried)


def stepped(folder: Path) -> Run:
    """A run whose first step's updates run on."""
    run = overlapping().start(folder)
    run.step(0)
    assert running(run)
    return run


def plain_run(num_steps: int) -> Run:
    run = overlapping().start()
    run.step(*range(num_steps))
    return run


@pytest.mark.nightly
@every_device
@pytest.mark.parametrize("schedule", [AHEAD, LATE], ids=["in the order of backward", "late"])
@pytest.mark.parametrize("updates", ["in backward", "after backward"])
def test_updates_run_on_and_training_is_bitwise(
    schedule: Schedule, updates: Updates, tmp_path: Path
) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            run.step(number)
            assert running(run) if run.planned else True

    run = overlapping(script, schedule, settings={"updates": updates}).assert_like_plain(tmp_path)
    assert not running(run)


def read_on_the_device(run: Run, _: Path) -> dict[str, Tensor]:
    with full_parameters(run.model):
        return {name: p.detach().cpu().clone() for name, p in run.model.named_parameters()}


def read_an_average(run: Run, _: Path) -> dict[str, Tensor]:
    average = MovingAverage(run.model)
    average.update()
    read: dict[str, Tensor] = average.state_dict()["parameters"]
    return {name: value.cpu() for name, value in read.items()}


def read_a_checkpoint(run: Run, folder: Path) -> dict[str, Tensor]:
    save(run.model, run.optimizer, folder / "checkpoint")
    other = OWN.build(3)
    load(other, ADAMW(other.parameters()), folder / "checkpoint")
    return other.state_dict()


READERS: dict[str, Callable[[Run, Path], dict[str, Tensor]]] = {
    "state_dict": lambda run, _: run.values(),
    "one by one": lambda run, _: {n: value.clone() for n, value in parameter_values(run.model)},
    "on the device": read_on_the_device,
    "a copy": lambda run, _: copy.deepcopy(run.model).state_dict(),
    "an average": read_an_average,
    "a checkpoint": read_a_checkpoint,
    "a restored model": lambda run, _: restore(run.model).state_dict(),
}


@pytest.mark.nightly(by_day=8)
@every_device
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_between_steps_reads_what_is_updated(reader: str, tmp_path: Path) -> None:
    found = READERS[reader](stepped(tmp_path), tmp_path)
    expected = plain_run(1).values()
    assert all(torch.equal(value.cpu(), expected[name].cpu()) for name, value in found.items())


@pytest.mark.nightly("cpu")
@every_device
def test_an_evaluation_and_the_optimizers_states_are_those_of_the_last_step(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.step(0)
        run.look(5)
        run.step(1)
        assert running(run) if run.planned else True

    overlapping(script).assert_like_plain(tmp_path)


def with_a_rate(parameters: Any, *, tensor: bool) -> torch.optim.Optimizer:
    rate: Any = torch.tensor(1e-2) if tensor else 1e-2
    return torch.optim.AdamW(parameters, lr=rate, fused=True)


@pytest.mark.nightly
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_a_learning_rate_that_changes_after_a_step_is_the_next_ones(
    tensor: bool, tmp_path: Path
) -> None:
    """A tensor is changed in place, as schedulers do: what runs on has the value of its step."""

    def script(run: Run) -> None:
        (group,) = run.optimizer.param_groups
        for number in range(3):
            run.step(number)
            if tensor:
                group["lr"].mul_(0.1)
            else:
                group["lr"] *= 0.1
        group["lr"] = float(group["lr"])

    factory = partial(with_a_rate, tensor=tensor)
    overlapping(script, factory=factory).assert_like_plain(tmp_path)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Once it is set, updates fail."""
    fails, update = threading.Event(), Piece.update

    def broken(piece: Piece, *arguments: Any) -> None:
        if fails.is_set():
            raise OSError("the memory of this machine is broken")
        update(piece, *arguments)

    monkeypatch.setattr(Piece, "update", broken)
    return fails


@pytest.mark.nightly
@pytest.mark.parametrize("use", ["forward", "state_dict"])
def test_an_update_that_fails_late_is_told_and_ends_the_training(
    use: str, failing: threading.Event, tmp_path: Path, assert_says: Speaker
) -> None:
    run = stepped(tmp_path)
    run.backward(1)
    run.optimizer.step()
    failing.set()  # some of the updates run on
    with pytest.raises(LaneError, match="the memory of this machine is broken"):
        run.loss(2) if use == "forward" else run.model.state_dict()
    failing.clear()
    for again in (partial(run.step, 2), run.model.state_dict, partial(restore, run.model)):
        assert_says(refusal(again))


@pytest.mark.nightly
def test_a_forward_that_is_cut_short_leaves_whole_updates(tmp_path: Path) -> None:
    run = stepped(tmp_path)
    handle = run.model.get_submodule("model.layers.1").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.loss(1)
    handle.remove()
    assert not running(run)
    run.step(1)
    assert_bitwise(run.outcome(), plain_run(2).outcome())


@pytest.mark.nightly
def test_a_recorded_step_ends_with_its_updates(tmp_path: Path) -> None:
    run = stepped(tmp_path)
    recorded(run)
    run.step(2)
    assert running(run)


# --- in backward ----------------------------------------------------------------------------------


def in_backward(**options: Any) -> Scenario:
    return Scenario(
        units=partial(decided, activations=KEEP, states=OPTIMIZER_IN_BACKWARD), **options
    )


def start() -> Run:
    asked = in_backward()
    return asked.prepared(asked.subject.build(), None)


def up(model: nn.Module, layer: int) -> nn.Parameter:
    return model.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight")


@pytest.mark.nightly("emulated")
@every_device
def test_gradients_are_gone_before_those_of_earlier_blocks_come() -> None:
    run = start()
    blocks = [run.model.get_submodule(f"model.layers.{number}") for number in range(2)]
    seen: list[bool] = []

    def look(*_: object) -> None:
        # What stands for a gradient has its shape and holds one element.
        seen.append(all(type(p.grad) is ConsumedGradient for p in blocks[1].parameters()))

    next(blocks[0].parameters()).register_post_accumulate_grad_hook(look)
    run.step(0)
    assert seen == [True]


@every_device
def test_stand_ins_are_made_once() -> None:
    """The same objects stand for gradients in every step, and for equal shapes."""
    run, seen, made = start(), list[list[int]](), list[int]()
    for _ in range(3):
        run.backward(0)
        gradients = [parameter.grad for parameter in run.model.parameters()]
        taken = [one for one in gradients if isinstance(one, ConsumedGradient)]
        seen.append([id(one) for one in taken])
        with plainly():
            shapes = {one.shape for one in taken}
        assert len(set(seen[-1])) == len(shapes)
        run.update()
        made.append(hollow.cache_info().misses)
    assert seen[0] == seen[1] == seen[2] != []
    assert made[0] == made[2]


@every_device
def test_an_updated_parameter_cannot_be_read_before_the_step(assert_says: Speaker) -> None:
    """Plain PyTorch would show the value before the update, in a hook and after backward."""
    run = start()
    early, late = (up(run.model, number) for number in range(2))
    said: list[str] = []
    early.register_post_accumulate_grad_hook(lambda _: said.append(str(refusal(late.sum))))
    before = late.detach().clone()
    run.backward(0)
    assert_says([*said, str(refusal(early.sum))])
    run.optimizer.step()
    assert not torch.equal(late, before)


def test_a_backward_that_fails_ends_the_training(assert_says: Speaker) -> None:
    run = start()

    def fail(*_: object) -> None:
        raise ValueError("a hook of the user's")

    handle = up(run.model, 0).register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="a hook of the user's"):
        run.backward(0)
    handle.remove()
    for use in (partial(run.loss, 0), run.optimizer.step, partial(restore, run.model)):
        assert_says(refusal(use))
    # What there is can be looked at.
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.model.parameters())


def test_the_planner_updates_in_backward_where_gradients_have_no_room_alone(
    assert_says: Speaker,
) -> None:
    """It saves the room that all gradients would take when the step begins."""
    profile = decoder(gpu(), blocks=6)
    nothing_below = replace(profile, hardware=replace(profile.hardware, tiers=()))

    def solved(device: int, *pins: str) -> Solved | Infeasible:
        budgets = Budgets(device=device, host=0, disk=0)
        found = Problem.of(nothing_below, budgets, pins=[parse_pin(pin) for pin in pins])
        return solve_problem(found, effort=Effort())

    at_the_step, anyhow = solved(0, "*: persistent"), solved(0)
    assert isinstance(at_the_step, Infeasible)
    assert isinstance(anyhow, Infeasible)
    gradients = sum(unit.gradient_bytes for unit in profile.units)
    saved = at_the_step.shortfall_bytes - anyhow.shortfall_bytes
    assert gradients / 2 < saved <= gradients
    found = solved(anyhow.shortfall_bytes)
    assert isinstance(found, Solved)
    assert any(unit.states == OPTIMIZER_IN_BACKWARD for unit in found.plan.units)
    clipping = Problem.of(
        profile,
        Budgets(device=10**12, host=0, disk=0),
        pins=[parse_pin("layers.0: persistent and update in backward")],
        settings=replace(OVERLAPPING, updates="after backward"),
    )
    assert_says.refused(lambda: clipping.options)
