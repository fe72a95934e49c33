"""Every wait and fence of the runtime, taken away: what it keeps from happening is seen to happen.

On the emulated device, whose streams come late to their work. A mutation replaces a line of the
runtime; the scenario named beside it holds as the runtime is, and must not hold without that line.
The table is docs/reference/ordering.md (made by `pytest --write-golden`).
"""

import ast
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.program.compiling import _Compiler
from protrain_plan.records.hardware import TierName
from protrain_plan.records.plan import (
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
from protrain_runtime import prepare, record, restore
from protrain_runtime.devices import device as devices
from protrain_runtime.devices import lanes, stores
from protrain_runtime.devices.lanes import (
    Backend,
    StreamLane,
    StreamTicket,
    ThreadLane,
    ThreadTicket,
)
from protrain_runtime.devices.stores import DiskStore, HostStore
from protrain_runtime.engine.engine import Engine
from protrain_runtime.engine.moves import Moves
from protrain_runtime.engine.step_times import StepTimes
from protrain_runtime.model.prepared import engine_of
from tests.support.cards import card_called
from tests.support.mutations import Mutation, assert_page, mutated, names
from tests.support.runtime_cases import (
    ADAMW,
    Outcome,
    assert_bitwise,
    batch,
    build,
    decided,
    described,
    device,
    one_group,
    outcome,
    plan_for,
)

pytestmark = pytest.mark.emulated

NAME = "functional"
AHEAD = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)
AT_ONCE = Schedule(swap_drain=0, update_drain=0)
LIMIT_S = 20.0
PAGE = "ordering.md"
TRIES = 5


@pytest.fixture(autouse=True)
def card() -> Iterator[torch.device]:
    with card_called("emulated:1", __name__) as found:
        yield found


_seeds = itertools.count()


@contextmanager
def late(*, compute_us: float = 0.0, lanes_us: float = 0.0) -> Iterator[None]:
    """Streams come late to their work; what failed on one of them is raised at the end."""
    from tests.emulated.device import delayed

    with delayed(next(_seeds), compute_us=compute_us, lanes_us=lanes_us):
        yield
        gc.collect()
        devices.synchronize(device())


LATE_COMPUTE = partial(late, compute_us=100.0)
LATE_LANES = partial(late, lanes_us=2000.0)


def late_threads(most_s: float = 0.01) -> Callable[[], float]:
    """Seconds by which lanes on threads come late to their work."""
    from tests.emulated.device import lateness

    rng = random.Random(3)
    return lambda: rng.random() * most_s * lateness()


# --- scenarios ------------------------------------------------------------------------------------


def planned(
    units: tuple[UnitPlan, ...],
    folder: str,
    *,
    lane_delay: Callable[[], float] | None = None,
    **changes: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(NAME)
    return prepare(
        model,
        replace(plan_for(model, units), **changes),
        optimizer=ADAMW,
        param_groups=one_group(model),
        spill_directory=folder,
        wait_limit_s=LIMIT_S,
        lane_delay=lane_delay,
    )


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int = 1,
    *,
    clip: bool = False,
) -> Outcome:
    torch.manual_seed(1)
    losses: list[Tensor] = []
    for number in range(3):
        for part in range(micro_batches):
            loss = loss_of(call_model(model, batch(NAME, number * micro_batches + part)))
            loss.backward()
            losses.append(loss.detach())
        if clip:
            clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, optimizer, losses)


@cache
def plainly(micro_batches: int = 1, *, clip: bool = False) -> Outcome:
    model = build(NAME)
    return steps(model, ADAMW(one_group(model)), micro_batches, clip=clip)


def trains(
    lateness: Callable[[], Any],
    tier: TierName,
    activations: Activations,
    states: Placement,
    schedule: Schedule = AHEAD,
    *,
    micro_batches: int = 1,
    clip: bool = False,
    lane_delay: Callable[[], float] | None = None,
    **changes: Any,
) -> None:
    """Three steps under a plan give the bits of plain PyTorch."""
    expected = plainly(micro_batches, clip=clip)
    units = decided(described(NAME), activations, states, schedule)
    with TemporaryDirectory() as folder, lateness():
        changes = {"micro_batches": micro_batches, "piece_bytes": 5_000, **changes}
        model, optimizer = planned(units, folder, lane_delay=lane_delay, **changes)
        try:
            assert_bitwise(steps(model, optimizer, micro_batches, clip=clip), expected)
        finally:
            given_up(model)


