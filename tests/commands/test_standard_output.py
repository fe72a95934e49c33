"""Standard output, and what happens where it cannot be written: real processes."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protrain_runtime.contract.records import read_hardware, read_plan, read_profile
from tests.support.checking_cases import commit
from tests.support.commands import PROTRAIN, without_progress
from tests.support.forked import Result, protrain

FACTORY = """
import os, sys, torch
from torch import nn
def factory():
    print("printed by the model's code")
    os.system("echo printed by a program that it starts")
    return Model(), [torch.zeros(2, 8)]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, values):
        for layer in self.layers:
            values = layer(values)
        return values.sum()
"""
TO_A_FILE = {
    "plan": ("plan", "profile.yaml", "-o"),
    "programme": ("plan", "profile.yaml", "-o", "other.yaml", "--lp"),
    "page": ("report", "plan.yaml", "-o"),
    "trace": ("simulate", "plan.yaml", "--trace"),
    "configuration": ("export", "plan.yaml", "--to", "fsdp2", "-o"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    commit(tmp_path)
    return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize("what", TO_A_FILE)
def test_every_file_can_be_standard_output(what: str, folder: Path) -> None:
    """It holds the file and nothing else; what people read goes to standard error."""
    arguments = TO_A_FILE[what]
    named = protrain(*arguments, "file", folder=folder)
    assert (named.returncode, named.stderr) == (0, "")
    for name in ("-", "/dev/stdout") if what == "configuration" else ("-",):
        found = protrain(*arguments, name, folder=folder)
        assert found.returncode == 0
        assert found.stdout == (folder / "file").read_text(encoding="utf-8")
        where = "to standard output" if name == "-" else name
        said = named.stdout.replace("wrote file", f"wrote {where}")
        took = re.compile(r",\s[0-9.]+\sm?s\)")  # to solve it
        assert took.sub("", found.stderr) == took.sub("", said)


def test_with_json_the_file_has_standard_output_for_itself(folder: Path) -> None:
    found = protrain("plan", "profile.yaml", "--json", "-o", "-", folder=folder)
    assert json.loads(found.stderr)["status"] == "optimal"
    (folder / "found.yaml").write_text(found.stdout)
    assert read_plan(folder / "found.yaml").units


@pytest.mark.nightly
def test_where_no_plan_fits_standard_output_is_empty(folder: Path) -> None:
    arguments = ("plan", "profile.yaml", "--device-memory", "1MB", "-o", "-")
    found = protrain(*arguments, folder=folder)
    assert (found.returncode, found.stdout) == (3, "")
    assert found.stderr.startswith("no plan fits: ")


def test_what_a_model_s_code_prints_is_no_part_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    arguments = ("profile", "model.py:factory", "--on", "cpu", "--optimizer", "sgd", "-o", "-")
    found = protrain(*arguments, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    (tmp_path / "found.yaml").write_text(found.stdout)
    assert read_profile(tmp_path / "found.yaml").workload.model == "model.py:factory"
    for line in ("printed by the model's code", "printed by a program that it starts"):
        assert line in found.stderr.splitlines()


@pytest.mark.slow
def test_what_is_measured_can_be_standard_output(tmp_path: Path) -> None:
    found = protrain("hardware", "probe", "-o", "-", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    (tmp_path / "found.yaml").write_text(found.stdout)
    assert read_hardware(tmp_path / "found.yaml").device.kind == "cpu"
    (tmp_path / "model.py").write_text(FACTORY)
    arguments = ("profile", "model.py:factory", "--steps", 1, "--optimizer", "sgd", "-o", "-")
    measured = protrain(*arguments, folder=tmp_path)
    assert measured.returncode == 0, measured.stderr
    (tmp_path / "profile.yaml").write_text(measured.stdout)
    pinned = ("--pin", "layers.1: recompute")
    planned = protrain("plan", "profile.yaml", *pinned, "-o", "plan.yaml", folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    ran = protrain("run", "plan.yaml", "--record", "-", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["events"]


def test_a_pipe_of_the_shell_takes_a_file(folder: Path) -> None:
    script = f"{PROTRAIN} export plan.yaml --to trl -o >(cat > found) && wait && cat found"
    found = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    said, _, text = found.stdout.partition("per_device_train_batch_size")
    assert said.startswith("wrote /dev/fd/")
    assert text.startswith(": 1\n")


# --- where it cannot be written -------------------------------------------------------------------


def run(*arguments: str, folder: Path, stdout: int = subprocess.PIPE, **environment: str) -> Result:
    result = subprocess.run(
        [PROTRAIN, *arguments],
        cwd=folder,
        env=os.environ | environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
    )
    result.stderr = without_progress(result.stderr)
    return result


@pytest.mark.nightly(but=("hardware list --json",))
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("arguments", ["show plan.yaml", "plan --help", "hardware list --json"])
def test_a_full_disk_is_an_error(arguments: str, folder: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    found = run(*arguments.split(), folder=folder, stdout=descriptor)
    os.close(descriptor)
    problem = "error: standard output: cannot be written: No space left on device\n"
    assert (found.returncode, found.stderr) == (2, problem)


@pytest.mark.nightly("show plan.yaml-141")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [("show plan.yaml", 141), ("export plan.yaml --to trl -o -", 141), ("plan --help", 1)],
)
def test_a_reader_that_has_gone_ends_it_quietly(arguments: str, code: int, folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    found = run(*arguments.split(), folder=folder, stdout=writing)
    os.close(writing)
    assert (found.returncode, found.stderr) == (code, "")


@pytest.mark.nightly
def test_characters_that_an_encoding_lacks_are_shown_as_escapes(tmp_path: Path) -> None:
    commit(tmp_path / "pl\u00e4ne")
    arguments = ("check", "--records-only", "pl\u00e4ne")
    found = run(*arguments, folder=tmp_path, PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.splitlines()[2] == "pl\\xe4ne/plan.yaml"
    name = os.fsdecode(b"\xff.yaml")
    lost = run("show", name, folder=tmp_path, PYTHONIOENCODING="ascii")
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr == "error: \\udcff.yaml: no such file\n"


def test_no_standard_output_is_none(folder: Path) -> None:
    """Written and printed text differ then: the first free descriptor is taken."""
    script = f"{PROTRAIN} export plan.yaml --to trl -o found >&- 2>&- <&-; echo $? > code"
    subprocess.run(["bash", "-c", script], cwd=folder, check=True)
    assert (folder / "code").read_text() == "0\n"
    assert (folder / "found").read_text().startswith("per_device_train_batch_size: 1\n")
    assert stat.S_ISREG((folder / "found").stat().st_mode)
