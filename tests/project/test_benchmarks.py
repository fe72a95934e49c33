"""The benchmarks run: one case each here, whole grids when somebody asks for them."""

import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy_page, adapters, curves, grid, planner, published, updates
from benchmarks.gpu import parts as gpu
from benchmarks.gpu.suites import CARD, DRY, Suite
from benchmarks.peers.registry import ADAPTERS
from benchmarks.peers.tables import markdown
from benchmarks.peers.work import Work
from benchmarks.published_runs import ARCHITECTURES
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.optimizers import host_share
from tests.emulated import building
from tests.support.cards import need_compiler

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
EVERY_CELL = "every cell has an outcome\n"


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _page(stem: str, document: Any) -> str:
    """The page of results, from the module that measured them."""
    match stem:
        case "accuracy":
            beside = json.loads((RESULTS / "adapters.json").read_text())
            return accuracy_page.page(document, adapters.bars(beside))
        case "cpu" | "gpu":
            return markdown(document, title=stem)
        case "runtime":
            stem = "runtime_page"
    module = importlib.import_module(f"benchmarks.{stem.removesuffix('-8bit')}")
    page: str = (getattr(module, "page", None) or module.markdown)(document)
    return page


SMALL = {
    "accuracy": ("--quick", "--steps", "1", "--work", "WORK"),
    "checkpoints": ("--quick", "--directory", "WORK"),
    "curves": ("--steps", "3", "--seeds", "1", "--picture", "WORK/curves.svg"),
    "launching": ("--quick",),
    "paper": ("--models", "gpt2-1.5b", "--machines", "rtx-3090"),
    "ranks": ("--quick",),
    "runtime": ("--quick", "--rounds", "2", "--pairs", "1", "--work", "WORK"),
    "updates": ("--quick",),
    "updates-8bit": ("--quick", "--shares"),
}
"""How each benchmark measures little; nothing is asked of seconds."""


@pytest.mark.slow
@pytest.mark.parametrize("stem", SMALL)
def test_a_small_run_ends_with_its_page(stem: str, tmp_path: Path) -> None:
    out, work = tmp_path / f"{stem}.json", tmp_path / "work"
    work.mkdir()
    arguments = [argument.replace("WORK", str(work)) for argument in SMALL[stem]]
    _run(f"benchmarks.{stem.removesuffix('-8bit')}", *arguments, "--out", str(out))
    document = json.loads(out.read_text())
    made = out.with_suffix(".md").read_text()
    match stem:
        case "accuracy":
            held = "| peak, never under-predicted | in no slot of any step | held | 4 of 4 |"
            assert held in made
        case "curves":
            first = {name: losses[0][0] for name, losses in document["losses"].items()}
            assert {"rounding", "int8-activations", "low-rank-activations"} < first.keys()
            assert len({loss for name, loss in first.items() if name != "rounding"}) == 1
        case "ranks":
            rows = document["measured"]["rows"]
            assert all(row["device_bytes"] <= row["predicted_bytes"] for row in rows)
    if stem != "accuracy":
        assert made == _page(stem, document)


def test_one_case_of_the_planners_grid(tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    asked = ("--sample", "60", "--machines", "h100-sxm", "--jobs", "1")
    _run("benchmarks.planner", *asked, "--out", str(out))
    (case,) = json.loads(out.read_text())["cases"]
    assert case["gap"] == case["step_seconds"] / case["lower_bound_seconds"] - 1
    assert 0 <= case["gap"] <= 0.05
    assert f"| {case['machine']} | {case['setup']} |" in out.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_sixty_cases_of_the_planners_grid_keep_what_plans_promise() -> None:
    """Bounds are below, baselines above, and most plans are near their bounds."""
    gaps: list[float] = []
    for case in grid.sample(60):
        found = planner.run(case, None)
        assert found.step_seconds is not None, case
        assert found.lower_bound_seconds is not None
        assert found.lower_bound_seconds <= found.step_seconds
        for name, seconds in found.baseline_seconds.items():
            assert seconds is None or found.step_seconds <= seconds * 1.005, (case, name)
        gaps.append(found.step_seconds / found.lower_bound_seconds - 1)
    assert statistics.median(gaps) <= 0.02


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.timeout(1800)
def test_a_dry_run_of_the_gpu_benchmark(tmp_path: Path) -> None:
    """Every cell runs, or says what it lacks; the same command again has nothing left to do."""
    need_compiler("nothing of the GPU benchmark is tried")
    building.load()  # compiled once, and not in the time of a cell
    out = ("--dry-run", "--out", str(tmp_path))
    assert _run("benchmarks.gpu", *out).endswith(EVERY_CELL)
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


@pytest.mark.parametrize("suite", [CARD, DRY], ids=["card", "dry"])
def test_cells_of_the_gpu_benchmark_need_what_precedes_them(suite: Suite) -> None:
    todo = gpu.cells(gpu.PARTS, suite)
    for number, cell in enumerate(todo):
        assert set(cell.needs) <= {one.key for one in todo[:number]}, cell.key
    assert len({cell.key for cell in todo}) == len(todo)
    kinds = {(cell.task, cell.arguments.get("adapter")) for cell in todo}
    assert kinds == {(c.task, c.arguments.get("adapter")) for c in gpu.cells(gpu.PARTS, CARD)}


@pytest.mark.slow
def test_every_peer_runs_on_a_cpu(tmp_path: Path) -> None:
    assert _run("benchmarks.cpu", "--smoke", "--out", str(tmp_path)).endswith(EVERY_CELL)
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


PAGES = (*SMALL, "adapters", "cpu", "front", "gpu", "published", "splits")


@pytest.mark.parametrize("stem", [stem for stem in PAGES if (RESULTS / f"{stem}.json").exists()])
def test_committed_tables_follow_from_committed_results(stem: str) -> None:
    document = json.loads((RESULTS / f"{stem}.json").read_text())
    assert (RESULTS / f"{stem}.md").read_text() == _page(stem, document)
    if stem == "curves":
        assert (ROOT / "docs/training-curves.svg").read_text() == curves.picture(document)


# --- constants of the product that were measured --------------------------------------------------


def _band(ratios: list[float]) -> list[float]:
    return [round(accuracy_page.quantile(sorted(ratios), share), 2) for share in (0.1, 0.9)]


def test_the_error_band_of_estimates_is_the_measured_one() -> None:
    document = json.loads((RESULTS / "accuracy.json").read_text())
    rates = load_hardware("cpu").rates
    assert rates
    ratios = [ratio for *_, ratio in accuracy_page.estimate_ratios(document)]
    assert [rates.error_low, rates.error_high] == _band(ratios)


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
                assert [known.low, known.high, known.runs] == [*_band(ratios), len(ratios)]


def test_the_hosts_shares_of_8_bits_are_the_measured_ones() -> None:
    shares = updates.host_shares(json.loads((RESULTS / "updates-8bit.json").read_text()))
    assert {name: host_share(name) for name in shares} == {
        name: round(share, 4) for name, share in shares.items()
    }
