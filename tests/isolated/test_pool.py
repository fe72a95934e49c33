"""Questions that several processes answer at once."""

import os
import signal
import time
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest

from protrain_plan.isolated.pool import answers_of
from protrain_runtime.contract.errors import ProtrainError


def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def dying(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_answers_come_in_order_and_from_other_processes() -> None:
    with answers_of(squared, range(5), jobs=2) as answers:
        found = list(answers)
    assert [number for number, _ in found] == [0, 1, 4, 9, 16]
    assert os.getpid() not in {process for _, process in found}
    assert active_children() == []


def test_one_at_a_time_is_answered_here() -> None:
    with answers_of(squared, range(3), jobs=1) as answers:
        assert list(answers) == [(number * number, os.getpid()) for number in range(3)]


def test_a_process_that_dies_is_one_error() -> None:
    with (
        pytest.raises(ProtrainError, match="a planning process died"),
        answers_of(dying, range(3), jobs=2) as answers,
    ):
        list(answers)
    assert active_children() == []


def interrupted() -> None:
    with answers_of(squared, range(1000), jobs=2) as answers:
        next(answers)
        raise KeyboardInterrupt


def test_a_block_that_is_interrupted_ends_the_processes() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert active_children() == []


def after_the_others(name: str, folder: Path, others: int) -> str:
    """Answer; of the first question, when so many others are answered."""
    while name == "first" and len(list(folder.iterdir())) < others:
        time.sleep(0.01)
    time.sleep(0.2)
    (folder / name).touch()
    return name


@pytest.mark.parametrize("at_once", [1, 2])
def test_each_answer_is_told_when_it_is_there(at_once: int, tmp_path: Path) -> None:
    """Not when those before it are, too."""
    names = ["first", "second", "third"]
    work = partial(after_the_others, folder=tmp_path, others=2 * (at_once == 2))
    waiting: list[tuple[str, ...]] = []
    with answers_of(work, names, jobs=at_once, report=lambda w: waiting.append(tuple(w))) as made:
        assert list(made) == names
    if at_once == 2:
        assert waiting == [("first", "third"), ("first",), ()]
    else:
        assert waiting == [("second", "third"), ("third",), ()]
