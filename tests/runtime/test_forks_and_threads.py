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
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import MovingAverage, full_parameters, load, prepare, restore, save
from protrain_runtime.contract.records.plan import (
    Activations,
    Keep,
    Offload,
    Persistent,
    Placement,
    Recompute,
    Swap,
)
from protrain_runtime.devices.device import on_host
from protrain_runtime.devices.lanes import OWN_THREADS, nothing
from protrain_runtime.devices.turns import TurnError
from protrain_runtime.model.optimizer import PlannedOptimizer
from protrain_runtime.model.prepared import engine_of
from tests.support.cards import every_device
from tests.support.forked import CONTEXT
from tests.support.runtime_cases import (
    ADAMW,
    Outcome,
    assert_bitwise,
    batch,
    build,
    decided,
    described,
    device,
    outcome,
    plan_for,
    step,
)

NAME = "functional"
UNITS = len(described(NAME))
PATIENCE_S = 60
"""What hangs is ended after this, and fails."""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")

Planned = tuple[nn.Module, PlannedOptimizer]
Use = Callable[[nn.Module, PlannedOptimizer, Path], object]


def planned(
    folder: Path,
    activations: Activations = Swap(tier="disk"),  # noqa: B008
    states: Placement = Offload(tier="disk"),  # noqa: B008
    *,
    clipped: bool = False,
    factory: Callable[..., torch.optim.Optimizer] = ADAMW,
) -> Planned:
    model = build(NAME)
    plan = plan_for(model, decided(described(NAME), activations, states))
    if clipped:
        plan = replace(plan, settings=replace(plan.settings, updates="after backward"))
    return prepare(model, plan, optimizer=factory, spill_directory=folder)


def trained_plainly(numbers: list[int]) -> Outcome:
    model = build(NAME)
    optimizer = ADAMW(model.parameters())
    return outcome(model, optimizer, [step(NAME, model, optimizer, n) for n in numbers])


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        call_model(model, batch(NAME, 1))


USES: dict[str, Use] = {
    "step": lambda model, optimizer, _: step(NAME, model, optimizer, 1),
    "evaluation": lambda model, _, __: evaluate(model),
    "optimizer.step()": lambda _, optimizer, __: optimizer.step(),
    "state_dict()": lambda model, _, __: model.state_dict(),
    "state_dict() of a block": lambda model, _, __: next(model.children()).state_dict(),
    "optimizer.state_dict()": lambda _, optimizer, __: optimizer.state_dict(),
    "save()": lambda model, optimizer, folder: save(model, optimizer, folder / "other"),
    "load()": lambda model, optimizer, folder: load(model, optimizer, folder / "checkpoint"),
    "load_state_dict()": lambda model, _, __: model.load_state_dict({}),
    "full_parameters()": lambda model, _, __: full_parameters(model, modify=True).__enter__(),
    "copy": lambda model, _, __: copy.deepcopy(model),
    "restore()": lambda model, _, __: restore(model),
}


# --- forks ----------------------------------------------------------------------------------------


def in_fork(work: Callable[[], Any]) -> Any:
    """What a forked process finds, which then ends as one that came to the end of its script."""
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


def refusals(model: nn.Module, optimizer: PlannedOptimizer, folder: Path) -> dict[str, str]:
    """By use the error that it raised, and nothing for those that went well."""
    found = {}
    for name, use in USES.items():
        try:
            use(model, optimizer, folder)
        except TurnError as error:
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
    model, optimizer = planned(folder, states=Offload(tier="disk"))
    losses = [step(NAME, model, optimizer, 0)]
    save(model, optimizer, folder / "checkpoint")
    found = in_fork(partial(refusals, model, optimizer, folder))
    assert found.keys() == USES.keys()
    for name, said in found.items():
        assert " in a forked process: the transfers of the plan are carried out by" in said, name
    losses.append(step(NAME, model, optimizer, 1))

    # Between forward and backward: the graph is there in the fork, and what it needs is not.
    loss = loss_of(call_model(model, batch(NAME, 2)))

    def backward() -> str:
        with pytest.raises(TurnError) as caught:
            loss.backward()
        return caught.value.message

    assert in_fork(backward).startswith("backward ran in a forked process")
    assert "in a forked process" in in_fork(partial(refusals, model, optimizer, folder))["step"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())

    def dropped() -> str:
        nonlocal model, optimizer, loss
        del model, optimizer, loss
        gc.collect()
        return "dropped"

    assert in_fork(dropped) == "dropped"
    losses.append(step(NAME, model, optimizer, 3))
    assert_bitwise(outcome(model, optimizer, losses), trained_plainly([0, 1, 2, 3]))
    restore(model)


