"""The benchmarks run: one case each here, whole grids when somebody asks for them."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_one_case_of_the_planners_grid(tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    case = ("--shapes", "llama-2-7b", "--machines", "rtx4090", "--budgets", "1", "--jobs", "1")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner", *case, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert len(found["cases"]) == 1
    assert 0 <= found["cases"][0]["gap"] <= 0.01
    assert "| llama-2-7b | rtx4090 |" in out.with_suffix(".md").read_text()


def test_accuracy_of_two_small_models(tmp_path: Path) -> None:
    """Bytes hold; seconds are written down and nothing is asked of them."""
    out = tmp_path / "accuracy.json"
    command = ("-m", "benchmarks.accuracy", "--quick", "--steps", "1", "--out", str(out))
    result = subprocess.run(
        [sys.executable, *command, "--work", str(tmp_path / "work")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert sorted(found["cases"]) == ["convolutional", "pyramid"]
    for case in found["cases"].values():
        assert case["profile"]["refused"] == ""
        assert sorted(case["time"]) == sorted(case["memory"]) == ["keep", "recompute"]
        for memory in case["memory"].values():
            assert memory["slot_under"] == 0
            assert memory["slot_over"] <= 2**20
            assert abs(memory["system_peak"] / memory["ledger"] - 1) <= 0.05
    assert "| peak, never under-predicted | in no slot of any step | held | 4 of 4 |" in (
        out.with_suffix(".md").read_text()
    )
