"""Work in a process of its own: what comes back, and what is said of how it ends."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from protrain_plan.isolated.pool import answers_of
from protrain_plan.isolated.process import EndedError, Limits, Tell, run
from protrain_runtime.contract.errors import OutOfMemoryError, ProtrainError

LIMITS = Limits(seconds=2, memory=2**30)


@pytest.fixture(params=["fresh", "with limits"])
def runs(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return run if request.param == "fresh" else partial(run, limits=LIMITS)


def answers(number: int, tell: Tell) -> list[Any]:
    for step in range(number):
        tell({"step": step})
    return [os.getpid() != os.getppid(), "a\u2028b"]


def refuses(_: Tell) -> None:
    raise ProtrainError("no", source="a.yaml", line=3, key="b", fix="c")


def needs_more(_: Tell) -> None:
    raise OutOfMemoryError("no memory")


def ends(code: int, _: Tell) -> None:
    os._exit(code)


def dies(_: Tell) -> None:
    ctypes.string_at(0)


def sleeps(_: Tell) -> None:
    time.sleep(1000)


def fills_the_memory(_: Tell) -> int:
    return len(bytearray(2**31))


def starts_another(file: Path, _: Tell) -> None:
    file.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    os._exit(7)


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


def test_an_end_without_an_answer_is_told_with_its_code(runs: Callable[..., Any]) -> None:
    with pytest.raises(EndedError, match="the work ended with exit code 7") as caught:
        runs(partial(ends, 7), name="the work")
    assert caught.value.code == 7
    with pytest.raises(EndedError, match=r"its process died: SIGSEGV \(segmentation") as caught:
        runs(dies)
    assert caught.value.code == -signal.SIGSEGV
    assert caught.value.line == dies.__code__.co_firstlineno + 1


def test_an_error_of_the_listener_is_raised(runs: Callable[..., Any]) -> None:
    def hear(_: object) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        runs(partial(answers, 1), hear=hear)


@pytest.mark.nightly
def test_a_process_has_no_more_time_than_it_is_given() -> None:
    with pytest.raises(EndedError, match="its process did not finish within 2 s") as caught:
        run(sleeps, limits=LIMITS)
    assert (caught.value.limit, caught.value.line) == (
        "seconds",
        sleeps.__code__.co_firstlineno + 1,
    )
    assert run(partial(answers, 0), limits=LIMITS)[0]  # others do as before


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits no memory")
def test_a_process_has_no_more_memory_than_it_is_given() -> None:
    with pytest.raises(EndedError, match="ended with exit code 1"):
        run(fills_the_memory, limits=LIMITS)
    assert run(fills_the_memory) == 2**31


def test_what_a_process_starts_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(EndedError, match="exit code 7"):
        run(partial(starts_another, tmp_path / "pid"), limits=LIMITS)
    left = int((tmp_path / "pid").read_text())
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(left)], capture_output=True, text=True)
    assert told.stdout.strip() in ("", "Z")


START = """
from protrain_plan.isolated.process import Limits, start_server, run
if __name__ == "__main__":
    start_server(["cProfile"])
    assert run(callable) and run(callable, limits=Limits(seconds=60, memory=2**30))
"""


def test_no_library_is_one_of_the_working_directory_s_name(tmp_path: Path) -> None:
    """As a file `profile.py` beside a model would be one that PyTorch imports."""
    for name in ("profile", "runpy"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/start.py").write_text(START)
    subprocess.run([sys.executable, "bin/start.py"], cwd=tmp_path, check=True)
    assert not (tmp_path / "imported").exists()


# --- pools ----------------------------------------------------------------------------------------


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
