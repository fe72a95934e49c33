"""`protrain show`, `simulate` and `report` as people call them, and the README's own calls."""

import io
import json
import sys
import zipfile
from pathlib import Path

import pytest

from protrain_plan.presentation.report.page import page_text
from protrain_plan.presentation.report.step import read_step
from protrain_runtime.contract.program.recording import write_recording
from protrain_runtime.contract.records import write_plan, write_profile
from tests.support.commands import ROOT, Result, printed, protrain, ran
from tests.support.reporting_cases import GOLDEN, recorded, small_step

COMMITTED = ROOT / "plans/smollm2-135m-cpu-1100MiB/plan.yaml"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    step = small_step()
    write_profile(step.profile, tmp_path / "profile.yaml")
    write_plan(step.plan, tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def golden(name: str) -> str:
    return (GOLDEN / name).read_text(encoding="utf-8")


def went_well(result: Result) -> str:
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.mark.nightly
def test_show_in_a_pipe_is_the_golden_screen(plan: Path, tmp_path: Path) -> None:
    assert went_well(protrain("show", plan, folder=tmp_path)) == golden("show.txt")
    plain = protrain("show", plan, folder=tmp_path, PYTHONIOENCODING="ascii")
    assert went_well(plain) == golden("show-ascii.txt")


@pytest.mark.nightly
def test_show_as_json_has_what_the_page_draws(plan: Path, tmp_path: Path) -> None:
    data = printed(protrain("show", plan, "--json", folder=tmp_path))
    page = page_text(read_step(plan))
    assert data == json.loads(page.split('id="data">')[1].split("</script>")[0])


@pytest.mark.nightly
def test_simulate_prints_the_golden_summary_and_writes_the_golden_trace(
    plan: Path, tmp_path: Path
) -> None:
    text = went_well(protrain("simulate", plan, "--trace", "trace.json", folder=tmp_path))
    shown = "".join(f"{line.rstrip()}\n" for line in golden("simulate.txt").splitlines())
    assert text == shown + "wrote trace.json\n"
    assert (tmp_path / "trace.json").read_text(encoding="utf-8") == golden("trace.json")
    data = printed(protrain("simulate", plan, "--json", folder=tmp_path))
    assert data == json.loads(golden("simulate.json"))


@pytest.mark.nightly
def test_report_writes_the_page(plan: Path, tmp_path: Path) -> None:
    write_recording(recorded(small_step()), tmp_path / "recording.json")
    arguments = ("report", plan, "-o", "page.html", "--recording", "recording.json")
    assert went_well(protrain(*arguments, folder=tmp_path)) == "wrote page.html\n"
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page == page_text(read_step(plan), recording=recorded(small_step()))


@pytest.mark.slow
def test_report_with_the_front(plan: Path, tmp_path: Path) -> None:
    arguments = ("report", plan, "--pareto", "--points", 3)
    assert went_well(protrain(*arguments, folder=tmp_path)) == "wrote report.html\n"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    front = json.loads(page.split('id="data">')[1].split("</script>")[0])["front"]
    sizes = [point["device_bytes"] for point in front]
    seconds = [point["step_seconds"] for point in front]
    assert len(front) >= 2
    assert sizes == sorted(sizes)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.nightly
def test_the_documented_screen_is_what_is_printed() -> None:
    text = went_well(protrain("show", COMMITTED.relative_to(ROOT), folder=ROOT))
    documented = (ROOT / "docs/looking.md").read_text(encoding="utf-8")
    assert f"$ protrain show {COMMITTED.relative_to(ROOT)}\n{text}```\n" in documented


def test_the_page_s_parts_are_in_the_wheel(tmp_path: Path) -> None:
    build = ("hatchling", "build", "-t", "wheel", "-d", tmp_path)
    assert ran(sys.executable, "-m", *build).returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
        names = set(archive.namelist())
    parts = {
        f"protrain_plan/presentation/report/{name}.{kind}"
        for name in ("page", "stages")
        for kind in ("html", "css", "js")
    }
    assert parts <= names
