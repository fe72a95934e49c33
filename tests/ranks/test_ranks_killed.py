"""A rank that is killed: the others end, all are started anew, and nothing is lost or changed."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from protrain_runtime import load, save
from protrain_runtime.checkpoint.index import INDEX
from protrain_runtime.contract.records.plan import Offload, Persistent, Placement
from tests.support.ranks_cases import end_ranks, run_ranks
from tests.support.routed_model import State, made, same, state_of, step

PLACES: tuple[Placement, ...] = (
    Persistent(),
    Offload(tier="device"),
    Offload(tier="host", keep_gathered=True),
    Offload(tier="disk"),
)
NUM_STEPS, EVERY, KILLED_AT = 7, 2, 4
LIMIT_S = 10


def training(rank: int, count: int, folder: Path, killed: str) -> State:
    """Seven steps, from the last checkpoint on, saved after every second one."""
    model, optimizer = made(rank, count, PLACES, limit_s=LIMIT_S)
    first = 0
    if (folder / INDEX).exists():
        first = load(model, optimizer, folder)["step"]
        assert first == KILLED_AT
    for number in range(first, NUM_STEPS):
        if killed == "in backward" and (number, rank) == (KILLED_AT, 1):
            model.get_submodule("blocks.0").register_full_backward_hook(lambda *_: kill())
        step(model, optimizer, number, rank)
        if (number + 1) % EVERY == 0:
            if killed == "while it saves" and (number, rank) == (KILLED_AT + 1, 1):
                kill_on_opening(".safetensors")
            save(model, optimizer, folder, extra={"step": number + 1})
    return state_of(model, optimizer)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_on_opening(part: str) -> None:
    """Let this process end when it opens a file to write it, with this in its name."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and part in str(arguments[0]):
            _, mode, flags = arguments  # of `open`, and of `os.open`
            if "w" in str(mode) or flags & (os.O_WRONLY | os.O_RDWR):
                kill()

    sys.addaudithook(hook)


LAST_WORDS = {
    "in backward": r"reduce-scatter \d @\d failed on lane 'collect': ",
    "while it saves": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("killed", LAST_WORDS)
def test_a_rank_is_killed_and_all_resume_bitwise(killed: str, tmp_path: Path) -> None:
    undisturbed = run_ranks(training, 2, tmp_path / "a", tmp_path / "undisturbed", "never")
    ended = end_ranks(training, 2, tmp_path / "b", tmp_path / "saved", killed)
    assert (ended[1].exit_code, ended[1].error) == (-signal.SIGKILL, "")
    assert re.fullmatch(
        rf"{LAST_WORDS[killed]}rank 0 of 2 waited for the others, and rank 1 ended or hangs\n"
        r"  fix: see what that rank said last; start all ranks again, from a checkpoint",
        ended[0].error,
    ), ended[0].error
    resumed = run_ranks(training, 2, tmp_path / "c", tmp_path / "saved", "never")
    for found, expected in zip(resumed, undisturbed, strict=True):
        same(found, expected)
