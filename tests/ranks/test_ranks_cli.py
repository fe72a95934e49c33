"""`torchrun` starts what users start: the command and the example."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protrain_plan.planning.outcome import Solved
from protrain_runtime.contract.program.compiling import program_of
from protrain_runtime.contract.program.memory import promised_bytes
from protrain_runtime.contract.records import write_plan
from protrain_runtime.contract.records.plan import PERSISTENT, Budgets, Placement
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import plan as solve
from tests.support.runtime_cases import profiled_here

ROOT = Path(__file__).parents[2]
PLACES: tuple[Placement, ...] = (
    PERSISTENT,
    Placement(tier="device"),
    Placement(tier="disk", keep_gathered=True),
)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    profile = profiled_here("tiny-llama", folder)
    found = solve(profile, Budgets(device=2**40, host=0, disk=2**40))
    assert isinstance(found, Solved)
    units = [
        replace(unit, states=PLACES[number % 3]) for number, unit in enumerate(found.plan.units)
    ]
    plan = with_settings(found.plan, units=tuple(units), num_devices=2)
    peak = replace(
        plan.prediction.peak_bytes,
        device=max(promised_bytes(plan, profile)),
        disk=program_of(plan, profile).tier_bytes("disk"),
    )
    write_plan(with_settings(plan, peak_bytes=peak), folder / "plan.yaml")
    return folder / "plan.yaml"


def started(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def torchrun(*arguments: str, folder: Path) -> str:
    done = started(*arguments, folder=folder)
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


FAILS_IN_A_STEP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from tests.support.routed_model import SHARED, batch, made, step

dist.init_process_group("gloo")
rank = dist.get_rank()
model, optimizer = made(rank, 2, SHARED, limit_s=3600)
step(model, optimizer, 0, rank)
if rank == 1:
    model.get_submodule("blocks.1").register_forward_hook(lambda *_: 1 / 0)
step(model, optimizer, 1, rank)
"""


@pytest.mark.nightly  # by day `test_ranks_failures` has ranks that fail
def test_the_launcher_ends_the_peers_of_a_rank_that_failed(tmp_path: Path) -> None:
    """Long before their limit of waits."""
    (tmp_path / "fails.py").write_text(FAILS_IN_A_STEP)
    done = started(str(tmp_path / "fails.py"), folder=tmp_path)
    assert done.returncode != 0
    assert "ZeroDivisionError: division by zero" in done.stderr
