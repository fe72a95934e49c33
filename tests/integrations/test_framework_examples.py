"""The examples of training in a framework are run: what they import, and what they say to type."""

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import protrain_runtime
from protrain_plan.models.sources import load_source
from protrain_plan.planning.model.problem import OVERLAPPING
from protrain_plan.planning.questions.answers import Objective, Question
from protrain_plan.planning.questions.objectives import ask
from protrain_plan.planning.search.improving import Effort
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import Budgets
from protrain_runtime.diagnostics.matching import model_fingerprint
from tests.support.estimates import model_of
from tests.support.runtime_cases import made_once, profiled_here

ROOT = Path(__file__).parents[2]
NAMES = ("transformers", "accelerate", "lightning")
EXAMPLES = [
    pytest.param(
        ROOT / f"examples/train_{name}.py",
        id=name,
        marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
    )
    for name in NAMES
]


PUBLIC = ("protrain_runtime", "protrain_runtime.integrations.", "protrain_runtime.contract.records")
"""Modules that users import. A name that ends in a dot stands for the modules below it."""


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every module that is imported and, where it is `from` it, every name; "" for none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def is_public(module: str, name: str) -> bool:
    if not module.startswith(("protrain_plan", "protrain_runtime")):
        return True
    exported = module != "protrain_runtime" or not name or name in protrain_runtime.__all__
    return exported and any(
        module.startswith(public) if public.endswith(".") else module == public for public in PUBLIC
    )


@pytest.mark.nightly(by_day=8)
@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/**/*.py")), ids=lambda file: file.stem)
def test_an_example_imports_what_is_public(file: Path) -> None:
    found = imports(ast.parse(file.read_text(encoding="utf-8")))
    assert [one for one in found if not is_public(*one)] == []


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for the model of the examples in little memory: it is the same in all of them."""

    def make(path: Path) -> None:
        profile = profiled_here(f"{ROOT / 'examples/train_transformers.py'}:factory", path.parent)
        disk = next(t.capacity_bytes for t in profile.hardware.tiers if t.name == "disk")
        question = Question(
            profile=profile,
            budgets=Budgets(device=profile.hardware.device.memory_bytes, host=0, disk=disk),
            settings=replace(OVERLAPPING, updates="after backward", micro_batches=1),
        )
        answer = ask(question, Objective(max_slowdown=2.0), effort=Effort())
        assert answer.solved is not None
        write_plan(answer.solved.plan, path)

    return made_once(tmp_path_factory, "examples.yaml", make)


def saved_names(folder: Path) -> set[str]:
    """The parameters in what an example saved."""
    (file,) = folder.glob("model.*")
    return set(load_file(file) if file.suffix == ".safetensors" else torch.load(file))


@pytest.mark.nightly(but=("accelerate",))
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_under_a_plan(example: Path, planned: Path, tmp_path: Path) -> None:
    source = load_source(f"{example}:factory")
    fingerprint = model_fingerprint(model_of(source))
    assert f"model_fingerprint: {fingerprint}" in planned.read_text()
    namespace = vars(sys.modules[f"factory in {example.stem}"])
    namespace["main"](str(planned), str(tmp_path / "trained"))
    assert saved_names(tmp_path / "trained") == set(model_of(source).state_dict())


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
