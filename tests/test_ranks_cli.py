"""`torchrun` starts what users start: the command and the example."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.planning.outcome import Solved
from protrain_plan.planning.planner import plan as solve
from protrain_plan.profiling.measured import measure
from protrain_plan.records import write_plan
from protrain_plan.records.plan import Budgets, Buffer, Offload, Persistent, Placement

ROOT = Path(__file__).parent.parent
PLACES: tuple[Placement, ...] = (Persistent(), Offload(tier="device"), Buffer(tier="disk"))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    profile = measure(
        load_source("tiny-llama"),
        batch_size=4,
        seq_len=64,
        dtype="float32",
        device="cpu",
        seed=0,
        num_steps=1,
        spill_directory=folder,
        text=None,
        progress=lambda *_: None,
        machine=load_hardware("cpu"),
    )
    found = solve(profile, Budgets(device=2**40, host=0, disk=2**40))
    assert isinstance(found, Solved)
    units = [
        replace(unit, states=PLACES[number % 3]) for number, unit in enumerate(found.plan.units)
    ]
    write_plan(replace(found.plan, units=tuple(units), num_devices=2), folder / "plan.yaml")
    return folder / "plan.yaml"


def torchrun(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_run_verifies_two_ranks_against_ddp(plan_file: Path, tmp_path: Path) -> None:
    protrain = str(Path(sys.executable).parent / "protrain")
    run = ["--no-python", protrain, "run", str(plan_file), "--steps", "3", "--verify"]
    told = torchrun(*run, folder=tmp_path)
    assert told.count("bit for bit") + told.count("equal bits") + told.count("bitwise") == 1, told


@pytest.mark.slow
def test_the_example_continues_where_it_ended(plan_file: Path, tmp_path: Path) -> None:
    script = str(ROOT / "examples/train_ranks.py")
    first = torchrun(script, str(plan_file), "saved", folder=tmp_path)
    second = torchrun(script, str(plan_file), "saved", folder=tmp_path)
    assert [line.split(":")[0] for line in (first + second).splitlines()] == [
        f"step {number}" for number in range(10)
    ]
