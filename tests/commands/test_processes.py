"""Questions that several processes answer at once."""

import os
import signal
from multiprocessing import active_children

import pytest

from protrain_plan.commands.processes import answers_of
from protrain_plan.errors import ProtrainError


def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def dying(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_answers_come_in_order_and_from_other_processes() -> None:
    with answers_of(squared, range(5), at_once=2) as answers:
        found = list(answers)
    assert [number for number, _ in found] == [0, 1, 4, 9, 16]
    assert os.getpid() not in {process for _, process in found}
    assert active_children() == []


def test_one_at_a_time_is_answered_here() -> None:
    with answers_of(squared, range(3), at_once=1) as answers:
        assert list(answers) == [(number * number, os.getpid()) for number in range(3)]


def test_a_process_that_dies_is_one_error() -> None:
    with (
        pytest.raises(ProtrainError, match="a process that planned died"),
        answers_of(dying, range(3), at_once=2) as answers,
    ):
        list(answers)
    assert active_children() == []


def interrupted() -> None:
    with answers_of(squared, range(1000), at_once=2) as answers:
        next(answers)
        raise KeyboardInterrupt


def test_a_block_that_is_interrupted_ends_the_processes() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert active_children() == []
