"""Questions that several processes answer at once."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from protrain_plan.isolated.pool import answers_of, pipelined, workers
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
        pytest.raises(ProtrainError, match="a process that planned died"),
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


def learnt(number: int, called: list[str] | None = None) -> int:
    if called is not None:
        called.append(f"learn {number}")
    if number == 2:
        raise ProtrainError("two cannot be learnt")
    return number


def of_two(number: int, known: int) -> list[str]:
    assert number == known
    return [f"{number}a", f"{number}b"]


def answer(question: str, called: list[str] | None = None) -> str:
    if called is not None:
        called.append(f"answer {question}")
    return question.upper()


def test_what_is_learnt_first_is_answered_first() -> None:
    called: list[str] = []
    with workers(1) as start:
        found = pipelined(
            start,
            [partial(learnt, number, called) for number in range(2)],
            of_two,
            partial(answer, called=called),
            at_once=1,
            learn_here=True,
        )
        assert next(found) == ("0a", "0A")
        assert "learn 1" not in called
        assert list(found) == [("0b", "0B"), ("1a", "1A"), ("1b", "1B")]
    assert called == ["learn 0", "answer 0a", "answer 0b", "learn 1", "answer 1a", "answer 1b"]


def test_what_is_known_is_asked_of_no_process() -> None:
    called: list[str] = []

    def start(work: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(work())
        return future

    found = pipelined(
        start,
        [partial(learnt, number) for number in range(2)],
        of_two,
        partial(answer, called=called),
        known={"0a": "before", "1b": "too"}.get,
        at_once=2,
        learn_here=True,
    )
    assert list(found) == [("0a", "before"), ("0b", "0B"), ("1a", "1A"), ("1b", "too")]
    assert called == ["answer 0b", "answer 1a"]


@pytest.mark.parametrize("learn_here", [False, True])
@pytest.mark.parametrize("at_once", [1, 2])
def test_answers_before_what_cannot_be_learnt_come(at_once: int, learn_here: bool) -> None:
    works: list[Callable[[], int]] = [partial(learnt, number) for number in range(4)]
    found: list[tuple[str, str]] = []
    with (
        pytest.raises(ProtrainError, match="two cannot be learnt"),
        workers(at_once, imports=["json"]) as start,
    ):
        found += pipelined(start, works, of_two, answer, at_once=at_once, learn_here=learn_here)
    assert found == [("0a", "0A"), ("0b", "0B"), ("1a", "1A"), ("1b", "1B")]
    assert active_children() == []


def test_a_process_that_dies_as_it_learns_is_one_error() -> None:
    works = [partial(dying, number) for number in range(3)]
    with (
        pytest.raises(ProtrainError, match="a process that planned died"),
        workers(2) as start,
    ):
        list(pipelined(start, works, of_two, answer, at_once=2, learn_here=False))
    assert active_children() == []


@pytest.mark.parametrize("seconds", [(0.3, 0.1, 0.1), (0.1, 0.3, 0.1)])
def test_no_process_is_idle_while_it_is_waited_for_another(seconds: tuple[float, ...]) -> None:
    begun: list[tuple[str, int]] = []  # questions, and how many others were being answered then
    open_ones: set[int] = set()

    def start(work: Callable[[], Any]) -> "Future[Any]":
        number = len(begun)
        future: Future[Any] = Future()
        result = work()
        begun.append((result, len(open_ones)))
        open_ones.add(number)

        def end() -> None:
            open_ones.discard(number)
            future.set_result(result)

        Timer(seconds[number], end).start()
        return future

    asked = pipelined(
        start, [lambda: 0], lambda *_: ["a", "b", "c"], answer, at_once=2, learn_here=True
    )
    assert list(asked) == [("a", "A"), ("b", "B"), ("c", "C")]
    # The third began beside the one that took longest.
    assert begun == [("A", 0), ("B", 1), ("C", 1)]


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
    names, told = ["first", "second", "third"], list[tuple[int, str | None]]()
    work = partial(after_the_others, folder=tmp_path, others=2 * (at_once == 2))
    with workers(at_once) as start:
        found = pipelined(
            start,
            [lambda: 0] if at_once == 1 else [int],
            lambda *_: names,
            work,
            at_once=at_once,
            learn_here=True,
            told=lambda *one: told.append(one),
        )
        assert [answer for _, answer in found] == names
    numbers = [number for number, _ in told]
    assert numbers == sorted(numbers)
    assert set(numbers) == {0, 1, 2, 3}
    assert (0, "first") in told
    assert (2, "first" if at_once == 2 else "third") in told
    for path in tmp_path.iterdir():
        path.unlink()
    waiting: list[tuple[str, ...]] = []
    with answers_of(work, names, jobs=at_once, told=lambda one: waiting.append(tuple(one))) as made:
        assert list(made) == names
    if at_once == 2:
        assert waiting == [("first", "third"), ("first",), ()]
    else:
        assert waiting == [("second", "third"), ("third",), ()]
