"""Work in a process of its own: what comes back, and what is said of how it ends."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from protrain_plan.isolated.process import EndedError, Limits, Server, Tell, run
from protrain_runtime.contract.errors import OutOfMemoryError, ProtrainError

LIMITS = Limits(seconds=2, memory=2**30)


@pytest.fixture(params=["fresh", "forked"])
def runs(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    if request.param == "fresh":
        yield run
        return
    with Server(LIMITS) as server:
        yield partial(run, server=server)


@pytest.fixture
def forked() -> Iterator[Callable[..., Any]]:
    with Server(LIMITS) as server:
        yield partial(run, server=server)


def answers(number: int, tell: Tell) -> list[Any]:
    for step in range(number):
        tell({"step": step})
    return [os.getpid() != os.getppid(), "a\u2028b"]


def refuses(_: Tell) -> None:
    raise ProtrainError("no", source="a.yaml", line=3, key="b", fix="c")


def needs_more(_: Tell) -> None:
    raise OutOfMemoryError("no memory")


def raises(_: Tell) -> None:
    raise KeyError("gone")


def leaves(_: Tell) -> None:
    sys.exit("enough")


def ends(code: int, _: Tell) -> None:
    os._exit(code)


def dies(_: Tell) -> None:
    ctypes.string_at(0)


def sleeps(_: Tell) -> None:
    time.sleep(1000)


def forges(text: bytes, _: Tell) -> None:
    for end in range(3, 64):
        with suppress(OSError):
            os.write(end, text)
    time.sleep(1000)


def test_an_answer_and_what_is_told_on_the_way_come_as_data(runs: Callable[..., Any]) -> None:
    heard: list[Any] = []
    assert runs(partial(answers, 3), hear=heard.append) == [True, "a\u2028b"]
    assert heard == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_an_error_of_ours_comes_with_all_its_parts(runs: Callable[..., Any]) -> None:
    with pytest.raises(ProtrainError) as caught:
        runs(refuses)
    assert not isinstance(caught.value, EndedError)
    assert str(caught.value) == "a.yaml:3: b: no\n  fix: c"
    with pytest.raises(OutOfMemoryError, match="no memory"):
        runs(needs_more)


@pytest.mark.parametrize(
    ("work", "words"),
    [(raises, "KeyError: 'gone'"), (leaves, "its code ended the program: sys.exit('enough')")],
)
def test_another_error_is_told_with_its_line(
    work: Callable[..., Any], words: str, runs: Callable[..., Any]
) -> None:
    with pytest.raises(EndedError) as caught:
        runs(work)
    assert (caught.value.message, caught.value.raised) == (words, True)
    assert str(caught.value.source).endswith("tests/isolated/test_process.py")
    assert caught.value.line == work.__code__.co_firstlineno + 1


def test_an_end_without_an_answer_is_told_with_its_code(runs: Callable[..., Any]) -> None:
    with pytest.raises(EndedError, match="the work ended with exit code 7") as caught:
        runs(partial(ends, 7), name="the work")
    assert caught.value.code == 7
    with pytest.raises(EndedError, match=r"its process died: SIGSEGV \(segmentation") as caught:
        runs(dies)
    assert (caught.value.code, caught.value.raised) == (-signal.SIGSEGV, False)
    assert caught.value.line == dies.__code__.co_firstlineno + 1


def test_what_is_heard_can_be_refused(runs: Callable[..., Any]) -> None:
    def hear(_: object) -> None:
        raise ValueError

    with pytest.raises(EndedError, match="answers in place of protrain"):
        runs(partial(answers, 1), hear=hear)


def test_a_process_has_no_more_time_than_it_is_given(forked: Callable[..., Any]) -> None:
    with pytest.raises(EndedError, match="its process was not done after 2 s") as caught:
        forked(sleeps)
    assert (caught.value.limit, caught.value.line) == (
        "seconds",
        sleeps.__code__.co_firstlineno + 1,
    )
    assert forked(partial(answers, 0))[0]  # the server goes on


@pytest.mark.parametrize(
    "text", [b"[]\n", b"[" * 10**5 + b"\n", b'{"answer": 1', b'{"failed": [1]}\n', b"\xff\n"]
)
def test_what_is_no_message_of_ours_is_no_answer(text: bytes, forked: Callable[..., Any]) -> None:
    with pytest.raises(EndedError, match=r"answers in place of protrain|was not done"):
        forked(partial(forges, text))
