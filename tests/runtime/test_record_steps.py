"""Recorded steps: all that a programme has, once each, in an order that the programme allows."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.presentation.report.step import read_step
from protrain_runtime import prepare, record
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import Program
from protrain_runtime.contract.program.recording import Recording, check_recording, read_recording
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import (
    Keep,
    Offload,
    Persistent,
    Plan,
    Recompute,
    Swap,
    Updates,
)
from protrain_runtime.devices.device import on_host
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.model.prepared import engine_of
from tests.support.cards import every_device
from tests.support.forked import protrain
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    batch,
    build,
    decided,
    described,
    device,
    mixed,
    plan_for,
    speculative,
    step,
)

NAME = "llama-tied"


def assert_possible(recording: Recording, plan: Plan, program: Program) -> None:
    """Everything ran once, lanes did one thing at a time, and nothing began before it could."""
    check_recording(recording, plan, program)
    events = {event.name: event for event in recording.events}
    slots = [events[program.slot_name(index)] for index in range(len(program.slots) + 1)]
    moves = [events[program.move_name(number)] for number in range(len(program.moves))]
    assert len(events) == len(slots) + len(moves)
    # What streams did is told by the device's clock, which agrees with the host's to about this.
    clocks_s = 0.0 if on_host(device()) else 2e-3
    assert all(event.end_s <= recording.step_seconds + clocks_s for event in recording.events)
    for lane in {event.lane for event in recording.events}:
        own = [event for event in recording.events if event.lane == lane]
        assert all(one.end_s <= two.start_s for one, two in pairwise(own))
    for index, slot in enumerate(program.slots):
        for number in [*slot.drained, *slot.ready]:
            assert moves[number].end_s <= slots[index].start_s + clocks_s
        for number in slot.finish:
            # What is read from disk needs nothing that is computed: the host asks for it when it
            # has submitted the slot, which a device may still be computing.
            if on_host(device()) or program.moves[number].kind != "read states":
                assert slots[index].end_s <= moves[number].start_s + clocks_s
    for number, move in enumerate(program.moves):
        assert all(moves[other].end_s <= moves[number].start_s + clocks_s for other in move.after)


def micro_batch(model: nn.Module, number: int) -> None:
    loss_of(call_model(model, batch(NAME, number))).backward()


@every_device
@pytest.mark.parametrize("updates", ["in backward", "after backward"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_recorded_step_is_the_programme(
    updates: Updates, micro_batches: int, tmp_path: Path
) -> None:
    model = build(NAME)
    units = mixed(described(NAME), random.Random(7), "disk", "host")
    plan = with_settings(plan_for(model, units), updates=updates, micro_batches=micro_batches)
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    engine = engine_of(model)
    assert engine is not None
    with record(model) as recorder:
        for number in range(3 * micro_batches):
            micro_batch(model, number)
            if (number + 1) % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert_possible(recorder.recording(), plan, engine.program)
    assert engine.recorder is None


@pytest.mark.parametrize("norm", [1e6, 0.01])
def test_a_recorded_step_has_what_ran_ahead_and_what_was_done_again(
    norm: float, tmp_path: Path
) -> None:
    model = build(NAME)
    units = mixed(described(NAME), random.Random(7), "disk", "host")
    plan = speculative(with_settings(plan_for(model, units), updates="after backward"))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    engine = engine_of(model)
    assert engine is not None
    with record(model) as recorder:
        for number in range(3):
            micro_batch(model, number)
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    every, again = engine.program, engine.program.again
    if norm > 1:
        left = [number for number in range(len(every.moves)) if number not in again]
        assert left == list(range(len(left)))
        every = replace(every, moves=every.moves[: len(left)])
    assert again
    assert_possible(recorder.recording(), plan, every)


def test_steps_that_are_given_up_are_not_recorded(tmp_path: Path, assert_says: Speaker) -> None:
    model = build(NAME)
    plan = plan_for(model, decided(described(NAME), Swap(tier="disk"), Offload(tier="disk")))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    engine = engine_of(model)
    assert engine is not None
    with record(model) as recorder:
        call_model(model, batch(NAME, 0))  # no backward
        with pytest.raises(RuntimeError) as caught:
            recorder.recording()
        assert_says(caught.value)
        step(NAME, model, optimizer, 1)
        call_model(model, batch(NAME, 2))
        with torch.no_grad():
            call_model(model, batch(NAME, 3))
    assert_possible(recorder.recording(), plan, engine.program)


@every_device
def test_recording_changes_no_bit(tmp_path: Path) -> None:
    results: list[list[torch.Tensor]] = []
    for recorded in (False, True):
        model = build(NAME)
        plan = plan_for(model, decided(described(NAME), Recompute(), Offload(tier="host")))
        model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
        if recorded:
            with record(model):
                losses = [step(NAME, model, optimizer, number) for number in range(2)]
        else:
            losses = [step(NAME, model, optimizer, number) for number in range(2)]
        results.append([*losses, *(v.clone() for v in model.state_dict().values())])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_bytes_are_those_of_a_measured_step(tmp_path: Path) -> None:
    model = build(NAME)
    plan = plan_for(model, decided(described(NAME), Keep(), Offload(tier="disk")))
    model, optimizer = prepare(model, plan, optimizer=ADAMW, spill_directory=tmp_path)
    engine = engine_of(model)
    assert engine is not None
    with record(model) as recorder:
        step(NAME, model, optimizer, 0)

    def observed(observe: Callable[[str], None]) -> None:
        micro_batch(model, 1)
        observe("update")
        optimizer.step()

    memory = measure_step(model, observed)
    recording = recorder.recording(slot_bytes=memory.slot_bytes)
    check_recording(recording, plan, engine.program)
    assert recording.slot_bytes == memory.slot_bytes
    assert len(recording.slot_bytes) == len(engine.program.slots) + 1


def test_what_cannot_be_recorded_is_one_message() -> None:
    model = build(NAME)

    def refused() -> str:
        with pytest.raises(ProtrainError) as caught, record(model):
            pass
        return str(caught.value)

    assert refused() == ("the model follows no plan\n  fix: call prepare(model, plan, ...) first")
    prepare(model, plan_for(model, decided(described(NAME), Keep(), Persistent())), optimizer=ADAMW)
    assert refused() == (
        "nothing to record: this plan keeps everything on the device, so that plain PyTorch is what"
        " runs"
    )


def test_run_writes_a_recording_that_lies_over_the_simulated_step(
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "profile.yaml").write_bytes(tiny_llama.read_bytes())
    pin = ("--pin", "model.layers.0-3: swap to disk, offload to disk")
    for command in (
        ("plan", "profile.yaml", *pin),
        ("run", "plan.yaml", "--steps", "3", "--record", "recording.json"),
    ):
        result = protrain(*command, folder=tmp_path)
        assert result.returncode == 0, result.stderr
    found = read_step(tmp_path / "plan.yaml")
    assert_possible(read_recording(tmp_path / "recording.json"), found.plan, found.program)


def test_a_plain_run_has_nothing_to_record(tmp_path: Path) -> None:
    plan = plan_for(build(NAME), decided(described(NAME), Keep(), Persistent()))
    write_plan(plan, tmp_path / "plan.yaml")
    result = protrain("run", "plan.yaml", "--plain", "--record", "r.json", folder=tmp_path)
    assert (result.returncode, result.stderr) == (
        2,
        "error: --record is of a planned step\n  fix: leave --plain out\n",
    )
