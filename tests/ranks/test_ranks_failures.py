"""One rank fails: the others fail, too, with its reason, and may go on where it was no step.

In `prepare`, `load` and `save` the limit of waits is far beyond the time that a test may take: a
rank that hears nothing does not end. Rank 1 fails in turn in one way after another, in one pair of
processes.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from protrain_runtime import full_parameters, load, preparation, prepare, restore, save
from protrain_runtime.checkpoint import loading, saving
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import PERSISTENT, Placement, TierBytes
from protrain_runtime.devices import device as devices
from protrain_runtime.engine.engine import Engine
from protrain_runtime.model.prepared import ATTRIBUTE
from tests.support.ranks_cases import run_ranks, started
from tests.support.routed_model import Block, batch, built, plan_of, step
from tests.support.runtime_cases import ADAMW, copied, device, differences

LIMIT_S, LIMIT_IN_STEPS_S = 3600.0, 5.0
UNREADABLE = OSError(5, "Input/output error")
FAILING = 1
PLACES: tuple[Placement, ...] = (
    PERSISTENT,
    Placement(tier="device"),
    Placement(tier="disk"),
    Placement(tier="host"),
)

Trained = tuple[nn.Module, torch.optim.Optimizer]


def said(work: Callable[[], object]) -> str:
    """The call's error, as its type and the whole text."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 (an interruption too)
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def raising(owner: Any, name: str, error: BaseException, calls: int = 1) -> Iterator[None]:
    """The function raises in its nth call: what the system may do to it at any time."""
    real, left = getattr(owner, name), calls

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing)
        yield


def where(
    owner: Any, name: str, error: BaseException, call: Callable[..., object], calls: int = 1
) -> Callable[..., None]:
    """The call, in which something of the system or of ours raises."""

    def failing(*args: Any) -> None:
        with raising(owner, name, error, calls):
            call(*args)

    return failing


# --- prepare --------------------------------------------------------------------------------------

Prepares = Callable[[nn.Module, Path], object]
"""Called by a rank that fails in place of `prepared`, with a folder that exists."""


def prepared(model: nn.Module, **options: Any) -> Trained:
    given = {"optimizer": ADAMW, "wait_limit_s": LIMIT_S, **options}
    plan = given.pop("plan", None) or plan_of(model, dist.get_world_size(), PLACES)
    return prepare(model, plan, **given)


def prepares(model: nn.Module, folder: Path) -> None:
    prepared(model)


def changed(change: Callable[[Any], object]) -> Prepares:
    """The model is another one than the plan was made for."""

    def fails(model: nn.Module, folder: Path) -> None:
        plan = plan_of(model, 2, PLACES)
        change(model)
        prepared(model, plan=plan)

    return fails


def with_a_damaged_plan(model: nn.Module, folder: Path) -> None:
    write_plan(plan_of(model, 2, PLACES), folder / "plan.yaml")
    text = (folder / "plan.yaml").read_text()
    (folder / "plan.yaml").write_text(text.replace("num_devices: 2", "num_devices: two"))
    prepared(model, plan=folder / "plan.yaml")


def with_too_large_a_plan(model: nn.Module, folder: Path) -> None:
    plan = plan_of(model, 2, PLACES)
    takes = TierBytes(device=2**60, context=0, host=0, disk=0)
    prepared(model, plan=replace(plan, prediction=replace(plan.prediction, peak_bytes=takes)))


def given(**options: Callable[[Any, Path], Any]) -> Prepares:
    """With options that are made of the model and the folder."""
    return lambda model, folder: prepared(
        model, **{name: make(model, folder) for name, make in options.items()}
    )


def no_optimizer(_: object) -> torch.optim.Optimizer:
    raise ValueError("no such optimizer\nsecond line")


def in_two_groups(model: nn.Module, _: Path) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first]}, {"params": others}]


def with_a_prepared_model(model: nn.Module, folder: Path) -> None:
    model.__dict__[ATTRIBUTE] = object()
    try:
        prepared(model)
    finally:
        del model.__dict__[ATTRIBUTE]