@linux
def test_a_fork_is_refused_what_needs_threads_and_the_parent_goes_on(tmp_path: Path) -> None:
    in_process(forks, tmp_path)


def resident(folder: Path) -> None:
    torch.set_num_threads(1)  # those of a pool are not in a fork either, and PyTorch waits for them
    model, optimizer = planned(folder, Swap(tier="disk"), Persistent())
    step(NAME, model, optimizer, 0)
    total = sum(parameter.detach().sum().item() for parameter in model.parameters())

    def look() -> list[Any]:
        state = model.state_dict()
        evaluate(model)
        with pytest.raises(TurnError, match="the model was called in a forked process"):
            call_model(model, batch(NAME, 1))
        return [
            len(state),
            sum(parameter.detach().sum().item() for parameter in model.parameters()),
        ]

    assert in_fork(look) == [len(model.state_dict()), total]
    step(NAME, model, optimizer, 1)

    model, optimizer = planned(folder, Recompute(), Persistent())  # which no lane serves
    step(NAME, model, optimizer, 0)
    mine = in_fork(lambda: step(NAME, model, optimizer, 1).item())
    assert mine == step(NAME, model, optimizer, 1).item()


@linux
def test_what_needs_no_lane_works_in_a_fork(tmp_path: Path) -> None:
    in_process(resident, tmp_path)


