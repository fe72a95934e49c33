"""The benchmarks run: one case each here, whole grids when somebody asks for them."""

import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.cuda._sanitizer import Access, AccessType, UnsynchronizedAccessError

from benchmarks import accuracy, front, grid, planner, published
from benchmarks.gpu import parts as gpu
from benchmarks.gpu.suites import CARD, DRY, Suite
from benchmarks.pages import quantile
from benchmarks.peers.building import built
from benchmarks.peers.comparing import (
    limit_text,
    plan_cell,
    planned_cell,
    profile_cell,
    train_cell,
)
from benchmarks.peers.deepspeed_zero import config_of
from benchmarks.peers.registry import ADAPTERS
from benchmarks.peers.tables import compared as compared_rows
from benchmarks.peers.tables import markdown
from benchmarks.peers.testing import reports
from benchmarks.peers.timeline import compared
from benchmarks.peers.work import Work, optimizer_of
from benchmarks.published_models import AsRun, Logits
from benchmarks.published_runs import ARCHITECTURES, PUBLISHED, machine_of, read_published
from benchmarks.runner import RESULTS, ROOT, Results, described, run_all
from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.presets import JsonObject
from protrain_plan.models.sources import ConfigSource, load_source
from protrain_plan.planning.questions.allowance import MEDIAN
from protrain_plan.simulation.timeline import Span
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.program.recording import Event, Recording
from protrain_runtime.diagnostics.matching import model_fingerprint
from tests.emulated import building
from tests.support.cards import need_compiler


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


PAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "accuracy": accuracy.page,
    "front": front.page,
    "planner": planner.page,
    "published": published.page,
    **{name: partial(markdown, title=name) for name in ("cpu", "gpu")},
}
"""What makes a page of a file of results."""
RESULTS_OF_CODE = [path for path in sorted(RESULTS.glob("*.json")) if path.stem in PAGES]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "words", "count"),
    [
        ("planner", ["h100-sxm: llama-3.1-8b"], 1),
        ("front", ["rtx-3090: gpt2-xl"], 1),
        ("published", ["scratch-gpt2"], 1),
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


@pytest.fixture
def emulated() -> None:
    """The device of dry runs, for the processes of cells."""
    need_compiler("nothing of the GPU benchmark is tried")
    building.load()  # compiled once, and not in the time of a cell


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.usefixtures("emulated")
def test_cells_of_a_dry_run_take_a_cards_way(tmp_path: Path) -> None:
    """In processes of their own, under a cap on the device's allocator, into the same table."""
    work = DRY.base
    ran = train_cell("peers", replace(work, cap_bytes=2**30), "save-on-cpu")
    limited = train_cell("peers", replace(work, cap_bytes=60 * 2**20), "plain")
    after = train_cell("peers", replace(work, batch_size=8), "plain", needs=[limited.key])
    sanitizer = next(cell for cell in gpu.cells(["sanitizer"], DRY))
    results = Results(path=tmp_path / "gpu.json")
    todo = [sanitizer, ran, limited, after]
    stop_at = time.monotonic() + 3600
    here = described(work.device)
    assert here == {
        "kind": "emulated",
        "name": "emulated",
        "memory_bytes": 2**32,
        "built_for": None,
    }
    assert run_all(todo, results, command="", stop_at=stop_at, accelerator=here) == 0
    found = results.cells
    reasons = [(found[cell.key]["status"], found[cell.key].get("reason")) for cell in todo]
    assert reasons == [
        ("skipped", "CUDA's sanitizer does not see streams of devices of type 'emulated'"),
        ("ran", None),
        ("did not fit", "out of memory"),
        ("skipped", f"needs {limited.key}: out of memory"),
    ]
    peaks = found[ran.key]["result"]
    assert 0 < peaks["tensor_bytes"] < peaks["device_bytes"] - 48 * 2**20  # its context
    table = markdown(results.document, title="gpu")
    assert "**DRY RUN, on an emulated device: nothing here is a measurement of speed.**" in table
    assert "| 60MiB | 4 | plain | did not fit |" in table


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("emulated")
def test_a_dry_run_of_the_gpu_benchmark(tmp_path: Path) -> None:
    """Every cell runs, or says what it lacks; the same command again has nothing left to do."""
    out = ("--dry-run", "--out", str(tmp_path))
    assert _run("benchmarks.gpu", *out).endswith("every cell has an outcome\n")
    first = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {key: cell["status"] for key, cell in first["cells"].items()}
    assert [key for key, status in statuses.items() if status == "failed"] == []
    assert [key for key, status in statuses.items() if status == "timed out"] == []
    lacking = ("is not installed", "no code for", "parameters in place", "CUDA's sanitizer")
    for key, status in statuses.items():
        reason = first["cells"][key].get("reason", "")
        if status == "skipped":
            assert any(words in reason for words in lacking) or reason.startswith("needs"), reason
        if status == "did not fit":  # peers' larger batch
            assert key.startswith("train/") and "protrain-plan" not in key
    refused = [key for key, status in statuses.items() if status == "refused"]
    assert all(" 100MiB" in key for key in refused)
    assert len(refused) == 2
    page = (tmp_path / "gpu.md").read_text()
    assert "nothing here is a measurement of speed" in page
    assert "| 120MiB | equal bits | equal bits |" in page
    assert "passed" in page
    _run("benchmarks.gpu", *out, "--minutes", "0")
    again = json.loads((tmp_path / "gpu.json").read_text())
    assert again["cells"] == first["cells"]
    assert len(again["runs"]) == 2


def test_what_the_sanitizer_says_is_found_in_what_tests_print() -> None:
    """Its own words, twice for the same two accesses; frames of libraries are left out."""
    here = traceback.StackSummary.from_list(traceback.extract_stack()[-1:])
    here_file = "tests/project/test_benchmarks.py"
    access = Access(AccessType.WRITE, 2, 7, "aten::copy_(Tensor)", ["self"], False, here)
    library = traceback.StackSummary.from_list([(torch.__file__, 1, "other", "other()")])
    before = Access(AccessType.READ, 1, 0, "aten::mm(Tensor)", ["mat2"], False, library)
    said = [str(UnsynchronizedAccessError(at, None, access, before)) for at in (512, 1024)]
    assert reports("\n".join((".....", *said))) == [
        "\n".join(
            [
                "CSAN detected a possible data race on tensor with data pointer 512",
                "Access by stream 7 during kernel:",
                "aten::copy_(Tensor)",
                "writing to argument(s) self",
                "With stack trace:",
                f'File "{here_file}", line {here[0].lineno}, in {here[0].name}',
                "here = traceback.StackSummary.from_list(traceback.extract_stack()[-1:])",
                "Previous access by stream 0 during kernel:",
                "aten::mm(Tensor)",
                "reading from argument(s) mat2",
                "With stack trace:",
                "Trace for tensor allocation not found.",
            ]
        )
    ]


@pytest.mark.slow
def test_every_peer_runs_on_a_cpu(tmp_path: Path) -> None:
    out = ("--smoke", "--out", str(tmp_path))
    assert _run("benchmarks.cpu", *out).endswith("every cell has an outcome\n")
    document = json.loads((tmp_path / "cpu.json").read_text())
    trained = {
        cell["arguments"]["adapter"]: cell
        for cell in document["cells"].values()
        if cell["task"] == "train"
    }
    assert trained.keys() == ADAPTERS.keys()
    for name, cell in trained.items():
        # What the adapter itself says, and nothing else, keeps it from running.
        missing = ADAPTERS[name].missing(Work(**cell["arguments"]["work"]))
        assert (cell["status"], cell.get("reason")) == (
            ("ran", None) if missing is None else ("skipped", missing)
        )
    # The same model, batches and optimizer: losses are plain PyTorch's, but for rounding.
    for name, cell in trained.items():
        if cell["status"] == "ran":
            losses = trained["plain"]["result"]["losses"]
            assert cell["result"]["losses"] == pytest.approx(losses, rel=1e-5), name


WORK = Work(
    model="tiny-llama",
    batch_size=1,
    seq_len=32,
    dtype="float32",
    precision="pure",
    device="cpu",
    num_steps=1,
)


@pytest.mark.slow
def test_a_cell_beyond_its_limits_ends_alone(tmp_path: Path) -> None:
    limited = train_cell("peers", replace(WORK, cap_bytes=8 * 2**20), "plain")
    after = train_cell("peers", replace(WORK, batch_size=2), "plain", needs=[limited.key])
    endless = replace(train_cell("peers", WORK, "plain"), limit_s=0.01)
    results = Results(path=tmp_path / "cells.json")
    stop_at = time.monotonic() + 3600
    assert run_all([limited, after, endless], results, command="", stop_at=stop_at) == 0
    found = Results.at(results.path).cells
    outcomes = [(found[c.key]["status"], found[c.key]["reason"]) for c in (limited, after, endless)]
    assert outcomes == [
        ("did not fit", "out of memory"),
        ("skipped", f"needs {limited.key}: out of memory"),
        ("timed out", "after 0 s"),
    ]


@pytest.mark.slow
def test_a_planned_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    """By the planner, or by the runtime where a plan is for more than there is."""
    small = replace(WORK, cap_bytes=2**20)
    profile = profile_cell("peers", WORK)
    plan, unplanned = plan_cell("peers", WORK, profile), plan_cell("peers", small, profile)
    untrained = planned_cell("peers", small, unplanned)
    results = Results(path=tmp_path / "cells.json")
    stop_at = time.monotonic() + 3600
    assert run_all([profile, plan, unplanned, untrained], results, command="", stop_at=stop_at) == 0
    predicted = results.cells[plan.key]["result"]["device_bytes"]
    tight = replace(WORK, cap_bytes=predicted - 2**20)
    planned = planned_cell("peers", tight, plan)
    assert run_all([planned], results, command="", stop_at=stop_at) == 0
    outcome = results.cells[planned.key]
    assert (outcome["status"], outcome["reason"]) == ("refused", "needs 1.00 MiB more")
    # Without a plan there is nothing to run, for the same reason.
    outcome = results.cells[unplanned.key]
    assert outcome["status"] == "refused"
    assert re.fullmatch(r"needs [\d.]+ MiB more device memory", outcome["reason"])
    assert results.cells[untrained.key]["status"] == "refused"
    assert results.cells[untrained.key]["reason"] == outcome["reason"]
    rows = {(row[1], row[3]): row[4] for row in compared_rows(results.cells)}
    assert rows[limit_text(tight.cap_bytes), "protrain-plan"] == "refused: needs 1.00 MiB more"
    assert rows[limit_text(small.cap_bytes), "protrain-plan"] == f"refused: {outcome['reason']}"


def test_a_run_without_time_leaves_everything_for_the_next(tmp_path: Path) -> None:
    cell = train_cell("peers", WORK, "plain")
    after = train_cell("peers", replace(WORK, batch_size=2), "plain", needs=[cell.key])
    results = Results(path=tmp_path / "cells.json")
    assert run_all([cell, after], results, command="", stop_at=time.monotonic()) == 2
    assert Results.at(results.path).cells == {}


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2"])
def test_a_benchmarks_model_is_the_catalogues(model: str, masters: bool) -> None:
    source, work = load_source(model), replace(WORK, model=model, dtype="bfloat16")
    ours = built(source, work, device=torch.device("cpu"), masters=masters)
    theirs = source.build(dtype="float32" if masters else "bfloat16")
    assert model_fingerprint(ours) == model_fingerprint(theirs)
    names = [name for name, _ in theirs.named_parameters()]  # a tied parameter once
    assert [name for name, _ in ours.named_parameters()] == names
    for (name, buffer), (other, expected) in zip(
        ours.named_buffers(), theirs.named_buffers(), strict=True
    ):
        assert name == other
        assert torch.equal(buffer, expected)
    assert all(not parameter.is_meta for parameter in ours.parameters())


def test_deepspeed_s_optimizer_is_everybody_s() -> None:
    """Its own defaults are others: without weight decay it would train something else."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    defaults = optimizer_of(WORK)([parameter]).defaults
    given = config_of(WORK, stage=2)["optimizer"]["params"]
    assert given == {
        "lr": defaults["lr"],
        "betas": list(defaults["betas"]),
        "eps": defaults["eps"],
        "weight_decay": defaults["weight_decay"],
    }


@pytest.mark.parametrize("suite", [CARD, DRY], ids=["card", "dry"])
def test_cells_of_the_gpu_benchmark_need_what_precedes_them(suite: Suite) -> None:
    todo = gpu.cells(gpu.PARTS, suite)
    seen: set[str] = set()
    for cell in todo:
        assert set(cell.needs) <= seen, cell.key
        assert cell.key not in seen
        seen.add(cell.key)
    assert {cell.part for cell in todo} == set(gpu.PARTS)


def test_a_dry_run_has_cells_of_every_kind_that_a_cards_has() -> None:
    card, dry = (
        {(cell.task, cell.arguments.get("adapter")) for cell in gpu.cells(gpu.PARTS, suite)}
        for suite in (CARD, DRY)
    )
    assert dry == card


def test_lanes_are_compared_by_name() -> None:
    recording = Recording(
        plan_fingerprint="sha256:0",
        step_seconds=4.0,
        events=(
            Event(lane="compute", name="forward a", start_s=0.0, end_s=2.0),
            Event(lane="fetch host", name="fetch 0 @0", start_s=0.0, end_s=0.5),
        ),
    )
    simulated = [
        Span("forward a", "compute", 0.0, 1.0),
        Span("fetch 0 @0", "fetch host", 0.0, 0.25),
    ]
    assert compared(recording, simulated) == {
        "step_seconds": 4.0,
        "simulated_step_seconds": 1.0,
        "lanes": {
            "compute": {"recorded": 2.0, "simulated": 1.0},
            "fetch host": {"recorded": 0.5, "simulated": 0.25},
        },
        "differ_most": [
            {"lane": "compute", "name": "forward a", "recorded_minus_simulated": 1.0},
            {"lane": "fetch host", "name": "fetch 0 @0", "recorded_minus_simulated": 0.25},
        ],
    }


def test_published_runs_have_their_links_and_what_was_measured() -> None:
    runs = read_published().runs
    assert len(runs) >= 45
    for run in runs.values():
        assert run.source.link.startswith("https://")
        assert run.source.date[:2] == "20"
        assert run.source.versions
        assert bool(run.source.path) == bool(run.source.commit), run.name
        assert run.where
        assert run.memory_bytes or run.tokens_per_s
        assert run.memory_bytes is None or run.memory_bytes > 2**30
    asked = [run for run in runs.values() if not run.not_asked]
    assert len(asked) >= 30
    assert {run.architecture for run in asked} >= {"Ampere", "Ada", "Hopper"}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("    optimizer: adamw\n", "    optimiser: adamw\n", "unknown key 'optimiser'"),
        ("link: 'https://github.com/mosaicml", "link: '/mosaicml", "expected a link"),
        ("gpu: h100-sxm, ", "", "missing key 'gpu'"),
        ("devices: 8, ", "", "1 devices and sharding 'full'"),
        ("excluded: 'products in FP8'", "compile: true", "compiled or selectively"),
        ("tokens_per_s: 63147", "memory_is: reserved", "neither memory nor tokens_per_s"),
        ("tokens_per_s: 63147", "tokens_per_s: many", "expected a number"),
        ("model: mpt-760m", "model: mpt-761m", "no model is called 'mpt-761m'"),
    ],
)
def test_published_runs_are_read_strictly(old: str, new: str, problem: str) -> None:
    text = PUBLISHED.read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(RecordError, match=re.escape(problem)):
        read_published(text.replace(old, new, 1))


def test_published_figures_are_compared_as_memory_and_seconds() -> None:
    run = read_published().runs["ao-8b-h100-none"]
    assert run.memory_bytes
    assert run.tokens_per_s
    peak = run.memory_bytes * 9 // 10 / (1 + MEDIAN)  # what is published was reserved
    answer = {"memory_bytes": peak, "tokens_per_s": run.tokens_per_s * 1.25}
    memory, seconds = published.comparisons(
        {"cells": {"": {"task": "published", "status": "ran", "result": {run.name: answer}}}}
    )
    assert memory.off == pytest.approx(-0.1)
    assert seconds.off == pytest.approx(-0.2)
    found = {(bar.name, bar.asked): bar.held for bar in published.bars([memory, seconds])}
    assert found == {
        ("memory", "half are off by at most 5%"): False,
        ("memory", "nine in ten by at most 15%"): True,
        ("memory, reserved", "at least the peak, at most 35% more"): False,
        ("time", "half are off by at most 12%"): False,
        ("time", "nine in ten by at most 30%"): True,
        ("time on Hopper", "no bias above 10%"): False,
    }


def test_models_as_they_ran_have_the_same_loss_and_hold_other_bytes() -> None:
    config: JsonObject = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    batch = next(ConfigSource("tiny", config).batches(batch_size=2, seq_len=16))
    assert isinstance(batch, Mapping)

    def loss_and_bytes(source: ConfigSource) -> tuple[torch.Tensor, int]:
        """Of storages, each counted once."""
        held: dict[int, int] = {}

        def count(saved: torch.Tensor) -> torch.Tensor:
            storage = saved.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return saved

        model = source.build(dtype="bfloat16")
        with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
            loss = model(**batch)[0]
        loss.backward()
        return loss.float().detach(), sum(held.values())

    plain, kept = loss_and_bytes(ConfigSource("tiny", config))
    for logits in get_args(Logits):
        loss, _ = loss_and_bytes(AsRun("tiny", config, logits=logits))
        assert torch.allclose(loss, plain, rtol=2**-7), logits  # bfloat16 has 8 bits
    loss, held = loss_and_bytes(AsRun("tiny", config, one_product=True))
    assert torch.equal(loss, plain)
    width = 2 * 16 * 32 * torch.bfloat16.itemsize
    assert held == kept + 2 * 2 * width, "queries and keys of two blocks"


def test_the_error_band_of_estimates_is_the_measured_one() -> None:
    document = json.loads((RESULTS / "accuracy.json").read_text())
    ratios = accuracy.estimate_ratios(document)
    rates = load_hardware("cpu").rates
    assert rates
    measured = [round(quantile(ratios, share), 2) for share in (0.1, 0.9)]
    assert [rates.error_low, rates.error_high] == measured


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


def test_runs_with_attention_in_triton_are_predicted_with_its_speed() -> None:
    runs = read_published().runs
    older, newer = runs["mosaic-7b-64k-h100"], runs["fms-7b-h100"]
    known = load_hardware("h100-sxm")
    assert machine_of(newer, "h100-sxm") == known
    slower = machine_of(older, "h100-sxm")
    assert known.rates and slower.rates
    forward = known.rates.attention_efficiency / slower.rates.attention_efficiency
    backward = (
        known.rates.attention_backward_efficiency / slower.rates.attention_backward_efficiency
    )
    assert 1.3 <= forward <= 1.5, "of arXiv 2307.08691"
    assert backward == 2
    with_its_own = replace(
        slower.rates,
        attention_efficiency=known.rates.attention_efficiency,
        attention_backward_efficiency=known.rates.attention_backward_efficiency,
    )
    assert replace(slower, rates=with_its_own) == known
    assert older.workload != replace(older, triton_attention=False).workload