FAILURES: dict[str, tuple[Prepares, str, str]] = {
    # What the rank that fails does, and the type and beginning of what it says.
    "changed shape": (
        changed(lambda model: setattr(model.blocks[1].experts, "0", nn.Linear(24, 24, bias=False))),
        "ProtrainError",
        "",
    ),
    "changed number of blocks": (
        changed(lambda model: setattr(model, "blocks", nn.ModuleList([Block(24), Block(24)]))),
        "ProtrainError",
        "",
    ),
    "changed dtype": (changed(lambda model: model.to(torch.float64)), "ProtrainError", ""),
    "a plan for one": (
        given(plan=lambda model, _: plan_of(model, 1, (PERSISTENT,))),
        "ProtrainError",
        "settings.group.num_devices: the plan needs 1 device; 2 processes are running\n"
        "  fix: plan with --num-devices 2",
    ),
    "a damaged plan": (with_a_damaged_plan, "RecordError", ""),
    "no plan": (given(plan=lambda _, folder: folder / "none.yaml"), "RecordError", ""),
    "too large a plan": (with_too_large_a_plan, "NoRoomError", "the plan takes"),
    "no folder": (given(spill_directory=lambda _, folder: folder / "none"), "ProtrainError", ""),
    "a full disk": (
        where(os, "posix_fallocate", OSError(28, "No space left on device"), prepares, 2),
        "ProtrainError",
        "",
    ),
    "a broken disk": (where(os, "pwrite", UNREADABLE, prepares, 2), "ProtrainError", ""),
    "another optimizer": (
        given(optimizer=lambda *_: partial(torch.optim.SGD, lr=0.1)),
        "RanksError",
        "rank 1 has another optimizer than rank 0: SGD instead of AdamW\n"
        "  fix: give prepare() the same optimizer and the same param_groups on every rank",
    ),
    "another rate": (
        given(optimizer=lambda *_: partial(torch.optim.AdamW, lr=0.125, fused=True)),
        "RanksError",
        "rank 1 has another lr in parameter group 1 than rank 0: 0.125 instead of",
    ),
    "other groups": (
        given(param_groups=in_two_groups),
        "RanksError",
        "rank 1 has another number of parameter groups than rank 0: 2 instead of 1\n",
    ),
    "no optimizer": (given(optimizer=lambda *_: no_optimizer), "ValueError", "no such optimizer"),
    "interrupted": (
        where(preparation, "make_chunks", KeyboardInterrupt(), prepares),
        "KeyboardInterrupt",
        "",
    ),
    "out of memory late": (
        where(preparation, "Engine", MemoryError("no more"), prepares),
        "MemoryError",
        "no more",
    ),
    "a prepared model": (
        with_a_prepared_model,
        "ProtrainError",
        "the model follows a plan already\n  fix: call restore(model) first",
    ),
}


def told_of(kind: str, said: str) -> str:
    """The others' words: an error of ours as it is, another one with its type."""
    if kind == "RanksError":
        return said
    ours = kind in ("ProtrainError", "RecordError", "NoRoomError")
    named = said if ours else f"{kind}: {said}" if said else kind
    return f"rank 1 failed in prepare(): {named}"


def failing_to_prepare(rank: int, count: int, folder: Path) -> list[tuple[str, list[str]]]:
    """By way to fail what this rank says, and how its model differs from what it was."""
    found: list[tuple[str, list[str]]] = []
    for number, (name, (failing, _, _)) in enumerate(FAILURES.items()):
        spills = folder / f"{number}-{rank}"
        spills.mkdir()
        model: nn.Module = built(rank)
        before = copied(model.state_dict())
        text = said(
            partial(failing, model, spills) if rank == FAILING else partial(prepared, model)
        )
        after = copied(model.state_dict())
        own = rank == FAILING and name.startswith("changed")
        found.append((text, [] if own else list(differences(after, before, ""))))
        assert all(parameter.grad is None for parameter in model.parameters())
    model, optimizer = prepared(built(rank))  # and then it can be
    step(model, optimizer, 0, rank)
    return found


@pytest.mark.nightly
def test_a_rank_that_cannot_prepare_tells_the_others_and_models_are_as_before(
    tmp_path: Path,
) -> None:
    by_rank = run_ranks(failing_to_prepare, 2, tmp_path, tmp_path)
    for (_, kind, own), *found in zip(FAILURES.values(), *by_rank, strict=True):
        (other, left), (failing, as_before) = found
        assert failing.startswith(f"{kind}: {own}"), failing
        assert other.startswith(f"RanksError: {told_of(kind, own)}"), other
        assert left == as_before == []


# --- load, save and what else is for all ranks between steps --------------------------------------

Calls = Callable[[nn.Module, torch.optim.Optimizer, Path], object]


