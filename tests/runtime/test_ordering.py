"""Every wait and fence of the runtime, taken away: what it keeps from happening is seen to happen.

On the emulated device, whose streams come late to their work. A mutation replaces a line of the
runtime; the scenario named beside it holds as the runtime is, and must not hold without that line.
The table is in `tests.support.mutations`.
"""

import ast
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_runtime import record, restore
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Schedule,
)
from protrain_runtime.devices import device as devices
from protrain_runtime.devices import lanes, stores
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.stores import DiskStore, HostStore
from tests.support.cards import card_called
from tests.support.mutations import AMONG_RANKS, ON_A_DEVICE, Mutation, mutate, names
from tests.support.runtime_cases import (
    BATCH,
    SEQUENCE,
    assert_bitwise,
    build,
    decided,
    device,
    one_group,
)
from tests.support.scenario import Loop, Run, Scenario

pytestmark = pytest.mark.emulated

NAME = "functional"
AHEAD = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=1, update_drain=1)
AT_ONCE = Schedule(swap_drain=0, update_drain=0)
LIMIT_S = 20.0
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


def tried(
    activations: Activations,
    states: Placement,
    schedule: Schedule = AHEAD,
    *,
    micro_batches: int = 1,
    clip: bool = False,
    lane_delay: Callable[[], float] | None = None,
    piece_bytes: int = 20_000,
    **settings: Any,
) -> Scenario:
    return Scenario(
        model=NAME,
        units=lambda units: decided(units, activations, states, schedule),
        settings={"micro_batches": micro_batches, **settings},
        script=Loop(num_steps=3, micro_batches=micro_batches, clips=0.1 if clip else None),
        piece_bytes=piece_bytes,
        groups=one_group,
        options={"wait_limit_s": LIMIT_S, "lane_delay": lane_delay},
    )


def trains(
    lateness: Callable[[], Any],
    activations: Activations,
    states: Placement,
    schedule: Schedule = AHEAD,
    *,
    stream: torch.Stream | None = None,
    **options: Any,
) -> None:
    """Three steps under a plan, on a stream of their own if one is given, have plain bits."""
    asked = tried(activations, states, schedule, **{"piece_bytes": 5_000, **options})
    expected = asked.plain()
    with TemporaryDirectory() as folder, lateness(), nullcontext() if stream is None else stream:
        run = asked.start(Path(folder))
        try:
            assert_bitwise(asked.played(run), expected)
        finally:
            given_up(run.model)


def given_up(model: nn.Module) -> None:
    """Take the plan off, whatever state a mutation has left it in."""
    with suppress(Exception):
        restore(model)


HOST, DISK = Placement(tier="host"), Placement(tier="disk")
ON_DEVICE = Placement(tier="host", update_on_device=True)
MANY_BYTES = 50_000  # a few pieces per chunk: each of them comes late
LATER = replace(AHEAD, update_drain=None)


AFTER: dict[str, Any] = {"updates": "after backward", "piece_bytes": MANY_BYTES}
GATHERED = replace(DISK, keep_gathered=True)
FULL = Activations(form="full", tier="disk")


def very_late(states: Placement, schedule: Schedule = LATER, **options: Any) -> None:
    trains(late, RECOMPUTE, states, schedule, lane_delay=late_threads(0.04), **options)


def on_another_stream() -> None:
    """Compute's stream comes late with the lanes': it is none of the device's own."""
    stream, lateness = torch.Stream(device=device()), partial(late, lanes_us=400.0)
    trains(lateness, Activations(tier="disk"), DISK, stream=stream, piece_bytes=MANY_BYTES)


def from_disk() -> None:
    options: dict[str, Any] = {"lane_delay": late_threads(), "piece_bytes": MANY_BYTES}
    trains(late, FULL, GATHERED, AT_ONCE, **options)


def recomputed(states: Placement, schedule: Schedule = AHEAD, **options: Any) -> Callable[[], None]:
    return partial(trains, LATE_LANES, RECOMPUTE, states, schedule, **options)


