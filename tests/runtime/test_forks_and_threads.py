"""Steps in forked processes, and of several threads: refused where they cannot be, at once."""

import atexit
import copy
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from protrain_plan.models.batches import call_model
from protrain_runtime import MovingAverage, full_parameters, load, restore, save
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
)
from protrain_runtime.devices.device import on_host
from protrain_runtime.devices.lanes import OWN_THREADS, nothing
from protrain_runtime.devices.thread_guard import ThreadGuardError
from tests.support.cards import every_device
from tests.support.forked import CONTEXT
from tests.support.runtime_cases import (
    ADAMW,
    Factory,
    assert_bitwise,
    batch,
    decided,
    described,
    device,
)
from tests.support.scenario import Run, Scenario, refusal

NAME = "functional"
UNITS = len(described(NAME))
PATIENCE_S = 60
"""Seconds after which a test that hangs is ended."""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")


def tried(
    activations: Activations = Activations(tier="disk"),  # noqa: B008
    states: Placement = Placement(tier="disk"),  # noqa: B008
    *,
    clipped: bool = False,
    factory: Factory = ADAMW,
) -> Scenario:
    return Scenario(
        model=NAME,
        units=lambda units: decided(units, activations, states),
        settings={"updates": "after backward" if clipped else "in backward"},
        factory=factory,
    )


def assert_trained(run: Run, *numbers: int) -> None:
    """As plain PyTorch with these batches."""
    plain = tried().start()
    plain.step(*numbers)
    expected = plain.outcome()
    expected.losses = expected.losses[len(numbers) - len(run.seen) :]
    assert_bitwise(run.outcome(), expected)


USES: dict[str, Callable[[Run], object]] = {
    "step": lambda run: run.step(1),
    "evaluation": lambda run: run.look(1),
    "optimizer.step()": lambda run: run.optimizer.step(),
    "state_dict()": lambda run: run.model.state_dict(),
    "state_dict() of a block": lambda run: next(run.model.children()).state_dict(),
    "optimizer.state_dict()": lambda run: run.optimizer.state_dict(),
    "save()": lambda run: save(run.model, run.optimizer, saved(run, "other")),
    "load()": lambda run: load(run.model, run.optimizer, saved(run)),
    "load_state_dict()": lambda run: run.model.load_state_dict({}),
    "full_parameters()": lambda run: full_parameters(run.model, modify=True).__enter__(),
    "copy": lambda run: copy.deepcopy(run.model),
    "restore()": lambda run: restore(run.model),
}


def saved(run: Run, name: str = "checkpoint") -> Path:
    assert run.folder is not None
    return run.folder / name


# --- forks ----------------------------------------------------------------------------------------