def given_up(model: nn.Module) -> None:
    """Take the plan off, whatever state a mutation has left it in."""
    with suppress(Exception):
        restore(model)


def from_host_with_late_lanes() -> None:
    trains(LATE_LANES, "host", Swap(tier="host"), Offload(tier="host"))


def from_host_with_late_compute() -> None:
    trains(LATE_COMPUTE, "host", Swap(tier="host"), Offload(tier="host"))


def from_disk_with_late_compute() -> None:
    trains(LATE_COMPUTE, "disk", Swap(tier="disk"), Offload(tier="disk"))


def from_disk_with_late_threads() -> None:
    trains(
        late,
        "disk",
        SwapInput(tier="disk"),
        Offload(tier="disk", keep_gathered=True),
        AT_ONCE,
        lane_delay=late_threads(),
    )


def micro_batches_with_late_threads() -> None:
    trains(
        late,
        "host",
        Recompute(),
        Offload(tier="host"),
        replace(AHEAD, update_drain=None),
        micro_batches=2,
        lane_delay=late_threads(0.04),
    )


def overlapping_with_late_threads() -> None:
    trains(
        late,
        "host",
        Recompute(),
        Offload(tier="host"),
        lane_delay=late_threads(0.04),
        overlap_steps=True,
    )


def micro_batches_with_late_lanes() -> None:
    trains(LATE_LANES, "host", Recompute(), Offload(tier="host"), micro_batches=2)


ON_DEVICE = Offload(tier="host", update_on_device=True)
MANY_BYTES = 50_000  # a few pieces per chunk: each of them comes late


def on_the_device_with_late_lanes() -> None:
    trains(LATE_LANES, "host", Recompute(), ON_DEVICE, overlap_steps=True, piece_bytes=MANY_BYTES)


def clipped_on_the_device_with_late_lanes() -> None:
    trains(
        LATE_LANES,
        "host",
        Recompute(),
        ON_DEVICE,
        clip=True,
        updates="after backward",
        overlap_steps=True,
        piece_bytes=MANY_BYTES,
    )


def micro_batches_on_the_device_with_late_threads() -> None:
    trains(
        late,
        "host",
        Recompute(),
        ON_DEVICE,
        replace(AHEAD, update_drain=None),
        micro_batches=2,
        lane_delay=late_threads(0.04),
    )


def ahead_of_the_norm_with_late_lanes(*, clip: bool = False) -> None:
    trains(
        LATE_LANES,
        "host",
        Recompute(),
        replace(ON_DEVICE, speculate=True),
        clip=clip,
        updates="after backward",
        overlap_steps=True,
        piece_bytes=MANY_BYTES,
    )


def ahead_of_the_norm_from_disk_with_late_lanes() -> None:
    trains(
        LATE_LANES,
        "disk",
        Recompute(),
        Offload(tier="disk", speculate=True),
        replace(AHEAD, update_drain=None),
        updates="after backward",
        piece_bytes=MANY_BYTES,
    )


def again_after_the_norm_with_late_lanes() -> None:
    ahead_of_the_norm_with_late_lanes(clip=True)


def loaded_and_read() -> None:
    """What is loaded is what is read, while copies come late."""
    units = decided(described(NAME), Keep(), Offload(tier="host"), AHEAD)
    weights = {name: value.cpu() for name, value in build(NAME, seed=5).state_dict().items()}
    with TemporaryDirectory() as folder, LATE_COMPUTE():
        model, _ = planned(units, folder)
        model.load_state_dict(weights)
        read = {name: value.cpu() for name, value in model.state_dict().items()}
        given_up(model)
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def evaluated_then_loaded() -> None:
    """An evaluation that nobody has looked at yet has the parameters of its time."""
    first, second = build(NAME), build(NAME, seed=5)
    with torch.no_grad():
        expected = loss_of(call_model(first, batch(NAME, 0))).item()
    states = ADAMW(one_group(second)).state_dict()
    weights = {name: value.cpu() for name, value in second.state_dict().items()}
    units = decided(described(NAME), Keep(), Offload(tier="host"), AHEAD)
    with TemporaryDirectory() as folder, LATE_COMPUTE():
        model, optimizer = planned(units, folder)
        with torch.no_grad():
            found = loss_of(call_model(model, batch(NAME, 0)))
        store = next(chunk.store for chunk in engine_of(model)._offloaded)  # type: ignore[union-attr]
        assert isinstance(store, HostStore)
        for name, chunk, part in placed(model):
            store.write(chunk.offset + part.offset, as_bytes(weights[name]))
        assert found.item() == expected
        optimizer.load_state_dict(states)
        given_up(model)