TRAINING: dict[str, Callable[[], None]] = {
    "from_host_with_late_lanes": partial(trains, LATE_LANES, Activations(tier="host"), HOST),
    "from_host_with_late_compute": partial(trains, LATE_COMPUTE, Activations(tier="host"), HOST),
    "from_disk_on_another_stream_with_late_streams": on_another_stream,
    "from_disk_with_late_threads": from_disk,
    "micro_batches_with_late_threads": partial(very_late, HOST, micro_batches=2),
    "overlapping_with_late_threads": partial(very_late, HOST, AHEAD, overlap_steps=True),
    "micro_batches_with_late_lanes": recomputed(HOST, micro_batches=2),
    "on_the_device_with_late_lanes": recomputed(
        ON_DEVICE, overlap_steps=True, piece_bytes=MANY_BYTES
    ),
    "clipped_on_the_device_with_late_lanes": recomputed(
        ON_DEVICE, clip=True, overlap_steps=True, **AFTER
    ),
    "micro_batches_on_the_device_with_late_threads": partial(very_late, ON_DEVICE, micro_batches=2),
    "ahead_of_the_norm_with_late_lanes": recomputed(
        replace(ON_DEVICE, speculate=True), overlap_steps=True, **AFTER
    ),
    "ahead_of_the_norm_from_disk_with_late_lanes": recomputed(
        replace(DISK, speculate=True), LATER, **AFTER
    ),
}


@contextmanager
def run_under(
    lateness: Callable[[], Any], asked: Scenario, model: nn.Module | None = None
) -> Iterator[Run]:
    """A run with lateness, whose plan is taken off at the end."""
    with TemporaryDirectory() as folder, lateness():
        run = asked.prepared(model or asked.subject.build(), Path(folder))
        yield run
        given_up(run.model)


def loaded_and_read() -> None:
    """Reads see what was loaded, while copies come late."""
    weights = {name: value.cpu() for name, value in build(NAME, seed=5).state_dict().items()}
    with run_under(LATE_COMPUTE, tried(KEEP, HOST)) as run:
        run.model.load_state_dict(weights)
        read = {name: value.cpu() for name, value in run.model.state_dict().items()}
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def evaluated_then_loaded() -> None:
    """An evaluation that nobody has looked at yet has the parameters of its time."""
    asked = tried(KEEP, HOST)
    first, second = asked.start(), asked.start(seed=5)
    first.look(0)
    states = second.optimizer.state_dict()
    weights = {name: value.cpu() for name, value in second.model.state_dict().items()}
    with run_under(partial(late, compute_us=1000.0), asked) as run:
        with torch.no_grad():
            found = run.loss(0)
        store = next(chunk.store for chunk in run.engine._offloaded)
        assert isinstance(store, HostStore)
        for name, chunk, part in placed(run):
            store.write(chunk.current.offset + part.offset, as_bytes(weights[name]))
        assert found.item() == first.seen[0].item()
        run.optimizer.load_state_dict(states)


def placed(run: Run) -> Iterator[tuple[str, Any, Any]]:
    for chunk in run.engine._offloaded:
        for part in chunk.slices:
            yield part.name, chunk, part


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def evaluated_then_dropped() -> None:
    """Pages stay pinned until the last copy from them, of an evaluation here, has ended."""
    with TemporaryDirectory() as folder, late(compute_us=5000.0):
        run = tried(KEEP, HOST).start(Path(folder))
        run.look(0)
        del run
        gc.collect()


def evaluated_between() -> None:
    """The model is evaluated between a forward and its backward, which wait for the same chunks."""
    ahead = replace(AHEAD, forward_lead=2, backward_lead=1000, swap_lead=1000)
    asked = tried(Activations(tier="host"), HOST, ahead)
    plain = asked.start()
    numbers = [plain.loss(number).item() for number in (0, 1)]
    for _ in range(2):
        with run_under(LATE_LANES, asked) as run:
            loss = run.loss(0)
            for chunk in run.engine._offloaded:  # of the last units, on their way back for backward
                run.engine._await_fetches(chunk)
            with torch.no_grad():
                found = run.loss(1)
            assert [loss.item(), found.item()] == numbers


