"""What several ranks save, other numbers of ranks and plain PyTorch continue from, bit by bit."""

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_without_protrain

from protrain_runtime import load, save
from protrain_runtime.checkpoint.folders import POINTER
from protrain_runtime.checkpoint.part_files import boxes
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.plan import Offload, Persistent, Placement
from tests.support.messages import Speaker
from tests.support.ranks_cases import end_ranks, ranks_on_every_device_at_night, run_ranks
from tests.support.routed_model import State, built, made, same, state_of, step
from tests.support.runtime_cases import ADAMW, differences

SHARED: tuple[Placement, ...] = (Offload(tier="device"), Persistent(), Offload(tier="disk"))
OTHERWISE: tuple[Placement, ...] = (
    Offload(tier="host"),
    Offload(tier="device", keep_gathered=True),
    Persistent(),
)


def test_boxes_cover_a_range_of_elements_once_and_in_order() -> None:
    for shape in ((), (7,), (3, 4), (2, 3, 5), (1, 6), (4, 1, 3)):
        count = torch.Size(shape).numel()
        elements = torch.arange(count).view(shape)
        for first in range(count + 1):
            for stop in range(first, count + 1):
                found: list[int] = []
                for box in boxes(shape, first, stop):
                    where = tuple(
                        slice(offset, offset + size)
                        for offset, size in zip(box.offsets, box.sizes, strict=True)
                    )
                    part = elements[where].reshape(-1).tolist()
                    assert part[0] == box.first
                    found += part
                assert found == list(range(first, stop))


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


@ranks_on_every_device_at_night
def test_two_ranks_save_and_as_many_go_on_under_other_plans_bitwise(tmp_path: Path) -> None:
    saved = run_ranks(saving, 2, tmp_path, tmp_path)
    assert len(list((tmp_path / "first").glob("protrain-ranks-*"))) == 1
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
    places: tuple[Placement, ...] = (Offload(tier="host"), Persistent(), Offload(tier="disk"))
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
    folder = json.loads((tmp_path / "first" / POINTER).read_text())["protrain_save"]
    load_without_protrain({"model": plain.state_dict()}, checkpoint_id=tmp_path / "first" / folder)
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


def saving_with_little_room(rank: int, count: int, folder: Path) -> tuple[str, int]:
    """What the second save says where rank 1 may write no more than a few bytes, and the step."""
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


def test_where_one_rank_cannot_write_all_are_told_and_the_last_checkpoint_stands(
    tmp_path: Path,
) -> None:
    for told, done in run_ranks(saving_with_little_room, 2, tmp_path, tmp_path / "full"):
        assert told == (
            f"{tmp_path / 'full'}: the checkpoint cannot be written: rank 1: [Errno 27] File too"
            " large\n"
            "  fix: make room there, or save to another directory; the last checkpoint stands"
        )
        assert done == 0


def saving_elsewhere(rank: int, count: int, folder: Path) -> None:
    model, optimizer = made(rank, count, SHARED)
    save(model, optimizer, folder)


def test_the_two_kinds_of_checkpoints_do_not_mix(tmp_path: Path, assert_says: Speaker) -> None:
    model = built()
    optimizer = ADAMW(list(model.parameters()))
    save(model, optimizer, tmp_path / "one")
    for end in end_ranks(saving_elsewhere, 2, tmp_path, tmp_path / "one"):
        # A rank may hear of the other's failure before it meets its own.
        own = end.error[end.error.index(str(tmp_path)) :]
        assert own == (
            f"{tmp_path / 'one'}: the directory holds a checkpoint of one device\n"
            "  fix: save to another directory"
        )
    run_ranks(saving_elsewhere, 2, tmp_path, tmp_path / "two")
    with pytest.raises(ProtrainError) as caught:
        save(model, optimizer, tmp_path / "two")
    assert_says(caught.value)
