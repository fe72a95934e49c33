"""A profile that ends early, or not, leaves the model and the machine as they were."""

import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.profiling.measured import measure_model
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.profile import Workload
from tests.support.forked import protrain
from tests.support.runtime_cases import attached, copied, differences

WORKLOAD = Workload(
    model="x", model_config="", batch_size=2, seq_len=1, dtype="float32", device="cpu", seed=0
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + nn.functional.dropout(self.norm(self.first(x)), 0.1)
        scale = 1 + random.random() + float(np.random.rand())
        return y * scale


class Model(nn.Module):
    """Running statistics, dropout, random numbers of three libraries, a buffer made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.at_call: Callable[[], None] = lambda: None
        self.at_backward: Callable[[], None] = lambda: None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.register_buffer("cache", torch.ones(3))
        for number, layer in enumerate(self.layers):
            if number == 2:
                self.at_call()
                if x.requires_grad:
                    x.register_hook(self._backward)
            x = layer(x)
        loss: Tensor = x.square().mean()
        return loss

    def _backward(self, _: Tensor) -> None:
        self.at_backward()


class At:
    """Does something in the n-th call."""

    def __init__(self, number: int, act: Callable[[], Any]) -> None:
        self.number, self.act, self.count = number, act, 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.number:
            self.act()


def fail() -> None:
    raise ZeroDivisionError("in the model's code")


def interrupt() -> None:
    """Raise KeyboardInterrupt here, again where a finalizer was next, which drops it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        while True:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def exhaust() -> None:
    torch.empty(2**55)


class EnoughError(Exception):
    """Nothing is measured after the model's part."""


def until_the_probe(what: str, _: float) -> None:
    if what.startswith("probing the machine"):
        raise EnoughError


def model_with_gradients() -> Model:
    torch.manual_seed(3)
    model = Model()
    model.layers[1].eval()
    model.embed.weight.requires_grad_(False)
    for parameter in model.layers[0].parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def state(model: Model) -> dict[str, Any]:
    """All that a profile could have changed."""
    gc.collect()
    numpy: Any = np.random.get_state()
    found: dict[str, Any] = copied(
        {
            "parameters": dict(model.named_parameters()),
            "identities": {name: id(p) for name, p in model.named_parameters()},
            "trained": {name: p.requires_grad for name, p in model.named_parameters()},
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "gradient objects": {name: id(p.grad) for name, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "buffer objects": {name: id(buffer) for name, buffer in model.named_buffers()},
            "train flags": [module.training for module in model.modules()],
            "attached": attached(model),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [str(numpy[0]), numpy[1].tolist(), *numpy[2:]],
            "threads": len(threading.enumerate()),
            "files": len(list(Path("/proc/self").glob("fd/*"))),
        }
    )
    return found


def batches() -> Iterator[Tensor]:
    while True:
        yield torch.tensor([1, 2, 3, 4])


def measured(model: Model, error: type[BaseException], folder: Path) -> None:
    before = state(model)
    with pytest.raises(error):
        measure_model(
            model,
            batches(),
            workload=WORKLOAD,
            num_steps=1,
            spill_directory=folder,
            progress=until_the_probe,
        )
    assert list(differences(state(model), before, "state")) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "machine",
    [load_hardware("cpu"), pytest.param(None, marks=pytest.mark.slow)],
    ids=["of a machine", "and the machine is probed"],
)
def test_the_model_is_the_same_after_its_profile(machine: Hardware | None, tmp_path: Path) -> None:
    model = model_with_gradients()
    before = state(model)
    profile = measure_model(
        model,
        batches(),
        workload=WORKLOAD,
        num_steps=1,
        spill_directory=tmp_path,
        progress=lambda *_: None,
        machine=machine,
    )
    assert len(profile.units) == 5
    assert list(differences(state(model), before, "state")) == []
    assert list(tmp_path.iterdir()) == []


NUM_CALLS = 43
"""Calls of the model's forward, in a whole profile of one step per form."""


@pytest.mark.nightly
def test_the_calls_that_the_other_tests_end_in_are_those_of_a_profile(tmp_path: Path) -> None:
    model = model_with_gradients()
    counting = At(0, fail)
    model.at_call = counting
    measured(model, EnoughError, tmp_path)
    assert counting.count == NUM_CALLS


ENDS: dict[str, tuple[str, Callable[[], None], type[BaseException]]] = {
    "an exception in a forward": ("at_call", fail, ZeroDivisionError),
    "an exception in a backward": ("at_backward", fail, ZeroDivisionError),
    "Ctrl-C": ("at_call", interrupt, KeyboardInterrupt),
    "no memory": ("at_call", exhaust, RuntimeError),
}
CALLS = {
    "an exception in a forward": range(1, NUM_CALLS + 1),
    "an exception in a backward": (1, 2, 3, 4, 9),
    "Ctrl-C": (1, 25, 26, NUM_CALLS),
    "no memory": (1, 25, 26, NUM_CALLS),
}
BY_DAY = {
    *(("an exception in a forward", call) for call in (1, 25, 30)),
    *(("Ctrl-C", 26), ("no memory", 25), ("no memory", NUM_CALLS)),
}


@pytest.mark.parametrize(
    ("end", "call"),
    [
        pytest.param(end, call, marks=() if (end, call) in BY_DAY else pytest.mark.slow)
        for end, calls in CALLS.items()
        for call in calls
    ],
)
def test_a_profile_that_ends_early_leaves_the_model_as_it_was(
    end: str, call: int, tmp_path: Path
) -> None:
    place, act, error = ENDS[end]
    model = model_with_gradients()
    setattr(model, place, At(call, act))
    measured(model, error, tmp_path)


FACTORY = """
import torch
from tests.profiling.test_interrupted import At, Model, {act}

def make():
    model = Model()
    model.at_call = At(25, {act})
    return model, [torch.tensor([1, 2, 3, 4])]
"""


@pytest.mark.nightly(but=("exhaust-4-error: out of memory: ",))
@pytest.mark.parametrize(("act", "code", "said"), [
    ("interrupt", 130, ""),
    pytest.param("exhaust", 4, "error: out of memory: ", marks=pytest.mark.slow),
    ("fail", 2, "under a plan its code raised ZeroDivisionError: in the model's code"),
])  # fmt: skip
def test_the_command_leaves_no_file(act: str, code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY.format(act=act))
    (tmp_path / "spill").mkdir()
    command = ("profile", "mine:make", "--in-process", "-o", "p.yaml", "--spill-directory", "spill")
    result = protrain(*command, folder=tmp_path)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine.py", "spill"]