class Numbers(Dataset[torch.Tensor]):
    """Batches; with a model, it is asked for them."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.model is not None:
            evaluate(self.model)
        found = batch(NAME, number)
        assert isinstance(found, torch.Tensor)
        return found


def loads(folder: Path) -> None:
    model, optimizer = planned(folder)
    losses = []
    options: dict[str, Any] = {"batch_size": None, "multiprocessing_context": "fork"}
    for tokens in DataLoader(Numbers(), num_workers=2, timeout=PATIENCE_S, **options):
        loss = loss_of(call_model(model, tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with pytest.raises(RuntimeError, match="the model was called in a forked process"):
        next(iter(DataLoader(Numbers(model), num_workers=1, timeout=PATIENCE_S, **options)))
    losses.append(step(NAME, model, optimizer, 4))
    assert_bitwise(outcome(model, optimizer, losses), trained_plainly([0, 1, 2, 3, 4]))


@linux
def test_a_data_loader_s_workers_are_forks_that_may_not_touch_the_model(tmp_path: Path) -> None:
    in_process(loads, tmp_path)


# --- threads --------------------------------------------------------------------------------------


def in_thread(work: Callable[[], object]) -> BaseException | None:
    """What it raised in a thread of its own."""
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


def refused_all(planned: Planned, folder: Path, doing: str) -> None:
    """Every use in a second thread is refused, with one error that names the first."""
    for name, use in USES.items():
        error = in_thread(partial(use, *planned, folder))
        assert isinstance(error, TurnError), (name, error)
        told = (
            f" in thread 'second' while {doing} is under way in thread 'MainThread': a model under"
        )
        assert told in error.message, name
    for drop in (each.zero_grad for each in planned):
        assert isinstance(in_thread(drop), TurnError)


PLACES = (0, UNITS - 1, UNITS, 2 * UNITS - 2)


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
    model, optimizer = both = planned(tmp_path, clipped=clipped, factory=make)
    engine = engine_of(model)
    assert engine is not None
    losses = [step(NAME, model, optimizer, 0)]
    save(model, optimizer, tmp_path / "checkpoint")
    seen: list[str] = []

    def observe(what: str) -> None:
        if what in [f"slot {place}" for place in PLACES]:
            seen.append(what)
            # An accelerator's backward calls from a thread of autograd's own.
            refused_all(both, tmp_path, "a training step")

    engine.observer = observe
    loss = loss_of(call_model(model, batch(NAME, 1)))
    engine.observer = None
    refused_all(both, tmp_path, "a training step")  # between the two
    engine.observer = observe
    loss.backward()
    engine.observer = None
    losses.append(loss.detach())
    del loss
    refused_all(both, tmp_path, "a training step")  # before the step
    if on_host(device()):
        if not clipped:  # lanes step in backward
            calls.clear()
        calls.append(partial(refused_all, both, tmp_path, "optimizer.step()"))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(step(NAME, model, optimizer, 2))
    assert seen == [f"slot {place}" for place in PLACES]
    assert_bitwise(outcome(model, optimizer, losses), trained_plainly([0, 1, 2]))


@every_device
def test_threads_that_take_turns_train_as_one(tmp_path: Path) -> None:
    """Whole steps, evaluations and checkpoints, one after the other, from any thread."""
    model, optimizer = planned(tmp_path)
    losses: list[torch.Tensor] = []

    def train(number: int) -> None:
        losses.append(step(NAME, model, optimizer, number))

    for number in range(4):
        if number % 2:
            assert in_thread(partial(train, number)) is None
        else:
            train(number)
        for use in ("evaluation", "state_dict()", "optimizer.state_dict()", "save()"):
            assert in_thread(partial(USES[use], model, optimizer, tmp_path)) is None
    assert_bitwise(outcome(model, optimizer, losses), trained_plainly([0, 1, 2, 3]))


def test_a_step_that_was_dropped_is_in_nobody_s_way(tmp_path: Path) -> None:
    """Its loss is gone; or its gradients are; or its thread has ended."""
    model, optimizer = planned(tmp_path, clipped=True)
    step(NAME, model, optimizer, 0)

    loss: torch.Tensor | None = loss_of(call_model(model, batch(NAME, 8)))
    assert isinstance(in_thread(partial(step, NAME, model, optimizer, 1)), TurnError)
    loss = None
    assert in_thread(partial(step, NAME, model, optimizer, 1)) is None

    loss = loss_of(call_model(model, batch(NAME, 8)))
    loss.backward()
    loss = None
    assert isinstance(in_thread(partial(step, NAME, model, optimizer, 2)), TurnError)
    model.zero_grad()
    assert in_thread(partial(step, NAME, model, optimizer, 2)) is None

    kept: list[torch.Tensor] = []
    assert in_thread(lambda: kept.append(loss_of(call_model(model, batch(NAME, 8))))) is None
    last = step(NAME, model, optimizer, 3)
    expected = trained_plainly([0, 1, 2, 3])
    found = outcome(model, optimizer, [last])
    assert_bitwise(found, replace(expected, losses=expected.losses[3:]))


@every_device
def test_threads_that_race_train_the_steps_that_were_let_in(tmp_path: Path) -> None:
    """Each step is whole or refused at its first line, and there is no third way."""
    model, optimizer = planned(tmp_path)
    order: list[int] = []
    losses: list[torch.Tensor] = []
    wrong: list[BaseException] = []
    refused = 0

    def loop(numbers: range) -> None:
        nonlocal refused
        for number in numbers:
            while True:
                try:
                    loss = loss_of(call_model(model, batch(NAME, number)))
                except TurnError:
                    refused += 1
                    continue
                except BaseException as error:  # noqa: BLE001 - the test's
                    wrong.append(error)
                    return
                try:
                    loss.backward()
                    optimizer.step()
                    order.append(number)
                    losses.append(loss.detach())
                    optimizer.zero_grad()
                except BaseException as error:  # noqa: BLE001 - the test's
                    wrong.append(error)
                    return
                break

    threads = [threading.Thread(target=loop, args=(range(n, n + 5),)) for n in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    assert len(order) == 10 and refused > 0
    assert_bitwise(outcome(model, optimizer, losses), trained_plainly(order))


def test_a_state_dict_that_a_step_came_into_is_refused(tmp_path: Path) -> None:
    """It holds no lock: the thread that trains goes on."""
    model, optimizer = planned(tmp_path)
    step(NAME, model, optimizer, 0)
    half, trained = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        half.set()
        trained.wait(PATIENCE_S)

    hook = list(model.children())[-1].register_state_dict_pre_hook(pause)
    raised: list[BaseException | None] = []
    reader = threading.Thread(target=lambda: raised.append(in_thread(model.state_dict)))
    reader.start()
    half.wait(PATIENCE_S)
    hook.remove()
    step(NAME, model, optimizer, 1)
    trained.set()
    reader.join(PATIENCE_S)
    assert isinstance(raised[0], TurnError)
    assert raised[0].message.startswith("another thread trained while state_dict() was called")
    assert_bitwise(
        replace(outcome(model, optimizer, []), losses=[]),
        replace(trained_plainly([0, 1]), losses=[]),
    )


def collected_on(place: int, folder: Path) -> None:
    """Garbage with a planned model is found on a thread that others wait for."""
    with (folder / "stderr").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    gc.disable()
    model, optimizer = planned(folder)
    step(NAME, model, optimizer, 0)
    engine = engine_of(model)
    assert engine is not None
    lanes = list(engine.lanes.values())
    freed = weakref.ref(model)
    model.__dict__["cycle"] = model
    del model, optimizer, engine
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


@linux
@pytest.mark.parametrize("place", range(4))
def test_a_model_may_be_collected_on_any_thread(place: int, tmp_path: Path) -> None:
    in_process(collected_on, place, tmp_path)
    assert (tmp_path / "stderr").read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["stderr"]


def test_a_step_waits_for_no_checkpoint_and_is_refused_meanwhile(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path)
    step(NAME, model, optimizer, 0)
    average = MovingAverage(model)
    errors: list[BaseException | None] = []
    hook = optimizer.inner.register_state_dict_pre_hook(
        lambda _: errors.append(in_thread(partial(step, NAME, model, optimizer, 1)))
    )
    optimizer.state_dict()
    hook.remove()
    average.update()
    (error,) = errors
    assert isinstance(error, TurnError)
    assert "while optimizer.state_dict() is under way in thread 'MainThread'" in error.message
    losses = [step(NAME, model, optimizer, 1)]
    expected = trained_plainly([0, 1])
    assert_bitwise(outcome(model, optimizer, losses), replace(expected, losses=expected.losses[1:]))


def test_a_block_that_another_thread_calls_is_refused(tmp_path: Path) -> None:
    model, optimizer = planned(tmp_path, Recompute(), Persistent())
    engine = engine_of(model)
    assert engine is not None
    name = next(unit.name for unit in described(NAME) if unit.kind == "block")
    errors: list[BaseException | None] = []

    def observe(what: str) -> None:
        if what == "slot 2":
            errors.append(in_thread(lambda: model.get_submodule(name)(torch.ones(1, 4, 4))))

    engine.observer = observe
    losses = [step(NAME, model, optimizer, 0)]
    assert isinstance(errors[0], TurnError)
    assert errors[0].message.startswith(f"'{name}' was called in thread 'second' while the model's")
    assert_bitwise(outcome(model, optimizer, losses), trained_plainly([0]))


def test_replicas_of_a_planned_model_are_refused(tmp_path: Path) -> None:
    """As torch.nn.parallel.replicate makes them, one for each of several devices."""
    model, _ = planned(tmp_path, Keep(), Offload(tier="host"))
    with pytest.raises(RuntimeError, match=r"torch\.nn\.DataParallel would call copies of it in"):
        model._replicate_for_data_parallel()
    restore(model)
    model._replicate_for_data_parallel()
