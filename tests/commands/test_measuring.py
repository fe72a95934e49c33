"""The model's code may end the process that measures it: the command says where, and goes on.

Processes are real ones, each with PyTorch anew; what ends them is too.
"""

import os
import signal
import subprocess
import sys
import time
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protrain_plan.checking.reestimate import said
from protrain_plan.isolated.user_frame import explained
from protrain_plan.profiling.structure import whereabouts
from protrain_plan.profiling.structure.whereabouts import REHEARSING, Place
from protrain_runtime.contract.errors import ProtrainError
from tests.support import forked
from tests.support.commands import protrain
from tests.support.messages import Speaker

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


def model(folder: Path, *, act: str, where: str) -> str:
    (folder / "mine.py").write_text(MODEL.format(act=act, where=where))
    return "mine.py:make"


SIGNAL = "os.kill(os.getpid(), signal.SIGKILL)"
ENDS = {
    "SIGSEGV": ("ctypes.string_at(0)", "backward", 2),
    "SIGKILL": (SIGNAL, "forward", 4),
    "_exit": ("os._exit(3)", "forward", 2),
    "exception": ("raise ValueError('shapes differ')", "forward", 2),
    "memory": ("raise MemoryError('no more')", "forward", 4),
    "exit, in process": ("sys.exit(0)", "forward", 2),
    "exception, in process": ("raise ValueError('shapes differ')", "backward", 2),
    "operator, in process": ("torch.ones(2) @ torch.ones(3)", "backward", 2),
    "torch.func, in process": ("torch.func.grad(torch.sum)(torch.ones(2))", "forward", 2),
}
AT_NIGHT = ("SIGKILL", "_exit", "exception", "memory")


@pytest.mark.nightly("SIGSEGV", "exception, in process")
@pytest.mark.parametrize(
    "end", [pytest.param(e, marks=[pytest.mark.slow] if e in AT_NIGHT else []) for e in ENDS]
)
def test_what_ends_the_measuring_process_is_one_message(
    end: str, tmp_path: Path, assert_says: Speaker
) -> None:
    """And nothing is left."""
    act, where, code = ENDS[end]
    name = model(tmp_path, act=act, where=where)
    if "in process" in end:
        result = forked.protrain("profile", name, "--in-process", folder=tmp_path)
    else:
        result = protrain("profile", name, folder=tmp_path)
    assert (result.returncode, result.stdout) == (code, "")
    assert_says(result.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    "place", [Place(doing=REHEARSING), Place(form="full")], ids=["rehearsing", "full"]
)
def test_what_is_raised_under_a_plan_alone_is_not_told_as_the_models_fault(
    place: Place, assert_says: Speaker
) -> None:
    with (
        pytest.raises(ProtrainError) as caught,
        explained(lambda: place, planned=lambda: place.planned),
    ):
        raise ValueError("shapes differ")
    assert_says([caught.value.message, caught.value.fix or ""])


class SilentError(ValueError):
    """An error of a model's, whose words are a mistake themselves."""

    def __str__(self) -> str:
        raise KeyError


@pytest.mark.parametrize("error", [SilentError(), CancelledError("late"), GeneratorExit()])
def test_whatever_a_model_raises_is_one_message(error: BaseException) -> None:
    name = type(error).__name__
    with pytest.raises(ProtrainError, match=f"raised {name}") as caught, explained(str):
        raise error
    assert Path(caught.value.source or "").samefile(__file__)
    assert name in said(error)


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
        said = "" if end == "kill" else "error: interrupted\n"
        assert process.communicate(timeout=30)[1].endswith(said)
        assert process.returncode == code
        while not ended(measuring):
            time.sleep(0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asleep", "mine.py"]


@pytest.mark.parametrize(
    ("seconds", "rest"),
    [(1.2, "5 s"), (41.0, "40 s"), (88.0, "90 s"), (100.0, "2 min"), (1000.0, "17 min")],
)
def test_what_is_left_is_told_and_is_no_part_of_the_place(seconds: float, rest: str) -> None:
    told = whereabouts.with_rest(REHEARSING, seconds)
    assert told == f"{REHEARSING}, about {rest} to go"
    assert Place(doing=whereabouts.pass_of(told)).planned
