"""What is left when a process is killed, and what a hard memory limit does: real processes."""

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from protrain_runtime.contract.records import read_plan, write_plan, write_profile
from protrain_runtime.contract.records.plan import Offload, Swap
from protrain_runtime.contract.records.profile import Workload
from protrain_runtime.diagnostics.matching import model_fingerprint
from tests.support.commands import MODEL, PROTRAIN, protrain
from tests.support.planning_cases import cpu, decoder
from tests.support.runtime_cases import build, decided, described, plan_of

ROOT = Path(__file__).parents[2]


def plan_file(folder: Path) -> Path:
    """A plan that spills everything of a model, which runs in the repository's root."""
    path = folder / "plan.yaml"
    plan = plan_of(
        decided(described("functional"), Swap(tier="disk"), Offload(tier="disk")),
        fingerprint=model_fingerprint(build("functional")),
        workload=Workload(
            model="tests.support.functional_model:factory",
            model_config="",
            batch_size=4,
            seq_len=64,
            dtype="float32",
            device="cpu",
            seed=0,
        ),
    )
    write_plan(plan, path)
    return path


def spill_files(pid: int, folder: Path) -> list[Path]:
    """The process's open files in the folder, which have no names any more."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue  # closed meanwhile
        if target.startswith(str(folder)) and target.endswith(" (deleted)"):
            found.append(descriptor)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_killed_run_leaves_no_file(seed: int, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    plan = plan_file(tmp_path)
    process = subprocess.Popen(
        [PROTRAIN, "run", str(plan), "--steps", "1000000", "--spill-directory", str(spill)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        written = 0  # bytes: how far the spill file reaches when steps swap
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            for descriptor in spill_files(process.pid, spill):
                written = descriptor.stat().st_size
            if written > 4 * 700_000:  # more than the states: steps are running
                break
            time.sleep(0.01)
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert written > 0
        time.sleep(random.Random(seed).random() * 0.3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
        assert process.stderr is not None
        process.stderr.close()
    assert process.returncode == -signal.SIGKILL
    assert list(spill.iterdir()) == []


STOPS_WHILE_WRITING = """
import os, sys, time
def stop(descriptor):
    print("in the middle", flush=True)
    time.sleep(60)
os.fsync = stop
from protrain_plan.cli import main
main()
"""


def test_planning_killed_while_it_writes_leaves_the_old_plan(tmp_path: Path) -> None:
    write_profile(decoder(cpu(), blocks=3), tmp_path / "profile.yaml")
    assert protrain("plan", "profile.yaml", folder=tmp_path).returncode == 0
    plan = tmp_path / "plan.yaml"
    before, read = plan.read_bytes(), read_plan(plan)
    arguments = ["plan", "profile.yaml", "--solver", "offload-all"]
    process = subprocess.Popen(
        [sys.executable, "-c", STOPS_WHILE_WRITING, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    process.kill()
    process.wait(timeout=30)
    process.stdout.close()
    assert plan.read_bytes() == before
    assert protrain(*arguments, folder=tmp_path).returncode == 0
    assert read_plan(plan) != read
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml", "profile.yaml"]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA")
def test_under_a_hard_limit_plain_torch_dies_and_the_plan_trains(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def answer(*arguments: object, code: int = 0) -> Any:
        result = protrain(*arguments, "--json", folder=tmp_path)
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    answer("profile", "config.json", "--batch-size", 2, "--seq-len", 128, "--steps", 1)
    peak = answer("plan", "profile.yaml")["peak_bytes"]
    least = answer("plan", "profile.yaml", "--device-memory", "1MiB", code=3)
    smallest = least["smallest_budget_bytes"]
    ample = peak["device"] + peak["context"]
    assert smallest < 0.7 * ample
    limit = smallest + (ample - smallest) // 4
    solved = answer("plan", "profile.yaml", "--device-memory", limit)
    assert solved["peak_bytes"]["device"] + solved["peak_bytes"]["context"] <= limit

    run = ("run", "plan.yaml", "--steps", 3)
    plain = answer(*run, "--plain")
    killed = protrain(*run, "--plain", "--memory-limit", limit, folder=tmp_path)
    assert killed.returncode == 4
    assert killed.stdout == ""
    assert re.fullmatch(
        r"error: out of memory: .*\n"
        r"  fix: plan this workload for the memory there is, and run the plan\n",
        killed.stderr,
    ), killed.stderr
    planned = answer(*run, "--memory-limit", limit)
    assert planned["losses"] == plain["losses"]
    assert planned["parameters_sha256"] == plain["parameters_sha256"]
