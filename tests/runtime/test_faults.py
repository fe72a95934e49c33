"""Faults while training: one clear error or a clean resume, and nothing is left behind.

Faults and signals are real. Where they come is told by the engine's observer, never by a clock.
"""

import errno
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain_runtime import prepare, restore
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Activations, Placement
from protrain_runtime.devices.device import on_host
from protrain_runtime.devices.lanes import Backend, LaneError
from protrain_runtime.devices.memory_meter import process_memory, storage_bytes
from protrain_runtime.model.prepared import restore_as_is
from protrain_runtime.states.stand_ins import ConsumedGradient
from tests.support.cards import every_device
from tests.support.faults import descriptors, file_limit, spill_descriptor
from tests.support.messages import Speaker
from tests.support.runtime_cases import Outcome, assert_bitwise, decided, described, device
from tests.support.scenario import Run, Scenario, refusal
from tests.support.thinning import thinned

NAME = "functional"
_STEPS = prepare.__globals__
ROOT = Path(__file__).parents[2]
UNITS = len(described(NAME))

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


@pytest.fixture(params=["past the page cache", "through it"])
def page_cache_bytes(request: pytest.FixtureRequest) -> int:
    """The page cache that a plan counts on."""
    return 2**20 if request.param == "through it" else 0


def spilling(page_cache_bytes: int = 0, *, clipped: bool = False, **options: Any) -> Scenario:
    updates = "after backward" if clipped else "in backward"
    return Scenario(
        model=NAME,
        units=lambda units: decided(units, Activations(tier="disk"), Placement(tier="disk")),
        settings={"page_cache_bytes": page_cache_bytes, "updates": updates},
        options=options,
    )


def lanes_alive() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("protrain ")]


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """No thread, descriptor or file is there afterwards that was not before.

    What a test before left, in a traceback for example, may end in between.
    """
    threads, open_before = set(threading.enumerate()), descriptors().items()
    yield
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread not in threads]
    assert [thread.name for thread in left if thread.name.startswith("protrain ")] == []
    assert list(descriptors().items() - open_before) == []
    assert list(folder.iterdir()) == []


def plainly(*numbers: int) -> Outcome:
    run = spilling().start()
    run.step(*numbers)
    return run.outcome()


def assert_as_it_was(model: torch.nn.Module) -> None:
    run = spilling().plain_run(model)
    run.step(0)
    assert_bitwise(run.outcome(), plainly(0))


# --- disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [100_000, 500_000])
def test_a_disk_that_is_full_at_the_start_leaves_the_model_as_it_was(
    limit: int, page_cache_bytes: int, tmp_path: Path
) -> None:
    """With the larger limit the first chunk is on its way when the system refuses."""
    asked = spilling(page_cache_bytes)
    model = asked.subject.build()
    with nothing_left(tmp_path):
        with file_limit(limit), pytest.raises(ProtrainError) as caught:
            asked.prepared(model, tmp_path)
        assert caught.value.source == str(tmp_path)
        assert caught.value.message.endswith("of spilled bytes: File too large")
        assert caught.value.fix == "free some space there, or name another spill directory"
        assert_as_it_was(model)


@pytest.mark.nightly(
    "past the page cache-cpu", "past the page cache-emulated", "through it-emulated"
)
@every_device
def test_training_goes_on_once_a_full_disk_has_room(page_cache_bytes: int, tmp_path: Path) -> None:
    """The first step's swaps find no room; after that step is given up, all is as before."""
    with nothing_left(tmp_path):
        run = spilling(page_cache_bytes).start(tmp_path)
        states = os.fstat(spill_descriptor(tmp_path)).st_size
        with file_limit(states), pytest.raises(ProtrainError) as caught:
            run.step(0)
        assert str(caught.value).startswith(f"{tmp_path}: no room for ")
        run.step(0, 1)
        found = run.outcome()
        restore(run.model)
        del run
    assert_bitwise(found, plainly(0, 1))


@pytest.mark.nightly("past the page cache-emulated", "through it-emulated")
@every_device
def test_a_lane_that_fails_says_which_move(page_cache_bytes: int, tmp_path: Path) -> None:
    """The spill file is cut off below the lanes: nothing can be trained, or restored, any more."""

    def shortened() -> list[str]:
        run = spilling(page_cache_bytes).start(tmp_path)
        run.step(0)
        os.ftruncate(spill_descriptor(tmp_path), 0)
        # Each says so, and none hangs.
        errors = [str(refusal(partial(run.step, 1), LaneError)) for _ in range(2)]
        return [*errors, str(refusal(partial(restore, run.model), ProtrainError))]

    with nothing_left(tmp_path):
        errors = shortened()
    problem = (
        "spilled bytes cannot be read back: the file is shorter than what was written to it\n"
        "  fix: see whether its disk is full or faulty; train on from a checkpoint"
    )
    lane = f"{tmp_path}: fetch 0 @0 failed on lane 'fetch disk': {problem}"
    assert errors == [lane, lane, f"{tmp_path}: {problem}"]


