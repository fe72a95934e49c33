"""The examples of training in a framework are run: what they import, and what they say to type."""

import ast
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.objectives import Objective, Question, ask
from protrain_plan.planning.search import Effort
from protrain_plan.profiling.measured import measure
from protrain_plan.records import write_plan
from protrain_plan.records.plan import Budgets
from protrain_runtime.fingerprint import model_fingerprint
from tests.runtime_cases import made_once

ROOT = Path(__file__).parent.parent
NAMES = ("transformers", "accelerate", "lightning")
EXAMPLES = [
    pytest.param(
        ROOT / f"examples/train_{name}.py",
        id=name,
        marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
    )
    for name in NAMES
]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for the model of the examples in little memory: it is the same in all of them."""

    def make(path: Path) -> None:
        profile = measure(
            load_source(f"{ROOT / 'examples/train_transformers.py'}:factory"),
            batch_size=4,
            seq_len=64,
            dtype="float32",
            device="cpu",
            seed=0,
            num_steps=1,
            spill_directory=path.parent,
            text=None,
            progress=lambda *_: None,
            machine=load_hardware("cpu"),
        )
        disk = next(t.capacity_bytes for t in profile.hardware.tiers if t.name == "disk")
        question = Question(
            profile=profile,
            budgets=Budgets(device=profile.hardware.device.memory_bytes, host=0, disk=disk),
            updates="after backward",
            micro_batches=1,
            pins=(),
        )
        answer = ask(question, Objective(max_slowdown=2.0), effort=Effort())
        assert answer.solved is not None
        write_plan(answer.solved.plan, path)

    return made_once(tmp_path_factory, "examples.yaml", make)


def saved_names(folder: Path) -> set[str]:
    """The parameters in what an example saved."""
    (file,) = folder.glob("model.*")
    return set(load_file(file) if file.suffix == ".safetensors" else torch.load(file))


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_under_a_plan(example: Path, planned: Path, tmp_path: Path) -> None:
    source = load_source(f"{example}:factory")
    fingerprint = model_fingerprint(source.build())
    assert f"model_fingerprint: {fingerprint}" in planned.read_text()
    namespace = vars(sys.modules[f"factory in {example.stem}"])
    namespace["main"](str(planned), str(tmp_path / "trained"))
    assert saved_names(tmp_path / "trained") == set(source.build().state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_what_an_example_says_to_type_works(example: Path, tmp_path: Path) -> None:
    said = ast.get_docstring(ast.parse(example.read_text()))
    assert said is not None
    commands = said.splitlines()[2:]
    assert [command.split()[0] for command in commands] == ["protrain", "protrain", "python"]
    for command in commands:
        words = shlex.split(command.replace("examples/", f"{ROOT}/examples/"))
        program = ["-m", "protrain_plan.cli"] if words[0] == "protrain" else []
        done = subprocess.run(
            [sys.executable, *program, *words[1:]],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime")))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert saved_names(tmp_path / "trained")