def placed(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    engine = engine_of(model)
    assert engine is not None
    for chunk in engine._offloaded:
        for part in chunk.slices:
            yield part.name, chunk, part


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def evaluated_then_dropped() -> None:
    """Pages stay pinned until the last copy from them, of an evaluation here, has ended."""
    units = decided(described(NAME), Keep(), Offload(tier="host"), AHEAD)
    with TemporaryDirectory() as folder, late(compute_us=5000.0):
        model, optimizer = planned(units, folder)
        with torch.no_grad():
            call_model(model, batch(NAME, 0))
        del model, optimizer
        gc.collect()


def evaluated_between() -> None:
    """The model is evaluated between a forward and its backward, which wait for the same chunks."""
    plain = build(NAME)
    numbers = [loss_of(call_model(plain, batch(NAME, number))).item() for number in (0, 1)]
    ahead = replace(AHEAD, forward_lead=2, backward_lead=1000, swap_lead=1000)
    units = decided(described(NAME), Swap(tier="host"), Offload(tier="host"), ahead)
    with TemporaryDirectory() as folder, LATE_LANES():
        for _ in range(2):
            model, _ = planned(units, folder)
            loss = loss_of(call_model(model, batch(NAME, 0)))
            engine = engine_of(model)
            assert engine is not None
            for chunk in engine._offloaded:  # of the last units, on their way back for backward
                engine._await_fetches(chunk)
            with torch.no_grad():
                found = loss_of(call_model(model, batch(NAME, 1)))
            assert [loss.item(), found.item()] == numbers
            given_up(model)


def cut_short() -> None:
    """What is allocated after a forward that raised is nobody's any more."""
    units = decided(described(NAME), Keep(), Offload(tier="host"), replace(AHEAD, forward_lead=2))
    with TemporaryDirectory() as folder, LATE_LANES():
        model, _ = planned(units, folder)
        engine = engine_of(model)
        assert engine is not None

        def interrupt(what: str) -> None:
            if what == "slot 3":
                raise InterruptedError

        for _ in range(3):
            engine.observer = interrupt
            with pytest.raises(InterruptedError):
                call_model(model, batch(NAME, 0))
            engine.observer = None
            fresh = [torch.full((2**12,), 7.0, device=device()) for _ in range(64)]
            devices.synchronize(device())
            assert all(tensor.eq(7.0).all() for tensor in fresh)
        given_up(model)


def peaks_with_late_lanes() -> None:
    """What has to leave before a slot has left: no lateness makes the device hold more."""
    units = decided(described(NAME), Swap(tier="host"), Offload(tier="host"), AT_ONCE)
    prompt, delayed = (peak(units, lateness) for lateness in (late, LATE_LANES))
    assert delayed <= prompt


def peak(units: tuple[UnitPlan, ...], lateness: Callable[[], Any]) -> int:
    with TemporaryDirectory() as folder, lateness():
        model, optimizer = planned(units, folder)
        engine = engine_of(model)
        assert engine is not None
        if lateness is late:  # everything has ended by the next slot
            engine.observer = lambda _: [lane_ended(lane) for lane in engine.lanes.values()]  # type: ignore[assignment,func-returns-value]
        steps(model, optimizer)
        torch.accelerator.reset_peak_memory_stats(device())
        before = torch.accelerator.memory_allocated(device())
        steps(model, optimizer)
        found = torch.accelerator.max_memory_allocated(device()) - before
        given_up(model)
    return found


def lane_ended(lane: Any) -> None:
    lane.submit("nothing", lambda: None, ()).synchronize()


# --- scenarios of single parts --------------------------------------------------------------------


def a_thread_ends_with_its_stream() -> None:
    """A lane's thread has done what it submitted to its stream when its ticket says so."""
    backend = Backend(device(), limit_s=LIMIT_S)
    lane = backend.lane("test", on_device=False)
    source = torch.full((1000,), 7, dtype=torch.uint8, device=device())
    with LATE_LANES():
        for _ in range(20):
            target = backend.empty_host(1000)

            def work(target: Tensor = target) -> None:
                target.copy_(source, non_blocking=True)

            lane.submit("copy", work, ()).synchronize()
            assert target.eq(7).all()
        lane.close()


def filling(value: Tensor, number: float) -> Callable[[], None]:
    """Work for a lane."""

    def work() -> None:
        value.fill_(number)

    return work


def a_stream_keeps_its_order() -> None:
    """What is submitted second runs second, also where the first waits for a thread."""
    with waiting_lanes() as (first, lane, release):
        value = torch.zeros(1, device=device())
        one = lane.submit("one", filling(value, 1.0), (first,))
        two = lane.submit("two", filling(value, 2.0), ())
        release()
        for ticket in (one, two):
            ticket.wait()
        assert value.item() == 2.0


def the_launching_thread_goes_on() -> None:
    """Work that follows a thread's work is submitted without waiting for that."""
    with waiting_lanes() as (first, lane, release):
        value = torch.zeros(1, device=device())
        ticket = lane.submit("one", filling(value, 1.0), (first,))
        assert not first.done()
        release()
        ticket.wait()
        assert value.item() == 1.0


@contextmanager
def waiting_lanes() -> Iterator[tuple[Any, Any, Callable[[], None]]]:
    """A thread's work that has not ended, a lane on a stream, and what lets the work end."""
    backend = Backend(device(), limit_s=2.0)
    thread, stream = (backend.lane("test", on_device=there) for there in (False, True))
    gate = threading.Event()

    def wait() -> None:
        gate.wait()

    first = thread.submit("wait", wait, ())
    try:
        yield first, stream, gate.set
    finally:
        gate.set()
        thread.close()
        stream.close()


def a_closed_lane_has_ended() -> None:
    """Nothing of a lane runs once it is closed."""
    backend = Backend(device(), limit_s=LIMIT_S)
    with LATE_LANES():
        for _ in range(10):
            lane = backend.lane("test", on_device=True)
            value = torch.zeros(1000, device=device())
            ticket = lane.submit("fill", filling(value, 1.0), ())
            lane.close()
            assert ticket.done()


def recorded() -> None:
    """A step's record is there when the step has ended, whatever the streams are late with."""
    units = decided(described(NAME), Swap(tier="host"), Persistent(), AHEAD)  # updated there
    with TemporaryDirectory() as folder, late(compute_us=2000.0):
        model, optimizer = planned(units, folder)
        with record(model) as recorder:
            loss_of(call_model(model, batch(NAME, 0))).backward()
            optimizer.step()
            assert recorder.recording().events
        given_up(model)


def through_the_passage() -> None:
    """Bytes of several halves go to a file and come back, twice by the same thread."""
    backend = Backend(device(), limit_s=LIMIT_S)
    values = [torch.randint(256, (20_000,), dtype=torch.uint8) for _ in range(10)]
    sources = [value.to(device()) for value in values]
    with TemporaryDirectory() as folder, LATE_LANES():
        store = DiskStore(Path(folder), backend)
        offsets = [store.reserve(source.numel()) for source in sources]
        with torch.Stream(device=device()) as stream:
            for offset, source in zip(offsets, sources, strict=True):
                store.write(offset, source)
            on_disk = [torch.empty_like(value) for value in values]
            for offset, found in zip(offsets, on_disk, strict=True):
                store.read(offset, found)
            back = [torch.zeros_like(source) for source in sources]
            for offset, target in zip(offsets, back, strict=True):
                store.read(offset, target)
            stream.synchronize()
        assert all(torch.equal(one, two) for one, two in zip(on_disk, values, strict=True))
        assert all(torch.equal(one.cpu(), two) for one, two in zip(back, values, strict=True))
        store.close()


# --- the table ------------------------------------------------------------------------------------


MUTATIONS = (
    Mutation(
        owner=StreamTicket,
        name="wait",
        line="devices.current_stream(self._device).wait_event(self._end())",
        instead="self._end()",
        keeps="compute reads a buffer before the copy to it has ended",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=ThreadTicket,
        name="wait",
        line="self.synchronize()",
        instead="pass",
        keeps="compute reads a buffer that is being read from disk",
        scenario=from_disk_with_late_threads,
    ),
    Mutation(
        owner=ThreadTicket,
        name="synchronize",
        line="self._event.wait(self._limit_s)",
        instead="True",
        keeps="states are updated while they are being read from disk",
        scenario=from_disk_with_late_threads,
    ),
    Mutation(
        owner=StreamTicket,
        name="_end",
        line="self._issue.synchronize()",
        instead="pass",
        keeps="work is waited for that is not on its stream yet",
        scenario=the_launching_thread_goes_on,
    ),
    Mutation(
        owner=StreamTicket,
        name="synchronize",
        line="while not event.query():",
        instead="while False:",
        keeps="the host's optimizer reads a gradient before it has arrived",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=StreamLane,
        name="_issue",
        line="self._stream.wait_event(item.fence)",
        instead="pass",
        keeps="a copy takes what compute has not written yet, or overwrites what it still reads",
        scenario=from_host_with_late_compute,
    ),
    Mutation(
        owner=StreamLane,
        name="_issue",
        line="other.wait()",
        instead="pass",
        keeps="a gradient arrives where the one before it is still being added",
        scenario=micro_batches_with_late_threads,
    ),
    Mutation(
        owner=StreamLane,
        name="submit",
        line="self._waiting is None and all(",
        instead="all(",
        keeps="work overtakes what was submitted to its lane before it",
        scenario=a_stream_keeps_its_order,
    ),
    Mutation(
        owner=StreamLane,
        name="submit",
        line="all(other.issued() for other in after)",
        instead="True",
        keeps="the thread that launches compute waits for a thread of a lane",
        scenario=the_launching_thread_goes_on,
    ),
    Mutation(
        owner=StreamLane,
        name="close",
        line="self._stream.synchronize()",
        instead="pass",
        keeps="a lane that is closed still works on what is freed then",
        scenario=a_closed_lane_has_ended,
    ),
    Mutation(
        owner=ThreadLane,
        name="_run",
        line="other.synchronize()",
        instead="pass",
        keeps="the host's optimizer starts before the gradients are there",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=ThreadLane,
        name="_do",
        line="self._stream.wait_event(item.fence)",
        instead="pass",
        keeps="what goes to disk is taken before compute has written it",
        scenario=from_disk_with_late_compute,
    ),
    Mutation(
        owner=ThreadLane,
        name="_do",
        line="    self._stream.synchronize()",
        instead="    pass",
        keeps="work counts as ended while its copies are on their way",
        scenario=a_thread_ends_with_its_stream,
    ),
    Mutation(
        owner=Engine,
        name="_begin_slot",
        line="self._tickets[number].wait()",
        instead="pass",
        keeps="a slot computes before what it reads is back",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_begin_slot",
        line="self._end(earlier)",
        instead="pass",
        keeps="the device holds what a slot's bytes do not count any more",
        scenario=peaks_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_end",
        line="    self._tickets[number].wait()",
        instead="    pass",
        keeps="memory is freed, and serves compute again, under a copy from it",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_end_moves",
        line="self._tickets[number].synchronize()",
        instead="pass",
        keeps="the next step reads parameters that are being updated",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_give_up",
        line="end.synchronize()",
        instead="pass",
        keeps="a forward that was cut short frees what its copies still use",
        scenario=cut_short,
    ),
    Mutation(
        owner=Engine,
        name="_await_fetches",
        line="self._tickets[number].wait()",
        instead="pass",
        keeps="an evaluation computes with a chunk that is on its way",
        scenario=evaluated_between,
    ),
    Mutation(
        owner=Engine,
        name="_submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "update"',
        keeps="an update starts before its gradients, or its states, are there",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "read states"',
        keeps="states are read to a staging buffer that is not written out yet",
        scenario=from_disk_with_late_threads,
    ),
    Mutation(
        owner=Engine,
        name="_submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "write states"',
        keeps="states are written out before they are updated",
        scenario=from_disk_with_late_threads,
    ),
    Mutation(
        owner=Engine,
        name="_submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "add gradients"',
        keeps="gradients are added before they have arrived",
        scenario=micro_batches_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "spill gradients"',
        keeps="gradients arrive where those of another chunk are still being added",
        scenario=micro_batches_with_late_threads,
    ),
    Mutation(
        owner=Engine,
        name="_submit",
        line="after += [self._carried[other] for other in awaited if other in self._carried]",
        instead="pass",
        keeps="the next step fetches parameters that are being updated",
        scenario=overlapping_with_late_threads,
    ),
    Mutation(
        owner=Engine,
        name="__init__",
        line="self._awaited[unit].add(number)",
        instead="pass",
        keeps="the next step fetches parameters that an update ahead of the norm still writes",
        scenario=ahead_of_the_norm_with_late_lanes,
    ),
    Mutation(
        owner=Moves,
        name="_read_states",
        line="factors=list(stored.factors)",
        instead="factors=stored.factors",
        keeps="an update ahead of the norm multiplies by a factor that comes later",
        scenario=again_after_the_norm_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_end_carried",
        line="        wait()",
        instead="        pass",
        keeps="what is read between steps is being updated",
        scenario=overlapping_with_late_threads,
    ),
    Mutation(
        owner=Engine,
        name="_begin_slot",
        line="self._end_carried(earlier, self._carried[earlier].wait)",
        instead="self._end_carried(earlier, lambda: None)",
        keeps="a slot's memory is that of a chunk whose update still writes it out",
        scenario=on_the_device_with_late_lanes,
    ),
    Mutation(
        owner=_Compiler,
        name="_add_updates",
        line="waits = gradients  # which it reads, too",
        instead="pass",
        keeps="gradients are read with the states before they are in host memory",
        scenario=micro_batches_on_the_device_with_late_threads,
    ),
    Mutation(
        owner=_Compiler,
        name="_add_updates",
        line="waits = gradients  # which it reads, too",
        instead="pass",
        keeps="gradients are copied for an update ahead of the norm before they are in host memory",
        scenario=ahead_of_the_norm_from_disk_with_late_lanes,
    ),
    Mutation(
        owner=Engine,
        name="_begin_slot",
        line="gone = index >= self._program.num_units",
        instead="gone = False",
        keeps="what a step holds is freed when a move of the step before it has ended",
        scenario=clipped_on_the_device_with_late_lanes,
    ),
    Mutation(
        owner=Moves,
        name="start",
        line="piece = self._working[number] = self._pieces.pop((move.unit, move.start))",
        instead="piece = self._pieces.pop((move.unit, move.start))",
        keeps="a factor that clips is freed before the update has multiplied by it",
        scenario=clipped_on_the_device_with_late_lanes,
    ),
    Mutation(
        owner=Moves,
        name="start",
        line="work, self._held[number] = spills.spill(move, chunk)",
        instead="work, _ = spills.spill(move, chunk)",
        keeps="a gradient is freed under the copy from it",
        scenario=from_host_with_late_lanes,
    ),
    Mutation(
        owner=StepTimes,
        name="end",
        line="devices.synchronize(self._device)",
        instead="pass",
        keeps="a step counts as ended, and is read off events, while the device is in it",
        scenario=recorded,
    ),
    Mutation(
        owner=HostStore,
        name="write",
        line="self.view(offset, source.numel()).copy_(source)",
        instead="self.view(offset, source.numel()).copy_(source, non_blocking=True)",
        keeps="loaded parameters are read before they have arrived in host memory",
        scenario=loaded_and_read,
    ),
    Mutation(
        owner=HostStore,
        name="write",
        line="self._backend.synchronize()",
        instead="pass",
        keeps="an evaluation that runs still computes with what is loaded after it",
        scenario=evaluated_then_loaded,
    ),
    Mutation(
        owner=HostStore,
        name="close",
        line="self._backend.synchronize()",
        instead="pass",
        keeps="host memory is unpinned under a copy",
        scenario=evaluated_then_dropped,
    ),
    Mutation(
        owner=stores._Passage,
        name="down",
        line="            pending[2].synchronize()",
        instead="            pass",
        keeps="a part goes to the file before the device has written it",
        scenario=through_the_passage,
    ),
    Mutation(
        owner=stores._Passage,
        name="down",
        line="\n        pending[2].synchronize()",
        instead="",
        keeps="the last part goes to the file before the device has written it",
        scenario=through_the_passage,
    ),
    Mutation(
        owner=stores._Passage,
        name="up",
        line="gone[-2].synchronize()",
        instead="pass",
        keeps="a part is read over one that the device still copies",
        scenario=through_the_passage,
    ),
    Mutation(
        owner=stores._Passage,
        name="up",
        line="event.synchronize()",
        instead="pass",
        keeps="the next read overwrites what the device still copies",
        scenario=through_the_passage,
    ),
)
SCENARIOS = tuple(dict.fromkeys(mutation.scenario for mutation in MUTATIONS))


@pytest.fixture(autouse=True)
def short_passage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of the small models here pass in several parts."""
    monkeypatch.setattr(stores, "PASSAGE_BYTES", 8192)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_scenario_holds(scenario: Callable[[], None]) -> None:
    scenario()


def repeated(scenario: Callable[[], None]) -> None:
    from tests.emulated.device import longer

    for number in range(TRIES):
        with longer(2.0**number):
            scenario()


@pytest.mark.parametrize(
    "mutation",
    [  # every other one for every change, all of them every night
        pytest.param(mutation, id=name, marks=pytest.mark.slow if number % 2 else ())
        for number, (mutation, name) in enumerate(zip(MUTATIONS, names(MUTATIONS), strict=True))
    ],
)
def test_the_scenario_does_not_hold_without_the_line(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutated(monkeypatch, mutation)
    # What comes late is chance, and on a busy machine the host is late as well: other delays, and
    # longer ones, where they did not meet what they would spoil.
    with pytest.raises((AssertionError, RuntimeError)):
        repeated(mutation.scenario)
    with suppress(RuntimeError):  # what failed on a stream is no other test's
        devices.synchronize(device())


# Waits that keep no order beside compute on one device, by the function that has them.
NONE_OF_THE_TABLE = {
    "device.synchronize": "what others wait with",
    "device._can_time_and_wait": "asks what a type of device can do",
    "lanes.Backend.lane": "a thread's start",
    "lanes.Backend.synchronize": "what others wait with",
    "step_times.StepTimes.begin": "a clock's origin",
    "step_times.StepTimes.timed.run": "when a recorded move began and ended",
    "updates._helpers": "threads' start",
    "distributed_checkpoints.save_parts": "ranks wait for each other",
    "group._end": "ends what a group waits in",
    "stores.CheckedHostStore.write": "only with checked spills: what is summed has arrived",
    "telling.Meeting._run": "between two looks at who asks",
    "spill_file._Requests.run": "test_any_reads_and_writes_agree_with_memory fails without it",
    "spill_file._Transfer.wait": "what `run` waits with",
}


def waits() -> Iterator[tuple[str, str]]:
    """Every call in the runtime that waits: its function, and the call."""

    def inside(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            here = f"{place}.{child.name}" if named else place  # type: ignore[attr-defined]
            called = child.func if isinstance(child, ast.Call) else None
            waiting = ("wait", "synchronize", "wait_event")
            if isinstance(called, ast.Attribute) and called.attr in waiting:
                yield here, ast.unparse(child)
            yield from inside(child, here)

    for file in sorted(Path(lanes.__file__).parents[1].rglob("*.py")):
        yield from inside(ast.parse(file.read_text()), file.stem)


def test_every_wait_of_the_runtime_is_in_the_table() -> None:
    from tests.support.ranks_scenarios import MUTATIONS as AMONG_RANKS

    found, tables = list(waits()), (*MUTATIONS, *AMONG_RANKS)
    left = [
        (place, call)
        for place, call in found
        if place not in NONE_OF_THE_TABLE
        and not any(each.place == place and call in each.line for each in tables)
    ]
    assert left == []
    assert NONE_OF_THE_TABLE.keys() <= {place for place, _ in found}


def test_the_page_names_every_line_and_what_it_keeps(request: pytest.FixtureRequest) -> None:
    assert_page(request, PAGE, MUTATIONS)
