"""The model's code may end the process that measures it: the command says where, and goes on.

Processes are real ones, each with PyTorch anew; what ends them is too.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protrain_plan.isolated.culprit import explained
from protrain_plan.profiling.structure.whereabouts import REHEARSING, Place
from protrain_runtime.contract.errors import ProtrainError
from tests.support import forked
from tests.support.commands import Result, protrain

MODEL = """
import ctypes, os, signal, sys, time
import torch
from torch import nn

class Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number):
        ctx.number = number
        if number == 1 and "{where}" == "forward":
            {act}
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.number == 1 and "{where}" == "backward":
            {act}
        return gradient, None

class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.linear = number, nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) + Act.apply(x, self.number)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def make():
    return Model(), [torch.ones(2, 8)]
"""
DEBUG = "--in-process measures where a debugger can stop"
EXTENSION = (
    f"look for what is no Python there: an extension, or memory that is used after its end; {DEBUG}"
)


def model(folder: Path, *, act: str, where: str) -> str:
    (folder / "mine.py").write_text(MODEL.format(act=act, where=where))
    return "mine.py:make"


def assert_said(result: Result, code: int, message: str, folder: Path) -> None:
    """One message, and nothing left."""
    assert (result.returncode, result.stdout, result.stderr) == (code, "", f"error: {message}\n")
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("act", "where", "code", "message"),
    [
        (
            *("ctypes.string_at(0)", "backward", 2),
            "mine.py:17: the measuring process died: SIGSEGV (segmentation fault) in the backward"
            f" of 'layers.1', while looking at the model in form keep\n  fix: {EXTENSION}",
        ),
        pytest.param(
            *("os.kill(os.getpid(), signal.SIGKILL)", "forward", 4),
            "the measuring process died: SIGKILL (killed) in the forward of 'layers.1', while"
            " looking at the model\n  fix: probably memory ran out: a smaller --batch-size or"
            " --seq-len; the model alone: --unit-by-unit",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("os._exit(3)", "forward", 2),
            "the measuring process ended with exit code 3 in the forward of 'layers.1',"
            " while looking at the model\n  fix: if it printed a traceback, that says why;"
            f" {DEBUG}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("raise ValueError('shapes differ')", "forward", 2),
            "mine.py:11: the model's code raised ValueError: shapes differ, in the forward of"
            f" 'layers.1', while finding units\n  fix: mend what raised it; {DEBUG}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("raise MemoryError('no more')", "forward", 4),
            "out of memory: no more\n  fix: a smaller --batch-size or --seq-len; the model alone:"
            " --unit-by-unit",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["SIGSEGV", "SIGKILL", "_exit", "exception", "memory"],
)
def test_what_ends_the_measuring_process_is_one_message(
    act: str, where: str, code: int, message: str, tmp_path: Path
) -> None:
    result = protrain("profile", model(tmp_path, act=act, where=where), folder=tmp_path)
    assert_said(result, code, message, tmp_path)


@pytest.mark.parametrize(
    ("act", "where", "message"),
    [
        (
            *("sys.exit(0)", "forward"),
            "mine.py:11: the model's code ended the program: sys.exit(0), in the forward of"
            " 'layers.1', while looking at the model",
        ),
        (
            *("raise ValueError('shapes differ')", "backward"),
            "mine.py:17: the model's code raised ValueError: shapes differ, in the backward of"
            " 'layers.1', while finding units in form keep",
        ),
        (
            *("torch.ones(2) @ torch.ones(3)", "backward"),
            "mine.py:17: the model's code raised RuntimeError: inconsistent tensor size, expected"
            " tensor [2] and src [3] to have the same number of elements, but got 2 and 3 elements"
            " respectively, in the backward of 'layers.1', while finding units in form keep",
        ),
    ],
    ids=["exit", "exception", "operator"],
)
def test_what_the_models_code_raises_is_one_message(
    act: str, where: str, message: str, tmp_path: Path
) -> None:
    name = model(tmp_path, act=act, where=where)
    result = forked.protrain("profile", name, "--in-process", folder=tmp_path)
    assert_said(result, 2, f"{message}\n  fix: mend what raised it; {DEBUG}", tmp_path)


@pytest.mark.parametrize("place", [Place(doing=REHEARSING), Place(form="full")])
def test_what_is_raised_under_a_plan_alone_is_not_told_as_the_models_fault(place: Place) -> None:
    with (
        pytest.raises(ProtrainError) as caught,
        explained(lambda: place, planned=lambda: place.planned),
    ):
        raise ValueError("shapes differ")
    assert caught.value.message == (
        "the model ran by itself, and as a plan lets it run its code raised ValueError: shapes"
        f" differ,{place}"
    )
    assert caught.value.fix == (
        f"if it does not raise that by itself, please report it, with the model; {DEBUG}"
    )


SLEEP = "open('asleep', 'w').write(str(os.getpid())); time.sleep(200)"


@contextmanager
def asleep(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command in a group of its own, and the process that sleeps in the model's forward."""
    command = [sys.executable, "-m", "protrain_plan.cli", "profile"]
    process = subprocess.Popen(
        [*command, model(folder, act=SLEEP, where="forward"), "-o", "p.yaml"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    told = folder / "asleep"
    try:
        while not (told.exists() and told.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        yield process, int(told.read_text())
    finally:
        process.kill()
        process.communicate()


def ended(pid: int) -> bool:
    """Whether a process is gone; one that nobody waited for is as good as that."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc")
@pytest.mark.parametrize(
    ("end", "code"), [("ctrl-c", 130), ("interrupt", 130), ("kill", -signal.SIGKILL)]
)
def test_no_process_and_no_file_is_left(end: str, code: int, tmp_path: Path) -> None:
    """Whether a terminal interrupts both, or someone ends the command alone."""
    with asleep(tmp_path) as (process, measuring):
        assert measuring != process.pid
        if end == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
        assert process.communicate(timeout=30)[1] == ""
        assert process.returncode == code
        while not ended(measuring):
            time.sleep(0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asleep", "mine.py"]
