"""Kills and hard memory limits: real processes, and messages of what ran out where."""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.long_context_model import short_factory
from protrain_runtime import prepare
from protrain_runtime.contract.records import read_profile, write_plan
from protrain_runtime.contract.records.plan import (
    PERSISTENT,
    Activations,
    Placement,
    Plan,
    TierBytes,
)
from protrain_runtime.contract.records.profile import Profile
from protrain_runtime.devices.memory_meter import process_memory
from tests.support.commands import MODEL, bash, protrain
from tests.support.faults import data_limit
from tests.support.peaks import profile_file
from tests.support.runtime_cases import (
    ADAMW,
    decided,
    described_by,
    plan_for,
    plan_for_profile,
    units_of,
)

ROOT = Path(__file__).parents[2]
MIB = 2**20

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and /proc")

# --- killed ---------------------------------------------------------------------------------------


@pytest.mark.slow
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
        r"  fix: plan this workload for the available memory, and run the plan\n",
        killed.stderr,
    ), killed.stderr
    planned = answer(*run, "--memory-limit", limit)
    assert planned["losses"] == plain["losses"]
    assert planned["parameters_sha256"] == plain["parameters_sha256"]


# --- out of memory in a step ----------------------------------------------------------------------

SCRIPT = """
import resource
import torch
import protrain_runtime
from protrain_plan.models.batches import call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.models.sources import load_source
from protrain_runtime.contract.records import read_plan
from protrain_runtime.devices.memory_meter import return_freed_memory
from protrain_runtime.model.prepared import engine_of

return_freed_memory()
plan = read_plan(@plan)
source = load_source(plan.workload.model, model_config=plan.workload.model_config)
model = source.build(plan.workload)
batches = source.batches(plan.workload)
model, optimizer = protrain_runtime.prepare(model, plan, optimizer=optimizer_factory("adamw"))

def step():
    loss_of(call_model(model, next(batches))).backward()
    optimizer.step()
    optimizer.zero_grad()

def limit(what):
    if what == @slot:
        lines = open("/proc/self/status").read().splitlines()
        held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(@counted))
        resource.setrlimit(resource.@limit, (held + 65536, -1))

step()
step()
hog = torch.ones(@hog)
engine_of(model).observer = limit
try:
    with protrain_runtime.explain_memory(model, @profile):
        step()
except protrain_runtime.OutOfMemoryError as error:
    print(error)
"""

SIZE = r"\d[\d.]* (?:[KMG]i)?B"


@pytest.fixture(scope="module")
def profile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile_file(tmp_path_factory, "tiny-llama")


def offloading(profile: Profile, *, context_bytes: int) -> Plan:
    units = decided(described_by(profile), Activations(tier="disk"), Placement(tier="disk"))
    peak = TierBytes(device=30 * MIB, context=context_bytes, host=0, disk=0)
    return plan_for_profile(profile, units, peak_bytes=peak)