def saves_beside(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    beside = save(model, optimizer, folder, beside=True)
    assert beside is not None
    beside.wait()


def looks(model: nn.Module, _: torch.optim.Optimizer, __: Path) -> None:
    with full_parameters(model):
        pass


def restore_here(model: nn.Module, *_: object) -> None:
    restore(model)


def with_another(call: Calls) -> Calls:
    """The optimizer is not the one that `prepare` returned."""
    return lambda model, _, folder: call(model, ADAMW(list(model.parameters())), folder)


def from_a_damaged_one(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """This rank alone sees other bytes."""
    own = folder.parent / "damaged"
    shutil.copytree(folder, own, dirs_exist_ok=True)
    for path in own.glob("*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    load(model, optimizer, own)


NO_ROOM = ProtrainError("no room", fix="make some")
CALLS: Sequence[tuple[str, Calls, Calls, str]] = (
    # The name, what is called, what the failing rank does in its place, and what is told.
    ("load()", load, with_another(load), "the optimizer is not the one that prepare() returned"),
    ("load()", load, lambda model, optimizer, folder: load(model, optimizer, folder / "none"), ""),
    ("load()", load, from_a_damaged_one, ""),
    ("load()", load, where(loading, "matched", KeyboardInterrupt(), load), "KeyboardInterrupt"),
    ("save()", save, with_another(save), "the optimizer is not the one that prepare() returned"),
    (
        "save()",
        save,
        partial(save, extra={"here": threading.Lock()}),
        "extra.here: this cannot be saved: ",
    ),
    ("save()", save, where(saving, "model_values", UNREADABLE, save), "OSError: [Errno 5] Input"),
    (
        "save()",
        saves_beside,
        where(saving, "model_values", UNREADABLE, saves_beside),
        "OSError: [Errno 5] Input/output error",
    ),
    (
        "full_parameters()",
        looks,
        where(sys.modules[full_parameters.__module__], "check_free", NO_ROOM, looks),
        "no room\n  fix: make some",
    ),
    (
        "restore()",
        restore_here,
        where(Engine, "settle", KeyboardInterrupt(), restore_here),
        "KeyboardInterrupt",
    ),
)


def failing_between_steps(rank: int, count: int, folder: Path) -> list[tuple[str, list[str]]]:
    """By call what this rank says, and what the model and its optimizer lost by it."""
    model, optimizer = prepared(built(rank))
    step(model, optimizer, 0, rank)
    save(model, optimizer, folder / "saved", extra={"step": 1})
    step(model, optimizer, 1, rank)
    found: list[tuple[str, list[str]]] = []
    for _, call, failing, _ in CALLS:
        before = copied(model.state_dict()), copied(optimizer.state_dict())
        made = failing if rank == FAILING else call
        text = said(partial(made, model, optimizer, folder / "saved"))
        after = copied(model.state_dict()), copied(optimizer.state_dict())
        found.append((text, list(differences(after, before, ""))))
    assert load(model, optimizer, folder / "saved") == {"step": 1}  # and then it can be
    step(model, optimizer, 1, rank)
    return found


@pytest.mark.nightly
def test_a_rank_that_cannot_load_or_save_tells_the_others_and_all_may_go_on(tmp_path: Path) -> None:
    by_rank = run_ranks(failing_between_steps, 2, tmp_path, tmp_path)
    for (name, _, _, told), *found in zip(CALLS, *by_rank, strict=True):
        (other, left), (failing, as_before) = found
        assert not failing.startswith(("nothing", "RanksError")), failing
        assert other.startswith(f"RanksError: rank 1 failed in {name}: {told}"), other
        assert left == as_before == []


# --- in a step ------------------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        raise ValueError("no gradient")


Steps = Callable[[nn.Module, torch.optim.Optimizer], object]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, optimizer, 1, dist.get_rank())


def hooked(hook: Callable[..., object]) -> Steps:
    def fails(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        handle = model.get_submodule("blocks.1").register_forward_hook(hook)
        try:
            steps(model, optimizer)
        finally:
            handle.remove()

    return fails


def in_forward(error: BaseException) -> Steps:
    def hook(*_: object) -> None:
        raise error

    return hooked(hook)


def without_disk(call: Steps) -> Steps:
    return where(os, "preadv", UNREADABLE, call)


def evaluates(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.eval()(batch(0), 0)


def updates_badly(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch(dist.get_rank()), 0).backward()
    with raising(torch.optim.AdamW, "step", ValueError("no update")):
        optimizer.step()


def lists(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()
    optimizer.state_dict()


def lists_then_fails(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()
    without_disk(lambda _, optimizer: optimizer.state_dict())(model, optimizer)


in_backward = hooked(lambda _, __, output: Raises.apply(output))  # type: ignore[no-untyped-call]
OUT_OF_MEMORY = torch.OutOfMemoryError("out of memory")
STEPS: Sequence[tuple[Steps, Steps, str]] = (
    # What is called, what the failing rank does in its place, and what is told.
    (steps, in_forward(ValueError("no output")), "in a forward: ValueError: no output"),
    (steps, in_forward(OUT_OF_MEMORY), "in a forward: OutOfMemoryError: out of memory"),
    (steps, in_forward(KeyboardInterrupt()), "in a forward: KeyboardInterrupt"),
    (steps, without_disk(steps), "in a forward: "),
    (steps, in_backward, "in a backward: see what that rank says"),
    (
        steps,
        where(Engine, "_begin_slot", KeyboardInterrupt(), steps, calls=6),
        "in a backward: KeyboardInterrupt",
    ),
    (steps, updates_badly, "in optimizer.step(): ValueError: no update"),
    (evaluates, without_disk(evaluates), "in a forward: "),
    (lists, without_disk(lists), "in a gather of parameters: "),
    (lists, lists_then_fails, "in a gather of optimizer states: "),
)
ALL = range(len(STEPS))


def failing_in_a_step(rank: int, count: int, numbers: Sequence[int] = ALL) -> list[str]:
    """By case what this rank says. Each has a process group of its own."""
    base = dist.distributed_c10d._get_default_store()
    found: list[str] = []
    for number in numbers:
        call, failing, _ = STEPS[number]
        base.set(f"begun {number} {rank}", "1")
        base.wait([f"begun {number} {other}" for other in range(count)])
        dist.destroy_process_group()
        store = PrefixStore(f"case {number}", base)
        dist.init_process_group(
            devices.collectives(device()),
            store=store,
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=60),
        )
        model, optimizer = prepared(built(rank), wait_limit_s=LIMIT_IN_STEPS_S)
        step(model, optimizer, 0, rank)

        def fails_or_waits(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            made: Steps = failing if rank == FAILING else call,
        ) -> None:
            made(model, optimizer)
            steps(model, optimizer)  # where a rank that has not heard yet meets the others

        found.append(said(fails_or_waits))
        # Nobody may hear of it from a connection that is closed.
        store.set(f"heard {rank}", "1")
        store.wait([f"heard {other}" for other in range(count)], timedelta(seconds=60))
    return found


def assert_told(by_rank: Sequence[Sequence[str]], numbers: Sequence[int] = ALL) -> None:
    for rank, by_case in enumerate(by_rank):
        for number, text in zip(numbers, by_case, strict=True):
            _, _, told = STEPS[number]
            if rank == FAILING:
                assert not text.startswith(("nothing", "RanksError")), text
                continue
            assert text.startswith(("RanksError: ", "LaneError: ")), text
            assert f"rank 1 failed {told}" in text, text


@pytest.mark.nightly("numbers0")
@pytest.mark.parametrize(
    "numbers", [[0, 4, 6], pytest.param([1, 2, 3, 5, 7, 8, 9], marks=pytest.mark.slow)]
)
def test_a_rank_that_fails_in_a_step_tells_the_others(
    numbers: Sequence[int], tmp_path: Path
) -> None:
    """When their collective has reached its limit, or its peer has ended."""
    assert_told(run_ranks(failing_in_a_step, 2, tmp_path, numbers), numbers)


def mending(rank: int, count: int) -> list[str]:
    """Rank 1 begins a step too early, is refused, and mends it."""
    said_of: list[str] = []
    model, optimizer = prepared(built(rank))
    for number in range(3):
        model(batch(number), 0).backward()
        if rank == FAILING:
            said_of.append(said(partial(model, batch(number), 0)))
        optimizer.step()
        optimizer.zero_grad()
    return said_of


def test_what_is_refused_before_it_began_may_be_mended_on_one_rank(tmp_path: Path) -> None:
    none, refused = run_ranks(mending, 2, tmp_path)
    assert none == []
    assert len(refused) == 3
    assert all(text.startswith("RuntimeError: a second forward began") for text in refused)


# --- protrain run ---------------------------------------------------------------------------------


@pytest.mark.nightly
def test_ranks_run_the_same_command(tmp_path: Path) -> None:
    write_plan(plan_of(built(), 2, PLACES), tmp_path / "plan.yaml")
    for told in started(tmp_path, ["plan.yaml"], ["plan.yaml", "--steps", 4]):
        assert told.stderr == (
            "error: rank 1 has another --steps than rank 0: 4 instead of 5\n"
            "  fix: start all ranks with the same command\n"
        )
        assert told.returncode == 2
