"""The benchmarks run: one case each here, whole grids when somebody asks for them."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy, front, grid, launching, pipeline, planner, published, stages
from benchmarks.gpu import parts as gpu
from benchmarks.gpu.suites import CARD, DRY, SHORT, Suite
from benchmarks.pages import quantile
from benchmarks.peers.registry import ADAPTERS
from benchmarks.peers.tables import markdown
from benchmarks.peers.work import Work
from benchmarks.published_runs import ARCHITECTURES
from benchmarks.runner import RESULTS
from protrain_plan.hardware.catalogue import load_hardware
from tests.emulated import building
from tests.support.cards import need_compiler
from tests.support.commands import ran


def _run(*arguments: str) -> str:
    result = ran(sys.executable, "-m", *arguments, timeout=7200)
    assert result.returncode == 0, result.stderr
    return result.stdout


PAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "accuracy": accuracy.page,
    "front": front.page,
    "launching": launching.page,
    "pipeline": pipeline.page,
    "planner": planner.page,
    "published": published.page,
    "stages": stages.page,
    **{name: partial(markdown, title=name) for name in ("cpu", "gpu")},
}
"""The function that makes a page of each file of results."""
RESULTS_OF_CODE = [path for path in sorted(RESULTS.glob("*.json")) if path.stem in PAGES]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "words", "count"),
    [
        ("planner", ["h100-sxm: llama-3.1-8b"], 1),
        ("front", ["rtx-3090: gpt2-xl"], 1),
        ("launching", ["OE"], 1),
        ("published", ["scratch-gpt2"], 1),
        ("stages", ["torchtitan"], 1),
        ("accuracy", ["pyramid"], 7),
    ],
)
def test_a_benchmark_runs_and_writes_its_page(
    name: str, words: list[str], count: int, tmp_path: Path
) -> None:
    """One case here, and whole tables when somebody asks for them."""
    out = tmp_path / f"{name}.json"
    files = ("--out", str(out), "--work", str(tmp_path / "work"), "--busy")
    said = _run(f"benchmarks.{name}", *files, "--only", *words)
    assert said.endswith("every cell has an outcome\n")
    document = json.loads(out.read_text())
    assert len(document["cells"]) >= count
    assert {cell["status"] for cell in document["cells"].values()} == {"ran"}
    assert out.with_suffix(".md").read_text() == PAGES[name](document)


@pytest.mark.parametrize("path", RESULTS_OF_CODE, ids=lambda path: path.stem)
def test_committed_tables_follow_from_committed_results(path: Path) -> None:
    document = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == PAGES[path.stem](document)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_cases_of_the_planners_grid_keep_what_plans_promise() -> None:
    """Bounds are below, and baselines above."""
    for case in grid.sample(30):
        found = planner.solved(**asdict(case))
        assert found["lower_bound_seconds"] <= found["step_seconds"], case
        for name, seconds in found["baseline_seconds"].items():
            assert seconds is None or found["step_seconds"] <= seconds * 1.005, (case, name)


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.timeout(1800)
def test_a_dry_run_of_the_gpu_benchmark(tmp_path: Path) -> None:
    """Every cell runs, or says what it lacks; the same command again has nothing left to do."""
    need_compiler("nothing of the GPU benchmark is tried")
    building.load()  # compiled once, and not in the time of a cell
    out = ("--dry-run", "--out", str(tmp_path))
    assert _run("benchmarks.gpu", *out).endswith("every cell has an outcome\n")
    first = json.loads((tmp_path / "gpu.json").read_text())
    lacking = ("is not installed", "no code for", "parameters in place", "CUDA's sanitizer")
    for key, cell in first["cells"].items():
        match cell["status"], cell.get("reason", ""):
            case "skipped", reason:
                assert any(words in reason for words in (*lacking, "needs ")), reason
            case "did not fit", _:  # peers' larger batch
                assert key.startswith("train/") and "protrain-plan" not in key
            case "refused", _:
                assert " 100MiB" in key
            case status, reason:
                assert status == "ran", (key, reason)
    page = (tmp_path / "gpu.md").read_text()
    assert "**DRY RUN, on an emulated device: nothing here is a measurement of speed.**" in page
    assert "| 120MiB | equal bits | equal bits |" in page
    _run("benchmarks.gpu", *out, "--minutes", "0")
    assert json.loads((tmp_path / "gpu.json").read_text())["cells"] == first["cells"]


@pytest.mark.slow
def test_every_peer_runs_on_a_cpu(tmp_path: Path) -> None:
    assert _run("benchmarks.cpu", "--smoke", "--out", str(tmp_path)).endswith(
        "every cell has an outcome\n"
    )
    cells = json.loads((tmp_path / "cpu.json").read_text())["cells"].values()
    trained = {cell["arguments"]["adapter"]: cell for cell in cells if cell["task"] == "train"}
    assert trained.keys() == ADAPTERS.keys()
    losses = trained["plain"]["result"]["losses"]
    for name, cell in trained.items():
        # What the adapter itself says, and nothing else, keeps it from running.
        missing = ADAPTERS[name].missing(Work(**cell["arguments"]["work"]))
        expected = ("ran", None) if missing is None else ("skipped", missing)
        assert (cell["status"], cell.get("reason")) == expected
        if missing is None:  # the same model, batches and optimizer, but for rounding
            assert cell["result"]["losses"] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.parametrize("suite", [CARD, SHORT, DRY], ids=["card", "short", "dry"])
def test_cells_of_the_gpu_benchmark_need_what_precedes_them(suite: Suite) -> None:
    todo = gpu.cells(gpu.PARTS, suite)
    for number, cell in enumerate(todo):
        assert set(cell.needs) <= {one.key for one in todo[:number]}, cell.key
    assert len({cell.key for cell in todo}) == len(todo)
    kinds = {(cell.task, cell.arguments.get("adapter")) for cell in todo}
    assert kinds == {(c.task, c.arguments.get("adapter")) for c in gpu.cells(gpu.PARTS, CARD)}


def test_the_error_band_of_estimates_is_the_measured_one() -> None:
    document = json.loads((RESULTS / "accuracy.json").read_text())
    ratios = accuracy.estimate_ratios(document)
    rates = load_hardware("cpu").rates
    assert rates
    measured = [round(quantile(ratios, share), 2) for share in (0.1, 0.9)]
    assert [rates.error_low, rates.error_high] == measured


@pytest.mark.nightly
def test_the_errors_of_published_runs_are_those_of_the_benchmark() -> None:
    document = json.loads((RESULTS / "published.json").read_text())
    for architecture, names in ARCHITECTURES.items():
        ratios = [
            one.published / one.predicted
            for one in published.comparisons(document)
            if (one.kind, one.run.architecture, one.why_not) == (published.TIME, architecture, "")
        ]
        for name in names:
            if known := load_hardware(name).published_error:
                found = [round(quantile(ratios, share), 2) for share in (0.1, 0.9)]
                assert [known.low, known.high, known.runs] == [*found, len(ratios)]