def message(
    folder: Path, plan: Plan, profile: Path | None, *, slot: str, data: bool = True, hog: int = 1
) -> str:
    """The message when no memory is left in `slot`."""
    write_plan(plan, folder / "plan.yaml")
    script = (
        SCRIPT.replace("@plan", repr(str(folder / "plan.yaml")))
        .replace("@profile", repr(str(profile) if profile else None))
        .replace("@slot", repr(slot))
        .replace("@limit", "RLIMIT_DATA" if data else "RLIMIT_AS")
        .replace("@counted", repr("VmData" if data else "VmSize"))
        .replace("@hog", str(hog))
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


REFUSED = r"(?:.*can't allocate memory: you tried to allocate \d+ bytes\..*|MemoryError)"
TABLE = rf"""
 {{33}}planned {{7}}there
    states +{SIZE} +0 B
    gradients +{SIZE} +{SIZE}
    chunks, swaps +{SIZE} +{SIZE}
    staging +{SIZE} +(?!0 B){SIZE}
    activations, all else +{SIZE} +{SIZE}
    in all +{SIZE} +{SIZE}"""


@pytest.mark.nightly
def test_more_than_planned(profile_path: Path, tmp_path: Path) -> None:
    plan = offloading(read_profile(profile_path), context_bytes=MIB)
    said = message(tmp_path, plan, profile_path, slot="slot 2", hog=10_000_000)
    assert re.fullmatch(
        rf"out of memory in forward of model.layers.1: {REFUSED}{TABLE}\n"
        rf"    likely: {SIZE} more than planned are asked for here: the batch is larger than the"
        " profiled one, the script or a library holds memory besides, or memory that was freed was"
        r" not given back\n"
        "  fix: profile what is trained, with its largest batch, and plan again; on a CPU call"
        r" protrain_runtime.return_freed_memory\(\) before the model is built\n",
        said,
    ), said


@pytest.mark.slow
def test_a_limit_below_the_plans_peak(profile_path: Path, tmp_path: Path) -> None:
    plan = offloading(read_profile(profile_path), context_bytes=3 * 1024 * MIB)
    said = message(tmp_path, plan, profile_path, slot="slot 8")
    assert re.fullmatch(
        rf"out of memory in backward of model.layers.2: {REFUSED}{TABLE}\n"
        rf"    likely: the process may have {SIZE} \(RLIMIT_DATA\), and the plan's step takes up to"
        r" 3.03 GiB\n"
        r"  fix: plan with a smaller --device-memory than the limit, and run that plan\n",
        said,
    ), said


@pytest.mark.slow
def test_memory_that_is_not_there_and_no_profile(profile_path: Path, tmp_path: Path) -> None:
    """Address space is refused, which is no limit of the kind that plans are made for."""
    plan = offloading(read_profile(profile_path), context_bytes=3 * 1024 * MIB)
    said = message(tmp_path, plan, None, slot="slot 2", data=False)
    assert re.fullmatch(
        rf"out of memory in forward of model.layers.1: {REFUSED}\n"
        rf"    there: states 0 B, gradients {SIZE}, chunks, swaps {SIZE}, staging {SIZE},"
        rf" activations, all else {SIZE}; planned for the whole step: 3.03 GiB at most\n"
        r"    likely: all that stands here was planned: other processes have taken memory that was"
        r" free when the run began, or \(CUDA\) what is free is in pieces too small\n"
        r"  fix: end them, or plan with a smaller --device-memory, and run that plan\n",
        said,
    ), said


# --- long texts, under a limit that only a plan with leave stays in -------------------------------

EXAMPLES = ROOT / "examples"
ROUNDING = ("rounding",)
ROOM = 64 * MIB  # one tensor of the logits' size


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_131072_tokens_train_where_nothing_exact_does(tmp_path: Path) -> None:
    """Plain PyTorch, checkpointing and the exact plan are run under the same limit, and fail."""
    script = shlex.quote(str(EXAMPLES / "long_contexts.py"))
    result = bash(f"{shlex.quote(sys.executable)} {script}", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "everything held"


def test_tiles_train_under_a_limit_that_plain_pytorch_cannot_meet(tmp_path: Path) -> None:
    """In this process, which may take so much more than it holds."""

    def step(model: Any, *, checkpointing: bool = False) -> float:
        model.checkpointing = checkpointing
        loss: torch.Tensor = model(next(iter(texts)))
        loss.backward()
        return loss.item()

    torch.manual_seed(0)
    model, texts = short_factory()
    expected = step(copy.deepcopy(model))  # and makes what a process makes once
    found = units_of(model, next(iter(texts)))
    before, *blocks, last = decided(found, Activations(form="tiled"), PERSISTENT)
    units = (before, *blocks, replace(last, activations=Activations(form="64 tiles")))
    plan = replace(plan_for(model, units), exact=False, exactness="rounding", allowed=ROUNDING)
    planned, _ = prepare(copy.deepcopy(model), plan, optimizer=ADAMW, spill_directory=tmp_path)
    with data_limit(process_memory().data_bytes + ROOM):
        for checkpointing in (False, True):
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                step(copy.deepcopy(model), checkpointing=checkpointing)
        assert step(planned) == pytest.approx(expected, rel=1e-6)