def cut_short() -> None:
    """Memory that is allocated after a forward that raised is nobody's any more."""

    def interrupt(what: str) -> None:
        if what == "slot 3":
            raise InterruptedError

    with run_under(LATE_LANES, tried(KEEP, HOST, replace(AHEAD, forward_lead=2))) as run:
        for _ in range(3):
            run.engine.observer = interrupt
            with pytest.raises(InterruptedError):
                run.loss(0)
            run.engine.observer = None
            sizes = {g.num_bytes for chunk in run.engine._offloaded for g in chunk.groups}
            fresh = [torch.full((n // 4,), 7.0, device=device()) for n in sizes for _ in range(16)]
            devices.synchronize(device())
            assert all(tensor.eq(7.0).all() for tensor in fresh)


def aside_with_late_lanes() -> None:
    """A graph is dropped while its tensors come back: their room is compute's."""
    model = build(NAME)
    block = model.get_submodule("blocks.0")
    forward, aside, fresh = block.forward, list[Tensor](), list[Tensor]()

    def both(hidden: Tensor) -> Tensor:
        for _ in range(8):
            aside.append(hidden.mul(2).sin().sum())
        computed: Tensor = forward(hidden)
        return computed

    def drop(what: str) -> None:
        if what == "slot 3" and aside:  # what block 0 swapped is on its way back
            aside.clear()
            shape = (BATCH, SEQUENCE, 96)  # of what was dropped
            fresh.extend(torch.full(shape, 7.0, device=device()) for _ in range(16))

    block.forward = both
    asked = tried(Activations(tier="host"), PERSISTENT, replace(AHEAD, swap_lead=1000))
    with run_under(LATE_LANES, asked, model) as run:
        run.engine.observer = drop
        run.loss(0).backward()
        devices.synchronize(device())
        assert fresh and all(tensor.eq(7.0).all() for tensor in fresh)


def peaks_with_late_lanes() -> None:
    """Bytes that have to leave before a slot have left, however late: who says so holds less."""
    soon, later = (peak(Schedule(swap_drain=drain, update_drain=drain)) for drain in (0, 2))
    assert soon < later


def peak(schedule: Schedule) -> int:
    asked = tried(Activations(tier="host"), HOST, schedule)
    with run_under(LATE_LANES, asked) as run:
        asked.played(run)
        run.seen.clear()
        torch.accelerator.reset_peak_memory_stats(device())
        before = torch.accelerator.memory_allocated(device())
        asked.played(run)
        return torch.accelerator.max_memory_allocated(device()) - before


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
    """Work that is submitted second runs second, also where the first waits for a thread."""
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
        assert not first.issued()
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
            lane.submit("fill", filling(value, 1.0), ())
            lane.close()
            assert value.eq(1.0).all()


def recorded() -> None:
    """A step's record is there when the step has ended, whatever the streams are late with."""
    asked = tried(Activations(tier="host"), PERSISTENT)  # updated there
    with run_under(partial(late, compute_us=2000.0), asked) as run, record(run.model) as recorder:
        run.loss(0).backward()
        run.optimizer.step()
        assert recorder.recording().events


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

SCENARIOS = tuple(dict.fromkeys(one.scenario for one in ON_A_DEVICE))


@pytest.fixture(autouse=True)
def short_passage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of the small models here pass in several parts."""
    monkeypatch.setattr(stores, "PASSAGE_BYTES", 8192)


def scenario_of(name: str) -> Callable[[], None]:
    return TRAINING.get(name) or globals()[name]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenario_holds(scenario: str) -> None:
    scenario_of(scenario)()


def repeated(scenario: Callable[[], None]) -> None:
    from tests.emulated.device import longer

    for number in range(TRIES):
        with longer(2.0**number):
            scenario()


@pytest.mark.slow
@pytest.mark.parametrize("mutation", ON_A_DEVICE, ids=names(ON_A_DEVICE))
def test_the_scenario_does_not_hold_without_the_line(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, mutation)
    # What comes late is chance, and on a busy machine the host is late as well: other delays, and
    # longer ones, where they did not meet what they would spoil.
    with pytest.raises((AssertionError, RuntimeError)):
        repeated(scenario_of(mutation.scenario))
    with suppress(RuntimeError):  # what failed on a stream is no other test's
        devices.synchronize(device())


# Waits that keep no order beside compute on one device, by the function that has them.
NONE_OF_THE_TABLE = {
    "device.synchronize": "what others wait with",
    "device._can_time_and_wait": "asks what a type of device can do",
    "lanes.Backend.lane": "a thread's start",
    "step_times.StepTimes.begin": "a clock's origin",
    "step_times.StepTimes.timed.run": "when a recorded move began and ended",
    "lanes.started_pool": "threads' start",
    "saving.save": "ranks wait for the files of the save before",
    "prepared.meet": "as HostStore.write waits, for what other ranks write; no scenario shows it",
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
    found, tables = list(waits()), (*ON_A_DEVICE, *AMONG_RANKS)
    left = [
        (place, call)
        for place, call in found
        if place not in NONE_OF_THE_TABLE
        and not any(each.place == place and call in each.line for each in tables)
    ]
    assert left == []
    assert NONE_OF_THE_TABLE.keys() <= {place for place, _ in found}
