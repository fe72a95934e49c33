"""Checkpoints of several ranks: other numbers of ranks and plain PyTorch go on, bit by bit."""

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_without_protrain

from protrain_runtime import load, prepare, save
from protrain_runtime.checkpoint.exporting import export
from protrain_runtime.checkpoint.loading import read_extra
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import PERSISTENT, Placement
from tests.support.ranks_cases import ranks_on_every_device_at_night, run_ranks
from tests.support.routed_model import State, built, made, plan_of, same, state_of, step
from tests.support.runtime_cases import ADAMW, differences

SHARED: tuple[Placement, ...] = (Placement(tier="device"), PERSISTENT, Placement(tier="disk"))
OTHERWISE: tuple[Placement, ...] = (
    Placement(tier="host"),
    Placement(tier="device", keep_gathered=True),
    PERSISTENT,
)


def saving(rank: int, count: int, folder: Path) -> tuple[State, State]:
    """The states when it saved, and two steps later."""
    model, optimizer = made(rank, count, SHARED)
    for number in range(3):
        step(model, optimizer, number, rank)
    save(model, optimizer, folder / "first", extra={"step": 2})  # replaced by the next one
    save(model, optimizer, folder / "first", extra={"step": 3})
    then = state_of(model, optimizer)
    save(model, optimizer, folder / "beside", extra={"step": 1}, beside=True)  # waited for
    beside = save(model, optimizer, folder / "beside", extra={"step": 3}, beside=True)
    for number in (3, 4):
        step(model, optimizer, number, rank)
    assert beside is not None
    beside.wait()
    assert beside.done()
    return then, state_of(model, optimizer)


def resuming(
    rank: int, count: int, folder: Path, places: tuple[Placement, ...], goes_on: bool
) -> tuple[dict[str, Any], State]:
    model, optimizer = made(rank, count, places)
    extra = load(model, optimizer, folder)
    for number in (3, 4) if goes_on else ():
        step(model, optimizer, number, rank)
    return extra, state_of(model, optimizer)


@pytest.mark.nightly("cpu")
@ranks_on_every_device_at_night
def test_two_ranks_save_and_as_many_go_on_under_other_plans_bitwise(tmp_path: Path) -> None:
    saved = run_ranks(saving, 2, tmp_path, tmp_path)
    assert len(list((tmp_path / "first").glob("protrain-save-*"))) == 1
    for name, places in (("first", SHARED), ("beside", OTHERWISE)):
        resumed = run_ranks(resuming, 2, tmp_path, tmp_path / name, places, True)
        for (_, later), (extra, state) in zip(saved, resumed, strict=True):
            assert extra == {"step": 3}
            same(state, later)


@ranks_on_every_device_at_night
@pytest.mark.slow
def test_four_ranks_save_and_two_one_and_plain_pytorch_go_on(tmp_path: Path) -> None:
    (then, _), *_ = run_ranks(saving, 4, tmp_path, tmp_path)
    for _, state in run_ranks(resuming, 2, tmp_path, tmp_path / "first", OTHERWISE, False):
        same(state, then)
    places: tuple[Placement, ...] = (Placement(tier="host"), PERSISTENT, Placement(tier="disk"))
    for planned in (True, False):
        plain = built(9)
        optimizer: torch.optim.Optimizer = ADAMW(list(plain.parameters()))
        model: nn.Module = plain
        if planned:
            model, optimizer = made(9, 1, places)
        assert load(model, optimizer, tmp_path / "beside") == {"step": 3}
        same(state_of(model, optimizer), then)
    # And without protrain.
    plain = built(9)
    export(tmp_path / "first", tmp_path / "exported")
    load_without_protrain({"model": plain.state_dict()}, checkpoint_id=tmp_path / "exported")
    assert list(differences(plain.state_dict(), then[0], "")) == []


@ranks_on_every_device_at_night
def test_one_device_saves_and_two_ranks_go_on(tmp_path: Path) -> None:
    model = built()
    optimizer = ADAMW(list(model.parameters()))
    step(model, optimizer, 0, 0)
    save(model, optimizer, tmp_path / "one", extra={"step": 1})
    for extra, state in run_ranks(resuming, 2, tmp_path, tmp_path / "one", SHARED, False):
        assert extra == {"step": 1}
        same(state, state_of(model, optimizer))


def exchanging_transposed(rank: int, count: int, folder: Path) -> tuple[State, State]:
    """The states that two ranks save, and those after they load what one device saved."""
    model: nn.Module = built(rank)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.detach().t().contiguous().t()
    plan = plan_of(model, count, SHARED)
    model, optimizer = prepare(model, plan, optimizer=ADAMW, wait_limit_s=60)
    step(model, optimizer, 0, rank)
    save(model, optimizer, folder / "two")
    then = state_of(model, optimizer)
    load(model, optimizer, folder / "one")
    return then, state_of(model, optimizer)


def test_parameters_of_ranks_need_not_be_row_major(tmp_path: Path) -> None:
    model = built()
    optimizer = ADAMW(list(model.parameters()))
    step(model, optimizer, 1, 1)
    save(model, optimizer, tmp_path / "one")
    expected = state_of(model, optimizer)
    (then, after), (_, other) = run_ranks(exchanging_transposed, 2, tmp_path, tmp_path)
    same(after, expected)
    same(other, expected)
    load(model, optimizer, tmp_path / "two")
    same(state_of(model, optimizer), then)


def saving_with_little_room(rank: int, count: int, folder: Path) -> tuple[str, int]:
    """The second save's error where rank 1 may write few bytes, and the step."""
    model, optimizer = made(rank, count, SHARED)
    save(model, optimizer, folder, extra={"step": 0})
    step(model, optimizer, 0, rank)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        save(model, optimizer, folder, extra={"step": 1})
    except ProtrainError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(error), load(model, optimizer, folder)["step"]
    return "nothing was raised", 0


@pytest.mark.nightly
def test_where_one_rank_cannot_write_all_are_told_and_the_last_checkpoint_stands(
    tmp_path: Path,
) -> None:
    for told, done in run_ranks(saving_with_little_room, 2, tmp_path, tmp_path / "full"):
        assert told == (
            f"{tmp_path / 'full'}: the checkpoint cannot be written: rank 1: File too large\n"
            "  fix: make room there, or save to another directory; what was saved before is whole"
        )
        assert done == 0


def saving_over(rank: int, count: int, folder: Path) -> None:
    model, optimizer = made(rank, count, SHARED)
    assert load(model, optimizer, folder) == {"step": 1}
    save(model, optimizer, folder, extra={"step": 2})


def test_ranks_replace_what_one_device_saved_and_the_other_way_round(tmp_path: Path) -> None:
    model = built()
    optimizer = ADAMW(list(model.parameters()))
    step(model, optimizer, 0, 0)
    save(model, optimizer, tmp_path / "saved", extra={"step": 1})
    expected = state_of(model, optimizer)
    run_ranks(saving_over, 2, tmp_path, tmp_path / "saved")
    again = built(9)
    resumed = ADAMW(list(again.parameters()))
    assert load(again, resumed, tmp_path / "saved") == {"step": 2}
    same(state_of(again, resumed), expected)
    save(again, resumed, tmp_path / "saved")
    assert read_extra(tmp_path / "saved") == {}
    assert len(list((tmp_path / "saved").iterdir())) == 2