SYSTEM = {
    "posix_fallocate": os,
    "pwrite": os,
    "preadv": os,
    "open": os,
    "fstat": os,
    "statvfs": os,
    "mmap": mmap,
}
"""Calls of stores and files to the system, and where."""


@pytest.mark.nightly
@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.ENOMEM])
@pytest.mark.parametrize("name", SYSTEM)
def test_whatever_the_system_refuses_is_one_error(
    name: str, code: int, page_cache_bytes: int, tmp_path: Path
) -> None:
    """From any of its calls on, before a step: the model is as it was, and nothing is left."""
    usual, asked = getattr(SYSTEM[name], name), spilling(page_cache_bytes)

    def refused(*args: Any, **options: Any) -> Any:
        about = str(args[0]) if args else ""
        if name == "open" and not about.startswith((str(tmp_path), "/proc/self/fd")):
            return usual(*args, **options)
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return usual(*args, **options)

    for first in range(3):
        left = [first]
        model, said = asked.subject.build(), ""
        with nothing_left(tmp_path), pytest.MonkeyPatch.context() as patch:
            patch.setattr(SYSTEM[name], name, refused)
            try:
                asked.prepared(model, tmp_path)
            except ProtrainError as error:
                said = str(error)
            else:
                patch.undo()
                restore_as_is(model)
        if said:
            assert said.startswith(f"{tmp_path}: ")
            assert f"{os.strerror(code)}\n  fix: " in said
        assert_as_it_was(model)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_prepare_that_fails_anywhere_leaves_the_model_as_it_was(
    seed: int, page_cache_bytes: int, tmp_path: Path
) -> None:
    """At any of its steps, each a call of its own, from which on no disk gives back a byte."""
    asked = spilling(page_cache_bytes)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def attempt(fails_at: int) -> int:
        """The calls that were counted; the model is compared where one of them failed."""
        model, counted = asked.subject.build(), 0

        def count(frame: Any, event: str, _: object) -> None:
            nonlocal counted
            if event == "call" and frame.f_back.f_globals is _STEPS:
                counted += 1
                if counted == fails_at:
                    sys.setprofile(None)
                    patch.setattr(os, "preadv", refuse)
                    raise MemoryError(f"call {counted}, {frame.f_code.co_qualname}")

        with nothing_left(tmp_path), pytest.MonkeyPatch.context() as patch:
            try:
                sys.setprofile(count)
                asked.prepared(model, tmp_path)
            except (MemoryError, ProtrainError):  # of the call, or of what came after it
                sys.setprofile(None)
                assert_as_it_was(model)
            else:
                sys.setprofile(None)
                patch.undo()
                restore_as_is(model)
        return counted

    calls = attempt(0)
    for place in random.Random(seed).sample(range(1, calls + 1), 8):
        assert attempt(place) == place


FAULTS = [
    ("pwrite", 28, "No space left on device", "written"),
    ("pwrite", 5, "Input/output error", "written"),
    ("preadv", 5, "Input/output error", "read back"),
]
"""The system's call that fails, its error, and what cannot be done then."""