def in_fork(work: Callable[[], Any]) -> Any:
    """The findings of a forked process, which ends as at the end of its script."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            try:
                found = work()
            except BaseException:  # noqa: BLE001 - told below
                found = traceback.format_exc()
            os.write(writes, json.dumps(found).encode())
            atexit._run_exitfuncs()
            gc.collect()
            threading._shutdown()  # type: ignore[attr-defined]
            os.write(writes, b"\n")
        finally:
            os._exit(0)
    os.close(writes)
    told = b""
    while select.select([reads], [], [], PATIENCE_S)[0] and (more := os.read(reads, 2**16)):
        told += more
    if not told.endswith(b"\n"):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reads)
    assert told.endswith(b"\n"), f"hangs, or crashed, after {told!r}"
    return json.loads(told)


def refusals(run: Run) -> dict[str, str]:
    """By use the error that it raised, and nothing for those that went well."""
    found = {}
    for name, use in USES.items():
        try:
            use(run)
        except ThreadGuardError as error:
            found[name] = error.message
        except Exception as error:  # noqa: BLE001 - compared by the test
            found[name] = repr(error)
    return found


def in_process(work: Callable[..., None], *arguments: object) -> None:
    """Run in a process that has no threads of pytest's; AssertionError where it fails or hangs."""
    process = CONTEXT.Process(target=work, args=arguments)
    process.start()
    process.join(3 * PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0


def forks(folder: Path) -> None:
    run = tried().start(folder)
    run.step(0)
    save(run.model, run.optimizer, folder / "checkpoint")
    found = in_fork(partial(refusals, run))
    assert found.keys() == USES.keys()
    for name, said in found.items():
        assert " in a forked process: the transfers of the plan are carried out by" in said, name
    run.step(1)

    # Between forward and backward: the graph is there in the fork, and what it needs is not.
    loss = run.loss(2)
    said = in_fork(lambda: refusal(loss.backward, ThreadGuardError).message)
    assert said.startswith("backward ran in a forked process")
    assert "in a forked process" in in_fork(partial(refusals, run))["step"]
    loss.backward()
    run.update()
    run.seen.append(loss.detach())

    def dropped() -> str:
        nonlocal run, loss
        del run, loss
        gc.collect()
        return "dropped"

    assert in_fork(dropped) == "dropped"
    run.step(3)
    assert_trained(run, 0, 1, 2, 3)
    restore(run.model)


def resident(folder: Path) -> None:
    """Reads that need no lane work."""
    torch.set_num_threads(1)  # those of a pool are not in a fork either, and PyTorch waits for them
    run = tried(states=PERSISTENT).start(folder)
    run.step(0)

    def total() -> float:
        return sum(parameter.detach().sum().item() for parameter in run.model.parameters())

    def look() -> list[Any]:
        state = run.model.state_dict()
        run.look(1)
        with pytest.raises(ThreadGuardError, match="the model was called in a forked process"):
            run.loss(1)
        return [len(state), total()]

    assert in_fork(look) == [len(run.model.state_dict()), total()]
    run.step(1)

    run = tried(RECOMPUTE, PERSISTENT).start(folder)  # which no lane serves
    run.step(0)

    def stepped() -> float:
        run.step(1)
        loss: float = run.seen[-1].item()
        return loss

    assert in_fork(stepped) == stepped()


class Numbers(Dataset[torch.Tensor]):
    """Batches; with a run, its model is asked for them."""

    def __init__(self, run: Run | None = None) -> None:
        self.run = run

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.run is not None:
            self.run.look(1)
        found = batch(NAME, number)
        assert isinstance(found, torch.Tensor)
        return found


def loads(folder: Path) -> None:
    """A data loader's workers are forks that may not touch the model."""
    run = tried().start(folder)
    options: dict[str, Any] = {"batch_size": None, "multiprocessing_context": "fork"}
    for tokens in DataLoader(Numbers(), num_workers=2, timeout=PATIENCE_S, **options):
        loss: Any = call_model(run.model, tokens)
        loss.backward()
        run.update()
        run.seen.append(loss.detach())
    with pytest.raises(RuntimeError, match="the model was called in a forked process"):
        next(iter(DataLoader(Numbers(run), num_workers=1, timeout=PATIENCE_S, **options)))
    run.step(4)
    assert_trained(run, 0, 1, 2, 3, 4)


@pytest.mark.nightly
@linux
@pytest.mark.parametrize("work", [forks, resident, loads], ids=lambda work: work.__name__)
def test_a_fork_is_refused_what_needs_threads_and_the_parent_goes_on(
    work: Callable[[Path], None], tmp_path: Path
) -> None:
    in_process(work, tmp_path)


# --- threads --------------------------------------------------------------------------------------


def in_thread(work: Callable[[], object]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - returned
            raised.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return raised[0] if raised else None


def refused_all(run: Run, doing: str) -> None:
    """Every use in a second thread is refused, with one error that names the first."""
    for name, use in USES.items():
        error = in_thread(partial(use, run))
        assert isinstance(error, ThreadGuardError), (name, error)
        told = (
            f" in thread 'second' while {doing} is under way in thread 'MainThread': a model under"
        )
        assert told in error.message, name
    for drop in (run.model.zero_grad, run.optimizer.zero_grad):
        assert isinstance(in_thread(drop), ThreadGuardError)


PLACES = (0, UNITS - 1, UNITS, 2 * UNITS - 2)


@pytest.mark.nightly(but=("False-cuda", "True-cuda"))
@every_device
@pytest.mark.parametrize("clipped", [False, True])
def test_a_second_thread_is_refused_and_the_first_goes_on(clipped: bool, tmp_path: Path) -> None:
    """In slots of forward and backward, between them, and while `optimizer.step()` runs."""
    calls: list[Callable[[], None]] = []

    class Calling(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if calls:
                calls.pop()()
            return super().step(closure)

    make = partial(Calling, lr=1e-3, fused=True) if on_host(device()) else ADAMW
    run = tried(clipped=clipped, factory=make).start(tmp_path)
    engine = run.engine
    run.step(0)
    save(run.model, run.optimizer, saved(run))
    seen: list[str] = []

    def observe(what: str) -> None:
        if what in [f"slot {place}" for place in PLACES]:
            seen.append(what)
            # An accelerator's backward calls from a thread of autograd's own.
            refused_all(run, "a training step")

    def between() -> None:
        engine.observer = None
        refused_all(run, "a training step")
        engine.observer = observe

    engine.observer = observe
    run.backward(1, between=between)
    engine.observer = None
    refused_all(run, "a training step")  # before the step
    if on_host(device()):
        if not clipped:  # lanes step in backward
            calls.clear()
        calls.append(partial(refused_all, run, "optimizer.step()"))
    run.update()
    run.step(2)
    assert seen == [f"slot {place}" for place in PLACES]
    assert_trained(run, 0, 1, 2)


@pytest.mark.nightly(but=("cuda",))
@every_device
def test_threads_that_take_turns_train_as_one(tmp_path: Path) -> None:
    """Whole steps, evaluations and checkpoints, one after the other, from any thread."""
    run = tried().start(tmp_path)
    for number in range(4):
        if number % 2:
            assert in_thread(partial(run.step, number)) is None
        else:
            run.step(number)
        for use in ("evaluation", "state_dict()", "optimizer.state_dict()", "save()"):
            assert in_thread(partial(USES[use], run)) is None
    run.seen = run.seen[::2]
    assert_trained(run, 0, 1, 2, 3)


@pytest.mark.nightly
def test_a_step_that_was_dropped_is_in_nobody_s_way(tmp_path: Path) -> None:
    """Its loss is gone; or its gradients are; or its thread has ended."""
    run = tried(clipped=True).start(tmp_path)
    run.step(0)

    loss: torch.Tensor | None = run.loss(8)
    assert isinstance(in_thread(partial(run.step, 1)), ThreadGuardError)
    loss = None
    assert in_thread(partial(run.step, 1)) is None

    loss = run.loss(8)
    loss.backward()
    loss = None
    assert isinstance(in_thread(partial(run.step, 2)), ThreadGuardError)
    run.model.zero_grad()
    assert in_thread(partial(run.step, 2)) is None

    kept: list[torch.Tensor] = []
    assert in_thread(lambda: kept.append(run.loss(8))) is None
    run.step(3)
    assert_trained(run, 0, 1, 2, 3)


@pytest.mark.nightly(but=("cuda",))
@every_device
def test_threads_that_race_train_the_steps_that_were_let_in(tmp_path: Path) -> None:
    """Each step is whole or refused at its first line, and there is no third way."""
    run = tried().start(tmp_path)
    order, wrong, refused = list[int](), list[BaseException](), list[int]()

    def loop(numbers: range) -> None:
        try:
            for number in numbers:
                while True:
                    try:
                        loss = run.loss(number)
                        break
                    except ThreadGuardError:
                        refused.append(number)
                        time.sleep(1e-3)  # else it keeps the other's step from the interpreter
                loss.backward()
                run.optimizer.step()
                order.append(number)
                run.seen.append(loss.detach())
                run.optimizer.zero_grad()
        except BaseException as error:  # noqa: BLE001 - the test's
            wrong.append(error)

    threads = [threading.Thread(target=loop, args=(range(n, n + 5),)) for n in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert len(order) == 10 and refused
    assert_trained(run, *order)


def test_a_state_dict_that_a_step_came_into_is_refused(tmp_path: Path) -> None:
    """It holds no lock: the thread that trains goes on."""
    run = tried().start(tmp_path)
    run.step(0)
    half, trained = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        half.set()
        trained.wait(PATIENCE_S)

    hook = list(run.model.children())[-1].register_state_dict_pre_hook(pause)
    raised: list[BaseException | None] = []
    reader = threading.Thread(target=lambda: raised.append(in_thread(run.model.state_dict)))
    reader.start()
    half.wait(PATIENCE_S)
    hook.remove()
    run.step(1)
    trained.set()
    reader.join(PATIENCE_S)
    assert isinstance(raised[0], ThreadGuardError)
    assert raised[0].message.startswith("another thread trained while state_dict() was called")
    assert_trained(run, 0, 1)


def collected_on(place: int, folder: Path) -> None:
    """Garbage with a planned model is found on a thread that others wait for."""
    with (folder / "stderr").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    gc.disable()
    run = tried().start(folder)
    run.step(0)
    lanes = list(run.engine.lanes.values())
    freed = weakref.ref(run.model)
    run.model.__dict__["cycle"] = run.model
    del run
    own = lanes[place % len(lanes)]
    queued = threading.Event()

    def look_for_garbage() -> None:
        queued.wait()
        gc.collect()

    tickets = [own.submit("a look for garbage", look_for_garbage, ())]
    tickets.append(own.submit("what follows", nothing, ()))
    before = tuple(tickets)
    tickets += [lane.submit("what waits for it", nothing, before) for lane in lanes]
    queued.set()
    for ticket in tickets:
        ticket.synchronize()
    assert freed() is None
    for thread in threading.enumerate():
        if thread.name.startswith(OWN_THREADS):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.nightly("1", "2")
@linux
@pytest.mark.parametrize("place", range(4))
def test_a_model_may_be_collected_on_any_thread(place: int, tmp_path: Path) -> None:
    in_process(collected_on, place, tmp_path)
    assert (tmp_path / "stderr").read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["stderr"]


@pytest.mark.nightly
def test_a_step_waits_for_no_checkpoint_and_is_refused_meanwhile(tmp_path: Path) -> None:
    run = tried().start(tmp_path)
    run.step(0)
    average = MovingAverage(run.model)
    errors: list[BaseException | None] = []
    inner: Any = run.optimizer
    hook = inner.inner.register_state_dict_pre_hook(
        lambda _: errors.append(in_thread(partial(run.step, 1)))
    )
    run.optimizer.state_dict()
    hook.remove()
    average.update()
    (error,) = errors
    assert isinstance(error, ThreadGuardError)
    assert "while optimizer.state_dict() is under way in thread 'MainThread'" in error.message
    run.step(1)
    assert_trained(run, 0, 1)


def test_a_block_that_another_thread_calls_is_refused(tmp_path: Path) -> None:
    run = tried(RECOMPUTE, PERSISTENT).start(tmp_path)
    name = next(unit.name for unit in described(NAME) if unit.kind == "block")
    errors: list[BaseException | None] = []

    def observe(what: str) -> None:
        if what == "slot 2":
            block = run.model.get_submodule(name)
            errors.append(in_thread(lambda: block(torch.ones(1, 4, 4))))

    run.engine.observer = observe
    run.step(0)
    assert isinstance(errors[0], ThreadGuardError)
    assert errors[0].message.startswith(f"'{name}' was called in thread 'second' while the model's")
    assert_trained(run, 0)


def test_replicas_of_a_planned_model_are_refused(tmp_path: Path) -> None:
    """As torch.nn.parallel.replicate makes them, one for each of several devices."""
    model = tried(KEEP, Placement(tier="host")).start(tmp_path).model
    with pytest.raises(RuntimeError, match=r"torch\.nn\.DataParallel would call copies of it in"):
        model._replicate_for_data_parallel()
    restore(model)
    model._replicate_for_data_parallel()
