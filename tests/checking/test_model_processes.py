"""A model's code runs in a process of its own: however that ends, its plan has one finding.

The command itself checks a repository in which a plan that holds is among the others.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.checking_cases import PROFILE, commit, offloading

MODELS = """
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.mean()


def good():
    print("not in the report")
    subprocess.run(["true"], check=True)
    return Model(), [torch.ones(2, int(os.environ["WIDTH"]))]


def exits():
    sys.exit(0)


def exits_hard():
    os._exit(0)


def exits_with_a_thread():
    threading.Thread(target=time.sleep, args=(10**6,)).start()
    sys.exit(0)


def aborts():
    os.abort()


def segfaults():
    ctypes.string_at(0)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def raises():
    raise RuntimeError("\\n::error::\\x1b[2J")


def gives_something_else():
    return 1, 2


def leaves_a_process():
    process = subprocess.Popen(["sleep", "1000"])
    (HERE / "left.pid").write_text(str(process.pid))
    sys.exit(0)


def fills_the_memory():
    kept = []
    while True:
        kept.append(bytearray(b"x") * 2**26)


def segfaults_in_its_forward():
    model = Model()
    model.register_forward_pre_hook(lambda *_: segfaults())
    return model, [torch.ones(2, 8)]


def sleeps():
    time.sleep(10**6)


def spins():
    while True:
        pass
"""
WORDS = {
    "exits": "its code exited: sys.exit(0) (at models.py:",
    "exits_hard": "its process ended with exit code 0",
    "exits_with_a_thread": "its code exited: sys.exit(0) (at models.py:",
    "aborts": "its process died: SIGABRT (aborted) (at models.py:",
    "segfaults": "its process died: SIGSEGV (segmentation fault) (at models.py:",
    "is_killed": "its process died: SIGKILL (killed)",
    "raises": "RuntimeError: ::error::\x1b[2J (at models.py:",
    "gives_something_else": "models:gives_something_else: the factory returned tuple, not",
    "leaves_a_process": "its code exited: sys.exit(0) (at models.py:",
    "fills_the_memory": "MemoryError: (at models.py:",
    "segfaults_in_its_forward": "and can no longer be estimated: its process died: SIGSEGV (",
}
"""The finding of each, in a run where memory is limited to 1 GiB."""
SLOW = {
    "sleeps": "its process did not finish within 2 s (at models.py:",
    "spins": "its process did not finish within 2 s (at models.py:",
    "exits": WORDS["exits"],
}


def findings(folder: Path, *arguments: str, code: int = 1) -> dict[str, dict[str, Any]]:
    result = forked.protrain("check", "--json", *arguments, folder=folder, WIDTH="8")
    assert (result.returncode, result.stderr) == (code, ""), result
    return {
        Path(finding["plan"]).parent.name: finding
        for finding in json.loads(result.stdout)["findings"]
        if finding["code"] == "FPR001"
    }


def write(folder: Path, *names: str) -> None:
    (folder / "models.py").write_text(MODELS)
    for name in names:
        workload = replace(PROFILE.workload, model=f"models:{name}", model_config="")
        profile = replace(PROFILE, workload=workload, method="estimated")
        commit(folder / "plans" / name, offloading(profile), profile)


@pytest.mark.nightly
def test_however_a_model_s_process_ends_its_plan_fails(tmp_path: Path) -> None:
    write(tmp_path, *WORDS)
    (tmp_path / "plans/good").mkdir()
    made = "plans/good/profile.yaml"
    for command in (
        ("profile", "models:good", "--on", "cpu", "-o", made),
        ("plan", made, "--device-memory", "1GiB", "-o", "plans/good/plan.yaml"),
    ):
        result = forked.protrain(*command, folder=tmp_path, WIDTH="8")
        assert result.returncode == 0, result.stderr
    found = findings(tmp_path, "--model-memory", "1GiB")
    assert found.keys() == {*WORDS, "good"}
    assert found["good"]["verdict"] == "passed", found["good"]
    for name, words in WORDS.items():
        assert found[name]["verdict"] == "failed", found[name]
        assert words in found[name]["problem"], found[name]
        assert found[name]["fix"]
    assert "--model-memory" in found["fills_the_memory"]["fix"]
    left = (tmp_path / "left.pid").read_text()
    status = Path(f"/proc/{left}/stat")
    assert not status.exists() or " Z " in status.read_text()


@pytest.mark.slow
def test_a_model_that_does_not_end_fails(tmp_path: Path) -> None:
    """And others are looked at."""
    write(tmp_path, *SLOW)
    found = findings(tmp_path, "--time-limit", "2")
    for name, words in SLOW.items():
        assert found[name]["problem"].startswith(f"the model cannot be built: {words}"), found[name]
    assert "--time-limit" in found["sleeps"]["fix"]