@pytest.mark.nightly(but=("through it-pwrite-28-No space left on device-written",))
@pytest.mark.parametrize(("name", "code", "words", "what"), FAULTS)
def test_a_disk_that_fails_in_a_step_is_one_error_and_leaves_nothing(
    name: str, code: int, words: str, what: str, page_cache_bytes: int, tmp_path: Path
) -> None:
    """A call of any lane fails once: the step is given up, or nothing is trained any more."""
    usual, left = getattr(os, name), [7]

    def call(*args: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(code, words)
        return usual(*args)

    def failing() -> str:
        run = spilling(page_cache_bytes).start(tmp_path)
        run.step(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, call)
            error = refusal(partial(run.step, 1), LaneError)
        del run.seen[1:]
        try:
            run.step(2)
        except RuntimeError:
            restore_as_is(run.model)
        else:
            assert_bitwise(run.outcome(), plainly(0, 2))
            restore(run.model)
        return str(error)

    with nothing_left(tmp_path):
        said = failing()
    assert said.startswith(f"{tmp_path}: ")
    assert f"spilled bytes cannot be {what}: {words}\n  fix: " in said


def test_a_wait_ends_and_names_the_move(assert_says: Speaker) -> None:
    """A lane that hangs until it is let go."""
    backend = Backend(torch.device("cpu"), limit_s=0.01)
    before = lanes_alive()
    lane = backend.lane("fetch disk", on_device=False)
    go = threading.Event()

    def wait_for_go() -> None:
        go.wait()

    ticket = lane.submit("fetch 3 @3", wait_for_go, ())
    assert_says(refusal(ticket.synchronize, LaneError))
    go.set()
    lane.close()
    assert lanes_alive() == before


# --- interrupts -----------------------------------------------------------------------------------


@contextmanager
def ctrl_c() -> Iterator[Callable[[], None]]:
    """A caller of SIGINT to this process, which becomes KeyboardInterrupt where it stands.

    Python drops what is raised in a garbage collector's callback, and hypothesis installs one.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    try:
        yield lambda: os.kill(os.getpid(), signal.SIGINT)
    finally:
        gc.callbacks[:] = callbacks
        signal.signal(signal.SIGINT, before)


def interrupted_at(slot: int, folder: Path, *, clipped: bool) -> Run:
    """In its second step."""
    with ctrl_c() as interrupt:
        run = spilling(clipped=clipped).start(folder)
        run.step(0)
        run.engine.observer = lambda what: interrupt() if what == f"slot {slot}" else None
        with pytest.raises(KeyboardInterrupt):
            run.step(1)
        run.engine.observer = None
        del run.seen[1:]
    run.optimizer.zero_grad()
    return run


@pytest.mark.nightly(by_day=6)
@every_device
@pytest.mark.parametrize(
    ("slot", "clipped"),
    thinned([0, 2, UNITS - 1, UNITS, 2 * UNITS - 3, 2 * UNITS - 1], [False, True], every=2),
)
def test_an_interrupted_step_is_given_up(slot: int, clipped: bool, tmp_path: Path) -> None:
    """In forward always, in backward where no update has begun: later steps are plain ones."""
    # An accelerator's backward runs in a thread of its own, and ends before Python is asked.
    to_the_end = slot >= UNITS and not on_host(device())
    found, error = None, ""
    with nothing_left(tmp_path):
        run = interrupted_at(slot, tmp_path, clipped=clipped)
        if (slot > UNITS or to_the_end) and not clipped:
            error = str(refusal(partial(run.step, 2)))
        else:
            run.step(2, 3)
            found = run.outcome()
            restore(run.model)
        del run
    cut_short = (
        "a second forward began after backward() was cut short: this plan updates"
        " parameters during backward, so that some are updated and some are not. Go on from a"
        " checkpoint, with a model that is built anew; under a plan with --clip a step that is"
        " cut short is given up"
    )
    ended = (
        "a second forward began between backward() and optimizer.step(): this plan updates"
        " parameters during backward, so every backward needs its step. Run"
        " optimizer.step(), or plan with --clip: updates then come after backward, and a step"
        " may be skipped (optimizer.zero_grad())"
    )
    if found is None:
        assert error == (ended if to_the_end else cut_short)
    else:
        assert_bitwise(found, plainly(0, 2, 3))


@pytest.mark.nightly(but=("cuda",))
@every_device
def test_an_interrupted_update_ends_in_a_clear_error(tmp_path: Path, assert_says: Speaker) -> None:
    """The signal comes while `step()` waits for a lane that works on states."""
    updating = threading.Event()

    def interrupted() -> str:
        with ctrl_c() as interrupt:

            def delay() -> float:
                if updating.is_set():
                    updating.clear()
                    interrupt()
                return 0.0

            run = spilling(clipped=True, lane_delay=delay).start(tmp_path)
            run.step(0)
            run.backward(1)
            updating.set()
            with pytest.raises(KeyboardInterrupt):
                run.optimizer.step()
        return str(refusal(partial(run.step, 2)))

    with nothing_left(tmp_path):
        error = interrupted()
    assert_says(error)


# --- signals --------------------------------------------------------------------------------------

TRAINS = """
import os, signal, sys, torch
from pathlib import Path
from tests.runtime.test_faults import spilling

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
folder, place = Path(sys.argv[1]), sys.argv[2]
run = spilling().start(folder)

def observe(what):
    if what == place and number == 2:
        print(what, flush=True)
        sys.stdin.readline()  # until somebody sends a signal

run.engine.observer = observe
for number in range(5):
    run.step(number)
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], folder / "new")
    os.replace(folder / "new", folder / "checkpoint")
"""


def signalled(folder: Path, place: str, number: signal.Signals) -> tuple[int, str]:
    """Train in a process of its own, which gets the signal at a place; its code and its errors."""
    arguments = [sys.executable, "-c", TRAINS, str(folder), place]
    with subprocess.Popen(
        arguments,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert line == f"{place}\n", errors
    return process.returncode, errors


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_leaves_no_file_of_ours(number: signal.Signals, tmp_path: Path) -> None:
    """Killed or interrupted; that a run resumes then is asked by `test_saving`."""
    code, errors = signalled(tmp_path, f"slot {2 * UNITS - 2}", number)
    assert code == -number
    assert number == signal.SIGKILL or errors.endswith("KeyboardInterrupt\n"), errors
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


# --- long runs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_hundred_steps_hold_what_ten_held(tmp_path: Path) -> None:
    """Tensors to the byte, threads and descriptors; the process itself may not grow by 2 %."""
    run = spilling().start(tmp_path)

    def held() -> tuple[int, list[str], dict[str, str], int]:
        run.seen.clear()
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
        plain = [t for t in tensors if not isinstance(t, ConsumedGradient)]
        spilled = os.fstat(spill_descriptor(tmp_path)).st_size
        return storage_bytes(plain), lanes_alive(), descriptors(), spilled

    run.step(*([0, 1] * 5))
    before, resident = held(), process_memory().resident_bytes
    run.step(*([0, 1] * 95))
    assert held() == before
    assert process_memory().resident_bytes < 1.02 * resident
