"""Steps that are recorded, and steps that are watched.

A recording has all that a programme has, once each, in an order that the programme allows; the
second step of a user's own loop is beside what its plan promises.
"""

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from weakref import ref

import pytest
from torch.profiler import ProfilerActivity, profile

from protrain_plan.presentation.report.step import read_step
from protrain_runtime import record, restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import Program
from protrain_runtime.contract.program.recording import Recording, check_recording, read_recording
from protrain_runtime.contract.records.plan import (
    KEEP,
    RECOMPUTE,
    Activations,
    Placement,
    Plan,
    TierBytes,
    Updates,
)
from protrain_runtime.devices.device import on_host
from protrain_runtime.diagnostics.recording import measure_step
from tests.support.cards import every_device
from tests.support.forked import protrain
from tests.support.messages import Speaker
from tests.support.runtime_cases import ahead, assert_bitwise, decided, device, mixed
from tests.support.scenario import Loop, Run, Scenario, Units, refusal

DISK = Placement(tier="disk")


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


def assert_recorded(asked: Scenario, run: Run, recording: Recording) -> None:
    assert_possible(recording, asked.planned_for(asked.subject.build()), run.engine.program)


def at_random(units: Units) -> Units:
    return mixed(units, random.Random(7), "disk", "host")


@pytest.mark.nightly(by_day=8)
@every_device
@pytest.mark.parametrize("updates", ["in backward", "after backward"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_recorded_step_is_the_programme(
    updates: Updates, micro_batches: int, tmp_path: Path
) -> None:
    settings = {"updates": updates, "micro_batches": micro_batches}
    script = Loop(num_steps=3, micro_batches=micro_batches)
    asked = Scenario(units=at_random, settings=settings, script=script)
    run = asked.start(tmp_path)
    with record(run.model) as recorder:
        script(run)
    assert_recorded(asked, run, recorder.recording())
    assert run.engine.recorder is None


@pytest.mark.nightly
@pytest.mark.parametrize("norm", [1e6, 0.01])
def test_a_recorded_step_has_what_ran_ahead_and_what_was_done_again(
    norm: float, tmp_path: Path
) -> None:
    script = Loop(num_steps=3, clips=norm)
    settings = {"updates": "after backward"}
    asked = Scenario(units=lambda units: ahead(at_random(units)), settings=settings)
    run = asked.start(tmp_path)
    with record(run.model) as recorder:
        script(run)
    every, again = run.engine.program, run.engine.program.again
    if norm > 1:
        left = [number for number in range(len(every.moves)) if number not in again]
        assert left == list(range(len(left)))
        every = replace(every, moves=every.moves[: len(left)])
    assert again
    assert_possible(recorder.recording(), asked.planned_for(asked.subject.build()), every)


def test_steps_that_are_given_up_are_not_recorded(tmp_path: Path, assert_says: Speaker) -> None:
    asked = Scenario(units=partial(decided, activations=Activations(tier="disk"), states=DISK))
    run = asked.start(tmp_path)
    with record(run.model) as recorder:
        run.loss(0)  # no backward
        assert_says(refusal(recorder.recording))
        run.step(1)
        run.loss(2)
        run.look(3)
    assert_recorded(asked, run, recorder.recording())


@pytest.mark.nightly("emulated")
@every_device
def test_recording_changes_no_bit(tmp_path: Path) -> None:
    units = partial(decided, activations=RECOMPUTE, states=Placement(tier="host"))
    asked = Scenario(units=units, script=Loop(num_steps=2))
    run = asked.start(tmp_path)
    with record(run.model):
        found = asked.played(run)
    assert_bitwise(found, asked.plain())


@pytest.mark.nightly
def test_bytes_are_those_of_a_measured_step(tmp_path: Path) -> None:
    asked = Scenario(units=partial(decided, activations=KEEP, states=DISK))
    run = asked.start(tmp_path)
    with record(run.model) as recorder:
        run.step(0)

    def observed(observe: Callable[[str], None]) -> None:
        run.backward(1)
        observe("update")
        run.optimizer.step()

    memory = measure_step(run.model, observed)
    recording = recorder.recording(slot_bytes=memory.slot_bytes)
    plan = asked.planned_for(asked.subject.build())
    check_recording(recording, plan, run.engine.program)
    assert recording.slot_bytes == memory.slot_bytes
    assert len(recording.slot_bytes) == len(run.engine.program.slots) + 1


def test_what_cannot_be_recorded_is_one_message() -> None:
    model = Scenario().subject.build()

    def refused() -> str:
        with pytest.raises(ProtrainError) as caught, record(model):
            pass
        return str(caught.value)

    assert refused() == ("the model follows no plan\n  fix: call prepare(model, plan, ...) first")
    Scenario().prepared(model, None)
    assert refused() == (
        "nothing to record: this plan keeps everything on the device, so that plain PyTorch is what"
        " runs"
    )


@pytest.mark.nightly
def test_run_writes_a_recording_that_lies_over_the_simulated_step(
    tiny_llama: Path, tmp_path: Path
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


# --- watched --------------------------------------------------------------------------------------


def promising(num_bytes: int) -> Scenario:
    """A plan that offloads and recomputes, and promises a peak; its second step is watched."""
    asked = Scenario(
        model="functional-relu",
        units=partial(decided, activations=RECOMPUTE, states=DISK),
        options={"watch": True},
    )
    peak = TierBytes(device=num_bytes, context=0, host=0, disk=0)
    return replace(asked, settings={"peak_bytes": peak})


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings inside."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in found if one.category is RuntimeWarning]


@pytest.mark.nightly(but=("cuda",))
@every_device
def test_a_step_above_its_promise_is_warned_of_once(tmp_path: Path) -> None:
    with warned() as said:
        run = promising(1).start(tmp_path)
        run.step(0, 1, 2, 3)
    assert len(said) == 1
    assert said[0].startswith(
        "step 2 took more memory than its plan promises, with all tensors of this process on"
        f" {device()}: the step's peak of tensors, "
    )
    assert ": 1 B predicted, " in said[0]
    restore(run.model)


@pytest.mark.nightly(but=("cuda",))
@every_device
def test_a_step_within_its_promise_is_silent_and_nothing_stays_attached(tmp_path: Path) -> None:
    with warned() as said:
        run = promising(2**30).start(tmp_path)
        run.step(0, 1, 2, 3)
    assert said == []
    assert not run.optimizer._optimizer_step_post_hooks
    restore(run.model)


@pytest.mark.nightly
def test_nothing_is_watched_beside_a_profiler(tmp_path: Path) -> None:
    with warned() as said, profile(activities=[ProfilerActivity.CPU]):
        run = promising(1).start(tmp_path)
        run.step(0, 1, 2)
    assert said == []
    restore(run.model)


def test_a_model_that_is_dropped_while_it_is_watched_is_freed(tmp_path: Path) -> None:
    run = promising(1).start(tmp_path)
    run.step(0)
    dropped = ref(run.model)
    del run
    gc.collect()
    assert dropped() is None
